"""Circuit breaker of one instance: lost answers and silence trip it, trials close it again.

A lost answer is a server error, a 429 or 503 of an idle server, a wrong answer, an error event, a broken
stream, a closed connection, or a client that left after a long wait without a byte. Not counted are refusals
of a kind of request (4xx, see `refused_kinds.py`) and requests that two instances lose. The share of lost
answers, weighted by client (`client_answers.py`), is compared with the best other instance of the model:
clients cause losses that hit all instances alike. `excess` is the certain part of the difference,

    excess = max(0, (lower(own) - best) / (1 - best)),

with the lower end of Wilson's score interval (JASA 22, 1927) for the own share. An instance in doubt or
stalled gets one request at a time, a trial. A lost trial is followed by a pause of a second or more. Some
trials in a row must end well, and twice as many after each further doubt within a minute. An instance with a
stated `retry-after` gets no trial before that time. If all instances of a model are restrained, none is. With
any excess the instance also gets trials beside its requests by score: old evidence does not leave it idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.client_answers import ClientAnswers

#: Age of evidence that counts 1/e, in seconds.
MEMORY_S: Final = 20.0
#: Least excess of an instance in doubt, and the least number of lost answers for it: one is no fault.
DOUBT_EXCESS: Final = 0.3
_LEAST_LOST_ANSWERS: Final = 1.5
#: The same with more lost answers: these are no accident.
_SURE_EXCESS: Final = 0.02
_SURE_LOST_ANSWERS: Final = 2.5
#: Number of answers remembered, so that a few new ones outweigh them.
_MOST_ANSWERS: Final = 16.0
#: Good answers in a row before earlier losses are forgotten; doubled with each doubt within `_RELAPSE_S` of
#: the one before, and the largest value.
FORGIVING_ANSWERS: Final = 3
MOST_FORGIVING_ANSWERS: Final = 24
_RELAPSE_S: Final = 60.0
#: Requests lost in a row, here and elsewhere, before they count: not every request can be at fault.
_MOST_LOST_AS_ELSEWHERE: Final = 5
#: Standard deviations from a share down to the begin of its interval: 90 % one-sided.
_LOWER_DEVIATIONS: Final = 1.28
#: Lost answers, and all answers, assumed of another instance before any ended there.
_PRIOR_LOST_ANSWERS: Final = 0.2
_PRIOR_ANSWERS: Final = 2.0
#: Seconds of a pause after a trial, doubled with each trial that fails, and the longest.
PAUSE_S: Final = 1.0
MOST_PAUSE_S: Final = 3.0
#: Multiple of the expected time, and seconds, without a token: then the instance is stalled.
STALL_FACTOR: Final = 5.0
LEAST_SILENCE_S: Final = 2.0
#: The same while no answer has shown its speed.
UNKNOWN_SILENCE_S: Final = 10.0
#: Seconds, and `STALL_FACTOR` steps, without a token: the stream has stopped, this is no slow step.
STANDS_S: Final = 0.5
#: Seconds that scraped counters show for whether an engine works.
COUNTERS_STALE_S: Final = 5.0
#: Seconds that a client waits before its next try (OpenAI's SDK).
_NEXT_TRY_S: Final = 0.5
_MOST_EXCESS: Final = 0.95


@mypyc_attr(acyclic=True)
class CircuitBreaker:
    """Evidence about the answers of one instance, and its trials while they are bad."""

    __slots__ = (
        "_aged_at", "_doubted_at", "_generated", "_in_a_row", "_losses", "_lost_as_elsewhere", "_pause_s",
        "asked_until", "doubted", "excess", "forgiving", "lost", "lost_s", "moved_at", "next_trial_at",
        "odd_at", "overdue_s", "read_at", "reason", "silent_since", "stalled_since", "still", "token_at",
        "trial", "well",
    )  # fmt: skip

    def __init__(self, now: float) -> None:
        #: Answers that ended well, and lost ones that count, of about the last `MEMORY_S` seconds.
        self.well = self.lost = 0.0
        #: All lost ones of them, by client and session.
        self._losses: dict[tuple[str, str], float] = {}
        #: Mean seconds until an answer was lost.
        self.lost_s = 0.0
        self._in_a_row = 0
        #: Requests lost here and elsewhere since it answered one.
        self._lost_as_elsewhere = 0
        #: Time of its newest odd or missing answer while others answer well.
        self.odd_at = -math.inf
        #: Good answers in a row that end its doubt; time of the last begin or end of a doubt.
        self.forgiving, self._doubted_at = FORGIVING_ANSWERS, -math.inf
        self._aged_at = now
        self.excess = 0.0
        self.doubted = False
        self.reason = ""
        #: Time before which it asked for no requests (`retry-after`).
        self.asked_until = -math.inf
        #: Time of its last token, as far as it is known.
        self.token_at = now
        #: Time of the first missing sign of work, None while it works; and the same once it is certain.
        self.silent_since: float | None = None
        self.stalled_since: float | None = None
        #: Lateness of its next token in seconds.
        self.overdue_s = 0.0
        #: Its counter of tokens; time of the last scrape; time of the scrape before its last change; True if
        #: the counter has not changed since its last token.
        self._generated: int | None = None
        self.read_at = self.moved_at = -math.inf
        self.still = False
        #: Lease id of the current trial, 0 for none.
        self.trial = 0
        self.next_trial_at = -math.inf
        self._pause_s = PAUSE_S

    # --- ends of its answers ---

    @property
    def troubled(self) -> bool:
        """True if an answer may come later than forecast."""
        return self.excess > 0.0 or self.overdue_s > 0.0

    def ended_well(self, now: float) -> bool:
        """Count an answer that ended well. Return True if it is evidence against a doubt."""
        self.well += 1.0
        self.token_at, self._lost_as_elsewhere = now, 0
        if not self._losses:
            return False
        self._in_a_row += 1
        if self._in_a_row >= self.forgiving:
            self._losses.clear()
            self.lost = 0.0
        self._keep_newest()
        if self.excess > 0.0:
            self._begin_trials(now)
        return self.excess > 0.0

    def ended_badly(self, lease_id: int, seconds: float, client: str, session: str, now: float) -> None:
        """Count a client's answer, lost after `seconds`."""
        losses = self._losses
        count = math.fsum(losses.values())
        self.lost_s += (seconds - self.lost_s) / (count + 1.0)
        losses[client, session] = losses.get((client, session), 0.0) + 1.0
        self._in_a_row = 0
        self._keep_newest()
        self.ended(lease_id)
        if self.next_trial_at < now + self._pause_s:
            self.next_trial_at = now + self._pause_s

    def not_lost(self, client: str, session: str) -> None:
        """Take back a lost answer of a client."""
        left = self._losses.get((client, session), 0.0) - 1.0
        if left > 0.0:
            self._losses[client, session] = left
        else:
            self._losses.pop((client, session), None)

    def lost_as_elsewhere(self) -> bool:
        """Note that two instances lost a request. Return True after several of these without an answer."""
        self._lost_as_elsewhere += 1
        return self._lost_as_elsewhere >= _MOST_LOST_AS_ELSEWHERE

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

    def ended(self, lease_id: int) -> None:
        """Note that a trial is over, or its answer has begun: the next may follow after the pause."""
        if self.trial == lease_id:
            self.trial = 0

    def asked(self, seconds: float, now: float) -> None:
        """Send an idle engine nothing for `seconds`, as it asked; at most `MOST_PAUSE_S`."""
        self.asked_until = max(self.asked_until, now + min(seconds, MOST_PAUSE_S))
        self.next_trial_at = max(self.next_trial_at, self.asked_until)

    def forget(self) -> None:
        """Forget the evidence: another process took the instance's place."""
        self.lost = self.excess = self.overdue_s = 0.0
        self._losses.clear()
        self.doubted = False
        self.stalled_since = self.silent_since = None
        self.asked_until = -math.inf
        self.trial = 0

    def judge(self, others: Iterable[CircuitBreaker], now: float) -> bool:
        """Compare its share of lost answers with the others'. Return True if a doubt or an excess changed.

        Call `weigh` for all of them first.
        """
        before = self.doubted, self.excess > 0.0
        self.excess = 0.0
        if self.lost >= _LEAST_LOST_ANSWERS:
            best = 1.0
            for other in others:
                if other is not self:
                    share = (other.lost + _PRIOR_LOST_ANSWERS) / (other.lost + other.well + _PRIOR_ANSWERS)
                    best = share if share < best else best
            if best < 1.0:
                certain = lower_share(self.lost, self.lost + self.well)
                self.excess = min(_MOST_EXCESS, max(0.0, (certain - best) / (1.0 - best)))
        sure = self.excess >= _SURE_EXCESS and self.lost >= _SURE_LOST_ANSWERS
        self.doubted = sure or self.excess >= DOUBT_EXCESS
        if before[0] is not self.doubted:
            if self.doubted:
                relapsed = now - self._doubted_at < _RELAPSE_S
                twice = min(MOST_FORGIVING_ANSWERS, 2 * self.forgiving)
                self.forgiving = twice if relapsed else FORGIVING_ANSWERS
            self._doubted_at = now
        if self.doubted:
            self.reason = f"{self.lost:.0f} of its last {self.lost + self.well:.0f} answers failed"
        elif before[0]:
            self.trial, self._pause_s = 0, PAUSE_S
        return before != (self.doubted, self.excess > 0.0)

    def age(self, now: float) -> None:
        """Reduce the weight of old evidence."""
        since = now - self._aged_at
        if since > 0.0:
            keep = math.exp(-since / MEMORY_S)
            self._scale(keep)
            self._aged_at = now

    # --- whether it works ---

    def read(self, generated: int | None, now: float) -> None:
        """Store the engine's own count of generated tokens, None if it reports none."""
        known, self._generated = self._generated, generated
        if generated is None:
            return
        if known is not None and generated != known:
            self.moved_at = self.read_at  # at the earliest
            self.still = False
        else:
            self.still = known is not None and self.read_at > self.token_at
        self.read_at = now

    def counts(self, now: float) -> bool:
        """Return True if its own counters are known."""
        return self._generated is not None and now - self.read_at <= COUNTERS_STALE_S

    def works(self, now: float) -> bool:
        """Return True if its own counters moved recently, also since its last token."""
        return self.moved_at >= now - COUNTERS_STALE_S and not self.still

    def watch(
        self, since: float, need_s: float, late_s: float, stands_s: float, least_s: float, now: float
    ) -> bool:
        """Compare the silence since a token or a dispatch (`since`) with the time that a token needs.

        True if it has stalled now, or stalls no more. `since` is infinite where it owes nothing: that is no
        proof that it works. `late_s`: delay of another request's first token. It stands still
        after `stands_s`, has stalled after `least_s`; both after `STALL_FACTOR` times what a token needs.
        """
        self.overdue_s = 0.0
        if self.works(now):
            return self._goes_on(now)
        if since == math.inf:
            if self.stalled_since is None:
                self.silent_since = None
            return False
        silence_s = now - max(since, self.token_at)
        if silence_s <= need_s:
            if self.stalled_since is None:
                self.silent_since = None
            self.overdue_s = late_s
            return False
        self.overdue_s = max(late_s, silence_s - need_s)
        if silence_s <= STALL_FACTOR * need_s or self.stalled_since is not None:
            return False
        if silence_s > stands_s:
            self.silent_since = now - silence_s
        if silence_s <= least_s or (self.counts(now) and not self.still):
            return False  # it may have worked since its last token: the next scrape tells
        self.stalled_since = now
        self._pause_s = PAUSE_S
        self.next_trial_at = now + PAUSE_S
        return True

    def _goes_on(self, now: float) -> bool:
        self.silent_since = None
        if self.stalled_since is None:
            return False
        self.stalled_since = None
        self._begin_trials(now)
        return True

    def token(self, now: float) -> bool:
        """Note a token. Return True if it ends a stall."""
        self.token_at = now
        return self.stalled_since is not None and self._goes_on(now)

    def _begin_trials(self, now: float) -> None:
        self.trial, self._pause_s, self.next_trial_at = 0, PAUSE_S, now

    # --- trials meanwhile ---

    def restrained(self, now: float) -> bool:
        """Return True if it gets one trial at a time."""
        return self.doubted or self.stalled_since is not None or now < self.asked_until

    def held(self, now: float) -> bool:
        """Return True if it gets no request now, not even a trial."""
        return self.restrained(now) and not self._may_try(now)

    def wary(self, now: float) -> bool:
        """Return True if it gets trials, as it is restrained or the score keeps requests away."""
        return self.excess > 0.0 or self.restrained(now)

    def due(self, now: float) -> bool:
        """Return True if the next request is to be its trial."""
        return self.wary(now) and self._may_try(now)

    def _may_try(self, now: float) -> bool:
        return not self.trial and now >= self.next_trial_at

    def dispatched(self, lease_id: int, now: float) -> None:
        """Note a dispatch. With a restraint or an excess it is a trial."""
        if self.wary(now):
            self.trial = lease_id
            self.next_trial_at = now + self._pause_s
            self._pause_s = min(MOST_PAUSE_S, 2.0 * self._pause_s)

    def why(self, now: float) -> str:
        """Return the reason of the restraint, for people; "" without one."""
        if self.stalled_since is not None:
            silent = now - (self.silent_since or self.stalled_since)
            return f"stalled: no token for {silent:.3g} s"
        if self.doubted:
            return f"on trial: {self.reason}, more than elsewhere"
        if now < self.asked_until:
            return f"it asked to come again in {self.asked_until - now:.3g} s"
        return ""

    def later_s(self, end_s: float) -> float:
        """Return the expected delay of a good answer beyond the forecast `end_s`, in seconds.

        A lost try costs its time and the next try; `excess / (1 - excess)` of them are expected. An overdue
        token is expected to take as long again.
        """
        tries = self.excess / (1.0 - self.excess)
        return self.overdue_s + tries * (self.lost_s + _NEXT_TRY_S + end_s)


def lower_share(lost: float, count: float) -> float:
    """Return the lower end of Wilson's 90 % interval of a share; 0 of none."""
    if count <= 0.0:
        return 0.0
    share, square = lost / count, _LOWER_DEVIATIONS * _LOWER_DEVIATIONS
    middle = share + square / (2.0 * count)
    spread = _LOWER_DEVIATIONS * math.sqrt(share * (1.0 - share) / count + square / (4.0 * count * count))
    return max(0.0, (middle - spread) / (1.0 + square / count))
