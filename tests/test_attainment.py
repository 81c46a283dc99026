"""Attainment of service classes in `/metrics` is what `hetlb bench` measured, whatever serves."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from helpers import HANG_S

import hetlb.tools.demo
from hetlb.tools.loadtest.processes import Helpers, helper_processes

PROFILE = Path(hetlb.tools.demo.__file__).parent / "fast.yaml"
#: No answer of several tokens meets the first, and every answer the others.
CLASSES = {
    "steps": {"tpot_ms": 0.001},
    "patient": {"ttft_ms": 1e3 * HANG_S, "e2e_ms": 1e3 * HANG_S, "attainment": 0.9},
    "background": {"background": True},
}
#: Class and output tokens of each request, in turns; "" is the first class. Of the many tokens a client that
#: waits for the core sees more than the last.
ROWS = (("steps", 1), ("patient", 3), ("", 400), ("background", 2), ("", 1))
COUNT = 40
_SAMPLE = re.compile(r'hetlb_class_requests_total\{model="m",class="([^"]+)",met="(\w+)"\} (\d+)')


async def engines(helpers: Helpers, folder: Path, **tables: Any) -> list[str]:
    """Start two engines, write a fleet file of them; return their URLs."""
    engine_flags = ("--port", "0", "--served-model-name", "m", "--time-scale", "0.1")
    started = [helpers.start("engine", "engine", "--profile", str(PROFILE), *engine_flags) for _ in range(2)]
    for engine in started:
        await engine.ready()
    urls = [engine.urls[0] for engine in started]
    fleet: dict[str, Any] = {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": 0},
        "models": [{"name": "m", "classes": CLASSES, "instances": [{"url": url} for url in urls]}],
        **tables,
    }
    (folder / "fleet.yaml").write_text(yaml.safe_dump(fleet, sort_keys=False))
    return urls


async def started(helpers: Helpers, folder: Path, *command: str) -> list[str]:
    """Start what serves the fleet file of a folder; return its URLs."""
    server = helpers.start("server", *command, "--config", str(folder / "fleet.yaml"))
    await server.ready()
    return server.urls


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
            await asyncio.sleep(0.02)
    return found


async def check(url: str, admin_url: str, folder: Path) -> None:
    """Send requests of all classes; what the bench and `/metrics` say of them agrees."""
    trace = folder / "trace.csv"
    lines = [f"0,20,{tokens},{name}" for name, tokens in ROWS * (COUNT // len(ROWS))]
    trace.write_text("\n".join(("arrival_s,input_tokens,output_tokens,class", *lines)) + "\n")
    bench = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hetlb", "bench", "--url", url, "--trace", str(trace),
        "--request-rate", "40", "--config", str(folder / "fleet.yaml"), "--disable-tqdm",
        "--save-result", "--result-dir", str(folder), "--result-filename", "result.json",
    )  # fmt: skip
    assert await bench.wait() == 0
    found = await counted(admin_url)
    (run,) = json.loads((folder / "result.json").read_text())["runs"]
    assert (run["completed"], run["failed"]) == (COUNT, 0)
    classes = run["classes"]
    shares = {name: (classes[name]["requests"], classes[name]["attainment"]) for name in CLASSES}
    assert shares == {"steps": (24, pytest.approx(2 / 3)), "patient": (8, 1.0), "background": (8, 1.0)}
    assert {name: (of, pytest.approx(met / of)) for name, (met, of) in found.items()} == shares


@pytest.mark.parametrize("way", ["serve", "serve --workers 2"])
async def test_attainment_is_the_clients(tmp_path: Path, way: str) -> None:
    with helper_processes() as helpers:
        await engines(helpers, tmp_path)
        url, admin_url, *_ = await started(helpers, tmp_path, *way.split())
        await check(url, admin_url, tmp_path)
