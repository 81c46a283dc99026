"""Deaths of engines in the middle of answers, and the answers that may be the cause.

A request can kill each engine that runs it; most engines die for other reasons. Three facts separate the two:

- An answer that shares all its deaths with many others is hardly the cause: one of them is, or none.
- A cause kills soon: a death after many tokens of a lease, beside other answers, counts half.
- As many other recent deaths with mostly well-ended answers clear an answer: engines die.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

from hetlb.balancer.core.types import Lease, RequestId

#: Deaths after which an answer that was alone in them goes on no more, and how many times more answers share
#: them for each further death.
FATAL_DEATHS: Final = 2
_SHARED_BY: Final = 8.0
#: Tokens of a lease within which a death follows its begin.
_SOON_TOKENS: Final = 64
#: Seconds until a death is forgotten.
_RECENT_S: Final = 60.0
#: Least share of well-ended answers in a death that clears its other answers.
_CLEARED_SHARE: Final = 0.5


class Death:
    """Answers that were lost together at one engine, with the tokens of their leases. `dead`: it has died."""

    __slots__ = ("answers", "at", "dead", "instance", "well")

    def __init__(self, instance: str, at: float) -> None:
        self.instance = instance
        self.at = at
        self.dead = False
        self.answers: dict[RequestId, int] = {}
        #: Number of its answers that have ended well since.
        self.well = 0

    def weight_of(self, request_id: RequestId) -> float:
        """Return the weight of this death against one of its answers, less if others may be the cause."""
        return 1.0 if len(self.answers) == 1 or self.answers[request_id] < _SOON_TOKENS else 0.5


class Deaths:
    """The last deaths of engines that a process saw."""

    __slots__ = ("_deaths",)

    def __init__(self) -> None:
        self._deaths: deque[Death] = deque()

    def lost(self, lease: Lease, tokens: int, now: float) -> Death:
        """Note that an answer was lost after `tokens`: in one death with all that began before it."""
        deaths = self._deaths
        while deaths and now - deaths[0].at > _RECENT_S:
            deaths.popleft()
        for found in reversed(deaths):
            if found.instance == lease.instance and lease.dispatched_at <= found.at:
                break
        else:
            found = Death(lease.instance, now)
            deaths.append(found)
        found.answers[lease.request.id] = tokens
        return found

    def suspect(self, request_id: RequestId, own: Sequence[Death], now: float) -> bool:
        """Return True if an answer may have caused its `own` deaths: it is given to no further engine."""
        if len(own) < FATAL_DEATHS:
            return False
        alike = set(own[0].answers).intersection(*(death.answers for death in own[1:]))
        fatal = FATAL_DEATHS + math.log(len(alike), _SHARED_BY)
        if sum(death.weight_of(request_id) for death in own) < fatal:
            return False
        cleared = sum(
            death.dead and death not in own and death.well >= _CLEARED_SHARE * len(death.answers)
            for death in self._deaths
            if now - death.at <= _RECENT_S
        )
        return cleared < len(own)
