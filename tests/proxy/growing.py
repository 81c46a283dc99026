"""Fleets that grow and shrink under load, by each source of instances."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml
from helpers import turns_until
from proxy.services import Engine, Running

SIZES = (2, 8, 3)


def fleet(**discovery: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": 0},
        "policy": {"name": "rr"},
        "health": {"slow_start_s": 0},
        "scrape": {"interval_s": 0.05},
        "proxy": {"request_log": False},
        "models": [{"name": "m", "instances": []}],
        "discovery": {"poll_s": 0.05, **discovery},
    }


def instance_file(path: Path, engines: list[Engine]) -> None:
    """Write a file as careful programs do: under another name, then moved to its place."""
    instances = [{"name": f"e{n}", "url": engine.url} for n, engine in enumerate(engines)]
    written = path.with_name(f".{path.name}")
    written.write_text(yaml.safe_dump({"models": [{"name": "m", "instances": instances}]}))
    written.replace(path)


@contextlib.asynccontextmanager
async def load(running: Running) -> AsyncIterator[list[int]]:
    """Requests without a pause in the background; yields their statuses. All must be 200."""
    statuses: list[int] = []
    over = False

    async def ask() -> None:
        while not over:
            statuses.append((await running.ask()).status)

    tasks = [asyncio.create_task(ask()) for _ in range(4)]
    try:
        yield statuses
    finally:
        over = True
        await asyncio.gather(*tasks)
    assert set(statuses) == {200}


def port(url: str) -> int:
    """The port of a URL."""
    return int(url.rpartition(":")[2])


async def converged(running: Running, engines: list[Engine], used: int) -> None:
    """The fleet is the first `used` engines: each of them gets requests, and the others none from now on."""
    ports = {port(engine.url) for engine in engines[:used]}
    await turns_until(lambda: {port(each.spec.url) for each in running.scheduler.instances} == ports)
    names = set(running.names)
    open_ = running.service.driver.exchanges
    await turns_until(
        lambda: all(x.record.lease is None or x.record.lease.instance in names for x in open_.values())
    )
    before = [len(engine.asked) for engine in engines]
    await turns_until(lambda: all(len(e.asked) > n for e, n in zip(engines[:used], before, strict=False)))
    assert [len(engine.asked) for engine in engines[used:]] == before[used:]
