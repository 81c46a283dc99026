"""Answer of the engine of one lease: its head, the state of its body, and how it ends."""

from __future__ import annotations

from typing import Final

from hetlb.balancer.core.types import Request
from hetlb.balancer.exchange import ends
from hetlb.balancer.exchange.ends import End
from hetlb.balancer.exchange.streamed_answer import StreamedAnswer
from hetlb.balancer.http import error_responses
from hetlb.balancer.http.answer_form import GOOD, ODD, form_of_body, form_of_stream, is_usual, model_of
from hetlb.balancer.http.http1 import ResponseHead
from hetlb.balancer.http.openai_fields import AnswerFields
from hetlb.balancer.http.sse import TAIL_BYTES, is_answer, read_answer, usage_in_tail
from hetlb.balancer.http.transfer_fields import TransferWatch, harmless

#: RFC 5842, 7.2.
LOOP_STATUS: Final = 508
#: Statuses of a busy engine, if it sends a `Retry-After`.
_BUSY_STATUSES: Final = (429, 503)
_EVENTS: Final = b"text/event-stream"
#: Content types of answers in JSON, which may have fields about KV transfers.
_WITH_FIELDS: Final = (b"application/json", b"text/event-stream")


class EngineAnswer:
    """Answer of one lease. `length` is its body's, None if unknown; `stream` is None for a plain answer.

    `whole_only`: nothing goes out before all of it is there. `tail`: the last bytes of a plain body.
    """

    __slots__ = (
        "_fields", "_looked_bytes", "_tokens", "_transfers", "head", "kept", "length", "stream", "tail",
        "whole_only",
    )  # fmt: skip

    def __init__(self, head: ResponseHead, length: int | None) -> None:
        self.head = head
        self.length = length
        self.stream: StreamedAnswer | None = None
        self.whole_only = False
        self.tail = b""
        #: First bytes of a stream that are not passed on yet.
        self.kept = b""
        #: Fields of a whole answer, None unless it has a choice and its usage.
        self._fields: AnswerFields | None = None
        #: Bytes of the body that was looked at for them.
        self._looked_bytes = 0
        #: Output tokens of a whole answer by its usage.
        self._tokens: int | None = None
        #: Empties fields about KV transfers, None before the first part.
        self._transfers: TransferWatch | None = None

    @property
    def is_stream(self) -> bool:
        """True if its head says that server-sent events follow, as they are: not compressed."""
        head = self.head
        if head.status != 200 or not head.fields.get(b"content-type", b"").lower().startswith(_EVENTS):
            return False
        return self.is_legible

    @property
    def is_legible(self) -> bool:
        """True if its body is not compressed."""
        if self.head.fields.get(b"content-encoding") is None:
            return True
        codings = {value.lower() for name, value in self.head.headers if name == b"content-encoding"}
        return codings <= {b"", b"identity"}

    @property
    def refuses(self) -> bool:
        """True if the status says that the engine refused or failed the request."""
        return self.head.status >= 400

    @property
    def is_busy(self) -> bool:
        """True if the engine reports that it is busy."""
        return self.head.status in _BUSY_STATUSES

    @property
    def busy_s(self) -> float | None:
        """Seconds until a retry, None unless the engine reports that it is busy."""
        if not self.is_busy:
            return None
        from hetlb.balancer.http.retry_after import retry_after_s

        return retry_after_s(self.head.fields)

    @property
    def lost(self) -> bytes | None:
        """The event of a stream that reports the engine's failure, None without one."""
        return None if self.stream is None else self.stream.lost

    @property
    def lost_by(self) -> End:
        """The end of a lost stream."""
        return ends.ERROR_EVENT if self.stream is None else self.stream.lost_by

    @property
    def is_done(self) -> bool:
        """True if `[DONE]` of a stream was passed on, and no error came."""
        stream = self.stream
        return stream is not None and stream.done and not stream.failed and stream.lost is None

    def read_as(self, stream: StreamedAnswer) -> None:
        """Read the answer as a stream."""
        self.length = None  # removed bytes make it shorter
        self.stream = stream

    def read(self, payload: bytes, now: float) -> bytes:
        if self.stream is not None:
            return self.stream.read(payload, now)
        self.tail = (self.tail + payload)[-TAIL_BYTES:]
        return b"" if self.whole_only else payload

    def read_last(self, payload: bytes) -> bytes:
        """Look at the last bytes of the body; return the bytes to pass on, without an unfinished event."""
        if self.stream is not None:
            return self.stream.feed(payload) if payload else payload
        if payload or self.whole_only:
            self.tail = (self.tail + payload)[-TAIL_BYTES:]
        return self.tail if self.whole_only else payload

    def has_usage(self, body: bytes) -> bool:
        """Return True if the body of an answer that is not streamed has a choice and its usage."""
        looked, self._looked_bytes = self._looked_bytes, len(body)
        if looked != len(body) < TAIL_BYTES and self.head.status < 400 and self.is_legible:
            self._fields = read_answer(body)
        return self._fields is not None

    def emptied(self, payload: bytes) -> bytes:
        """Return a part of the body with the values of its fields about KV transfers emptied."""
        transfers = self._transfers
        if transfers is None:
            if not self.head.fields.get(b"content-type", b"").startswith(_WITH_FIELDS):
                return payload
            transfers = self._transfers = TransferWatch()
        return transfers.feed(payload)

    def last_emptied(self, payload: bytes) -> bytes:
        """Return the last part of the body, as `emptied` has it."""
        return payload if self._transfers is None and harmless(payload) else self.emptied(payload)

    def usage(self) -> tuple[int | None, int | None, int | None]:
        """Return completion, prompt and cached prompt tokens of the lease, by the engine's counts."""
        stream, fields = self.stream, self._fields
        if stream is not None:
            return stream.usage()
        if fields is None:
            counts = usage_in_tail(self.tail)
            self._tokens = counts[0]
            return counts
        self._tokens = fields.usage.completion_tokens
        return self._tokens, fields.usage.prompt_tokens, None

    def end(self, generates: bool) -> End:
        """Return the end of a whole answer. Call `usage` first. `generates`: its request asks for tokens."""
        stream, status = self.stream, self.head.status
        if self._fields is not None:
            return ends.ANSWERED
        if stream is not None and stream.failed:
            return ends.REFUSED_IN_STREAM if stream.refused else ends.ERROR_EVENT
        if status < 400:
            if not generates or (is_answer(self.tail) if stream is None else stream.says_tokens):
                return ends.ANSWERED
            return ends.NO_ANSWER if self.is_legible else ends.ANSWERED
        if status == 429 or (status == 503 and self.busy_s is not None):
            return ends.BUSY
        # A loop behind another proxy is no failure of that one.
        return ends.REFUSED if status < 500 or status == LOOP_STATUS else ends.SERVER_ERROR

    def is_usual(self, request: Request) -> bool:
        """Return True if the answer is plainly good. If not, `form` and `model` tell more."""
        if self._fields is None or request.streamed or request.sequences > 1:
            return False
        return is_usual(self._fields, request.model)

    def form(self, request: Request) -> int:
        """Return the form of a whole answer to a chat or a completion; `usage` was read before."""
        stream = self.stream
        may_be_short = request.sequences > 1 or (request.max_tokens or 8) <= 2
        if stream is not None:
            if stream.unread:
                return GOOD
            return form_of_stream(
                stream.sample,
                stream.last,
                stream.events,
                stream.completion_tokens,
                stream.finish,
                may_be_short,
            )
        if len(self.tail) >= TAIL_BYTES or not self.is_legible:
            return GOOD
        if request.streamed and not self.head.fields.get(b"content-type", b"").lower().startswith(_EVENTS):
            return ODD
        return form_of_body(self.tail, self._tokens, may_be_short)

    @property
    def model(self) -> str:
        """The model named in it, "" for none."""
        sample = self.tail if self.stream is None else self.stream.sample
        return model_of(sample) if len(sample) < TAIL_BYTES else ""

    def as_event(self, path: str) -> tuple[bytes, End]:
        """Return a whole answer as an event of a stream that has begun, with the end of the stream."""
        status = self.head.status
        if self.stream is None and status >= 400:
            return error_responses.upstream_error_event(status, self.tail, path), self.end(True)
        text = "The instance did not answer with a stream."
        event = error_responses.error_event(error_responses.BAD_UPSTREAM, text, path)
        # A whole answer of another kind may be what the request asked for: no failure of the instance.
        return event, ends.REFUSED if self.stream is None else ends.BROKEN
