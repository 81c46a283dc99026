"""Routing head to head: the same load through hetlb and its peers in front of the same unequal engines.

`make bench-head-to-head` runs every router in front of every fleet, for `--rounds` rounds, each in a job of
its own with engines of its own, some jobs at a time, and sends it every load in turn. The engines are
emulated, with the step times of GPUs, and slowed: the routers' choices are compared, not their own CPU; a run
in which a router may have lacked CPU is marked. `--resume` goes on with a record; `--minutes` is the time
after which no job begins.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.synchronize
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "proxies"))

import cpu
from document import about, save
from fleets import FLEETS, OUTPUT_TOKENS, PREEMPTIONS, VLLM, Fleet, Serving, serving
from peers import INSTALLED, PEERS, ROOT, RUN, Peer, Running, hetlb
from rig import cores, free_ports, one_at_a_time
from tables import show, write_pages
from traffic import TRAFFIC, WARM_UP, Spec, Traffic, rows_for, some_rows

from hetlb.tools.loadtest.runs import measure
from hetlb.tools.workload.arrivals import Load

OUT = ROOT / "bench" / "results" / "head-to-head.json"
#: hetlb's own: policy with its settings, and which profiles the fleet file names.
HETLB = {
    "hetlb": ("hetlb", "the true profiles"),
    "hetlb-first": (
        "hetlb, weights: {first_token_s: 100, finish_s: 0}",
        "the true profiles; first tokens matter most",
    ),
    "hetlb-wrong": ("hetlb", "profiles 30 % too slow and 30 % too fast in turn"),
    "hetlb-none": ("hetlb", "no profiles: speeds are learnt from answers"),
    "hetlb-lmetric": ("lmetric", "the true profiles; policy lmetric"),
}
#: The first engine without a router, for what it gives alone.
ALONE = "fast-alone"
ROUTERS = (
    *HETLB, "smg-cache", "smg-least", "smg-p2c", "dynamo", "lodestar", "vllm-router-p2c", "sglang-router",
    "envoy", "haproxy", "nginx", "litellm", ALONE,
)  # fmt: skip
#: Seconds in which all requests of a burst are sent.
_BURST_S = 2.0
#: A router that used more of a core than this may have been the limit.
MOST_CPU = 0.5
_KEPT = (
    "completed", "failed", "duration", "output_throughput", "total_token_throughput", "mean_ttft_ms",
    "p99_ttft_ms", "mean_e2el_ms", "p99_e2el_ms", "time_to_99_percent_s", "slo_attainment", "request_rate",
    "num_prompts", "plan_sha256",
)  # fmt: skip


def router(name: str, serving: Serving | None = None) -> Peer:
    """Return the router of this name in front of a fleet. hetlb is the running Python's."""
    if name not in HETLB:
        return PEERS[name]
    policy, known = HETLB[name]
    profiles: Sequence[Path | None] = ()
    if serving is not None:
        none = [None] * len(serving.ports)
        profiles = {"hetlb-wrong": serving.wrong, "hetlb-none": none}.get(name, serving.profiles)
    command = hetlb(Path(sys.executable), policy, profiles=profiles)
    peer = PEERS["hetlb-interpreted"]
    return replace(peer, name=name, command=command, log=known, environment=INSTALLED)


def main() -> int:
    """Run what is asked for and not recorded yet; print and record."""
    args = _arguments()
    document: dict[str, Any] = {"about": {}, "runs": []}
    if (args.resume or args.page_only) and args.out.is_file():
        document = json.loads(args.out.read_text())
    if args.page_only:
        write_pages(document)
        return 0
    peers = [router(name) for name in args.routers if name != ALONE]
    for each in peers:
        each.install()
    document["about"] = about("bench/head_to_head/run.py", peers) | {"most_cpu": MOST_CPU, "jobs": args.jobs}
    jobs = _jobs(args, {(r["fleet"], r["traffic"], r["router"], r["round"]) for r in document["runs"]})
    with one_at_a_time():
        for row in _carried_out(jobs, args.jobs, time.monotonic() + 60 * args.minutes):
            document["runs"].append(row)
            save(document, args.out)
            print(_line(row), flush=True)
    print(show(document))
    if args.page:
        write_pages(document)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {**FLEETS, VLLM.name: VLLM}
    routers = dict.fromkeys((*ROUTERS, *PEERS))
    parser.add_argument("--fleets", default=",".join(known), help=f"of {', '.join(known)}")
    parser.add_argument("--traffic", default=",".join(TRAFFIC), help=f"of {', '.join(TRAFFIC)}")
    parser.add_argument("--routers", default=",".join(ROUTERS), help=f"of {', '.join(routers)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=18, help="routers measured at the same time")
    parser.add_argument("--minutes", type=float, default=85.0, help="begin no job later")
    parser.add_argument("--resume", action="store_true", help="keep the runs in --out, do the others")
    parser.add_argument("--cores", type=cores, default=sorted(os.sched_getaffinity(0)), metavar="CORES")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--page", action="store_true", help="renew the tables of docs and README")
    parser.add_argument("--page-only", action="store_true", help="renew them from the recorded result")
    args = parser.parse_args()
    listed = functools.partial(_listed, parser)
    args.fleets = [known[name] for name in listed("--fleets", args.fleets, known)]
    args.traffic = [TRAFFIC[name] for name in listed("--traffic", args.traffic, TRAFFIC)]
    args.routers = listed("--routers", args.routers, routers)
    return args


def _listed(parser: argparse.ArgumentParser, flag: str, text: str, known: Any) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            parser.error(f"{flag}: expected some of {', '.join(known)}, got {name!r}")
    return names


# --- jobs: one process for each router, fleet and round -----------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Loads that routers have to serve in front of one fleet in one round, one router after the other."""

    fleet: Fleet
    number: int
    routers: tuple[tuple[str, tuple[Traffic, ...]], ...]
    cores: tuple[int, ...]


def _jobs(args: argparse.Namespace, recorded: set[tuple[str, str, str, int]]) -> list[Job]:
    """Jobs that are not recorded yet: for each router, in another order each round, then the real servers.

    These take a minute to start, so that one job has all routers.
    """
    emulated: list[Job] = []
    real: list[Job] = []
    for number in range(args.rounds):
        begun, rng = len(emulated), random.Random(number)
        for fleet in args.fleets:
            wanted = []
            for name in rng.sample(args.routers, len(args.routers)):
                missing = tuple(
                    each
                    for each in args.traffic
                    if each.name in fleet.loads
                    and (fleet.name, each.name, name, number) not in recorded
                    and _of_use(name, each)
                )
                wanted += [(name, missing)] if missing else []
            if fleet.real:
                real += [Job(fleet, number, tuple(wanted), tuple(args.cores))] if wanted else []
            else:
                emulated += [Job(fleet, number, (each,), tuple(args.cores)) for each in wanted]
        emulated[begun:] = rng.sample(emulated[begun:], len(emulated) - begun)
    return [*emulated, *real]


def _of_use(name: str, traffic: Traffic) -> bool:
    """True unless it takes long and shows little: slow routers at other loads, the engine alone at a rate."""
    if name == ALONE:
        return traffic.load is None
    return traffic.name == "80" or name in HETLB or not PEERS[name].slow


def _carried_out(jobs: Sequence[Job], at_once: int, deadline: float) -> Iterator[dict[str, Any]]:
    """The rows of all jobs as they come; a job on real servers has the machine for itself."""
    context = multiprocessing.get_context("spawn")
    turn = context.Lock()
    running: dict[multiprocessing.connection.Connection, Job] = {}
    waiting = list(jobs)
    while waiting or running:
        while waiting and time.monotonic() < deadline:
            alone = waiting[0].fleet.real or any(job.fleet.real for job in running.values())
            if len(running) >= (1 if alone else at_once):
                break
            job = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            context.Process(target=_work, args=(job, sender, turn), daemon=True).start()
            sender.close()
            running[receiver] = job
        if not running:
            return
        for ready in multiprocessing.connection.wait(list(running)):
            assert isinstance(ready, multiprocessing.connection.Connection)
            receiver = ready
            try:
                yield receiver.recv()
            except EOFError:
                del running[receiver]


def _work(
    job: Job, sender: multiprocessing.connection.Connection, turn: multiprocessing.synchronize.Lock
) -> None:
    """Carry out one job; rows go to `sender`. Jobs start in `turn`: a start takes all cores for seconds."""
    os.setsid()
    cpu.become_measured(os.getppid(), job.cores)
    cpu.prefer(os.getpid())
    RUN.mkdir(parents=True, exist_ok=True)
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        tempfile.TemporaryDirectory(prefix=f"head-{job.fleet.name}-", dir=RUN) as scratch,
        _taking(turn) as pass_on,
        serving(job.fleet, Path(scratch), job.cores) as engines,
    ):
        for name, loads in job.routers:
            with _placed(name, engines, job.cores, Path(scratch)) as (url, pids):
                work = _Work(job, name, engines, url, pids, runner)
                for each in loads:
                    pass_on()
                    sender.send(work.one(each))


@contextlib.contextmanager
def _taking(turn: multiprocessing.synchronize.Lock) -> Iterator[Callable[[], None]]:
    """Take the turn; what it gives passes it on `_BURST_S` later, so that a burst is sent undisturbed."""
    turn.acquire()
    passed: list[threading.Timer] = []

    def pass_on() -> None:
        if not passed:
            passed.append(threading.Timer(_BURST_S, turn.release))
            passed[0].start()

    try:
        yield pass_on
    finally:
        pass_on()


@contextlib.contextmanager
def _placed(
    name: str, engines: Serving, cores: Sequence[int], folder: Path
) -> Iterator[tuple[str, list[int]]]:
    """Address and processes of a router in front of the engines; the first engine's for `ALONE`."""
    if name == ALONE:
        yield f"http://127.0.0.1:{engines.ports[0]}", []
        return
    port, admin_port = free_ports(2)
    started = Running(router(name, engines), port, admin_port, engines.ports, cores, folder)
    try:
        started.wait_ready()
        yield f"http://127.0.0.1:{port}", started.pids
    finally:
        started.stop()


class _Work:
    """The loads of one router, one after the other."""

    def __init__(
        self, job: Job, name: str, engines: Serving, url: str, pids: list[int], runner: asyncio.Runner
    ) -> None:
        self._job, self._name, self._engines, self._runner = job, name, engines, runner
        self._url, self._pids = url, pids
        self._rates: dict[str, float] = {}
        self._warm = False

    def one(self, traffic: Traffic) -> dict[str, Any]:
        """The row of one load."""
        if not traffic.fresh and not self._warm:
            self._warm = True
            self._send("warm-up", WARM_UP, self._full_rps("") / 2 or math.inf)
            self._settle()
        fleet, engines, scale = self._job.fleet, self._engines, self._job.fleet.time_scale
        rate, count = traffic.rate_and_count(fleet, self._full_rps(traffic.kind))
        before = [engines.counters(series) for series in (OUTPUT_TOKENS, PREEMPTIONS)]
        processes = ([os.getpid()], self._pids, engines.pids)
        began, used = time.monotonic(), [cpu.cpu_ns(each) for each in processes]
        run = self._send(traffic.name, count, rate, traffic)
        wall_s = time.monotonic() - began
        busy = [
            (cpu.cpu_ns(each) - before_ns) / 1e9 / wall_s
            for each, before_ns in zip(processes, used, strict=True)
        ]
        self._settle()
        after = [engines.counters(series) for series in (OUTPUT_TOKENS, PREEMPTIONS)]
        tokens, preemptions = (
            [new - old for old, new in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)
        )
        row: dict[str, Any] = {
            "fleet": fleet.name, "traffic": traffic.name,
            "router": self._name, "round": self._job.number,
        }  # fmt: skip
        row |= {key: _in_engine_time(key, run[key], scale) for key in _KEPT}
        shares = zip(engines.names, tokens, strict=True)
        row["shares"] = {each: got / (sum(tokens) or 1) for each, got in shares}
        row["preemptions"] = sum(preemptions)
        row["cores"] = dict(zip(("client", "router", "engines"), busy, strict=True))
        row["client_lag_ms"] = run["client"]["p99_loop_lag_ms"]
        row["client"] = run["client"]["reasons"]
        row["errors"] = run["error_examples"]
        return row

    def _full_rps(self, kind: str) -> float:
        """Requests per second of a kind while all engines are full, simulated once; 0.0 if not known."""
        fleet = self._job.fleet
        if kind not in self._rates:
            rows = rows_for(fleet.lengths, kind)
            self._rates[kind] = 0.0 if fleet.real else fleet.requests_per_s(rows)
        return self._rates[kind]

    def _send(self, label: str, count: int, rate: float, traffic: Traffic | None = None) -> dict[str, Any]:
        """Same arrivals and lengths for every router of a round, prompts of its own for each run."""
        fleet, number = self._job.fleet, self._job.number
        kind = "" if traffic is None else traffic.kind
        rows = some_rows(fleet.lengths, kind, count, random.Random(f"{fleet.name}/{label}/{number}"))
        spec = Spec(
            url=self._url, model="tiny", load=Load(rows, waves=None if traffic is None else traffic.waves),
            seed=number, text=True, salt=f"{time.time_ns()}/{self._name}/{label}", real=fleet.real,
            slo_s={each: ms * fleet.time_scale / 1e3 for each, ms in fleet.slo_ms.items()},
        )  # fmt: skip
        return self._runner.run(measure(spec, rate)).run

    def _settle(self) -> None:
        """Wait until the engines have nothing to do, and a second more: every view of them is fresh then."""
        while not self._engines.idle():
            time.sleep(0.1)
        time.sleep(1.0)


def _in_engine_time(key: str, value: Any, scale: float) -> Any:
    """A figure of the slowed engines as it is at their own speed."""
    if value is None or scale == 1.0 or value == "inf":
        return value
    if key.endswith(("_ms", "_s")) or key == "duration":
        return value / scale
    return value * scale if key.endswith("throughput") or key == "request_rate" else value


def _line(row: dict[str, Any]) -> str:
    shares = " ".join(f"{share:.0%}" for share in row["shares"].values())
    return (
        f"{row['fleet']:5s} {row['traffic']:6s} {row['round']} {row['router']:16s} "
        f"{row['total_token_throughput']:7,.0f} tokens/s  TTFT {row['mean_ttft_ms']:6.0f} "
        f"p99 {row['p99_ttft_ms']:6.0f} ms  E2E {row['mean_e2el_ms'] / 1e3:5.1f} "
        f"p99 {row['p99_e2el_ms'] / 1e3:5.1f} s  SLO {row['slo_attainment'] or 0:.0%}  {shares}  "
        f"failed {row['failed']}  cores {sum(row['cores'].values()):.2f} router {row['cores']['router']:.2f} "
        f"{' '.join(row['client'])}"
    )


if __name__ == "__main__":
    sys.exit(main())
