"""One request on its way through the proxy: from the client's whole request to its one terminal outcome.

`finish` is the only way out. The lease may be preceded by another: that of a prefill leg (`kv_transfers.py`),
or one whose engine was lost in the middle of its answer (`continuation.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hetlb.balancer.clients.client_response import HEARTBEATS, NOTHING, STARTED, ClientResponse, ClientSide
from hetlb.balancer.core.account import LEAST_SILENCE_S
from hetlb.balancer.core.transition import Transition
from hetlb.balancer.core.types import Lease, Outcome, RejectReason, Request
from hetlb.balancer.engines.upstream import EngineConnection
from hetlb.balancer.exchange import ends
from hetlb.balancer.exchange import exchange_states as states
from hetlb.balancer.exchange.ends import End
from hetlb.balancer.exchange.engine_answer import LOOP_STATUS, EngineAnswer
from hetlb.balancer.exchange.engine_request import EngineRequest
from hetlb.balancer.exchange.exchange_states import Phase
from hetlb.balancer.exchange.streamed_answer import LAST_EVENT, StreamedAnswer
from hetlb.balancer.http import error_responses
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.http.error_responses import Answer
from hetlb.balancer.http.http1 import ResponseHead
from hetlb.balancer.http.openai_body import Call
from hetlb.balancer.http.sse import TAIL_BYTES
from hetlb.balancer.telemetry.request_record import RequestRecord

if TYPE_CHECKING:
    from hetlb.balancer.engines.engine_pools import EnginePool
    from hetlb.balancer.exchange.driver import Driver
    from hetlb.options.resume.continuation import Continuation
    from hetlb.options.split.kv_transfers import KvTransfer
    from hetlb.options.tunnel.realtime import Tunnel

#: Bytes of a busy engine's answer that are kept; more than that waits in its connection.
_KEPT_BYTES: Final = 64 << 10
#: A stream whose engine is known to stand still for this long ends, in seconds.
_HUNG_S: Final = 20.0
#: Kinds of which a stream is server-sent events, and may hold comments.
_SSE_KINDS = frozenset({Kind.CHAT, Kind.COMPLETION, Kind.RESPONSES, Kind.MESSAGES})
#: Kinds of which a stream ends with `[DONE]`.
_WITH_END: Final = (Kind.CHAT, Kind.COMPLETION)
#: Looked up here and not for every request: a member of an enum costs as much as a call.
_CHAT: Final = Kind.CHAT
_QUEUED: Final = Phase.QUEUED
_PREFILLING: Final = Phase.PREFILLING
_CONNECTING: Final = Phase.CONNECTING
_STREAMING: Final = Phase.STREAMING


class Exchange(RequestRecord):
    """One request and its answer."""

    __slots__ = (
        "_call", "_sent", "answer", "driver", "dropped", "end", "engine", "now", "outgoing", "phase",
        "response", "rest", "session", "since", "transfer",
    )  # fmt: skip

    def __init__(
        self,
        driver: Driver,
        client: ClientSide,
        outgoing: EngineRequest,
        kind: Kind,
        call: Call,
        request: Request,
        label: str,
        now: float,
        tenant: str | None = None,
    ) -> None:
        head = outgoing.head
        super().__init__(
            request, kind, head.method, head.path, label, tenant, now, call.prompts, call.prompt_tokens_total
        )
        self.driver = driver
        self.now = driver.now
        self._call = call
        self.outgoing = outgoing
        self.phase = _QUEUED
        self.response = ClientResponse(client, head, label, now, call.stream and kind in _SSE_KINDS)
        #: Since when this phase lasts, or when last something came.
        self.since = now
        self._sent: Lease | None = None
        self.engine: EngineConnection | None = None
        #: Answer of this lease, None before its head.
        self.answer: EngineAnswer | None = None
        #: True if an engine dropped it and may have run it.
        self.dropped = False
        #: Leases by which its answer goes on at another instance, None where it does not.
        self.rest: Continuation | None = None
        self.end: End | None = None
        #: The two legs of a split request, until the first token of the second.
        self.transfer: KvTransfer | None = None
        #: WebSocket that its answer is, None without one.
        self.session: Tunnel | None = None

    # --- from the scheduler ---

    def dispatched(self, lease: Lease, gives_ids: bool, max_model_len: int) -> None:
        """The scheduler chose an instance: go there.

        `gives_ids`: its engine takes and gives token ids, in requests of `max_model_len` tokens (0: unknown).
        """
        if self.lease is not None and self.transfer is None and not self._moved(self.lease):
            self.lease = lease
            self._break(ends.OTHERWISE, "no other instance can go on with it")
            return
        self.lease = lease
        now, transfer = lease.dispatched_at, self.transfer
        if transfer is not None:
            if lease is transfer.decode:
                transfer.decode_dispatched(lease)
                return
            self.stop_engine()
            transfer.leave()
        if lease.decode is not None:
            transfers = self.driver.scheduling.transfers
            assert transfers is not None, "expected an instance with kv_transfer"
            self.transfer = transfers.transfer(self, lease)
            self.transfer.begin(now)
            return
        if not self.resumed:
            self.expected_s = lease.forecast_end_s
            self.expected_first_s = lease.expected_first_s
            self.mixed = lease.beside
            self.dispatched_at = now
        self.enter(states.DISPATCHED, now)
        if self.rest is not None and not self.rest.dispatched(gives_ids, max_model_len):
            self._break(ends.OTHERWISE, "no other instance can go on with it")
            return
        self.send(lease)

    # --- from the engine's connection ---

    def send(self, lease: Lease, *, fresh: bool = False) -> None:
        self._sent = lease
        self.driver.pool(lease).send(self, fresh=fresh)

    def head_lines(self, pool: EnginePool) -> bytes:
        """The head for the engine of a pool, but for `x-request-id`: without hop-by-hop headers."""
        lines = self.driver.forward_rules.request_lines(self.outgoing.head, passthrough=pool.passthrough)
        if self.rest is not None:
            lines = self.rest.head_lines(lines, self.path)
        return (lines if self.trace is None else self.trace.onto(lines)) + pool.own_headers

    def engine_connected(self, connection: EngineConnection) -> None:
        """Send the request, the body as it came unless this lease has one of its own."""
        self.engine = connection
        if self.phase is not _PREFILLING:
            self.enter(states.WRITTEN, self.now())
        instead: bytes | None = None
        if self.transfer is not None:
            instead = self.transfer.body
        elif self.rest is not None:
            instead = self.rest.body
        if self.response.held_since is not None:
            connection.pause()
        self.outgoing.send(connection, self.head_lines(connection.pool), instead)

    def still_served(self) -> bool:
        """True if what a reconnect led to has the model: it may be another engine."""
        assert self._sent is not None
        return self.driver.scheduling.serves(self._sent)

    def engine_lost_idle(self) -> None:
        """A reused connection was closed: once more on a fresh one. The engine may have run the request."""
        if self.dropped:
            self.engine_failed(ends.DROPPED, "the engine closed the connection")
            return
        self.dropped = True
        self.engine = None
        if self.phase is not _PREFILLING:
            self.enter(states.RECONNECTING, self.now())
        assert self._sent is not None
        self.send(self._sent, fresh=True)

    def engine_head(self, head: ResponseHead, length: int | None) -> None:
        """The head of the answer; it is kept until the body begins. `length`: of the body, if it is known."""
        status, lease = head.status, self.lease
        if not 200 <= status < 300:
            if status == 101:
                self.outgoing.agreed(self, head)
                return
            if status < 400:
                # An engine has no business sending clients elsewhere.
                self.stop_engine()
                self.engine_failed(ends.JUNK, "the engine redirected")
                return
            if status == LOOP_STATUS and self.driver.forward_rules.came_back(head.headers):
                assert lease is not None
                self.driver.scheduling.came_back(lease.instance)
                self.try_again(ends.LOOP)
                return
        answer = self.answer = EngineAnswer(head, length)
        self.status = status
        rest = self.rest
        if self.transfer is not None:
            answer.wait()
            rest = None
        if answer.refuses:
            # While both legs are on their way, what this says of the engine waits for the other one's answer.
            if self.phase is not _PREFILLING:
                assert lease is not None
                self.driver.scheduling.refused(lease, answer.is_busy, answer.busy_s, self.now())
        elif answer.is_stream:
            answer.length = None  # what is taken out of it makes it shorter
            # The first event of a chat only says who speaks: it is no text.
            silent = self.kind is _CHAT
            answer.stream = (
                StreamedAnswer(self._call.hold_usage, silent) if rest is None else rest.stream(silent)
            )
        elif rest is not None and rest.second is None and status < 400 and length is not None:
            answer.whole_only = length <= TAIL_BYTES

    @property
    def plain(self) -> bool:
        """True if what comes of the answer is passed on as it stands."""
        return self.answer is None or self.answer.stream is None

    def engine_events(self, chunks: bytes) -> bool:
        """Pass on a read of a stream if it is whole events of text; False, and nothing is done, if not."""
        answer = self.answer
        stream = None if answer is None else answer.stream
        if stream is None or not (passed := stream.pass_text(chunks)):
            return False
        self.response.write(passed)
        self.since = now = self.now()
        stream.text_came(now)
        return True

    def _begin(self, answer: EngineAnswer, payload: bytes, *, whole: bool) -> bytes | None:
        """Look at the first bytes of a body; returns those that go on, None if none do for now."""
        if answer.waits:
            answer.kept += payload
            answer.kept_whole = whole
            transfer = self.transfer
            if transfer is None or not transfer.may_begin(answer):
                if len(answer.kept) > _KEPT_BYTES and transfer is None and self.engine is not None:
                    self.engine.pause()
                return None
            payload, answer.waits = answer.kept, False
        stream, rest = answer.stream, self.rest
        if stream is None and rest is not None and rest.second is not None and self.response.state is STARTED:
            self.stop_engine()
            self._break(answer.not_the_rest, "another instance would not go on with it")
            return None
        if whole and not payload:
            return payload
        now, lease = self.now(), self.lease
        if self.first_byte_at is None:
            self.first_byte_at = now
        assert lease is not None
        if self.status < 400:
            self.driver.scheduling.first_token(lease, now)
        if stream is not None:
            self.response.stream_follows()
            if self.request.sequences == 1:
                stream.count_gaps(self.driver.counted.model(self.request.model).gaps)
        self.enter(states.FIRST_BYTE, now)
        return payload

    def let_go(self) -> None:
        """An answer that was kept goes on: no other instance gets its request."""
        answer = self.answer
        if answer is None or not answer.waits:
            return
        kept, answer.kept = answer.kept, b""
        answer.waits = self.transfer is not None
        if answer.kept_whole:
            self.engine_end(kept)
        elif kept:
            self.engine_body(kept)
        if answer.failure is not None:
            end, detail = answer.failure
            self.engine_failed(end, detail)
        elif self.engine is not None and self.response.held_since is None:
            self.engine.resume()

    def engine_body(self, payload: bytes) -> None:
        """More of the answer's body: passed on in the same turn."""
        answer = self.answer
        assert answer is not None, "expected a head before a body"
        if self.phase is not _STREAMING:
            first = self._begin(answer, payload, whole=False)
            if first is None:
                return
            payload = first
        self.since = now = self.now()
        payload = answer.read(payload, now)
        if answer.lost is not None:
            self._lost(ends.ERROR_EVENT, "", payload, answer.lost)
        elif payload:
            self._pass(answer, payload)

    def _pass(self, answer: EngineAnswer, payload: bytes) -> None:
        response = self.response
        passed = answer.emptied(payload)
        if response.state is NOTHING:
            response.write(self._commit() + response.frame(passed))
        elif passed and response.state is STARTED:  # behind heartbeats a whole answer becomes one event
            response.write(response.frame(passed))
        if answer.stream is not None and response.chunked:
            answer.stream.learn_shape()

    def _release(self) -> None:
        """Pass on the event of a stream that waits for the next one."""
        answer = self.answer
        stream = None if answer is None else answer.stream
        if answer is not None and stream is not None and (held := stream.release()):
            self._pass(answer, held)

    def engine_end(self, payload: bytes) -> None:
        """The answer is whole and its framing was clean; `payload` is its last part."""
        self.engine = None
        answer, response = self.answer, self.response
        assert answer is not None, "expected a head before the end"
        if self.phase is not _STREAMING:
            first = self._begin(answer, payload, whole=True)
            if first is None:
                return
            payload = first
        payload = answer.read_last(payload)
        stream = answer.stream
        if answer.lost is not None:
            self._lost(ends.ERROR_EVENT, "", payload, answer.lost)
            return
        if stream is not None:
            payload += stream.release()
            unfinished = stream.flush()
            if not stream.whole and self.kind in _WITH_END:
                self._lost(ends.BROKEN, "the stream ended without [DONE]", payload)
                return
            payload += unfinished
        if response.state is HEARTBEATS:
            event, end = answer.late(self.path)
            response.write(response.frame(event))
            self.finish(end, broken=True)
            return
        payload = answer.last_emptied(payload)
        out = self._commit() if response.state is NOTHING else b""
        out += response.last(payload)
        if out:
            response.write(out)
        self.take_usage(answer)
        self.finish(answer.end)

    def engine_failed(self, end: End, detail: str) -> None:
        """The engine, or this machine, failed: `end` says how."""
        response, answer = self.response, self.answer
        self.engine = self._sent = None
        if answer is not None and answer.waits and self.transfer is None:
            answer.failure = end, detail
            return
        begun = self.phase is _STREAMING
        if self.rest is not None and not begun and end in (ends.HEAD_CUT, ends.BROKEN):
            end = ends.DROPPED  # a head is no answer where the request may be run again
        elif end is ends.HEAD_CUT:
            end = ends.JUNK
        self._release()
        may_go_on = end is not ends.LOCAL if begun else end is ends.DROPPED and response.state is STARTED
        if self.transfer is not None and not begun and end is not ends.LOCAL:
            self.transfer.decode_failed(end)
            return

        def otherwise() -> None:
            self._failed(end, detail, begun)

        if may_go_on and not (end is ends.JUNK and self._is_done):
            self._go_on(ends.BROKEN if begun else end, otherwise)
        else:
            otherwise()

    @property
    def _is_done(self) -> bool:
        """True if `[DONE]` of a stream was passed on, and no error came."""
        stream = None if self.answer is None else self.answer.stream
        return stream is not None and stream.done and not stream.failed and stream.lost is None

    def _go_on(self, end: End, otherwise: Callable[[], None]) -> None:
        """Go on at another instance, or end it `otherwise`: now, or once it shows that it cannot.

        A stream of which `[DONE]` came is whole, whatever becomes of its engine then.
        """
        answer = self.answer
        if answer is not None and self._is_done:
            self.response.write(self.response.last(b""))
            self.take_usage(answer)
            self.finish(ends.LAST_MISSING)
        elif self.rest is None or not self.rest.go_on(self, end, otherwise):
            otherwise()

    def _failed(self, end: End, detail: str, begun: bool) -> None:
        """The engine failed, `begun` in the middle of its answer, which does not go on."""
        response, answer = self.response, self.answer
        if end in ends.NOTHING_SENT:
            self.try_again(end)
        elif response.state is STARTED or (response.state is HEARTBEATS and response.held_up):
            self._break(ends.BROKEN, detail)
        elif end is ends.LOCAL:
            self.refuse(error_responses.LOCAL_FAULT, "The proxy is out of resources.", 1.0, end=end)
        elif end is ends.DROPPED or (
            end is not ends.JUNK and answer is not None and answer.is_stream and not begun
        ):
            # vLLM sends the head of a stream before it has prefilled the prompt: no answer has begun.
            self.try_again(ends.DROPPED)
        else:
            text = f"The instance gave no valid answer: {detail.removesuffix('.')}."
            self.refuse(error_responses.BAD_UPSTREAM, text, end=end if end is ends.UNREAD else ends.JUNK)

    # --- from the client's connection ---

    def client_gone(self) -> None:
        """The client left: whatever was done for it stops now."""
        if self.phase is not Phase.DONE:
            self.stop_engine()
            self.finish(ends.LEFT, client_gone=True)

    def hold(self, held: bool) -> None:
        """Stop reading the engine while the client is slow (`held`), and suspend its idle timeout."""
        now, response, engine = self.now(), self.response, self.engine
        if held:
            response.pause(now)
            if engine is not None:
                engine.pause()
            return
        if response.resume(now):
            self.since = now
        if engine is not None:
            engine.resume()

    # --- from the clock ---

    def sweep(self, now: float, first_byte_s: float, idle_s: float, heartbeat_s: float = 0.0) -> None:
        """Called about twice a second: end what has waited for too long, send heartbeats where due."""
        response, phase = self.response, self.phase
        if phase is _QUEUED and response.given_up_at(self.since, self.arrived_at) <= now:
            retry_after_s = self.driver.give_up(self.request.id)
            detail = "No instance became free in the time that the client waits."
            self.refuse(error_responses.REJECTIONS[RejectReason.QUEUE_EXPIRED], detail, retry_after_s)
            return
        if response.held_since is not None:
            return  # `ClientConnection.sweep` ends a client that does not read
        if self.session is not None:
            self.session.sweep(now, idle_s)
            return
        if self.rest is not None and self.rest.pending_since is not None:
            self.rest.sweep(self, now, self.driver.table.connect_timeout_s)
            return
        silent_s = now - self.since
        if self.transfer is not None and self.transfer.sweep(now, silent_s, first_byte_s):
            return
        quiet = phase is not _STREAMING and now - response.beat_at >= heartbeat_s
        if heartbeat_s and quiet and response.may_beat:
            response.beat(now)  # the first time this commits the answer
        if silent_s < min(LEAST_SILENCE_S, first_byte_s, idle_s) or self.lease is None:
            return
        hung_s = self.driver.scheduling.hung_s(self.lease, now)
        if phase is Phase.SENT and silent_s > first_byte_s and not self._waits_on(hung_s, now):
            self.stop_engine()
            if response.state is STARTED:
                self._go_on(ends.STALLED, self._silent)
            else:
                self._silent()
        elif phase is _STREAMING and (
            (hung_s and (self.rest is not None or hung_s > _HUNG_S))
            or (silent_s > idle_s and not self._waits_on(hung_s, now))
        ):
            self.stop_engine()
            self._lost(ends.STALLED, "the instance stopped in the middle of its answer")

    def _silent(self) -> None:
        answer = error_responses.FIRST_BYTE_TIMEOUT
        self.refuse(answer, "The instance did not begin to answer in time.", end=ends.SILENT)

    def _waits_on(self, hung_s: float | None, now: float) -> bool:
        """Return True while no clock ends it: its engine works, or the client's stated time lasts.

        `hung_s`: how long its engine has been known to stand still, None if it works.
        """
        return hung_s is None or (
            not hung_s and now < self.response.given_up_at(self.since, self.arrived_at) < math.inf
        )

    def shut_down(self) -> None:
        self.stop_engine()
        if self.session is not None:
            self.session.shut_down()
        elif self.response.state is STARTED:
            self._break(ends.STOPPED, "the proxy is shutting down")
        else:
            self.refuse(error_responses.SHUTTING_DOWN, "The proxy is shutting down.", 1.0, end=ends.STOPPED)

    def give_up(self) -> None:
        """End with an error event or 500: hetlb itself raised an error at this request."""
        self.stop_engine()
        if self.session is not None:
            self.session.shut_down()
        else:
            text = "The proxy failed on this request."
            self.refuse(error_responses.FAULT, text, end=ends.FAULT)

    def fault(self, error: Exception) -> None:
        """Hand an error that was raised at this request to the guard, which ends it."""
        self.driver.guard.ended(self, error)

    def move(self) -> bool:
        """Ask for a place elsewhere, since this instance is about to leave; False where that cannot be.

        The engine is left once there is a place: `dispatched` comes with it, at once or later.
        """
        lease = self.lease
        if lease is None or self.transfer is not None:
            return False
        if self.phase is not _STREAMING:
            self.driver.scheduling.move(lease, self.request.generated, self.now())
        elif self.rest is None or not self.rest.may_move(self):
            return False
        else:
            self.driver.guard.later(self, lambda: self._move(lease))
        return True

    def _move(self, lease: Lease) -> None:
        """Take the rest of a running answer elsewhere, in a turn of its own."""
        if self.lease is not lease or self.phase is not _STREAMING or self.rest is None:
            return
        self._release()
        if self.rest.may_move(self) and (draft := self.rest.draft()) is not None:
            self.driver.scheduling.move(lease, draft.generated, self.now())

    def _moved(self, lease: Lease) -> bool:
        """There is a place elsewhere: leave the live engine of `lease`. False where the answer cannot."""
        self.driver.counted.resumed(self.request.model, ends.NOTICE.name, ends.NOTICE.told, lease)
        if self.phase is not _STREAMING:
            self.back_to_queue(states.RETRIED)
            return True
        return self.rest is not None and self.rest.moved(self, lease)

    # --- on the way ---

    def enter(self, transition: Transition[Phase], now: float) -> None:
        """Take a row of `exchange_states.TRANSITIONS`."""
        self.phase = transition.take(self.phase)
        self.since = now

    def _commit(self) -> bytes:
        """The client's response head. From here on the answer is what it is."""
        answer = self.answer
        assert answer is not None, "expected a head before a body"
        return self.response.head(answer.head, answer.length, self.own_lines(self.now()))

    def take_usage(self, answer: EngineAnswer) -> None:
        """Exact counts in place of estimates, where the engine gave them."""
        completion, prompt, cached = answer.usage()
        sensible = self.counted(completion, prompt, cached)
        if sensible and prompt is not None and not self.request.prompt_exact and not self.resumed_tokens:
            self.driver.learn_prompt(self.request.model, self._call, prompt)

    def stop_engine(self) -> None:
        """Close the engine's connection, made or in the making: it stops working for this request."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.abort()
            if self.transfer is not None:
                self.transfer.stopped = True
        elif self._sent is not None and self.phase in (_CONNECTING, _PREFILLING):
            self.driver.pool(self._sent).cancel(self)
        self._sent = None

    def back_to_queue(self, transition: Transition[Phase]) -> Lease:
        """Wait for another lease, since nothing of an answer goes on; returns the one that ends."""
        if self.transfer is not None:
            self.transfer.leave()
        self.stop_engine()
        lease = self.lease
        assert lease is not None
        self.lease = self.answer = self.prefill_instance = None
        if self.response.state is not STARTED:
            self.status = 0
        if transition is not states.RESUMED:
            self.retries += 1
        self.enter(transition, self.now())
        return lease

    def try_again(self, end: End) -> None:
        """Nothing of an answer came: the scheduler decides what becomes of the request.

        The rest of an answer, and what may be resumed, waits for as long as nothing accepts it.
        """
        dropped = end.outcome is Outcome.NO_RESPONSE
        if dropped and self.dropped:
            # Run twice, dropped twice: the request itself may be what kills engines.
            answer = error_responses.REJECTIONS[RejectReason.NO_RESPONSE]
            self.refuse(answer, "The instances dropped the request.", end=end)
            return
        self.dropped = self.dropped or dropped
        if dropped and self.rest is not None and self.transfer is None:
            self.resumed += 1  # it may have been half done
        if self.resumed:
            self.driver.goes_on(self.request, self.back_to_queue(states.RETRIED), end)
        else:
            self.driver.try_again(self.back_to_queue(states.RETRIED), end.told)

    def _lost(self, end: End, detail: str, rest: bytes = b"", event: bytes | None = None) -> None:
        """The engine is lost in the middle of its answer, of which `rest` is the last.

        `event` is that by which it said so, b"" if it says something else than was said before.
        """
        answer = self.answer
        assert answer is not None
        self.stop_engine()
        if rest:
            self._pass(answer, rest)
        self._release()
        if event == b"":
            self._break(ends.OTHERWISE, "another instance goes on with something else")
            return

        def otherwise() -> None:
            self._end_lost(end, detail, event)

        self._go_on(end, otherwise)

    def _end_lost(self, end: End, detail: str, event: bytes | None) -> None:
        """End an answer that broke off, with the engine's own error event if there is one."""
        answer = self.answer
        assert answer is not None
        if event is None:
            self._break(end, detail)
        else:
            response = self.response
            out = self._commit() if response.state is NOTHING else b""
            response.write(out + response.last(answer.last_emptied(event + b"\n\n" + LAST_EVENT)))
            self.finish(end)

    # --- the end ---

    def refuse(
        self,
        answer: Answer,
        message: str,
        retry_after_s: float | None = None,
        lines: bytes = b"",
        *,
        end: End | None = None,
    ) -> None:
        """Answer in our own words, with these header lines. `end` is that of the lease, if any."""
        response = self.response
        if response.state is STARTED:
            end = ends.BROKEN if end is None or end.outcome is Outcome.NO_RESPONSE else end
            self._break(end, message.removesuffix("."))
            return
        if response.state is HEARTBEATS:
            response.error_event(answer, message)
            self.finish(end, answer.outcome, broken=True)
            return
        if answer.should_retry and (self.dropped or self.phase in (Phase.SENT, _STREAMING)):
            answer = replace(answer, should_retry=False)
        self.status = answer.status
        response.refuse(answer, message, retry_after_s, lines)
        self.finish(end, answer.outcome)

    def _break(self, end: End, detail: str) -> None:
        """End a response that has begun so that no client takes it for complete."""
        response, stream = self.response, None if self.answer is None else self.answer.stream
        if end is not ends.STOPPED and response.held_up:
            end = ends.HELD_UP
        if response.state is NOTHING:
            response.write(self._commit())
        if stream is not None and (rest := stream.cut()):
            response.write(response.frame(rest))
        going_on = self.rest is not None and self.rest.second is not None
        if stream is not None or going_on or response.state is HEARTBEATS:
            response.error_event(error_responses.BROKEN_STREAM, f"The answer broke off: {detail}.")
        self.finish(end, broken=True)

    def finish(
        self,
        end: End | None,
        outcome: Outcome | None = None,
        *,
        broken: bool = False,
        client_gone: bool = False,
    ) -> None:
        """The one way out. `end` is that of the lease; `outcome` the request's, if there is none."""
        if self.transfer is not None:
            self.transfer.leave()
        self.ended_at = self.now()
        self.ended_in = self.phase
        self.enter(states.ENDED, self.ended_at)
        if self.response.state is HEARTBEATS:
            self.status = 200
        self.end = end
        self.outcome = outcome if end is None else end.outcome
        answer, lease, rest = self.answer, self.lease, self.rest
        stream = None if answer is None else answer.stream
        self.streamed = stream is not None or (rest is not None and rest.second is not None)
        if stream is not None and lease is not None and not lease.output_tokens:
            lease.output_tokens = stream.events
        self.outgoing.body = b""
        if answer is not None:
            answer.tail = b""
        if rest is not None:
            rest.close()
            if self.outcome is not Outcome.OK:
                self.not_resumed = rest.why
        self.rest = None
        self.driver.finished(self.request.id)
        if client_gone:
            return
        if broken:
            self.response.client.break_off()
        else:
            self.response.client.end(keep=not self.response.closes)
