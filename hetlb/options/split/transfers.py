"""Times of transfers of KV caches from one instance to another, by pair, and verdicts on them.

The first estimate of a time is `nominal_s_of`. Each pair has a factor on it: the sum of the observed
times over the sum of the nominal ones, older evidence counting less, so that a pair that was slow is tried
again; without evidence, the factor of all pairs together. The first transfer of a pair holds the handshake
of the two engines and teaches nothing.
"""

from __future__ import annotations

import math
from typing import Final

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import KvLink
from hetlb.options.split.fetch_checks import FetchChecks

#: Weight of the first estimate against evidence, in seconds of transfers.
MEMORY_S: Final = 60.0
#: Seconds of transfers as first estimated that stand against the first evidence.
PRIOR_S: Final = 0.02
#: Largest factor on a nominal time, and inverse of the least.
MOST_FACTOR: Final = 64.0

#: Incarnations are below this: a pair is one number, which is found faster than a tuple.
_SPAN: Final = 1 << 28


def _pair(source: int, target: int) -> int:
    """Return the key of a pair: the incarnation with the KV cache, and the fetching one."""
    return source * _SPAN + target


def nominal_s_of(link: KvLink, tokens: float) -> float:
    """Return the seconds to transfer the KV of `tokens` tokens, before any was seen."""
    return link.latency_s + tokens * link.bytes_per_token / link.bandwidth_bytes_per_s


class _Evidence:
    """Observed and nominal seconds, with exponentially decaying weight."""

    def __init__(self, now: float) -> None:
        self.at = now
        self.observed_s = self.nominal_s = 0.0

    def add(self, observed_s: float, nominal_s: float, now: float) -> None:
        keep = math.exp(-(now - self.at) / MEMORY_S)
        self.at = now
        self.observed_s = self.observed_s * keep + observed_s
        self.nominal_s = self.nominal_s * keep + nominal_s

    def factor(self, now: float) -> float:
        keep = math.exp(-(now - self.at) / MEMORY_S)
        factor = (self.observed_s * keep + PRIOR_S) / (self.nominal_s * keep + PRIOR_S)
        return min(MOST_FACTOR, max(1.0 / MOST_FACTOR, factor))


class TransferTimes:
    """Transfer times between the instances of a fleet."""

    def __init__(self) -> None:
        #: None for a pair after just its first transfer.
        self._pairs: dict[int, _Evidence | None] = {}
        self._all: _Evidence | None = None
        self.checks = FetchChecks()

    def estimate_s(self, source: Instance, target: Instance, tokens: float, now: float) -> float:
        """Return the seconds to transfer the KV cache of `tokens` tokens."""
        link = target.spec.kv_transfer
        assert link is not None, f"{target.name} takes part in no KV transfer"
        evidence = self._pairs.get(_pair(source.incarnation, target.incarnation))
        if evidence is None:
            evidence = self._all
        nominal_s = nominal_s_of(link, tokens)
        return nominal_s if evidence is None else nominal_s * evidence.factor(now)

    def observe(
        self, source: Instance, target: Instance, link: KvLink, tokens: float, seconds: float, now: float
    ) -> None:
        """Note that a transfer of `tokens` tokens took `seconds`."""
        pair = _pair(source.incarnation, target.incarnation)
        if pair not in self._pairs:
            self._pairs[pair] = None
            return
        if self._all is None:
            self._all = _Evidence(now)
        own = self._pairs[pair]
        if own is None:
            own = self._pairs[pair] = _Evidence(now)
        nominal_s = nominal_s_of(link, tokens)
        for evidence in (own, self._all):
            evidence.add(seconds, nominal_s, now)

    def forget(self, incarnation: int) -> None:
        """Note that an instance is gone."""
        for pair in [pair for pair in self._pairs if incarnation in divmod(pair, _SPAN)]:
            del self._pairs[pair]
        self.checks.forget(incarnation)
