"""Errors of the forecasts of an instance: ratios of true to forecast times, and their quantiles."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from functools import cache
from typing import Final

from hetlb.balancer.core.types import Lease

#: Number of recent answers kept, and of new ones after which their ratios are sorted.
_KEPT_ANSWERS: Final = 200
_SORTED_ANSWERS: Final = 32
#: Spread of ln(true / forecast) assumed before answers have shown it, and its weight in answers.
_PRIOR_SPREAD: Final = 0.25
_PRIOR_ANSWERS: Final = 8.0
#: Nominal coverage of the reported bound.
_BOUND_SHARE: Final = 0.9
#: Number of recent answers that correct a forecast: loads change meanwhile.
_FOLLOWED_ANSWERS: Final = 8.0
#: Change of the next bound's level for each error of the coverage.
_LEVEL_GAIN: Final = 0.05


class Ratios:
    """True times over forecast ones of the newest answers."""

    def __init__(self) -> None:
        #: True over forecast times, as they came, and ascending as of the last time that they were sorted.
        self._ratios: deque[float] = deque(maxlen=_KEPT_ANSWERS)
        self._ordered: list[float] = []
        #: Corrected and true times of each.
        self._times: deque[tuple[float, float]] = deque(maxlen=_KEPT_ANSWERS)
        #: Raw and true times, newer ones weighing more: they correct the next forecast.
        self._newer_raw_s = self._newer_true_s = 0.0
        #: Quantile of the ratios that bounds the next answer.
        self._level = _BOUND_SHARE
        #: For each of the newest, whether it was within the bound that held before it.
        self._covered: deque[bool] = deque(maxlen=_KEPT_ANSWERS)
        #: Answers since the ratios were sorted.
        self._unsorted = 0

    @property
    def samples(self) -> int:
        """Number of known answers."""
        return len(self._ratios)

    def add(self, predicted_s: float, true_s: float) -> None:
        """Add an answer that took `true_s`.

        Its forecast is corrected by earlier answers before it is judged.
        """
        if predicted_s <= 0.0 or true_s <= 0.0:
            return
        ratios, ratio = self._ratios, true_s / predicted_s
        covered = ratio <= self.bound
        self._covered.append(covered)
        level = self._level + _LEVEL_GAIN * (_BOUND_SHARE - (1.0 if covered else 0.0))
        self._level = 1.0 if level > 1.0 else (level if level > 0.5 else 0.5)
        self._times.append((predicted_s * self.factor, true_s))
        ratios.append(ratio)
        self._unsorted += 1
        if self._unsorted >= _SORTED_ANSWERS or len(ratios) < _SORTED_ANSWERS:
            self._ordered, self._unsorted = sorted(ratios), 0
        keep = 1.0 - 1.0 / _FOLLOWED_ANSWERS
        self._newer_raw_s = keep * self._newer_raw_s + predicted_s
        self._newer_true_s = keep * self._newer_true_s + true_s

    @property
    def bound(self) -> float:
        """Ratio of true to forecast time that 90 % of the answers stay within.

        It is a quantile of the newest ratios. Answers beyond earlier bounds raise the quantile, answers
        within lower it (Gibbs, Candes, Adaptive conformal inference under distribution shift, 2021).
        """
        return self.quantile(self._level)

    @property
    def factor(self) -> float:
        """Mean true over mean forecast time: corrects a forecast. 1 while few answers are known."""
        known = len(self._ratios) >= _PRIOR_ANSWERS
        return self._newer_true_s / self._newer_raw_s if known else 1.0

    def over(self, ratio: float) -> float:
        """Return the probability that an answer takes more than `ratio` times its forecast."""
        n = float(len(self._ordered))
        seen = n - bisect_left(self._ordered, ratio)
        prior = 0.5 * math.erfc(math.log(max(ratio, 1e-9)) / (_PRIOR_SPREAD * math.sqrt(2.0)))
        return (seen + _PRIOR_ANSWERS * prior) / (n + _PRIOR_ANSWERS)

    def quantile(self, share: float) -> float:
        """Return the ratio that a share of the answers stays within. The assumed spread decides at first."""
        n = len(self._ordered)
        if n < _PRIOR_ANSWERS:
            return math.exp(_PRIOR_SPREAD * normal_quantile(share))
        rank = share * (n + 1)
        above = int(rank)
        return self._ordered[min(n - 1, above - 1 if above == rank else above)]

    @property
    def bias(self) -> float | None:
        """Mean corrected forecast over mean true time - 1, None before the first answer."""
        if not self._times:
            return None
        return (
            math.fsum([each[0] for each in self._times]) / math.fsum([each[1] for each in self._times]) - 1.0
        )

    @property
    def coverage(self) -> float | None:
        """Share of the newest answers that stayed within the 90 % bound, None before the first."""
        return sum(self._covered) / len(self._covered) if self._covered else None


@cache
def normal_quantile(share: float) -> float:
    """Return the quantile of the standard normal distribution, by bisection of `math.erf`."""
    low, high = -8.0, 8.0
    for _ in range(48):
        middle = (low + high) / 2.0
        if 0.5 * math.erfc(-middle / math.sqrt(2.0)) < share:
            low = middle
        else:
            high = middle
    return high


class ForecastErrors:
    """Errors of the forecasts of one instance: first token, time per further token, whole answer."""

    def __init__(self) -> None:
        self.first_token = Ratios()
        self.step = Ratios()
        self.end = Ratios()

    @property
    def by_figure(self) -> tuple[tuple[str, Ratios], ...]:
        """The ratios by the name of the forecast."""
        return ("first_token", self.first_token), ("step", self.step), ("end", self.end)

    def document(self) -> dict[str, float | int | None]:
        """Return the JSON of the admin listener; figures before the first answer are null."""
        return {
            "samples": self.end.samples,
            "first_token_bias": self.first_token.bias,
            "first_token_coverage90": self.first_token.coverage,
            "end_bias": self.end.bias,
            "end_coverage90": self.end.coverage,
        }

    def corrected(self, first_token_s: float, step_s: float, end_s: float) -> dict[str, float]:
        """Return the times of a forecast by name, corrected by the errors so far, and their 90 % bounds."""
        return {
            "first_token_s": first_token_s * self.first_token.factor,
            "step_s": step_s * self.step.factor,
            "end_s": end_s * self.end.factor,
            "first_token_s_90": first_token_s * self.first_token.bound,
            "end_s_90": end_s * self.end.bound,
        }

    def learn(self, lease: Lease, now: float) -> None:
        """Compare the forecast of an answer that ended well with its times."""
        if lease.expected_first_s <= 0.0 or lease.first_token_at is None:
            return
        first_s, end_s = lease.first_token_at - lease.dispatched_at, now - lease.dispatched_at
        self.end.add(lease.forecast_end_s, end_s)
        tokens = lease.output_tokens / lease.request.sequences
        if tokens > 1.0 and lease.request.streamed:
            # The first byte of an answer that is no stream comes with its end.
            self.first_token.add(lease.forecast_first_s, first_s)
            self.step.add(lease.forecast_step_s, (end_s - first_s) / (tokens - 1.0))
