"""Samples of output lengths, and the predictors that rest on one or on the truth."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, cast

from hetlb.balancer.core.predictor import LONG_SHARE, LengthSample, Predictor, capped
from hetlb.balancer.core.types import Request, RequestId


class LengthDistribution:
    """A fixed sample of output lengths. Raises `ValueError` on an empty one."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self._lengths = sorted(max(1, length) for length in lengths)
        if not self._lengths:
            raise ValueError("expected at least one length")
        self._prefix = [0, *accumulate(self._lengths)]
        n = len(self._lengths)
        self.mean = self._prefix[-1] / n
        self.std = math.sqrt(sum((length - self.mean) ** 2 for length in self._lengths) / n)
        #: The length that `LONG_SHARE` of the sample stay within.
        self.long = float(self._lengths[min(n - 1, int(LONG_SHARE * n))])

    def __reduce__(self) -> tuple[Any, ...]:
        return LengthDistribution, (self._lengths,)

    @property
    def lengths(self) -> list[int]:
        """The sample, ascending."""
        return list(self._lengths)

    def mean_capped(self, cap: int | None) -> float:
        """E[min(O, cap)] in tokens: the expected answer of a request with this `max_tokens`."""
        if cap is None or cap >= self._lengths[-1]:
            return self.mean
        below = bisect.bisect_right(self._lengths, cap)
        n = len(self._lengths)
        return (self._prefix[below] + cap * (n - below)) / n


class SamplePredictor(Predictor):
    """Mean of a data set; `capped`: under the request's own cap, E[min(O, max_tokens)]."""

    def __init__(self, lengths: LengthDistribution, *, capped: bool) -> None:
        self._lengths = lengths
        self._capped = capped

    def predict(self, request: Request) -> float:
        sample = self._lengths
        return capped(request, sample.mean_capped(request.max_tokens) if self._capped else sample.mean)

    def long(self, request: Request) -> float:
        return capped(request, self._lengths.long)


class NormalPredictor(Predictor):
    """The paper's: a draw from a normal with the data set's mean and deviation."""

    def __init__(self, lengths: LengthDistribution, rng: random.Random) -> None:
        self._lengths = lengths
        self._rng = rng

    def predict(self, request: Request) -> float:
        return capped(request, self._rng.gauss(self._lengths.mean, self._lengths.std))

    def long(self, request: Request) -> float:
        return capped(request, self._lengths.mean + 2.0 * self._lengths.std)


class OraclePredictor(Predictor):
    """The true lengths, for simulations only."""

    def __init__(self, output_tokens: Mapping[RequestId, int]) -> None:
        self._output_tokens = output_tokens

    def predict(self, request: Request) -> float:
        return float(max(1, self._output_tokens[request.id]))


def make(
    name: str, rng: random.Random, lengths: LengthSample | None, oracle: Mapping[RequestId, int] | None
) -> Predictor:
    """Return the predictor called `name`. Raises `ValueError` if its data are missing."""
    if name == "oracle":
        if oracle is None:
            raise ValueError("the predictor 'oracle' exists only where true lengths are known")
        return OraclePredictor(oracle)
    if lengths is None:
        raise ValueError(f"the predictor {name!r} needs a sample of output lengths")
    sample = cast(LengthDistribution, lengths)
    if name == "normal":
        return NormalPredictor(sample, rng)
    return SamplePredictor(sample, capped=name == "empirical")
