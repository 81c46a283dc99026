"""How long an answer will be: predictors of output lengths, in tokens.

Promise: no predictor but `OraclePredictor` ever sees a true length before the request has ended. All of
them give an expectation (or, for `normal`, the paper's draw) of at least one token and never above the
client's own `max_tokens`.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Protocol

from hetlb.core.types import Request, RequestId

PREDICTORS = ("normal", "mean", "empirical", "online", "oracle")

#: Cold start of `online`: before any answer was seen a request counts as this many tokens (or its
#: `max_tokens`, if less). About the mean of public chat traces (Azure 2023 conversation: 221).
PRIOR_OUTPUT_TOKENS = 256.0
#: How many answers the prior weighs as: after 8 real ones it counts half.
PRIOR_WEIGHT = 8.0


#: What counts as a long answer: all but one in fifty are shorter.
LONG_SHARE = 0.98


class LengthDistribution:
    """A fixed sample of output lengths with O(log n) capped means.

    Raises `ValueError` on an empty sample.
    """

    __slots__ = ("_lengths", "_prefix", "mean", "residual", "std")

    def __init__(self, lengths: Iterable[int]) -> None:
        self._lengths = sorted(max(1, length) for length in lengths)
        if not self._lengths:
            raise ValueError("expected at least one length")
        self._prefix = [0, *accumulate(self._lengths)]
        n = len(self._lengths)
        self.mean = self._prefix[-1] / n
        #: E[O^2] / 2 E[O]: what is left of an answer met at a random moment, tokens.
        self.residual = sum(length * length for length in self._lengths) / (2.0 * self._prefix[-1])
        self.std = math.sqrt(sum((length - self.mean) ** 2 for length in self._lengths) / n)

    @property
    def lengths(self) -> list[int]:
        """The sample, ascending."""
        return list(self._lengths)

    @property
    def long(self) -> float:
        """The length that `LONG_SHARE` of the sample stay within."""
        return float(self._lengths[min(len(self._lengths) - 1, int(LONG_SHARE * len(self._lengths)))])

    def mean_capped(self, cap: int | None) -> float:
        """E[min(O, cap)] in tokens: what a request with this `max_tokens` is expected to produce."""
        if cap is None or cap >= self._lengths[-1]:
            return self.mean
        below = bisect.bisect_right(self._lengths, cap)
        n = len(self._lengths)
        return (self._prefix[below] + cap * (n - below)) / n


class Predictor(Protocol):
    """What the scheduler asks before it places a request, and tells when one has ended."""

    def predict(self, request: Request) -> float:
        """Expected output tokens of one sequence of `request`."""

    def long(self, request: Request) -> float:
        """A length that `LONG_SHARE` of such answers stay within."""

    def residual(self, request: Request) -> float:
        """Mean tokens that are left of such an answer, met at a random moment: E[O^2] / 2 E[O]."""

    def observe(self, request: Request, output_tokens: float) -> None:
        """A request ended well with this many output tokens per sequence."""


def _cap(request: Request, tokens: float) -> float:
    if request.max_tokens is not None and tokens > request.max_tokens:
        tokens = float(request.max_tokens)
    return max(1.0, tokens)


class NormalPredictor:
    """The paper's: a draw from a normal with the data set's mean and deviation."""

    def __init__(self, lengths: LengthDistribution, rng: random.Random) -> None:
        self._lengths = lengths
        self._rng = rng

    def predict(self, request: Request) -> float:
        return _cap(request, self._rng.gauss(self._lengths.mean, self._lengths.std))

    def long(self, request: Request) -> float:
        return _cap(request, self._lengths.mean + 2.0 * self._lengths.std)

    def residual(self, request: Request) -> float:
        return self._lengths.residual

    def observe(self, request: Request, output_tokens: float) -> None:
        """Nothing to learn."""


class MeanPredictor:
    """The data set's mean."""

    def __init__(self, lengths: LengthDistribution) -> None:
        self._lengths = lengths

    def predict(self, request: Request) -> float:
        return _cap(request, self._lengths.mean)

    def long(self, request: Request) -> float:
        return _cap(request, self._lengths.long)

    def residual(self, request: Request) -> float:
        return self._lengths.residual

    def observe(self, request: Request, output_tokens: float) -> None:
        """Nothing to learn."""


class EmpiricalPredictor:
    """The data set's mean under the request's own cap: E[min(O, max_tokens)]."""

    def __init__(self, lengths: LengthDistribution) -> None:
        self._lengths = lengths

    def predict(self, request: Request) -> float:
        return _cap(request, self._lengths.mean_capped(request.max_tokens))

    def long(self, request: Request) -> float:
        return _cap(request, self._lengths.long)

    def residual(self, request: Request) -> float:
        return self._lengths.residual

    def observe(self, request: Request, output_tokens: float) -> None:
        """Nothing to learn."""


class OraclePredictor:
    """The true lengths, for simulations only."""

    def __init__(self, output_tokens: Mapping[RequestId, int]) -> None:
        self._output_tokens = output_tokens

    def predict(self, request: Request) -> float:
        return float(max(1, self._output_tokens[request.id]))

    def long(self, request: Request) -> float:
        return self.predict(request)

    def residual(self, request: Request) -> float:
        """Half of this one: which ones are met is for who adds them up."""
        return self.predict(request) / 2.0

    def observe(self, request: Request, output_tokens: float) -> None:
        """Nothing to learn."""


#: Histogram buckets: exact up to 16 tokens, then eight per doubling (a width of at most 12.5 %).
_EXACT = 16
_PER_DOUBLING = 8


def _bucket(tokens: int) -> int:
    if tokens < _EXACT:
        return tokens
    shift = tokens.bit_length() - 5
    return _EXACT + shift * _PER_DOUBLING + ((tokens >> (shift + 1)) - 8)


class _Histogram:
    """Lengths seen, newer ones weighing more: `count` and `total` per bucket, decayed together."""

    __slots__ = ("_counts", "_cum_counts", "_cum_totals", "_fresh", "_residual", "_totals", "_unit", "seen")

    #: Weight halves after about this many observations, so that a change of traffic is followed.
    HALF_LIFE = 2000

    def __init__(self) -> None:
        size = _bucket(1 << 31) + 1
        self._counts = [0.0] * size
        self._totals = [0.0] * size
        self._cum_counts: list[float] = []
        self._cum_totals: list[float] = []
        self._unit = 1.0
        self._fresh = False
        self._residual = 0.0
        self.seen = 0

    def add(self, tokens: int) -> None:
        """Count one length. The growing unit decays what is older without touching it."""
        index = _bucket(tokens)
        self._counts[index] += self._unit
        self._totals[index] += self._unit * tokens
        self._unit *= 2.0 ** (1.0 / self.HALF_LIFE)
        self.seen += 1
        if self._unit > 1e100:
            self._counts = [count / self._unit for count in self._counts]
            self._totals = [total / self._unit for total in self._totals]
            self._unit = 1.0
        # The cumulative sums cost some 20 us: made anew at each of the first answers, then every 16th.
        if self.seen < 64 or self.seen % 16 == 0:
            self._fresh = False

    def mean_capped(self, cap: int | None) -> tuple[float, float]:
        """(E[min(O, cap)], effective number of observations), the latter 0 when nothing was seen."""
        self._refresh()
        n = self._cum_counts[-1]
        if n == 0:
            return 0.0, 0.0
        weight = n / self._unit
        if cap is None:
            return self._cum_totals[-1] / n, weight
        index = _bucket(min(cap, 1 << 31))
        below_count = self._cum_counts[index - 1] if index else 0.0
        below_total = self._cum_totals[index - 1] if index else 0.0
        # Within the cap's own bucket every length counts as at most the cap.
        inside = min(self._totals[index], cap * self._counts[index])
        above = n - below_count - self._counts[index]
        return (below_total + inside + cap * max(above, 0.0)) / n, weight

    def quantile(self, share: float) -> float:
        """The upper end of the bucket that holds this share of what was seen."""
        self._refresh()
        index = bisect.bisect_left(self._cum_counts, share * self._cum_counts[-1])
        return self._totals[index] / self._counts[index] if self._counts[index] else 0.0

    def residual(self) -> float:
        """E[O^2] / 2 E[O]."""
        self._refresh()
        return self._residual

    def _refresh(self) -> None:
        if not self._fresh:
            squares = sum(
                total * total / count
                for count, total in zip(self._counts, self._totals, strict=True)
                if count
            )
            self._residual = squares / (2.0 * sum(self._totals)) if squares else 0.0
            self._cum_counts = list(accumulate(self._counts))
            self._cum_totals = list(accumulate(self._totals))
            self._fresh = True


class OnlinePredictor:
    """E[min(O, max_tokens)] per model, learnt from finished requests.

    Cold start: `PRIOR_OUTPUT_TOKENS`, weighing as `PRIOR_WEIGHT` answers.
    """

    def __init__(self) -> None:
        self._by_model: dict[str, _Histogram] = {}

    def predict(self, request: Request) -> float:
        cap = request.max_tokens
        prior = PRIOR_OUTPUT_TOKENS if cap is None else min(PRIOR_OUTPUT_TOKENS, float(cap))
        histogram = self._by_model.get(request.model)
        if histogram is None:
            return max(1.0, prior)
        mean, weight = histogram.mean_capped(cap)
        return _cap(request, (PRIOR_WEIGHT * prior + weight * mean) / (PRIOR_WEIGHT + weight))

    def long(self, request: Request) -> float:
        """The quantile of what was seen, four times the prior while little was."""
        histogram = self._by_model.get(request.model)
        seen = 0.0 if histogram is None else histogram.quantile(LONG_SHARE)
        prior = 4.0 * PRIOR_OUTPUT_TOKENS if histogram is None or histogram.seen < 50 else 0.0
        return _cap(request, max(seen, prior))

    def residual(self, request: Request) -> float:
        """Of what was seen, an even spread (two thirds of the prediction) while little was."""
        histogram = self._by_model.get(request.model)
        if histogram is None or histogram.seen < 50:
            return self.predict(request) * 2.0 / 3.0
        return histogram.residual()

    def observe(self, request: Request, output_tokens: float) -> None:
        histogram = self._by_model.get(request.model)
        if histogram is None:
            histogram = self._by_model[request.model] = _Histogram()
        histogram.add(max(1, round(output_tokens)))


def make_predictor(
    name: str,
    *,
    rng: random.Random,
    lengths: LengthDistribution | None = None,
    oracle: Mapping[RequestId, int] | None = None,
) -> Predictor:
    """The predictor called `name`. Raises `ValueError` if what it needs is not given."""
    if name == "online":
        return OnlinePredictor()
    if name == "oracle":
        if oracle is None:
            raise ValueError("the predictor 'oracle' exists only where true lengths are known")
        return OraclePredictor(oracle)
    if lengths is None:
        raise ValueError(f"the predictor {name!r} needs a sample of output lengths")
    if name == "normal":
        return NormalPredictor(lengths, rng)
    if name == "mean":
        return MeanPredictor(lengths)
    if name == "empirical":
        return EmpiricalPredictor(lengths)
    raise ValueError(f"expected one of {', '.join(PREDICTORS)}, got {name!r}")
