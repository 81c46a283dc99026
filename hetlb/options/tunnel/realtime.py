"""`/v1/realtime`: a request for a WebSocket, and the tunnel that its answer is.

Once the engine has agreed, both transports are handed over: bytes pass both ways unread, and the lease lasts
until either side closes. The model is the handshake's.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from typing import Final
from urllib.parse import parse_qs, parse_qsl, urlencode

from hetlb.balancer.config.fleet_tables import ProxyTable
from hetlb.balancer.core.types import Lease
from hetlb.balancer.engines.upstream import EngineConnection
from hetlb.balancer.exchange import ends
from hetlb.balancer.exchange.attempt import Attempt
from hetlb.balancer.exchange.driver import Driver, Handshake
from hetlb.balancer.exchange.ends import End
from hetlb.balancer.exchange.engine_answer import EngineAnswer
from hetlb.balancer.exchange.exchange import Exchange
from hetlb.balancer.exchange.exchange_states import COMMITTED, FIRST_BYTE, Phase
from hetlb.balancer.exchange.plain_attempt import SWITCHED, Handling, Plain
from hetlb.balancer.http import error_responses
from hetlb.balancer.http.error_responses import Refusal
from hetlb.balancer.http.forward_headers import response_lines
from hetlb.balancer.http.http1 import GateError, RequestHead

#: The only version there is.
VERSION: Final = b"13"
_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")


def is_key(value: bytes) -> bool:
    """Return True for a Sec-WebSocket-Key: 16 bytes in base64."""
    return _KEY.fullmatch(value) is not None


def accept_of(key: bytes) -> bytes:
    """Return the Sec-WebSocket-Accept that answers a Sec-WebSocket-Key."""
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())


_AGREED: Final = b"upgrade: websocket\r\nconnection: upgrade\r\n"
_NEEDED: Final = b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
_DONE: Final = Phase.DONE


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
    """Return the model in a request's query, None without one. Raises `GateError` (400) for two."""
    try:
        found = parse_qs(query.decode("ascii"), max_num_fields=64, errors="strict").get("model", [])
    except ValueError as error:
        raise GateError(400, "The query is malformed.") from error
    if len(found) > 1:
        raise GateError(400, "The query names more than one model.")
    return found[0] if found else None


class TunnelHandshake(Handshake):
    """A checked request for a tunnel. `model` is the requested one, None without any."""

    __slots__ = ("_driver", "_head")

    def __init__(self, driver: Driver, head: RequestHead, body: bytes, *, open_to_all: bool) -> None:
        """Raise `GateError` if the request does not fit a tunnel; `open_to_all`: see `check_upgrade`."""
        check_upgrade(head, body, open_to_all=open_to_all)
        self._driver = driver
        self._head = head
        self.model = model_asked_for(head.query)

    def with_model(self, model: str) -> RequestHead:
        """Return the head with the engine's name of the model in its query, in place of an alias."""
        query = [
            (name, model if name == "model" else value)
            for name, value in parse_qsl(self._head.query.decode())
        ]
        renamed = self._head.closing()
        renamed.query = urlencode(query).encode("ascii")
        return renamed

    def attempt(self, exchange: Exchange, lease: Lease, gives_ids: bool, max_model_len: int) -> Plain:
        return Plain(self._driver, exchange, lease, _HANDSHAKE)


class TunnelEnd(asyncio.Protocol):
    """One side of a tunnel: its bytes go to the transport of the other side."""

    def __init__(self, tunnel: Tunnel, *, of_client: bool) -> None:
        self._tunnel = tunnel
        self._of_client = of_client

    def data_received(self, data: bytes) -> None:
        self._tunnel.came(data, from_client=self._of_client)

    def eof_received(self) -> bool:
        self._tunnel.left(None, by_client=self._of_client)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._tunnel.left(exc, by_client=self._of_client)

    def pause_writing(self) -> None:
        self._tunnel.full(of_client=self._of_client, full=True)

    def resume_writing(self) -> None:
        self._tunnel.full(of_client=self._of_client, full=False)


class Agreement(Handling):
    """Handling of a handshake with the client's own key, so that the engine's answer is one to the client."""

    __slots__ = ()

    def request(self, attempt: Plain, connection: EngineConnection) -> tuple[bytes, bytes]:
        head = attempt.exchange.outgoing.head
        key = head.fields[b"sec-websocket-key"]
        lines = b"%b%bsec-websocket-key: %b\r\n" % (attempt.head_lines(connection.pool), _NEEDED, key)
        for name, value in head.headers:
            if name == b"sec-websocket-protocol":
                lines += b"sec-websocket-protocol: %b\r\n" % value
        connection.may_upgrade = True
        return lines, b""

    def head(self, attempt: Plain, answer: EngineAnswer) -> None:
        """Begin the tunnel if the engine agrees; else it answers like any other."""
        head, exchange = answer.head, attempt.exchange
        if head.status != SWITCHED:
            super().head(attempt, answer)
            return
        fields, key = head.fields, exchange.outgoing.head.fields[b"sec-websocket-key"]
        if (
            fields.get(b"upgrade", b"").lower() != b"websocket"
            or fields.get(b"sec-websocket-accept") != accept_of(key)
            or b"sec-websocket-extensions" in fields
        ):
            attempt.stop()
            attempt.engine_failed(ends.JUNK, "its 101 does not answer the handshake")
            return
        record, response = exchange.record, attempt.response
        now = record.first_byte_at = exchange.now()
        attempt.driver.scheduling.first_token(attempt.lease, now)
        exchange.enter(FIRST_BYTE, now)
        response.state = COMMITTED.take(response.state)
        own, label = record.own_lines(now), record.label.encode("ascii")
        response.write(b"%b%b%bx-request-id: %b\r\n\r\n" % (response_lines(head), _AGREED, own, label))
        assert attempt.engine is not None, "expected an answer on a connection"
        exchange.attempt = Tunnel(exchange, attempt.engine, now)


_HANDSHAKE: Final = Agreement(upgrades=True)


class Tunnel(Attempt):
    """One WebSocket in place of its handshake: both transports are its own, until either side closes."""

    __slots__ = (
        "_client_full_since", "_engine", "_engine_full_since", "_heard_at", "_to_client", "_to_engine",
        "exchange",
    )  # fmt: skip

    def __init__(self, exchange: Exchange, engine: EngineConnection, now: float) -> None:
        """Take both transports over, with the bytes behind either head."""
        super().__init__(exchange.record.method)
        self.exchange = exchange
        self._engine = engine
        #: Time of the last bytes of either side, and the times since which each takes no more.
        self._heard_at = now
        self._client_full_since: float | None = None
        self._engine_full_since: float | None = None
        to_client, from_client = exchange.response.client.hand_over(TunnelEnd(self, of_client=True))
        to_engine, from_engine = engine.hand_over(TunnelEnd(self, of_client=False))
        self._to_client, self._to_engine = to_client, to_engine
        if from_engine:
            to_client.write(from_engine)
        if from_client:
            to_engine.write(from_client)

    def leave(self) -> None:
        self._engine.abort()

    def came(self, data: bytes, *, from_client: bool) -> None:
        """Pass on the bytes of one side."""
        self._heard_at = self.exchange.now()
        other = self._to_engine if from_client else self._to_client
        other.write(data)

    def full(self, *, of_client: bool, full: bool) -> None:
        """Read the other side only while there is room to write to this one."""
        since = self.exchange.now() if full else None
        if of_client:
            self._client_full_since, other = since, self._to_engine
        else:
            self._engine_full_since, other = since, self._to_client
        if other.is_closing():
            return
        if full:
            other.pause_reading()
        else:
            other.resume_reading()

    def left(self, error: Exception | None, *, by_client: bool) -> None:
        """Close the other side too, once all written bytes are out: one side has closed."""
        if by_client:
            self._end(ends.LEFT)
        else:
            self._end(ends.ANSWERED if error is None else ends.BROKEN)

    def sweep(self, now: float, table: ProxyTable) -> None:
        client_since, engine_since = self._client_full_since, self._engine_full_since
        if client_since is not None and now - client_since > table.write_timeout_s:
            self._to_client.abort()
            self._end(ends.LEFT)
        elif engine_since is not None and now - engine_since > table.idle_timeout_s:
            self._end(ends.STALLED)
        elif now - self._heard_at > table.idle_timeout_s:
            self._end(ends.IDLE)

    def _end(self, end: End) -> None:
        exchange = self.exchange
        if exchange.phase is _DONE:
            return
        try:
            exchange.finish(end, broken=True)
        except Exception as error:
            exchange.fault(error)
