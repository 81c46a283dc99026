"""Connections to engines: one pool per instance, one protocol per connection.

An idle connection is reused for at most `upstream_idle_s` (uvicorn closes them after 5 s); one
that fails before its answer began, having been idle before, is replaced by a fresh one without the client
noticing; a connection whose answer was not cleanly framed is never used again; trouble of this machine is
told apart from the engine's. What every request to an engine carries (its Host, its key) is put together
once, not for each; a chunk of a stream that is read whole goes on as it stands.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol, cast
from urllib.parse import urlsplit

from hetlb.addresses import refuse_special
from hetlb.core.transition import Transition
from hetlb.proxy import ends
from hetlb.proxy.access import EngineAccess
from hetlb.proxy.connection_states import (
    ANSWER_BEGUN,
    BEGUN,
    CLOSED,
    HEAD_READ,
    HELD_BACK,
    KEPT,
    READ,
    READ_ON,
    REUSED,
    TURN_TAKEN,
    UNREAD,
    EngineState,
    Reading,
)
from hetlb.proxy.ends import End
from hetlb.proxy.http.http1 import (
    ChunkedDecoder,
    GateError,
    KnownHeads,
    ResponseHead,
    head_end,
    parse_response_head,
)

#: Errors of this machine, not of the engine.
LOCAL_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
_MAX_HEAD_BYTES: Final = 32 << 10
#: Interim answers (1xx) before the answer itself: more are none.
MAX_INTERIM: Final = 16
#: Bytes of an answer that are looked at before other connections have their turn, where that is costly.
TURN_BYTES: Final = 16 << 10
#: A read of this size or more is a turn of its own: more is waiting in the kernel.
_LARGE_READ: Final = 64 << 10
#: A list of models beyond this is none.
_MAX_LIST_BYTES: Final = 1 << 20
#: Seconds that an engine may take to close a TLS connection.
_TLS_SHUTDOWN_S: Final = 1.0
#: Bodies up to this size are written in one piece with their head.
_COPIED_BYTES: Final = 16 << 10
#: Looked up here and not for every request: a member of an enum costs as much as a call.
_FRESH: Final = EngineState.FRESH
_SENT: Final = EngineState.SENT
_SENDING: Final = EngineState.SENDING
_RESENT: Final = EngineState.RESENT
_HEAD: Final = EngineState.HEAD
_BODY: Final = EngineState.BODY
_IDLE: Final = EngineState.IDLE
_CLOSED: Final = EngineState.CLOSED
_OPEN: Final = Reading.OPEN
_TURN: Final = Reading.TURN
_HELD: Final = Reading.HELD


def local_trouble(error: OSError) -> bool:
    """True if a failed connection is the fault of this machine; an address that is not found is not."""
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_MEMORY
    return error.errno in LOCAL_ERRNOS


class Carried(Protocol):
    """One request as a connection sees it: what to send, and what is told of the answer."""

    @property
    def method(self) -> bytes: ...
    @property
    def plain(self) -> bool: ...
    def engine_connected(
        self, connection: EngineConnection, own_headers: bytes, passthrough: bool
    ) -> None: ...
    def engine_identified(self) -> None: ...
    def engine_lost_idle(self) -> None: ...
    def engine_head(self, head: ResponseHead, length: int | None) -> None: ...
    def engine_events(self, chunks: bytes) -> bool: ...
    def engine_body(self, payload: bytes) -> None: ...
    def engine_end(self, payload: bytes) -> None: ...
    def engine_failed(self, end: End, detail: str) -> None: ...


class Upstream:
    """The way of exchanges to their engines."""

    __slots__ = ()

    def send(self, exchange: Carried, *, fresh: bool = False) -> None:
        """Send the exchange's request, on a connection that was not used before if `fresh`."""
        raise NotImplementedError

    def cancel(self, exchange: Carried) -> None:
        """Stop sending an exchange's request, if that is going on."""
        raise NotImplementedError


class EnginePool(Upstream):
    """The connections to one instance."""

    __slots__ = (
        "_address",
        "_checks",
        "_confined",
        "_connect_timeout_s",
        "_connecting",
        "_host",
        "_host_header",
        "_idle",
        "_idle_s",
        "_loop",
        "_lost",
        "_now",
        "_on_reconnect",
        "_port",
        "_stalled_since",
        "_tls",
        "busy",
        "call_soon",
        "closed",
        "heads",
        "origin",
        "own_headers",
        "passthrough",
    )

    def __init__(
        self,
        url: str,
        loop: asyncio.AbstractEventLoop,
        access: EngineAccess,
        *,
        connect_timeout_s: float,
        idle_s: float,
        stalled_since: Callable[[float], bool] = lambda then: False,
        on_reconnect: Callable[[bytes], None] | None = None,
    ) -> None:
        """`stalled_since` tells whether this process stood still since a time: then no engine was slow.

        `on_reconnect` gets the engine's `/v1/models` where it closed connections before: it may be another.
        """
        parts = urlsplit(url)
        assert parts.hostname is not None, f"expected a checked URL, got {url!r}"
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._host_header = b"host: " + parts.netloc.encode("ascii")
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self._loop = loop
        self._now = loop.time
        self.call_soon = loop.call_soon
        self._stalled_since = stalled_since
        self._on_reconnect = on_reconnect
        #: True if the engine closed or refused a connection since its models were last read here.
        self._lost = False
        self._checks: dict[Carried, IdentityCheck] = {}
        self.configure(access, connect_timeout_s=connect_timeout_s, idle_s=idle_s)
        #: The most recently used at the right: the others grow old and are closed.
        self._idle: deque[EngineConnection] = deque()
        self.busy: set[EngineConnection] = set()
        self._connecting: dict[Carried, asyncio.Task[None]] = {}
        self.closed = False
        self.heads = KnownHeads(_parse_answer_head)

    def configure(self, access: EngineAccess, *, connect_timeout_s: float, idle_s: float) -> None:
        """Set what holds for requests and connections from now on: key, certificates, times in seconds."""
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._address = access.address or self._host
        self._confined = access.confined
        self._tls: dict[str, Any] = {}
        if access.tls is not None:
            self._tls = {
                "ssl": access.tls,
                "server_hostname": self._host,
                "ssl_shutdown_timeout": _TLS_SHUTDOWN_S,
            }
        #: The header lines that are ours, and whether a client's own key goes along with them.
        self.own_headers = self._host_header + b"\r\n"
        self.passthrough = access.passthrough and access.authorization is None
        if access.authorization is not None:
            self.own_headers += b"authorization: " + access.authorization + b"\r\n"

    @property
    def open_connections(self) -> int:
        """Connections in use, idle or being made."""
        return len(self.busy) + len(self._idle) + len(self._connecting)  # checks are among the busy ones

    def send(self, exchange: Carried, *, fresh: bool = False) -> None:
        """Send the exchange's request on an idle connection, or on a new one."""
        if not fresh:
            idle, oldest = self._idle, self._now() - self._idle_s
            while idle:
                connection = idle.pop()
                if connection.idle_since > oldest and connection.state is _IDLE:
                    connection.begin(exchange)
                    return
                connection.close()
        self._connecting[exchange] = self._loop.create_task(self._connect(exchange))

    def cancel(self, exchange: Carried) -> None:
        """Stop connecting for an exchange, if that is going on."""
        task = self._connecting.pop(exchange, None)
        if task is not None:
            task.cancel()
        check = self._checks.pop(exchange, None)
        if check is not None:
            check.abort()

    def lost(self) -> None:
        """The engine closed or refused a connection: what answers next may be another."""
        self._lost = True

    def checked(self, check: IdentityCheck, body: bytes | None) -> None:
        """The engine's models were read, or could not be (None); the request goes on."""
        if self._checks.pop(check.exchange, None) is None:
            return
        self._lost = False
        if body is not None and self._on_reconnect is not None:
            self._on_reconnect(body)
        check.exchange.engine_identified()

    def put_back(self, connection: EngineConnection) -> None:
        """A cleanly ended answer: keep its connection for a while."""
        if self.closed:
            connection.close()
            return
        connection.idle_since = self._now()
        self._idle.append(connection)

    def forget(self, connection: EngineConnection) -> None:
        """A connection is gone."""
        self.busy.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def sweep(self, now: float) -> None:
        """Close what has been idle for too long; wait no longer for an engine to say what it serves."""
        for check in list(self._checks.values()):
            if now - check.began_at > self._connect_timeout_s:
                check.abort()
                self.checked(check, None)
        while self._idle and self._idle[0].idle_since <= now - self._idle_s:
            self._idle.popleft().close()

    def close(self) -> None:
        """Close idle connections now and the others as they end."""
        self.closed = True
        while self._idle:
            self._idle.popleft().close()

    async def _connect(self, exchange: Carried) -> None:
        end: End | None = None
        detail = ""
        began = self._now()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: EngineConnection(self), self._address, self._port, **self._tls
                )
            if self._confined:
                connection.refuse_special_peer()
            if connection.state is _CLOSED:  # before anything was sent
                end, detail = ends.NOT_ACCEPTED, "the engine closed the connection"
        except asyncio.CancelledError:
            return
        except TimeoutError:
            if self._stalled_since(began) and exchange in self._connecting:
                self._connecting[exchange] = self._loop.create_task(self._connect(exchange))
                return
            end, detail = ends.NOT_ACCEPTED, "the connection was not accepted in time"
        except OSError as error:
            end = ends.LOCAL if local_trouble(error) else ends.NOT_ACCEPTED
            detail = error.strerror or str(error)
        except UnicodeError:
            end, detail = ends.NOT_ACCEPTED, "its host can be no name"
        if self._connecting.pop(exchange, None) is None:
            # The client left in the same turn in which the connection came.
            if end is None:
                connection.close()
            return
        if end is not None:
            self._lost = True
            exchange.engine_failed(end, detail)
        elif self._lost and self._on_reconnect is not None:
            check = self._checks[exchange] = IdentityCheck(self, exchange, self._now())
            connection.begin(check)
        else:
            connection.begin(exchange)


def _parse_answer_head(raw: bytes) -> tuple[ResponseHead, int | None]:
    return parse_response_head(raw, b"POST")


class IdentityCheck:
    """Asks a fresh connection for the engine's models, for a request that waits for the answer."""

    __slots__ = ("_body", "_connection", "_pool", "_status", "began_at", "exchange", "method", "plain")

    def __init__(self, pool: EnginePool, exchange: Carried, now: float) -> None:
        self._pool = pool
        self.exchange = exchange
        self.began_at = now
        self.method = b"GET"
        self.plain = True
        self._connection: EngineConnection | None = None
        self._status = 0
        self._body = b""

    def abort(self) -> None:
        """Drop the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def engine_connected(self, connection: EngineConnection, own_headers: bytes, passthrough: bool) -> None:
        """Ask."""
        self._connection = connection
        connection.send(b"GET /v1/models HTTP/1.1\r\n%b\r\n" % own_headers, [b""])

    def engine_head(self, head: ResponseHead, length: int | None) -> None:
        """The answer begins."""
        self._status = head.status

    def engine_events(self, chunks: bytes) -> bool:
        """Nothing of it is passed on."""
        return False

    def engine_body(self, payload: bytes) -> None:
        """More of the list."""
        self._body += payload
        if len(self._body) > _MAX_LIST_BYTES:
            self.abort()
            self._pool.checked(self, None)

    def engine_end(self, payload: bytes) -> None:
        """The list is whole."""
        self._connection = None
        self._pool.checked(self, self._body + payload if self._status == 200 else None)

    def engine_identified(self) -> None:
        """A check is not checked."""

    def engine_lost_idle(self) -> None:
        """It is always the first on its connection."""

    def engine_failed(self, end: End, detail: str) -> None:
        """The request meets what the check has met, unless it may be the path that is not known there."""
        self._connection = None
        if end is ends.JUNK or end is ends.HEAD_CUT:
            self._pool.checked(self, None)
        elif self._pool._checks.pop(self.exchange, None) is not None:
            self.exchange.engine_failed(ends.NOT_ACCEPTED, detail)


class EngineConnection(asyncio.Protocol):
    """One connection to an engine; carries one exchange at a time."""

    __slots__ = (
        "_buffer", "_decoder", "_interim", "_left", "_on_room", "_pool", "_rest", "_rest_at", "_transport",
        "_turn", "exchange", "head", "idle_since", "may_upgrade", "reading", "state",
    )  # fmt: skip

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self.state = _FRESH
        self.reading = _OPEN
        self.exchange: Carried | None = None
        self.head: ResponseHead | None = None
        self.idle_since = 0.0
        #: The beginning of a head, and how many interim ones came before it.
        self._buffer = bytearray()
        self._interim = 0
        self._decoder: ChunkedDecoder | None = None
        self._left: int | None = None
        #: Bytes that were read and are looked at in later turns, from `_rest_at` on; the next turn.
        self._rest = b""
        self._rest_at = 0
        self._turn: asyncio.Handle | None = None
        #: True if the request asks for another protocol; then, what is told whether there is room to write.
        self.may_upgrade = False
        self._on_room: Callable[[bool], None] | None = None

    # --- states ---

    def _enter(self, transition: Transition[EngineState]) -> None:
        assert self.state in transition.before, f"engine connection, {self.state}: {transition.event}"
        self.state = transition.after

    def _enter_reading(self, transition: Transition[Reading]) -> None:
        assert self.reading in transition.before, f"engine connection, {self.reading}: {transition.event}"
        self.reading = transition.after

    def _leave(self) -> None:
        """This connection is of no further use: the pool forgets it, what was read of it is dropped."""
        if self.state is not _CLOSED:
            self._enter(CLOSED)
        self._pool.forget(self)
        self._drop_turn()
        self._rest, self._rest_at = b"", 0

    def refuse_special_peer(self) -> None:
        """Close and raise `OSError` where the engine's name led to where no engine can be."""
        assert self._transport is not None, "expected a connection"
        try:
            refuse_special(self._transport.get_extra_info("peername")[0])
        except OSError:
            self._transport.abort()
            raise

    # --- the exchange's side ---

    def begin(self, exchange: Carried) -> None:
        """Let `exchange` send its request."""
        self.exchange = exchange
        self.head = None
        self._decoder = None
        self.may_upgrade = False
        self._interim = 0
        self._buffer.clear()
        self._enter(REUSED if self.state is _IDLE else BEGUN)
        pool = self._pool
        pool.busy.add(self)
        exchange.engine_connected(self, pool.own_headers, pool.passthrough)

    def send(self, head: bytes, body: list[bytes]) -> None:
        """Send a whole request."""
        transport = self._transport
        assert transport is not None, "expected a connection that was made"
        if len(body) == 1 and len(body[0]) <= _COPIED_BYTES:
            transport.write(head + body[0])
        else:
            transport.writelines((head, *body))

    def relay(self, on_room: Callable[[bool], None]) -> Callable[[bytes], None]:
        """The way for bytes of the other protocol, once that was agreed on.

        `on_room` is told when there is no room for more (False) and when there is again.
        """
        transport = self._transport
        assert transport is not None, "expected a connection that was made"
        self._on_room = on_room
        return transport.write

    def pause(self) -> None:
        """Read no more for now: the client is slow, or another instance may get its request."""
        if self.reading is _HELD:
            return
        self._drop_turn()
        if self.reading is _OPEN:
            self._pause_reading()
        self._enter_reading(HELD_BACK)

    def resume(self) -> None:
        """Read on."""
        if self.reading is not _HELD:
            return
        if self._rest or (self.head is not None and self._left == 0):
            self._take_turn_later()
        else:
            self._read_on()

    def abort(self) -> None:
        """Drop the connection at once: the engine stops working for what it carries."""
        self.exchange = None
        self._leave()
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close an idle connection."""
        self._leave()
        if self._transport is not None:
            self._transport.close()

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop has its own class
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            # Bytes that no request asked for: the framing of this connection cannot be trusted.
            self.abort()
            return
        if len(data) > TURN_BYTES or self.reading is not _OPEN:
            self._rest = self._rest[self._rest_at :] + data if self._rest else data
            self._rest_at = 0
            if self.reading is _OPEN:
                self._take_turn(exchange)
            return
        decoder = self._decoder
        # By far the most common read: an event in a chunk of its own.
        if decoder is not None and decoder.between and exchange.engine_events(data):
            return
        self._receive_or_fail(exchange, data)

    def _take_turn(self, exchange: Carried) -> None:
        """Look at the next part of what was read; the others have their turn before more is read."""
        at, size = self._rest_at, len(self._rest) - self._rest_at
        # What is passed on as it stands costs nothing to look at.
        if self.head is None or self._decoder is not None or not exchange.plain:
            size = min(size, TURN_BYTES)
        data = self._rest[at : at + size]
        self._rest_at = at + size
        if self._rest_at >= len(self._rest):
            self._rest, self._rest_at = b"", 0
        if self._rest or size >= _LARGE_READ or self.reading is _TURN:
            self._take_turn_later()
        self._receive_or_fail(exchange, data)

    def _take_turn_later(self) -> None:
        if self.reading is not _TURN:
            if self.reading is _OPEN:
                self._pause_reading()
            self._enter_reading(TURN_TAKEN)
        self._turn = self._pool.call_soon(self._go_on)

    def _go_on(self) -> None:
        """The others had their turn."""
        self._turn = None
        exchange = self.exchange
        if exchange is not None and (self._rest or (self.head is not None and self._left == 0)):
            self._take_turn(exchange)
        else:
            self._read_on()

    def _drop_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.cancel()

    def _read_on(self) -> None:
        self._enter_reading(READ_ON)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _pause_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _receive_or_fail(self, exchange: Carried, data: bytes) -> None:
        try:
            self._receive(exchange, data)
        except GateError as error:
            self.abort()
            exchange.engine_failed(ends.JUNK, error.message)

    def _receive(self, exchange: Carried, data: bytes) -> None:
        if self.head is None:
            seen = len(self._buffer)
            if seen:
                self._buffer += data
                if not head_end(self._buffer, _MAX_HEAD_BYTES, seen=seen):
                    return
                data = bytes(self._buffer)
                self._buffer.clear()
            while True:
                end = head_end(data, _MAX_HEAD_BYTES)
                if not end:
                    self._buffer += data
                    if self.state is not _HEAD:
                        self._enter(ANSWER_BEGUN)
                    return
                raw, data = data[:end], data[end:]
                if exchange.method == b"HEAD":
                    head, length = parse_response_head(raw, b"HEAD")
                else:
                    head, length = self._pool.heads.find(raw)
                if head.status >= 200:
                    break
                if head.status == 101:
                    if not self.may_upgrade:
                        raise GateError(502, "The engine switched protocols.")
                    length = None  # what follows ends with the connection
                    break
                self._interim += 1
                if self._interim > MAX_INTERIM:
                    raise GateError(502, f"The engine sent more than {MAX_INTERIM} interim answers.")
            self._enter(HEAD_READ)
            self.head = head
            self._decoder = ChunkedDecoder() if head.chunked else None
            self._left = length
            exchange.engine_head(head, length)
            if self.exchange is None:
                return
            # What follows the head waits where the exchange says so, and the end of an empty body.
            if self.reading is _HELD and self._transport is not None:
                self._rest, self._rest_at = data + self._rest[self._rest_at :], 0
                return
        if self._decoder is not None:
            payload = self._decoder.feed(data) if data else b""
            if not self._decoder.done:
                if payload:
                    exchange.engine_body(payload)
                return
            clean = not self._decoder.surplus and not self._rest
        elif self._left is not None:
            payload = data[: self._left]
            self._left -= len(payload)
            if self._left:
                if payload:
                    exchange.engine_body(payload)
                return
            clean = len(data) == len(payload) and not self._rest
        else:
            if data:
                exchange.engine_body(data)
            return
        self._end(exchange, payload, clean)

    def _end(self, exchange: Carried, payload: bytes, clean: bool) -> None:
        """The answer is whole: free the connection first, so that what comes next may use it."""
        assert self.head is not None
        self.exchange = None
        self._pool.busy.discard(self)
        transport = self._transport
        # An early answer leaves a request half-sent.
        whole = transport is not None and not transport.get_write_buffer_size()
        if clean and whole and self.head.keep_alive and transport is not None and not transport.is_closing():
            self._enter(KEPT)
            if self.reading is not _OPEN:
                self._drop_turn()
                self._read_on()
            self._pool.put_back(self)
        else:
            self.close()
        exchange.engine_end(payload)

    def eof_received(self) -> bool:
        if self.exchange is None:
            self._leave()  # the transport closes in a later turn: it must not be taken until then
            self._pool.lost()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        left = self.state is not _CLOSED
        self._transport = None
        while self._rest and self.exchange is not None:  # what came before the end comes first
            self._drop_turn()
            self._take_turn(self.exchange)
        state = self.state
        exchange, self.exchange = self.exchange, None
        self._leave()
        if left:
            self._pool.lost()  # none of our own doing
        if exchange is None:
            return
        if state is _RESENT:
            # It was closed while idle and we learnt it too late: that is no failure.
            exchange.engine_lost_idle()
        elif state is _BODY:
            if self._decoder is None and self._left is None and exc is None:
                exchange.engine_end(b"")
            else:
                exchange.engine_failed(ends.BROKEN, "the engine's answer broke off")
        else:
            # Part of an answer is an answer: only an engine that said nothing may be replaced.
            end = ends.HEAD_CUT if state is _HEAD else ends.UNREAD if state is _SENDING else ends.DROPPED
            exchange.engine_failed(end, "the engine closed the connection")

    def pause_writing(self) -> None:
        # A request was written in one go: nothing to hold back.
        if self.state is _SENT:
            self._enter(UNREAD)
        if self._on_room is not None:
            self._on_room(False)

    def resume_writing(self) -> None:
        if self.state is _SENDING:
            self._enter(READ)
        if self._on_room is not None:
            self._on_room(True)
