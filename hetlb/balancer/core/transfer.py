"""Transfers of KV caches from one instance to another: what is kept for them, and their times, by pair.

The first estimate of a time is `KvLink.nominal_s`. Each pair has a factor on it: the sum of the observed
times over that of the nominal ones, older evidence counting less, so that a pair that was slow is tried
again; without evidence that of all pairs together. The first transfer of a pair holds the handshake of the
two engines and teaches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import EngineSample, Hold, KvLink, Lease, LeaseId

if TYPE_CHECKING:
    from hetlb.balancer.core.fetch_checks import FetchChecks, PairRecord

#: Evidence this old counts 1/e, in seconds.
MEMORY_S: Final = 60.0
#: Seconds of transfers as first estimated that stand against the first evidence.
PRIOR_S: Final = 0.02
#: A nominal time is corrected at most so many times, either way.
MOST: Final = 64.0

#: Incarnations are below this: a pair is one number, which is found faster than a tuple.
_SPAN: Final = 1 << 28


def _pair(source: int, target: int) -> int:
    """Return the pair of the incarnation that has the KV cache and the one that fetches it."""
    return source * _SPAN + target


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
        return min(MOST, max(1.0 / MOST, factor))


class TransferTimes:
    """Transfer times between the instances of a fleet."""

    def __init__(self) -> None:
        #: None for a pair that has had its first transfer and no other.
        self._pairs: dict[int, _Evidence | None] = {}
        self._all: _Evidence | None = None
        self._checks: FetchChecks | None = None

    @property
    def checks(self) -> FetchChecks:
        """Return the verdicts on transfers, which only fleets with KV transfers import."""
        if self._checks is None:
            from hetlb.balancer.core.fetch_checks import FetchChecks

            self._checks = FetchChecks()
        return self._checks

    def failing(self, now: float) -> list[PairRecord]:
        """Return the pairs that get no request now as their transfers fail."""
        return [] if self._checks is None else self._checks.resting(now)

    def estimate_s(self, source: Instance, target: Instance, tokens: float, now: float) -> float:
        """Seconds to transfer the KV cache of `tokens` tokens."""
        link = target.spec.kv_transfer
        assert link is not None, f"{target.name} takes part in no KV transfer"
        evidence = self._pairs.get(_pair(source.incarnation, target.incarnation))
        if evidence is None:
            evidence = self._all
        nominal_s = link.nominal_s(tokens)
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
        nominal_s = link.nominal_s(tokens)
        for evidence in (own, self._all):
            evidence.add(seconds, nominal_s, now)

    def forget(self, incarnation: int) -> None:
        """Note that an instance is gone."""
        for pair in [pair for pair in self._pairs if incarnation in divmod(pair, _SPAN)]:
            del self._pairs[pair]
        if self._checks is not None:
            self._checks.forget(incarnation)


@mypyc_attr(acyclic=True)
class Holds:
    """Holds of all instances, by the lease of their prefill; each counts in the ledger of its instance."""

    def __init__(self) -> None:
        self._kept: dict[LeaseId, tuple[Instance, Hold]] = {}
        self.transfers = TransferTimes()

    @property
    def count(self) -> int:
        """Holds that have not ended."""
        return len(self._kept)

    def all(self) -> list[Hold]:
        """Those that have not ended. To be read, not written."""
        return [hold for _, hold in self._kept.values()]

    def keep(self, source: Instance, hold: Hold) -> None:
        """Note that an instance keeps a prompt from now on."""
        source.keep(hold.tokens)
        self._kept[hold.id] = source, hold

    def let_go(self, hold: Hold) -> None:
        """Note that a prompt was fetched, released or has expired."""
        source, _ = self._kept.pop(hold.id)
        assert not hold.ended, f"hold {hold.id} has ended before"
        hold.ended = True
        source.keep(-hold.tokens)

    def let_go_expired(self, now: float) -> None:
        """Drop holds whose instances no longer keep the prompt."""
        for hold in self.all():
            if hold.expires_at <= now:
                self.let_go(hold)

    def fetched(self, hold: Hold, lease: Lease, target: Instance, now: float) -> None:
        """Note that the first token of a decode leg came: its blocks were fetched."""
        source, _ = self._kept[hold.id]
        self.let_go(hold)
        link = target.spec.kv_transfer
        if link is not None and hold.sent_tokens > 0:
            seconds = max(0.0, now - lease.dispatched_at - hold.expected_s)
            self.transfers.observe(source, target, link, hold.sent_tokens, seconds, now)
            self.transfers.checks.answered(source, target, hold.sent_tokens, now)

    def source_of(self, hold: Hold) -> Instance | None:
        """Return the instance that keeps a prompt, None once it is let go."""
        kept = self._kept.get(hold.id)
        return None if kept is None else kept[0]

    def sampled(self, target: Instance, sample: EngineSample, now: float) -> None:
        """Judge transfers to an instance by its counters."""
        coming = sum([hold.sent_tokens for _, hold in self._kept.values() if hold.target == target.name])
        checks = self.transfers.checks
        checks.sampled(target, sample.fetched_tokens, sample.computed_tokens, coming, now)

    def check_integrity(self, instances: Sequence[Instance]) -> None:
        """Assert that each instance keeps its holds and nothing else."""
        tokens = {id(instance): 0 for instance in instances}
        for source, hold in self._kept.values():
            assert not hold.ended, f"hold {hold.id} has ended"
            tokens[id(source)] = tokens.get(id(source), 0) + hold.tokens
        for instance in (*instances, *[source for source, _ in self._kept.values()]):
            assert instance.held_tokens == tokens[id(instance)], f"holds of {instance.name}"
