"""Two `hetlb serve` of one view, one killed under load: no request without a byte of an answer is lost."""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from helpers import HANG_S, turns_until
from options.peers.carriers import CARRIERS, MAKE
from proxy.services import document

from hetlb.balancer.config.profile_file import load_profile
from hetlb.tools.emulator import EmulatedEngine

PROFILE = Path(__file__).parents[3] / "hetlb" / "tools" / "demo" / "fast.yaml"
REQUESTS, AT_ONCE = 240, 24


@asynccontextmanager
async def replica(path: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, str]]:
    """Run `hetlb serve`; give its process and the URLs of its listeners."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hetlb", "serve", "--config", str(path),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(HANG_S):
            line = (await process.stdout.readline()).decode()
        main, admin = re.findall(r"http://[\d.:]+", line)
        yield process, main, admin
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


class Balancer:
    """Clients of a balancer: two addresses in turns, and the other one if no byte of an answer came.

    nginx, HAProxy and Envoy do so; SDKs try a connection that is refused or breaks again.
    """

    def __init__(self, session: aiohttp.ClientSession, urls: list[str]) -> None:
        self._session = session
        self._orders = itertools.cycle([urls, urls[::-1]])
        self.ended: Counter[str] = Counter()
        self.tries: Counter[int] = Counter()

    async def ask(self, number: int) -> None:
        body = {"model": "m", "prompt": f"{number} hello", "max_tokens": 20, "stream": number % 2 == 0}
        for tries, url in enumerate(next(self._orders), 1):
            begun = b""
            try:
                async with self._session.post(f"{url}/v1/completions", json=body) as reply:
                    async for part in reply.content.iter_any():
                        begun += part
                    end = "answered" if reply.status == 200 else f"status {reply.status}"
            except aiohttp.ClientError:
                if not begun and tries < 2:
                    continue
                end = "broken" if begun else "lost"
            self.ended[end] += 1
            self.tries[tries] += 1
            return


@asynccontextmanager
async def view_of(name: str, folder: Path) -> AsyncIterator[str]:
    """Give the URL of a view; its server, if it is no hub in one of the replicas, runs meanwhile."""
    carrier = MAKE[name](folder)
    if name != "hub":
        await carrier.start()
    try:
        yield carrier.url
    finally:
        if name != "hub":
            await carrier.kill()


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_no_request_without_a_byte_is_lost_with_a_replica(tmp_path: Path, carrier: str) -> None:
    profile = load_profile(PROFILE)
    more: dict[str, Any] = {"served_model_names": ["m"], "time_scale": 0.5}
    async with (
        EmulatedEngine(profile, **more) as one,
        EmulatedEngine(profile, **more) as two,
        view_of(carrier, tmp_path) as view,
    ):
        fleet = document(policy={"name": "hetlb"}, shared={"url": view})
        fleet["models"][0]["instances"] = [
            {"name": f"i{n}", "url": each.url} for n, each in enumerate((one, two))
        ]
        path = tmp_path / "fleet.yaml"
        path.write_text(yaml.safe_dump(fleet))
        async with (
            replica(path) as (victim, first, _),
            replica(path) as (_, second, admin),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            client, numbers = Balancer(session, [first, second]), iter(range(REQUESTS))

            async def lane() -> None:
                for number in numbers:
                    if number == REQUESTS // 3:
                        victim.kill()
                    await client.ask(number)

            async with asyncio.timeout(HANG_S):
                await asyncio.gather(*[lane() for _ in range(AT_ONCE)])
                await victim.wait()
            assert client.ended["lost"] == 0
            assert set(client.ended) <= {"answered", "broken"}, client.ended
            assert client.ended["answered"] >= REQUESTS - AT_ONCE
            assert sum(count for tries, count in client.tries.items() if tries > 1) > 0
            async with asyncio.timeout(HANG_S):
                while True:
                    async with session.get(f"{admin}/v1/fleet") as reply:
                        [model] = (await reply.json())["models"]
                    if not any(
                        each["in_flight"] or each["kv_reserved_tokens"] for each in model["instances"]
                    ):
                        break
                    await asyncio.sleep(0.02)
        await turns_until(lambda: not (one.running or two.running or one.waiting or two.waiting))
