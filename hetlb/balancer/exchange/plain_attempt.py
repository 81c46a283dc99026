"""The plain attempt: it owns the connection to one engine, sends the request there and passes the answer on.

What a kind of request does otherwise is in its `Handling`, an object of eight verbs that the attempt asks:
what is sent, what becomes of a head, of the first read, and of an end. The base class is the plain kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hetlb.balancer.clients.client_response import HEARTBEATS, NOTHING, STARTED
from hetlb.balancer.config.fleet_tables import ProxyTable
from hetlb.balancer.core.evidence.table import LEAST_SILENCE_S
from hetlb.balancer.core.rejections import DROPPED
from hetlb.balancer.core.state_transition import Transition
from hetlb.balancer.core.types import Lease, Outcome, RejectReason
from hetlb.balancer.engines.engine_pools import EnginePool
from hetlb.balancer.engines.upstream import EngineConnection
from hetlb.balancer.exchange import ends
from hetlb.balancer.exchange import exchange_states as states
from hetlb.balancer.exchange.attempt import ANSWER, REPLY, TOKENS, Attempt, Owed
from hetlb.balancer.exchange.driver import Driver
from hetlb.balancer.exchange.ends import End
from hetlb.balancer.exchange.engine_answer import LOOP_STATUS, EngineAnswer
from hetlb.balancer.exchange.exchange import SSE_KINDS, Exchange, Maker
from hetlb.balancer.exchange.exchange_states import Phase
from hetlb.balancer.exchange.streamed_answer import LAST_EVENT, StreamedAnswer
from hetlb.balancer.http import error_responses
from hetlb.balancer.http.answer_form import ODD, PATHS, WRONG
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.http.http1 import ResponseHead
from hetlb.balancer.http.sse import SseWatcher, is_answer, is_comment

#: Seconds for which an engine is known to stand still, after which its stream ends.
_HUNG_S: Final = 20.0
#: Kinds with streams that end with `[DONE]`.
_WITH_END: Final = (Kind.CHAT, Kind.COMPLETION)
_CHAT: Final = Kind.CHAT
#: Events of a trial's stream that are kept until all of them are there, and most kept bytes of a trial.
_TRIAL_EVENTS: Final = 8
_TRIAL_BYTES: Final = 16 << 10
#: Paths of which vLLM reads the engine that is chosen, from this version on (`engines/scrape.py`).
_WITH_RANK: Final = ("/v1/chat/completions", "/v1/completions")
_RANK: Final = b"x-data-parallel-rank"
#: Status of an answer in another protocol.
SWITCHED: Final = 101
_PREFILLING: Final = Phase.PREFILLING
_SENT: Final = Phase.SENT
_STREAMING: Final = Phase.STREAMING


class Handling:
    """Steps of an attempt that differ by kind of request; the base class has a plain request's steps.

    `reruns`: the request is run again until the first byte of an answer's body comes. `upgrades`: it asks for
    another protocol. `keeps`: its answer is held back for now, and decides nothing. `hung_s`: seconds for
    which a stream waits for an engine that stands still.
    """

    __slots__ = ("hung_s", "keeps", "reruns", "upgrades")

    def __init__(
        self, hung_s: float = _HUNG_S, *, keeps: bool = False, reruns: bool = False, upgrades: bool = False
    ) -> None:
        self.hung_s = hung_s
        self.keeps = keeps
        self.reruns = reruns
        self.upgrades = upgrades

    def request(self, attempt: Plain, connection: EngineConnection) -> tuple[bytes, bytes]:
        """Return header lines and body for the engine: the client's as they came."""
        return attempt.head_lines(connection.pool), attempt.exchange.outgoing.body

    def head(self, attempt: Plain, answer: EngineAnswer) -> None:
        """Take in the head of an answer that is no refusal."""
        if answer.is_stream:
            # The first event of a chat only says who speaks: it is no text.
            silent = attempt.exchange.record.kind is _CHAT
            answer.read_as(StreamedAnswer(attempt.exchange.call.hold_usage, silent))

    def begins(self, attempt: Plain, answer: EngineAnswer, payload: bytes, whole: bool) -> bytes | None:
        """Return the bytes of the first reads of a body to pass on, None to wait for more."""
        return payload

    def lost(self, attempt: Plain, end: End, otherwise: Callable[[], None]) -> None:
        """Handle the loss of the engine: continue the answer elsewhere, or call `otherwise`, which ends it.

        A plain request calls `otherwise`.
        """
        otherwise()

    def sweep(self, attempt: Plain, now: float, table: ProxyTable) -> bool:
        """Do what is due for the attempt. Return True if no time limit holds for it now."""
        return False

    def moves(self, attempt: Plain) -> bool:
        """Ask for another place for the rest of an answer that has begun. Return False if it cannot move."""
        return False

    def moved(self, attempt: Plain) -> bool:
        """Return True if an answer that has begun goes on with a new lease."""
        return False

    def leave(self) -> None:
        """Do nothing more for the request."""


PLAIN: Final = Handling()


class Plain(Attempt):
    """A request at one instance."""

    __slots__ = (
        "answer", "connecting", "driver", "engine", "exchange", "handling", "lease", "response", "sent",
    )  # fmt: skip

    def __init__(self, driver: Driver, exchange: Exchange, lease: Lease, handling: Handling = PLAIN) -> None:
        super().__init__(exchange.record.method)
        self.driver = driver
        self.exchange = exchange
        self.response = exchange.response
        self.lease = lease
        self.handling = handling
        #: Lease of the engine that the request goes to, the connection to it, and whether it is being made.
        self.sent = lease
        self.engine: EngineConnection | None = None
        self.connecting = False
        #: None before its head.
        self.answer: EngineAnswer | None = None

    # --- to the engine ---

    def begin(self) -> None:
        record, dispatched_at = self.exchange.record, self.lease.dispatched_at
        if not record.resumed:  # else the first one's time stays
            record.dispatched_at = dispatched_at
        self.exchange.enter(states.DISPATCHED, dispatched_at)
        # After a drop it is sent once, on a new connection: a reused one may be closed and cost a send.
        self.send(fresh=self.exchange.dropped != "")

    def send(self, *, fresh: bool = False) -> None:
        self.connecting = True
        self.driver.pool(self.sent).send(self, fresh=fresh)

    def head_lines(self, pool: EnginePool) -> bytes:
        """Return the head for the engine of a pool, but for `x-request-id`: without hop-by-hop headers."""
        exchange = self.exchange
        trace = exchange.record.trace
        lines = self.driver.forward_rules.request_lines(exchange.outgoing.head, passthrough=pool.passthrough)
        if trace is not None:
            lines = trace.onto(lines)
        rank = self.sent.rank
        if rank >= 0 and exchange.record.path in _WITH_RANK and lines.find(_RANK) < 0:
            lines += b"%b: %d\r\n" % (_RANK, rank)
        return lines + pool.own_headers

    def engine_connected(self, connection: EngineConnection) -> None:
        exchange = self.exchange
        self.engine, self.connecting = connection, False
        _enter(exchange, states.WRITTEN, exchange.now())
        if self.response.paused_since is not None:
            connection.pause()
        lines, body = self.handling.request(self, connection)
        exchange.outgoing.send(connection, lines, body)

    def still_served(self) -> bool:
        return self.driver.scheduling.fleet.serves(self.sent)

    def engine_lost_idle(self) -> None:
        """Send it once more on a fresh connection. The engine may have run the request."""
        exchange = self.exchange
        if exchange.reconnected:
            self.engine_failed(ends.DROPPED, "the engine closed the connection")
            return
        exchange.reconnected = True
        self.engine = None
        _enter(exchange, states.RECONNECTING, exchange.now())
        self.send(fresh=True)

    def pause(self, paused: bool) -> None:
        engine = self.engine
        if engine is not None and paused:
            engine.pause()
        elif engine is not None:
            engine.resume()

    # --- the answer ---

    def engine_head(self, head: ResponseHead, length: int | None) -> None:
        """Take in the head of the answer; it is kept until the body begins."""
        exchange, driver, status = self.exchange, self.driver, head.status
        if not 200 <= status < 300 and not (status == SWITCHED and self.handling.upgrades):
            if status < 400:
                # An engine has no business sending clients elsewhere.
                self.stop()
                self.engine_failed(ends.JUNK, "the engine redirected, or switched protocols")
                return
            if status == LOOP_STATUS and driver.forward_rules.came_back(head.headers):
                driver.scheduling.came_back(self.lease.instance)
                self.try_again(ends.LOOP)
                return
        answer = self.answer = EngineAnswer(head, length)
        exchange.record.status = status
        if not answer.refuses:
            if length == 0 and self.lease.request.path in PATHS and not self.handling.keeps:
                _turned_away(self, 500, None)  # a chat without a body is no answer
                if exchange.attempt is not self:
                    return
            self.handling.head(self, answer)
            self.plain = answer.stream is None
        elif not self.handling.keeps or (
            exchange.phase is not _PREFILLING and (status < 500 or status == 503)
        ):
            # A decode leg waits for the answer to the prefill leg, and its failure ends the split.
            _turned_away(self, status, answer.busy_s)

    def engine_events(self, chunks: bytes) -> bool:
        """Pass on a read of a stream if it is whole events of text; False, and nothing is done, if not."""
        answer = self.answer
        stream = None if answer is None else answer.stream
        if stream is None or not (passed := stream.pass_text(chunks)):
            return False
        exchange = self.exchange
        self.response.write(passed)
        exchange.since = now = exchange.now()
        stream.text_came(now)
        return True

    def _first_bytes(self, answer: EngineAnswer, payload: bytes, now: float, *, whole: bool) -> bytes | None:
        """Look at the first bytes of a body; return the bytes to pass on, None to wait for more."""
        kept = self.handling.begins(self, answer, payload, whole)
        if kept is None:
            return None
        payload, record, stream = kept, self.exchange.record, answer.stream
        if whole and not payload:
            return payload
        if stream is not None and self.response.may_beat and is_comment(payload):
            self.response.beat(now, payload)  # it proves nothing: until there is an event, another may answer
            return b"" if whole else None
        if record.first_byte_at is None:
            record.first_byte_at = now
        if record.status < 400:
            self.driver.scheduling.first_token(self.lease, now)
        if stream is not None:
            record.streamed = True
            self.response.stream_follows()
            if record.request.sequences == 1:
                stream.count_gaps(self.driver.counted.model(record.request.model).gaps)
        _enter(self.exchange, states.FIRST_BYTE, now)
        return payload

    def engine_body(self, payload: bytes) -> None:
        """Pass more of the answer's body on, in the same turn."""
        exchange, answer = self.exchange, self.answer
        assert answer is not None, "expected a head before a body"
        now = exchange.now()
        if exchange.phase is not _STREAMING:
            payload = answer.kept + payload
            if _failed_at_once(self, answer, payload):
                return
            if self.lease.trial and _too_few(self, answer, payload):
                answer.kept, exchange.since = payload, now
                return
            answer.kept = b""
            first = self._first_bytes(answer, payload, now, whole=False)
            if first is None:
                return
            payload = first
        exchange.since = now
        payload = answer.read(payload, now)
        if answer.lost is not None:
            self.lost(answer.lost_by, "", payload, answer.lost)
        elif payload:
            self.pass_on(answer, payload)

    def pass_on(self, answer: EngineAnswer, payload: bytes) -> None:
        """Write a part of the body to the client."""
        response = self.response
        passed = answer.emptied(payload)
        if response.state is NOTHING:
            response.write(self.head() + response.frame(passed))
        elif passed and response.state is STARTED:  # behind heartbeats a whole answer becomes one event
            response.write(response.frame(passed))
        if answer.stream is not None and response.chunked:
            answer.stream.learn_shape()

    def head(self) -> bytes:
        answer, record = self.answer, self.exchange.record
        assert answer is not None, "expected a head before a body"
        return self.response.head(answer.head, answer.length, record.own_lines(self.exchange.now()))

    def release(self) -> None:
        """Pass on the event of a stream that waits for the next one."""
        answer = self.answer
        stream = None if answer is None else answer.stream
        if answer is not None and stream is not None and (kept := stream.release()):
            self.pass_on(answer, kept)

    def cut(self) -> bytes:
        return b"" if self.answer is None or self.answer.stream is None else self.answer.stream.cut()

    def engine_end(self, payload: bytes) -> None:
        """Take in the clean end of the answer; `payload` is its last part."""
        self.engine = None
        exchange, answer, response = self.exchange, self.answer, self.response
        assert answer is not None, "expected a head before the end"
        now = exchange.now()  # a whole answer begins and ends in the same read
        if exchange.phase is not _STREAMING:
            payload = answer.kept + payload
            if _failed_at_once(self, answer, payload, ended=True) or _is_none(self, answer, payload):
                return
            first = self._first_bytes(answer, payload, now, whole=True)
            if first is None:
                return
            payload = first
        payload = answer.read_last(payload)
        stream, record = answer.stream, exchange.record
        if answer.lost is not None:
            self.lost(answer.lost_by, "", payload, answer.lost)
            return
        if stream is not None:
            payload += stream.release()
            unfinished = stream.flush()
            if not stream.whole and record.kind in _WITH_END:
                self.lost(ends.BROKEN, "the stream ended without [DONE]", payload)
                return
            payload += unfinished
        if response.state is HEARTBEATS:
            event, end = answer.as_event(record.path)
            response.write(response.frame(event))
            exchange.finish(end, broken=True)
            return
        payload = answer.last_emptied(payload)
        out = self.head() if response.state is NOTHING else b""
        out += response.last(payload)
        if out:
            response.write(out)
        exchange.take_usage(answer)
        end = answer.end(record.kind in SSE_KINDS)
        if end is ends.ANSWERED and record.path in PATHS and not record.resumed_tokens:
            end = ends.ANSWERED if answer.is_usual(record.request) else _judged(self, answer)
        exchange.finish(end, now=now)

    def token_at(self, heard_at: float) -> float:
        return heard_at if self.answer is None or self.answer.stream is None else self.answer.stream.text_at

    @property
    def tokens_so_far(self) -> int:
        return 0 if self.answer is None or self.answer.stream is None else self.answer.stream.events

    # --- the engine fails ---

    def engine_failed(self, end: End, detail: str) -> None:
        self.engine, self.connecting = None, False
        begun = self.exchange.phase is _STREAMING
        if self.handling.reruns and not begun and (end is ends.HEAD_CUT or end is ends.BROKEN):
            end = ends.DROPPED  # a head is no answer
        self.release()
        answer = self.answer
        if end is ends.LOCAL or (end is ends.JUNK and answer is not None and answer.is_done):
            _fail(self, end, detail, begun)
        else:
            self.go_on(ends.BROKEN if begun else end, lambda: _fail(self, end, detail, begun))

    def go_on(self, end: End, otherwise: Callable[[], None]) -> None:
        """Handle the loss of the engine: continue the answer elsewhere, or call `otherwise`, which ends it.

        A stream that has sent `[DONE]` is complete, whatever becomes of its engine then.
        """
        answer = self.answer
        if answer is not None and answer.is_done:
            self.response.write(self.response.last(b""))
            self.exchange.take_usage(answer)
            self.exchange.finish(ends.LAST_MISSING)
        else:
            self.handling.lost(self, end, otherwise)

    def try_again(self, end: End, why: str = DROPPED) -> None:
        """Give a request back to the scheduler, since nothing of an answer came. `why` is for the client."""
        exchange = self.exchange
        dropped = end.outcome is Outcome.NO_RESPONSE or exchange.reconnected
        if dropped and exchange.dropped:
            # Dropped by two instances: the request itself may be what kills engines.
            answer = error_responses.REJECTIONS[RejectReason.NO_RESPONSE]
            exchange.refuse(answer, "The instances dropped the request.", end=end)
            return
        if end.outcome is Outcome.NO_RESPONSE and self.handling.reruns:
            exchange.record.resumed += 1  # it waits for as long as nothing accepts it
        if dropped:
            exchange.dropped = why
        exchange.back_to_queue(states.RETRIED)
        self.driver.try_again(exchange.record, self.lease, end)

    def lost(self, end: End, detail: str, rest: bytes = b"", event: bytes | None = None) -> None:
        """Handle an engine lost in the middle of its answer: continue elsewhere, or end the answer.

        `rest` is its last part. `event` is the engine's own error event, or b"" if a second engine continued
        with something else than the first one had said.
        """
        answer, response = self.answer, self.response
        assert answer is not None
        self.stop()
        if rest:
            self.pass_on(answer, rest)
        self.release()
        if event == b"":
            self.exchange.break_off(ends.OTHERWISE, "another instance goes on with something else")
            return

        def otherwise() -> None:
            if event is None:
                self.exchange.break_off(end, detail)
                return
            out = self.head() if response.state is NOTHING else b""
            response.write(out + response.last(answer.last_emptied(event + b"\n\n" + LAST_EVENT)))
            self.exchange.finish(end)

        self.go_on(end, otherwise)

    # --- from the clock, and the scheduler ---

    @property
    def owes(self) -> Owed:
        request = self.lease.request
        if not request.sequences:
            return REPLY
        return TOKENS if request.streamed else ANSWER

    def sweep(self, now: float, table: ProxyTable) -> None:
        exchange, phase = self.exchange, self.exchange.phase
        if self.handling.sweep(self, now, table) or not (phase is _SENT or phase is _STREAMING):
            return
        first_byte_s, idle_s = table.first_byte_timeout_s, table.idle_timeout_s
        silent_s = now - exchange.since
        still_s = now - max(self.token_at(exchange.since), self.lease.dispatched_at)
        if still_s < min(LEAST_SILENCE_S, first_byte_s, idle_s):
            return
        hung_s = self.driver.scheduling.fleet.hung_s(self.lease, now) if self.owes.computed else 0.0
        if phase is _STREAMING:
            hung = hung_s is not None and hung_s > 0.0 and hung_s > self.handling.hung_s
            if hung or (silent_s > idle_s and not exchange.waits_on(hung_s, now)):
                self.lost(ends.STALLED, "the instance stopped in the middle of its answer")
        elif silent_s > first_byte_s and not exchange.waits_on(hung_s, now):
            self.stop()
            if self.response.state is STARTED:
                self.go_on(ends.STALLED, exchange.end_silent)
            else:
                exchange.end_silent()

    def move(self) -> bool:
        exchange = self.exchange
        if exchange.phase is _STREAMING:
            return self.handling.moves(self)
        self.driver.scheduling.move(self.lease, exchange.record.request.generated, exchange.now())
        return True

    def takes(self, lease: Lease) -> bool:
        """Leave a live engine for a place elsewhere. An answer that has begun rarely can."""
        exchange, begun = self.exchange, self.exchange.phase is _STREAMING
        continues = begun and self.handling.moved(self)
        self.leave()
        self.driver.counted.resumed(
            exchange.record.request.model, ends.NOTICE.name, ends.NOTICE.told, self.lease
        )
        if not begun:
            exchange.back_to_queue(states.RETRIED)
        elif not continues:
            exchange.record.lease = lease
            exchange.break_off(ends.OTHERWISE, "no other instance can go on with it")
            return True
        return False

    def stop(self) -> None:
        """Close the engine's connection, made or in the making: it stops working for this request."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.abort()
        elif self.connecting:
            self.connecting = False
            self.driver.pool(self.sent).cancel(self)

    def leave(self) -> None:
        self.handling.leave()
        self.stop()
        if not self.lease.output_tokens:
            self.lease.output_tokens = self.tokens_so_far

    def fault(self, error: Exception) -> None:
        self.exchange.fault(error)


def _enter(exchange: Exchange, transition: Transition[Phase], now: float) -> None:
    """Change the state of a request, unless its prefill leg is under way."""
    if exchange.phase is not _PREFILLING:
        exchange.enter(transition, now)


def _judged(attempt: Plain, answer: EngineAnswer) -> End:
    """Return how an answer to a chat or a completion ended, by its form. Mark the lease of an odd one."""
    lease = attempt.lease
    form = answer.form(lease.request)
    if form == WRONG:
        return ends.NO_ANSWER
    model = answer.model
    asked = lease.request.model
    lease.odd = form == ODD or (
        model != "" and model != asked and not attempt.driver.scheduling.fleet.names(lease, model)
    )
    return ends.ANSWERED


def _turned_away(attempt: Plain, status: int, again_s: float | None) -> None:
    """Tell the scheduler that the engine refused or failed the request by `status`.

    The scheduler may give the request to another instance.
    """
    exchange, known = attempt.exchange, attempt.lease.request.features
    features = exchange.outgoing.features if known is None else known
    attempt.driver.scheduling.refused(attempt.lease, status, again_s, features, exchange.now())


def _too_few(attempt: Plain, answer: EngineAnswer, payload: bytes) -> bool:
    """Return True if too little of a trial's answer came to be passed on, of a whole one all: it may fail."""
    if answer.refuses or attempt.handling.keeps or attempt.response.state is STARTED:
        return False
    return len(payload) < _TRIAL_BYTES and (answer.stream is None or payload.count(b"data:") < _TRIAL_EVENTS)


def _failed_at_once(attempt: Plain, answer: EngineAnswer, payload: bytes, *, ended: bool = False) -> bool:
    """Return True if a stream failed before any of it was passed on, and another instance got the request.

    `ended`: no more of it comes, so it failed without its end as well.
    """
    if answer.stream is None or attempt.handling.keeps or attempt.response.state is STARTED:
        return False
    cut = ended and attempt.exchange.record.kind in _WITH_END and payload.find(b"[DONE]") < 0
    if not cut and payload.find(b'"error"') < 0:
        return False
    begun = SseWatcher(False)
    begun.feed(payload)
    if not (begun.failed or (cut and not begun.whole)):
        return False
    if begun.events and attempt.handling.reruns and not begun.refused:
        return False  # tokens that another one goes on behind are an answer that has begun
    _turned_away(attempt, 400 if begun.refused else 500, None)
    return attempt.exchange.attempt is not attempt


def _is_none(attempt: Plain, answer: EngineAnswer, body: bytes) -> bool:
    """Return True if a whole body is no answer (an error, a part), and another instance got the request."""
    if answer.stream is not None or attempt.lease.request.path not in PATHS:
        return False
    if answer.has_usage(body) or is_answer(body):
        return False
    if answer.refuses or attempt.handling.keeps or attempt.response.state is STARTED or not answer.is_legible:
        return False
    _turned_away(attempt, 500, None)
    return attempt.exchange.attempt is not attempt


def _fail(attempt: Plain, end: End, detail: str, begun: bool) -> None:
    """End an answer that cannot continue: its engine failed. `begun`: it failed in the middle of it."""
    exchange, response = attempt.exchange, attempt.response
    why = f"The instance gave no valid answer: {detail.removesuffix('.')}."
    if end is ends.HEAD_CUT:
        end = ends.JUNK
    if end in ends.NOTHING_SENT:
        attempt.try_again(end)
    elif response.state is STARTED or (response.state is HEARTBEATS and response.held_up):
        exchange.break_off(ends.BROKEN, detail)
    elif end is ends.LOCAL:
        exchange.refuse(error_responses.LOCAL_FAULT, "The proxy is out of resources.", 1.0, end=end)
    elif not begun and end is not ends.UNREAD:
        # vLLM sends the head of a stream before it has prefilled the prompt: no answer has begun.
        if end is ends.JUNK:
            attempt.try_again(end, why)
        else:
            attempt.try_again(ends.DROPPED)
    else:
        end = end if end is ends.UNREAD else ends.JUNK
        exchange.refuse(error_responses.BAD_UPSTREAM, why, end=end)


class PlainMaker(Maker):
    """Maker of plain attempts."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def attempt(self, exchange: Exchange, lease: Lease, gives_ids: bool, max_model_len: int) -> Plain:
        return Plain(self._driver, exchange, lease)
