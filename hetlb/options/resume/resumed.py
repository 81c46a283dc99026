"""The attempt of an answer that may go on at another instance, and the one that gives the rest of it.

Where an engine is lost in the middle of an answer, the request for the rest (`continuation.py`) waits for
another lease. One that breaks off, or says that it has failed, is asked whether it lives: the request itself
may be what kills engines (`deaths.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hetlb.balancer.clients.client_response import NOTHING, STARTED
from hetlb.balancer.config.fleet_tables import ProxyTable
from hetlb.balancer.core.types import Lease, Outcome
from hetlb.balancer.engines.engine_pools import EnginePool
from hetlb.balancer.engines.upstream import SideCall
from hetlb.balancer.exchange import ends
from hetlb.balancer.exchange.driver import Driver
from hetlb.balancer.exchange.ends import End
from hetlb.balancer.exchange.engine_answer import EngineAnswer
from hetlb.balancer.exchange.engine_request import EngineRequest
from hetlb.balancer.exchange.exchange import Exchange, Maker
from hetlb.balancer.exchange.exchange_states import RESUMED, Phase
from hetlb.balancer.exchange.plain_attempt import Plain
from hetlb.balancer.exchange.streamed_answer import StreamedAnswer
from hetlb.balancer.http import error_responses
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.http.http1 import ResponseHead
from hetlb.balancer.http.openai_body import MAX_INJECT_BYTES, Call
from hetlb.balancer.http.sse import TAIL_BYTES
from hetlb.balancer.telemetry.request_record import RequestRecord
from hetlb.options.resume.continuation import Continuation, Draft
from hetlb.options.resume.deaths import FATAL_DEATHS, Death, Deaths
from hetlb.options.resume.progress import Kept

#: Ends of a connection after which its engine may be dead.
_BY_CONNECTION: Final = (ends.BROKEN, ends.DROPPED)
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
        """`kept`: bytes that the streams of the process keep; `deaths`: the deaths that it saw."""
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

    def attempt(self, exchange: Exchange, lease: Lease, gives_ids: bool, max_model_len: int) -> Resumed:
        return Resumed(self, self._driver, exchange, lease, gives_ids, max_model_len)

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

    def stop_asking(self) -> None:
        """Ask no engine any more whether it lives."""
        checks, self.checks = self.checks, []
        for check in checks:
            check.abort()


class Resumed(Plain):
    """A request whose answer may go on elsewhere, or the request for the rest of one."""

    __slots__ = ("_gives_ids", "_longest", "_made", "_pending_since", "_rest")

    def __init__(
        self, made: Resumable, driver: Driver, exchange: Exchange, lease: Lease, gives_ids: bool, longest: int
    ) -> None:
        super().__init__(driver, exchange, lease)
        self._made = made
        self._rest = made.rest
        self._gives_ids = gives_ids
        self._longest = longest
        #: Time since which the answer is on its way to another lease, None while it is not.
        self._pending_since: float | None = None

    # --- the request, and its answer ---

    def begin(self) -> None:
        if self._rest.dispatched(self._gives_ids, self._longest):
            super().begin()
        else:
            answer, text = error_responses.BAD_UPSTREAM, "no other instance can go on with it"
            self.exchange.refuse(answer, text, end=ends.OTHERWISE)

    def expect(self) -> None:
        if not self.exchange.record.resumed:  # else the first one's time stays
            super().expect()

    def head_lines(self, pool: EnginePool) -> bytes:
        return self._rest.head_lines(super().head_lines(pool), self.exchange.record.path)

    def body(self) -> bytes:
        body = self._rest.body
        return super().body() if body is None else body

    def engine_head(self, head: ResponseHead, length: int | None) -> None:
        """Keep a whole answer back until its end, so that until then another instance may give it."""
        super().engine_head(head, length)
        answer = self.answer
        if answer is None or answer.stream is not None or head.status >= 400 or length is None:
            return
        answer.whole_only = self._rest.second is None and length <= TAIL_BYTES

    def stream(self, silent: bool) -> StreamedAnswer:
        return self._rest.stream(silent)

    def first_bytes(self, answer: EngineAnswer, payload: bytes, now: float, *, whole: bool) -> bytes | None:
        second = self._rest.second is not None and self.response.state is STARTED
        if second and answer.stream is None:
            self.exchange.break_off(_not_the_rest(answer), "another instance would not go on with it")
            return None
        return super().first_bytes(answer, payload, now, whole=whole)

    # --- the engine is lost ---

    def engine_failed(self, end: End, detail: str) -> None:
        if self.exchange.phase is not _STREAMING and (end is ends.HEAD_CUT or end is ends.BROKEN):
            end = ends.DROPPED  # a head is no answer where the request may be run again
        super().engine_failed(end, detail)

    def try_again(self, end: End) -> None:
        """Wait for as long as nothing accepts it once an engine may have done a part of it."""
        exchange = self.exchange
        if end.outcome is Outcome.NO_RESPONSE and not exchange.dropped:
            exchange.record.resumed += 1
        super().try_again(end)

    def go_on(self, end: End, otherwise: Callable[[], None]) -> None:
        """Go on at another instance: now, or once it shows that it can. Answers are read in turns."""
        exchange, unsent = self.exchange, self.response.state is NOTHING
        waits = self._pending_since is not None
        if waits or self.is_done or not self._rest.may_go_on(self.answer, unsent):
            super().go_on(end, otherwise)
            return
        exchange.since = self._pending_since = now = exchange.now()
        made = self._made
        made.losses.append(made.all_deaths.lost(self.lease, self.tokens_so_far, now))
        _later(self.driver, exchange, lambda: self._go(end, otherwise))

    def _go(self, end: End, otherwise: Callable[[], None]) -> None:
        """End the answer where nothing of it is missing; else see whether it may go on."""
        exchange, answer, rest = self.exchange, self.answer, self._rest
        if self._pending_since is None:
            return
        if rest.progress is not None:
            rest.progress.read()
        if (last := rest.last_events(answer)) is not None:
            self.response.write(self.response.last(last))
            if answer is not None:
                self.take_usage(answer)
            exchange.finish(ends.LAST_MISSING)
            return
        draft = rest.draft()
        generated = 0 if draft is None else draft.generated
        # Run twice, and not a token: the request itself may be what kills engines.
        if exchange.dropped and not generated:
            rest.why = rest.why or "lost twice without a token"
        if (draft is None and rest.progress is not None) or (exchange.dropped and not generated):
            self._stay(otherwise)
        elif end in _BY_CONNECTION or (end is ends.ERROR_EVENT and not self._gave_up):
            made = self._made

            def go_on() -> None:
                deaths = made.deaths
                if made.all_deaths.suspect(exchange.record.request.id, deaths, exchange.now()):
                    rest.why = f"{len(deaths)} engines died in it"
                    self._stay(otherwise)
                else:
                    self._give_back(end, draft)

            waits = len(made.deaths) + len(made.checks) + 1 >= FATAL_DEATHS
            made.waiting = go_on if waits else None
            self._ask_whether_it_lives()
            if not waits:
                go_on()
        else:
            self._give_back(end, draft)

    @property
    def _gave_up(self) -> bool:
        """True if the engine ended what it ran and said no error: it was stopped."""
        stream = None if self.answer is None else self.answer.stream
        return stream is not None and not stream.failed

    def _stay(self, otherwise: Callable[[], None]) -> None:
        self._pending_since = None
        otherwise()

    def _ask_whether_it_lives(self) -> None:
        """Ask the engine of a lost lease for its health."""
        made, lease, exchange = self._made, self.lease, self.exchange
        loss = made.losses[-1]
        pool = self.driver.pools.find(lease)

        def told(dead: bool) -> None:
            if check in made.checks:
                made.checks.remove(check)
            loss.dead = loss.dead or dead
            made.go_on()

        def done(head: ResponseHead, body: bytes) -> None:
            told(head.status >= 500)  # vLLM answers so while its process outlives its engine

        def failed(end: End, detail: str) -> None:
            told(end is not ends.LOCAL)

        if pool is None:
            made.go_on()
            return
        check = SideCall(pool, pool.head(b"GET /health"), b"", done, failed, on_fault=exchange.fault)
        made.checks.append(check)
        pool.send(check, fresh=True)

    def sweep(self, now: float, table: ProxyTable) -> None:
        """Wait no longer for an engine to say that it lives: it hangs, and is no death."""
        pending_since, made = self._pending_since, self._made
        if pending_since is None:
            super().sweep(now, table)
        elif made.waiting is not None and now - pending_since > table.connect_timeout_s:
            made.stop_asking()
            made.go_on()

    @property
    def most_hung_s(self) -> float:
        return 0.0

    def _give_back(self, end: End, draft: Draft | None) -> None:
        """Give the lease back and wait for another one."""
        exchange, response = self.exchange, self.response
        self._wait_for_rest(draft)
        exchange.dropped = not self._rest.generated and end is not ends.NOTICE
        self.driver.try_again(exchange.record, self.lease, ends.HELD_UP if response.held_up else end)

    def _wait_for_rest(self, draft: Draft | None) -> None:
        exchange, rest = self.exchange, self._rest
        record = exchange.record
        rest.take(draft)
        record.resumed += 1
        exchange.wait_again(RESUMED)
        record.resumed_tokens = rest.generated
        record.request = record.request.goes_on(rest.generated)

    def leave(self) -> None:
        self._pending_since = self._made.waiting = None
        super().leave()

    # --- its instance is about to leave ---

    def move(self) -> bool:
        if self.exchange.phase is not _STREAMING:
            return super().move()
        if not self._may_move():
            return False
        _later(self.driver, self.exchange, self._move)
        return True

    def _may_move(self) -> bool:
        """Return True if an answer can go on elsewhere while its engine lives: then there is a draft."""
        answer, rest = self.answer, self._rest
        stream = None if answer is None else answer.stream
        if self._pending_since is not None or rest.progress is None or (stream is not None and stream.done):
            return False
        return rest.may_go_on(answer, False) and rest.draft() is not None

    def _move(self) -> None:
        """Ask for a place for the rest of a running answer, in a turn of its own."""
        exchange = self.exchange
        if exchange.attempt is not self or exchange.phase is not _STREAMING:
            return
        self.release()
        if self._may_move() and (draft := self._rest.draft()) is not None:
            self.driver.scheduling.move(self.lease, draft.generated, exchange.now())

    def takes(self, lease: Lease) -> bool:
        """Leave the live engine for the rest's place, unless the answer cannot go on after all."""
        draft = self._rest.draft() if self.exchange.phase is _STREAMING else None
        if draft is None:
            return super().takes(lease)
        self.count_moved()
        self._wait_for_rest(draft)
        return False


def _not_the_rest(answer: EngineAnswer) -> End:
    """Return the end of a second lease whose engine did not answer with a stream."""
    if answer.head.status >= 500:
        return ends.ERROR_EVENT
    return ends.REFUSED_IN_STREAM if answer.head.status >= 400 else ends.OTHERWISE


def _later(driver: Driver, exchange: Exchange, step: Callable[[], None]) -> None:
    """Do a step of an exchange in a turn of its own, unless it has ended by then."""

    def take_turn() -> None:
        if exchange.phase is not Phase.DONE:
            try:
                step()
            except Exception as error:
                driver.guard.ended(exchange, error)

    driver.turns.later(take_turn)


def resumption(driver: Driver) -> Callable[[Kind, Call, EngineRequest], Resumable]:
    """Return what makes the maker of one request's attempts."""
    kept, deaths = Kept(), Deaths()
    return lambda kind, call, outgoing: Resumable(driver, kept, deaths, kind, call, outgoing)
