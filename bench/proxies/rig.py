"""Engine, client and the proxies between them, each on its cores, and what one measurement is made of.

One proxy works at a time; the others stand idle beside it, so that the same work goes through all
of them within seconds. What a proxy uses while idle is measured over a quiet window before any load and taken
off its figures; both are kept. A run is void, and says why, when the engine or the client was what limited it
or an answer was not right.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

import cpu
from client import Load
from peers import HERE, RUN, Running, peer

#: Beyond this share of its core the generator is taken to be the bottleneck.
GENERATOR_BUSY = 0.95
#: The engine may write its paced events this much late, at p99.
GENERATOR_LAG_MS = 5.0
#: A paced run counts if at least this share of its events came in time.
KEPT_UP = 0.95
DIRECT = "direct"


@dataclass
class _Placed:
    """A proxy that stands between client and engine, and what it uses while idle."""

    running: Running
    idle_ns_per_s: float = 0.0
    idle_rss: int = 0


class Rig:
    """One engine process with several instances, one client process, and places for proxies."""

    def __init__(self, instances: int, proxy_cores: Sequence[int], generator_cores: Sequence[int]) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        RUN.mkdir(parents=True, exist_ok=True)
        self.engines = free_ports(instances)
        self._proxy_cores, self._generator_cores = proxy_cores, generator_cores
        self._placed: dict[str, _Placed] = {}
        ports = ",".join(map(str, self.engines))
        self._engine = self._start("mock_engine.py", "--ports", ports)
        assert self._engine.stdout is not None
        assert self._engine.stdout.readline() == b"ready\n", "the mock engine did not start"
        self._client = self._start("client.py")

    def _start(self, script: str, *arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            cpu.measured([sys.executable, str(HERE / script), *arguments], self._generator_cores),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        cpu.prefer(process.pid)
        return process

    def place(self, names: Sequence[str], quiet_s: float) -> dict[str, str]:
        """Start proxies afresh and measure what they use while nothing happens; why some did not start."""
        self.remove()
        failed: dict[str, str] = {}
        for name in names:
            port, admin_port = free_ports(2)
            running = Running(peer(name), port, admin_port, self.engines, self._proxy_cores)
            try:
                running.wait_ready()
            except RuntimeError as error:
                failed[name] = str(error)
                running.stop()
            else:
                self._placed[name] = _Placed(running)
        time.sleep(1.0)  # what a start leaves to do
        began = time.monotonic()
        before = {name: cpu.cpu_ns(placed.running.pids) for name, placed in self._placed.items()}
        time.sleep(quiet_s)
        for name, placed in self._placed.items():
            used_ns = cpu.cpu_ns(placed.running.pids) - before[name]
            placed.idle_ns_per_s = used_ns / (time.monotonic() - began)
            placed.idle_rss = cpu.rss_bytes(placed.running.pids)
        return failed

    def remove(self) -> None:
        """Stop all proxies."""
        for placed in self._placed.values():
            placed.running.stop()
        self._placed.clear()

    def measure(self, name: str, **load: Any) -> dict[str, Any]:
        """Run one load (fields of `client.Load`) against a placed proxy, or the engines (`DIRECT`)."""
        placed = self._placed.get(name)
        if name == DIRECT:
            targets, pids = [("127.0.0.1", port) for port in self.engines], []
        elif placed is not None:
            targets, pids = [("127.0.0.1", placed.running.port)], placed.running.pids
        else:
            raise ValueError(f"{name} is not placed")
        spec = Load(
            targets=targets,
            pids=pids,
            generator_pids=[self._engine.pid],
            engine=("127.0.0.1", self.engines[0]),
            cores=sorted({*self._proxy_cores, *self._generator_cores}),
            **load,
        )
        stdin, stdout = _pipes(self._client)
        stdin.write(json.dumps(asdict(spec)).encode() + b"\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError("the client died")
        found: dict[str, Any] = json.loads(line)
        return self._judged(found, spec, placed)

    def _judged(self, found: dict[str, Any], spec: Load, placed: _Placed | None) -> dict[str, Any]:
        if "wall_s" not in found:
            found["void"] = f"no window: {found['errors']}"
            return found
        wall_s = found["wall_s"]
        found["idle_rss"] = placed.idle_rss if placed else 0
        found["idle_ns"] = placed.idle_ns_per_s * wall_s if placed else 0.0
        found["generator_busy"] = found["generator_ns"] / (wall_s * 1e9 * len(self._generator_cores))
        found["proxy_busy"] = found["cpu_ns"] / (wall_s * 1e9 * len(self._proxy_cores))
        ours_s = (found["cpu_ns"] + found["generator_ns"]) / 1e9
        found["others"] = max(0.0, (found["busy_s"] - ours_s) / (wall_s * len(spec.cores)))
        counted = found["events"] if spec.mode == "paced" else found["answers"]
        if counted:
            found["us"] = (found["cpu_ns"] - found["idle_ns"]) / counted / 1e3
        if found["errors"]:
            found["void"] = f"wrong answers: {found['errors']}"
        elif found["generator_busy"] > GENERATOR_BUSY and found["proxy_busy"] < GENERATOR_BUSY:
            found["void"] = f"the generator was busy {found['generator_busy']:.0%}"
        elif spec.mode == "paced" and counted < KEPT_UP * spec.connections * wall_s * 1e6 / spec.pace_us:
            found["void"] = f"it fell behind: {found['events']} events in {wall_s:.1f} s"
        elif found["engine"]["p99_ms"] > GENERATOR_LAG_MS:
            found["void"] = f"the engine lagged {found['engine']['p99_ms']:.1f} ms at p99"
        return found

    def close(self) -> None:
        """Stop everything."""
        self.remove()
        for process in (self._client, self._engine):
            _kill(process)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def free_ports(count: int) -> list[int]:
    """Return ports without a listener, below the range that the kernel gives to connections by itself."""
    found: list[int] = []
    for port in random.sample(range(12000, 30000), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports between 12000 and 30000")


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in _pipes(process):
        pipe.close()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait until no other run of this bench measures a proxy on this machine."""
    RUN.mkdir(parents=True, exist_ok=True)
    with (RUN / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another run to end", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cores(text: str) -> list[int]:
    """`0` or `1,2,3` as a list, checked against what this machine has."""
    allowed = os.sched_getaffinity(0)
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not set(found) <= allowed:
        raise argparse.ArgumentTypeError(f"{text!r}: expected some of {sorted(allowed)}")
    return found
