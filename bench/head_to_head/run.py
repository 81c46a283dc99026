"""Routing head to head: the same load through hetlb and its peers in front of the same unequal engines.

`python bench/head_to_head/run.py --page` starts the engines of each fleet, measures them alone, starts all
routers in front of them and sends every load through each in turn, in another order each round. The engines
are emulated and slowed: the routers' choices are compared, not their own CPU. The record says how full the
machine was. `--resume` goes on with a record; `--minutes` begins no run after so many.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "proxies"))

import cpu
from document import about, save
from fleets import FLEETS, OUTPUT_TOKENS, PREEMPTIONS, VLLM, Fleet, Serving, serving
from peers import PEERS, ROOT, RUN, Peer, Running, hetlb
from rig import cores, free_ports, one_at_a_time
from tables import show, write_pages
from traffic import TRAFFIC, Spec, Traffic

from hetlb.loadtest.runs import measure

OUT = ROOT / "bench" / "results" / "head-to-head.json"
#: hetlb's own two: with a measured profile of each engine, and with none.
HETLB = {"hetlb": "measured profiles", "hetlb-no-profiles": "no profiles: speeds are learnt from answers"}
ROUTERS = (
    *HETLB, "vllm-router", "vllm-router-rr", "vllm-router-p2c", "sglang-router", "sglang-router-p2c",
    "envoy", "haproxy", "nginx", "litellm",
)  # fmt: skip
#: Requests before the first run of a round, at half load, not measured: speeds and lengths are learnt.
WARM_UP = 60
#: A run of real servers has fewer requests.
AT_ONCE, AT_ONCE_REAL = 300, 100
_KEPT = (
    "completed", "failed", "duration", "output_throughput", "total_token_throughput", "mean_ttft_ms",
    "p99_ttft_ms", "mean_e2el_ms", "p99_e2el_ms", "request_rate", "num_prompts", "plan_sha256",
)  # fmt: skip


def router(name: str, serving: Serving | None = None) -> Peer:
    """The router of this name in front of a fleet. hetlb is this checkout, interpreted: CPU is no matter."""
    if name not in HETLB:
        return PEERS[name]
    profiles: Sequence[Path | None] = ()
    if serving is not None:
        profiles = serving.profiles if name == "hetlb" else [None] * len(serving.ports)
    command = hetlb(Path(sys.executable), "hetlb", profiles=profiles)
    return replace(PEERS["hetlb-interpreted"], name=name, command=command, log=HETLB[name])


def main() -> int:
    """Run what is asked for and not recorded yet; print and record."""
    args = _arguments()
    if args.page_only:
        write_pages(json.loads(args.out.read_text()))
        return 0
    document: dict[str, Any] = {"about": {}, "alone": [], "runs": []}
    if args.resume and args.out.is_file():
        document = json.loads(args.out.read_text())
    for name in args.routers:
        router(name).install()
    document["about"] = about("bench/head_to_head/run.py", map(router, args.routers))
    document["about"]["lanes"] = len(args.fleets) * args.rounds
    deadline = time.monotonic() + 60 * args.minutes
    with one_at_a_time():
        for kind, row in _lanes(args, document, deadline):
            document[kind].append(row)
            save(document, args.out)
            print(_line(kind, row), flush=True)
    print(show(document))
    if args.page:
        write_pages(document)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {**FLEETS, VLLM.name: VLLM}
    listed = functools.partial(_listed, parser)
    parser.add_argument("--fleets", default="pair,four", help=f"of {', '.join(known)}")
    parser.add_argument("--traffic", default=",".join(TRAFFIC), help=f"of {', '.join(TRAFFIC)}")
    parser.add_argument("--routers", default=",".join(ROUTERS), help=f"of {', '.join([*HETLB, *PEERS])}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--wait-while", type=Path, metavar="FILE", help="begin no run while it exists")
    parser.add_argument("--resume", action="store_true", help="keep the runs in --out, do the others")
    parser.add_argument("--cores", type=cores, default=sorted(os.sched_getaffinity(0)), metavar="CORES")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--page", action="store_true", help="renew the tables of docs and README")
    parser.add_argument("--page-only", action="store_true", help="renew them from the recorded result")
    args = parser.parse_args()
    args.fleets = [known[name] for name in listed("--fleets", args.fleets, known)]
    args.traffic = [TRAFFIC[name] for name in listed("--traffic", args.traffic, TRAFFIC)]
    args.routers = listed("--routers", args.routers, {**HETLB, **PEERS})
    return args


def _listed(parser: argparse.ArgumentParser, flag: str, text: str, known: Any) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            parser.error(f"{flag}: expected some of {', '.join(known)}, got {name!r}")
    return names


# --- lanes: one process for each fleet and round ------------------------------------------------------------


def _lanes(
    args: argparse.Namespace, document: dict[str, Any], deadline: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of all fleets as they come; the real servers need the machine for themselves."""
    recorded = {(run["fleet"], run["traffic"], run["router"], run["round"]) for run in document["runs"]}
    emulated, real = [], []
    alone: dict[tuple[str, int, str], float] = {}
    for row in document["alone"]:
        for traffic in row["traffic"]:
            key = (row["fleet"], row["round"], traffic)
            alone[key] = alone.get(key, 0.0) + row["request_throughput"]
    for fleet, number in itertools.product(args.fleets, range(args.rounds)):
        lane = _Lane(fleet, number, args, recorded, alone, deadline)
        (real if fleet.name == VLLM.name else emulated).append(lane)
    for lanes in (emulated, *([lane] for lane in real)):
        yield from _side_by_side(lanes)


def _side_by_side(lanes: Sequence[_Lane]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of lanes that run at the same time, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    receivers = []
    for lane in lanes:
        receiver, sender = context.Pipe(duplex=False)
        context.Process(target=lane.run, args=(sender,), daemon=True).start()
        sender.close()
        receivers.append(receiver)
    while receivers:
        for receiver in multiprocessing.connection.wait(receivers):
            assert isinstance(receiver, multiprocessing.connection.Connection)
            try:
                yield receiver.recv()
            except EOFError:
                receivers.remove(receiver)


class _Lane:
    """All runs of one fleet in one round, with engines and routers of its own."""

    def __init__(
        self,
        fleet: Fleet,
        number: int,
        args: argparse.Namespace,
        recorded: set[tuple[str, str, str, int]],
        alone: dict[tuple[str, int, str], float],
        deadline: float,
    ) -> None:
        self._fleet, self._number = fleet, number
        self._traffic, self._routers, self._cores = args.traffic, args.routers, args.cores
        self._wait_while, self._deadline = args.wait_while, deadline
        self._recorded, self._recorded_alone = recorded, alone

    def run(self, sender: multiprocessing.connection.Connection) -> None:
        """All that is not recorded; rows go to `sender`."""
        os.setsid()
        cpu.become_measured(os.getppid(), self._cores)
        cpu.prefer(os.getpid())
        self._sender = sender
        wanted = [
            name for name in self._routers if any(name in self._missing(each) for each in self._traffic)
        ]
        if not wanted:
            return
        RUN.mkdir(parents=True, exist_ok=True)
        with (
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as self._runner,
            tempfile.TemporaryDirectory(prefix=f"head-{self._fleet.name}-", dir=RUN) as scratch,
            serving(self._fleet, Path(scratch), self._cores) as self._engines,
        ):
            capacity = {}
            for each in {traffic.rows: traffic for traffic in self._traffic}.values():
                # A round that goes on has the rates that it began with.
                known = self._recorded_alone.get((self._fleet.name, self._number, each.name))
                capacity[each.rows] = self._alone(each) if known is None else known
            with _Placed(wanted, self._engines, Path(scratch), self._cores) as placed:
                for each in self._traffic:
                    for name in self._missing(each):
                        if not self._go_on():
                            return
                        self._warm_up(placed, name, capacity[each.rows])
                        self._sender.send(("runs", self._one(placed[name], name, each, capacity[each.rows])))

    def _go_on(self) -> bool:
        """True when another run may begin, False if none may any more."""
        while self._wait_while is not None and self._wait_while.exists():
            time.sleep(0.2)
        return time.monotonic() < self._deadline

    def _missing(self, traffic: Traffic) -> list[str]:
        """The routers whose run is not recorded, in the order of this round and load."""
        turn = list(TRAFFIC).index(traffic.name) + 5 * self._number + 3 * len(self._fleet.engines)
        first = turn % len(self._routers)
        order = [*self._routers[first:], *self._routers[:first]]
        case = (self._fleet.name, traffic.name)
        return [name for name in order if (*case, name, self._number) not in self._recorded]

    def _alone(self, traffic: Traffic) -> float:
        """Requests per second that all engines reach alone, each with as many at once as fill it."""
        specs, number = [], self._number
        for name, port, count in zip(
            self._engines.names, self._engines.ports, self._engines.requests, strict=True
        ):
            rows = traffic.rows(count, random.Random(number))
            specs.append((name, self._spec(f"http://127.0.0.1:{port}", rows, f"alone/{name}/{number}")))

        async def all_at_once() -> list[dict[str, Any]]:
            done = await asyncio.gather(*(measure(spec, math.inf) for _, spec in specs))
            return [each.run for each in done]

        runs = self._runner.run(all_at_once())
        kinds = [each.name for each in TRAFFIC.values() if each.rows is traffic.rows]
        for (name, _), run in zip(specs, runs, strict=True):
            row = {"fleet": self._fleet.name, "engine": name, "round": number, "traffic": kinds}
            row |= {key: run[key] for key in ("completed", "failed", "total_token_throughput")}
            row["request_throughput"] = run["request_throughput"]
            self._sender.send(("alone", row))
        return float(sum(run["request_throughput"] for run in runs))

    def _spec(self, url: str, rows: Any, salt: str, **more: Any) -> Spec:
        return Spec(
            url=url, model="tiny", rows=rows, num_prompts=len(rows), salt=f"{time.time_ns()}/{salt}",
            text=True, real=self._fleet.name == VLLM.name, **more,
        )  # fmt: skip

    def _warm_up(self, placed: _Placed, name: str, capacity_rps: float) -> None:
        if name in placed.warm:
            return
        placed.warm.add(name)
        rows = TRAFFIC["half"].rows(WARM_UP, random.Random(f"warm-up/{self._number}"))
        spec = self._spec(placed[name].url, rows, f"{name}/warm-up")
        self._runner.run(measure(spec, capacity_rps / 2))
        self._settle()

    def _settle(self) -> None:
        """Wait until the engines have nothing to do, and a second more: every view of them is fresh then."""
        while not self._engines.idle():
            time.sleep(0.1)
        time.sleep(1.0)

    def _one(self, running: _Router, name: str, traffic: Traffic, capacity_rps: float) -> dict[str, Any]:
        """One load through one router."""
        number = self._number
        at_once = AT_ONCE_REAL if self._fleet.name == VLLM.name else AT_ONCE
        rate, count = traffic.rate_and_count(capacity_rps, at_once)
        rows = traffic.rows(count, random.Random(f"{traffic.name}/{number}"))
        # The same arrivals and lengths for every router of a round, prompts of its own for each run.
        spec = self._spec(running.url, rows, f"{name}/{traffic.name}", waves=traffic.waves, seed=number)
        engines = self._engines
        before = [engines.counters(series) for series in (OUTPUT_TOKENS, PREEMPTIONS)]
        pids = ([os.getpid()], running.pids, engines.pids)
        began, used = time.monotonic(), [cpu.cpu_ns(each) for each in pids]
        run = self._runner.run(measure(spec, rate)).run
        wall_s = time.monotonic() - began
        client, router, all_engines = (
            (cpu.cpu_ns(each) - before_ns) / 1e9 / wall_s for each, before_ns in zip(pids, used, strict=True)
        )
        self._settle()
        after = [engines.counters(series) for series in (OUTPUT_TOKENS, PREEMPTIONS)]
        tokens, preemptions = (
            [new - old for old, new in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)
        )
        row: dict[str, Any] = {
            "fleet": self._fleet.name,
            "traffic": traffic.name,
            "router": name,
            "round": number,
        }
        row |= {key: run[key] for key in _KEPT}
        row["shares"] = {
            each: got / (sum(tokens) or 1) for each, got in zip(engines.names, tokens, strict=True)
        }
        row["preemptions"] = sum(preemptions)
        row["cores"] = {"client": client, "router": router, "engines": all_engines}
        row["client_lag_ms"] = run["client"]["p99_loop_lag_ms"]
        row["client"] = run["client"]["reasons"]
        row["errors"] = run["error_examples"]
        return row


class _Router:
    """A started router."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self.url = f"http://127.0.0.1:{running.port}"

    @property
    def pids(self) -> list[int]:
        """Its processes."""
        return self._running.pids


class _Placed(dict[str, _Router]):
    """Routers in front of one fleet, started one after the other; `warm` are those that were used."""

    def __init__(self, names: Sequence[str], engines: Serving, folder: Path, cores: Sequence[int]) -> None:
        super().__init__()
        self.warm: set[str] = set()
        self._started: list[Running] = []
        try:
            for name in names:
                port, admin_port = free_ports(2)
                running = Running(router(name, engines), port, admin_port, engines.ports, cores, folder)
                self._started.append(running)
                self[name] = _Router(running)
            for running in self._started:
                running.wait_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all of them."""
        for running in self._started:
            running.stop()

    def __enter__(self) -> _Placed:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _line(kind: str, row: dict[str, Any]) -> str:
    if kind == "alone":
        return f"{row['fleet']} {row['engine']} alone: {row['total_token_throughput']:,.0f} tokens/s"
    shares = " ".join(f"{share:.0%}" for share in row["shares"].values())
    return (
        f"{row['fleet']:5s} {row['traffic']:7s} {row['round']} {row['router']:18s} "
        f"{row['total_token_throughput']:7,.0f} tokens/s  TTFT {row['mean_ttft_ms'] / 1e3:6.2f} "
        f"p99 {row['p99_ttft_ms'] / 1e3:6.2f}  E2E p99 {row['p99_e2el_ms'] / 1e3:6.2f} s  {shares}  "
        f"failed {row['failed']}  cores {sum(row['cores'].values()):.2f} router {row['cores']['router']:.2f} "
        f"{' '.join(row['client'])}"
    )


if __name__ == "__main__":
    sys.exit(main())
