"""Runs the cases: single simulations in parallel processes, and the studies that are made of them.

Every run completes every request with its exact number of tokens, or it raises; policies of one
case meet the same requests at the same times; nothing depends on the number of processes.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cases import FLEETS, MODEL, TRACES, Kind, Lab, scaled
from rich.console import Console
from rich.progress import track

import hetlb
import hetlb.balancer.core.policies.hetlb as default_policy
import hetlb.balancer.core.policies.sight as sight
import hetlb.balancer.core.speed as speed
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.policies.score_terms import TERMS
from hetlb.balancer.core.predictor import make_predictor
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Command, Outcome, Request
from hetlb.tools.sim.alone import run_alone
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.sim.iteration_times import IterationRule
from hetlb.tools.sim.simulation_sweep import fixed_split
from hetlb.tools.workload.arrivals import PlannedRequest

OTHERS = ("rr", "wrr", "least-requests", "least-kv", "p2c", "peak-ewma", "paper")
RATES = (0.5, 0.8, 0.95)
#: `policy.weights` for an operator to whom one figure matters most: that figure, and weights of terms.
SETTINGS = {
    "first token": ("p99_ttft_ms", (("first_token_s", 100.0), ("finish_s", 0.0))),
    "whole answer": ("p99_e2el_ms", (("first_token_s", 8.0), ("others_s", 0.5))),
}
#: Largest times of a good request's first token and whole answer, in times of it alone on the fastest server
#: of the fleet.
GOOD = (3.0, 8.0)
#: Instances with fewer answers say nothing about their forecasts.
FORECASTS = 100
FORECAST_FIGURES = ("first_token_bias", "end_bias", "first_token_coverage", "end_coverage")
#: Fleets drawn at random from the measured layouts, and orders of the traces that no rule was chosen on.
HELD_OUT = 12
HELD_OUT_SEED = 1000
SLOWED, SLOW = 0.5, 3.0
BURST_S, BURST = 20.0, 10.0


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation. `rate` is requests/s; `factors` multiply the times that the scheduler believes in.

    `slowed_at_s`: from then on the first instance takes three times as long. `without` names the ingredient
    of `hetlb` that is taken out; `weights` holds the weights of terms that are not the default.
    """

    fleet: str
    kinds: tuple[Kind, ...]
    trace: str
    predictor: str
    policy: str
    rate: float = math.inf
    seed: int = 0
    factors: tuple[float, ...] = ()
    slowed_at_s: float | None = None
    burst: bool = False
    without: str = ""
    weights: tuple[tuple[str, float], ...] = ()


_lab: Lab | None = None
_per_instance = 1500


def _start(data: Path, per_instance: int) -> None:
    global _lab, _per_instance
    _lab = Lab(data / "hw", data / "traces")
    _per_instance = per_instance


def _plan(lab: Lab, case: Case, count: int) -> list[PlannedRequest]:
    plan = lab.plan(case.trace, count, case.rate, case.seed)
    if not case.burst:
        return plan
    # From the middle on what would come in 200 s comes in 20.
    middle = plan[len(plan) // 2].scheduled_s
    squeezed = []
    for planned in plan:
        late = planned.scheduled_s - middle
        if late > 0.0:
            in_burst = min(late, BURST_S * BURST)
            late = in_burst / BURST + (late - in_burst)
        squeezed.append(replace(planned, scheduled_s=min(planned.scheduled_s, middle) + max(0.0, late)))
    return squeezed


def compiled() -> bool:
    """True if hetlb is compiled: the constants of its policy are in the code then."""
    return not str(default_policy.__file__).endswith(".py")


#: Ingredients of `hetlb` by name, and what takes each of them out.
_INGREDIENTS: dict[str, tuple[Any, str, Any] | None] = {
    "hold": (default_policy.Evaluation, "_hold", lambda self, todo: None),
    "room": (sight.Sight, "_room", lambda self, ctx, running: sight.ROOM),
    "speed correction": (speed, "TRUSTED_FACTOR", math.inf),
    "first_token_s": None,
    "others_s": None,
    "finish_s": None,
}


def without(names: str) -> Callable[[], None]:
    """Take ingredients of `hetlb` out, separated by commas; gives what puts them back.

    Raises `RuntimeError` where hetlb is compiled.
    """
    if names and compiled():
        raise RuntimeError(
            f"without {names}: expected hetlb interpreted, {default_policy.__file__} is compiled"
        )
    taken = names.split(",") if names else []
    changes = [change for name in taken if (change := _INGREDIENTS[name]) is not None]
    terms = tuple(each._replace(weight=0.0) if each.name in taken else each for each in TERMS)
    changes.append((default_policy, "TERMS", terms))
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in changes]
    for change in changes:
        setattr(*change)

    def put_back() -> None:
        for was in before:
            setattr(*was)

    return put_back


class Observed(FleetSimulation):
    """A simulation that keeps how true the forecasts were when the last request came.

    Afterwards the fleet empties, and the answers of then are of no load that was asked for.
    """

    def _arrived(self, scheduler: Scheduler, request: Request) -> list[Command]:
        commands = super()._arrived(scheduler, request)
        if request.id == self.last_id:
            self.forecasts = [
                {name: (ratios.bias, ratios.coverage) for name, ratios in each.errors.by_figure}
                for each in scheduler.instances
                if each.errors.end.samples >= FORECASTS
            ]
        return commands

    last_id = -1
    forecasts: Sequence[dict[str, tuple[float | None, float | None]]] = ()


def _forecast_figures(forecasts: Sequence[dict[str, tuple[float | None, float | None]]]) -> dict[str, float]:
    """Bias and coverage of the 90 % bound, means over the instances."""
    figures = {}
    for name in ("first_token", "end"):
        for index, figure in enumerate(("bias", "coverage")):
            found = [each[name][index] for each in forecasts]
            figures[f"{name}_{figure}"] = (
                statistics.fmean(x for x in found if x is not None) if found else math.nan
            )
    return figures


def simulate(case: Case) -> dict[str, float]:
    """Run one case. Raises `AssertionError` unless all requests completed exactly."""
    assert _lab is not None, "expected the data to be read"
    specs, engines = _lab.fleet(case.kinds)
    plan = _plan(_lab, case, _per_instance * len(specs))
    if case.slowed_at_s is not None:
        first = specs[0].name
        engines[first] = replace(engines[first], changes=((case.slowed_at_s, SLOW),))
    believed = scaled(specs, case.factors) if case.factors else specs
    setup = _lab.setup(believed, case.policy, case.predictor, case.trace, case.seed)
    setup = replace(setup, params=PolicyParams(weights=case.weights))
    put_back = without(case.without)
    try:
        simulation = Observed(setup, engines, plan, model=MODEL)
        simulation.last_id = len(plan) - 1
        result = simulation.run()
    finally:
        put_back()
    assert all(outcome is Outcome.OK for outcome in result.outcomes), f"{case}: a request failed"
    exact = all(r.output_tokens == max(1, p.output_tokens) for r, p in zip(result.records, plan, strict=True))
    assert exact, f"{case}: a request has another length"
    summary = result.summary()
    keys = (
        "total_token_throughput", "request_throughput", "mean_ttft_ms", "p99_ttft_ms", "p99_e2el_ms",
        "mean_e2el_ms", "time_to_99_percent_s",
    )  # fmt: skip
    figures = {key: float(summary[key]) for key in (*keys, "duration")}
    figures["tail_ms"] = _p99_after(result.records, plan, case)
    latencies = {engine.latency for engine in engines.values()}
    for times, good in zip(GOOD, _good(result.records, plan, latencies), strict=True):
        figures[f"goodput_{times:g}x"] = good
    figures |= _forecast_figures(simulation.forecasts)
    return figures


def _good(
    records: Sequence[Any], plan: Sequence[PlannedRequest], latencies: Iterable[LatencyModel]
) -> list[float]:
    """Shares of good requests, for each of `GOOD`."""
    slowness = []
    for record, planned in zip(records, plan, strict=True):
        prompt, output = planned.input_tokens, max(1, planned.output_tokens)
        alone_s = min(each.prefill_s(prompt) for each in latencies)
        answer_s = min(each.prefill_s(prompt) + each.answer_s(prompt, output) for each in latencies)
        first_s, end_s = record.first_token_s - planned.scheduled_s, record.last_token_s - planned.scheduled_s
        slowness.append(max(first_s / alone_s, end_s / answer_s))
    return [sum(each <= times for each in slowness) / len(slowness) for times in GOOD]


def _p99_after(records: Sequence[Any], plan: Sequence[PlannedRequest], case: Case) -> float:
    """p99 of the whole time (ms) of what is due more than a minute after an instance was slowed, else 0."""
    if case.slowed_at_s is None:
        return 0.0
    late = sorted(
        record.last_token_s - planned.scheduled_s
        for record, planned in zip(records, plan, strict=True)
        if planned.scheduled_s > case.slowed_at_s + 60.0
    )
    return 1e3 * late[int(0.99 * (len(late) - 1))] if late else 0.0


def refer(case: Case) -> dict[str, float]:
    """`bound` and `split` of a case, tokens/s."""
    assert _lab is not None, "expected the data to be read"
    specs, engines = _lab.fleet(case.kinds)
    plan = _plan(_lab, case, _per_instance * len(specs))
    setup = _lab.setup(specs, "rr", case.predictor, case.trace, case.seed)
    alone = {name: run_alone(spec, plan, IterationRule.TOKEN).tokens_per_s for name, spec in engines.items()}
    oracle = {planned.index: max(1, planned.output_tokens) for planned in plan}
    predictor = make_predictor(
        case.predictor, rng=random.Random(case.seed), lengths=setup.lengths, oracle=oracle
    )
    split = fixed_split(engines, plan, IterationRule.TOKEN, alone, predictor, model=MODEL)
    return {"bound": sum(alone.values()), "split": split}


def _sources() -> str:
    """Digest of all that decides the outcome of a run."""
    package, here = Path(hetlb.__file__).parent, Path(__file__).parent
    files = [here / "cases.py", here / "measure.py"]
    for room in ("balancer/core", "tools/profiler", "tools/sim", "tools/workload"):
        found = sorted((package / room).rglob("*.py"))
        assert found, f"expected files in {package / room}"
        files += found
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


Study = Callable[[Case], dict[str, float]]


class Runs:
    """Runs cases in parallel processes and remembers them, so that none is run twice.

    In the file `kept`, if there is one, they are remembered from call to call, as lines of JSON: digest of
    the sources, name of the run, figures. Runs of other sources are not taken.
    """

    def __init__(self, data: Path, per_instance: int, jobs: int, kept: Path | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = context.Pool(jobs, _start, (data, per_instance))
        self._known: dict[str, dict[str, float]] = {}
        self._kept = kept
        self._sources = _sources()
        self._per_instance = per_instance
        if kept is not None and kept.exists():
            for line in kept.read_text().splitlines():
                sources, name, figures = json.loads(line)
                if sources == self._sources:
                    self._known[name] = figures

    def __call__(self, what: Study, cases: Iterable[Case], title: str) -> dict[Case, dict[str, float]]:
        wanted = list(dict.fromkeys(cases))
        missing = [case for case in wanted if self._name(what, case) not in self._known]
        # The longest first, so that no process is left with one at the end.
        missing.sort(key=lambda case: -sum(kind.count for kind in case.kinds))
        done = self._pool.imap(what, missing)
        shown = track(done, title, total=len(missing), console=Console(stderr=True))
        for case, figures in zip(missing, shown, strict=True):
            self._keep(self._name(what, case), figures)
        return {case: self._known[self._name(what, case)] for case in wanted}

    def _name(self, what: Study, case: Case) -> str:
        return f"{what.__name__} {self._per_instance} {case}"

    def _keep(self, name: str, figures: dict[str, float]) -> None:
        self._known[name] = figures
        if self._kept is not None:
            with self._kept.open("a") as file:
                file.write(json.dumps([self._sources, name, figures]) + "\n")

    def close(self) -> None:
        self._pool.terminate()


def held_out_fleets(
    layouts: Sequence[tuple[str, str, int]], seed: int = HELD_OUT_SEED
) -> dict[str, tuple[Kind, ...]]:
    """Fleets of 2 to 9 instances drawn from all layouts of one model, unlike the grid's."""
    rng = random.Random(seed)
    models = sorted({model for _, model, _ in layouts})
    fleets: dict[str, tuple[Kind, ...]] = {}
    while len(fleets) < HELD_OUT:
        model = rng.choice(models)
        choices = [(system, tp) for system, of, tp in layouts if of == model]
        if len(choices) < 2:
            continue
        kinds = tuple(
            Kind(system, model, tp, rng.randint(1, 3))
            for system, tp in rng.sample(choices, rng.randint(2, min(3, len(choices))))
        )
        name = " + ".join(f"{k.count} x {k.system.split('_')[0]} TP {k.tp}" for k in kinds)
        fleets[f"{model}: {name}"] = kinds
    return fleets


def at_once(
    runs: Runs, fleets: dict[str, tuple[Kind, ...]], predictors: Sequence[str], seed: int
) -> list[Any]:
    """Every policy with all requests at once, as shares of the bound."""
    keys = [(f, t, p) for f in fleets for t in TRACES for p in predictors]
    base = {key: Case(key[0], fleets[key[0]], key[1], key[2], "hetlb", seed=seed) for key in keys}
    # Policies that predict nothing are the same under every predictor.
    of = {
        (key, policy): replace(
            base[key], policy=policy, predictor=key[2] if policy in PREDICTING else "empirical"
        )
        for key in keys
        for policy in (*OTHERS, "hetlb")
    }
    references = runs(refer, base.values(), "bound and split")
    figures = runs(simulate, of.values(), "all at once")
    rows = []
    for key, case in base.items():
        bound, split = references[case]["bound"], references[case]["split"]
        shares = {p: figures[of[key, p]]["total_token_throughput"] / bound for p in (*OTHERS, "hetlb")}
        rows.append(
            {
                "fleet": key[0],
                "trace": key[1],
                "predictor": key[2],
                "bound": bound,
                "split": split / bound,
                **shares,
            }
        )
    return rows


PREDICTING = ("paper", "hetlb")


def moderate(runs: Runs, full: dict[tuple[str, str], float], seeds: Sequence[int]) -> list[Any]:
    """Medians over the seeds at shares of what `hetlb` does at once (requests/s)."""
    cases = {
        (f, t, share, policy): [
            Case(f, FLEETS[f], t, "empirical", policy, rate=share * rate, seed=seed) for seed in seeds
        ]
        for (f, t), rate in full.items()
        for share in RATES
        for policy in (*OTHERS, "hetlb")
    }
    for f, t, share, policy in list(cases):
        if policy == "hetlb":
            for name, (_, weights) in SETTINGS.items():
                cases[f, t, share, name] = [replace(c, weights=weights) for c in cases[f, t, share, policy]]
    figures = runs(simulate, (case for each in cases.values() for case in each), "at 50, 80, 95 %")

    def middle(key: tuple[str, str, float, str], figure: str) -> float:
        return statistics.median(figures[case][figure] for case in cases[key])

    rows = []
    for f, t in full:
        for share in RATES:
            row: dict[str, Any] = {"fleet": f, "trace": t, "rate": share}
            for figure in ("request_throughput", "p99_ttft_ms", "p99_e2el_ms", "mean_e2el_ms"):
                best = max if figure == "request_throughput" else min
                other = best(OTHERS, key=lambda p: middle((f, t, share, p), figure))
                own, others = middle((f, t, share, "hetlb"), figure), middle((f, t, share, other), figure)
                row[figure] = {"hetlb": own, "best_other": others, "by": other, "ratio": own / others}
            for name, (figure, _) in SETTINGS.items():
                own = middle((f, t, share, name), figure)
                row[name] = {"hetlb": own, "ratio": own / row[figure]["best_other"]}
            row["forecast"] = {each: middle((f, t, share, "hetlb"), each) for each in FORECAST_FIGURES}
            for times in GOOD:
                figure = f"goodput_{times:g}x"
                good = {p: middle((f, t, share, p), figure) for p in (*OTHERS, "hetlb")}
                row[figure] = good
            rows.append(row)
    return rows


def _slowed(case: Case) -> Case:
    """The case with its first instance slowed from the middle on."""
    count = sum(kind.count for kind in case.kinds)
    return replace(case, slowed_at_s=SLOWED * count * _per_instance / case.rate)


def _steady(full: dict[tuple[str, str], float]) -> list[Case]:
    """Every fleet and trace at half of its full rate."""
    return [Case(f, FLEETS[f], t, "empirical", "hetlb", rate=0.5 * rate) for (f, t), rate in full.items()]


def uncorrected(runs: Runs, full: dict[tuple[str, str], float]) -> list[Any]:
    """A slowed instance without the correction of its speed."""
    cases = [replace(_slowed(case), without="speed correction") for case in _steady(full)]
    figures = runs(simulate, cases, "without correction")
    return [
        {"fleet": case.fleet, "trace": case.trace, "p99_s": figures[case]["tail_ms"] / 1e3} for case in cases
    ]


def mishaps(runs: Runs, full: dict[tuple[str, str], float]) -> list[Any]:
    """Wrong profiles, a slowed instance and a burst, each beside the run without it."""
    rows = []
    wanted: list[Case] = []
    for steady in _steady(full):
        count = sum(kind.count for kind in steady.kinds)
        right = replace(steady, rate=math.inf)
        high = tuple(1.3 if i % 2 else 0.7 for i in range(count))
        low = tuple(0.7 if i % 2 else 1.3 for i in range(count))
        slowed = _slowed(steady)
        wanted += [right, replace(right, factors=high), replace(right, factors=low), steady, slowed]
        paper = replace(slowed, policy="paper")
        burst = replace(steady, burst=True)
        wanted += [paper, burst, replace(burst, policy="paper")]
        rows.append((right, high, low, steady, slowed, paper, burst))
    figures = runs(simulate, wanted, "mishaps")
    table = []
    for right, high, low, steady, slowed, paper, burst in rows:
        true = figures[right]["total_token_throughput"]
        table.append(
            {
                "fleet": right.fleet,
                "trace": right.trace,
                "wrong_up": figures[replace(right, factors=high)]["total_token_throughput"] / true,
                "wrong_down": figures[replace(right, factors=low)]["total_token_throughput"] / true,
                "steady_throughput": figures[steady]["request_throughput"],
                "slowed_throughput": figures[slowed]["request_throughput"]
                / figures[steady]["request_throughput"],
                "slowed_p99_s": figures[slowed]["tail_ms"] / 1e3,
                "slowed_paper_p99_s": figures[paper]["tail_ms"] / 1e3,
                "burst_p99_ttft": figures[burst]["p99_ttft_ms"] / 1e3,
                "burst_paper_p99_ttft": figures[replace(burst, policy="paper")]["p99_ttft_ms"] / 1e3,
            }
        )
    return table


#: Ingredients left out, by the name of the row: first from zero, one by one, then each alone.
ABLATIONS = {
    "from zero: `own_s`, bound on arrival": "hold,finish_s,first_token_s,others_s,room",
    "+ room (late binding)": "hold,finish_s,first_token_s,others_s",
    "+ `others_s`": "hold,finish_s,first_token_s",
    "+ `first_token_s`": "hold,finish_s",
    "+ hold": "finish_s",
    "+ `finish_s`: all": "",
    "all without room": "room",
    "all without hold": "hold",
    "all without `others_s`": "others_s",
    "all without `first_token_s`": "first_token_s",
    "all without speed correction": "speed correction",
}


def ablate(runs: Runs, fleets: dict[str, tuple[Kind, ...]]) -> list[Any]:
    """`hetlb` from zero, on fleets that it was not tuned on: shares of the bound at once, times at 80 %.

    Also shares with wrong profiles. The traces take turns from fleet to fleet.
    """
    traces = tuple(TRACES)
    base = [
        Case(fleet, kinds, traces[number % len(traces)], "empirical", "hetlb", seed=HELD_OUT_SEED + number)
        for number, (fleet, kinds) in enumerate(fleets.items())
    ]
    bounds = runs(refer, base, "bound and split")
    full = runs(simulate, base, "full rate")
    cases = {}
    for name, missing in ABLATIONS.items():
        for case in base:
            once = replace(case, without=missing)
            count = sum(kind.count for kind in case.kinds)
            wrong = replace(once, factors=tuple(1.3 if i % 2 else 0.7 for i in range(count)))
            loaded = replace(once, rate=0.8 * full[case]["request_throughput"])
            cases[name, case] = (once, loaded, wrong)
    figures = runs(simulate, (case for each in cases.values() for case in each), "ablations")
    whole = next(name for name, missing in ABLATIONS.items() if not missing)
    rows = []
    for name in ABLATIONS:

        def over(figure: str, which: int, of: dict[Case, float], name: str = name) -> list[float]:
            return [figures[cases[name, case][which]][figure] / of[case] for case in base]

        def ratio(figure: str, which: int = 1, name: str = name) -> float:
            complete = {case: figures[cases[whole, case][which]][figure] for case in base}
            return statistics.geometric_mean(over(figure, which, complete, name))

        bound = {case: bounds[case]["bound"] for case in base}
        shares = over("total_token_throughput", 0, bound)
        rows.append(
            {
                "row": name,
                "mean_share": statistics.mean(shares),
                "min_share": min(shares),
                "time_to_99_percent": ratio("time_to_99_percent_s", 0),
                "wrong_mean_share": statistics.mean(over("total_token_throughput", 2, bound)),
                **{each: ratio(f"{each}_ms") for each in ("mean_ttft", "p99_ttft", "mean_e2el", "p99_e2el")},
            }
        )
    return rows
