"""`hetlb init` and `hetlb doctor` against servers with one mistake each: it is found, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import io
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from helpers import free_port

from hetlb.cli.main import main
from hetlb.config.fleet import load_fleet

METRICS = """vllm:num_requests_running{{engine="0"}} 0
vllm:num_requests_waiting{{engine="0"}} 0
vllm:{usage}{{engine="0"}} 0
vllm:cache_config_info{{engine="0",block_size="16",num_gpu_blocks="1000",enable_prefix_caching="{caches}"}} 1
process_start_time_seconds {began}
"""


@dataclass(frozen=True)
class Plan:
    """A server: what it says and what is wrong with it."""

    model: str = "m"
    root: str = "org/m"
    key: str | None = None
    metrics: bool = True
    caches: bool = True
    version: str = "0.10.0"
    ahead_s: float = 0.0
    server: str = "uvicorn"
    began: float = 0.0
    several: bool = False


@contextlib.asynccontextmanager
async def server(plan: Plan) -> AsyncIterator[str]:
    """A server by plan; gives its URL."""
    began = plan.began or 1.7e9 + free_port()
    asked = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked
        headers = {
            "Server": plan.server,
            "Date": email.utils.formatdate(time.time() + plan.ahead_s, usegmt=True),
        }
        if (
            request.path.startswith("/v1")
            and plan.key
            and request.headers.get("Authorization") != f"Bearer {plan.key}"
        ):
            return web.Response(status=401, headers=headers)
        if request.path == "/v1/models":
            entry = {"id": plan.model, "object": "model", "root": plan.root, "max_model_len": 4096}
            return web.json_response({"object": "list", "data": [entry]}, headers=headers)
        if request.path == "/version":
            return web.json_response({"version": plan.version}, headers=headers)
        if request.path == "/metrics" and plan.metrics:
            asked += 1
            old = plan.version.startswith("0.6")
            text = METRICS.format(
                usage="gpu_cache_usage_perc" if old else "kv_cache_usage_perc",
                caches=plan.caches,
                began=began + asked * plan.several,
            )
            return web.Response(text=text, headers=headers)
        return web.Response(status=200 if request.path == "/health" else 404, headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def command(*arguments: str, code: int) -> str:
    """Output of a command, run in a thread beside the servers."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert await asyncio.to_thread(main, arguments) == code
    return out.getvalue()


async def wrong(folder: Path, urls: list[str], code: int, **tables: Any) -> list[dict[str, Any]]:
    """Names of the checks that a fleet of these servers fails."""
    instances = [{"name": f"s{number}", "url": url} for number, url in enumerate(urls)]
    path = folder / "fleet.yaml"
    path.write_text(
        yaml.safe_dump({"version": 1, "models": [{"name": "m", "instances": instances}], **tables})
    )
    document = json.loads(await command("doctor", "--config", str(path), "--json", code=code))
    assert all(each.keys() == {"name", "ok", "found", "advice"} for each in document["checks"])
    bad = [each for each in document["checks"] if not each["ok"]]
    assert all(each["advice"] for each in bad)
    return bad


GOOD = Plan()
MISTAKES = {
    "wrong model": (replace(GOOD, model="other"), "model of s1"),
    "key missing": (replace(GOOD, key="k"), "key of s1"),
    "metrics off": (replace(GOOD, metrics=False), "metrics of s1"),
    "clock": (replace(GOOD, ahead_s=90.0), "clock of s1"),
    "proxy in front": (replace(GOOD, server="nginx/1.25"), "directness of s1"),
    "several behind it": (replace(GOOD, several=True), "directness of s1"),
    "prefix caching differs": (replace(GOOD, caches=False), "prefix caching of m"),
    "old vLLM": (replace(GOOD, version="0.6.1"), "version of s1"),
    "other weights under one name": (replace(GOOD, root="org/another"), "weights of m"),
}


async def test_a_good_fleet_passes(tmp_path: Path) -> None:
    async with server(GOOD) as one, server(GOOD) as two:
        assert await wrong(tmp_path, [one, two], 0) == []


@pytest.mark.parametrize("name", MISTAKES)
async def test_each_mistake_is_found_and_no_other(tmp_path: Path, name: str) -> None:
    plan, check = MISTAKES[name]
    async with server(GOOD) as one, server(plan) as two:
        assert [each["name"] for each in await wrong(tmp_path, [one, two], 1)] == [check]


async def test_a_wrong_port_is_found(tmp_path: Path) -> None:
    async with server(GOOD) as one:
        [found] = await wrong(tmp_path, [one, f"http://127.0.0.1:{free_port()}"], 1)
    assert found["name"] == "address of s1"
    assert "refused" in found["found"]


async def test_two_urls_of_one_server_are_found(tmp_path: Path) -> None:
    async with server(GOOD) as one:
        [found] = await wrong(tmp_path, [one, one.replace("127.0.0.1", "localhost")], 1)
    assert (found["name"], found["found"]) == ("one address per server", "s0 and s1 are one process")


async def test_two_listeners_at_one_port_are_found(tmp_path: Path) -> None:
    async with server(GOOD) as one:
        [found] = await wrong(tmp_path, [one], 1, listen={"port": 8099}, admin={"port": 8099})
    assert found["name"] == "ports"


async def test_init_writes_a_fleet_file_that_doctor_accepts(tmp_path: Path) -> None:
    async with server(GOOD) as one, server(GOOD) as two, server(replace(GOOD, model="n")) as three:
        gone = f"http://127.0.0.1:{free_port()}"
        text = await command("init", one, two + "/v1", three, gone, code=0)
        path = tmp_path / "fleet.yaml"
        path.write_text(text)
        fleet = load_fleet(path)
        assert [(each.model, each.url) for each in fleet.instances] == [("m", one), ("m", two), ("n", three)]
        assert "# vLLM 0.10.0, context 4,096 tokens, KV cache 16,000 tokens, prefix caching on" in text
        assert f"# left out: {gone}: connection refused" in text
        await command("doctor", "--config", str(path), code=0)
        await command("serve", "--config", str(path), "--check", code=0)


async def test_init_of_nothing_that_answers_fails() -> None:
    await command("init", f"http://127.0.0.1:{free_port()}", code=1)
