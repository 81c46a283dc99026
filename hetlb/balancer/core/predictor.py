"""Predictors of output lengths: at least one token, and never above the client's own `max_tokens`.

No predictor but `oracle` ever sees a true length before the request has ended.
"""

from __future__ import annotations

import bisect
import math
import random
from collections import OrderedDict
from collections.abc import Mapping
from itertools import accumulate
from typing import Final, Protocol

from hetlb.balancer.core.types import Request, RequestId

PREDICTORS = ("normal", "mean", "empirical", "online", "oracle")

#: Predicted tokens of `online` before any answer was seen (or `max_tokens`, if less): about the mean of
#: public chat traces (Azure 2023 conversation: 221).
PRIOR_OUTPUT_TOKENS: Final = 256.0
#: Weight of the prior, in answers: after 8 real ones it counts half.
PRIOR_WEIGHT: Final = 8.0


#: Quantile of a long answer: all but one in fifty are shorter.
LONG_SHARE: Final = 0.98


class LengthSample(Protocol):
    """Sample of output lengths (`length_samples.py`)."""

    @property
    def lengths(self) -> list[int]: ...


class Predictor:
    """Output length predictor: it predicts a request before its placement and learns at its end."""

    def outlook(self, request: Request) -> tuple[float, float]:
        """Return `predict` and `long` at once: both are asked for at every arrival."""
        return self.predict(request), self.long(request)

    def predict(self, request: Request) -> float:
        """Return expected output tokens of one sequence of `request`."""
        raise NotImplementedError

    def long(self, request: Request) -> float:
        """Return a length that `LONG_SHARE` of such answers stay within."""
        return self.predict(request)

    def seen(self, model: str) -> float:
        """Return the number of answers of a model behind a prediction; infinite if none is needed."""
        return math.inf

    def observe(self, request: Request, output_tokens: float) -> None:
        """Note that a request ended well with this many output tokens per sequence."""


def capped(request: Request, tokens: float) -> float:
    if request.max_tokens is not None and tokens > request.max_tokens:
        tokens = float(request.max_tokens)
    return tokens if tokens > 1.0 else 1.0


#: Histogram buckets: exact up to 16 tokens, then eight per doubling (a width of at most 12.5 %).
_EXACT_TOKENS: Final = 16
_DOUBLING_BUCKETS: Final = 8


def _bucket(tokens: int) -> int:
    if tokens < _EXACT_TOKENS:
        return tokens
    shift = tokens.bit_length() - 5
    return _EXACT_TOKENS + shift * _DOUBLING_BUCKETS + ((tokens >> (shift + 1)) - 8)


#: Longest counted length in tokens. Engines and peers may report longer ones.
_MOST_TOKENS: Final = 1 << 31
#: Number of answers after which a weight has halved, so that a change of traffic is followed.
HALF_LIFE_ANSWERS: Final = 2000
_GROWTH = 2.0 ** (1.0 / HALF_LIFE_ANSWERS)
#: Weight of the prior of `share`, as a sum of squared shares of limits.
_LIMIT_PRIOR_WEIGHT: Final = 0.5
_NOTHING: Final = (0.0, 0.0)


#: Most limits for which a histogram keeps the sums below them.
_MOST_LIMITS: Final = 64


class _Histogram:
    """Lengths seen, newer ones weighing more: `count` and `total` per bucket, decayed together.

    Only buckets that hold a length are stored, since each tenant has a histogram. Their sums are computed
    anew after each of the first answers, then after every 16th.
    """

    def __init__(self) -> None:
        #: The buckets that hold something, ascending, and what they hold.
        self._used: list[int] = []
        self._counts: list[float] = []
        self._totals: list[float] = []
        #: The buckets at the last sums, and the sums up to each.
        self._summed: list[int] = []
        self._cum_counts: list[float] = []
        self._cum_totals: list[float] = []
        #: By limit asked for since then: the place of its bucket (-1: none), and the sums below it.
        self._below: dict[int, tuple[int, float, float]] = {}
        #: The bucket that holds a long answer.
        self._long_at = 0
        self._unit = 1.0
        self._fresh = False
        self.seen = 0
        #: Sums for the slope of `share`, by power of two of the limit.
        self._followed: dict[int, tuple[float, float]] = {}

    def _place(self, index: int) -> int:
        """Return the place of a bucket, -1 if it holds nothing."""
        place = bisect.bisect_left(self._used, index)
        return place if place < len(self._used) and self._used[place] == index else -1

    def add(self, tokens: int) -> None:
        """Count one length. The growing unit decays older ones without touching them."""
        index = _bucket(tokens)
        unit = self._unit
        place = self._place(index)
        if place < 0:
            place = bisect.bisect_left(self._used, index)
            self._used.insert(place, index)
            self._counts.insert(place, 0.0)
            self._totals.insert(place, 0.0)
            self._below.clear()
        self._counts[place] += unit
        self._totals[place] += unit * tokens
        self._unit = unit = unit * _GROWTH
        self.seen += 1
        if unit > 1e100:
            self._counts = [count / unit for count in self._counts]
            self._totals = [total / unit for total in self._totals]
            self._followed = {
                doubling: (moved / unit, room / unit) for doubling, (moved, room) in self._followed.items()
            }
            self._unit = 1.0
        if self.seen < 64 or self.seen % 16 == 0:
            self._fresh = False

    def follow(self, limit: int, expected: float, tokens: float) -> None:
        """Count an answer for `share`: its distance from the expected length, relative to its limit.

        `expected` is E[min(O, limit)] before this answer.
        """
        room, doubling = (limit - expected) / limit, min(63, limit.bit_length())
        moved, rooms = self._followed.get(doubling, _NOTHING)
        moved += self._unit * room * (tokens - expected) / limit
        self._followed[doubling] = (moved, rooms + self._unit * room * room)

    def share(self, limit: int, prior: float = 0.0) -> float:
        """Return how far answers go from the expected length to such a limit: 0 not at all, 1 up to it.

        The least-squares slope of (output - expected) on (limit - expected), both as shares of the limit. It
        is 0 if the limit has no influence, as with one large limit for all requests. It is 1 if all answers
        are as long as their limits. `prior` counts before there are answers.
        """
        moved, room = self._followed.get(min(63, limit.bit_length()), _NOTHING)
        weight = _LIMIT_PRIOR_WEIGHT * self._unit
        share = (moved + weight * prior) / (room + weight)
        return 0.0 if share < 0.0 else min(1.0, share)

    def mean_capped(self, cap: int | None) -> tuple[float, float]:
        """Return (E[min(O, cap)], effective number of observations), the latter 0 when nothing was seen."""
        if not self._fresh:
            self._refresh()
        if not self._summed:
            return 0.0, 0.0
        n = self._cum_counts[-1]
        if cap is None:
            return self._cum_totals[-1] / n, n / self._unit
        known = self._below.get(cap)
        if known is None:
            known = self._look_below(cap)
        place, below_count, below_total = known
        # Within the cap's own bucket every length counts as at most the cap.
        count = inside = 0.0
        if place >= 0:
            count, inside = self._counts[place], self._totals[place]
        if cap * count < inside:
            inside = cap * count
        above = n - below_count - count
        if above < 0.0:
            above = 0.0
        return (below_total + inside + cap * above) / n, n / self._unit

    def _look_below(self, cap: int) -> tuple[int, float, float]:
        index = _bucket(min(cap, _MOST_TOKENS))
        last = bisect.bisect_left(self._summed, index) - 1
        counts, totals = (self._cum_counts[last], self._cum_totals[last]) if last >= 0 else (0.0, 0.0)
        if len(self._below) >= _MOST_LIMITS:
            self._below.clear()
        self._below[cap] = known = (self._place(index), counts, totals)
        return known

    @property
    def long(self) -> float:
        """Length of a long answer, the `LONG_SHARE` quantile: the mean of the bucket that holds it."""
        if not self._fresh:
            self._refresh()
        place = self._place(self._long_at)
        return self._totals[place] / self._counts[place] if place >= 0 else 0.0

    def _refresh(self) -> None:
        self._summed = list(self._used)
        self._cum_counts = list(accumulate(self._counts))
        self._cum_totals = list(accumulate(self._totals))
        self._below.clear()
        if self._summed:
            place = bisect.bisect_left(self._cum_counts, LONG_SHARE * self._cum_counts[-1])
            self._long_at = self._summed[place]
        self._fresh = True


#: Weight, in answers, of the whole model's mean against a tenant's own.
TENANT_WEIGHT: Final = 8.0
#: Least answers with a known spread.
_SPREAD_ANSWERS: Final = 50
#: Tenants remembered over all models, the ones seen last.
MOST_TENANTS: Final = 1024


class OnlinePredictor(Predictor):
    """E[min(O, max_tokens)] by model and tenant, moved towards `max_tokens` if answers follow their limits.

    Cold start: `PRIOR_OUTPUT_TOKENS`, weighing as `PRIOR_WEIGHT` answers. What is known of a tenant is shrunk
    towards the model's mean: (w * tenant + TENANT_WEIGHT * model) / (w + TENANT_WEIGHT), with the effective
    number w of its answers (empirical Bayes with a fixed prior weight).
    """

    def __init__(self) -> None:
        self._by_model: dict[str, _Histogram] = {}
        self._by_tenant: OrderedDict[tuple[str, str], _Histogram] = OrderedDict()

    def _tenant(self, request: Request) -> _Histogram | None:
        tenant = request.tenant
        return None if tenant is None else self._by_tenant.get((request.model, tenant))

    def outlook(self, request: Request) -> tuple[float, float]:
        own, histogram = self._tenant(request), self._by_model.get(request.model)
        cap = request.max_tokens
        predicted, long = self._mean(histogram, own, cap), self._long(histogram, own)
        if cap is not None:
            share = histogram.share(cap) if histogram is not None else 0.0
            if own is not None:
                share = own.share(cap, share)
            predicted += share * (cap - predicted)
            long = float(cap) if long > cap else long + share * (cap - long)
        return capped(request, predicted), long if long > 1.0 else 1.0

    def _mean(self, histogram: _Histogram | None, own: _Histogram | None, cap: int | None) -> float:
        prior = PRIOR_OUTPUT_TOKENS if cap is None or cap > PRIOR_OUTPUT_TOKENS else float(cap)
        if histogram is None:
            return prior
        mean, weight = histogram.mean_capped(cap)
        predicted = (PRIOR_WEIGHT * prior + weight * mean) / (PRIOR_WEIGHT + weight)
        if own is not None:
            mean, weight = own.mean_capped(cap)
            predicted = (TENANT_WEIGHT * predicted + weight * mean) / (TENANT_WEIGHT + weight)
        return predicted

    def _long(self, histogram: _Histogram | None, own: _Histogram | None) -> float:
        """Return the quantile of the seen lengths: at least four times the prior while few were seen."""
        if own is not None and own.seen >= _SPREAD_ANSWERS:
            return own.long
        if histogram is None:
            return 4.0 * PRIOR_OUTPUT_TOKENS
        return (
            histogram.long
            if histogram.seen >= _SPREAD_ANSWERS
            else max(histogram.long, 4.0 * PRIOR_OUTPUT_TOKENS)
        )

    def seen(self, model: str) -> float:
        histogram = self._by_model.get(model)
        return 0.0 if histogram is None else float(histogram.seen)

    def predict(self, request: Request) -> float:
        return self.outlook(request)[0]

    def long(self, request: Request) -> float:
        return self.outlook(request)[1]

    def observe(self, request: Request, output_tokens: float) -> None:
        tokens = min(max(1, int(output_tokens + 0.5)), _MOST_TOKENS)
        histogram, own = self._by_model.get(request.model), self._tenant(request)
        if histogram is None:
            histogram = self._by_model[request.model] = _Histogram()
        if request.tenant is not None:
            key = (request.model, request.tenant)
            if own is None:
                own = self._by_tenant[key] = _Histogram()
                if len(self._by_tenant) > MOST_TENANTS:
                    self._by_tenant.popitem(last=False)
            else:
                self._by_tenant.move_to_end(key)
        cap = request.max_tokens
        expected = self._mean(histogram, own, cap)
        for each in (histogram, own):
            if each is not None:
                if cap is not None:
                    each.follow(cap, expected, tokens)
                each.add(tokens)


def make_predictor(
    name: str,
    *,
    rng: random.Random,
    lengths: LengthSample | None = None,
    oracle: Mapping[RequestId, int] | None = None,
) -> Predictor:
    """Return the predictor called `name`. Raises `ValueError` if its data are missing."""
    if name == "online":
        return OnlinePredictor()
    if name not in PREDICTORS:
        raise ValueError(f"expected one of {', '.join(PREDICTORS)}, got {name!r}")
    from hetlb.balancer.core.length_samples import make

    return make(name, rng, lengths, oracle)
