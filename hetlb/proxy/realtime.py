"""`/v1/realtime`: a request for a WebSocket, and the session that its answer is.

Bytes pass both ways as they come. What the engine sends is read along: where a frame ends (only there may a
Close frame of our own stand), its Close frame, and the token counts of `transcription.done`. Extensions are
not offered to the engine: compressed frames cannot be read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

import msgspec

from hetlb.proxy import ends
from hetlb.proxy.ends import End
from hetlb.proxy.engine_answer import EngineAnswer
from hetlb.proxy.engine_request import EngineRequest
from hetlb.proxy.exchange_states import COMMITTED, FIRST_BYTE, Phase
from hetlb.proxy.http import error_responses
from hetlb.proxy.http.error_responses import Refusal
from hetlb.proxy.http.forward_headers import response_lines
from hetlb.proxy.http.http1 import GateError, RequestHead, ResponseHead
from hetlb.proxy.http.openai_body import Call
from hetlb.proxy.http.sse import usage_in_tail
from hetlb.proxy.http.websocket import (
    BAD_DATA,
    BAD_GATEWAY,
    CLOSE,
    GOING_AWAY,
    INTERNAL_ERROR,
    POLICY,
    SERVICE_RESTART,
    TEXT,
    TRY_AGAIN_LATER,
    VERSION,
    FrameReader,
    ProtocolError,
    accept_of,
    close_code,
    close_frame,
    frame,
    is_key,
)
from hetlb.proxy.upstream import EngineConnection

if TYPE_CHECKING:
    from hetlb.proxy.exchange import Exchange

#: The end of an engine's message, where its usage stands.
_TAIL_BYTES: Final = 1 << 10
#: Random bytes drawn at once, 4 for each frame to an engine.
_MASK_BYTES: Final = 256
#: Maximum bytes of a client's message: uvicorn's limit.
_MOST_MESSAGE: Final = 16 << 20
#: Close codes with which an engine gives up by itself.
_GAVE_UP: Final = (GOING_AWAY, SERVICE_RESTART, TRY_AGAIN_LATER)
_AGREED: Final = b"upgrade: websocket\r\nconnection: upgrade\r\n"
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NEEDED: Final = b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"


def check_upgrade(head: RequestHead, body: bytes, *, open_to_all: bool) -> None:
    """Raise `GateError` unless a request is a WebSocket handshake (RFC 6455, 4.2.1).

    With `open_to_all` no key is needed: then no page of another origin may open one in a user's browser.
    """
    names = [name for name, _ in head.headers]
    fields = head.fields
    options = b",".join(value for name, value in head.headers if name == b"connection")
    asked = fields.get(b"upgrade", b"").strip().lower() == b"websocket" and names.count(b"upgrade") == 1
    if not asked or not head.http11 or b"upgrade" not in map(bytes.strip, options.lower().split(b",")):
        raise _upgrade_required("This path is a WebSocket: Upgrade: websocket is expected.")
    if fields.get(b"sec-websocket-version") != VERSION or names.count(b"sec-websocket-version") > 1:
        raise _upgrade_required("The only WebSocket version understood is 13.")
    if names.count(b"sec-websocket-key") != 1 or not is_key(fields[b"sec-websocket-key"]):
        raise GateError(400, "Exactly one Sec-WebSocket-Key of 16 bytes in base64 is expected.")
    if body or head.chunked:
        raise GateError(400, "A request for a WebSocket has no body.")
    origin = fields.get(b"origin")
    if open_to_all and origin is not None and origin.partition(b"://")[2] != fields.get(b"host"):
        raise GateError(403, "Pages of other origins may open no WebSocket here.")


def _upgrade_required(message: str) -> Refusal:
    answer = error_responses.bad_request(426, "upgrade_required")
    return Refusal(answer, message, 1.0, b"upgrade: websocket\r\nsec-websocket-version: 13\r\n")


def model_asked_for(query: bytes) -> str | None:
    """The model in the query of a request, None without one. Raises `GateError` (400) where there are two."""
    try:
        found = parse_qs(query.decode("ascii"), max_num_fields=64, errors="strict").get("model", [])
    except ValueError as error:
        raise GateError(400, "The query is malformed.") from error
    if len(found) > 1:
        raise GateError(400, "The query names more than one model.")
    return found[0] if found else None


class Handshake(EngineRequest):
    """The request for a session, with the client's key, so that the engine's answer is one to the client.

    `may_use` says which models the client's key may use, None for all of them.
    """

    __slots__ = ("call", "may_use")

    def __init__(self, outgoing: EngineRequest, call: Call, may_use: Callable[[str], bool] | None) -> None:
        super().__init__(outgoing.head, b"", outgoing.label.decode("ascii"))
        self.call = call
        self.may_use = may_use

    def send(self, connection: EngineConnection, lines: bytes, instead: bytes | None) -> None:
        fields = (self.label, _NEEDED, self.head.fields[b"sec-websocket-key"])
        lines += b"x-request-id: %b\r\n%bsec-websocket-key: %b\r\n" % fields
        for name, value in self.head.headers:
            if name == b"sec-websocket-protocol":
                lines += b"sec-websocket-protocol: %b\r\n" % value
        connection.may_upgrade = True
        connection.send(lines + b"\r\n", b"")

    def agreed(self, exchange: Exchange, head: ResponseHead) -> None:
        """The engine agrees: the session begins."""
        fields = head.fields
        if (
            fields.get(b"upgrade", b"").lower() != b"websocket"
            or fields.get(b"sec-websocket-accept") != accept_of(self.head.fields[b"sec-websocket-key"])
            or b"sec-websocket-extensions" in fields
        ):
            exchange.stop_engine()
            exchange.engine_failed(ends.JUNK, "its 101 does not answer the handshake")
            return
        exchange.session = Session(exchange, head, self)


class Session:
    """One WebSocket, from the engine's agreement to its one end."""

    __slots__ = (
        "_alias", "_closed", "_exchange", "_from_client", "_from_engine", "_full_since", "_heard_at",
        "_may_use", "_now", "_to_engine",
    )  # fmt: skip

    def __init__(self, exchange: Exchange, head: ResponseHead, asked: Handshake) -> None:
        engine, response = exchange.engine, exchange.response
        assert engine is not None, "expected an answer on a connection"
        self._exchange = exchange
        self._may_use = asked.may_use
        #: Alias that the client uses for the engine's model, None where it uses none.
        self._alias = asked.call.asked if asked.call.renamed else None
        #: Code of the Close frame, None until that came.
        self._closed: int | None = None
        #: Since when the engine takes no more, and when either side was heard last.
        self._full_since: float | None = None
        self._now = exchange.now
        now = self._heard_at = self._now()
        exchange.status, exchange.answer = 101, EngineAnswer(head, None)
        exchange.first_byte_at = now
        exchange.enter(FIRST_BYTE, now)
        response.state = COMMITTED.take(response.state)
        own, label = exchange.own_lines(now), exchange.label.encode("ascii")
        out = b"%b%b%bx-request-id: %b\r\n\r\n" % (response_lines(head), _AGREED, own, label)
        response.write(out)
        self._from_engine = FrameReader(masked=False, most_kept=_TAIL_BYTES)
        #: Frames of the client are read where it uses an alias, or where its key is not for all models.
        self._from_client: FrameReader | None = None
        if self._alias is not None or self._may_use is not None:
            self._from_client = FrameReader(masked=True, most_kept=_MOST_MESSAGE, strict=True)
        self._to_engine = engine.relay(self._engine_has_room)
        response.client.upgraded(self.client_data)

    # --- from the engine's connection ---

    def engine_body(self, payload: bytes) -> None:
        self._exchange.since = self._heard_at = self._now()
        try:
            for opcode, message in self._from_engine.feed(payload):
                if opcode == CLOSE:
                    self._closed = close_code(message)
                elif opcode == TEXT:
                    self._count(message)
        except ProtocolError as error:
            self._give_up(ends.BROKEN, f"the instance broke the protocol: {error}", whole=False)
            return
        self._exchange.response.write(payload)

    def engine_left(self) -> None:
        """The engine's connection is closed or lost, after a Close frame or without one."""
        if self._closed is None:
            self._give_up(ends.BROKEN, "the instance closed the connection")
        else:
            self._exchange.finish(self._close_end, broken=True)

    def _engine_has_room(self, room: bool) -> None:
        self._full_since = None if room else self._now()
        if self._exchange.phase is not Phase.DONE:
            self._exchange.response.client.hold(not room)

    # --- from the client's connection ---

    def client_data(self, data: bytes) -> None:
        if self._exchange.engine is None:
            return
        self._heard_at = self._now()
        if self._from_client is not None:
            try:
                data = self._checked(self._from_client.feed(data))
            except ProtocolError as error:
                self._end(ends.LEFT, error.code, str(error))
                return
        if data:
            self._to_engine(data)

    def _checked(self, messages: Iterator[tuple[int, bytes]]) -> bytes:
        """Messages as they go on. Raises `ProtocolError` at one that the client may not send."""
        out, masks, at = bytearray(), b"", 0
        for opcode, message in messages:
            if opcode == TEXT:
                message = self._renamed(message)
            if at == len(masks):
                masks, at = os.urandom(_MASK_BYTES), 0
            out += frame(opcode, message, masks[at : at + 4])
            at += 4
        return bytes(out)

    def client_gone(self) -> End:
        """The client left: for the engine the session ends now. The end of its lease."""
        return ends.LEFT if self._closed is None else self._close_end

    # --- from the clock ---

    def sweep(self, now: float, idle_s: float) -> None:
        if self._full_since is not None and now - self._full_since > idle_s:
            self._give_up(ends.STALLED, "the instance does not read")
        elif now - self._heard_at > idle_s:
            self._end(ends.IDLE, GOING_AWAY, "nothing was said for too long")

    def shut_down(self) -> None:
        self._end(ends.STOPPED, GOING_AWAY, "the proxy is shutting down")

    # --- inside ---

    @property
    def _close_end(self) -> End:
        """The end of a session that the engine closed with a Close frame."""
        if self._closed == INTERNAL_ERROR:
            return ends.ERROR_EVENT
        return ends.BROKEN if self._closed in _GAVE_UP else ends.ANSWERED

    def _give_up(self, end: End, detail: str, *, whole: bool = True) -> None:
        """The engine ended the session badly; `whole`: all that it sent has been passed on."""
        end = ends.HELD_UP if self._exchange.response.held_up else end
        self._end(end, BAD_GATEWAY if whole else None, detail)

    def _end(self, end: End, code: int | None, reason: str) -> None:
        """End the session, with a Close frame unless there was one or it would stand inside a frame."""
        self._exchange.stop_engine()
        if code is not None and self._closed is None and self._from_engine.between:
            self._closed = code
            self._exchange.response.write(close_frame(code, reason))
        self._exchange.finish(end, broken=True)

    def _count(self, message: bytes) -> None:
        """Count the tokens of `transcription.done`."""
        output, prompt, _ = usage_in_tail(message)
        exchange = self._exchange
        lease = exchange.lease
        if output is None or lease is None or not 0 <= output <= 1 << 31:
            return
        if prompt is None or not 0 <= prompt <= 1 << 31:
            prompt = 0
        lease.output_tokens += output
        exchange.usage_prompt_tokens = (exchange.usage_prompt_tokens or 0) + prompt
        if exchange.ticket is not None:
            exchange.ticket.used(prompt, output, self._now())

    def _renamed(self, message: bytes) -> bytes:
        """A message with the engine's name of the model in place of the alias.

        Raises `ProtocolError` where the key is not for that model, or cannot be told.
        """
        try:
            event = _object.decode(message)
            update = msgspec.json.decode(event.get("type", b"null")) == "session.update"
            model = msgspec.json.decode(event.get("model", b"null"))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if self._may_use is None:
                return message
            raise ProtocolError("a message is no JSON object", BAD_DATA) from error
        if not update or "model" not in event:
            return message
        serves = self._exchange.request.model
        if self._alias is not None and model == self._alias:
            event["model"] = msgspec.Raw(msgspec.json.encode(serves))
            return msgspec.json.encode(event)
        if self._may_use is None or model == serves:
            return message
        if not isinstance(model, str) or not self._may_use(model):
            raise ProtocolError("this API key is not for that model", POLICY)
        return message
