"""CPU of picker and Envoy per plain request, per streamed chunk and per long body, beside `hetlb serve`.

The mock engine and the client of bench/proxies; each process's CPU is read from the kernel around a load.
`python bench/scale/costs.py` prints one JSON line per way and load. `--shape gateway-api` for full duplex,
`--ways` out of `serve`, `pick` and `envoy` (Envoy alone: the rest is the picker's),
`--tree FOLDER` for a compiled hetlb (`bench/compile_modules.py build`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from demo import HETLB, ROOT, Processes, envoy, free_port

PROXIES = ROOT / "bench" / "proxies"
sys.path.insert(0, str(PROXIES))
from bodies import MODEL  # noqa: E402
from cpu import cpu_ns  # noqa: E402

LOADS: dict[str, dict[str, Any]] = {
    "plain, one at a time": {"mode": "plain", "connections": 1, "requests": 300, "warmup": 30},
    "plain, 16 connections": {"mode": "plain", "connections": 16, "requests": 1500, "warmup": 100},
    "plain, 100 a second": {"mode": "plain", "connections": 16, "requests": 1000, "warmup": 9, "rate": 100.0},
    "plain, 400 a second": {"mode": "plain", "connections": 16, "requests": 2000, "warmup": 9, "rate": 400.0},
    "400 KB, 100 a second": {
        "mode": "json", "size": 400_000, "connections": 16, "requests": 300, "warmup": 20, "rate": 100.0,
    },
    "paced chunks": {"mode": "paced", "connections": 32, "chunks": 100, "pace_us": 20000, "window_s": 4.0},
}  # fmt: skip


def main() -> None:
    """Measure each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("static", "gateway-api"), default="static")
    parser.add_argument("--ways", default="serve,pick,envoy")
    parser.add_argument("--tree")
    parser.add_argument("--loads", help="loads whose names have one of these words in them")
    args = parser.parse_args()
    if args.tree is not None:
        os.environ["PYTHONPATH"] = args.tree
    hetlb = HETLB if args.tree is None else [sys.executable, "-P", "-m", "hetlb"]
    loads = {
        name: load
        for name, load in LOADS.items()
        if args.loads is None or any(word in name for word in args.loads.split(","))
    }
    with Processes() as processes, tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ports = [free_port(), free_port()]
        engine = subprocess.Popen(
            [sys.executable, str(PROXIES / "mock_engine.py"), "--ports", ",".join(map(str, ports))]
        )
        processes.callback(engine.kill)
        instances = [{"name": f"i{n}", "url": f"http://127.0.0.1:{port}"} for n, port in enumerate(ports)]
        fleet = {
            "version": 1,
            "listen": {"port": 0},
            "admin": {"port": 0},
            "proxy": {"request_log": False},
            "pick": {"port": 0},
            "models": [{"name": MODEL, "instances": instances}],
        }
        path = folder / "fleet.yaml"
        path.write_text(yaml.safe_dump(fleet))
        for way in args.ways.split(","):
            with Processes() as stack:
                if way == "serve":
                    proxy, line = stack.start(*hetlb, "serve", "--config", str(path), ready="ready on")
                    measured, url = {"serve": proxy.pid}, line.split()[3]
                elif way == "envoy":
                    process, url = envoy(stack, folder, None, ports, args.shape)
                    measured = {"envoy": process.pid}
                else:
                    picker, line = stack.start(*hetlb, "pick", "--config", str(path), ready="pick ready on")
                    grpc = int(line.split()[4].rpartition(":")[2])
                    process, url = envoy(stack, folder, [grpc], ports, args.shape)
                    measured = {"picker": picker.pid, "envoy": process.pid}
                client = subprocess.Popen(
                    [sys.executable, str(PROXIES / "client.py")],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )  # fmt: skip
                stack.callback(client.kill)
                host, _, port = url.removeprefix("http://").rpartition(":")
                for name, load in loads.items():
                    fields = {
                        **load,
                        "targets": [(host, int(port))],
                        "pids": list(measured.values()),
                        "engine": ("127.0.0.1", ports[0]),
                        "generator_pids": [engine.pid],
                    }
                    assert client.stdin is not None
                    assert client.stdout is not None
                    before = {each: cpu_ns([pid]) for each, pid in measured.items()}
                    client.stdin.write(json.dumps(fields) + "\n")
                    client.stdin.flush()
                    result = json.loads(client.stdout.readline())
                    used = {each: cpu_ns([pid]) - before[each] for each, pid in measured.items()}
                    total = sum(used.values()) or 1
                    shares = {each: round(each_ns / total, 3) for each, each_ns in used.items()}
                    with contextlib.suppress(KeyError):
                        del result["times"]
                    print(json.dumps({"way": way, "load": name, "cpu_share": shares, **result}), flush=True)


if __name__ == "__main__":
    main()
