"""Evidence about one instance in four parts, and its trials while it is restrained.

It obeys `table.py`: changes of the state, restraints of an instance that is up (trials alone, or less), and
the facts that change either. With any excess of lost answers an instance also gets trials beside its requests
by score: old evidence does not leave it idle.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.evidence import table
from hetlb.balancer.core.evidence.health import HealthState
from hetlb.balancer.core.evidence.lost_answers import Answers
from hetlb.balancer.core.evidence.silence import Silence
from hetlb.balancer.core.types import Health

#: Longest time in seconds for which an engine is believed that says when to come again.
BUSY_CAP_S: Final = 60.0
#: Seconds after which a limit is forgotten, and its growth per second as a share of the limit.
FORGOTTEN_S: Final = 10.0
_GROWTH_SHARE: Final = 0.25


@mypyc_attr(acyclic=True)
class Room:
    """A slow start, and a number of sequences beyond which it refused."""

    __slots__ = ("_limit", "_limit_until", "_ramp_s", "_ramp_since", "restarted")

    def __init__(self) -> None:
        #: True if its process is new and is not up yet.
        self.restarted = False
        #: Begin and length of its slow start.
        self._ramp_since: float | None = None
        self._ramp_s = 0.0
        #: Most sequences that it took before it refused more. Time from which on this limit grows.
        self._limit = 0
        self._limit_until = -math.inf

    def begin_slow_start(self, seconds: float, now: float) -> None:
        """Limit the instance for some seconds to a growing share of what it can run."""
        self.restarted = False
        self._ramp_since, self._ramp_s = (now, seconds) if seconds > 0.0 else (None, 0.0)

    def end_slow_start(self) -> bool:
        """End the slow start. True if there was one."""
        ended = self._ramp_since is not None
        self._ramp_since = None
        return ended

    def is_full(self, sequences: int, retry_after_s: float | None, now: float) -> None:
        """Learn that the instance takes no more than `sequences`.

        The limit holds for the seconds that the instance asked for, else for `LIMIT_S`.
        """
        seconds = table.LIMIT_S if retry_after_s is None else min(retry_after_s, BUSY_CAP_S)
        until = now + seconds
        if now >= self._limit_until or sequences < self._limit:
            self._limit = max(1, sequences)
        self._limit_until = max(self._limit_until, until)

    def limit(self, now: float) -> float:
        """Return the sequences that it is believed to take, infinite if unknown."""
        since = now - self._limit_until
        if since >= FORGOTTEN_S:
            return math.inf
        if since < 0.0:
            return self._limit
        return self._limit + 1 + int(since * max(1.0, _GROWTH_SHARE * self._limit))

    def limited(self, now: float) -> bool:
        """Return True if it may have less room than usual."""
        if self._ramp_since is not None and now - self._ramp_since >= self._ramp_s:
            self._ramp_since = None
        return self._ramp_since is not None or now - self._limit_until < FORGOTTEN_S

    def short_of(self, sequences: int, max_num_seqs: int, now: float) -> str:
        """Return the message that says why it may not run this number of sequences now, "" if it may."""
        if self._ramp_since is not None:
            slots = max_num_seqs * max(0.0, now - self._ramp_since) / self._ramp_s
            if sequences > max(1.0, slots):
                return f"{table.SLOW_START}: {max(1, int(slots))} of {max_num_seqs} slots"
        limit = self.limit(now)
        return f"full: it refused more than {limit:.0f} requests" if sequences > limit else ""


@mypyc_attr(acyclic=True)
class Evidence:
    """Evidence about one incarnation of one instance, and its trials."""

    __slots__ = (
        "_pause_s", "answers", "asked_until", "begun", "health", "next_trial_at", "proven", "room", "silence",
        "trial",
    )  # fmt: skip

    def __init__(self, rng: random.Random, now: float, state: Health = Health.SUSPECT) -> None:
        self.health = HealthState(rng, state)
        self.answers = Answers(now)
        self.silence = Silence(now)
        self.room = Room()
        #: True once its process answered a request well, False if it failed or refused before.
        self.proven: bool | None = None
        #: Features of requests that its process has begun to answer, as far as requests were read for them.
        self.begun: set[str] = set()
        #: Time before which it asked for no requests (`retry-after`).
        self.asked_until = -math.inf
        #: Lease id of the current trial, 0 for none.
        self.trial = 0
        self.next_trial_at = -math.inf
        self._pause_s = table.PAUSE_S

    # --- facts ---

    def ended_well(self, now: float) -> bool:
        """Count an answer that ended well. Return True if it is evidence against a doubt."""
        self.silence.token_at = now
        failed, self.proven = self.proven is False, True
        if not self.answers.ended_well() and not failed:
            return False
        self._begin_trials(now)
        return True

    def ended_badly(self, lease_id: int, seconds: float, client: str, session: str, now: float) -> None:
        """Count a client's answer, lost after `seconds`."""
        self.answers.ended_badly(seconds, client, session)
        self.ended(lease_id)
        self.next_trial_at = max(self.next_trial_at, now + self._pause_s)

    def failed(self, now: float) -> bool:
        """Note a failure or a refusal. Return True if trials alone follow: it has answered none well yet."""
        if self.proven:
            return False
        self.next_trial_at = max(self.next_trial_at, now + self._pause_s)
        known, self.proven = self.proven, False
        return known is None

    def judge(self, others: Sequence[Evidence], now: float) -> bool:
        """Compare its lost answers with the others'. Return True if a doubt or an excess changed."""
        doubted = self.answers.doubted
        changed = self.answers.judge([each.answers for each in others], now)
        if doubted and not self.answers.doubted:
            self.trial, self._pause_s = 0, table.PAUSE_S
        return changed

    def watched(self, changed: bool, now: float) -> bool:
        """Begin trials if `Silence.watch` found a change (`changed`). Return `changed`."""
        if not changed:
            return False
        if self.silence.stalled_since is None:
            self._begin_trials(now)
        else:
            self._pause_s, self.next_trial_at = table.PAUSE_S, now + table.PAUSE_S
        return True

    def token(self, now: float) -> bool:
        """Note a token. Return True if it ends a stall."""
        if not self.silence.token(now):
            return False
        self._begin_trials(now)
        return True

    def asked(self, seconds: float, now: float) -> None:
        """Send an idle engine nothing for `seconds`, as it asked; at most `MOST_PAUSE_S`."""
        self.asked_until = max(self.asked_until, now + min(seconds, table.MOST_PAUSE_S))
        self.next_trial_at = max(self.next_trial_at, self.asked_until)

    def forget(self) -> None:
        """Forget the evidence: another process took the instance's place."""
        self.answers.forget()
        self.proven = None
        self.begun.clear()
        self.silence.overdue_s = 0.0
        self.silence.stalled_since = self.silence.silent_since = None
        self.asked_until = -math.inf
        self.trial = 0

    # --- trials ---

    def _begin_trials(self, now: float) -> None:
        self.trial, self._pause_s, self.next_trial_at = 0, table.PAUSE_S, now

    def ended(self, lease_id: int) -> None:
        """Note that a trial is over, or its answer has begun: the next may follow after the pause."""
        if self.trial == lease_id:
            self.trial = 0

    def begins(self, lease_id: int) -> None:
        """Note that an answer has begun.

        If it is the trial's, the trial is over, and earlier failures of the process count no more.
        """
        if self.trial == lease_id:
            self.trial, self.proven = 0, self.proven or None

    def standing(self, now: float) -> str | None:
        """Return the restraint that allows trials alone, or nothing; None without one."""
        if self.silence.stalled_since is not None:
            return table.STALLED
        if self.answers.doubted:
            return table.DOUBTED
        if self.proven is False:
            return table.UNPROVEN
        return table.ASKED if now < self.asked_until else None

    def held(self, now: float) -> bool:
        """Return True if it gets no request now, not even a trial."""
        return self.standing(now) is not None and not self._may_try(now)

    def wary(self, now: float) -> bool:
        """Return True if the instance gets one request at a time, as a trial."""
        return self.answers.excess > 0.0 or self.standing(now) is not None

    def due(self, now: float) -> bool:
        """Return True if the next request is to be its trial."""
        return self.wary(now) and self._may_try(now)

    def _may_try(self, now: float) -> bool:
        return not self.trial and now >= self.next_trial_at

    def dispatched(self, lease_id: int, now: float) -> bool:
        """Note a dispatch. Return True if it is a trial.

        It is one if the instance is under a restraint or has an excess of lost answers.
        """
        if not self.wary(now):
            return False
        self.trial = lease_id
        self.next_trial_at = now + self._pause_s
        self._pause_s = min(table.MOST_PAUSE_S, 2.0 * self._pause_s)
        return True

    # --- what it gets ---

    @property
    def troubled(self) -> bool:
        """True if an answer may come later than forecast."""
        return self.answers.excess > 0.0 or self.silence.overdue_s > 0.0

    def later_s(self, end_s: float) -> float:
        """Return the expected delay of a good answer beyond the forecast `end_s`, in seconds.

        An overdue token is expected to take as long again.
        """
        return self.silence.overdue_s + self.answers.later_s(end_s)

    def active(self, now: float) -> bool:
        """Return True if the instance may have to be treated differently from others."""
        return self.room.limited(now) or self.wary(now)

    def why(self, now: float) -> str:
        """Return the message that says why the instance gets fewer requests or none, "" if it gets all."""
        standing = self.standing(now)
        if standing == table.STALLED:
            return self.silence.told(now)
        if standing == table.DOUBTED:
            return f"{table.DOUBTED}: {self.answers.told} answers failed, more than elsewhere"
        if standing == table.UNPROVEN:
            return f"{table.UNPROVEN}: it has answered nothing well yet"
        return "" if standing is None else f"it asked to come again in {self.asked_until - now:.3g} s"

    def less(self, max_num_seqs: int, now: float) -> str:
        """Return the message that says why it may not fill all its slots now, "" if it may."""
        return self.why(now) or self.room.short_of(max_num_seqs, max_num_seqs, now)

    def restraint(self, sequences: int, max_num_seqs: int, now: float, *, doubt: bool = True) -> str:
        """Return why the instance may take no further request now, or "" if it may.

        Without `doubt` only its room counts, not what it is held back for.
        """
        if doubt and self.held(now):
            return self.why(now)
        return self.room.short_of(sequences + 1, max_num_seqs, now)
