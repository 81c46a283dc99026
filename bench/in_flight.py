"""Picture of the README: requests in flight at each server, under round robin and under hetlb.

`python bench/in_flight.py` starts the demo's two emulated engines and the proxy, sends the same Poisson
arrivals under either policy, asks `GET /v1/fleet` ten times a second, and writes the picture
`docs/pictures/in-flight.svg` and, in bench/results, the samples that it was drawn from.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from importlib import resources
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from hetlb.tools.loadtest.bodies import RequestBodies
from hetlb.tools.loadtest.fleet_admin import FleetAdmin
from hetlb.tools.loadtest.generator import allow_open_files, run_load
from hetlb.tools.loadtest.processes import Helpers, helper_processes
from hetlb.tools.workload.arrivals import make_plan
from hetlb.tools.workload.trace_formats import read_trace

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "in-flight.svg"
SAMPLES = ROOT / "bench" / "results" / "in-flight.json"
ENGINES, POLICIES = ("fast", "slow"), ("rr", "hetlb")
TITLES = {"rr": "Round robin", "hetlb": "hetlb"}
#: Requests/s: most of what the two engines serve together; half of it is more than the slow one can.
RATE, REQUESTS, EVERY_S = 70.0, 1400, 0.1


async def watch(session: aiohttp.ClientSession, admin: str, seen: list[list[float]]) -> None:
    """Append the seconds since the start and the requests in flight at each engine, until cancelled."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while True:
        async with session.get(f"{admin}/v1/fleet") as reply:
            fleet = await reply.json()
        by_name = {
            each["name"]: each["in_flight"] for model in fleet["models"] for each in model["instances"]
        }
        seen.append([round(loop.time() - start, 2), *(by_name[name] for name in ENGINES)])
        await asyncio.sleep(EVERY_S)


async def measure(data: Path, helpers: Helpers) -> dict[str, Any]:
    """Samples and figures of each policy."""
    plan = make_plan(read_trace(data / "trace.csv"), REQUESTS, RATE, random.Random(0))
    allow_open_files(3 * len(plan))
    urls = await helpers.engines({name: data / f"{name}.yaml" for name in ENGINES}, "m")
    instances = [{"name": name, "url": url} for name, url in urls.items()]
    url, admin = await helpers.proxy({"name": "m", "instances": instances})
    found: dict[str, Any] = {"rate": RATE, "requests": REQUESTS, "engines": ENGINES, "runs": {}}
    async with aiohttp.ClientSession() as session:
        fleet = FleetAdmin(session, admin)
        for policy in POLICIES:
            await fleet.idle()
            await fleet.set_policy(policy)
            seen: list[list[float]] = []
            watching = asyncio.create_task(watch(session, admin, seen))
            bodies = RequestBodies("m", plan, policy, eos_max_tokens=256)
            result = await run_load(plan, bodies, url)
            watching.cancel()
            figures = result.summary(instances=list(ENGINES))
            kept = {
                name: figures[name]
                for name in ("median_ttft_ms", "p99_ttft_ms", "completed", "failed", "duration")
            }
            found["runs"][policy] = {**kept, "verdict": figures["client"]["verdict"], "samples": seen}
    return found


# --- the picture --------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, PANEL_W, PANEL_H, GAP = 860, 300, 46, 58, 370, 190, 52
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #57606a }
  .title { font-size: 15px; font-weight: 600; fill: #1f2328 }
  .grid { stroke: #d8dee4 } .fast { stroke: #0a66c2 } .slow { stroke: #bc4c00 }
  polyline { fill: none; stroke-width: 2; stroke-linejoin: round } text.fast { fill: #0a66c2; stroke: none }
  @media (prefers-reduced-motion: no-preference) {
    polyline { stroke-dasharray: 1; animation: draw 9s linear infinite }
    @keyframes draw { 0% { stroke-dashoffset: 1 } 75%, 100% { stroke-dashoffset: 0 } }
  }
  text.slow { fill: #bc4c00; stroke: none } text.fast, text.slow { font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1 } .title { fill: #f0f6fc } .grid { stroke: #3d444d } .fast { stroke: #4493f8 }
    .slow { stroke: #f0883e } text.fast { fill: #4493f8 } text.slow { fill: #f0883e }
  }
"""


def tick_step(most: float) -> int:
    """Distance of three or four round ticks up to `most`."""
    return next(step for step in (10, 20, 50, 100, 200, 500, 1000) if most <= 4 * step)


def name_place(samples: list[list[float]], column: int, most_s: float) -> tuple[float, float, str]:
    """Second, height and anchor of a line's name: behind its end if there is room, else above its middle."""
    end = samples[-1][0]
    if end < 0.85 * most_s:
        return end + 0.02 * most_s, statistics.median(row[column] for row in samples), "start"
    near = [row[column] for row in samples if abs(row[0] - 0.45 * end) < 0.15 * end]
    return 0.45 * end, max(near), "middle"


def panel(left: float, title: str, run: dict[str, Any], most_s: float, step: int, top: int) -> list[str]:
    """One policy: grid, a line for each engine, and what a client notices."""

    def at(second: float, number: float) -> tuple[float, float]:
        return left + PANEL_W * second / most_s, TOP + PANEL_H * (1 - number / top)

    ttft = f"first token: median {run['median_ttft_ms'] / 1e3:.2g} s, p99 {run['p99_ttft_ms'] / 1e3:.2g} s"
    out = [
        f'<text class="title" x="{left}" y="22">{title}</text>',
        f'<text x="{left + PANEL_W}" y="22" text-anchor="end">{ttft}</text>',
    ]
    for number in range(0, top + 1, step):
        y = at(0, number)[1]
        out.append(f'<line class="grid" x1="{left}" x2="{left + PANEL_W}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{number}</text>')
    for second in range(0, int(most_s) + 1, 5):
        x, y = at(second, 0)
        out.append(f'<text x="{x:.1f}" y="{y + 20:.1f}" text-anchor="middle">{second} s</text>')
    for column, name in enumerate(ENGINES, start=1):
        points = " ".join("{:.1f},{:.1f}".format(*at(row[0], row[column])) for row in run["samples"])
        out.append(f'<polyline pathLength="1" class="{name}" points="{points}"/>')
        x, y, anchor = name_place(run["samples"], column, most_s)
        x, y = at(x, y)
        out.append(
            f'<text class="{name}" x="{x:.1f}" y="{y - 8:.1f}" text-anchor="{anchor}">{name} server</text>'
        )
    return out


def picture(found: dict[str, Any]) -> str:
    """The SVG of both policies on one scale."""
    runs = found["runs"]
    most = max(max(row[1:]) for run in runs.values() for row in run["samples"])
    most_s = max(run["samples"][-1][0] for run in runs.values())
    step = tick_step(most)
    top = step * -(-int(most) // step)
    label = (
        "Requests in flight at a fast and at a slow server: under round robin they pile up at the slow one"
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{label}">',
        f"<style>{STYLE}</style>",
    ]
    for number, policy in enumerate(POLICIES):
        out += panel(LEFT + number * (PANEL_W + GAP), TITLES[policy], runs[policy], most_s, step, top)
    words = (
        f"Requests in flight: {found['rate']:g} requests/s to two emulated servers, one three times as fast "
        "as the other."
    )
    out.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">{words}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    """Measure, keep the samples, draw; `--draw`: from the samples that were kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="draw what was measured before")
    if not parser.parse_args().draw:
        with (
            resources.as_file(resources.files("hetlb.tools.demo")) as data,
            helper_processes() as helpers,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            found = runner.run(measure(data, helpers))
        SAMPLES.write_text(json.dumps(found) + "\n")
    PICTURE.write_text(picture(json.loads(SAMPLES.read_text())))


if __name__ == "__main__":
    main()
