"""Cases of the traffic that people have: shared prompts, waves, restarts, several sequences, heavy tails.

A case is data: a fleet, a kind of traffic, when it comes, and what happens meanwhile. Policies of one case
meet the same requests at the same times. A load is a share of the fleet's `bound`: the requests/s that its
engines reach together, each alone with all of a sample at once.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from cases import FLEETS, L8, LONGEST_TOKENS, MODEL, Kind, Lab
from measure import without

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import generated_traffic as generate
from generated_traffic import AgentTree, Lengths

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.length_samples import LengthDistribution
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Health, InstanceSpec
from hetlb.tools.sim.alone import run_alone
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.sim.iteration_times import IterationRule
from hetlb.tools.workload.arrivals import PlannedRequest, Waves, make_plan
from hetlb.tools.workload.records import percentile
from hetlb.tools.workload.rows import HASH_BLOCK_TOKENS, Row
from hetlb.tools.workload.trace_formats import read_trace

OTHERS = ("paper", "least-requests", "p2c", "peak-ewma", "least-kv", "wrr", "prefix", "session")
POLICIES = ("hetlb", *OTHERS)
#: Every figure and whether more is better.
FIGURES = {
    "total_token_throughput": True,
    "mean_ttft_ms": False,
    "p99_ttft_ms": False,
    "p99_e2el_ms": False,
    "mean_tpot_ms": False,
    "preemptions": False,
    "failed": False,
    "slowest_group_s": False,
}
_PAIR = "pair a800+v100"
_ROOT = Path(__file__).resolve().parents[2]
#: Gaps of a coefficient of variation of 13, as a code assistant's.
BURSTY = 1.0 / 13.0**2
#: What `online` has seen before, where it is warm.
_HISTORY = 3000
#: Requests that each engine has alone, for the bound: enough that the tail of the last ones matters little.
_SAMPLE = 1500


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation, whatever the policy.

    `load`: a share of the bound, None with `rate` (requests/s; infinite is all at once). `count`: requests;
    `seconds` instead asks for as many as come in that time, at most `count`. Times as shares of the time in
    which requests come: `restart`, `slowed` (the first instance takes three times as long from then on).
    `kv`: the share of its KV cache that each engine has; `places`: its `max_num_seqs`; `context`: the
    `max_model_len` of each instance.
    """

    name: str
    fleet: str
    traffic: str
    count: int
    rate: float = math.inf
    load: float | None = None
    seconds: float | None = None
    burstiness: float = 1.0
    waves: Waves | None = None
    prefix_cache: bool = False
    predictor: str = "empirical"
    warm: bool = False
    restart: float | None = None
    slowed: float | None = None
    kv: float = 1.0
    places: int | None = None
    context: tuple[int, ...] = ()
    queue_timeout_s: float | None = None


# --- traffic --------------------------------------------------------------------------------------------

Maker = Callable[["Bench", int, random.Random], list[Row]]


def _independent(prompt: Lengths, answer: Lengths) -> Maker:
    return lambda _, count, rng: generate.independent(count, rng, prompt=prompt, answer=answer)


def _shared(prompts: int, tokens: int) -> Maker:
    return lambda _, count, rng: generate.shared_prompts(count, rng, prompts=prompts, prefix_tokens=tokens)


def _agents(**tree: Any) -> Maker:
    return lambda _, count, rng: generate.agents(count, rng, AgentTree(**tree))


def _public(trace: str) -> Maker:
    """Rows of a public trace in an order of the seed."""

    def rows(bench: Bench, count: int, rng: random.Random) -> list[Row]:
        chosen = list(bench.lab.rows(trace))
        rng.shuffle(chosen)
        return [chosen[i % len(chosen)] for i in range(count)]

    return rows


def _in_order(file: str) -> Maker:
    """Consecutive rows of a public trace, from a place of the seed; the longest requests left out."""

    def rows(bench: Bench, count: int, rng: random.Random) -> list[Row]:
        rows = bench.trace(file)
        start = rng.randrange(max(1, len(rows) - count))
        return rows[start : start + count]

    return rows


def _tenants(bench: Bench, count: int, rng: random.Random) -> list[Row]:
    return generate.tenants(count, rng)


def _groups(sequences: int, groups: int, answer: Lengths = generate.ANSWER) -> Maker:
    """Single requests with a few of many prompts among them."""

    def rows(_: Bench, count: int, rng: random.Random) -> list[Row]:
        singles = generate.independent(count - groups, rng)
        many = generate.several_prompts(groups, rng, sequences=sequences, answer=answer)
        return _evenly(singles, many)

    return rows


def _evenly(rows: list[Row], others: list[Row]) -> list[Row]:
    """The others among the rows, from a tenth to two thirds of the way: traffic goes on after the last."""
    mixed = list(rows)
    for i, other in enumerate(others):
        mixed.insert(round(len(rows) * (0.1 + 0.55 * i / len(others))) + i, other)
    return mixed


def _samples(n: int) -> Maker:
    return lambda _, count, rng: generate.several_prompts(count, rng, n=n, prompt=Lengths(900, 0.5, 64, 4000))


def _embeddings(inputs: int, groups: int) -> Maker:
    def rows(_: Bench, count: int, rng: random.Random) -> list[Row]:
        singles = generate.independent(count - groups, rng)
        return _evenly(singles, generate.embeddings(groups, rng, inputs=inputs))

    return rows


def _long_among(share: float, long: Lengths) -> Maker:
    def rows(_: Bench, count: int, rng: random.Random) -> list[Row]:
        some = round(share * count)
        short = generate.independent(count - some, rng)
        return generate.among(short, generate.independent(some, rng, prompt=long), rng)

    return rows


TRAFFIC: dict[str, Maker] = {
    "1x4096": _shared(1, 4096),
    "8x4096": _shared(8, 4096),
    "1x16384": _shared(1, 16384),
    "tree": _agents(),
    "deep tree": _agents(systems=3, toolsets=6, system_tokens=3000, tools_tokens=2500, turns=10.0),
    "mooncake": _in_order("mooncake-conversation-h1.csv"),
    "sharegpt sessions": _in_order("sharegpt-sessions-a.csv"),
    "azure": _public("azure"),
    "sharegpt": _public("sharegpt"),
    "code": _independent(Lengths(1500, 0.8, 30, 7500), Lengths(18, 0.9, 1, 500)),
    "tenants": _tenants,
    "16 prompts": _groups(16, 1),
    "300 prompts": _groups(300, 1),
    "32 prompts": _groups(32, 12),
    "4 samples": _samples(4),
    "80 embeddings": _embeddings(80, 4),
    "mixed context": _long_among(1 / 11, Lengths(40_000, 0.5, 10_000, 100_000)),
    "long among short": _long_among(0.05, Lengths(6000, 0.2, 3000, 7500)),
}

# --- fleets ---------------------------------------------------------------------------------------------

FLEETS_HERE: dict[str, tuple[Kind, ...]] = {
    **FLEETS,
    "1 a100": (Kind("a100_sxm", L8, 1),),
    **{f"{n} equal": (Kind("a100_sxm", L8, 1, n),) for n in (2, 4, 16)},
}
#: The three the issue of waves was seen on, and the pair.
_LARGE = ("8 kinds", "4 kinds tp2")
_WAVE_FLEETS = {"8 kinds": "eight", "4 kinds tp2": "four", "70B": "70B", _PAIR: "pair"}


# --- cases ----------------------------------------------------------------------------------------------


def _cases() -> list[Case]:
    cases: list[Case] = []

    def add(name: str, fleet: str, traffic: str, count: int, **more: Any) -> None:
        cases.append(Case(name, fleet, traffic, count, **more))

    shared = ("1x4096", "8x4096", "1x16384", "tree", "deep tree", "mooncake", "sharegpt sessions")
    for fleet, label in ((_PAIR, "pair"), ("4 kinds tp2", "four")):
        for traffic in shared:
            count = 800 if fleet == _PAIR else 1600
            name = f"shared/{traffic}/{label}"
            add(f"{name}/once", fleet, traffic, count, prefix_cache=True)
            for load in (0.5, 0.8):
                add(f"{name}/{load:.0%}", fleet, traffic, count, load=load, prefix_cache=True)
    add("shared/1x16384/pair/8 per s", _PAIR, "1x16384", 800, rate=8.0, prefix_cache=True)
    add("shared/1x4096/pair/no caches", _PAIR, "1x4096", 400, load=0.8)

    online = {"predictor": "online"}
    for fleet, label in _WAVE_FLEETS.items():
        for traffic, load in (("azure", 0.7), ("azure", 1.1), ("sharegpt", 0.7), ("code", 0.7)):
            wave = {"load": load, "waves": Waves(5.0, 15.0), "seconds": 20.0, **online}
            add(f"waves/{label}/{traffic} {load:.0%}", fleet, traffic, 4000, **wave)
        for traffic, load in (("azure", 0.7), ("azure", 0.95), ("sharegpt", 0.7)):
            start = {"load": load, "seconds": 8.0 if fleet in _LARGE else 40.0, **online}
            add(f"start/{label}/{traffic} {load:.0%}", fleet, traffic, 4000, **start)
        add(
            f"restart/{label}", fleet, "azure", 4000,
            load=0.8, seconds=40.0 if fleet in _LARGE else 90.0, restart=0.5, warm=True, **online,
        )  # fmt: skip
        burst = {"load": 0.5, "seconds": 300.0, "burstiness": BURSTY, "warm": True, **online}
        add(f"assistant/{label}/code", fleet, "code", 2000, **burst)
        add(f"assistant/{label}/tree", fleet, "tree", 2000, prefix_cache=True, **burst)
        add(f"steady/{label}", fleet, "azure", 3000, load=0.5)
        add(f"once/{label}", fleet, "sharegpt", 1500 if fleet == _PAIR else 3000)

    for kind, more in (
        ("cold", online),
        ("warm", {"warm": True, **online}),
        ("oracle", {"predictor": "oracle"}),
    ):
        add(f"tenants/four/once/{kind}", "4 kinds tp2", "tenants", 1000, **more)
        add(f"tenants/pair/once/{kind}", _PAIR, "tenants", 400, **more)
        add(f"tenants/four/95%/{kind}", "4 kinds tp2", "tenants", 1000, load=0.95, **more)
        add(f"tenants/tight pair/80%/{kind}", _PAIR, "sharegpt", 1200, load=0.8, kv=0.25, **more)

    add("groups/16 prompts", "2 equal", "16 prompts", 1500, load=0.6, places=16, queue_timeout_s=60.0)
    add("groups/300 prompts", "1 a100", "300 prompts", 5000, load=0.5, queue_timeout_s=300.0)
    add("groups/32 prompts", "1 a100", "32 prompts", 2500, load=0.88, queue_timeout_s=300.0)
    add("groups/80 embeddings", "1 a100", "80 embeddings", 4000, load=0.5, places=64, queue_timeout_s=300.0)
    add("groups/4 samples/once", _PAIR, "4 samples", 400, prefix_cache=True)
    add("groups/4 samples/80%", _PAIR, "4 samples", 600, load=0.8, prefix_cache=True)
    add("context/once", "a100 tp4+tp1", "mixed context", 440, context=(131_072, 8192))
    add("context/80%", "a100 tp4+tp1", "mixed context", 440, load=0.8, context=(131_072, 8192))
    add("long/80%", "4 kinds tp2", "long among short", 2500, load=0.8)

    for n in (2, 4, 16):
        for load in (0.8, 0.95):
            add(f"equal/{n}/{load:.0%}", f"{n} equal", "azure", min(4800, 900 * n), load=load)
    for fleet, label in (("2 equal", "2 equal"), (_PAIR, "pair"), ("4 kinds tp2", "four")):
        add(f"slowed/{label}", fleet, "azure", 1600, load=0.5, slowed=0.5, predictor="empirical")
    assert len({case.name for case in cases}) == len(cases)
    return cases


CASES = _cases()


# --- runs -----------------------------------------------------------------------------------------------


class Bench:
    """The data, read once, and the cases' fleets, plans and bounds."""

    def __init__(self, data: Path) -> None:
        self.lab = Lab(data / "hw", data / "traces")
        self._data = data
        self.trace = cache(self._read)
        self.bound_rps = cache(self._bound_rps)
        self._fleet = cache(self._read_fleet)

    def _read(self, file: str) -> list[Row]:
        rows = read_trace(self._data / "traces" / file)
        return [row for row in rows if row.input_tokens + max(1, row.output_tokens) <= 4 * LONGEST_TOKENS]

    def _read_fleet(self, name: str) -> tuple[tuple[InstanceSpec, ...], dict[str, EngineSpec]]:
        if name != _PAIR:
            return self.lab.fleet(FLEETS_HERE[name])
        fleet = load_fleet(_ROOT / "configs/two-servers.yaml")
        specs = tuple(replace(spec, model=MODEL, url="") for spec in fleet.instances)
        engines = {
            name: EngineSpec(profile.latency, EngineLimits.from_capacity(profile.capacity))
            for name, profile in fleet.profiles.items()
        }
        return specs, engines

    def fleet(self, case: Case) -> tuple[tuple[InstanceSpec, ...], dict[str, EngineSpec]]:
        """What the scheduler is told of each instance, and the engines."""
        given, engines = self._fleet(case.fleet)
        specs, made = [], {}
        for index, spec in enumerate(given):
            engine = engines[spec.name]
            kv = int(engine.limits.kv_cache_tokens * case.kv)
            places = case.places or engine.limits.max_num_seqs
            context = case.context[index] if case.context else None
            capacity = replace(
                spec.capacity, kv_cache_tokens=kv, kv_tokens_per_request=kv, max_num_seqs=places,
                max_model_len=context, enable_prefix_caching=case.prefix_cache,
            )  # fmt: skip
            limits = replace(engine.limits, kv_cache_tokens=kv, max_num_seqs=places)
            specs.append(replace(spec, capacity=capacity))
            made[spec.name] = replace(
                engine, limits=limits, prefix_cache=case.prefix_cache, max_model_len=context
            )
        return tuple(specs), made

    def _setup(self, case: Case, specs: Sequence[InstanceSpec], policy: str, seed: int) -> SchedulerSetup:
        sample = TRAFFIC[case.traffic](self, 2000, random.Random(f"lengths/{case.traffic}"))
        return SchedulerSetup(
            specs=tuple(specs),
            policy=policy,
            params=PolicyParams(),
            limits=QueueLimits(max_requests=None, max_bytes=None, timeout_s=case.queue_timeout_s),
            predictor=case.predictor,
            seed=seed,
            lengths=LengthDistribution(row.output_tokens for row in sample if row.endpoint == "completions"),
            initial_health=Health.UP,
        )

    def _bound_rps(self, case: Case) -> float:
        """The requests/s of all engines together; `case` without what does not matter for it."""
        specs, engines = self.fleet(case)
        rows = TRAFFIC[case.traffic](self, _SAMPLE, random.Random(f"bound/{case.traffic}"))
        plan = make_plan(rows, None, math.inf, random.Random(0), hash_block_tokens=HASH_BLOCK_TOKENS)
        alone: dict[EngineSpec, float] = {}
        for spec in specs:
            engine = engines[spec.name]
            if engine not in alone:
                alone[engine] = run_alone(engine, plan, IterationRule.TOKEN).requests_per_s
        return sum(alone[engines[spec.name]] for spec in specs)

    def rate(self, case: Case) -> float:
        """Requests/s of a case, while they come."""
        if case.load is None:
            return case.rate
        alike = Case(
            "", case.fleet, case.traffic, _SAMPLE, prefix_cache=case.prefix_cache,
            kv=case.kv, places=case.places, context=case.context,
        )  # fmt: skip
        return case.load * self.bound_rps(alike)

    def plan(self, case: Case, seed: int) -> list[PlannedRequest]:
        """The requests of a case."""
        rate = self.rate(case)
        count = case.count if case.seconds is None else min(case.count, max(20, round(rate * case.seconds)))
        rows = TRAFFIC[case.traffic](self, count, random.Random(f"{seed}/{case.traffic}"))
        return make_plan(
            rows, count, rate, random.Random(seed), case.burstiness, waves=case.waves,
            hash_block_tokens=HASH_BLOCK_TOKENS,
        )  # fmt: skip

    def run(self, case: Case, policy: str, seed: int) -> dict[str, float]:
        """The figures of one run. `hetlb -speed correction` is `hetlb` without that ingredient."""
        specs, engines = self.fleet(case)
        plan = self.plan(case, seed)
        end_s = plan[-1].scheduled_s
        if case.slowed is not None:
            first = specs[0].name
            engines[first] = replace(engines[first], changes=((case.slowed * end_s, 3.0),))
        name, _, lacking = policy.partition(" -")
        history: list[PlannedRequest] = []
        if case.warm:
            rows = TRAFFIC[case.traffic](self, _HISTORY, random.Random(f"history/{seed}/{case.traffic}"))
            history = make_plan(rows, None, math.inf, random.Random(0), hash_block_tokens=HASH_BLOCK_TOKENS)
        put_back = without(lacking)
        try:
            result = FleetSimulation(
                self._setup(case, specs, name, seed), engines, plan, model=MODEL,
                restarts_s=() if case.restart is None else (case.restart * end_s,), history=history,
            ).run()  # fmt: skip
        finally:
            put_back()
        summary = result.summary()
        groups = [r for r, p in zip(result.records, plan, strict=True) if p.sequences > 1]
        found = {key: float(summary[key]) for key in FIGURES if key in summary}
        counted = result.counted.values()
        found["preemptions"] = float(sum(each["preemptions"] for each in counted))
        found["slowest_group_s"] = max(((r.end_s or 0.0) - r.scheduled_s for r in groups), default=0.0)
        found["completed"] = float(summary["completed"])
        found["duration"] = summary["duration"]
        found["median_ttft_ms"] = summary["median_ttft_ms"]
        if case.prefix_cache:
            hit, computed = (
                sum(each[key] for each in counted) for key in ("prefix_hit_tokens", "prefilled_tokens")
            )
            found["prefix_hit_share"] = hit / (hit + computed)
        return found


def compare(figures: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over the seeds by policy, and `hetlb` beside the best other policy in each figure.

    A policy under which requests failed is no rival in latency. `ratio` is null where the other figure is 0.
    """
    medians = {
        policy: {key: percentile(sorted(run[key] for run in runs), 50) for key in runs[0]}
        for policy, runs in figures.items()
    }
    document: dict[str, Any] = {"policies": medians, "ratios": {}}
    own = medians.get("hetlb")
    others = {name: found for name, found in medians.items() if not name.startswith("hetlb")}
    if own is None or not others:
        return document
    fewest = min(found["failed"] for found in others.values())
    rivals = {name: found for name, found in others.items() if found["failed"] == fewest}
    for key, more_is_better in FIGURES.items():
        pick = max if more_is_better else min
        by = pick(rivals, key=lambda name: rivals[name][key])
        best = rivals[by][key]
        ratio = own[key] / best if best else (1.0 if own[key] == best else None)
        document["ratios"][key] = {"hetlb": own[key], "best_other": best, "by": by, "ratio": ratio}
    return document
