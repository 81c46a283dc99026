"""Two names of one process: counts of tokens grow by the answers of both names.

Servers started by one script may begin at the same tick of the clock, so an equal start is no proof. There
are two tests. A scrape at one name must show at least the tokens and CPU seconds that the last scrape at the
other name showed, and little more. And the process must have computed about as many tokens as the answers of
both names had. Of two servers with equal load, each computed half of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.instance import Instance

#: Least number of answers in a stretch of time that is compared. There must be as many as run, too.
_LEAST_ANSWERS: Final = 10
#: Ratio of tokens computed to tokens of answers in a stretch: least and most of one process.
_LEAST_RATIO: Final = 0.75
_MOST_RATIO: Final = 1.33
#: Stretches that agree, less the ones that do not; and scrapes in a row that fit. With both it is one
#: process.
_SURE: Final = 3
_SURE_SCRAPES: Final = 4
#: Most seconds between two scrapes for the later one to show little more than the earlier one.
_NEAR_S: Final = 0.6
#: Most other names that may be of one process. With a thousand servers, each would be compared with each.
_MOST_NAMES: Final = 8
#: Largest increase between the scrapes of two names of one process: tokens for each running answer, CPU
#: seconds, and a multiple of the recent growth.
_MOST_STEPS: Final = 2.0
_MOST_CPU_S: Final = 0.05
_MOST_GROWTH: Final = 1.5


@mypyc_attr(acyclic=True)
class Scraped:
    """One scrape: time, tokens of answers, CPU seconds, running requests."""

    __slots__ = ("answered", "at", "cpu_s", "running")

    def __init__(self, at: float, answered: int, cpu_s: float, running: int) -> None:
        self.at, self.answered, self.cpu_s, self.running = at, answered, cpu_s, running


@mypyc_attr(acyclic=True)
class Pair:
    """Comparison of two instances whose processes began at the same tick."""

    __slots__ = ("_begins", "agree", "fitting", "last", "sure")

    def __init__(self) -> None:
        #: Last scrape of each, by incarnation.
        self.last: dict[int, Scraped] = {}
        #: Begin of the stretch of each, by incarnation: answers, their tokens, and tokens computed.
        self._begins: dict[int, tuple[int, int, int]] = {}
        #: Stretches that agree less stretches that do not; scrapes in a row that fit; True once both are
        #: enough.
        self.agree = self.fitting = 0
        self.sure = False

    def scraped(self, one: Instance, other: Instance, now: float) -> None:
        """Compare after a scrape of `one`. A stretch lasts from a scrape of a name to a later one of it."""
        sample = one.sample
        if sample is None or sample.answered is None or sample.cpu_s is None:
            return
        found = Scraped(now, sample.answered, sample.cpu_s, sample.running or 0)
        before, there = self.last.get(one.incarnation), self.last.get(other.incarnation)
        self.last[one.incarnation] = found
        if before is not None and there is not None and there.at <= now - sample.age_s:
            if not _fits(found, before, there):
                self.agree = self.fitting = 0
                self.sure = False
                self._begins.clear()
                return
            self.fitting += now - there.at <= _NEAR_S
        self._compare(found.answered, one, other)

    def _compare(self, computed: int, one: Instance, other: Instance) -> None:
        sent = one.answered_tokens + other.answered_tokens
        answers = one.booked - one.in_flight + other.booked - other.in_flight
        begin = self._begins.get(one.incarnation)
        if begin is not None:
            ended, tokens = answers - begin[0], sent - begin[1]
            running = one.sequences + other.sequences
            if tokens <= 0 or ended < max(_LEAST_ANSWERS, running):
                return
            fits = _LEAST_RATIO <= (computed - begin[2]) / tokens <= _MOST_RATIO
            self.agree = max(0, min(_SURE, self.agree + (1 if fits else -1)))
            if self.agree in (0, _SURE):
                self.sure = self.agree == _SURE and self.fitting >= _SURE_SCRAPES
        self._begins[one.incarnation] = answers, sent, computed


def _fits(found: Scraped, before: Scraped, there: Scraped) -> bool:
    """Return True if the figures can be the other name's earlier ones, grown for a short time."""
    tokens, cpu_s = found.answered - there.answered, found.cpu_s - there.cpu_s
    if tokens < 0 or cpu_s < 0.0:
        return False
    later_s = found.at - there.at
    if later_s > _NEAR_S:
        return True
    growth = _MOST_GROWTH * later_s / max(1e-3, found.at - before.at)
    most = _MOST_STEPS * max(found.running, there.running, 1) + growth * (found.answered - before.answered)
    return tokens <= most and cpu_s <= _MOST_CPU_S + growth * (found.cpu_s - before.cpu_s)


class Twins:
    """Pairs of instances whose processes began at the same tick, by incarnations, the older first."""

    def __init__(self) -> None:
        self.pairs: dict[tuple[int, int], Pair] = {}

    def scraped(self, instance: Instance, alike: Sequence[Instance], now: float) -> None:
        """Compare an instance after a scrape with the others that began at the same tick, if they are few."""
        if len(alike) <= 1 + _MOST_NAMES:
            for other in alike:
                if other is not instance:
                    self._compare(instance, other, now)

    def _compare(self, instance: Instance, other: Instance, now: float) -> None:
        first = instance.incarnation < other.incarnation
        older, newer = (instance, other) if first else (other, instance)
        key = older.incarnation, newer.incarnation
        pair = self.pairs.get(key)
        if pair is None:
            pair = self.pairs[key] = Pair()
        pair.scraped(instance, other, now)
        if pair.sure:
            newer.twin = older.name
        elif newer.twin == older.name:
            newer.twin = ""

    def forget(self, instance: Instance) -> None:
        """Forget an instance: its process is another one, or it has left."""
        for key in [each for each in self.pairs if instance.incarnation in each]:
            del self.pairs[key]
