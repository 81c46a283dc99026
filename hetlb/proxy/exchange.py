"""One request on its way through the proxy: from the client's whole request to its one terminal outcome.

A small state machine. `phase` says what is waited for; `_finish` is the only way out and is taken
exactly once; the lease is given back there or when it is lost. The client's response head is held until
the first byte of the engine's body, so that until then a failure is an honest status, or another try. Only
where heartbeats are asked for it goes out before; what fails then is an error event, and no stream that
looks complete. What passes for every token is `engine_events`: it allocates nothing but what it counts.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Final, Protocol

from hetlb.core.transition import Transition
from hetlb.core.types import Lease, Outcome, Reject, RejectReason, Request
from hetlb.proxy import ends
from hetlb.proxy.client_response import HEARTBEATS, NOTHING, STARTED, ClientResponse, ClientSide
from hetlb.proxy.ends import End
from hetlb.proxy.engine_pools import EnginePools
from hetlb.proxy.exchange_states import (
    DECODE_UNDER_WAY,
    DISPATCHED,
    ENDED,
    FIRST_BYTE,
    PREFILL_DISPATCHED,
    PREFILL_REFUSED,
    PREFILLED,
    RECONNECTING,
    RESUMED,
    RETRIED,
    TURNED_AWAY,
    WRITTEN,
    Phase,
)
from hetlb.proxy.handover import HandOver, fresh_salt, with_field
from hetlb.proxy.http import error_responses
from hetlb.proxy.http.endpoints import Kind
from hetlb.proxy.http.error_responses import Answer
from hetlb.proxy.http.forward_headers import ForwardRules
from hetlb.proxy.http.http1 import RequestHead, ResponseHead
from hetlb.proxy.http.openai_body import Call
from hetlb.proxy.http.sse import TAIL_BYTES, usage_in_tail
from hetlb.proxy.http.transfer_fields import TransferFilter, harmless
from hetlb.proxy.kv_handovers import KvHandOvers
from hetlb.proxy.progress import Progress
from hetlb.proxy.resume import Leg, ends_here, next_leg
from hetlb.proxy.streamed_answer import StreamedAnswer
from hetlb.proxy.telemetry.histograms import Gaps
from hetlb.proxy.telemetry.request_record import RequestRecord
from hetlb.proxy.upstream import Carried, EngineConnection, Upstream


class DriverSide(Protocol):
    """Interface of an exchange's driver: the clock, the scheduler, the connections."""

    @property
    def forward_rules(self) -> ForwardRules: ...
    @property
    def pools(self) -> EnginePools: ...
    @property
    def handovers(self) -> KvHandOvers: ...
    def now(self) -> float: ...
    def pool(self, lease: Lease) -> Upstream: ...
    def first_token(self, lease: Lease, now: float) -> None: ...
    def lease_ended(self, lease: Lease, outcome: Outcome, *, retry: bool) -> None: ...
    def goes_on(self, exchange: Exchange, lease: Lease, end: End) -> None: ...
    def busy(self, exchange: Exchange, lease: Lease, retry_after_s: float) -> None: ...
    def give_up(self, exchange: Exchange) -> float: ...
    def retry_after_s(self, reject: Reject) -> float | None: ...
    def finished(self, exchange: Exchange) -> None: ...
    def gaps(self, model: str) -> Gaps: ...
    def learn_prompt(self, model: str, call: Call, tokens: int) -> None: ...
    def remember_response(self, response_id: str, instance: str, tenant: str | None) -> None: ...
    def came_back(self, instance: str) -> None: ...
    def serves(self, lease: Lease) -> bool: ...
    def stood_still_since(self, then: float) -> bool: ...


#: Headers that say how long a client waits, and the seconds in their units: OpenAI's SDKs, Envoy.
_PATIENCE = {b"x-stainless-read-timeout": 1.0, b"x-envoy-expected-rq-timeout-ms": 1e-3}
_NUMBER = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")
#: Statuses of an engine that has no room now, if it says when to come again.
_BUSY = frozenset({429, 503})
#: An answer goes on elsewhere so often at most: it may be what engines fail of.
MOST_RESUMED: Final = 5
_TOKEN_IDS: Final = b"return_token_ids"
#: A client is answered so much before it gives up that it can read the answer.
_MARGIN_S: Final = 1.0
#: Kinds of which a stream is server-sent events, and may hold comments.
_SSE_KINDS = frozenset({Kind.CHAT, Kind.COMPLETION, Kind.RESPONSES, Kind.MESSAGES})
#: Kinds of which a stream ends with `[DONE]`.
_WITH_END: Final = (Kind.CHAT, Kind.COMPLETION)
#: Looked up here and not for every request: a member of an enum costs as much as a call.
_CHAT: Final = Kind.CHAT
_RESPONSES: Final = Kind.RESPONSES
_QUEUED: Final = Phase.QUEUED
_PREFILLING: Final = Phase.PREFILLING
_DONE_EVENT: Final = b"data: [DONE]\n\n"

#: Content types of answers with fields that are looked at.
_WITH_FIELDS: Final = (b"application/json", b"text/event-stream")

#: RFC 5842, 7.2.
LOOP_STATUS: Final = 508
_RESPONSE_ID = re.compile(rb'"id":\s?"(resp_[A-Za-z0-9_-]{1,100})"')


class Exchange(RequestRecord):
    """One request and its answer."""

    __slots__ = (
        "_answer_head", "_answer_length", "_begun", "_body", "_body_bytes", "_call", "_deadline_at",
        "_driver", "_dropped", "_engine", "_engine_label", "_gives_ids", "_handover", "_head", "_leg",
        "_now", "_progress", "_stream", "_tail", "_transfers", "_whole_only", "asks_ids", "by_text", "end",
        "phase", "response", "resumes", "since",
    )  # fmt: skip

    def __init__(
        self,
        driver: DriverSide,
        client: ClientSide,
        head: RequestHead,
        kind: Kind,
        call: Call,
        request: Request,
        body: list[bytes],
        label: str,
        now: float,
        tenant: str | None = None,
        engine_label: str | None = None,
    ) -> None:
        """`engine_label` is its id for engines, where that is not `label`."""
        super().__init__(
            request, kind, head.method, head.path, label, tenant, now, call.prompts, call.prompt_tokens_total
        )
        self._driver = driver
        self._now = driver.now
        self._head = head
        self._call = call
        self._body = body
        self._body_bytes = request.body_bytes
        self._engine_label = (label if engine_label is None else engine_label).encode("ascii")
        self.phase = _QUEUED
        self.response = ClientResponse(client, head, label, head.path, now)
        #: Since when this phase lasts, or when last something came.
        self.since = now
        self._engine: EngineConnection | None = None
        self._answer_head: ResponseHead | None = None
        self._answer_length: int | None = None
        self._stream: StreamedAnswer | None = None
        #: Empties the answer's fields about KV transfers, None before its first part.
        self._transfers: TransferFilter | None = None
        #: Time from which it is of no use to wait; read from the head only if it does have to wait.
        self._deadline_at: float | None = None
        #: True if an engine dropped it and may have run it.
        self._dropped = False
        #: Last bytes of an answer that is no stream.
        self._tail = b""
        #: True once a byte of the answer of this lease came.
        self._begun = False
        #: True if its answer may go on at another instance where its engine is lost; if so also by its text;
        #: and if token ids are asked for on the client's behalf.
        self.resumes = self.by_text = self.asks_ids = False
        #: True if the engine gives token ids; what has come of a stream; and the request of a second lease.
        self._gives_ids = False
        self._progress: Progress | None = None
        self._leg: Leg | None = None
        #: True if nothing of a plain answer goes out before it is whole.
        self._whole_only = False
        #: End of its last lease.
        self.end: End | None = None
        #: The two legs of a split request, until the first token of the second.
        self._handover: HandOver | None = None

    # --- from the scheduler ---

    def dispatched(
        self,
        lease: Lease,
        now: float,
        expected_s: float = 0.0,
        expected_first_s: float = 0.0,
        mixed: bool = False,
        gives_ids: bool = False,
    ) -> None:
        """The scheduler chose an instance: go there. `gives_ids`: its engine takes and gives token ids."""
        self.lease = lease
        self._gives_ids = gives_ids
        split = lease.decode is not None or self._handover is not None
        if split and self._dispatched_leg(lease, now, expected_s):
            return
        if not self.resumed:
            self.expected_s = expected_s
            self.expected_first_s = expected_first_s
            self.mixed = mixed
            self.dispatched_at = now
        self._enter(DISPATCHED, now)
        if self._leg is not None and self._leg.by_ids and not gives_ids and not self._plan():
            self._break(ends.OTHERWISE, "no other instance can go on with it")
            return
        self._driver.pool(lease).send(self)

    def turned_away(self) -> None:
        """The engine is busy and the scheduler found another instance: `dispatched` comes next."""
        self._drop_engine()
        self._leave_handover()
        self._answer_head = self._answer_length = self.lease = None
        self.status = 0
        self.retries += 1
        self._enter(TURNED_AWAY, self._now())

    def rejected(self, reject: Reject) -> None:
        """The scheduler turned the request down."""
        answer = error_responses.REJECTIONS[reject.reason]
        self._answer(answer, reject.detail, self._driver.retry_after_s(reject))

    def refused(
        self, answer: Answer, message: str, retry_after_s: float | None = None, lines: bytes = b""
    ) -> None:
        """The request is not let in; `lines` are header lines of the answer."""
        self._answer(answer, message, retry_after_s, lines=lines)

    # --- a request whose prompt is read at one instance for another ---

    def _dispatched_leg(self, lease: Lease, now: float, expected_s: float) -> bool:
        """Take the dispatch of a leg on; False if it is that of a whole request."""
        driver, handover = self._driver, self._handover
        if handover is not None and lease is handover.decode:
            handover.hold = lease.hold
            self.expected_s, self.expected_first_s, self.mixed = expected_s, 0.0, True
            stood_still = driver.stood_still_since(handover.lease.dispatched_at)
            read_at = handover.lease.dispatched_at if stood_still else now
            handover.begin_decode(now, read_at, expected_s)
            if handover.sent and self._engine is not None:
                self._enter(DECODE_UNDER_WAY, now)
                pending, whole = handover.take_pending()
                if whole:
                    self.engine_end(pending)
                elif pending:
                    self.engine_body(pending)
            else:
                self._enter(DISPATCHED, now)
                if not handover.sent:
                    # Its parameters may be used once: an idle connection that turned out to be closed would
                    # leave open whether they were.
                    driver.pool(lease).send(self, fresh=True)
            return True
        self._handover = self.prefill_instance = None
        if lease.decode is None:
            return False
        self.dispatched_at = now
        self._enter(PREFILL_DISPATCHED, now)
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        handover = self._handover = HandOver(self, self.kind, lease, driver.handovers.link(lease), body)
        handover.begin(
            driver.pools.of(lease), lambda: driver.serves(lease), driver.handovers.bootstrap(lease)
        )
        return True

    def prefill_lines(self, own_headers: bytes, passthrough: bool) -> bytes:
        """The head of the prefill leg: that of the client's request, with the id of both legs."""
        lines = self._driver.forward_rules.request_lines(self._head, passthrough=passthrough)
        if self.trace is not None:
            lines = self.trace.onto(lines)
        return b"%b%bx-request-id: %b\r\n" % (lines, own_headers, self._engine_label)

    def send_decode(self) -> None:
        """Both legs are sent at once: the decode leg, too, goes out now."""
        handover = self._handover
        assert handover is not None
        handover.sent = True
        self._driver.pool(handover.decode).send(self, fresh=True)

    def prefilled(self) -> None:
        """The prompt has been read: the decode leg is next."""
        lease, self.lease = self.lease, None
        assert lease is not None
        self.prefill_instance = lease.instance
        self._enter(PREFILLED, self._now())
        self._driver.handovers.prefilled(lease)

    def prefill_refused(self, head: ResponseHead, body: bytes) -> None:
        """The prefill instance answered with an error: it is the answer, but for those of a broken engine."""
        again = head.fields.get(b"retry-after")
        if head.status >= 500 and again is None:
            self._unsplit(ends.SERVER_ERROR, "prefill_error")
            return
        lease = self.lease
        assert lease is not None
        self._leave_handover()
        self._enter(PREFILL_REFUSED, self._now())
        if again is not None and head.status in _BUSY and _NUMBER.fullmatch(again) is not None:
            self._driver.busy(self, lease, float(again))
            if self.lease is not lease:
                return
        self._answer_head, self._answer_length, self.status = head, len(body), head.status
        self.engine_end(body)

    def prefill_failed(self, end: End | None, detail: str) -> None:
        """The prefill instance did not answer."""
        if end is ends.NOT_ACCEPTED or end is ends.LOOP:
            self._try_again(end)
        elif end is ends.LOCAL:
            self._leave_handover()
            self._answer(error_responses.LOCAL_FAULT, "The proxy is out of resources.", 1.0, end=end)
        else:
            self._unsplit(ends.MOVED if end is None else ends.DROPPED, "prefill_failed")

    def handover_failed(self, why: str) -> None:
        """The decode instance did not get the KV blocks, or not in time: one gets the whole request."""
        if why == "late" and self._engine is not None and b'"cache_salt"' not in self._body[0]:
            # What it may have fetched too late is of another prompt, and is in its prefix cache by now.
            self._body = [with_field(self._body[0], b"cache_salt", fresh_salt())]
            self._body_bytes = len(self._body[0])
        self._unsplit(ends.NOT_HANDED_OVER, why)

    def _decode_failed(self, end: End, detail: str) -> None:
        """The decode instance failed before its first token."""
        handover = self._handover
        assert handover is not None
        if not handover.read:
            self._unsplit(ends.NOT_HANDED_OVER, "decode_failed")
        elif end is ends.NOT_ACCEPTED or end is ends.LOOP or end is ends.MOVED:
            self._driver.handovers.ended("decode_failed")
            self._try_again(end)
        else:
            self._dropped = True
            self._unsplit(ends.DROPPED, "decode_failed")

    def _first_of_decode(self, payload: bytes, *, whole: bool) -> bytes | None:
        """The part of the decode leg's first bytes that goes on, None if nothing does for now."""
        handover = self._handover
        assert handover is not None
        payload, good, why = handover.first(
            payload, self._now(), self.status, self._stream is not None, whole
        )
        if why:
            self.handover_failed(why)
        if not good:
            return None
        self._handover = None
        if self.status < 400:
            self._driver.handovers.ended()
        elif handover.hold is not None and not handover.pushed:
            self._driver.handovers.released(handover.hold)  # vLLM releases them when it refuses the request
        return payload

    @property
    def _sent_lease(self) -> Lease:
        """The lease of the leg that this exchange itself is on the way with."""
        handover = self._handover
        lease = handover.decode if handover is not None and handover.sent else self.lease
        assert lease is not None
        return lease

    def _unsplit(self, end: End, why: str) -> None:
        """Have one instance get the whole request. `end` is that of the leg that was going on."""
        lease = self.lease
        assert lease is not None
        self._stop_engine()
        self.lease = self._answer_head = self._answer_length = self._stream = None
        self.prefill_instance = None
        self.status = 0
        self.retries += 1
        self._enter(RETRIED, self._now())
        self._driver.handovers.unsplit(lease, end.told, why)

    def _leave_handover(self, sent: bool = False) -> None:
        """No leg goes on; `sent`: the decode leg was, and its connection was closed."""
        handover, self._handover = self._handover, None
        if handover is None:
            return
        handover.cancel()
        if handover.sent:
            self._driver.pool(handover.decode).cancel(self)
        hold = handover.hold
        if hold is None or hold.ended:
            return
        if sent and not handover.pushed:
            # The decode engine says so to the other as soon as it notices.
            self._driver.handovers.released(hold)
        elif (body := handover.release_body(self.request.model)) is not None:
            self._driver.handovers.release(hold, self.request.model, body)

    # --- from the engine's connection ---

    def engine_connected(self, connection: EngineConnection, own_headers: bytes, passthrough: bool) -> None:
        """Send the request: without its hop-by-hop headers, the body as it came.

        `own_headers` are the lines with the engine's Host and key; `passthrough` lets the client's key
        through.
        """
        self._engine = connection
        if self.phase is not _PREFILLING:
            self._enter(WRITTEN, self._now())
        head, body = self._head, self._body
        length = self._body_bytes
        lines = self._driver.forward_rules.request_lines(head, passthrough=passthrough)
        if self._leg is not None:
            body = [self._leg.body]
            length = len(body[0])
            if self._leg.path is not None:
                lines = lines.replace(self.path.encode("ascii"), self._leg.path, 1)
            if self.response.held_since is not None:
                connection.pause()
        elif self._handover is not None:
            body = [self._handover.body]
            length = len(body[0])
        elif self.asks_ids and self._gives_ids:
            body = [with_field(body[0], _TOKEN_IDS, b"true")]
            length = len(body[0])
        if self.trace is not None:
            lines = self.trace.onto(lines)
        if not length and head.method in (b"GET", b"HEAD", b"DELETE"):
            connection.send(b"%b%bx-request-id: %b\r\n\r\n" % (lines, own_headers, self._engine_label), body)
            return
        first = b"%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
            lines,
            own_headers,
            self._engine_label,
            length,
        )
        connection.send(first, body)

    def sent_by_gateway(self) -> None:
        """A gateway has the request and sends it to the engine."""
        self._enter(WRITTEN, self._now())

    @property
    def done(self) -> bool:
        """True once it has its outcome."""
        return self.phase is Phase.DONE

    @property
    def label_for_engine(self) -> bytes:
        """Value of `x-request-id` for the engine."""
        return self._engine_label

    @property
    def body_for_engine(self) -> bytes:
        """The body as it goes to the engine."""
        return b"".join(self._body)

    def engine_identified(self) -> None:
        """After a reconnect it was looked at what the engine serves: it may be another by now."""
        lease = self._sent_lease
        if self._driver.serves(lease):
            self._driver.pool(lease).send(self)
        else:
            self.engine_failed(ends.MOVED, "another model is served there")

    def engine_lost_idle(self) -> None:
        """A reused connection was closed before it answered: once more on a fresh one, same instance.

        Most likely it was closed while idle; but the engine may have taken the request and dropped it. So
        this, too, is one of the two times that a request is run.
        """
        if self._dropped:
            self.engine_failed(ends.DROPPED, "the engine closed the connection")
            return
        self._dropped = True
        self._engine = None
        if self.phase is not _PREFILLING:
            self._enter(RECONNECTING, self._now())
        self._driver.pool(self._sent_lease).send(self, fresh=True)

    def engine_head(self, head: ResponseHead, length: int | None) -> None:
        """The head of the answer; it is kept until the body begins. `length`: of the body, if it is known."""
        if 300 <= head.status < 400:
            # An engine has no business sending clients elsewhere.
            self._drop_engine()
            self.engine_failed(ends.JUNK, "the engine redirected")
            return
        if head.status == LOOP_STATUS and self._driver.forward_rules.came_back(head.headers):
            self._drop_engine()
            lease = self.lease
            assert lease is not None
            self._driver.came_back(lease.instance)
            self._try_again(ends.LOOP)
            return
        self._answer_head, self._answer_length = head, length
        self.status = head.status
        self._transfers = None
        if self._handover is not None and not self._handover.read:
            pass  # both legs are on their way: what this says of the engine waits for the other one's answer
        elif head.status in _BUSY and (again := head.fields.get(b"retry-after")) is not None:
            lease = self.lease
            assert lease is not None
            if _NUMBER.fullmatch(again) is not None:
                self._driver.busy(self, lease, float(again))
        elif head.status == 200 and head.fields.get(b"content-type", b"").startswith(b"text/event-stream"):
            # The first event of a chat only says who speaks: it is no text.
            silent = self.kind is _CHAT
            if self._leg is not None:
                seam = self._leg.seam
                self._stream = StreamedAnswer(not seam.wants_usage, silent, self._progress, seam)
                return
            if self.resumes and (self._gives_ids or self.by_text) and self._handover is None:
                self._progress = Progress(self.asks_ids and self._gives_ids)
            self._stream = StreamedAnswer(self._call.hold_usage, silent, self._progress)
        elif self.resumes and head.status < 400 and length is not None and length <= TAIL_BYTES:
            self._whole_only = True

    def engine_events(self, chunks: bytes) -> bool:
        """A read of a stream between two chunks: passed on as it stands if it is whole events of text.

        False where it takes a closer look, and nothing was done.
        """
        stream = self._stream
        if stream is None:
            return False
        chunks = stream.pass_text(chunks)
        if not chunks:
            return False
        self.response.write(chunks)
        now = self._now()
        stream.text_came(now)
        self.since = now
        return True

    def engine_body(self, payload: bytes) -> None:
        """More of the answer's body: passed on in the same turn."""
        stream, response = self._stream, self.response
        if not self._begun:
            if self._handover is not None:
                first = self._first_of_decode(payload, whole=False)
                if first is None:
                    return
                payload = first
            self._first_byte(payload)
        self.since = now = self._now()
        if stream is not None:
            payload = stream.read(payload, now)
            if stream.lost is not None:
                self._given_up(stream, payload)
                return
            if not payload:
                return
        elif self._leg is not None and response.state is STARTED:
            self._stop_engine()
            self._break(self._no_stream, "another instance would not go on with it")
            return
        else:
            self._tail = (self._tail + payload)[-TAIL_BYTES:]
            if response.state is HEARTBEATS or self._whole_only:
                return  # no part of a stream: an event reports it when it is whole
        self._pass(payload)
        if stream is not None and response.chunked:
            stream.learn_beginning(payload)

    def _pass(self, payload: bytes) -> None:
        """Send the client a part of the body."""
        response, payload = self.response, self._emptied(payload)
        if response.state is NOTHING:
            response.write(self._commit() + response.frame(payload))
        elif payload:
            response.write(response.frame(payload))

    def engine_end(self, payload: bytes) -> None:
        """The answer is whole and its framing was clean; `payload` is its last part."""
        self._engine = None
        if self._handover is not None and not self._begun:
            first = self._first_of_decode(payload, whole=True)
            if first is None:
                return
            payload = first
        stream, response = self._stream, self.response
        if payload and not self._begun:
            self._first_byte(payload)
        if stream is not None:
            if payload:
                payload = stream.feed(payload)
            if stream.lost is not None:
                self._given_up(stream, payload)
                return
            if not stream.done and not stream.failed and self.kind in _WITH_END:
                self._lost(ends.BROKEN, "the stream ended without [DONE]", payload)
                return
            payload += stream.flush()
        elif self._leg is not None and response.state is STARTED:
            self._break(self._no_stream, "another instance would not go on with it")
            return
        elif payload or self._whole_only:
            self._tail = (self._tail + payload)[-TAIL_BYTES:]
            if self._whole_only:
                payload = self._tail
        if response.state is HEARTBEATS:
            self._answered_late(stream)
            return
        if self._transfers is not None or not harmless(payload):
            payload = self._emptied(payload)
        out = self._commit() if response.state is NOTHING else b""
        out += response.last(payload)
        if out:
            response.write(out)
        self._take_usage()
        self._finish(self._whole)

    def answered_unseen(self) -> None:
        """A gateway has passed on the whole answer and showed nothing of its body."""
        self._finish(ends.UNSEEN)

    def engine_failed(self, end: End, detail: str) -> None:
        """The engine, or this machine, failed: `end` says how."""
        response = self.response
        self._engine = None
        if end is ends.HEAD_CUT:
            # Part of an answer is an answer, unless the request may be run again.
            end = ends.DROPPED if self.resumes else ends.JUNK
        if self._handover is not None and not self._begun and end is not ends.LOCAL:
            self._decode_failed(end, detail)
        elif self._goes_on_after(end):
            pass
        elif response.state is STARTED and not self._begun and end in _SENT_AGAIN:
            self._try_again(end)
        elif response.state is STARTED or (response.state is HEARTBEATS and response.held_up):
            self._break(ends.BROKEN, detail)
        elif end is ends.LOCAL:
            self._answer(error_responses.LOCAL_FAULT, "The proxy is out of resources.", 1.0, end=end)
        elif end is not ends.JUNK and self._unbegun:
            # vLLM sends the head of a stream before it has read the prompt: no answer has begun.
            self._answer_head = self._answer_length = self._stream = None
            self.status = 0
            self._try_again(ends.DROPPED)
        elif end is ends.JUNK or end is ends.UNREAD or self._answer_head is not None:
            self._answer(
                error_responses.BAD_UPSTREAM,
                f"The instance gave no valid answer: {detail.removesuffix('.')}.",
                end=end if end is ends.UNREAD else ends.JUNK,
            )
        else:
            self._try_again(end)

    def _goes_on_after(self, end: End) -> bool:
        """True if the rest of an answer was placed elsewhere, after its engine has failed."""
        if self._begun:
            return end is not ends.LOCAL and self._go_on(ends.BROKEN)
        return end is ends.DROPPED and self.response.state is STARTED and self._go_on(end)

    @property
    def _whole(self) -> End:
        """The end of the lease of a whole answer."""
        stream = self._stream
        if stream is not None and stream.failed:
            return ends.REFUSED_IN_STREAM if stream.refused else ends.ERROR_EVENT
        if self.status < 400:
            return ends.ANSWERED
        head = self._answer_head
        if self.status == 429 or (self.status == 503 and head is not None and b"retry-after" in head.fields):
            return ends.BUSY
        # A loop behind another proxy is no failure of that one.
        return ends.REFUSED if self.status < 500 or self.status == LOOP_STATUS else ends.SERVER_ERROR

    def divert(self, taker: Carried) -> EngineConnection:
        """Have `taker` get what the engine still sends, until it gives the connection back."""
        engine = self._engine
        assert engine is not None, "expected an engine that is answering"
        engine.exchange = taker
        return engine

    def engine_done(self) -> None:
        """The engine's connection is free for others, or gone."""
        self._engine = None

    @property
    def _unbegun(self) -> bool:
        """True if the engine has sent the head of a stream and not one byte of it."""
        return self._stream is not None and self.status == 200 and not self._begun

    @property
    def tokens_so_far(self) -> int:
        """Output tokens of a stream until now, 0 of another answer: its lease has the number at the end."""
        return 0 if self._stream is None else self._stream.events

    @property
    def plain(self) -> bool:
        """True if what comes of the answer is passed on as it stands."""
        return self._stream is None

    # --- from the client's connection ---

    def client_gone(self) -> None:
        """The client left: whatever was done for it stops now."""
        if self.phase is not Phase.DONE:
            self._stop_engine()
            self._finish(ends.LEFT, client_gone=True)

    def pause(self) -> None:
        """The client reads too slowly: the engine is not read either, and its silence is not its own."""
        self.response.pause(self._now())
        if self._engine is not None:
            self._engine.pause()

    def resume(self) -> None:
        """The client has caught up."""
        now = self._now()
        if self.response.resume(now):
            self.since = now
        if self._engine is not None:
            self._engine.resume()

    # --- from the clock ---

    def sweep(self, now: float, first_byte_s: float, idle_s: float, heartbeat_s: float = 0.0) -> None:
        """Called about twice a second: end what has waited for too long, comfort who waits for a stream."""
        if self.phase is Phase.QUEUED and self._too_late(now):
            retry_after_s = self._driver.give_up(self)
            detail = "No instance became free in the time that the client waits."
            self._answer(error_responses.REJECTIONS[RejectReason.QUEUE_EXPIRED], detail, retry_after_s)
            return
        response = self.response
        if response.held_since is not None:
            return  # `ClientConnection.sweep` ends a client that does not read
        handover = self._handover
        if handover is not None and not self._begun and now > handover.until:
            self.handover_failed("late")
            return
        if heartbeat_s and not self._begun and now - response.beat_at >= heartbeat_s:
            self._beat(now)
        if self.phase is Phase.SENT and now - self.since > first_byte_s:
            self._stop_engine()
            if response.state is STARTED and self._go_on(ends.STALLED):
                return
            text = "The instance did not begin to answer in time."
            self._answer(error_responses.FIRST_BYTE_TIMEOUT, text, end=ends.SILENT)
        elif self.phase is Phase.PREFILLING and now - self.since > first_byte_s:
            self.prefill_failed(ends.SILENT, "it did not answer in time")
        elif self.phase is Phase.STREAMING and now - self.since > idle_s:
            self._stop_engine()
            self._lost(ends.STALLED, "the instance stopped in the middle of its answer")

    def shut_down(self) -> None:
        """The grace period is over."""
        self._stop_engine()
        if self.response.state is STARTED:
            self._break(ends.STOPPED, "the proxy is shutting down")
        else:
            self._answer(error_responses.SHUTTING_DOWN, "The proxy is shutting down.", 1.0, end=ends.STOPPED)

    # --- inside ---

    @property
    def _may_have_run(self) -> bool:
        """True if an engine was sent the request and may have worked on it."""
        return self._dropped or self.phase in (Phase.SENT, Phase.STREAMING)

    def _enter(self, transition: Transition[Phase], now: float) -> None:
        assert self.phase in transition.before, f"request {self.request.id}, {self.phase}: {transition.event}"
        self.phase = transition.after
        self.since = now

    def _first_byte(self, payload: bytes) -> None:
        now = self._now()
        self._begun = True
        if self.first_byte_at is None:
            self.first_byte_at = now
        assert self.lease is not None
        if self.status < 400:
            self._driver.first_token(self.lease, now)
            if self.kind is _RESPONSES and (made := _RESPONSE_ID.search(payload)) is not None:
                self._driver.remember_response(made[1].decode("ascii"), self.lease.instance, self.tenant)
        if self._stream is not None:
            self.response.stream_follows()
            if self.request.sequences == 1:
                self._stream.count_gaps(self._driver.gaps(self.request.model))
        self._enter(FIRST_BYTE, now)

    def _too_late(self, now: float) -> bool:
        """True if the client is about to give up waiting."""
        if self.response.state is HEARTBEATS:
            return False  # heartbeats keep it from that
        if self._deadline_at is None:
            since = self.since if self.response.state is STARTED else self.arrived_at
            self._deadline_at = since + max(0.0, _patience_s(self._head) - _MARGIN_S)
        return now >= self._deadline_at

    def _beat(self, now: float) -> None:
        """Tell the client of a stream that it is not forgotten; the first time this commits the answer."""
        if self._call.stream and self.kind in _SSE_KINDS and self.response.may_beat:
            if self.response.state is NOTHING:
                self.status = 200
            self.response.beat(now)

    def _answered_late(self, stream: StreamedAnswer | None) -> None:
        """A whole answer came, but no stream, and the client has the head of one: an event must say it."""
        response = self.response
        if stream is None and self.status >= 400:
            event = error_responses.upstream_error_event(self.status, self._tail, self.path)
            response.write(response.frame(event))
        else:
            text = "The instance did not answer with a stream."
            response.error_event(error_responses.BAD_UPSTREAM, text)
        end = self._whole if self.status >= 400 else ends.REFUSED if stream is None else ends.BROKEN
        self.status = 200
        # A whole answer of another kind may be what the request asked for: no failure of the instance.
        self._finish(end, broken=True)

    def _commit(self) -> bytes:
        """The client's response head. From here on the answer is what it is."""
        head, lease = self._answer_head, self.lease
        assert head is not None, "expected a head before a body"
        assert lease is not None
        lines = b"x-hetlb-instance: %b\r\n" % lease.instance.encode("ascii")
        if self.ticket is not None:
            lines += self.ticket.headers(self._now())
        if self.prefill_instance is not None:
            lines += b"x-hetlb-prefill-instance: %b\r\n" % self.prefill_instance.encode("ascii")
        if self.resumed:
            lines += b"x-hetlb-resumed: %d\r\n" % self.resumed
        return self.response.head(head, self._answer_length, lines)

    def _emptied(self, payload: bytes) -> bytes:
        """A part of an answer, with nothing in its fields about KV transfers."""
        filter_ = self._transfers
        if filter_ is None:
            assert self._answer_head is not None
            if not self._answer_head.fields.get(b"content-type", b"").startswith(_WITH_FIELDS):
                return payload
            filter_ = self._transfers = TransferFilter()
        return filter_.feed(payload)

    def _take_usage(self) -> None:
        """Exact counts in place of estimates, where the engine gave them."""
        stream, lease = self._stream, self.lease
        assert lease is not None
        if stream is not None:
            completion, prompt = stream.completion_tokens, stream.prompt_tokens
            cached = stream.cached_tokens
        else:
            completion, prompt, cached = usage_in_tail(self._tail)
        if self._leg is not None:
            # What earlier leases said was part of this one's prompt.
            if completion is not None and self._leg.seam.only_end:
                completion = 0
            if prompt is not None:
                prompt -= self.resumed_tokens
        if completion is not None and 0 <= completion <= 1 << 31:
            lease.output_tokens = completion
        if prompt is not None and 0 < prompt <= 1 << 31:
            self.usage_prompt_tokens = prompt
            if cached is not None and 0 <= cached <= prompt:
                self.cached_tokens = cached
                if self.request.sequences == 1 and self.prefill_instance is None:
                    lease.reported_cached_tokens = cached
            if not self.request.prompt_exact and not self.resumed_tokens:
                self._driver.learn_prompt(self.request.model, self._call, prompt)

    def _drop_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.abort()

    def _stop_engine(self) -> None:
        """Close the engine's connection, made or in the making: it stops working for this request."""
        sent = self._engine is not None
        self._drop_engine()
        if self.lease is not None and self.phase is Phase.CONNECTING:
            self._driver.pool(self.lease).cancel(self)
        if self._handover is not None:
            self._leave_handover(sent)

    def _try_again(self, end: End) -> None:
        """Nothing has reached the client: the scheduler decides what becomes of the request."""
        dropped = end.outcome is Outcome.NO_RESPONSE
        if dropped and self._dropped:
            # Run twice, dropped twice: the request itself may be what kills engines.
            text = "The instances dropped the request."
            self._answer(error_responses.REJECTIONS[RejectReason.NO_RESPONSE], text, end=end)
            return
        lease, self.lease = self.lease, None
        assert lease is not None
        self._leave_handover()
        self.retries += 1
        self._dropped = self._dropped or dropped
        if dropped and self.resumes and self._leg is None:
            self.resumed += 1  # it may have been half done
        self._enter(RETRIED, self._now())
        self._driver.lease_ended(lease, end.told, retry=True)

    def _answer(
        self,
        answer: Answer,
        message: str,
        retry_after_s: float | None = None,
        *,
        end: End | None = None,
        lines: bytes = b"",
    ) -> None:
        """Answer in our own words; nothing has reached the client yet. `end` is that of the lease, if any."""
        response = self.response
        if response.state is STARTED:
            self._break(ends.BROKEN if end is None or end.outcome is Outcome.NO_RESPONSE else end, message)
            return
        if response.state is HEARTBEATS:
            self.status = 200
            response.error_event(answer, message)
            self._finish(end, answer.outcome, broken=True)
            return
        if answer.should_retry and self._may_have_run:
            answer = replace(answer, should_retry=False)
        self.status = answer.status
        response.refuse(answer, message, retry_after_s, lines)
        self._finish(end, answer.outcome)

    # --- an answer that goes on elsewhere ---

    def _lost(self, end: End, detail: str, rest: bytes = b"") -> None:
        """The engine is lost in the middle of its answer, of which `rest` is the last."""
        if rest:
            self._pass(rest)
        if not self._go_on(end):
            self._break(end, detail)

    def _given_up(self, stream: StreamedAnswer, rest: bytes) -> None:
        """The engine said that it gives up, or says something else than was said before."""
        self._drop_engine()
        event = stream.lost
        if rest:
            self._pass(rest)
        if not event:
            self._break(ends.OTHERWISE, "another instance goes on with something else")
        elif not self._go_on(ends.ERROR_EVENT):
            self._pass(event + b"\n\n")
            self._finish(ends.ERROR_EVENT, broken=True)

    def _may_go_on(self) -> bool:
        """True if the answer may go on elsewhere. Nothing of a plain one that is not whole was sent."""
        if (
            not self.resumes
            or self.resumed >= MOST_RESUMED
            or self.lease is None
            or self._handover is not None
        ):
            return False
        if self._progress is None:
            return self.response.state is NOTHING and self._whole_only
        if self._stream is not None and self._stream.cut():
            return False
        return self._ends_here or self._plan()

    def _go_on(self, end: End) -> bool:
        """Take another lease for the rest of the answer; False where it cannot go on."""
        lease, response = self.lease, self.response
        if lease is None or not self._may_go_on():
            return False
        if self._ends_here:
            response.write(response.last(_DONE_EVENT))
            self._take_usage()
            self._finish(ends.LAST_MISSING)
            return True
        if response.held_up:
            end = ends.HELD_UP
        lease.output_tokens = self.tokens_so_far
        self.lease = self._stream = self._answer_head = self._answer_length = self._deadline_at = None
        self._begun = self._dropped = self._whole_only = False
        self._tail = b""
        if response.state is NOTHING:
            self.status = 0
        self.resumed += 1
        self._enter(RESUMED, self._now())
        if self._leg is not None:
            self.resumed_tokens = self._leg.seam.generated
        self.request = self.request.goes_on(self.resumed_tokens)
        self._driver.goes_on(self, lease, end)
        return True

    def _plan(self) -> bool:
        """Make the request of the second lease; False where there is none."""
        progress = self._progress
        if progress is None:
            return True
        leg = next_leg(
            self.kind,
            self._joined,
            progress,
            hides_usage=self._call.hold_usage,
            gives_ids=self._gives_ids,
            by_text=self.by_text,
        )
        if leg is not None:
            self._leg = leg
        return leg is not None

    @property
    def _ends_here(self) -> bool:
        progress, hides = self._progress, self._call.hold_usage
        return progress is not None and ends_here(progress, self._joined, hides_usage=hides)

    @property
    def _joined(self) -> bytes:
        return self._body[0] if len(self._body) == 1 else b"".join(self._body)

    @property
    def _no_stream(self) -> End:
        """The end of a second lease whose engine did not answer with a stream."""
        if self.status >= 500:
            return ends.ERROR_EVENT
        return ends.REFUSED_IN_STREAM if self.status >= 400 else ends.OTHERWISE

    def _break(self, end: End, detail: str, rest: bytes = b"") -> None:
        """End a response that has begun so that no client takes it for complete. `rest` goes out before."""
        stream, response = self._stream, self.response
        if end is not ends.STOPPED and response.held_up:
            end = ends.HELD_UP
        if response.state is NOTHING:
            response.write(self._commit())
        resumed = self._leg is not None
        if stream is not None:
            rest += stream.cut()
        if rest:
            response.write(response.frame(rest))
        if stream is not None or resumed or response.state is HEARTBEATS:
            response.error_event(error_responses.BROKEN_STREAM, f"The answer broke off: {detail}.")
        self._finish(end, broken=True)

    def _finish(
        self,
        end: End | None,
        outcome: Outcome | None = None,
        *,
        broken: bool = False,
        client_gone: bool = False,
    ) -> None:
        """The one way out. `end` is that of the lease; `outcome` the request's, if there is none."""
        self.ended_at = self._now()
        self.ended_in = self.phase
        self._enter(ENDED, self.ended_at)
        self.end = end
        self.outcome = outcome if end is None else end.outcome
        stream, lease = self._stream, self.lease
        self.streamed = stream is not None or self._leg is not None
        if stream is not None and lease is not None and not lease.output_tokens:
            lease.output_tokens = stream.events
        self._body, self._tail = [], b""
        self._progress = self._leg = None
        self._driver.finished(self)
        if client_gone:
            return
        if broken:
            self.response.break_off()
        else:
            self.response.end()


#: Ends of a second lease of which nothing came: another instance is tried.
_SENT_AGAIN: Final = (ends.NOT_ACCEPTED, ends.LOOP, ends.MOVED)


def _patience_s(head: RequestHead) -> float:
    """Seconds that the client says it waits for an answer; infinity if it does not say."""
    patience_s = math.inf
    for name, value in head.headers:
        unit_s = _PATIENCE.get(name)
        if unit_s is not None and _NUMBER.fullmatch(value) is not None and float(value) > 0.0:
            patience_s = min(patience_s, float(value) * unit_s)
    return patience_s
