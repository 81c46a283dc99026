"""The engines behind the routers: emulated ones with the step times of GPUs, and two vLLM servers on CPU."""

from __future__ import annotations

import contextlib
import math
import os
import random
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
from cpu import measured, prefer
from peers import INSTALLED, MODEL, ROOT

from hetlb.balancer.config.profile_file import Profile, load_profile, with_latency
from hetlb.balancer.config.profile_writer import write_profile
from hetlb.tools.sim.alone import full_tokens_per_s
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.iteration_times import IterationRule
from hetlb.tools.workload.arrivals import make_plan
from hetlb.tools.workload.rows import HASH_BLOCK_TOKENS, Row

#: Columns of an engine, by the series of vLLM's metrics page.
OUTPUT_TOKENS, PREEMPTIONS = "vllm:generation_tokens_total", "vllm:num_preemptions_total"
_BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
#: Step times of wrong profiles over the true ones: of the first engine, the second, the first again ...
WRONG = (1.3, 0.7)


@dataclass(frozen=True)
class Fleet:
    """Engines of one model, by name and profile, the fastest first, each with `slots` sequences at most.

    `lengths` names its requests (`traffic.LENGTHS`), `loads` its loads (`traffic.TRAFFIC`). Times of emulated
    engines are multiplied by `time_scale`, so that no router's CPU is what limits; figures are divided by it.
    `slo_ms` are the operator's limits in the engines' own time.
    """

    name: str
    title: str
    lengths: str
    engines: tuple[tuple[str, str], ...]
    slo_ms: Mapping[str, float]
    loads: tuple[str, ...] = ("first", "80", "once", "95", "waves", "50")
    time_scale: float = 1.0
    slots: int = 64
    #: Seconds of traffic of a run, as the clock goes: enough that most answers end while more come.
    seconds: float = 30.0

    @property
    def real(self) -> bool:
        """True for vLLM servers."""
        return not self.engines

    @cached_property
    def profiles(self) -> list[Profile]:
        """A profile for each engine, as fast as its GPU."""
        found = []
        for _, path in self.engines:
            known = load_profile(ROOT / path)
            engine = msgspec.structs.replace(known.engine, max_num_seqs=self.slots)
            found.append(msgspec.structs.replace(known, engine=engine))
        return found

    def requests_per_s(self, rows: Sequence[Row]) -> float:
        """Requests per second of the slowed engines while all of them are full, by the engine model."""
        mean = sum(row.input_tokens + row.output_tokens for row in rows) / len(rows)
        plan = make_plan(rows, 2000, math.inf, random.Random(0), hash_block_tokens=HASH_BLOCK_TOKENS)
        specs = [
            EngineSpec(each.latency, EngineLimits.from_capacity(each.capacity), prefix_cache=True)
            for each in self.profiles
        ]
        tokens_per_s = sum(full_tokens_per_s(spec, plan, IterationRule.TOKEN) for spec in specs)
        return tokens_per_s / mean / self.time_scale


_L8 = {
    kind: f"profiling/{kind}-llama-3.1-8b-tp1.yaml" for kind in ("b200_sxm", "h100_sxm", "a100_sxm", "l40s")
}
FLEETS = {
    each.name: each
    for each in (
        Fleet(
            "kinds",
            "H100, A100 and L40S, Llama 3.1 8B",
            "sharegpt",
            tuple((kind, _L8[kind]) for kind in ("h100_sxm", "a100_sxm", "l40s")),
            {"ttft": 1000.0, "tpot": 50.0},
            ("first", "80", "once", "95", "waves", "50", "system", "embed"),
            time_scale=4.0,
            seconds=60.0,
        ),
        Fleet(
            "pair",
            "four A100 and four L40S, Llama 3.1 70B, 7 to 1",
            "azure",
            (
                ("a100_sxm-tp4", "profiling/a100_sxm-llama-3.1-70b-tp4.yaml"),
                ("l40s-tp4", "profiling/l40s-llama-3.1-70b-tp4.yaml"),
            ),
            {"ttft": 2000.0, "tpot": 100.0},
            time_scale=0.5,
        ),
        Fleet(
            "eight",
            "two each of B200, H100, A100 and L40S, Llama 3.1 8B",
            "mooncake",
            tuple((f"{kind}-{i}", path) for kind, path in _L8.items() for i in range(2)),
            {"ttft": 5000.0, "tpot": 75.0},
            ("80", "once"),
            time_scale=4.0,
            seconds=60.0,
        ),
        Fleet(
            "tenfold",
            "the two servers on CPU, emulated, 10 to 1",
            "short",
            tuple((name, f"tests/vllm/profiles/{name}.yaml") for name in ("tiny-fast", "tiny-slow")),
            {"ttft": 1000.0},
            ("first", "80", "once"),
            time_scale=4.0,
        ),
    )
}
#: Real vLLM on CPU (`tests/vllm`). The servers share cores, caches and memory with each other and all else.
VLLM = Fleet(
    "vllm",
    "two real vLLM servers on CPU, one thread each, 10 to 1",
    "short",
    (),
    {"ttft": 1000.0},
    ("first", "once"),
)


@dataclass(frozen=True)
class Serving:
    """A fleet that serves: names, ports, a profile of each engine, one that is wrong, its processes."""

    names: tuple[str, ...]
    ports: tuple[int, ...]
    profiles: tuple[Path, ...]
    wrong: tuple[Path, ...]
    pids: tuple[int, ...] = ()

    def counters(self, series: str) -> list[float]:
        """A series of each engine's metrics page."""
        return [_series(_page(port), series) for port in self.ports]

    def idle(self) -> bool:
        """True if no engine has a request."""
        return not any(_series(_page(port), name) for port in self.ports for name in _BUSY)


@contextlib.contextmanager
def serving(fleet: Fleet, folder: Path, cores: Sequence[int]) -> Iterator[Serving]:
    """Start the engines of a fleet; their profiles are in the time of the slowed engines."""
    if fleet.real:
        with _real(folder) as served:
            yield served
        return
    with contextlib.ExitStack() as stack:
        names = tuple(name for name, _ in fleet.engines)
        started, profiles, wrong = [], [], []
        for i, (name, known) in enumerate(zip(names, fleet.profiles, strict=True)):
            made = [
                _scaled(folder / f"{name}-{factor}.yaml", known, factor)
                for factor in (1.0, fleet.time_scale, fleet.time_scale * WRONG[i % 2])
            ]
            profiles.append(made[1])
            wrong.append(made[2])
            started.append(_start(name, made[0], fleet.time_scale, cores, stack))
        ports, pids = (tuple(each) for each in zip(*map(_ready, started), strict=True))
        yield Serving(names, ports, tuple(profiles), tuple(wrong), pids)


def _scaled(path: Path, profile: Profile, factor: float) -> Path:
    """Write a profile with all times multiplied."""
    write_profile(path, with_latency(profile, profile.latency.scaled(factor)))
    return path


def _start(
    name: str, profile: Path, time_scale: float, cores: Sequence[int], stack: contextlib.ExitStack
) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "hetlb", "engine", "--profile", str(profile), "--time-scale", str(time_scale),
        "--served-model-name", MODEL, "--port", "0", "--enable-prefix-caching",
    ]  # fmt: skip
    process = subprocess.Popen(
        measured(command, cores), stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, **dict(INSTALLED)},
    )  # fmt: skip
    prefer(process.pid)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _ready(process: subprocess.Popen[str]) -> tuple[int, int]:
    """Port and process id of an engine, once it serves."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if "ready on" not in line:
        raise RuntimeError(f"{process.args!r} did not start")
    return int(line.strip().rpartition(":")[2]), process.pid


@contextlib.contextmanager
def _real(folder: Path) -> Iterator[Serving]:
    tests = ROOT / "tests" / "vllm"
    sys.path.insert(0, str(tests))
    from pair import pair

    with tempfile.TemporaryDirectory(dir=folder) as logs, pair(Path(logs)) as servers:
        profiles = tuple(tests / "profiles" / f"{server.name}.yaml" for server in servers)
        wrong = tuple(
            _scaled(folder / f"{path.stem}-wrong.yaml", load_profile(path), WRONG[i % 2])
            for i, path in enumerate(profiles)
        )
        names = tuple(server.name for server in servers)
        yield Serving(names, tuple(server.port for server in servers), profiles, wrong)


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
