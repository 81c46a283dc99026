"""A proxy in front of emulated engines that hand KV blocks over, for the tests of split requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from helpers import HANG_S
from proxy.services import PatientService

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.config.profile_file import Profile, load_profile
from hetlb.balancer.fleet.service import Service
from hetlb.cli.serving_options import OPTIONS
from hetlb.tools.emulator import EmulatedEngine
from hetlb.tools.emulator.kv_transfer import KvSettings
from hetlb.tools.sim.integrity import check_scheduler

DEMO = Path(__file__).parents[3] / "hetlb" / "tools" / "demo"
SCALE = 0.02
#: Six tokens of any emulated engine.
WHOLE = " t0 t1 t2 t3 t4 t5"


class Rig:
    """Engines that hand KV over, the proxy in front of them, and a client."""

    def __init__(
        self, engines: dict[str, EmulatedEngine], service: Service, session: aiohttp.ClientSession
    ) -> None:
        self.engines = engines
        self.service = service
        self.session = session
        self.url = f"http://127.0.0.1:{service.address[1]}"
        #: What its engines are made of.
        self.profile: Profile
        self.settings: KvSettings
        self.time_scale: float

    async def ask(
        self, path: str = "/v1/completions", timeout_s: float = HANG_S, **body: Any
    ) -> tuple[int, str, str | None, str | None]:
        """Status, text, and the instances that answered and that read the prompt."""
        given = {"model": "m", "max_tokens": 6, **body}
        if path == "/v1/completions":
            given.setdefault("prompt", [1] * 500)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self.session.post(self.url + path, json=given, timeout=timeout) as reply:
            raw = (await reply.read()).decode()
            names = reply.headers.get("x-hetlb-instance"), reply.headers.get("x-hetlb-prefill-instance")
            return reply.status, text_of(raw, given), *names

    @property
    def handovers(self) -> dict[str, int]:
        """Return the number of hand-overs by result, where there are some."""
        return {name: count for name, count in self.service.driver.totals.kv_transfers.items() if count}

    async def idle(self) -> None:
        """Wait until nothing is in flight or held anywhere."""
        async with asyncio.timeout(HANG_S):
            while busy := self.busy():
                await asyncio.sleep(0.01)
        assert not busy
        check_scheduler(self.service.scheduler)

    def busy(self) -> list[str]:
        scheduler = self.service.scheduler
        found = [f"{scheduler.in_flight} leases"] if scheduler.in_flight else []
        found += [f"{each.name} keeps {each.kv_tokens}" for each in scheduler.instances if each.kv_tokens]
        if unjudged := scheduler.placement.splits.transfers.checks.due:
            found.append(f"{unjudged} transfers have no verdict")
        for name, engine in self.engines.items():
            if engine.kv is not None and (engine.kv.held or engine.running or engine.waiting):
                found.append(f"{name} holds {engine.kv.held}, runs {engine.running}, {engine.waiting} wait")
        return found


def text_of(raw: str, body: dict[str, Any]) -> str:
    """The text of an answer, streamed or not; all of it where it is an error."""
    if not body.get("stream"):
        found = json.loads(raw)
        if "error" in found:
            return raw
        choice = found["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    text = ""
    for line in raw.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                return raw
            for choice in event["choices"]:
                text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


@asynccontextmanager
async def rig(
    folder: Path,
    connector: str = "nixl",
    roles: tuple[str, ...] = ("prefill", "decode"),
    lease_s: float = 20.0,
    time_scale: float = SCALE,
    connectors: tuple[str | None, ...] = (),
    layers: tuple[int, ...] = (),
    heartbeat_s: float = 0.0,
    log: Path | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """Engines e0, e1, ... with these roles; without a connector where `connectors` has None."""
    profile = load_profile(DEMO / "fast.yaml")
    of_all = KvSettings(connector, lease_s=lease_s, **settings)  # type: ignore[arg-type]
    engines = {}
    for i in range(len(roles)):
        own = connectors[i] if connectors else connector
        settings_of_it = replace(of_all, layers=layers[i]) if layers else of_all
        engine = EmulatedEngine(
            profile,
            served_model_names=("m",),
            time_scale=time_scale,
            kv=settings_of_it if own is not None else None,
        )
        await engine.start()
        engines[f"e{i}"] = engine
    transfer = {"connector": connector.removesuffix("-push"), "lease_s": lease_s}
    instances = [
        {
            "name": name,
            "url": engine.url,
            "role": role,
            "kv_bootstrap": engine.url,
            "profile": str(DEMO / "fast.yaml"),
        }
        for (name, engine), role in zip(engines.items(), roles, strict=True)
    ]
    try:
        async with serving(folder, transfer, instances, heartbeat_s, log) as (service, session):
            found = Rig(engines, service, session)
            found.profile, found.settings, found.time_scale = profile, of_all, time_scale
            yield found
    finally:
        for engine in engines.values():
            await engine.close()


@asynccontextmanager
async def serving(
    folder: Path,
    transfer: dict[str, Any],
    instances: list[dict[str, Any]],
    heartbeat_s: float = 0.0,
    log: Path | None = None,
) -> AsyncIterator[tuple[Service, aiohttp.ClientSession]]:
    """A proxy in front of these instances, all of which are up, and a client."""
    document = {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": 0},
        "scrape": {"interval_s": 0.2},
        "proxy": {"request_log": False, "heartbeat_s": heartbeat_s},
        "models": [{"name": "m", "kv_transfer": transfer, "instances": instances}],
    }
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump(document))
    service = PatientService(load_fleet(file), OPTIONS, log)
    await service.start()
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(HANG_S):
            while any(each.evidence.health.state.value != "up" for each in service.scheduler.instances):
                await asyncio.sleep(0.01)
            yield service, session
    finally:
        await service.stop(1.0)
