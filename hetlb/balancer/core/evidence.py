"""Evidence about one instance: what it is believed to be, from what, and what it gets meanwhile.

It obeys the tables of `evidence_table.py`, which docs/behaviour.md prints: changes of its state (suspect, up,
ejected), restraints of an instance that is up (trials alone, or less), and the facts that change either.

A lost answer counts by its client (`client_answers.py`). A refusal counts for its kind of request alone
(`refused_kinds.py`). The share of lost answers is compared with the best other instance of the model, as
clients cause losses that hit all instances alike. `excess` is the certain part of the difference,

    excess = max(0, (lower(own) - best) / (1 - best)),

with the lower end of Wilson's score interval (JASA 22, 1927) for the own share. With any excess an instance
also gets trials beside its requests by score: old evidence does not leave it idle.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core import evidence_table as table
from hetlb.balancer.core.client_answers import ClientAnswers
from hetlb.balancer.core.state_transition import Transition
from hetlb.balancer.core.types import Health, ProbeResult

#: Relative variation of the duration of an ejection; ejections of which the times are kept.
EJECTION_JITTER_SHARE: Final = 0.2
_KEPT_EJECTIONS: Final = 8
#: Least excess of an instance in doubt, and the least number of lost answers for it: one is no fault.
DOUBT_EXCESS: Final = 0.3
_LEAST_LOST_ANSWERS: Final = 1.5
#: The same with more lost answers: these are no accident.
_SURE_EXCESS: Final = 0.02
_SURE_LOST_ANSWERS: Final = 2.5
#: Least lost answers of an instance that is in doubt, or was a minute ago.
_RELAPSED_ANSWERS: Final = 0.5
#: Number of answers remembered, so that a few new ones outweigh them.
_MOST_ANSWERS: Final = 16.0
#: Standard deviations from a share down to the begin of its interval: 90 % one-sided.
_LOWER_DEVIATIONS: Final = 1.28
#: Lost answers, and all answers, assumed of another instance before any ended there.
_PRIOR_LOST_ANSWERS: Final = 0.2
_PRIOR_ANSWERS: Final = 2.0
#: Seconds that scraped counters show for whether an engine works.
COUNTERS_STALE_S: Final = 5.0
#: Seconds that a client waits before its next try (OpenAI's SDK).
_NEXT_TRY_S: Final = 0.5
_MOST_EXCESS: Final = 0.95
#: Longest time in seconds for which an engine is believed that says when to come again.
BUSY_CAP_S: Final = 60.0
#: Seconds after which a limit is forgotten, and its growth in a second, as a share of it.
FORGOTTEN_S: Final = 10.0
_GROWTH_SHARE: Final = 0.25


@mypyc_attr(acyclic=True)
class Evidence:
    """Evidence about one incarnation of one instance, its state, and its trials."""

    __slots__ = (
        "_aged_at", "_been_up", "_doubted_at", "_generated", "_in_a_row", "_limit", "_limit_until",
        "_losses", "_lost_as_elsewhere", "_pause_s", "_probe_failures", "_probe_successes", "_ramp_s",
        "_ramp_since", "_rng", "asked_until", "clean", "doubt", "doubted", "ejected_until", "ejections",
        "excess", "forgiving", "gone", "lost", "lost_s", "moved_at", "next_trial_at", "odd_at", "overdue_s",
        "read_at", "reason", "restarted", "silent_since", "stalled_since", "state", "still", "token_at",
        "trial", "well",
    )  # fmt: skip

    def __init__(self, rng: random.Random, now: float, state: Health = Health.SUSPECT) -> None:
        self._rng = rng
        self.state = state
        #: Reason of its state.
        self.reason = "not probed yet" if state is Health.SUSPECT else ""
        self.ejected_until = 0.0
        #: Times of its ejections, each within `FLAPPING_S` of the one before.
        self.ejections: deque[float] = deque(maxlen=_KEPT_EJECTIONS)
        #: True if it is up and no good answer could make it any better.
        self.clean = state is Health.UP
        self._probe_failures = self._probe_successes = 0
        #: True if no process listened at its address since its process was seen last.
        self.gone = False
        self._been_up = state is Health.UP
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
        self.forgiving, self._doubted_at = table.FORGIVING_ANSWERS, -math.inf
        self._aged_at = now
        self.excess = 0.0
        self.doubted = False
        #: Reason of the doubt.
        self.doubt = ""
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
        self._pause_s = table.PAUSE_S
        #: True if its process is new and is not up yet.
        self.restarted = False
        #: Begin and length of its slow start.
        self._ramp_since: float | None = None
        self._ramp_s = 0.0
        #: Sequences beyond which it refused, and until when that holds as it is.
        self._limit = 0
        self._limit_until = -math.inf

    @property
    def unproven(self) -> bool:
        """True if its present process has not been up yet, as far as is known."""
        return self.state is Health.EJECTED or not self._been_up

    # --- probes and connections ---

    def on_probe(self, result: ProbeResult, now: float, *, alone: bool = False, detail: str = "") -> bool:
        """Take a probe's result. True if the state changed. `alone`: no other instance could take over."""
        if result is ProbeResult.OK:
            self._probe_failures = 0
            self._probe_successes += 1
            if self.state is Health.SUSPECT:
                return self._enter(table.ANSWERS, "probe answered")
            enough = self._probe_successes >= table.RISE_PROBES and (now >= self.ejected_until or alone)
            if self.state is Health.EJECTED and enough:
                return self._enter(table.RECOVERS, f"{self._probe_successes} probes answered")
            return False
        self._probe_successes = 0
        if result is ProbeResult.REFUSED:
            return self.on_absent(now, detail)
        if result is ProbeResult.LOADING:
            return self._absent(table.LOADS, detail or "loading", now)
        self.clean = False
        self._probe_failures += 1
        if self.state is Health.UP and self._probe_failures >= table.FALL_PROBES:
            reason = f"{self._probe_failures} probes failed in a row{detail and f': {detail}'}"
            if alone:
                return self._enter(table.PROBES_FAIL_ALONE, reason)
            return self._eject(table.PROBES_FAIL, reason, now)
        if self.state is Health.SUSPECT:
            self.reason = detail or "a probe failed"
        return False

    def on_absent(self, now: float, detail: str = "") -> bool:
        """Eject at a refused connection: no process listens. No back-off: it may return at once."""
        return self._absent(table.REFUSED, detail, now)

    def _absent(self, transition: Transition[Health], detail: str, now: float) -> bool:
        """Eject an instance that certainly serves nothing now. Return True if the state changed."""
        self._probe_successes = 0
        self.gone = self._been_up
        if self.state is Health.EJECTED:
            self.reason = detail or self.reason
            return False
        return self._eject(transition, detail or "connection refused", now)

    def on_answering(self, *, whole: bool = False) -> bool:
        """Note that an answer began, or is `whole` and well. Return True if the state changed."""
        if self.clean:
            return False
        self._probe_failures = 0
        if self.state is Health.SUSPECT:
            return self._enter(table.ANSWERS, "answered a request")
        self.clean = whole and self.state is Health.UP
        return False

    # --- states ---

    def _eject(self, transition: Transition[Health], reason: str, now: float) -> bool:
        ejections = self.ejections
        if ejections and now - ejections[-1] > table.FLAPPING_S:
            ejections.clear()
        ejections.append(now)
        doublings = len(ejections) - 1 - (transition is table.REFUSED or transition is table.LOADS)
        seconds = 0.0 if doublings < 0 else min(table.MOST_EJECTION_S, table.EJECTION_S * 2.0**doublings)
        self.ejected_until = now + seconds * (1.0 + EJECTION_JITTER_SHARE * (2.0 * self._rng.random() - 1.0))
        return self._enter(transition, reason)

    def _enter(self, transition: Transition[Health], reason: str) -> bool:
        assert self.state in transition.before, f"{self.state.value}: {transition.event}"
        self.state = state = transition.after
        self.reason = reason
        self.clean = False
        self._been_up = self._been_up or state is Health.UP
        if state is Health.EJECTED:
            self._probe_successes = 0
        self._probe_failures = 0
        return True

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
        if self.doubted and self._in_a_row >= self.forgiving:
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
        left = self._losses.pop((client, session), 0.0) - 1.0
        if left > 0.0:
            self._losses[client, session] = left

    def lost_as_elsewhere(self) -> bool:
        """Note that two instances lost a request. Return True after several of these without an answer."""
        self._lost_as_elsewhere += 1
        return self._lost_as_elsewhere >= table.MOST_LOST_AS_ELSEWHERE

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
        self.asked_until = max(self.asked_until, now + min(seconds, table.MOST_PAUSE_S))
        self.next_trial_at = max(self.next_trial_at, self.asked_until)

    def forget(self) -> None:
        """Forget the evidence: another process took the instance's place."""
        self.lost = self.excess = self.overdue_s = 0.0
        self._losses.clear()
        self.doubted = False
        self.stalled_since = self.silent_since = None
        self.asked_until = -math.inf
        self.trial = 0

    def judge(self, others: Iterable[Evidence], now: float) -> bool:
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
        if self.doubted:
            self.doubt = f"{self.lost:.0f} of its last {self.lost + self.well:.0f} answers failed"
        elif before[0]:
            self.trial, self._pause_s = 0, table.PAUSE_S
        return before != (self.doubted, self.excess > 0.0)

    def age(self, now: float) -> None:
        """Reduce the weight of old evidence."""
        since = now - self._aged_at
        if since > 0.0:
            keep = math.exp(-since / table.MEMORY_S)
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
        if silence_s <= table.STALL_FACTOR * need_s or self.stalled_since is not None:
            return False
        if silence_s > stands_s:
            self.silent_since = now - silence_s
        if silence_s <= least_s or (self.counts(now) and not self.still):
            return False  # it may have worked since its last token: the next scrape tells
        self.stalled_since = now
        self._pause_s = table.PAUSE_S
        self.next_trial_at = now + table.PAUSE_S
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
        self.trial, self._pause_s, self.next_trial_at = 0, table.PAUSE_S, now

    # --- trials meanwhile ---

    def standing(self, now: float) -> table.Restraint | None:
        """Return the restraint that allows trials alone, or nothing; None without one."""
        if self.stalled_since is not None:
            return table.STALLED
        if self.doubted:
            return table.DOUBTED
        return table.ASKED if now < self.asked_until else None

    def held(self, now: float) -> bool:
        """Return True if it gets no request now, not even a trial."""
        return self.standing(now) is not None and not self._may_try(now)

    def wary(self, now: float) -> bool:
        """Return True if it gets trials, as it is restrained or the score keeps requests away."""
        return self.excess > 0.0 or self.standing(now) is not None

    def due(self, now: float) -> bool:
        """Return True if the next request is to be its trial."""
        return self.wary(now) and self._may_try(now)

    def _may_try(self, now: float) -> bool:
        return not self.trial and now >= self.next_trial_at

    def dispatched(self, lease_id: int, now: float) -> bool:
        """Note a dispatch. Return True if it is a trial: with a restraint or an excess."""
        if not self.wary(now):
            return False
        self.trial = lease_id
        self.next_trial_at = now + self._pause_s
        self._pause_s = min(table.MOST_PAUSE_S, 2.0 * self._pause_s)
        return True

    def why(self, now: float) -> str:
        """Return the reason of the restraint, for people; "" without one."""
        standing = self.standing(now)
        if standing is table.STALLED:
            silent = now - (self.silent_since or self.stalled_since or now)
            return f"{table.STALLED.name}: no token for {silent:.3g} s"
        if standing is table.DOUBTED:
            return f"{table.DOUBTED.name}: {self.doubt}, more than elsewhere"
        return "" if standing is None else f"it asked to come again in {self.asked_until - now:.3g} s"

    def later_s(self, end_s: float) -> float:
        """Return the expected delay of a good answer beyond the forecast `end_s`, in seconds.

        A lost try costs its time and the next try; `excess / (1 - excess)` of them are expected. An overdue
        token is expected to take as long again.
        """
        tries = self.excess / (1.0 - self.excess)
        return self.overdue_s + tries * (self.lost_s + _NEXT_TRY_S + end_s)

    # --- its process is new, or it is full ---

    def begin_slow_start(self, seconds: float, now: float) -> None:
        """Let it run only a growing part of what it can for some seconds."""
        self.restarted = False
        self._ramp_since, self._ramp_s = (now, seconds) if seconds > 0.0 else (None, 0.0)

    def end_slow_start(self) -> bool:
        """End the slow start. True if there was one."""
        ended = self._ramp_since is not None
        self._ramp_since = None
        return ended

    def is_full(self, sequences: int, retry_after_s: float | None, now: float) -> None:
        """Learn that it takes no more than `sequences`, for the time that it asked for if it did."""
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

    def active(self, now: float) -> bool:
        """Return True if the instance may now not be treated like any other."""
        if self._ramp_since is not None and now - self._ramp_since >= self._ramp_s:
            self._ramp_since = None
        limited = now - self._limit_until < FORGOTTEN_S
        return self._ramp_since is not None or limited or self.wary(now)

    def less(self, max_num_seqs: int, now: float) -> str:
        """Return the reason for which it may not take all that it can now, "" without one; for people."""
        return self.why(now) or self.restraint(max_num_seqs - 1, max_num_seqs, now, doubt=False)

    def restraint(self, sequences: int, max_num_seqs: int, now: float, *, doubt: bool = True) -> str:
        """Return why it may take no more now, "" where it may; `doubt`: trials count, too."""
        if doubt and self.held(now):
            return self.why(now)
        wanted = sequences + 1
        if self._ramp_since is not None:
            slots = max_num_seqs * max(0.0, now - self._ramp_since) / self._ramp_s
            if wanted > max(1.0, slots):
                return f"{table.SLOW_START.name}: {max(1, int(slots))} of {max_num_seqs} slots"
        limit = self.limit(now)
        return f"full: it refused more than {limit:.0f} requests" if wanted > limit else ""


def lower_share(lost: float, count: float) -> float:
    """Return the lower end of Wilson's 90 % interval of a share; 0 of none."""
    if count <= 0.0:
        return 0.0
    share, square = lost / count, _LOWER_DEVIATIONS * _LOWER_DEVIATIONS
    middle = share + square / (2.0 * count)
    spread = _LOWER_DEVIATIONS * math.sqrt(share * (1.0 - share) / count + square / (4.0 * count * count))
    return max(0.0, (middle - spread) / (1.0 + square / count))
