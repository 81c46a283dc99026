"""Ordinary traffic: shared and long prompts, agents, short answers, embeddings, a cold fleet, overload.

`python bench/scheduling/ordinary.py --data DIR`: the default against other policies, which meet the same
requests at the same times. Draw 0 has fixed fleets, every other one (`--draw`) random fleets and other
orders. `--only GROUP` takes some of the groups, `--short` a case of each. `--others FILE` keeps what the
other policies reach, right while they and the engine model stay as they are.
`--against FILE` compares with figures of an earlier `--json`.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from cases import FLEETS, L8, L70, MODEL, Q32, TRACES, Kind, Lab
from measure import held_out_fleets

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import generated_traffic as generate
from generated_traffic import Lengths

from hetlb.balancer.config.gpus import latency_of
from hetlb.balancer.core.facts import EngineHistory, EngineSample
from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Health, InstanceSpec
from hetlb.tools.sim.alone import run_alone
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.sim.iteration_times import IterationRule
from hetlb.tools.workload.arrivals import PlannedRequest, Waves, make_plan
from hetlb.tools.workload.rows import HASH_BLOCK_TOKENS, Row
from hetlb.tools.workload.trace_formats import read_trace

OTHERS: Final = ("paper", "lmetric", "lmetric-speed", "least-requests", "prefix")
FIGURES: Final = ("mean_ttft", "mean_e2e", "p99_ttft", "p99_e2e")
RESULT: Final = Path(__file__).resolve().parents[1] / "results" / "ordinary.json"
_SEED: Final = 7300
#: Rows from which each engine's rate alone is taken.
_SAMPLE: Final = 600
#: Longest prompt and answer of the traces with long prompts.
_LONGEST_TOKENS: Final = 126_000
#: Least KV cache that holds the longest prompt and answer of agents and of shared prompts.
_LEAST_KV: Final = 22_528
FIXED: Final[dict[str, tuple[Kind, ...]]] = {
    "8 of 5 kinds": (
        Kind("b200_sxm", L8, 1), Kind("h100_sxm", L8, 1, 2), Kind("a100_sxm", L8, 2),
        Kind("a100_sxm", L8, 1, 2), Kind("l40s", L8, 1, 2),
    ),
    "h100+2 l40s": (Kind("h100_sxm", L8, 1), Kind("l40s", L8, 1, 2)),
    "70B": FLEETS["70B"],
    "8 equal": (Kind("a100_sxm", L8, 1, 8),),
    "64 of 4 kinds": (
        Kind("b200_sxm", L8, 1, 8), Kind("h100_sxm", L8, 1, 16), Kind("a100_sxm", L8, 1, 20),
        Kind("l40s", L8, 1, 20),
    ),
    "l40s+b200": (Kind("l40s", L8, 1), Kind("b200_sxm", L8, 1)),
    "slow first": tuple(Kind(system, L8, 1) for system in ("l40s", "a100_sxm", "h100_sxm", "b200_sxm")),
}  # fmt: skip
#: Pairs of servers for long prompts.
PAIRS: Final[dict[str, tuple[Kind, Kind]]] = {
    "h100+l40s": (Kind("h100_sxm", L8, 1), Kind("l40s", L8, 1)),
    "a100 tp4+tp1": (Kind("a100_sxm", L8, 4), Kind("a100_sxm", L8, 1)),
    "b200+l40s": (Kind("b200_sxm", L8, 1), Kind("l40s", L8, 1)),
    "32B h100+l40s": (Kind("h100_sxm", Q32, 4), Kind("l40s", Q32, 4)),
    "70B h100+a100": (Kind("h100_sxm", L70, 4), Kind("a100_sxm", L70, 8)),
    "70B h100+l40s": (Kind("h100_sxm", L70, 4), Kind("l40s", L70, 8)),
}
#: Longest prompt there, as a share of the smallest KV cache.
_LONGEST_SHARE: Final = 0.3
#: Slots of engines that a burst fills.
_FEW_SLOTS: Final = 48
#: Fleets of a random draw.
_DRAWN: Final = 3


@dataclass(frozen=True, slots=True)
class Case:
    """A load of some traffic: a share of the engines' rates together; 0 is a lone user, infinite all at once.

    `kv`: the share of its KV cache that each engine has. `cold`: no profiles, slots unknown; "no metrics":
    no scrapes, either; "gpu": the GPUs are stated; "history": engines tell their past at half load. `burst`
    requests come at once first. All of them count.
    """

    group: str
    draw: int
    fleet: str
    traffic: str
    load: float
    count: int
    kv: float = 1.0
    cold: str = ""
    burst: int = 0
    waves: Waves | None = None

    @property
    def cached(self) -> bool:
        """True if engines keep prompts."""
        return self.traffic.startswith(("shared", "agents"))

    def __str__(self) -> str:
        load = "at once" if math.isinf(self.load) else f"{self.load:.0%}"
        more = "".join(
            f" / {what}"
            for what in (
                f"kv {self.kv:g}" if self.kv < 1 else "",
                self.cold,
                f"burst {self.burst}" if self.burst else "",
            )
            if what
        )
        return f"{self.group}: {self.fleet} / {self.traffic} / {load}{more}"


@cache
def fleets(lab: Lab, draw: int) -> dict[str, tuple[Kind, ...]]:
    """Return the fleets by name."""
    if not draw:
        return FIXED | PAIRS
    drawn = list(held_out_fleets(lab.layouts, _SEED + draw).items())[:_DRAWN]
    rng = random.Random(_SEED + draw)
    systems = rng.sample(("b200_sxm", "h100_sxm", "a100_sxm", "l40s"), 4)
    return {
        **dict(drawn),
        "8 equal": (Kind(rng.choice(systems), L8, 1, 8),),
        "64 of 4 kinds": tuple(Kind(system, L8, 1, 16) for system in systems),
        "slow first": (Kind("l40s", L8, 1), *(Kind(system, L8, 1) for system in systems if system != "l40s")),
        **_pairs(lab, rng),
    }


def _pairs(lab: Lab, rng: random.Random) -> dict[str, tuple[Kind, ...]]:
    """Return drawn pairs of unlike servers, as many as there are fixed ones."""
    found: dict[str, tuple[Kind, ...]] = {}
    while len(found) < len(PAIRS):
        model = rng.choice(sorted({model for _, model, _ in lab.layouts}))
        layouts = [(system, tp) for system, of, tp in lab.layouts if of == model]
        if len(layouts) > 1:
            pair = tuple(Kind(system, model, tp) for system, tp in rng.sample(layouts, 2))
            found[f"{model} {' + '.join(f'{each.system} TP {each.tp}' for each in pair)}"] = pair
    return found


def cases(lab: Lab, draw: int) -> list[Case]:
    """Return all cases of a draw."""
    found: list[Case] = []

    def add(group: str, fleet: str, traffic: str, load: float, count: int, **more: Any) -> None:
        found.append(Case(group, draw, fleet, traffic, load, count, **more))

    names = list(fleets(lab, draw))
    for turn, fleet in enumerate(names[:3]):
        for tokens in (2048, 8192, 16384):
            for load in (0.6, 0.9):
                add("shared", fleet, f"shared {tokens}", load, 2000)
        add("shared, little cache", fleet, f"shared {(2048, 8192, 16384)[turn]}", 0.9, 2000, kv=0.2)
        for kv in (1.0, 0.2):
            add("agents", fleet, "agents", 0.7, 1800, kv=kv)
        for load in (0.5, 0.8):
            add("short answers", fleet, "short", load, 6000)
            add("one token", fleet, "embed", load, 6000)
        for cold in ("", "no profiles", "no metrics", "gpu", "history"):
            add("cold", fleet, "azure", 0.8, 800, cold=cold)
            add("cold", fleet, "sharegpt", 0.95, 1200, cold=cold)
            add("cold", fleet, "azure", 0.65, 700, cold=cold, burst=300)
            add("cold", fleet, "azure", math.inf, 100, cold=cold)
        for traffic in ("azure", "mooncake", "long mooncake"):
            add("overload", fleet, traffic, 1.2, 600)
            add("overload", fleet, traffic, math.inf, 600)
        add("waves", fleet, "azure", 0.7, 900, waves=Waves(5.0, 15.0))
        add("waves", fleet, "sharegpt", 0.8, 700)
    for traffic in ("azure", "mooncake"):
        add("equal", names[3], traffic, math.inf, 1200)
        add("equal", names[3], traffic, 1.2, 1200)
    add("equal", names[3], "long mooncake", math.inf, 500)
    add("64", names[4], "azure", 0.8, 3000)
    pairs = names[-len(PAIRS) :]
    for fleet in pairs:
        layouts, _ = lab.fleet(fleets(lab, draw)[fleet])
        least = min(each.capacity.kv_cache_tokens or 0 for each in layouts)
        add("long prompts", fleet, f"prompts {int(_LONGEST_SHARE * least)}", 0.85, 500)
    for fleet in names[5 : -len(PAIRS)]:
        add("lone", fleet, "azure", 0.0, 40)
        add("lone", fleet, "azure", 0.0, 40, cold="no profiles")
    return found


# --- traffic --------------------------------------------------------------------------------------------


def _agents(count: int, rng: random.Random) -> list[Row]:
    """60 tasks at a time, whose prompts grow by one to four blocks a turn, to 20k tokens."""
    answer = Lengths(math.exp(4.0), 0.6, 1, 2000)
    tasks: list[tuple[int, int]] = []
    rows: list[Row] = []
    begun = 0
    while len(rows) < count:
        while len(tasks) < 60:
            tasks.append((begun, 0))
            begun += 1
        place = rng.randrange(len(tasks))
        number, blocks = tasks[place]
        blocks += rng.randint(1, 4)
        if blocks * HASH_BLOCK_TOKENS > 20_000:
            tasks[place] = tasks[-1]
            tasks.pop()
            continue
        tasks[place] = number, blocks
        ids = tuple(f"t{number}b{block}" for block in range(blocks))
        rows.append(Row(None, blocks * HASH_BLOCK_TOKENS, answer.draw(rng), hash_ids=ids))
    return rows


def _short(count: int, rng: random.Random, most: int) -> list[Row]:
    prompt = Lengths(math.exp(6.4), 0.8, 1, 8000)
    return [Row(None, prompt.draw(rng), rng.randint(1, most)) for _ in range(count)]


class Bench:
    """The data, read once, and what cases need of it."""

    def __init__(self, data: Path) -> None:
        self.lab = Lab(data / "hw", data / "traces")
        self._traces = data / "traces"
        self.long = cache(self._long)
        self.bound_rps = cache(self._bound_rps)
        self.history = cache(self._history)

    def _long(self, trace: str) -> list[Row]:
        rows = read_trace(self._traces / TRACES[trace])
        return [
            replace(r, hash_ids=())
            for r in rows
            if r.input_tokens + max(1, r.output_tokens) <= _LONGEST_TOKENS
        ]

    def rows(self, traffic: str, count: int, rng: random.Random) -> list[Row]:
        """Return requests of a kind of traffic."""
        kind, _, what = traffic.partition(" ")
        if kind == "shared":
            question, answer = Lengths(math.exp(5.0), 0.9, 1, 4000), Lengths(math.exp(5.0), 0.7, 1, 2000)
            return generate.shared_prompts(
                count, rng, prefix_tokens=int(what), question=question, answer=answer
            )
        if kind == "agents":
            return _agents(count, rng)
        if kind == "prompts":
            prompt, answer = Lengths(math.exp(8.8), 1.1, 1, int(what)), Lengths(math.exp(5.6), 0.7)
            return generate.independent(count, rng, prompt=prompt, answer=answer)
        if kind in ("short", "embed"):
            return _short(count, rng, 8 if kind == "short" else 1)
        chosen = list(self.long(what) if kind == "long" else self.lab.rows(kind))
        rng.shuffle(chosen)
        return [chosen[i % len(chosen)] for i in range(count)]

    def fleet(self, case: Case) -> tuple[tuple[InstanceSpec, ...], dict[str, EngineSpec]]:
        """Return what the scheduler is told of each instance, and the engines."""
        layouts = fleets(self.lab, case.draw)[case.fleet]
        specs, engines = self.lab.fleet(layouts)
        kinds = [kind for kind in layouts for _ in range(kind.count)]
        told, made = [], {}
        for spec, kind in zip(specs, kinds, strict=True):
            engine = engines[spec.name]
            kv = int(engine.limits.kv_cache_tokens * case.kv)
            if case.kv < 1.0:
                kv = max(kv, _LEAST_KV)
            if "mooncake" in case.traffic:
                kv = max(kv, _LONGEST_TOKENS + 16)
            slots = _FEW_SLOTS if case.burst else engine.limits.max_num_seqs
            capacity = replace(
                spec.capacity, kv_cache_tokens=kv, kv_tokens_per_request=kv, max_num_seqs=slots,
                enable_prefix_caching=case.cached,
            )  # fmt: skip
            latency = spec.latency
            if case.cold:
                latency = latency_of(kind.system, kind.tp) if case.cold == "gpu" else None
                capacity = Capacity() if case.cold == "no metrics" else replace(capacity, max_num_seqs=None)
            alone = bool(case.cold) and latency is not None
            told.append(replace(spec, capacity=capacity, latency=latency, gpu_alone=alone))
            limits = replace(engine.limits, kv_cache_tokens=kv, max_num_seqs=slots)
            made[spec.name] = replace(engine, limits=limits, prefix_cache=case.cached)
        return tuple(told), made

    def _bound_rps(self, case: Case) -> float:
        _, engines = self.fleet(case)
        rows = self.rows(case.traffic, _SAMPLE, random.Random(f"bound/{case.traffic}"))
        plan = make_plan(rows, None, math.inf, random.Random(0), hash_block_tokens=HASH_BLOCK_TOKENS)
        alone = {
            engine: run_alone(engine, plan, IterationRule.TOKEN).requests_per_s
            for engine in set(engines.values())
        }
        return sum(alone[engine] for engine in engines.values())

    def _history(self, traffic: str, engine: EngineSpec) -> EngineHistory:
        """Return an engine's means of other requests of the same traffic, at half of its rate."""
        rows = self.rows(traffic, _SAMPLE, random.Random(f"history/{traffic}"))
        rng = random.Random(0)
        at_once = make_plan(rows, None, math.inf, rng, hash_block_tokens=HASH_BLOCK_TOKENS)
        rate = run_alone(engine, at_once, IterationRule.TOKEN).requests_per_s
        plan = make_plan(rows, None, rate / 2.0, rng, hash_block_tokens=HASH_BLOCK_TOKENS)
        setup = SchedulerSetup(specs=(InstanceSpec("alone", MODEL),), policy="single", seed=1)
        records = FleetSimulation(setup, {"alone": engine}, plan, model=MODEL).run().records
        times = [
            (r.scheduled_s, r.first_token_s, r.last_token_s, r.output_tokens)
            for r in records
            if r.first_token_s is not None and r.last_token_s is not None
        ]
        decoding_s = sum(last - first for _, first, last, count in times if count > 1)
        tokens = sum(count - 1 for *_, count in times if count > 1)
        span_s = max(last for _, _, last, _ in times)
        return EngineHistory(
            prompt=statistics.fmean(row.input_tokens for row in rows),
            prefill_s=statistics.fmean(first - scheduled for scheduled, first, _, _ in times),
            output=statistics.fmean(count for *_, count in times),
            step_s=decoding_s / tokens,
            batch=max(1.0, decoding_s / span_s),
        )

    def plan(self, case: Case) -> list[PlannedRequest]:
        """Return the requests of a case."""
        name = f"{_SEED}/{case.draw}/{case.fleet}/{case.traffic}/{case.load}"
        rows = self.rows(case.traffic, case.count, random.Random(name))
        rate = math.inf
        if case.load == 0.0:
            rate = 0.02
        elif not math.isinf(case.load):
            same = replace(case, group="", load=1.0, count=0, cold="", waves=None)
            rate = case.load * self.bound_rps(same)
        plan = make_plan(
            rows, None, rate, random.Random(name), waves=case.waves, hash_block_tokens=HASH_BLOCK_TOKENS
        )
        return (
            [
                replace(
                    each,
                    scheduled_s=0.0
                    if i < case.burst
                    else each.scheduled_s - plan[case.burst].scheduled_s + 5.0,
                )
                for i, each in enumerate(plan)
            ]
            if case.burst
            else plan
        )

    def run(self, case: Case, policy: str, weights: tuple[tuple[str, float], ...] = ()) -> dict[str, Any]:
        """Run one case. Raises `AssertionError` unless all requests completed."""
        specs, engines = self.fleet(case)
        plan = self.plan(case)
        setup = SchedulerSetup(
            specs=specs,
            policy=policy,
            params=PolicyParams(weights=weights),
            limits=QueueLimits(max_requests=None, max_bytes=None, timeout_s=None),
            predictor="online",
            seed=1,
            lengths=None,
            initial_health=Health.UP,
        )
        simulation = (Unread if case.cold == "no metrics" else FleetSimulation)(
            setup, engines, plan, model=MODEL
        )
        if case.cold == "history":
            past = {engine: self.history(case.traffic, engine) for engine in set(engines.values())}
            for name, engine in engines.items():
                sample = EngineSample(running=0, waiting=0, kv_usage=0.0, history=past[engine])
                simulation.scheduler.on_scrape(name, sample, 0.0)
        result = simulation.run()
        summary = result.summary()
        assert summary["completed"] == len(plan), f"{case}: a request failed"
        first = sorted(
            (r.first_token_s - r.scheduled_s) * 1e3 for r in result.records if r.first_token_s is not None
        )
        end = sorted(
            (r.last_token_s - r.scheduled_s) * 1e3 for r in result.records if r.last_token_s is not None
        )
        served = {spec.name: 0 for spec in specs}
        for record in result.records:
            served[record.instance] += 1
        return {
            "mean_ttft": statistics.fmean(first),
            "p99_ttft": first[min(len(first) - 1, int(0.99 * len(first)))],
            "mean_e2e": statistics.fmean(end),
            "p99_e2e": end[min(len(end) - 1, int(0.99 * len(end)))],
            "served": served,
        }


class Unread(FleetSimulation):
    """A fleet whose metrics cannot be read."""

    def _scraped(self) -> Sequence[Scheduler]:
        return ()


_bench: Bench | None = None


def _start(data: Path) -> None:
    global _bench
    os.nice(5)
    _bench = Bench(data)


def _run(job: tuple[Case, str]) -> dict[str, Any]:
    assert _bench is not None, "expected the data to be read"
    return _bench.run(*job)


Table = dict[Case, dict[str, dict[str, Any]]]


def ratios(figures: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the best other policy over the default, by figure: above 1 the default is better."""
    own = figures["hetlb"]
    others = [each for name, each in figures.items() if name != "hetlb"]
    return {key: min(each[key] for each in others) / own[key] for key in FIGURES}


def dominated(figures: dict[str, dict[str, Any]]) -> list[str]:
    """Return the policies that are better by over 2 % in both means."""
    own = figures["hetlb"]
    return [
        name
        for name, each in figures.items()
        if all(each[key] * 1.02 < own[key] for key in ("mean_ttft", "mean_e2e"))
    ]


def _means(each: Sequence[dict[str, float]]) -> str:
    """Return the geometric mean of each figure, and the least one."""
    found = {key: [one[key] for one in each] for key in FIGURES}
    return " ".join(
        f"{key} {statistics.geometric_mean(them):.3f} (least {min(them):.2f})" for key, them in found.items()
    )


def print_table(table: Table, every: bool) -> None:
    """Print each case, if asked for, and the geometric means of each group."""
    groups: dict[str, list[dict[str, float]]] = {}
    for case, figures in table.items():
        found = ratios(figures)
        group = f"{case.group}, {case.cold or 'profiles'}" if case.group == "cold" else case.group
        groups.setdefault(group, []).append(found)
        if every:
            own = figures["hetlb"]
            idle = sum(not count for count in own["served"].values())
            told = " ".join(f"{key} {found[key]:.2f}" for key in FIGURES)
            by = " ".join(dominated(figures))
            print(f"{case}: {told}; {own['mean_ttft']:.0f}/{own['mean_e2e']:.0f} ms; idle {idle}; {by}")
    for group, each in groups.items():
        print(f"== {group} ({len(each)}): {_means(each)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="holds hw/ and traces/")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--draw", type=int, default=0)
    parser.add_argument("--only", action="append", help="a group, may be repeated")
    parser.add_argument("--short", action="store_true", help="the first case of each group and traffic")
    parser.add_argument("--others", type=Path, help="keeps the other policies' figures")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--against", type=Path, help="figures of an earlier --json: print what changed")
    args = parser.parse_args(arguments)
    lab = Lab(args.data / "hw", args.data / "traces")
    wanted = [case for case in cases(lab, args.draw) if not args.only or case.group in args.only]
    if args.short:
        seen: dict[tuple[str, str, str], Case] = {}
        for case in wanted:
            seen.setdefault((case.group, case.traffic, case.cold), case)
        wanted = list(seen.values())
    known: dict[str, dict[str, Any]] = {}
    if args.others is not None and args.others.exists():
        known = dict(map(json.loads, args.others.read_text().splitlines()))
    jobs = [(case, policy) for case in wanted for policy in ("hetlb", *OTHERS)]
    missing = [job for job in jobs if repr(job) not in known]
    with multiprocessing.get_context("spawn").Pool(args.jobs, _start, (args.data,)) as pool:
        for job, figures in zip(missing, pool.imap(_run, missing), strict=True):
            known[repr(job)] = figures
            if args.others is not None and job[1] != "hetlb":
                with args.others.open("a") as file:
                    file.write(json.dumps([repr(job), figures]) + "\n")
    table = {case: {policy: known[repr((case, policy))] for policy in ("hetlb", *OTHERS)} for case in wanted}
    print_table(table, every=True)
    if args.against is not None:
        print_change(
            {str(case): each["hetlb"] for case, each in table.items()}, json.loads(args.against.read_text())
        )
    if args.json is not None:
        args.json.write_text(json.dumps({str(case): each for case, each in table.items()}, indent=1))
    return 0


def print_change(now: dict[str, dict[str, Any]], before: dict[str, Any]) -> None:
    """Print how many times as long everything took before, by group."""
    groups: dict[str, list[dict[str, float]]] = {}
    for name, figures in now.items():
        if name in before:
            old = before[name]["hetlb"]
            groups.setdefault(name.partition(":")[0], []).append(
                {key: old[key] / figures[key] for key in FIGURES}
            )
    for group, each in groups.items():
        print(f"before/now {group} ({len(each)}): {_means(each)}")


if __name__ == "__main__":
    sys.exit(main())
