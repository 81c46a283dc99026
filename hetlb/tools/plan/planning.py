"""The throughput table of a market: requests/s of every configuration, at first estimated, then measured.

An instance of a plan serves several types at once, and what it then serves is not what they would by turns:
prompts fill steps of others' decodes, or make a pipeline wait. So each configuration that may be
chosen is measured on the whole mix of its model, too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from hetlb.errors import ConfigError, PlanError
from hetlb.tools.plan import decompose
from hetlb.tools.plan.configurations import candidates
from hetlb.tools.plan.highs import SolveLimits
from hetlb.tools.plan.market import Market
from hetlb.tools.plan.rent_program import Configuration, Problem, RentPlan
from hetlb.tools.plan.throughput import Measured
from hetlb.tools.plan.workloads import Clustering, RequestType, cluster
from hetlb.tools.sim.deadline import StoppedError

#: Limits of a plan that only says which configurations are measured first, and the most of them.
_QUICK_S, _QUICK_GAP, _QUICK_PLANS = 2.0, 0.02, 8

#: Told of what has been measured, and of all that there is.
OnMeasured = Callable[[int, int], None]


@dataclass(frozen=True)
class Table:
    """Everything that a plan is made from; the last two fields need a trace.

    `longest_tokens` counts one request. `ties`: configurations that are left out of the problem, as simpler
    ones are equally good. Of `choosable` configurations, `measured` are measured on the whole mix. The others
    are left out of the problem, or are estimated.
    """

    market: Market
    problem: Problem
    ties: tuple[Configuration, ...] = ()
    clustering: Clustering | None = None
    longest_tokens: int | None = None
    measured: int = 0
    choosable: int = 0

    @property
    def simulated(self) -> bool:
        return all(each.profile is not None for each in self.problem.configurations)

    @property
    def lengths_known(self) -> bool:
        stated = self.market.file.workloads
        return all(each.input_tokens is not None and each.output_tokens is not None for each in stated)


# --- the table ------------------------------------------------------------------------------------------


def request_types(
    market: Market, rows: Sequence[tuple[int, int]] | None, count: int, seed: int
) -> tuple[tuple[RequestType, ...], Clustering | None]:
    """Return the stated types, or clusters of a trace's (prompt, output) tokens. Raises `ConfigError`."""
    path = market.path
    if rows is not None:
        if market.file.workloads:
            raise ConfigError(f"{path}: workloads: expected either workloads or --trace, got both")
        if len(market.models) > 1:
            raise ConfigError(f"{path}: models: expected one model with --trace, got {len(market.models)}")
        clustering = cluster(rows, count, next(iter(market.models)), seed)
        return clustering.types, clustering
    if not market.file.workloads:
        raise ConfigError(f"{path}: workloads: expected at least one workload, or --trace, got neither")
    total = math.fsum(each.share for each in market.file.workloads)
    needed = not market.file.configurations or any(c.profile for c in market.file.configurations)
    types = []
    for index, each in enumerate(market.file.workloads):
        where = f"workloads[{index}]"
        for key in ("input_tokens", "output_tokens"):
            if needed and getattr(each, key) is None:
                raise ConfigError(f"{path}: {where}.{key}: expected a value, but the key is missing")
        rows_of_type = ((each.input_tokens or 1, each.output_tokens or 1),)
        types.append(
            RequestType(each.name, market.model_of(each.model, where), each.share / total, rows_of_type)
        )
    return tuple(types), None


def make_table(
    market: Market,
    measured: Measured,
    *,
    rows: Sequence[tuple[int, int]] | None = None,
    count: int = 9,
    seed: int = 0,
) -> Table:
    """Return estimated throughputs of all configurations. Raises `ConfigError` or `PlanError`."""
    types, clustering = request_types(market, rows, count, seed)
    longest: dict[str, int] = {}
    for kind in types:
        longest[kind.model] = max(longest.get(kind.model, 1), kind.longest_tokens)
    known = {kind.name for kind in types}
    configurations = []
    for candidate in candidates(market, longest):
        for name in candidate.throughput:
            if name not in known:
                raise ConfigError(
                    f"{market.path}: configurations.{candidate.name}.throughput: expected workloads out "
                    f"of {', '.join(sorted(known))}, got {name!r}"
                )
        configurations.append(_estimated(candidate, types, measured))
    target = market.file.target
    problem = Problem(
        types,
        tuple(configurations),
        market.available,
        market.prices,
        market.budget,
        None if target is None else target.request_rate,
    )
    longest_row = None if rows is None else max(prompt + output for prompt, output in rows)
    return Table(market, problem, (), clustering, longest_row)


def _estimated(candidate: Configuration, types: Sequence[RequestType], measured: Measured) -> Configuration:
    profile = candidate.profile
    if profile is None:
        return candidate
    own = [kind for kind in types if kind.model == candidate.model]
    return replace(candidate, throughput={kind.name: measured.estimate(profile, kind) for kind in own})


def first_plan(problem: Problem, limits: SolveLimits) -> RentPlan | None:
    """Return a plan at once from the rates known so far; None if none is found."""
    try:
        return decompose.solve(problem, limits.within(_QUICK_S, _QUICK_GAP))
    except PlanError:
        return None


# --- measurement ----------------------------------------------------------------------------------------


def measure_alone(table: Table, measured: Measured) -> Table:
    """Return the table with every configuration measured on each type alone, and on no mix."""
    problem = table.problem
    found = [_alone(problem, each, measured) for each in problem.configurations]
    return _without_ties(table, found)


def measure_table(
    table: Table, measured: Measured, limits: SolveLimits, on_measured: OnMeasured = lambda done, total: None
) -> Table:
    """Return the table with the configurations that may be chosen, measured on the mix and on each type.

    Configurations of quick plans come first, then the most promising. A configuration that the limits leave
    no time for is left out. If no configuration of a model is measured, all of them stay, estimated.
    """
    problem = table.problem
    usable = [each for each in problem.configurations if problem.most(each) >= 1 and each.modes]
    pending = {
        each.name: each for each in sorted(usable, key=partial(_promise, problem)) if each.profile is not None
    }
    total, known = len(pending), {each.name: each for each in usable}
    ratios: dict[str, float] = {}

    def measure(name: str) -> None:
        before = pending[name]
        known[name] = measured_on_mix(problem, before, measured)
        del pending[name]
        if before_rate := mix_rate(problem, before):
            ratios[name] = (known[name].mix_rate or 0.0) / before_rate
        on_measured(total - len(pending), total)

    with suppress(StoppedError), limits.stopping():
        for _ in range(_QUICK_PLANS):
            usual = statistics.median(ratios.values()) if ratios else 1.0
            guessed = [_scaled(each, usual) if each.name in pending else each for each in known.values()]
            guess = first_plan(replace(problem, configurations=tuple(guessed)), limits)
            wanted = [] if guess is None else [name for name in guess.counts if name in pending]
            for name in wanted:
                measure(name)
            if not wanted:
                break
        for name in list(pending):
            measure(name)
        for each in sorted(known.values(), key=partial(_promise, problem)):
            if each.mix_rate is not None:
                known[each.name] = _alone(problem, each, measured)
    models = {each.model for each in known.values() if each.name not in pending}
    kept = [each for name, each in known.items() if name not in pending or each.model not in models]
    # A model that nothing affordable serves: its configurations say what is missing.
    kept += [each for each in problem.configurations if each.model not in {c.model for c in usable}]
    table = replace(table, measured=total - len(pending), choosable=total)
    return _without_ties(table, kept)


def measured_on_mix(problem: Problem, each: Configuration, measured: Measured) -> Configuration:
    """Return a configuration with its measured rate on the whole mix.

    Its estimates of single types are scaled by measured over estimated rate of the mix.
    """
    assert each.profile is not None
    mix = [(kind.share, kind.rows) for kind in problem.workloads if kind.model == each.model]
    rate = measured.of_mix(each.profile, mix, each.engine_stages)
    estimate = mix_rate(problem, each)
    return replace(_scaled(each, rate / estimate if estimate > 0.0 else 0.0), mix_rate=rate)


def _alone(problem: Problem, each: Configuration, measured: Measured) -> Configuration:
    profile = each.profile
    if profile is None:
        return each
    own = [kind for kind in problem.workloads if kind.model == each.model]
    rates = {kind.name: measured.alone(profile, kind, each.engine_stages) for kind in own}
    return replace(each, throughput=rates)


def _scaled(each: Configuration, ratio: float) -> Configuration:
    return replace(each, throughput={name: rate * ratio for name, rate in each.throughput.items()})


def mix_rate(problem: Problem, each: Configuration) -> float:
    """Return the requests/s of a configuration on its model's whole mix; 0 if a type does not fit it.

    The rate is measured, or else computed as if the types were served by turns.
    """
    if each.mix_rate is not None:
        return each.mix_rate
    own = [kind for kind in problem.workloads if kind.model == each.model]
    share = math.fsum(kind.share for kind in own)
    load = each.load({kind.name: kind.share / share for kind in own})
    return 1.0 / load if load > 0 else 0.0


def _promise(problem: Problem, each: Configuration) -> float:
    """Return the price of serving one request/s of the mix. A lower one is more promising."""
    rate = mix_rate(problem, each)
    return problem.price(each) / rate if rate > 0 else math.inf


def _without_ties(table: Table, configurations: Sequence[Configuration]) -> Table:
    stated = bool(table.market.file.configurations)
    kept = configurations if stated else without_ties(configurations)
    names = {each.name for each in kept}
    ties = (*table.ties, *(each for each in configurations if each.name not in names))
    return replace(table, problem=replace(table.problem, configurations=tuple(kept)), ties=ties)


# --- ties -----------------------------------------------------------------------------------------------

# A larger server is left out if, on the same GPUs, simpler servers serve each type and the mix about as well
# (it gains at most `TIE_SHARE`). It costs as much, fails as a whole, and its form may never have been
# started.

#: Largest relative gain of a larger server that counts as none: throughputs are simulated on a sample.
TIE_SHARE = 0.01


def without_ties(configurations: Sequence[Configuration]) -> list[Configuration]:
    """Return the configurations that gain on some type over simpler ones on their GPUs."""
    return [each for each in configurations if not _equalled(each, configurations)]


def _size(configuration: Configuration) -> tuple[int, int]:
    return sum(configuration.gpus.values()), len(configuration.stages)


def _equalled(larger: Configuration, configurations: Sequence[Configuration]) -> bool:
    for parts in _divisions(larger, configurations):
        together = [(_rates(part), count) for part, count in parts]
        if all(
            rate <= (1.0 + TIE_SHARE) * sum(count * rates.get(name, 0.0) for rates, count in together)
            for name, rate in _rates(larger).items()
        ):
            return True
    return False


def _rates(configuration: Configuration) -> dict[str, float]:
    """Return the requests/s of each type alone, and of the whole mix if that was measured."""
    whole = {} if configuration.mix_rate is None else {"": configuration.mix_rate}
    return {**configuration.throughput, **whole}


def _divisions(
    larger: Configuration, configurations: Sequence[Configuration]
) -> Iterator[list[tuple[Configuration, int]]]:
    """Yield simpler servers of one kind of GPU each, with their numbers, on the GPUs of a larger one."""
    choices = []
    for gpu, count in larger.gpus.items():
        simpler = [
            (each, count // each.gpus[gpu])
            for each in configurations
            if each.model == larger.model
            and list(each.gpus) == [gpu]
            and count % each.gpus[gpu] == 0
            and _size(each) < _size(larger)
        ]
        choices.append(simpler)
    yield from (list(parts) for parts in product(*choices))
