"""Tuner: weights of the default policy's terms for a fleet, a load and a figure to be as small as possible.

Every weight in turn is multiplied by the factors that lower the figure in the mean of the training seeds, for
a few rounds. What it gains is measured on other seeds, in pairs with the weights that there were.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hetlb.sim.fleet_simulation import FleetSimulation
from hetlb.sim.simulation_sweep import Study
from hetlb.workload.records import student_margin

#: Figures of a run that can be tuned for, and whether more is better.
FIGURES: Final = {
    "mean_ttft_ms": False, "p99_ttft_ms": False, "mean_e2el_ms": False, "p99_e2el_ms": False,
    "total_token_throughput": True, "attainment": True,
}  # fmt: skip
#: Factors on one weight, tried in turn, and rounds over all weights.
_FACTORS: Final = (0.25, 0.5, 2.0, 4.0)
_ROUNDS: Final = 2

Weights = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tuned:
    """Weights that were found, runs that it took, and the gain on seeds that the search did not see.

    `gain` is the mean relative improvement of the figure, `low` and `high` its 95 % confidence interval.
    """

    weights: dict[str, float]
    runs: int
    gain: float
    low: float
    high: float

    @property
    def certain(self) -> bool:
        """True if the whole interval is a gain."""
        return self.low > 0.0


def loss(study: Study, rate: float | str, figure: str, weights: Weights, seed: int) -> float:
    """The figure of one run, as something to be small. Raises `ValueError` where the run has none."""
    params = replace(study.setup.params, weights=tuple(weights.items()))
    result = FleetSimulation(
        replace(study.setup, policy="hetlb", params=params, seed=seed), study.engines,
        study.load.plan(rate, seed), model=study.model, rule=study.rule, classes=study.classes,
    ).run()  # fmt: skip
    summary = result.summary()
    if figure == "attainment":
        shares = [
            each["attainment"] for each in summary["classes"].values() if each["attainment"] is not None
        ]
        return 1.0 - statistics.fmean(shares)
    found = float(summary[figure])
    return 1.0 / found if FIGURES[figure] else found


def search(
    start: Weights, loss_of: Callable[[Weights, int], float], train: Sequence[int], held_back: Sequence[int]
) -> Tuned:
    """Coordinate search from `start` on the seeds `train`; the gain on `held_back`, of which it takes two."""
    runs = 0

    def mean(weights: Weights) -> float:
        nonlocal runs
        runs += len(train)
        return statistics.fmean([loss_of(weights, seed) for seed in train])

    best = dict(start)
    least = mean(best)
    for _ in range(_ROUNDS):
        before = least
        for name in start:
            for factor in _FACTORS:
                tried = {**best, name: start[name] * factor}
                if tried != best and (found := mean(tried)) < least:
                    best, least = tried, found
        if least == before:
            break
    pairs = [(loss_of(start, seed), loss_of(best, seed)) for seed in held_back]
    gains = [1.0 - now / was if was > 0.0 else 0.0 for was, now in pairs]
    mean_gain, margin = statistics.fmean(gains), student_margin(gains)
    return Tuned(best, runs + 2 * len(pairs), mean_gain, mean_gain - margin, mean_gain + margin)
