"""The engines behind the routers: two emulated fleets of unequal engines, and two vLLM servers on CPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from cpu import measured, prefer
from peers import MODEL, ROOT

HERE = Path(__file__).resolve().parent
#: Columns of an engine, by the series of vLLM's metrics page.
OUTPUT_TOKENS, PREEMPTIONS = "vllm:generation_tokens_total", "vllm:num_preemptions_total"
_BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")


@dataclass(frozen=True)
class Engine:
    """One emulated engine: its profile, and so many requests at once that fill it for some seconds."""

    name: str
    profile: Path
    requests: int

    @property
    def slots(self) -> int:
        """Sequences that it runs at once."""
        return int(yaml.safe_load(self.profile.read_text())["engine"]["max_num_seqs"])


@dataclass(frozen=True)
class Fleet:
    """Engines of one model. `time_scale` slows the emulated ones, so that no proxy's CPU is what limits."""

    name: str
    title: str
    engines: tuple[Engine, ...]
    time_scale: float


_DEMO, _OWN = ROOT / "hetlb" / "demo", HERE / "engines"
FLEETS = {
    "pair": Fleet(
        "pair",
        "two engines, 3 to 1 (those of `hetlb demo`)",
        (Engine("fast", _DEMO / "fast.yaml", 300), Engine("slow", _DEMO / "slow.yaml", 100)),
        2.0,
    ),
    "four": Fleet(
        "four",
        "four engines with the step times of an H100, an A100, an L40S and a V100",
        (
            Engine("h100", _OWN / "h100.yaml", 240),
            Engine("a100", _OWN / "a100.yaml", 90),
            Engine("l40s", _OWN / "l40s.yaml", 40),
            Engine("v100", _OWN / "v100.yaml", 30),
        ),
        2.0,
    ),
}
#: Real vLLM on CPU (`tests/vllm`): the servers take both cores, so a router's own CPU is in every figure.
VLLM = Fleet("vllm", "two real vLLM servers on CPU, about 9 to 1", (), 1.0)


@dataclass(frozen=True)
class Serving:
    """A fleet that serves: names, ports and, for hetlb, a profile of each engine."""

    names: tuple[str, ...]
    ports: tuple[int, ...]
    profiles: tuple[Path, ...]
    #: Requests at once that fill each engine.
    requests: tuple[int, ...]
    #: Their processes.
    pids: tuple[int, ...] = ()

    def counters(self, series: str) -> list[float]:
        """A series of each engine's metrics page."""
        return [_series(_page(port), series) for port in self.ports]

    def idle(self) -> bool:
        """True if no engine has a request."""
        return not any(_series(_page(port), name) for port in self.ports for name in _BUSY)


@contextlib.contextmanager
def serving(fleet: Fleet, folder: Path, cores: Sequence[int]) -> Iterator[Serving]:
    """Start the engines of a fleet; the emulated ones are profiled over HTTP as any server is."""
    if fleet.name == VLLM.name:
        with _real(folder) as served:
            yield served
        return
    with contextlib.ExitStack() as stack:
        started = [_start(engine, fleet.time_scale, cores, stack) for engine in fleet.engines]
        ports, pids = (tuple(each) for each in zip(*started, strict=True))
        profiles = _profiled(fleet.engines, ports, folder)
        names = tuple(engine.name for engine in fleet.engines)
        yield Serving(names, ports, profiles, tuple(engine.requests for engine in fleet.engines), pids)


def hetlb_command(*arguments: str) -> list[str]:
    """The command line of this checkout's `hetlb`."""
    return [sys.executable, "-m", "hetlb", *arguments]


def _start(
    engine: Engine, time_scale: float, cores: Sequence[int], stack: contextlib.ExitStack
) -> tuple[int, int]:
    """Port and process."""
    command = hetlb_command(
        "engine", "--profile", str(engine.profile), "--time-scale", str(time_scale),
        "--served-model-name", MODEL, "--port", "0", "--enable-prefix-caching",
    )  # fmt: skip
    process = subprocess.Popen(
        measured(command, cores),
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(),
        start_new_session=True,
    )
    prefer(process.pid)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    line = process.stdout.readline()
    if "ready on" not in line:
        raise RuntimeError(f"{engine.name} did not start")
    return int(line.strip().rpartition(":")[2]), process.pid


def _profiled(engines: Sequence[Engine], ports: Sequence[int], folder: Path) -> tuple[Path, ...]:
    """The profile that `hetlb profile` measures of each engine, all at the same time."""
    profiling = []
    for engine, port in zip(engines, ports, strict=True):
        grid, out = folder / f"{engine.name}-grid.yaml", folder / f"{engine.name}.yaml"
        sizes = {"prefill": [[batch, tokens] for batch in (1, 4) for tokens in (64, 128, 192, 320)]}
        batches = sorted({1, engine.slots // 4, engine.slots // 2, engine.slots})
        sizes["decode"] = [[batch, tokens] for batch in batches for tokens in (32, 96, 160)]
        grid.write_text(yaml.safe_dump(sizes))
        command = hetlb_command(
            "profile", "--url", f"http://127.0.0.1:{port}", "--out", str(out), "--name", engine.name,
            "--grid", str(grid), "--repeats", "1",
        )  # fmt: skip
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=_environment()
        )
        profiling.append((engine, out, process))
    for engine, _, process in profiling:
        _, said = process.communicate()
        if process.returncode:
            raise RuntimeError(f"profiling {engine.name}: {said.decode()[-300:]}")
    return tuple(out for _, out, _ in profiling)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def _real(folder: Path) -> Iterator[Serving]:
    tests = ROOT / "tests" / "vllm"
    sys.path.insert(0, str(tests))
    from pair import pair

    with tempfile.TemporaryDirectory(dir=folder) as logs, pair(Path(logs)) as servers:
        yield Serving(
            tuple(server.name for server in servers),
            tuple(server.port for server in servers),
            tuple(tests / "profiles" / f"{server.name}.yaml" for server in servers),
            (60, 10),
        )


def _page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def _series(page: str, name: str) -> float:
    """The sum over all series of a family."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith((f"{name}{{", f"{name} "))
    )
