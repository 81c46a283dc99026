"""Tuner: weights of the default policy's terms for a fleet, a load and a figure to be as small as possible.

Every weight in turn is multiplied by the factors that lower the figure in the mean of the training seeds, for
a few rounds. What it gains, and what it costs in every other figure, is measured on other seeds, in pairs
with the weights that there were.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.sim.simulation_sweep import Study
from hetlb.tools.workload.records import student_margin

#: Figures of a run that can be tuned for, and whether more is better.
FIGURES: Final = {
    "mean_ttft_ms": False, "p99_ttft_ms": False, "mean_e2el_ms": False, "p99_e2el_ms": False,
    "total_token_throughput": True, "attainment": True,
}  # fmt: skip
#: Factors on one weight, tried in turn, and rounds over all weights.
_WEIGHT_FACTORS: Final = (0.25, 0.5, 2.0, 4.0)
_ROUNDS: Final = 2

Weights = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tuned:
    """Weights that were found, runs that it took, and the gain on seeds that the search did not see.

    `gain` is the mean relative improvement of the figure, `low` and `high` its 95 % confidence interval, and
    `others` the mean relative improvement of each other figure, below 0 what it costs there.
    """

    weights: dict[str, float]
    runs: int
    gain: float
    low: float
    high: float
    others: dict[str, float]

    @property
    def certain(self) -> bool:
        """True if the whole interval is a gain."""
        return self.low > 0.0


def losses(study: Study, rate: float | str, weights: Weights, seed: int) -> dict[str, float]:
    """Return the figures of one run as something to be small; attainment only where classes have targets.

    Raises `ValueError` where the run has none.
    """
    params = replace(study.setup.params, weights=tuple(weights.items()))
    result = FleetSimulation(
        replace(study.setup, policy="hetlb", params=params, seed=seed), study.engines,
        study.load.plan(rate, seed), model=study.model, rule=study.rule, classes=study.classes,
    ).run()  # fmt: skip
    summary = result.summary()
    found = {
        name: 1.0 / float(summary[name]) if more else float(summary[name])
        for name, more in FIGURES.items()
        if name != "attainment"
    }
    classes = summary.get("classes") or {}
    shares = [each["attainment"] for each in classes.values() if each["attainment"] is not None]
    if shares:
        found["attainment"] = 1.0 - statistics.fmean(shares)
    return found


def search(
    before: Weights,
    start: Weights,
    figure: str,
    losses_of: Callable[[Weights, int], Mapping[str, float]],
    train: Sequence[int],
    held_back: Sequence[int],
) -> Tuned:
    """Search by coordinates from `start` on the seeds `train`; gains over `before` are on `held_back`."""
    runs = 0

    def mean(weights: Weights) -> float:
        nonlocal runs
        runs += len(train)
        return statistics.fmean([losses_of(weights, seed)[figure] for seed in train])

    best = dict(start)
    least = mean(best)
    for _ in range(_ROUNDS):
        was = least
        for name in start:
            for factor in _WEIGHT_FACTORS:
                tried = {**best, name: start[name] * factor}
                if tried != best and (found := mean(tried)) < least:
                    best, least = tried, found
        if least == was:
            break
    pairs = [(losses_of(before, seed), losses_of(best, seed)) for seed in held_back]

    def gains(name: str) -> list[float]:
        return [1.0 - now[name] / was[name] if was[name] > 0.0 else 0.0 for was, now in pairs]

    found_gains = gains(figure)
    gain, margin = statistics.fmean(found_gains), student_margin(found_gains)
    others = {name: statistics.fmean(gains(name)) for name in pairs[0][0] if name != figure}
    return Tuned(best, runs + 2 * len(pairs), gain, gain - margin, gain + margin, others)
