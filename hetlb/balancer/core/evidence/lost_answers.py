"""Answers of one instance, good and lost, and the judgement by them: an excess, a doubt.

A lost answer counts by its client (`clients.py`). The share of lost answers is compared with the best other
instance of the model, as clients cause losses that hit all instances alike. `excess` is the certain part of
the difference,

    excess = max(0, (lower(own) - best) / (1 - best)),

with the lower end of Wilson's score interval (JASA 22, 1927) for the own share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.evidence import table

if TYPE_CHECKING:
    from hetlb.balancer.core.evidence.clients import ClientAnswers

#: Least excess of an instance in doubt, and the least number of lost answers for it: one is no fault.
DOUBT_EXCESS: Final = 0.3
_LEAST_LOST_ANSWERS: Final = 1.5
#: A smaller excess that is enough if more answers were lost: these are no accident.
_SURE_EXCESS: Final = 0.02
_SURE_LOST_ANSWERS: Final = 2.5
#: Least lost answers of an instance that is in doubt, or was a minute ago.
_RELAPSED_ANSWERS: Final = 0.5
#: Number of answers remembered, so that a few new ones outweigh them.
_MOST_ANSWERS: Final = 16.0
#: Standard deviations from a share down to the begin of its interval: 90 % one-sided.
_LOWER_DEVIATIONS: Final = 1.28
#: Lost answers, and all answers, that are assumed of another instance in addition to the seen ones.
_PRIOR_LOST_ANSWERS: Final = 0.2
_PRIOR_ANSWERS: Final = 2.0
#: Seconds that a client waits before its next try (OpenAI's SDK).
_NEXT_TRY_S: Final = 0.5
_MOST_EXCESS: Final = 0.95


@mypyc_attr(acyclic=True)
class Answers:
    """Answers of about the last `MEMORY_S` seconds."""

    __slots__ = (
        "_aged_at", "_doubted_at", "_in_a_row", "_losses", "_lost_as_elsewhere", "doubted", "excess",
        "forgiving", "lost", "lost_s", "odd_at", "well",
    )  # fmt: skip

    def __init__(self, now: float) -> None:
        #: Answers that ended well, and lost ones that count.
        self.well = self.lost = 0.0
        #: All lost ones, by client and session.
        self._losses: dict[tuple[str, str], float] = {}
        #: Mean seconds until an answer was lost.
        self.lost_s = 0.0
        self._in_a_row = 0
        #: Requests lost here and elsewhere since it answered one.
        self._lost_as_elsewhere = 0
        #: Time of its newest odd or missing answer while others answer well.
        self.odd_at = -math.inf
        #: Good answers in a row that end a doubt. Time when the last doubt began or ended.
        self.forgiving, self._doubted_at = table.FORGIVING_ANSWERS, -math.inf
        self._aged_at = now
        self.excess = 0.0
        self.doubted = False

    @property
    def told(self) -> str:
        """Text with the number of its lost answers: `3 of its last 20`."""
        return f"{self.lost:.0f} of its last {self.lost + self.well:.0f}"

    def ended_well(self) -> bool:
        """Count an answer that ended well. Return True if it is evidence against a doubt."""
        self.well += 1.0
        self._lost_as_elsewhere = 0
        if not self._losses:
            return False
        self._in_a_row += 1
        if self.doubted and self._in_a_row >= self.forgiving:
            self._losses.clear()
            self.lost = 0.0
        self._keep_newest()
        return self.excess > 0.0

    def ended_badly(self, seconds: float, client: str, session: str) -> None:
        """Count a client's answer, lost after `seconds`."""
        losses = self._losses
        count = math.fsum(losses.values())
        self.lost_s += (seconds - self.lost_s) / (count + 1.0)
        losses[client, session] = losses.get((client, session), 0.0) + 1.0
        self._in_a_row = 0
        self._keep_newest()

    def not_lost(self, client: str, session: str) -> None:
        """Take back a lost answer of a client."""
        left = self._losses.pop((client, session), 0.0) - 1.0
        if left > 0.0:
            self._losses[client, session] = left

    def lost_as_elsewhere(self) -> bool:
        """Note that two instances lost the same request.

        Return True after `MOST_LOST_AS_ELSEWHERE` of these without an answer between them.
        """
        self._lost_as_elsewhere += 1
        return self._lost_as_elsewhere >= table.MOST_LOST_AS_ELSEWHERE

    def forget(self) -> None:
        """Set the number of lost answers to zero, and end the doubt."""
        self.lost = self.excess = 0.0
        self._losses.clear()
        self.doubted = False

    def weigh(self, answers: ClientAnswers, incarnation: int) -> None:
        """Set the number of lost answers that count, by the answers of their clients elsewhere.

        The lesser of two figures counts, by session and by client: one client may have many sessions.
        """
        if not self._losses:
            self.lost = 0.0
            return
        by_client: dict[str, float] = {}
        by_session: dict[str, float] = {}
        unknown = 0.0
        for (client, session), lost in self._losses.items():
            if client or session:
                by_client[client] = by_client.get(client, 0.0) + lost
                by_session[session] = by_session.get(session, 0.0) + lost
            else:
                unknown += lost
        clients = [answers.counted(each, incarnation, lost) for each, lost in by_client.items()]
        sessions = [answers.counted(each, incarnation, lost) for each, lost in by_session.items()]
        self.lost = unknown + min(math.fsum(clients), math.fsum(sessions))

    def judge(self, others: Iterable[Answers], now: float) -> bool:
        """Compare its share of lost answers with the others'. Return True if a doubt or an excess changed.

        Call `weigh` for all of them first.
        """
        before = self.doubted, self.excess > 0.0
        self.excess = 0.0
        lately = now - self._doubted_at < table.RELAPSE_S
        if self.lost >= (_RELAPSED_ANSWERS if self.doubted or lately else _LEAST_LOST_ANSWERS):
            best = 1.0
            for other in others:
                if other is not self:
                    share = (other.lost + _PRIOR_LOST_ANSWERS) / (other.lost + other.well + _PRIOR_ANSWERS)
                    best = share if share < best else best
            if best < 1.0:
                certain = lower_share(self.lost, self.lost + self.well)
                self.excess = min(_MOST_EXCESS, max(0.0, (certain - best) / (1.0 - best)))
        sure = self.excess >= _SURE_EXCESS and self.lost >= _SURE_LOST_ANSWERS
        self.doubted = sure or self.excess >= DOUBT_EXCESS or (self.excess > 0.0 and (before[0] or lately))
        if before[0] is not self.doubted:
            if self.doubted:
                twice = min(table.MOST_FORGIVING_ANSWERS, 2 * self.forgiving)
                self.forgiving = twice if lately else table.FORGIVING_ANSWERS
            self._doubted_at = now
        return before != (self.doubted, self.excess > 0.0)

    def later_s(self, end_s: float) -> float:
        """Return the expected delay by lost answers beyond the forecast `end_s`, in seconds.

        A lost try costs its time and the next try; `excess / (1 - excess)` of them are expected.
        """
        return self.excess / (1.0 - self.excess) * (self.lost_s + _NEXT_TRY_S + end_s)

    def age(self, now: float) -> None:
        """Reduce the weight of old evidence."""
        since = now - self._aged_at
        if since > 0.0:
            self._scale(math.exp(-since / table.MEMORY_S))
            self._aged_at = now

    def _keep_newest(self) -> None:
        count = self.well + math.fsum(self._losses.values())
        if count > _MOST_ANSWERS:
            self._scale(_MOST_ANSWERS / count)

    def _scale(self, keep: float) -> None:
        self.well *= keep
        losses = self._losses
        for key in list(losses):
            losses[key] *= keep
            if losses[key] < 0.05:
                del losses[key]
        self.lost = self.lost * keep if losses else 0.0


def lower_share(lost: float, count: float) -> float:
    """Return the lower end of Wilson's 90 % interval of a share; 0 of none."""
    if count <= 0.0:
        return 0.0
    share, square = lost / count, _LOWER_DEVIATIONS * _LOWER_DEVIATIONS
    middle = share + square / (2.0 * count)
    spread = _LOWER_DEVIATIONS * math.sqrt(share * (1.0 - share) / count + square / (4.0 * count * count))
    return max(0.0, (middle - spread) / (1.0 + square / count))
