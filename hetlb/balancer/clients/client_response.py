"""Response to one client: its head, its framing, heartbeats before it, and answers in hetlb's own words.

Nothing but heartbeats goes out before the first byte of the engine's body: a failure is an honest status.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final, Protocol

from hetlb.balancer.core.state_transition import Transition
from hetlb.balancer.exchange import ends
from hetlb.balancer.exchange.exchange_states import COMMITTED, HEARTBEAT, STREAM_FOLLOWS, Response
from hetlb.balancer.http import error_responses
from hetlb.balancer.http.error_responses import Answer
from hetlb.balancer.http.forward_headers import response_lines
from hetlb.balancer.http.http1 import RequestHead, ResponseHead, number

#: Headers that say how long a client waits, and the seconds in their units: OpenAI's SDKs, Envoy.
_PATIENCE: Final = {b"x-stainless-read-timeout": 1.0, b"x-envoy-expected-rq-timeout-ms": 1e-3}
#: A client gets an answer these seconds before its own timeout.
_MARGIN_S: Final = 1.0
NOTHING: Final = Response.NOTHING
HEARTBEATS: Final = Response.HEARTBEATS
STARTED: Final = Response.STARTED
_HEARTBEAT: Final = b": waiting\n\n"
_WAITING: Final = ResponseHead()
_WAITING.status, _WAITING.reason = 200, b"OK"
_WAITING.headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_LAST_CHUNK: Final = b"0\r\n\r\n"


class ClientSide(Protocol):
    """Interface of an exchange's client connection."""

    @property
    def address(self) -> str: ...
    @property
    def cors(self) -> bytes: ...
    @property
    def write(self) -> Callable[[bytes], None]: ...
    def hand_over(self, protocol: asyncio.Protocol) -> tuple[asyncio.Transport, bytes]: ...
    def end(self, *, keep: bool) -> None: ...
    def break_off(self) -> None: ...
    def forsake(self, exchange: object) -> None: ...


class ClientResponse:
    """The response to one request: its state, the bytes that are sent, and the pauses of a slow client."""

    __slots__ = (
        "_comments", "_head", "_held_s", "_label", "_patience_s", "beat_at", "chunked", "client", "closes",
        "paused_since", "state", "write",
    )  # fmt: skip

    def __init__(self, client: ClientSide, head: RequestHead, label: str, now: float, comments: bool) -> None:
        """`label` is the request's `x-request-id`; `comments`: the answer is a stream that may hold some."""
        self.client = client
        self._head = head
        self._label = label.encode("ascii")
        self._comments = comments
        #: Seconds that the client waits; read from the head only if it does have to wait.
        self._patience_s: float | None = None
        #: Sends bytes to the client.
        self.write = client.write
        self.state = NOTHING
        #: Time of the last heartbeat.
        self.beat_at = now
        #: True if the body goes out in chunks.
        self.chunked = False
        #: True if the client was told that the connection ends with this answer.
        self.closes = False
        #: Since when the client does not read, and for how long it did not before.
        self.paused_since: float | None = None
        self._held_s = 0.0

    # --- the engine's answer ---

    def head(
        self,
        answer: ResponseHead,
        length: int | None,
        lines: bytes,
        transition: Transition[Response] = COMMITTED,
    ) -> bytes:
        """Return the client's head; afterwards the answer cannot be another one.

        `answer` is the engine's, `length` its body's where it is known, `lines` are of hetlb's own.
        """
        asked, delimited = self._head, True
        self.state = transition.take(self.state)
        out = b"%b%b%bx-request-id: %b\r\n" % (response_lines(answer), lines, self.client.cors, self._label)
        if length is not None:
            if asked.method == b"HEAD":
                out += b"content-length: %b\r\n" % answer.fields.get(b"content-length", b"0")
            elif answer.status not in (204, 304):
                out += b"content-length: %d\r\n" % length
        elif asked.http11:
            self.chunked = True
            out += b"transfer-encoding: chunked\r\n"
        else:
            delimited = False  # the client can tell where the answer ends by the end of the connection alone
        if not asked.keep_alive or not delimited:
            self.closes = True
            out += b"connection: close\r\n"
        elif not asked.http11:
            out += b"connection: keep-alive\r\n"
        return out + b"\r\n"

    def frame(self, payload: bytes) -> bytes:
        """Return a part of the body as it is written."""
        if self.chunked and payload:
            return b"%x\r\n%b\r\n" % (len(payload), payload)
        return payload

    def last(self, payload: bytes) -> bytes:
        return self.frame(payload) + _LAST_CHUNK if self.chunked else payload

    def stream_follows(self) -> None:
        if self.state is HEARTBEATS:
            self.state = STREAM_FOLLOWS.take(self.state)

    # --- in hetlb's own words ---

    @property
    def may_beat(self) -> bool:
        """True if heartbeats have begun, or the client understands comments, and unknown lengths."""
        return self.state is HEARTBEATS or (self._comments and self._head.http11)

    def given_up_at(self, since: float, arrived_at: float) -> float:
        """Return the time at which the client stops waiting for the rest of an answer."""
        if self.state is HEARTBEATS:
            return math.inf  # heartbeats keep it from that
        if self._patience_s is None:
            self._patience_s = max(0.0, _patience_s(self._head) - _MARGIN_S)
        return (since if self.state is STARTED else arrived_at) + self._patience_s

    def beat(self, now: float, comment: bytes = _HEARTBEAT) -> None:
        """Send a heartbeat to the client of a stream; the first time this sends a head, 200."""
        self.beat_at = now
        if self.state is NOTHING:
            self.write(self.head(_WAITING, None, b"", HEARTBEAT))
        self.write(self.frame(comment))

    def error_event(self, answer: Answer, message: str) -> None:
        self.write(self.frame(error_responses.error_event(answer, message, self._head.path)))

    def refuse(self, answer: Answer, message: str, retry_after_s: float | None, lines: bytes) -> None:
        """Answer with an error, whole; `lines` are its header lines."""
        lines = b"x-request-id: %b\r\n%b%b" % (self._label, lines, self.client.cors)
        close, head_only = not self._head.keep_alive, self._head.method == b"HEAD"
        self.write(
            error_responses.refusal(
                answer, message, retry_after_s, lines, self._head.path, close=close, head_only=head_only
            )
        )

    # --- the client's reading ---

    def pause(self, now: float) -> None:
        """Hold the answer: the client reads too slowly."""
        if self.paused_since is None:
            self.paused_since = now

    def read_on(self, now: float) -> bool:
        """Go on: the client has caught up. Return True if it had not read for a while."""
        if self.paused_since is None:
            return False
        self._held_s += now - self.paused_since
        self.paused_since = None
        return True

    @property
    def held_up(self) -> bool:
        """True if the client has not read for `HELD_UP_S`: this may be why its answer broke off."""
        return self.paused_since is not None or self._held_s >= ends.HELD_UP_S


def _patience_s(head: RequestHead) -> float:
    """Return the seconds that the client waits for an answer by its own headers; infinity without any."""
    patience_s = math.inf
    for name, value in head.headers:
        if (unit_s := _PATIENCE.get(name)) is not None and (stated := number(value)):
            patience_s = min(patience_s, stated * unit_s)
    return patience_s
