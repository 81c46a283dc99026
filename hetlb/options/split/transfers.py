"""Times of transfers of KV caches from one instance to another, by pair, and verdicts on them.

The first estimate of a time is `nominal_s_of`. Each pair has a factor on it: the sum of the observed
times over the sum of the nominal ones, older evidence counting less, so that a pair that was slow is tried
again; without evidence, the factor of all pairs together. The first transfer of a pair holds the handshake
of the two engines and teaches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import KvLink

#: Transfers in a row that failed before a pair rests.
MAX_MISSED_TRANSFERS: Final = 8
#: Transfers that a pair gets before one of them is known to be fetched. Seconds after which it gets more.
MAX_UNJUDGED_TRANSFERS: Final = 16
UNJUDGED_S: Final = 10.0
#: Seconds of a pair's rest, doubled each time, and at most.
REST_S: Final = 30.0
MOST_REST_S: Final = 960.0
#: Seconds that an engine's counters may lag behind its answers.
LAG_S: Final = 0.25
#: Distinct pairs of one decode instance; more are judged together.
_MOST_PAIRS: Final = 6
#: Cost of a verdict that contradicts the earlier belief about a pair, as a share of the tokens.
_CONTRADICTION_SHARE: Final = 0.05
#: Difference of tokens, as a share, within which two sets of pairs explain a count equally well.
_TIE_SHARE: Final = 0.005

FETCHED: Final = "done"
NOT_FETCHED: Final = "not_fetched"


@mypyc_attr(acyclic=True)
class PairRecord:
    """Verdicts on the transfers of one pair.

    `unjudged` counts transfers booked since the last verdict, `missed` failures in a row.
    """

    __slots__ = ("booked_at", "fetched", "missed", "names", "rests", "rests_until", "unjudged")

    def __init__(self, source: str, target: str) -> None:
        self.names = source, target
        self.fetched = self.missed = self.unjudged = self.rests = 0
        self.booked_at = self.rests_until = float("-inf")

    def judge(self, fetched: bool, count: int, left: int, now: float) -> None:
        """Add `count` transfers with one verdict; `left` others have a first token and wait for a verdict."""
        self.unjudged = left
        if fetched:
            self.fetched += count
            self.missed = self.rests = 0
            self.rests_until = float("-inf")
            return
        self.missed += count
        if self.missed >= MAX_MISSED_TRANSFERS and self.rests_until <= now:
            self.rests_until = now + min(MOST_REST_S, REST_S * 2.0**self.rests)
            self.rests += 1


@mypyc_attr(acyclic=True)
class _Counted:
    """Prompt tokens fetched and computed by a decode engine at the last judgement, and transfers to judge.

    `due`: transfers after their first token, as (source, tokens, time).
    """

    __slots__ = ("computed", "due", "fetched")

    def __init__(self, fetched: int, computed: int) -> None:
        self.fetched = fetched
        self.computed = computed
        self.due: list[tuple[int, float, float]] = []


class FetchChecks:
    """Verdicts on the transfers of a fleet, from the decode engines' own counters. Names are incarnations.

    After a failed fetch a decode engine may compute the prompt itself and answer as if nothing had happened.
    vLLM counts prompt tokens by source (`vllm:prompt_tokens_by_source_total`: fetched, computed); its other
    counters count failed fetches as hits. Transfers with a first token before a page was asked for are judged
    together. Each pair fetched either all of its tokens or none; the set of fetching pairs nearest to the
    engine's count is believed. A pair rests after `MAX_MISSED_TRANSFERS` in a row, then it is tried again.
    """

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], PairRecord] = {}
        self._counted: dict[int, _Counted] = {}
        #: Verdicts since they were last taken.
        self._results: dict[str, int] = {}
        #: True once any pair has rested.
        self.restrained = False

    @property
    def due(self) -> int:
        """Return the number of transfers that wait for a verdict."""
        return sum([len(each.due) for each in self._counted.values()])

    def _record(self, source: Instance, target: Instance) -> PairRecord:
        key = source.incarnation, target.incarnation
        found = self._pairs.get(key)
        if found is None:
            found = self._pairs[key] = PairRecord(source.name, target.name)
        return found

    # --- facts ---

    def booked(self, source: Instance, target: Instance, now: float) -> None:
        """Count a request about to be split between both instances."""
        record = self._record(source, target)
        record.unjudged += 1
        record.booked_at = now
        if record.missed + record.unjudged >= MAX_UNJUDGED_TRANSFERS and not record.fetched:
            self.restrained = True

    def checks(self, target: Instance) -> bool:
        """Return True if the engine of `target` reports its fetches."""
        return target.incarnation in self._counted

    def answered(self, source: Instance, target: Instance, tokens: float, now: float) -> None:
        """Note a first token of `target` for a prompt of `tokens` tokens from `source`."""
        counted = self._counted.get(target.incarnation)
        if counted is not None:
            counted.due.append((source.incarnation, tokens, now))

    def failed(self, source: Instance, target: Instance, now: float) -> None:
        """Judge a transfer that failed before a first token."""
        record = self._record(source, target)
        record.judge(False, 1, 0, now)
        self.restrained = self.restrained or record.rests > 0

    def sampled(
        self,
        target: Instance,
        fetched: int | None,
        computed: int | None,
        coming: Mapping[int, float],
        asked_at: float,
        now: float,
    ) -> None:
        """Judge the transfers to an engine by its counters of fetched and computed prompt tokens.

        A counter that the engine lacks is None. `coming` has the tokens, by source, of transfers without a
        first token yet: the engine may have counted these. Its page was asked for at `asked_at`.
        """
        counted = self._counted.get(target.incarnation)
        if fetched is None or computed is None:
            if counted is not None and fetched is None:
                self._count(FETCHED, len(counted.due))
                del self._counted[target.incarnation]
            return
        if counted is None or fetched < counted.fetched or computed < counted.computed:  # first, or restarted
            if counted is not None:
                self._count(FETCHED, len(counted.due))
            self._counted[target.incarnation] = _Counted(fetched, computed)
            return
        if not counted.due:
            counted.fetched = max(counted.fetched, int(fetched - math.fsum(coming.values())))
            counted.computed = computed
        elif counted.due[0][2] <= asked_at - LAG_S:
            self._judge(target, counted, fetched, computed, dict(coming), asked_at - LAG_S, now)

    def _judge(
        self,
        target: Instance,
        counted: _Counted,
        fetched: int,
        computed: int,
        coming: dict[int, float],
        until: float,
        now: float,
    ) -> None:
        """Judge the transfers to an engine: find the sources with tokens that add up to the fetched tokens.

        The set with the nearest sum is believed. Transfers after `until` may be counted or not. While two
        sets explain the count, wait for the next page.
        """
        sums: dict[int, float] = {}
        counts: dict[int, int] = {}
        later: list[tuple[int, float, float]] = []
        for each in counted.due:
            source, tokens, at = each
            if at > until:
                coming[source] = coming.get(source, 0.0) + tokens
                later.append(each)
                continue
            sums[source] = sums.get(source, 0.0) + tokens
            counts[source] = counts.get(source, 0) + 1
        grown, total = float(fetched - counted.fetched), max(1.0, math.fsum(sums.values()))
        believed = {source for source in sums if not self._missed(source, target.incarnation)}
        best, least, offs = believed, float("inf"), list[tuple[float, set[int]]]()
        for able in _sets(list(sums)):
            own = math.fsum([sums[source] for source in able])
            more = math.fsum(
                [each for source, each in coming.items() if source in able or source not in sums]
            )
            off = max(0.0, own - grown) + max(0.0, grown - own - more)
            offs.append((off / total, able))
            cost = off / total + _CONTRADICTION_SHARE * len(able ^ believed)
            if cost < least:
                best, least = able, cost
        most = min([off for off, _ in offs]) + _TIE_SHARE
        decided = [able for off, able in offs if off <= most] == [best]
        if coming and not decided and now - counted.due[0][2] < UNJUDGED_S:
            return
        own = math.fsum([sums[source] for source in best])
        missing = total - own
        # Prompts that the engine had in its prefix cache are neither fetched nor computed.
        worked = float(computed - counted.computed)
        computed_anew = worked >= 0.5 * missing
        for source, count in counts.items():
            left = sum([each[0] == source for each in later])
            reached = source in best or not computed_anew
            self._take_verdict(source, target.incarnation, count, left, now, reached=reached)
        self._counted[target.incarnation] = kept = _Counted(fetched, computed)
        kept.due = later
        # Tokens counted early belong to transfers judged later.
        early = math.fsum(coming.values())
        kept.fetched -= int(min(early, max(0.0, grown - own)))
        kept.computed -= int(min(early, max(0.0, worked - missing)))

    def _take_verdict(
        self, source: int, target: int, count: int, left: int, now: float, *, reached: bool
    ) -> None:
        """Note whether `count` transfers of a pair reached the target; `left` more have no verdict yet."""
        self._count(FETCHED if reached else NOT_FETCHED, count)
        record = self._pairs.get((source, target))
        if record is not None:
            record.judge(reached, count, left, now)
            self.restrained = self.restrained or record.rests > 0

    def _missed(self, source: int, target: int) -> bool:
        record = self._pairs.get((source, target))
        return record is not None and record.missed > 0

    def _count(self, result: str, count: int) -> None:
        if count:
            self._results[result] = self._results.get(result, 0) + count

    def forget(self, incarnation: int) -> None:
        """Drop a removed instance."""
        counted = self._counted.pop(incarnation, None)
        if counted is not None:
            self._count(FETCHED, len(counted.due))
        for pair in [pair for pair in self._pairs if incarnation in pair]:
            del self._pairs[pair]

    # --- verdicts ---

    def usable(self, source: Instance, target: Instance, now: float) -> bool:
        """Return True if requests may be split between both."""
        record = self._pairs.get((source.incarnation, target.incarnation))
        if record is None:
            return True
        if record.rests_until > now:
            return False
        unknown = record.missed + record.unjudged >= MAX_UNJUDGED_TRANSFERS and not record.fetched
        waits = unknown and self.checks(target)
        return not waits or now - record.booked_at > UNJUDGED_S

    def resting(self, now: float) -> list[PairRecord]:
        """Return the pairs that get no request now as their transfers fail."""
        return [record for record in self._pairs.values() if record.rests_until > now]

    def take_results(self) -> dict[str, int]:
        """Return the verdicts since the last call by result, and begin anew."""
        results, self._results = self._results, {}
        return results


def _sets(sources: Sequence[int]) -> Iterable[set[int]]:
    """Return the sets of sources that may have reached the engine. If there are many, only all and none."""
    if len(sources) > _MOST_PAIRS:
        return [set(sources), set()]
    return [set(chosen) for count in range(len(sources), -1, -1) for chosen in combinations(sources, count)]


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
