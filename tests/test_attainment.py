"""Attainment of service classes in `/metrics` is what `hetlb bench` measured, whatever serves."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import yaml
from helpers import HANG_S, free_port
from pick.rig import STATIC, Envoy

import hetlb.tools.demo
from hetlb.tools.loadtest.processes import Helpers, helper_processes

PROFILE = Path(hetlb.tools.demo.__file__).parent / "fast.yaml"
#: No answer of several tokens meets the first, and every answer the others.
CLASSES = {
    "steps": {"tpot_ms": 0.001},
    "patient": {"ttft_ms": 1e3 * HANG_S, "e2e_ms": 1e3 * HANG_S, "attainment": 0.9},
    "background": {"background": True},
}
#: Class and output tokens of each request, in turns; "" is the first class.
ROWS = (("steps", 1), ("patient", 3), ("", 20), ("background", 2), ("", 1))
COUNT = 40
_SAMPLE = re.compile(r'hetlb_class_requests_total\{model="m",class="([^"]+)",met="(\w+)"\} (\d+)')


async def front(way: str, helpers: Helpers, folder: Path) -> tuple[str, str, Envoy | None]:
    """Engines and what serves them: its URL, the admin URL, and the Envoy that is to be ended."""
    engine_flags = ("--port", "0", "--served-model-name", "m", "--time-scale", "0.1")
    engines = [helpers.start("engine", "engine", "--profile", str(PROFILE), *engine_flags) for _ in range(2)]
    for engine in engines:
        await engine.ready()
    fleet: dict[str, Any] = {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": 0},
        "pick": {"port": free_port()},
        "models": [{"name": "m", "classes": CLASSES, "instances": [{"url": e.urls[0]} for e in engines]}],
    }
    (folder / "fleet.yaml").write_text(yaml.safe_dump(fleet, sort_keys=False))
    command = ("pick",) if way == "pick" else ("serve", *way.split()[1:])
    server = helpers.start(way, *command, "--config", str(folder / "fleet.yaml"))
    await server.ready()
    if way != "pick":
        return server.urls[0], server.urls[1], None
    ports: Any = [SimpleNamespace(port=int(each.urls[0].rpartition(":")[2])) for each in engines]
    envoy = Envoy(folder / "envoy", STATIC, [fleet["pick"]["port"]], ports).patient()
    await envoy.start()
    return f"http://127.0.0.1:{envoy.port}", server.urls[-1], envoy


async def counted(admin_url: str) -> dict[str, tuple[int, int]]:
    """Requests that met their targets, and all of them, by class, when all are counted."""
    found: dict[str, tuple[int, int]] = {}
    async with aiohttp.ClientSession() as session, asyncio.timeout(HANG_S):
        while sum(of for _, of in found.values()) < COUNT:
            async with session.get(f"{admin_url}/metrics") as reply:
                samples = _SAMPLE.findall(await reply.text())
            for name in {each[0] for each in samples}:
                own = {met: int(count) for of, met, count in samples if of == name}
                found[name] = own.get("true", 0), sum(own.values())
            await asyncio.sleep(0)
    return found


@pytest.mark.parametrize("way", ["serve", "serve --workers 2", pytest.param("pick", marks=pytest.mark.envoy)])
async def test_attainment_is_that_of_the_client(tmp_path: Path, way: str) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"0,20,{tokens},{name}" for name, tokens in ROWS * (COUNT // len(ROWS))]
    trace.write_text("\n".join(("arrival_s,input_tokens,output_tokens,class", *lines)) + "\n")
    with helper_processes() as helpers:
        envoy = None
        try:
            url, admin_url, envoy = await front(way, helpers, tmp_path)
            bench = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "hetlb", "bench", "--url", url, "--trace", str(trace),
                "--request-rate", "40", "--config", str(tmp_path / "fleet.yaml"), "--disable-tqdm",
                "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json",
            )  # fmt: skip
            assert await bench.wait() == 0
            found = await counted(admin_url)
        finally:
            if envoy is not None:
                await envoy.kill()
    (run,) = json.loads((tmp_path / "result.json").read_text())["runs"]
    assert (run["completed"], run["failed"]) == (COUNT, 0)
    classes = run["classes"]
    shares = {name: (classes[name]["requests"], classes[name]["attainment"]) for name in CLASSES}
    assert shares == {"steps": (24, pytest.approx(2 / 3)), "patient": (8, 1.0), "background": (8, 1.0)}
    assert {name: (of, pytest.approx(met / of)) for name, (met, of) in found.items()} == shares
