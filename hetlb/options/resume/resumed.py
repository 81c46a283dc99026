"""Attempts of an answer that may be resumed at another instance, and of its rest.

If an engine is lost in the middle of an answer, the request for the rest (`continuation.py`) waits for
another lease. An engine that breaks off, or reports a failure, is asked for a sign of life: the request
itself may be what kills engines (`Deaths`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from hetlb.balancer.clients.client_response import NOTHING, STARTED
from hetlb.balancer.config.fleet_tables import ProxyTable
from hetlb.balancer.core.rejections import DROPPED
from hetlb.balancer.core.types import Lease, Outcome, RequestId
from hetlb.balancer.engines.upstream import EngineConnection, SideCall
from hetlb.balancer.exchange import ends
from hetlb.balancer.exchange.attempt import Attempt
from hetlb.balancer.exchange.driver import Driver
from hetlb.balancer.exchange.ends import End
from hetlb.balancer.exchange.engine_answer import EngineAnswer
from hetlb.balancer.exchange.exchange import EngineRequest, Exchange, Maker
from hetlb.balancer.exchange.exchange_states import RESUMED, Phase
from hetlb.balancer.exchange.plain_attempt import Handling, Plain
from hetlb.balancer.http import error_responses
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.http.http1 import ResponseHead
from hetlb.balancer.http.openai_body import MAX_INJECT_BYTES, Call
from hetlb.balancer.http.sse import TAIL_BYTES
from hetlb.balancer.telemetry.request_record import RequestRecord
from hetlb.options.resume.continuation import Continuation, Draft
from hetlb.options.resume.progress import Kept

#: Ends of a connection after which its engine may be dead.
_BY_CONNECTION: Final = (ends.BROKEN, ends.DROPPED)
#: Ends of a lease without output, after which an answer begun earlier is resumed.
_BEFORE_THE_REST: Final = (ends.DROPPED, ends.STALLED)
_CHAT: Final = Kind.CHAT
_STREAMING: Final = Phase.STREAMING


class Resumable(Maker):
    """Maker of the attempts of one request, and their common state.

    `losses` are its lost leases, each with the answers that were lost together with it; `checks` ask whether
    engines live. `waiting` is called once they have answered, None if nothing waits for the answers.
    """

    __slots__ = ("_driver", "all_deaths", "checks", "losses", "rest", "waiting")

    def __init__(
        self, driver: Driver, kept: Kept, deaths: Deaths, kind: Kind, call: Call, outgoing: EngineRequest
    ) -> None:
        """`kept`: bytes kept by the streams of the process; `deaths`: the deaths it saw."""
        self._driver = driver
        self.all_deaths = deaths
        self.rest = Continuation(
            kind,
            outgoing,
            kept,
            streamed=call.stream,
            asks_ids=len(outgoing.body) <= MAX_INJECT_BYTES,
            hides_usage=call.hold_usage,
        )
        self.losses: list[Death] = []
        self.checks: list[SideCall] = []
        self.waiting: Callable[[], None] | None = None

    def attempt(self, exchange: Exchange, lease: Lease, gives_ids: bool, max_model_len: int) -> Attempt:
        if not self.rest.dispatched(gives_ids, max_model_len):
            return Unable(exchange)
        return Plain(self._driver, exchange, lease, Resumed(self))

    def close(self, record: RequestRecord) -> None:
        self.stop_asking()
        self.rest.close()
        if record.outcome is Outcome.OK:
            for death in self.losses:
                death.well += 1
        else:
            record.not_resumed = self.rest.why

    @property
    def deaths(self) -> list[Death]:
        """Engines that died in its answer, as far as is known."""
        return [each for each in self.losses if each.dead]

    def go_on(self) -> None:
        """Call `waiting`, once all engines that were asked have answered."""
        waiting = self.waiting
        if waiting is not None and not self.checks:
            self.waiting = None
            waiting()

    def ask_whether_it_lives(self, lease: Lease, exchange: Exchange) -> None:
        """Ask the engine of a lost lease for its health."""
        pool, loss = self._driver.pools.find(lease), self.losses[-1]

        def told(dead: bool) -> None:
            if check in self.checks:
                self.checks.remove(check)
            loss.dead = loss.dead or dead
            self.go_on()

        def done(head: ResponseHead, body: bytes) -> None:
            told(head.status >= 500)  # vLLM answers so while its process outlives its engine

        def failed(end: End, detail: str) -> None:
            told(end is not ends.LOCAL)

        if pool is None:
            self.go_on()
            return
        check = SideCall(pool, pool.head(b"GET /health"), b"", done, failed, on_fault=exchange.fault)
        self.checks.append(check)
        pool.send(check, fresh=True)

    def stop_asking(self) -> None:
        """Ask no engine any more whether it lives."""
        checks, self.checks = self.checks, []
        for check in checks:
            check.abort()


class Unable(Attempt):
    """Attempt of a rest at an instance unable to continue it: the answer ends."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange.record.method)
        self._exchange = exchange

    def begin(self) -> None:
        answer, text = error_responses.BAD_UPSTREAM, "no other instance can go on with it"
        self._exchange.refuse(answer, text, end=ends.OTHERWISE)


class Resumed(Handling):
    """Handling of a request with a resumable answer, or of the request for the rest of one."""

    __slots__ = ("_made", "_pending_since", "_rest")

    def __init__(self, made: Resumable) -> None:
        super().__init__(0.0, reruns=True)
        self._made = made
        self._rest = made.rest
        #: Time since which the answer is on its way to another lease, None while it is not.
        self._pending_since: float | None = None

    # --- the request, and its answer ---

    def request(self, attempt: Plain, connection: EngineConnection) -> tuple[bytes, bytes]:
        lines, body = super().request(attempt, connection)
        lines = self._rest.head_lines(lines, attempt.exchange.record.path)
        own = self._rest.body
        return lines, body if own is None else own

    def head(self, attempt: Plain, answer: EngineAnswer) -> None:
        """Keep a whole answer back until its end, so that until then another instance may give it."""
        if answer.is_stream:
            answer.read_as(self._rest.stream(attempt.exchange.record.kind is _CHAT))
        elif answer.head.status < 400 and answer.length is not None:
            answer.whole_only = self._rest.second is None and answer.length <= TAIL_BYTES

    def begins(self, attempt: Plain, answer: EngineAnswer, payload: bytes, whole: bool) -> bytes | None:
        second = self._rest.second is not None and attempt.response.state is STARTED
        if second and answer.stream is None:
            attempt.exchange.break_off(_not_the_rest(answer), "another instance would not go on with it")
            return None
        return payload

    # --- the engine is lost ---

    def lost(self, attempt: Plain, end: End, otherwise: Callable[[], None]) -> None:
        """Resume the answer at another instance, in a later turn of the event loop; or call `otherwise`."""
        exchange, made, response = attempt.exchange, self._made, attempt.response
        begun = exchange.phase is _STREAMING or (response.state is STARTED and end in _BEFORE_THE_REST)
        unsent = response.state is NOTHING
        if not begun or self._pending_since is not None or not self._rest.may_go_on(attempt.answer, unsent):
            otherwise()
            return
        exchange.since = self._pending_since = now = exchange.now()
        made.losses.append(made.all_deaths.lost(attempt.lease, attempt.tokens_so_far, now))
        _later(attempt, lambda: self._go(attempt, end, otherwise))

    def _go(self, attempt: Plain, end: End, otherwise: Callable[[], None]) -> None:
        """End the answer if nothing of it is missing; else resume it if that may be done."""
        exchange, answer, rest = attempt.exchange, attempt.answer, self._rest
        if self._pending_since is None:
            return
        if rest.progress is not None:
            rest.progress.read()
        if (last := rest.last_events(answer)) is not None:
            attempt.response.write(attempt.response.last(last))
            if answer is not None:
                attempt.exchange.take_usage(answer)
            exchange.finish(ends.LAST_MISSING)
            return
        draft = rest.draft()
        generated = 0 if draft is None else draft.generated
        # Run twice, and not a token: the request itself may be what kills engines.
        if exchange.dropped and not generated:
            rest.why = rest.why or "lost twice without a token"
        if (draft is None and rest.progress is not None) or (exchange.dropped and not generated):
            self._stay(otherwise)
        elif end in _BY_CONNECTION or (end is ends.ERROR_EVENT and not _gave_up(answer)):
            made = self._made

            def go_on() -> None:
                deaths = made.deaths
                if made.all_deaths.suspect(exchange.record.request.id, deaths, exchange.now()):
                    rest.why = f"{len(deaths)} engines died in it"
                    self._stay(otherwise)
                else:
                    self._give_back(attempt, end, draft)

            waits = len(made.deaths) + len(made.checks) + 1 >= FATAL_DEATHS
            made.waiting = go_on if waits else None
            made.ask_whether_it_lives(attempt.lease, exchange)
            if not waits:
                go_on()
        else:
            self._give_back(attempt, end, draft)

    def _stay(self, otherwise: Callable[[], None]) -> None:
        self._pending_since = None
        otherwise()

    def sweep(self, attempt: Plain, now: float, table: ProxyTable) -> bool:
        """Stop waiting for a sign of life of an engine that hangs. It does not count as dead.

        Return True while the answer is on its way to another lease.
        """
        pending_since, made = self._pending_since, self._made
        if pending_since is None:
            return False
        if made.waiting is not None and now - pending_since > table.connect_timeout_s:
            made.stop_asking()
            made.go_on()
        return True

    def _give_back(self, attempt: Plain, end: End, draft: Draft | None) -> None:
        """Give the lease back and wait for another one."""
        exchange = attempt.exchange
        self._wait_for_rest(attempt, draft)
        exchange.dropped = "" if self._rest.generated else DROPPED
        end = ends.HELD_UP if attempt.response.held_up else end
        attempt.driver.try_again(exchange.record, attempt.lease, end)

    def _wait_for_rest(self, attempt: Plain, draft: Draft | None) -> None:
        exchange, rest = attempt.exchange, self._rest
        record = exchange.record
        rest.take(draft)
        record.resumed += 1
        exchange.queue_again(RESUMED)
        record.resumed_tokens = rest.generated
        record.request = record.request.goes_on(rest.generated)

    def leave(self) -> None:
        self._pending_since = self._made.waiting = None

    # --- its instance is about to leave ---

    def moves(self, attempt: Plain) -> bool:
        if not self._may_move(attempt):
            return False
        _later(attempt, lambda: self._move(attempt))
        return True

    def _may_move(self, attempt: Plain) -> bool:
        """Return True if an answer can continue elsewhere while its engine lives (`_rest.draft()` is set)."""
        answer, rest = attempt.answer, self._rest
        stream = None if answer is None else answer.stream
        if self._pending_since is not None or rest.progress is None or (stream is not None and stream.done):
            return False
        return rest.may_go_on(answer, False) and rest.draft() is not None

    def _move(self, attempt: Plain) -> None:
        """Ask for a place for the rest of a running answer, in a turn of its own."""
        exchange = attempt.exchange
        if exchange.attempt is not attempt or exchange.phase is not _STREAMING:
            return
        attempt.release()
        if self._may_move(attempt) and (draft := self._rest.draft()) is not None:
            attempt.driver.scheduling.move(attempt.lease, draft.generated, exchange.now())

    def moved(self, attempt: Plain) -> bool:
        """Return True if the answer waits for the rest's place; False if it cannot go on after all."""
        draft = self._rest.draft()
        if draft is None:
            return False
        self._wait_for_rest(attempt, draft)
        return True


def _gave_up(answer: EngineAnswer | None) -> bool:
    """Return True if the engine ended its answers without an error: it was stopped."""
    stream = None if answer is None else answer.stream
    return stream is not None and not stream.failed


def _not_the_rest(answer: EngineAnswer) -> End:
    """Return the end of a second lease if its engine did not answer with a stream."""
    if answer.head.status >= 500:
        return ends.ERROR_EVENT
    return ends.REFUSED_IN_STREAM if answer.head.status >= 400 else ends.OTHERWISE


def _later(attempt: Plain, step: Callable[[], None]) -> None:
    """Do a step of an attempt in a turn of its own, unless its exchange has ended by then."""
    driver, exchange = attempt.driver, attempt.exchange

    def take_turn() -> None:
        if exchange.phase is not Phase.DONE:
            try:
                step()
            except Exception as error:
                driver.guard.ended(exchange, error)

    driver.turns.later(take_turn)


def resumption(driver: Driver) -> Callable[[Kind, Call, EngineRequest], Resumable]:
    """Return what makes, for one request, the `Resumable` that continues its answer at another engine.

    All of them share what is kept, and which engines died.
    """
    kept, deaths = Kept(), Deaths()
    return lambda kind, call, outgoing: Resumable(driver, kept, deaths, kind, call, outgoing)


# --- deaths of engines in the middle of answers, and the answers that may be the cause ---
#
# A request can kill each engine that runs it; most engines die for other reasons. Three facts separate the
# two:
#
# - An answer that shares all its deaths with many others is hardly the cause: one of them is, or none.
# - A cause kills soon: a death after many tokens of a lease, beside other answers, counts half.
# - As many other recent deaths with mostly well-ended answers clear an answer: engines die.

#: Deaths of an answer after which it is not resumed again. One more is needed each time that `_SHARED_BY`
#: times more answers were in all of these deaths.
FATAL_DEATHS: Final = 2
_SHARED_BY: Final = 8.0
#: Most tokens of a lease for a death to count as soon after its begin.
_SOON_TOKENS: Final = 64
#: Seconds until a death is forgotten.
_RECENT_S: Final = 60.0
#: Least share of a death's answers that ended well later, for the death to speak for an answer that was in
#: others.
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
        """Note that an answer was lost after `tokens` tokens. Return the death that it belongs to.

        It belongs to the last death of its engine if its lease began before that; else to a new one.
        """
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
        """Return True if an answer may have caused its `own` deaths. No further engine gets it then."""
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
