"""Connections of clients: requests are read, one at a time, and answered in order.

A client that leaves is noticed in every phase; nothing is routed before its head passed the gate,
nor before its whole body passed the reader; what is held of bodies and of requests behind the one being
answered is bounded. No connection has more than one read, or `TURN_BYTES` of what is costly to read, looked
at before the others have their turn; its time limits run from the first byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Final, cast

from hetlb.config.fleet import ProxyTable
from hetlb.proxy.access import Tenant
from hetlb.proxy.driver import ExchangeDriver
from hetlb.proxy.exchange import Exchange
from hetlb.proxy.http import error_responses
from hetlb.proxy.http.error_responses import Refusal
from hetlb.proxy.http.http1 import (
    MAX_SMALL_CHUNKS,
    ChunkedDecoder,
    GateError,
    KnownHeads,
    RequestHead,
    head_end,
    parse_request_head,
)
from hetlb.proxy.http.multipart import FormReader
from hetlb.proxy.router import Router

#: Bytes of a next request that may wait behind the one being answered.
_MAX_PIPELINED: Final = 64 << 10
#: Bytes of a chunked body that are decoded before other connections have their turn.
TURN_BYTES: Final = 64 << 10
#: So many connections that have much to read go on in one turn of the loop.
AT_ONCE: Final = 8
#: A read of this size or more is a turn of its own: more is waiting in the kernel.
_LARGE_READ: Final = 128 << 10
#: So large a body is looked at in a turn of its own.
_LARGE_BODY: Final = 256 << 10
#: Empty lines before a request: RFC 9112, 2.2 asks to ignore one at least.
MAX_BLANK_LINES: Final = 8
#: Smaller pieces of a body are kept in one buffer: an object for each would take more memory than they.
_SMALL_PIECE: Final = 4 << 10
#: A body that has just begun may be as slow as it likes.
_BODY_GRACE_S: Final = 5.0
#: No body may stop for longer.
_BODY_STOP_S: Final = 10.0
#: How long a refused client may still send before its connection is dropped.
LINGER_S: Final = 2.0
#: What the kernel may hold of an answer for a client that does not read.
_SEND_BUFFER: Final = 64 << 10


class Clients:
    """All open connections, and what they share."""

    def __init__(self, driver: ExchangeDriver, router: Router) -> None:
        self.driver = driver
        self.router = router
        self.table: ProxyTable = driver.table
        self.heads = KnownHeads(parse_request_head)
        #: Oldest first (the values say nothing).
        self.open: dict[ClientConnection, None] = {}
        #: Bytes of bodies that have not come whole yet, over all connections.
        self.held_bytes = 0
        #: Those that were a WebSocket and wait for the client's side to close; told when there is none.
        self.parting: set[ClientConnection] = set()
        self.all_parted: asyncio.Future[None] | None = None
        #: True if each connection ends with the answer it is at.
        self.stopping = False
        #: True if connections are still served, each with one more answer that says that it is the last.
        self.leaving = False
        #: Those with more to read than one turn takes, in the order in which they asked for another.
        self._turns: deque[ClientConnection] = deque()
        self._turning = False

    def admit(self, connection: ClientConnection) -> bool:
        """True if there is room for a new connection; where not, the oldest without a request makes it."""
        limit = self.table.max_connections or _half_of_the_descriptors()
        full = len(self.open) >= limit
        idle = self._oldest_idle() if full else None
        self.open[connection] = None
        if idle is not None:
            idle.abort()
        elif len(self.open) > limit + max(8, limit // 8):
            connection.abort()  # too many are being refused already
        return not full or idle is not None

    def left(self, connection: ClientConnection) -> None:
        """A connection is gone."""
        self.open.pop(connection, None)
        if connection in self.parting:
            self.parting.remove(connection)
            waiter = self.all_parted
            if not self.parting and waiter is not None and not waiter.done():
                waiter.set_result(None)

    def have_turn(self, connection: ClientConnection) -> None:
        """A connection has more to read: it goes on when those before it have, a few in each turn."""
        self._turns.append(connection)
        if len(self._turns) == 1 and not self._turning:
            self.driver.loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        turns = self._turns
        self._turning = True
        try:
            for _ in range(min(AT_ONCE, len(turns))):
                turns.popleft().go_on()
        finally:  # an error in one of them holds up no other
            self._turning = False
            if turns:
                self.driver.loop.call_soon(self._next_turn)

    def sweep(self, now: float) -> None:
        """End what has taken too long."""
        for connection in list(self.open):
            connection.sweep(now)

    def stop(self) -> None:
        """Take no further request: idle connections end now, the others with the answer they are at."""
        self.stopping = True
        for connection in list(self.open):
            connection.close_if_idle()

    def abort(self) -> None:
        """Drop them all."""
        for connection in list(self.open):
            connection.abort()

    def _oldest_idle(self) -> ClientConnection | None:
        for connection in self.open:
            if connection.idle:
                return connection
        return None


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        "_at", "_backlog", "_blank_lines", "_body", "_body_left", "_buffer", "_clients", "_closing",
        "_decoder", "_exchange", "_fed_at", "_form", "_head", "_held", "_now", "_partial", "_paused",
        "_raw", "_reading_paused", "_ripe", "_scheduled", "_since", "_small", "_stalled_since", "_tenant",
        "_transport",
    )  # fmt: skip

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._transport: asyncio.Transport | None = None
        #: What is being read, and how much of it was.
        self._buffer = b""
        self._at = 0
        #: What came while something else was done; with `_partial` the beginning of a head.
        self._backlog = bytearray()
        self._partial = False
        self._blank_lines = 0
        #: True if a large body is whole and its turn has come.
        self._ripe = False
        #: True if reading goes on in a later turn of the loop.
        self._scheduled = False
        self._head: RequestHead | None = None
        self._tenant: Tenant | None = None
        #: The body so far: whole pieces, then what came in small ones.
        self._body: list[bytes] = []
        self._small = bytearray()
        self._body_left = self._held = 0
        self._decoder: ChunkedDecoder | None = None
        self._form: FormReader | None = None
        self._exchange: Exchange | None = None
        #: Takes what comes once the connection has another protocol than HTTP.
        self._raw: Callable[[bytes], None] | None = None
        self._now = clients.driver.now
        self._closing = False
        self._paused = False
        self._reading_paused = False
        #: When the body began, or when the last piece of it came.
        self._fed_at = 0.0
        self._since = 0.0
        self._stalled_since = 0.0

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop has its own class
        self._transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        transport.set_write_buffer_limits(high=64 << 10)
        self._since = self._now()
        if not self._clients.admit(self):
            self._refuse(Refusal(error_responses.TOO_MANY_CONNECTIONS, "Too many connections are open."))

    def data_received(self, data: bytes) -> None:
        if self._closing:
            transport = self._transport
            if len(data) >= _LARGE_READ and transport is not None and not transport.is_closing():
                transport.pause_reading()  # what is thrown away has its turn like anything else
                self._clients.driver.loop.call_soon(self._throw_away)
            return
        if self._exchange is not None or self._paused or self._scheduled:
            if self._raw is not None:
                self._raw(data)
                return
            self._backlog += data
            self._bound_reading()
            return
        if self._head is None and not self._begun:
            self._since = self._now()  # the head's time begins with its first byte
        self._buffer, self._at = data, 0
        if len(data) >= _LARGE_READ:
            self._continue_later()
        self._advance()

    def _throw_away(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        if self._closing:
            return False  # what was written still goes out
        # A client that closes its sending side is gone (HAProxy's abortonclose): a client that waits
        # for an answer keeps the connection open.
        self.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._closing = True
        self._clients.left(self)
        self._release()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_gone()

    def pause_writing(self) -> None:
        self._paused = True
        self._stalled_since = self._now()
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self._paused = False
        if self._exchange is not None:
            self._exchange.resume()
            return
        self._bound_reading()
        if self._unread:
            self._continue_later()

    # --- the exchange's side ---

    @property
    def http11(self) -> bool:
        """True if the client understands chunked answers."""
        return self._head is not None and self._head.http11

    @property
    def write(self) -> Callable[[bytes], None]:
        """Sends bytes of an answer."""
        return _nowhere if self._transport is None else self._transport.write

    def upgraded(self, take: Callable[[bytes], None]) -> None:
        """The connection has another protocol from now on: `take` gets all that comes."""
        early = self._buffer[self._at :] + bytes(self._backlog)
        self._buffer, self._at = b"", 0
        self._backlog.clear()
        self._raw = take
        self._bound_reading()
        if early:
            take(early)

    def hold(self, held: bool) -> None:
        """Read nothing while the engine has no room for it."""
        if (
            self._transport is not None
            and not self._transport.is_closing()
            and held is not self._reading_paused
        ):
            self._reading_paused = held
            if held:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def end(self, *, keep: bool) -> None:
        """The answer is out; `keep` says that the client can tell where it ended."""
        head, self._head, self._exchange = self._head, None, None
        if not keep or head is None or not head.keep_alive or self._clients.stopping:
            self._close()
            return
        self._since = self._now()
        if self._unread:
            self._continue_later()  # in a turn of its own: pipelined requests must not nest
        else:
            self._bound_reading()

    def break_off(self) -> None:
        """End an answer that must not look complete: what was written goes out, then the connection ends."""
        self._exchange = None
        if self._raw is not None:
            self._raw = None
            if self._transport is not None:
                self._clients.parting.add(self)
                self._transport.resume_reading()
            self._linger()  # the client may still be sending: a reset would lose the Close frame
        else:
            self._close()

    # --- from the listener ---

    @property
    def _unread(self) -> bool:
        """True if something is there that can be read on."""
        return self._at < len(self._buffer) or (len(self._backlog) > 0 and not self._partial)

    @property
    def _begun(self) -> bool:
        """True if something of a head is there, were it an empty line."""
        return self._partial or self._blank_lines > 0

    def _continue_later(self) -> None:
        """Read on when the others have had their turn."""
        if not self._scheduled:
            self._scheduled = True
            self._clients.have_turn(self)
        self._bound_reading()

    def go_on(self) -> None:
        """The turn of this connection has come."""
        self._scheduled = False
        self._advance()

    def _bound_reading(self) -> None:
        """Read from the socket only while few requests wait behind the one being answered.

        A head is smaller than the bound and a body leaves the buffer as it comes, so more than that can
        only be requests whose turn has not come.
        """
        full = self._scheduled or len(self._buffer) - self._at + len(self._backlog) > _MAX_PIPELINED
        if full is self._reading_paused or self._closing or self._transport is None:
            return
        self._reading_paused = full
        if full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    @property
    def idle(self) -> bool:
        """True if no request is read or answered here; the beginning of a head is none yet."""
        if self._exchange is not None or self._head is not None or self._closing:
            return False
        return self._transport is not None and not self._transport.get_write_buffer_size()

    def close_if_idle(self) -> None:
        """Close a connection that has no request."""
        if self._exchange is None and self._head is None and not self._unread and not self._begun:
            self._close()

    def abort(self) -> None:
        """Drop the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def sweep(self, now: float) -> None:
        """End what has taken too long: heads, bodies, idle connections, clients that do not read."""
        table = self._clients.table
        if self._paused and now - self._stalled_since > table.write_timeout_s:
            self.abort()
        elif self._exchange is not None:
            return
        elif self._closing:
            # A slow client may still be reading the end of its answer.
            unsent = self._transport is not None and self._transport.get_write_buffer_size() > 0
            if now - self._since > (table.write_timeout_s if unsent else LINGER_S):
                self.abort()
        elif self._head is not None:
            took_s = now - self._since
            slow = took_s > _BODY_GRACE_S and self._held < took_s * table.min_body_bytes_per_s
            stopped = now - self._fed_at > _BODY_STOP_S and table.min_body_bytes_per_s > 0.0
            if slow or stopped or took_s > table.body_timeout_s:
                self._refuse(GateError(408, "The request body took too long."))
        elif self._begun:
            if now - self._since > table.head_timeout_s:
                self._refuse(GateError(408, "The request head took too long."))
        elif now - self._since > table.keepalive_timeout_s:
            self._close()

    # --- reading requests ---

    def _advance(self) -> None:
        """Read on, up to one request that can be served."""
        # A client that does not read its answers gets no further ones: they would pile up here.
        if self._closing or self._paused or self._exchange is not None:
            return
        if self._at >= len(self._buffer) and self._backlog and not self._partial:
            self._buffer, self._at = bytes(self._backlog), 0
            self._backlog.clear()
        try:
            if (self._head is not None or self._read_head()) and self._read_body():
                if self._held >= _LARGE_BODY and not self._ripe:
                    self._ripe = True  # to look at it is a turn of its own
                    self._continue_later()
                else:
                    self._serve()
            elif self._unread:
                self._continue_later()
        except GateError as error:
            self._refuse(error)
        if self._at >= len(self._buffer):
            self._buffer, self._at = b"", 0  # a connection that waits keeps no read in memory
        self._bound_reading()

    def _read_head(self) -> bool:
        end = self._find_head()
        if not end:
            return False
        clients, raw = self._clients, self._buffer[self._at : end]
        self._at = end
        self._blank_lines = 0
        head, length = clients.heads.find(raw)
        self._head = head  # first: how a refusal is written depends on it
        self._tenant = clients.router.authenticate(head)
        self._since = self._fed_at = self._now()
        self._body = []
        self._body_left = length or 0
        self._decoder = ChunkedDecoder(MAX_SMALL_CHUNKS) if head.chunked else None
        if length is not None and length > self._body_limit(head):
            raise GateError(413, f"The request body is larger than {self._body_limit(head)} bytes.")
        self._form = clients.router.form(head)
        if head.expects is not None:
            self._expected(head)
        return True

    def _find_head(self) -> int:
        """Position of the next head's end in the buffer, 0 if it is not whole. Raises `GateError`."""
        seen = 0
        if self._partial:
            backlog, seen = self._backlog, len(self._backlog)
            backlog += self._buffer[self._at :]
            self._buffer, self._at = b"", 0
            if backlog[0] != 13 and not head_end(backlog, seen=seen):
                return 0
            self._buffer = bytes(backlog)
            backlog.clear()
            self._partial = False
        buffer, at = self._buffer, self._at
        while buffer[at : at + 2] == b"\r\n":
            self._blank_lines += 1
            if self._blank_lines > MAX_BLANK_LINES:
                raise GateError(400, f"More than {MAX_BLANK_LINES} empty lines stand before the request.")
            at += 2
        self._at = at
        if at >= len(buffer):
            return 0
        if not 65 <= buffer[at] <= 90 and buffer[at:] != b"\r":
            raise GateError(400, "This is not the beginning of an HTTP request.")  # TLS, say
        end = head_end(buffer, begin=at)
        if not end:
            self._backlog += buffer[at:]
            self._partial = True
            self._buffer, self._at = b"", 0
        return end

    def _expected(self, head: RequestHead) -> None:
        """True if the client waits for `100 Continue`."""
        if head.expects != b"100-continue":
            raise GateError(417, "The only expectation understood is 100-continue.")
        if not self._clients.router.knows(head.path):
            raise GateError(404, "Not Found")  # before the body is asked for
        if head.http11 and (self._body_left or self._decoder) and not self._unread:
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _body_limit(self, head: RequestHead) -> int:
        table = self._clients.table
        multipart = head.content_type.startswith(b"multipart/")
        return table.max_multipart_bytes if multipart else table.max_body_bytes

    def _read_body(self) -> bool:
        """Take the body out of the buffer; True when it is whole."""
        buffer, at, decoder = self._buffer, self._at, self._decoder
        if decoder is None:
            left = self._body_left
            if not left:
                return True
            end = at + left
            piece = buffer if not at and len(buffer) <= left else buffer[at:end]
            self._at = at + len(piece)
            self._body_left = left - len(piece)
            if piece:
                self._take(piece, last=not self._body_left)
            return not self._body_left
        data = b"" if decoder.done else buffer[at : at + TURN_BYTES]
        if not data:
            return decoder.done
        payload = decoder.feed(data)
        self._at = at + len(data) - len(decoder.surplus)
        if payload:
            self._body_left += len(payload)
            assert self._head is not None
            if self._body_left > self._body_limit(self._head):
                raise GateError(413, "The request body is too large.")
            self._take(payload, last=decoder.done)
        return decoder.done

    def _take(self, piece: bytes, *, last: bool) -> None:
        """Keep a piece of the body; until the `last` one they count as held. Raises `GateError`."""
        if self._form is not None:
            self._form.feed(piece)
        if len(piece) < _SMALL_PIECE and (not last or self._small):
            self._small += piece
            if len(self._small) >= TURN_BYTES:
                self._flush_small()
        else:
            self._flush_small()
            self._body.append(piece)
        if last:
            return
        self._fed_at = self._now()
        self._held += len(piece)
        self._clients.held_bytes += len(piece)
        if self._clients.held_bytes > self._clients.table.max_held_bytes:
            raise Refusal(error_responses.TOO_MANY_BYTES, "Too many bytes of bodies are being read.")

    def _flush_small(self) -> None:
        if self._small:
            self._body.append(bytes(self._small))
            self._small.clear()

    def _release(self) -> None:
        """Drop the parts of a body that is whole, or of no use any more."""
        self._clients.held_bytes -= self._held
        self._held = 0
        self._body = []
        self._small.clear()
        self._form = None
        self._ripe = False

    # --- answering ---

    def _serve(self) -> None:
        self._flush_small()
        head, clients, pieces, form = self._head, self._clients, self._body, self._form
        assert head is not None
        self._release()
        if clients.leaving:
            head = self._head = head.closing()
        elif clients.stopping:
            raise Refusal(error_responses.SHUTTING_DOWN, "The proxy is shutting down.")
        taken = clients.router.handle(self, head, pieces, self._tenant, form)
        if isinstance(taken, bytes):
            self._reply(taken)
        else:
            self._exchange = taken
            clients.driver.submit(taken)

    def _send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _reply(self, data: bytes) -> None:
        self._send(data)
        self.end(keep=True)

    def _refuse(self, error: GateError) -> None:
        """Answer what did not pass, and close: what follows on this connection cannot be trusted."""
        retry_after_s: float | None = None
        lines: tuple[tuple[bytes, bytes], ...] = ()
        if isinstance(error, Refusal):
            answer = error.answer
            retry_after_s = error.retry_after_s if answer.should_retry else None
            lines = error_responses.header_pairs(error.lines)
        else:
            answer = error_responses.bad_request(error.status)
        self._clients.driver.refused(answer.outcome)
        # A body that was read whole leaves the connection in a known state.
        whole = self._decoder.done if self._decoder is not None else not self._body_left
        head = self._head
        known = error.status in (400, 403, 404, 405) or len(lines) > 0
        keep = head is not None and head.keep_alive and whole and known
        self._send(
            error_responses.response(
                error.status,
                error_responses.error_body(answer, error.message, "" if head is None else head.path),
                headers=(*error_responses.refusal_headers(answer, retry_after_s), *lines),
                close=not keep,
                head_only=head is not None and head.method == b"HEAD",
            )
        )
        self._release()
        self._body_left, self._decoder = 0, None
        if keep:
            self.end(keep=True)
        else:
            self._linger()

    def _linger(self) -> None:
        """Close our side only: bytes still on their way would otherwise reset what was just written."""
        self._closing = True
        self._head = None
        self._since = self._now()
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client has reset the connection
                self._transport.write_eof()
        else:
            self._transport.close()  # TLS has no half-closed connections; its goodbye waits for the client's

    def _close(self) -> None:
        """End the connection when what was written is out."""
        self._closing = True
        self._since = self._now()
        if self._transport is not None:
            self._transport.close()


def _nowhere(data: bytes) -> None:
    """The client is gone."""


def _half_of_the_descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft // 2)
