"""Prompts read at one emulated engine and answered by another, through a live proxy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from hetlb.config.fleet import load_fleet
from hetlb.config.profile import load_profile
from hetlb.emulator import EmulatedEngine
from hetlb.emulator.kv_transfer import KvSettings
from hetlb.proxy.service import Service

DEMO = Path(__file__).parents[2] / "hetlb" / "demo"
SCALE = 0.02


class Rig:
    """Engines that hand KV over, the proxy in front of them, and a client."""

    def __init__(
        self, engines: dict[str, EmulatedEngine], service: Service, session: aiohttp.ClientSession
    ) -> None:
        self.engines = engines
        self.service = service
        self.session = session
        self.url = f"http://127.0.0.1:{service.address[1]}"

    async def ask(
        self, path: str = "/v1/completions", timeout_s: float = 20.0, **body: Any
    ) -> tuple[int, str, str | None, str | None]:
        """Status, text, and the instances that answered and that read the prompt."""
        given = {"model": "m", "max_tokens": 6, **body}
        if path == "/v1/completions":
            given.setdefault("prompt", [1] * 500)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self.session.post(self.url + path, json=given, timeout=timeout) as reply:
            raw = (await reply.read()).decode()
            names = reply.headers.get("x-hetlb-instance"), reply.headers.get("x-hetlb-prefill-instance")
            return reply.status, text_of(path, raw, given), *names

    @property
    def handovers(self) -> dict[str, int]:
        return self.service.driver.totals.handovers

    async def idle(self) -> None:
        """Wait until nothing is in flight or held anywhere."""
        async with asyncio.timeout(10):
            while busy := self.busy():
                await asyncio.sleep(0.01)
        assert not busy
        self.service.scheduler.check_integrity()

    def busy(self) -> list[str]:
        scheduler = self.service.scheduler
        found = [f"{scheduler.in_flight} leases"] if scheduler.in_flight else []
        found += [f"{each.name} keeps {each.kv_tokens}" for each in scheduler.instances if each.kv_tokens]
        for name, engine in self.engines.items():
            if engine.kv is not None and (engine.kv.held or engine.running or engine.waiting):
                found.append(f"{name} holds {engine.kv.held}, runs {engine.running}, {engine.waiting} wait")
        return found


def text_of(path: str, raw: str, body: dict[str, Any]) -> str:
    """The text of an answer, streamed or not; all of it where it is an error."""
    if not body.get("stream"):
        found = json.loads(raw)
        if "error" in found:
            return raw
        if path == "/v1/responses":
            return found["output"][0]["content"][0]["text"]
        choice = found["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    text = ""
    for line in raw.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                return raw
            if path == "/v1/responses":
                text += event.get("delta", "") if event["type"] == "response.output_text.delta" else ""
                continue
            for choice in event["choices"]:
                text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


@asynccontextmanager
async def rig(
    folder: Path,
    connector: str = "nixl",
    roles: tuple[str, ...] = ("prefill", "decode"),
    lease_s: float = 5.0,
    **settings: Any,
) -> AsyncIterator[Rig]:
    profile = load_profile(DEMO / "fast.yaml")
    engines = {
        f"e{i}": EmulatedEngine(
            profile,
            served_model_names=("m",),
            time_scale=SCALE,
            kv=KvSettings(connector, lease_s=lease_s, folder=folder, **settings),  # type: ignore[arg-type]
        )
        for i in range(len(roles))
    }
    for engine in engines.values():
        await engine.start()
    transfer: dict[str, Any] = {"connector": connector}
    if connector != "shared-storage":
        transfer["lease_s"] = lease_s
    file = folder / "fleet.yaml"
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
    file.write_text(
        yaml.safe_dump(
            {
                "version": 1,
                "listen": {"port": 0},
                "admin": {"port": 0},
                "scrape": {"interval_s": 0.2},
                "proxy": {"request_log": False},
                "models": [{"name": "m", "kv_transfer": transfer, "instances": instances}],
            }
        )
    )
    service = Service(load_fleet(file))
    await service.start()
    try:
        async with aiohttp.ClientSession() as session:
            found = Rig(engines, service, session)
            async with asyncio.timeout(10):
                while any(each.health.state.value != "up" for each in service.scheduler.instances):
                    await asyncio.sleep(0.01)
            yield found
    finally:
        await service.stop(1.0)
        for engine in engines.values():
            await engine.close()


WHOLE = " t0 t1 t2 t3 t4 t5"


@pytest.mark.parametrize("connector", ["nixl", "mooncake", "shared-storage"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_is_that_of_one_engine_and_its_prompt_is_computed_once(
    tmp_path: Path, connector: str, stream: bool
) -> None:
    async with rig(tmp_path, connector) as fleet:
        for _ in range(5):
            assert await fleet.ask(stream=stream) == (200, WHOLE, "e1", "e0")
        await fleet.idle()
        assert fleet.handovers == {"done": 5}
        kv = fleet.engines["e1"].kv
        assert kv is not None
        assert kv.fetched_tokens >= 5 * 496
        assert fleet.engines["e1"].model.prefilled_tokens <= 5 * 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_every_endpoint_that_generates_is_split(tmp_path: Path, path: str, stream: bool) -> None:
    text = "a" * 4000
    body: dict[str, Any] = (
        {"messages": [{"role": "user", "content": text}]}
        if path == "/v1/chat/completions"
        else {"input": text, "max_output_tokens": 6}
    )
    async with rig(tmp_path) as fleet:
        status, got, *names = await fleet.ask(path, stream=stream, **body)
        assert (status, got.split()[:3], names) == (200, ["t0", "t1", "t2"], ["e1", "e0"])
        await fleet.idle()


@pytest.mark.parametrize(
    "body",
    [{"prompt": [[1] * 300, [2] * 300]}, {"n": 2, "temperature": 1.0}, {"echo": True, "prompt": "x" * 900},
     {"prompt": [1] * 300, "kv_transfer_params": {}}],
    ids=["two prompts", "n", "echo", "the client's own parameters"],
)  # fmt: skip
async def test_what_cannot_be_split_goes_to_one_engine(tmp_path: Path, body: dict[str, Any]) -> None:
    async with rig(tmp_path) as fleet:
        status, _, name, reader = await fleet.ask(**body)
        assert (status, name, reader) == (200, "e1", None)
        await fleet.idle()


async def test_stop_words_minimum_and_usage_are_those_of_the_client(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet:
        body = {
            "model": "m", "prompt": [1] * 400, "max_tokens": 9, "min_tokens": 5, "stop": ["zzz"], "stream":
            True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with fleet.session.post(fleet.url + "/v1/completions", json=body) as reply:
            events = [json.loads(line[6:]) async for line in reply.content if line.startswith(b"data: {")]
        assert events[-1]["usage"] == {"prompt_tokens": 400, "completion_tokens": 9, "total_tokens": 409}
        assert len({event["id"] for event in events}) == 1
        await fleet.idle()


async def test_a_hundred_at_once(tmp_path: Path) -> None:
    async with rig(tmp_path, roles=("prefill", "decode", "decode", "both"), lease_s=20.0) as fleet:
        asked = [fleet.ask(stream=i % 2 == 0, prompt=[i] * (50 + 17 * i)) for i in range(100)]
        for status, text, *_ in await asyncio.gather(*asked):
            assert (status, text) == (200, WHOLE)
        await fleet.idle()
        assert fleet.handovers["done"] > 20
        assert set(fleet.handovers) == {"done"}


async def test_an_error_of_the_first_leg_is_the_answer(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet:
        status, text, *_ = await fleet.ask(temperature=9)
        assert status == 400
        assert "temperature" in text
        await fleet.idle()
