"""Plans of what to rent: the paper's worked example, enumeration, pruning, errors in one line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.balancer.config.profile_file import Profile, load_profile
from hetlb.balancer.core.policies.worth import busy_s
from hetlb.errors import PlanError
from hetlb.tools.plan import decompose
from hetlb.tools.plan.check import check_rent
from hetlb.tools.plan.highs import INFINITY, Interrupt, SolveLimits
from hetlb.tools.plan.market import MoveCost, load_market
from hetlb.tools.plan.planning import Table, measure_table
from hetlb.tools.plan.rent_baselines import baselines, proportional_rate, round_robin_rate
from hetlb.tools.plan.rent_program import (
    Configuration,
    ConfigurationStage,
    Problem,
    RentPlan,
    SolvedPlan,
    assign,
    prune,
    solve,
)
from hetlb.tools.plan.rent_search import PlanSearch
from hetlb.tools.plan.rent_simulation import engines_of, worth_of
from hetlb.tools.plan.replan import moves_between, replan
from hetlb.tools.plan.throughput import Measured, Mix
from hetlb.tools.plan.workloads import RequestType
from hetlb.tools.sim.staged_engine import EngineStage

LIMITS, USUAL = SolveLimits(gap=1e-9), SolveLimits(gap=1e-4)
MARKETS = Path(__file__).parents[2] / "configs" / "markets"
DEMO = Path(__file__).parents[2] / "hetlb" / "tools" / "demo"


def toy() -> Problem:
    """Jiang et al., ICML 2025, section 4.2: 80 and 20 requests, three kinds of GPUs, 8 dollars an hour."""

    def one(name: str, gpu: str, count: int, w1: float, w2: float) -> Configuration:
        return Configuration(name, "m", {gpu: count}, {"w1": w1, "w2": w2})

    return Problem(
        (RequestType("w1", "m", 0.8), RequestType("w2", "m", 0.2)),
        (
            one("t1", "t1", 1, 1.0, 1.2),
            one("t2", "t2", 1, 0.9, 0.9),
            one("t3", "t3", 1, 0.3, 0.5),
            one("t2x2", "t2", 2, 2.4, 1.5),
        ),
        {"t1": 2.0, "t2": 2.0, "t3": 2.0},
        {"t1": 4.0, "t2": 2.0, "t3": 2.0},
        8.0,
    )


@pytest.mark.parametrize(("prompt", "alike"), [(2000, True), (100, False)])
def test_types_that_their_answers_alone_tell_apart_have_one_price(prompt: int, alike: bool) -> None:
    """An instance is worth what it serves of both together; of types told apart, what it adds to the plan."""
    profiles = {name: load_profile(DEMO / f"{name}.yaml") for name in ("fast", "slow")}
    kinds = (
        RequestType("short", "m", 0.25, ((2000, 5),)),
        RequestType("long", "m", 0.75, ((prompt, 800),)),
    )
    rates = dict.fromkeys(("short", "long"), 1.0)
    configurations = tuple(Configuration(n, "m", {n: 1}, rates, profile=p) for n, p in profiles.items())
    problem = Problem(kinds, configurations, {"fast": 1.0, "slow": 2.0}, {"fast": 1.0, "slow": 1.0}, 3.0)
    plan = RentPlan({"fast": 1, "slow": 2}, {(k, c): 1.0 for k in rates for c in profiles}, 4.0)
    worth = dict(worth_of(problem, plan))
    assert worth["slow-0"] == worth["slow-1"]
    both = {}
    for name, engine in engines_of(problem, plan).items():
        limits = engine.limits
        sizes = limits.kv_cache_tokens, limits.max_num_seqs, limits.max_num_batched_tokens
        mean_s = sum(
            kind.share * busy_s(engine.latency, *sizes, kind.input_tokens, kind.output_tokens)
            for kind in kinds
        )
        both[f"{name}-0"] = both[f"{name}-1"] = 1.0 / mean_s
    assert ({name: both[name] for name in worth} == pytest.approx(worth)) is alike


def test_one_degree_for_all_takes_what_simpler_servers_equal() -> None:
    """A pair of GPUs that two singles equal is no part of the plan, but of the best rent of TP 2 alone."""

    def one(name: str, degree: int, rate: float) -> Configuration:
        stage = ConfigurationStage("g", degree, Fraction(1))
        return Configuration(name, "m", {"g": degree}, {"w": rate}, stages=(stage,))

    kinds = (RequestType("w", "m", 1.0),)
    problem = Problem(kinds, (one("tp1", 1, 1.0), one("tp4", 4, 1.5)), {"g": 4.0}, {"g": 1.0}, 4.0)
    solved, ties = SolvedPlan(problem, decompose.solve(problem, LIMITS)), (one("tp2", 2, 1.99),)

    def plan(problem: Problem) -> RentPlan:
        return decompose.solve(problem, LIMITS)

    assert baselines(solved, plan, ties)["one TP for all (TP 1)"]["throughput_req_s"] == pytest.approx(4.0)
    solved = SolvedPlan(replace(problem, configurations=problem.configurations[1:]), solved.plan)
    found = baselines(solved, plan, ties)["one TP for all (TP 2)"]
    assert found["throughput_req_s"] == pytest.approx(3.98)


def test_the_optimum_of_the_worked_example() -> None:
    problem = toy()
    plan = decompose.solve(problem, LIMITS)
    check_rent(problem, plan)
    assert 100 / plan.throughput == pytest.approx(float(Fraction(1450, 51)), abs=1e-9)
    assert plan.counts == {"t1": 1, "t2x2": 1}
    shares = {
        key: rate / (0.8 if key[0] == "w1" else 0.2) / plan.throughput for key, rate in plan.rates.items()
    }
    assert shares == pytest.approx({("w1", "t1"): 5 / 34, ("w1", "t2x2"): 29 / 34, ("w2", "t1"): 1.0})


@pytest.mark.parametrize(
    ("counts", "seconds"),
    [
        ({"t1": 1, "t2": 1, "t3": 1}, Fraction(6300, 143)),
        ({"t1": 1, "t2": 2}, Fraction(740, 21)),
        ({"t1": 1, "t2x2": 1}, Fraction(14200, 459)),
    ],
)
def test_the_steps_of_the_worked_example(counts: dict[str, int], seconds: Fraction) -> None:
    assert 100 / proportional_rate(toy(), counts) == pytest.approx(float(seconds), rel=1e-12)


def test_a_target_is_met_at_least_cost() -> None:
    problem = replace(toy(), budget_per_hour=INFINITY, request_rate=2.0)
    plan = decompose.solve(problem, LIMITS)
    check_rent(problem, plan)
    assert plan.throughput == pytest.approx(2.0)
    assert plan.cost_per_hour == 4.0


def test_round_robin_is_bound_by_the_slowest_instance() -> None:
    # Each of two instances gets half: t1 needs 0.4/1.0 + 0.1/1.2 seconds for a request's share, t2x2 less.
    assert round_robin_rate(toy(), {"t1": 1, "t2x2": 1}) == pytest.approx(1 / (0.4 + 0.1 / 1.2))


# --- against enumeration --------------------------------------------------------------------------------

RATES = st.one_of(st.just(0.0), st.floats(0.1, 4.0))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to three kinds of GPUs, four configurations, one or two models of up to two types each."""
    gpus = ["a", "b", "c"][: draw(st.integers(1, 3))]
    prices = {gpu: draw(st.sampled_from([0.5, 1.0, 1.7, 3.1])) for gpu in gpus}
    models = ["m", "n"][: draw(st.integers(1, 2))]
    workloads = [
        RequestType(f"{model}{w}", model, draw(st.floats(0.1, 1.0)))
        for model in models
        for w in range(draw(st.integers(1, 2)))
    ]
    total = sum(w.share for w in workloads)
    configurations = []
    for index in range(draw(st.integers(1, 4))):
        model = models[index % len(models)]
        used = draw(st.dictionaries(st.sampled_from(gpus), st.integers(1, 2), min_size=1, max_size=2))
        rates = {w.name: draw(RATES) for w in workloads if w.model == model}
        configurations.append(Configuration(f"c{index}", model, used, rates))
    return Problem(
        tuple(replace(w, share=w.share / total) for w in workloads),
        tuple(configurations),
        {gpu: float(draw(st.integers(0, 3))) for gpu in gpus},
        prices,
        draw(st.sampled_from([1.0, 5.0, 9.0])),
    )


def best_by_enumeration(problem: Problem) -> float:
    best = 0.0
    for counts in itertools.product(*(range(int(problem.most(c)) + 1) for c in problem.configurations)):
        chosen = {c.name: n for c, n in zip(problem.configurations, counts, strict=True) if n}
        plan = assign(problem, chosen) if chosen and within(problem, chosen) else None
        best = max(best, plan.throughput if plan is not None else 0.0)
    return best


def within(problem: Problem, counts: dict[str, int]) -> bool:
    known = {c.name: c for c in problem.configurations}
    cost = sum(problem.price(known[name]) * count for name, count in counts.items())
    used = [
        sum(known[name].gpus.get(gpu, 0) * count for name, count in counts.items()) <= limit
        for gpu, limit in problem.available.items()
    ]
    return cost <= problem.budget_per_hour + 1e-9 and all(used)


@settings(max_examples=60)
@given(problems())
def test_a_plan_is_the_best_of_all_that_can_be_enumerated(problem: Problem) -> None:
    best, problem_line = best_by_enumeration(problem), ""
    try:
        plan: RentPlan | None = decompose.solve(problem, LIMITS)
    except PlanError as error:
        problem_line = str(error)
        plan = None
    if plan is None:
        assert best == 0.0
        assert "\n" not in problem_line
        return
    check_rent(problem, plan)
    assert plan.throughput == pytest.approx(best, rel=1e-6)
    assert plan.bound >= plan.throughput * (1 - 1e-9)


@settings(max_examples=60)
@given(problems())
def test_pruning_loses_nothing(problem: Problem) -> None:
    assert best_by_enumeration(prune(problem)) == pytest.approx(best_by_enumeration(problem), rel=1e-9)


# --- many models ----------------------------------------------------------------------------------------


def many_models(count: int) -> Problem:
    """Models that differ in size; three kinds of GPUs, one, two or four of them an instance."""
    configurations, workloads = [], []
    for index in range(count):
        model, size = f"m{index}", 1.0 + index % 4
        workloads += [RequestType(f"{model}w{w}", model, (1 + (index + w) % 3) / size) for w in range(3)]
        for gpu, speed in (("a", 1.0), ("b", 2.4), ("c", 4.1)):
            for gpus in (1, 2, 4):
                rates = {
                    f"{model}w{w}": speed
                    * gpus ** (0.9 + 0.05 * w)
                    * (1 + 0.1 * ((index * 7 + w * 3) % 5))
                    / size
                    for w in range(3)
                }
                configurations.append(Configuration(f"{model}{gpu}{gpus}", model, {gpu: gpus}, rates))
    total = sum(w.share for w in workloads)
    return Problem(
        tuple(replace(w, share=w.share / total) for w in workloads),
        tuple(configurations),
        {"a": 20.0, "b": 15.0, "c": 12.0},
        {"a": 1.0, "b": 2.1, "c": 3.9},
        60.0,
    )


def test_decomposition_and_one_program_bound_each_other() -> None:
    problem = many_models(6)
    limits = SolveLimits(gap=0.02)
    search = decompose.Decomposition(prune(problem), limits)
    search.run()
    plan = assign(problem, search.counts, search.bound)
    assert plan is not None
    check_rent(problem, plan)
    direct = solve(problem, limits)
    assert plan.throughput <= direct.bound * (1 + 1e-6)
    assert direct.throughput <= plan.bound * (1 + 1e-6)


@pytest.mark.parametrize("looks", [0.0, 300.0, 1000.0, INFINITY])
def test_a_decomposition_without_a_plan_leaves_one_program_time_and_the_same_end(
    monkeypatch: pytest.MonkeyPatch, looks: float
) -> None:
    ends: list[float] = []
    left: list[float] = []

    def one_program(problem: Problem, limits: SolveLimits, _: object) -> RentPlan:
        ends.append(limits.deadline)
        left.append(limits.left_s)
        while not limits.over and len(ends) == 1:
            pass
        raise PlanError("no plan")

    clock = itertools.count()
    monkeypatch.setattr(decompose, "solve_directly", one_program)
    monkeypatch.setattr(decompose.Decomposition, "_choose", lambda search, rate, limits: None)
    with pytest.raises(PlanError, match="no plan"):
        decompose.solve(many_models(4), SolveLimits(deadline=looks, clock=lambda: float(next(clock))))
    assert ends[-1] == looks
    assert ends[0] <= min(looks / 3, 100.0)
    assert left[-1] >= looks / 5


def test_what_one_program_solves_is_not_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(decompose.Decomposition, "run")
    problem, limits = many_models(3), SolveLimits(gap=0.02)
    assert decompose.solve(problem, limits).throughput == solve(problem, limits).throughput


def test_an_interrupt_leaves_the_best_plan_so_far() -> None:
    interrupt = Interrupt()

    def stop(best: float, bound: float) -> None:
        interrupt.requested = interrupt.requested or best == best

    problem = many_models(8)
    plan = decompose.solve(problem, SolveLimits(gap=0.0, interrupt=interrupt), stop)
    check_rent(problem, plan)
    assert plan.throughput > 0


# --- what is checked, and what is said ------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"counts": {"t1": 2, "t2x2": 1}},
        {"counts": {"t1": 1}},
        {"throughput": 3.6},
        {"cost_per_hour": 7.0},
        {"bound": 3.0},
        {"rates": {("w1", "t2x2"): 2.9}},
    ],
)
def test_check_finds_a_plan_that_is_wrong(change: dict[str, object]) -> None:
    problem = toy()
    plan = decompose.solve(problem, LIMITS)
    with pytest.raises(PlanError):
        check_rent(problem, replace(plan, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("problem", "missing"),
    [
        (replace(toy(), budget_per_hour=1.5), "budget_per_hour: the cheapest instance for workload w1"),
        (replace(toy(), available={"t1": 0.0, "t2": 0.0, "t3": 0.0}), "needs 1 t1 (0 available)"),
        (replace(toy(), configurations=()), "model m: expected a configuration that fits it, got none"),
        (replace(toy(), request_rate=9.0, budget_per_hour=INFINITY), "expected at most 5.4"),
    ],
)
def test_what_is_missing_is_said_in_one_line(problem: Problem, missing: str) -> None:
    with pytest.raises(PlanError, match=missing.replace("(", r"\(").replace(")", r"\)")) as caught:
        decompose.solve(problem, LIMITS)
    assert "\n" not in str(caught.value)


def test_two_models_that_the_budget_serves_only_one_by_one() -> None:
    workloads = (RequestType("a", "m", 0.5), RequestType("b", "n", 0.5))
    configurations = (
        Configuration("c", "m", {"g": 1}, {"a": 1.0}),
        Configuration("d", "n", {"g": 1}, {"b": 1.0}),
    )
    problem = Problem(workloads, configurations, {"g": 4.0}, {"g": 3.0}, 5.0)
    with pytest.raises(PlanError, match="at least 6 per hour is needed to serve every workload"):
        decompose.solve(problem, LIMITS)


# --- mixes and moves ------------------------------------------------------------------------------------


def test_a_measured_mix_serves_more_than_its_types_by_turns() -> None:
    mixed = Configuration("c", "m", {"g": 1}, {"a": 1.0, "b": 1.0}, ({"a": 0.6, "b": 0.6},))
    workloads = (RequestType("a", "m", 0.5), RequestType("b", "m", 0.5))
    problem = Problem(workloads, (mixed,), {"g": 1.0}, {"g": 1.0}, 1.0)
    plan = decompose.solve(problem, LIMITS)
    check_rent(problem, plan)
    assert plan.throughput == pytest.approx(1.2)


def test_few_moves_where_many_gain_little() -> None:
    old = {"t1": 1, "t2": 2}
    found = replan(toy(), old, MoveCost(load_s=600, horizon_s=1200, keep=0.5), LIMITS)
    assert found.plan.counts == old
    assert found.moves.count == 0
    assert found.scratch_moves.count == 3
    eager = replan(toy(), old, MoveCost(keep=0.95), LIMITS)
    assert eager.plan.throughput == pytest.approx(found.scratch.throughput)
    assert eager.moves.count == 3


def test_a_fleet_that_is_dear_but_enough_stays_where_nothing_is_to_be_kept() -> None:
    problem = replace(toy(), budget_per_hour=INFINITY, request_rate=1.0)
    found = replan(problem, {"t1": 2}, MoveCost(keep=0.0), LIMITS)
    assert found.plan.counts == {"t1": 2}
    assert found.moves.count == 0


def test_moves_are_what_differs() -> None:
    moves = moves_between({"a": 2, "b": 1}, {"a": 1, "c": 3})
    assert (moves.start, moves.stop, moves.count) == ({"c": 3}, {"a": 1, "b": 1}, 5)


def test_an_empty_plan_has_no_known_gap() -> None:
    assert RentPlan({}).gap(toy()) == INFINITY


# --- measured plans -------------------------------------------------------------------------------------


class Mixed(Measured):
    """Measured rates by a formula: an instance serves more of a mix, or less, than its types by turns."""

    def __init__(self, rates: dict[str, dict[int, float]], gains: dict[str, float]) -> None:
        super().__init__()
        self.rates, self.gains = rates, gains

    def of_mix(self, profile: Profile, mix: Mix, stages: Sequence[EngineStage]) -> float:
        self.runs += 1
        total = sum(share for share, _ in mix)
        parts = {rows[0][0]: share / total for share, rows in mix}
        by_turns = 1.0 / sum(part / self.rates[profile.name][prompt] for prompt, part in parts.items())
        evenness = 4.0 * math.prod(parts.values()) if len(parts) == 2 else 0.0
        return by_turns * (1.0 + self.gains[profile.name] * evenness)


@st.composite
def mixed_markets(draw: st.DrawFn) -> tuple[Table, Mixed]:
    """Two or three kinds of GPU, each alone and in pipelines of two, and two types that mix well or badly."""
    gpus = [f"g{n}" for n in range(draw(st.integers(2, 3)))]
    base = load_profile(DEMO / "fast.yaml")
    rates: dict[str, dict[int, float]] = {}
    gains: dict[str, float] = {}
    found = []
    for kinds in [*itertools.combinations(gpus, 1), *itertools.combinations(gpus, 2)]:
        name = "-".join(kinds)
        rates[name] = {
            100: draw(st.floats(1.0, 5.0)) * len(kinds),
            900: draw(st.floats(0.3, 2.0)) * len(kinds),
        }
        gains[name] = draw(st.floats(-0.25, 0.25))
        profile = msgspec.structs.replace(base, name=name)
        stages = tuple(ConfigurationStage(gpu, 1, Fraction(1, len(kinds))) for gpu in kinds)
        guess = {"short": rates[name][100], "long": rates[name][900]}
        found.append(Configuration(name, "m", dict.fromkeys(kinds, 1), guess, stages=stages, profile=profile))
    share = draw(st.floats(0.2, 0.8))
    types = (
        RequestType("short", "m", share, ((100, 10),)),
        RequestType("long", "m", 1.0 - share, ((900, 10),)),
    )
    prices = {gpu: draw(st.sampled_from([1.0, 1.7, 2.3, 3.1])) for gpu in gpus}
    available = {gpu: float(draw(st.integers(1, 4))) for gpu in gpus}
    problem = Problem(types, tuple(found), available, prices, draw(st.floats(5.0, 9.0)))
    return Table(load_market(MARKETS / "toy.yaml"), problem), Mixed(rates, gains)


def measured_plan(table: Table, measured: Mixed, gpus: Iterable[str]) -> RentPlan | None:
    problem = table.problem
    own = tuple(c for c in problem.configurations if set(c.gpus) <= set(gpus))
    table = replace(table, problem=replace(problem, configurations=own))
    try:
        return PlanSearch(measure_table(table, measured, USUAL), measured, USUAL).solved().plan
    except PlanError:
        return None


def served_rate(table: Table, measured: Mixed, plan: RentPlan) -> float:
    """Return the rate that a plan's instances serve, by the formula alone."""
    rows = {kind.name: kind.rows for kind in table.problem.workloads}
    rate = INFINITY
    for name, count in plan.counts.items():
        own = {kind: each for (kind, c), each in plan.rates.items() if c == name}
        profile = table.problem.by_name[name].profile
        assert profile is not None
        served = count * measured.of_mix(profile, [(each, rows[kind]) for kind, each in own.items()], ())
        rate = min(rate, plan.throughput * served / sum(own.values()))
    return rate


@settings(max_examples=8, deadline=None)
@given(mixed_markets())
def test_no_offer_makes_a_plan_worse_and_plans_serve_what_they_promise(drawn: tuple[Table, Mixed]) -> None:
    table, measured = drawn
    gpus = sorted(table.problem.available)
    plan = measured_plan(table, measured, gpus)
    if plan is None:
        return
    assert served_rate(table, measured, plan) >= plan.throughput * (1.0 - 1e-6)
    assert plan.bound >= plan.throughput
    for gpu in gpus:
        part = measured_plan(table, measured, set(gpus) - {gpu})
        # Plans within a thousandth are even: the cheaper is taken.
        assert part is None or part.throughput <= plan.throughput * 1.001


@settings(max_examples=4, deadline=None)
@given(mixed_markets())
def test_an_offer_that_is_slower_and_dearer_changes_nothing(drawn: tuple[Table, Mixed]) -> None:
    table, measured = drawn
    problem = replace(table.problem, available=dict.fromkeys(table.problem.available, 9.0))
    plan = measured_plan(replace(table, problem=problem), measured, problem.available)
    first = problem.configurations[0]
    assert first.profile is not None
    measured.rates["worse"] = {prompt: 0.8 * rate for prompt, rate in measured.rates[first.name].items()}
    measured.gains["worse"] = measured.gains[first.name]
    worse = replace(
        first,
        name="worse",
        gpus={"worse": 1},
        throughput={name: 0.8 * rate for name, rate in first.throughput.items()},
        stages=(ConfigurationStage("worse", 1, Fraction(1)),),
        profile=msgspec.structs.replace(first.profile, name="worse"),
    )
    more = replace(
        problem,
        configurations=(*problem.configurations, worse),
        prices={**problem.prices, "worse": 1.3 * problem.prices["g0"]},
        available={**problem.available, "worse": 4.0},
    )
    found = measured_plan(replace(table, problem=more), measured, more.available)
    if plan is None or found is None:
        assert plan is found
        return
    assert "worse" not in found.counts
    assert (found.counts, found.rates) == (plan.counts, plan.rates)


def test_of_many_offers_a_plan_may_rent_any_number() -> None:
    """Six offers are not planned in every combination; three of them are the budget."""
    base, gpus = load_profile(DEMO / "fast.yaml"), [f"g{n}" for n in range(6)]
    rates = {gpu: {100: 1.0 + n / 10} for n, gpu in enumerate(gpus)}
    found = tuple(
        Configuration(gpu, "m", {gpu: 1}, {"a": 1.0}, profile=msgspec.structs.replace(base, name=gpu))
        for gpu in gpus
    )
    types = (RequestType("a", "m", 1.0, ((100, 10),)),)
    problem = Problem(types, found, dict.fromkeys(gpus, 1.0), dict.fromkeys(gpus, 1.0), 3.5)
    table = Table(load_market(MARKETS / "toy.yaml"), problem)
    plan = measured_plan(table, Mixed(rates, dict.fromkeys(gpus, 0.0)), gpus)
    assert plan is not None
    assert plan.counts == {"g3": 1, "g4": 1, "g5": 1}
    assert plan.throughput == pytest.approx(1.3 + 1.4 + 1.5)


@settings(max_examples=8, deadline=None)
@given(mixed_markets(), st.data())
def test_a_plan_over_estimates_of_types_alone_is_measured(
    drawn: tuple[Table, Mixed], data: st.DataObject
) -> None:
    """The time for measuring configurations may end before their types were measured alone."""
    table, measured = drawn
    problem = table.problem
    estimated = tuple(
        replace(
            c,
            throughput={name: rate * data.draw(st.floats(0.8, 1.25)) for name, rate in c.throughput.items()},
        )
        for c in problem.configurations
    )
    table = replace(table, problem=replace(problem, configurations=estimated))
    try:
        plan = PlanSearch(table, measured, USUAL).solved().plan
    except PlanError as error:
        assert "worth of work" not in str(error)  # noqa: PT017 - a market without a plan is one line
        return
    assert served_rate(table, measured, plan) >= plan.throughput * (1.0 - 1e-6)


def test_what_no_time_is_left_for_is_a_plan_by_estimates() -> None:
    problem = toy()
    base = load_profile(DEMO / "fast.yaml")
    configurations = tuple(replace(c, profile=base) for c in problem.configurations)
    table = Table(load_market(MARKETS / "toy.yaml"), replace(problem, configurations=configurations))
    measured = Measured()
    none_left = SolveLimits(deadline=0.0)
    table = measure_table(table, measured, none_left)
    solved = PlanSearch(table, measured, none_left).solved()
    assert (table.measured, table.choosable, solved.plans, measured.runs) == (0, 4, 0, 0)
    assert solved.plan.throughput > 0
