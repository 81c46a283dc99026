"""`/v1/realtime`: a request for a WebSocket, and the session that it becomes.

Until the engine answers, a session is a request like any other. Its 101 is the head of the answer; then bytes
pass both ways as they come, and its one lease lasts until either side ends. What the engine sends is read
along: where a frame ends (only there may a Close frame of our own stand), its Close frame, and the token
counts of `transcription.done`. Extensions are not offered to the engine: compressed frames cannot be read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import parse_qs

import msgspec

from hetlb.core.types import Outcome
from hetlb.proxy import ends
from hetlb.proxy.ends import End
from hetlb.proxy.engine_answer import EngineAnswer
from hetlb.proxy.exchange import Exchange
from hetlb.proxy.exchange_states import COMMITTED, FIRST_BYTE, WRITTEN, Phase
from hetlb.proxy.frame_flow import FrameFlow, Message
from hetlb.proxy.http import error_responses
from hetlb.proxy.http.error_responses import Refusal
from hetlb.proxy.http.forward_headers import response_lines
from hetlb.proxy.http.http1 import GateError, RequestHead, ResponseHead
from hetlb.proxy.http.sse import usage_in_tail
from hetlb.proxy.upstream import EngineConnection
from hetlb.websocket import (
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

#: The end of an engine's message, where its usage stands.
_TAIL_BYTES: Final = 1 << 10
#: The longest message of a client that is looked at: uvicorn's limit.
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


class Session(Exchange):
    """One WebSocket, from the request for it to its one end."""

    #: True once the engine has agreed; the code of its Close frame, None until that came.
    _open: bool = False
    _closed: int | None = None
    #: Frames of either side, from the engine's agreement on. Those of the client are read where it uses an
    #: alias, which becomes the engine's own name of the model, or where its key is not for all models.
    _frames: FrameReader
    _from_engine: FrameFlow
    _from_client: FrameFlow | None = None
    #: True if a key may use a model; None where it may use all of them.
    may_use: Callable[[str], bool] | None = None
    #: True if the engine's connection is closed, and part of what it sent waits.
    _engine_left: bool = False
    _to_engine: Callable[[bytes], None] | None = None
    #: Since when the engine takes no more, and when either side was heard last.
    _full_since: float | None = None
    _heard_at: float = 0.0

    # --- from the engine's connection ---

    def engine_connected(self, connection: EngineConnection, own_headers: bytes, passthrough: bool) -> None:
        """Send the handshake: the client's key, so that the engine's answer is one to the client."""
        self.engine = connection
        self.enter(WRITTEN, self._now())
        lines = self._driver.forward_rules.request_lines(self.outgoing.head, passthrough=passthrough)
        if self.trace is not None:
            lines = self.trace.onto(lines)
        key = self.outgoing.head.fields[b"sec-websocket-key"]
        lines = b"%b%bx-request-id: %b\r\n%bsec-websocket-key: %b\r\n" % (
            lines, own_headers, self.outgoing.label, _NEEDED, key,
        )  # fmt: skip
        for name, value in self.outgoing.head.headers:
            if name == b"sec-websocket-protocol":
                lines += b"sec-websocket-protocol: %b\r\n" % value
        connection.may_upgrade = True
        connection.send(lines + b"\r\n", [b""])

    def engine_head(self, head: ResponseHead, length: int | None) -> None:
        """The engine agrees, or answers like any other request."""
        if head.status != 101:
            super().engine_head(head, length)
            return
        fields, engine = head.fields, self.engine
        key = self.outgoing.head.fields[b"sec-websocket-key"]
        assert engine is not None, "expected an answer on a connection"
        if (
            fields.get(b"upgrade", b"").lower() != b"websocket"
            or fields.get(b"sec-websocket-accept") != accept_of(key)
            or b"sec-websocket-extensions" in fields
        ):
            self.stop_engine()
            self.engine_failed(ends.JUNK, "its 101 does not answer the handshake")
            return
        now = self._now()
        self.status, self.answer = 101, EngineAnswer(head, length)
        self.first_byte_at = self._heard_at = now
        self.enter(FIRST_BYTE, now)
        self.response.enter(COMMITTED)
        assert self.lease is not None
        out = b"%b%bx-hetlb-instance: %b\r\nx-request-id: %b\r\n" % (
            response_lines(head), _AGREED, self.lease.instance.encode("ascii"), self.label.encode("ascii"),
        )  # fmt: skip
        if self.ticket is not None:
            out += self.ticket.headers(now)
        self.response.write(out + b"\r\n")
        self._frames = FrameReader(masked=False, most_kept=_TAIL_BYTES)
        self._from_engine = FrameFlow(self._frames, self._engine_said, self._engine_broke, self._hold_engine)
        if self._call.renamed or self.may_use is not None:
            reader = FrameReader(masked=True, most_kept=_MOST_MESSAGE, strict=True)
            self._from_client = FrameFlow(reader, self._client_said, self._client_broke, self._hold_client)
        self._open = True
        self._to_engine = engine.relay(self._engine_has_room)
        self.response.client.upgraded(self.client_data)

    def engine_body(self, payload: bytes) -> None:
        """Pass on what the engine says."""
        if not self._open:
            super().engine_body(payload)
            return
        self.since = self._heard_at = self._now()
        self._from_engine.feed(payload)

    def _engine_said(self, data: bytes, messages: Sequence[Message]) -> None:
        self.response.write(data)
        for opcode, message in messages:
            if opcode == CLOSE:
                self._closed = close_code(message)
            elif opcode == TEXT:
                self._count(message)

    def _engine_broke(self, error: ProtocolError) -> None:
        self._give_up(ends.BROKEN, f"the instance broke the protocol: {error}", whole=False)

    def _hold_engine(self, held: bool) -> None:
        """Read the engine no further while what it sent waits, or the client is slow."""
        if self.engine is not None and held:
            self.engine.pause()
        elif self.engine is not None and self.response.held_since is None:
            self.engine.resume()
        if not held and self._engine_left:
            self._engine_over()

    def engine_end(self, payload: bytes) -> None:
        """The engine closed the connection, after a Close frame or without one."""
        if not self._open:
            super().engine_end(payload)
            return
        self.engine = None
        if self._from_engine.waits:
            self._engine_left = True
        else:
            self._engine_over()

    def _engine_over(self) -> None:
        """All that the engine sent was passed on, and its connection is closed."""
        if self._closed is None:
            self._give_up(ends.BROKEN, "the instance closed the connection")
        else:
            self.finish(self._close_end, broken=True)

    def engine_failed(self, end: End, detail: str) -> None:
        """The engine, or this machine, failed."""
        if self._open:
            self.engine_end(b"")
        else:
            super().engine_failed(end, detail)

    def _engine_has_room(self, room: bool) -> None:
        self._full_since = None if room else self._now()
        self._hold_client(not room)

    def resume(self) -> None:
        """The client has caught up."""
        if self._open and self._from_engine.waits:
            self.response.resume(self._now())
        else:
            super().resume()

    # --- from the client's connection ---

    def client_data(self, data: bytes) -> None:
        """Pass on what the client says."""
        write = self._to_engine
        if write is None or self.engine is None:
            return
        self._heard_at = self._now()
        if self._from_client is None:
            write(data)
        else:
            self._from_client.feed(data)

    def _client_said(self, data: bytes, messages: Sequence[Message]) -> None:
        """Pass on whole messages. Raises `ProtocolError` at one that the client may not send."""
        masks = os.urandom(4 * len(messages))
        out = []
        for number, (opcode, message) in enumerate(messages):
            if opcode == TEXT:
                message = self._checked(message)
            out.append(frame(opcode, message, masks[4 * number : 4 * number + 4]))
        if self._to_engine is not None and out:
            self._to_engine(b"".join(out))

    def _client_broke(self, error: ProtocolError) -> None:
        self.stop_engine()
        self._close_client(error.code, str(error))
        self.finish(ends.LEFT, broken=True)

    def _hold_client(self, held: bool) -> None:
        """Read the client no further while what it sent waits, or the engine has no room."""
        waits = self._from_client is not None and self._from_client.waits
        if self.phase is not Phase.DONE:
            self.response.client.hold(waits or self._full_since is not None)

    def client_gone(self) -> None:
        """The client left: for the engine the session ends now."""
        if self._closed is not None and self.phase is not Phase.DONE:
            self.stop_engine()
            self.finish(self._close_end, client_gone=True)
        else:
            super().client_gone()

    # --- from the clock ---

    def sweep(self, now: float, first_byte_s: float, idle_s: float, heartbeat_s: float = 0.0) -> None:
        """End what has waited for too long."""
        if not self._open:
            super().sweep(now, first_byte_s, idle_s, heartbeat_s)
        elif self.response.held_since is not None:
            return  # `ClientConnection.sweep` ends a client that does not read
        elif self._full_since is not None and now - self._full_since > idle_s:
            self.stop_engine()
            self._give_up(ends.STALLED, "the instance does not read")
        elif now - self._heard_at > idle_s:
            self.stop_engine()
            self._close_client(GOING_AWAY, "nothing was said for too long")
            self.finish(ends.IDLE, broken=True)

    def shut_down(self) -> None:
        """The grace period is over."""
        if not self._open:
            super().shut_down()
            return
        self.stop_engine()
        self._close_client(GOING_AWAY, "the proxy is shutting down")
        self.finish(ends.STOPPED, broken=True)

    # --- inside ---

    @property
    def _close_end(self) -> End:
        """The end of a session that the engine closed with a Close frame."""
        if self._closed == INTERNAL_ERROR:
            return ends.ERROR_EVENT
        return ends.BROKEN if self._closed in _GAVE_UP else ends.ANSWERED

    def _give_up(self, end: End, detail: str, *, whole: bool = True) -> None:
        """The engine ended the session badly; `whole`: all that it sent has been passed on."""
        self.stop_engine()
        if whole:
            self._close_client(BAD_GATEWAY, detail)
        self.finish(ends.HELD_UP if self.response.held_up else end, broken=True)

    def _close_client(self, code: int, reason: str) -> None:
        """Send a Close frame, unless there was one or it would stand inside a frame."""
        if self._closed is None and self._frames.between:
            self._closed = code
            self.response.write(close_frame(code, reason))

    def _count(self, message: bytes) -> None:
        """Count the tokens of `transcription.done`."""
        output, prompt, _ = usage_in_tail(message)
        lease = self.lease
        if output is None or lease is None or not 0 <= output <= 1 << 31:
            return
        if prompt is None or not 0 <= prompt <= 1 << 31:
            prompt = 0
        lease.output_tokens += output
        self.usage_prompt_tokens = (self.usage_prompt_tokens or 0) + prompt
        if self.ticket is not None:
            self.ticket.used(prompt, output, self._now())

    def finish(
        self,
        end: End | None,
        outcome: Outcome | None = None,
        *,
        broken: bool = False,
        client_gone: bool = False,
    ) -> None:
        if self._open:
            self._from_engine.close()
        if self._from_client is not None:
            self._from_client.close()
        super().finish(end, outcome, broken=broken, client_gone=client_gone)

    def _checked(self, message: bytes) -> bytes:
        """A message with the engine's name of the model in place of the alias.

        Raises `ProtocolError` where the key is not for that model, or cannot be told.
        """
        try:
            event = _object.decode(message)
            update = msgspec.json.decode(event.get("type", b"null")) == "session.update"
            model = msgspec.json.decode(event.get("model", b"null"))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if self.may_use is None:
                return message
            raise ProtocolError("a message is no JSON object", BAD_DATA) from error
        if not update or "model" not in event:
            return message
        if self._call.renamed and model == self._call.asked:
            event["model"] = msgspec.Raw(msgspec.json.encode(self.request.model))
            return msgspec.json.encode(event)
        if self.may_use is None or model == self.request.model:
            return message
        if not isinstance(model, str) or not self.may_use(model):
            raise ProtocolError("this API key is not for that model", POLICY)
        return message
