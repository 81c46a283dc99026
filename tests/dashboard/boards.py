"""Draws Grafana's boards with the data of a real run: a fleet of processes, scraped by Prometheus.

PYTHONPATH=tests python tests/dashboard/boards.py docs/pictures

Prometheus answers the expressions of configs/grafana; matplotlib draws the answers, laid out as in Grafana.
The run has a lull, an overload, and a server that dies and comes back.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dashboard.browser import ENGINES, MODEL, PROFILES, Fleet
from helpers import free_port
from PIL import Image

from hetlb.tools.plots import COLOURS, new_figure, save_figure, tidy

ROOT = Path(__file__).parents[2]
#: As slow as large models: two cores carry what keeps all engines busy.
TIME_SCALE = 8
SCRAPE_S, RATE_INTERVAL_S = 5, 20
RUN_S = 420
#: Requests/s of a normal part of the run and of its overload; parts of the run as shares of its time.
RATE, OVERLOAD = 8.0, 18.0
OVERLOADED, DEAD = (0.28, 0.43), (0.62, 0.74)
TENANTS = ("search", "chat", "reports")
CLASSES = {
    "interactive": {"ttft_ms": 2000, "tpot_ms": 400, "attainment": 0.9},
    "background": {"background": True},
}
COLUMNS = 3


def trace(path: Path, seconds: float) -> None:
    """Write the requests of the run: lengths of the demo, arrivals with an overload."""
    draw = random.Random(1)
    with (PROFILES / "trace.csv").open() as file:
        lengths = [(row["input_tokens"], row["output_tokens"]) for row in csv.DictReader(file)]
    with path.open("w") as file:
        print("arrival_s,input_tokens,output_tokens,tenant,class", file=file)
        at = 0.0
        while at < seconds:
            share = at / seconds
            at += draw.expovariate(OVERLOAD if OVERLOADED[0] < share < OVERLOADED[1] else RATE)
            tenant, name = draw.choices(TENANTS, (5, 3, 2))[0], draw.choices(tuple(CLASSES), (7, 3))[0]
            print(f"{at:.3f},{','.join(draw.choice(lengths))},{tenant},{name}", file=file)


@contextmanager
def prometheus(folder: Path, admin: str) -> Iterator[str]:
    """Run Prometheus over the admin listener; give its address."""
    found = shutil.which("prometheus")
    if found is None:
        sys.exit("boards: expected prometheus on PATH (apt-get install prometheus), found none")
    target, port = admin.removeprefix("http://"), free_port()
    config = folder / "prometheus.yml"
    jobs = [{"job_name": "hetlb", "static_configs": [{"targets": [target]}]}]
    config.write_text(json.dumps({"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": jobs}))
    flags = (f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", "--log.level=error")
    process = subprocess.Popen([found, *flags, f"--web.listen-address=127.0.0.1:{port}"])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def answers(url: str, expression: str, begin: float, end: float) -> list[dict[str, Any]]:
    """Return the series of a panel's expression."""
    asked = expression.replace("$__rate_interval", f"{RATE_INTERVAL_S}s").replace("$proxy", ".*")
    query = {"query": asked, "start": begin, "end": end, "step": SCRAPE_S}
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{urllib.parse.urlencode(query)}") as reply:
        found: list[dict[str, Any]] = json.load(reply)["data"]["result"]
    return found


def written(value: float, unit: str) -> str:
    """Return a value of an axis as Grafana writes its unit."""
    if unit == "percentunit":
        return f"{100 * value:g} %"
    if unit == "s":
        return f"{value:g} s" if value >= 1 or not value else f"{1e3 * value:g} ms"
    return f"{value / 1e3:g} K" if value >= 1e3 else f"{value:g}"


def draw_panel(axis: Any, panel: dict[str, Any], url: str, begin: float, end: float) -> None:
    """Draw one panel: lines over a light area, or stacked areas."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    stacked = "stacking" in panel["fieldConfig"]["defaults"]["custom"]
    lines: list[tuple[str, dict[float, float]]] = []
    for target in panel["targets"]:
        for series in answers(url, target["expr"], begin, end):
            metric = series["metric"]
            label = re.sub(r"{{(\w+)}}", lambda name, of=metric: of.get(name[1], ""), target["legendFormat"])
            values = {
                float(at): float(value) for at, value in series["values"] if value not in ("NaN", "+Inf")
            }
            if values:
                lines.append((label.strip() or "all", values))
    times = [begin + SCRAPE_S * step for step in range(int((end - begin) / SCRAPE_S) + 1)]
    minutes = [(at - begin) / 60 for at in times]
    base = [0.0] * len(times)
    for number, (label, values) in enumerate(lines):
        own = [values.get(at, 0.0 if stacked else float("nan")) for at in times]
        top = [low + value for low, value in zip(base, own, strict=True)]
        colour = COLOURS[number % len(COLOURS)]
        axis.plot(minutes, top, color=colour, linewidth=1, label=label)
        axis.fill_between(minutes, base, top, color=colour, alpha=0.2, linewidth=0)
        base = top if stacked else base
    axis.set_title(panel["title"], loc="left", fontsize=9, weight="bold")
    axis.set_xlim(0, (end - begin) / 60)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(lambda value, _: written(value, unit))
    axis.xaxis.set_major_formatter("{x:g} min")
    axis.tick_params(labelsize=7)
    tidy(axis)
    if lines:
        axis.legend(fontsize=6, ncols=3, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    else:
        axis.text(0.5, 0.5, "No data", transform=axis.transAxes, ha="center", color="#888888")


def draw(board: Path, picture: Path, url: str, begin: float, end: float) -> None:
    """Draw one board, its panels in rows of three."""
    document = json.loads(board.read_text())
    panels = document["panels"]
    rows = -(-len(panels) // COLUMNS)
    figure = new_figure(15, 2.6 * rows)
    figure.suptitle(document["title"], x=0.01, ha="left", weight="bold")
    axes = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for axis, panel in zip(axes, panels, strict=False):
        draw_panel(axis, panel, url, begin, end)
    save_figure(figure, picture)
    Image.open(picture).quantize(64).save(picture, optimize=True)


def main(folder: Path, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        fleet = Fleet(Path(scratch))
        slowly = ("--time-scale", str(TIME_SCALE))
        urls = {name: fleet.start_engine(name, profile, 0, *slowly) for name, profile in ENGINES.items()}
        instances = [{"name": name, "url": url, "max_num_seqs": 22} for name, url in urls.items()]
        models = [{"name": MODEL, "classes": CLASSES, "instances": instances}]
        try:
            proxy = {"request_log": False, "tenant_header": "x-team"}
            fleet.serve(urls, proxy=proxy, models=models)
            trace(Path(scratch, "trace.csv"), seconds)
            with prometheus(Path(scratch), fleet.admin) as url:
                begin = float(int(time.time()))
                fleet.load(
                    "--request-rate", "trace", "--trace", f"{scratch}/trace.csv",
                    "--config", f"{scratch}/fleet.yaml", "--tenant-header", "x-team",
                )  # fmt: skip
                dies, port = list(ENGINES)[-1], urllib.parse.urlsplit(urls[list(ENGINES)[-1]]).port or 0
                time.sleep(DEAD[0] * seconds)
                fleet.kill(dies)
                time.sleep((DEAD[1] - DEAD[0]) * seconds)
                fleet.start_engine(dies, ENGINES[dies], port, *slowly)
                time.sleep((1 - DEAD[1]) * seconds)
                for board in sorted((ROOT / "configs" / "grafana").glob("*.json")):
                    draw(board, folder / f"board-{board.stem}.png", url, begin, time.time())
        finally:
            fleet.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=RUN_S, help=f"of the run (default {RUN_S})")
    args = parser.parse_args()
    main(args.folder, args.seconds)
