"""`hetlb pick` behind Envoy beside `hetlb serve`: the same load, the demo's two engines, in turns.

`python bench/scale/parity.py --rounds 4` sends each round's load all at once and at 80 % of what `serve`
reached, through `serve`, through Envoy and `pick`, and through `serve` again: what differs between the two
runs of `serve` is chance. Ratios are taken within a round; a line a load has their medians and ranges. At the
end the event logs of both are replayed. The engines are slowed, so that none of the processes is what limits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from demo import HETLB, ROOT, Processes, bench, engines, envoy, fleet_file, ports_of

OUT = ROOT / "bench" / "results" / "scale-parity.json"
FIGURES = ("output_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_e2el_ms", "fast_share")


def figures(run: dict[str, Any]) -> dict[str, Any]:
    """The figures that are compared, and what says whether a run counts."""
    tokens = {each["name"]: each["total_output_tokens"] for each in run["instances"]}
    found = {key: run[key] for key in FIGURES if key in run}
    found["fast_share"] = tokens["fast"] / sum(tokens.values())
    client = run["client"]
    return {**found, "completed": run["completed"], "failed": run["failed"], "client": client["reasons"]}


def replayed(log: Path) -> dict[str, Any]:
    """Return decisions of an event log that were replayed, and decisions that differ."""
    command = [*HETLB, "simulate", "--event-log", str(log), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    return {"decisions": document["decisions"], "differing_lines": document["differing_lines"]}


def compared(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Per figure: median, least and most of the ratios to the first run of `serve` in the same round."""
    found: dict[str, Any] = {}
    for way in ("pick", "serve again"):
        for key in FIGURES:
            ratios = [each[way][key] / each["serve"][key] for each in rounds]
            at = (statistics.median(ratios), min(ratios), max(ratios))
            found.setdefault(way, {})[key] = [round(value, 4) for value in at]
    return found


def main() -> None:
    """Run the rounds, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=300)
    parser.add_argument("--slower", type=float, default=2.0, help="factor on the engines' times")
    parser.add_argument("--shape", choices=("static", "gateway-api"), default="static")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    document: dict[str, Any] = {"arguments": {**vars(args), "out": args.out.name}, "rounds": []}
    with tempfile.TemporaryDirectory() as scratch, Processes() as processes:
        folder = Path(scratch)
        instances = engines(processes, folder, args.slower)
        path = str(fleet_file(folder, instances))
        logs = {way: folder / f"{way}.jsonl" for way in ("serve", "pick")}
        command = [*HETLB, "serve", "--config", path, "--event-log", str(logs["serve"])]
        serve, line = processes.start(*command, ready="ready on")
        urls = {"serve": line.split()[3]}
        command = [*HETLB, "pick", "--config", path, "--event-log", str(logs["pick"])]
        picker, line = processes.start(*command, ready="pick ready on")
        grpc = int(line.split()[4].rpartition(":")[2])
        _, urls["pick"] = envoy(processes, folder, [grpc], ports_of(instances), args.shape)
        time.sleep(1.5)  # Envoy looks at the health of both sides
        for url in urls.values():  # lengths and speeds are learnt
            bench(url, "inf", args.num_prompts, seed=args.rounds)
        for number in range(args.rounds):
            loads: dict[str, dict[str, Any]] = {}
            rate = "inf"
            for load in ("at once", "80 %"):
                ways = ["serve", "pick", "serve again"]
                runs: dict[str, Any] = {}
                for way in ways if number % 2 == 0 else reversed(ways):
                    run = bench(urls[way.split()[0]], rate, args.num_prompts, seed=number)
                    runs[way] = figures(run)
                    if way == "serve" and rate == "inf":
                        reached = run["request_throughput"]
                    time.sleep(
                        1.5
                    )  # what one learnt from the engines' figures of the other's requests is over
                loads[load] = runs
                rate = f"{0.8 * reached:.3f}"
            document["rounds"].append({"rate": float(rate), **loads})
            print(json.dumps(document["rounds"][-1]), flush=True)
        for process in (serve, picker):
            process.terminate()
            process.wait()
        document["replays"] = {way: replayed(log) for way, log in logs.items()}
    for load in ("at once", "80 %"):
        document[load] = compared([each[load] for each in document["rounds"]])
        print(load, json.dumps(document[load]))
    print(json.dumps(document["replays"]))
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    failed = sum(
        each[load][way]["failed"]
        for each in document["rounds"]
        for load in ("at once", "80 %")
        for way in each[load]
    )
    differing = sum(len(each["differing_lines"]) for each in document["replays"].values())
    if failed or differing:
        sys.exit(f"{failed} requests failed, {differing} decisions differ")


if __name__ == "__main__":
    main()
