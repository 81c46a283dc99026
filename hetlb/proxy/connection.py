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
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from hetlb.config.fleet_tables import ProxyTable
from hetlb.core.transition import Transition
from hetlb.proxy.access import Tenant
from hetlb.proxy.connection_states import (
    ANSWERED,
    ANSWERED_HERE,
    BODY_READ,
    CLIENT_GONE,
    HEAD_BEGUN,
    HEAD_PASSED,
    HELD_BACK,
    LAST_ANSWERED,
    LAST_HERE,
    READ_ON,
    REFUSED,
    SUBMITTED,
    TURN_TAKEN,
    UNUSED,
    UPGRADED,
    ClientState,
    Reading,
)
from hetlb.proxy.driver import Driver
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
from hetlb.proxy.router import Router
from hetlb.turns import turns

if TYPE_CHECKING:
    from hetlb.proxy.http.multipart import FormReader

#: Bytes of a next request that may wait behind the one being answered.
_MAX_PIPELINED: Final = 64 << 10
#: Bytes of a chunked body that are decoded before other connections have their turn.
TURN_BYTES: Final = 64 << 10
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
_LEAST_BODY_BYTES_PER_S: Final = 1024.0
#: No body may stop for longer.
_BODY_STOP_S: Final = 10.0
#: Seconds in which a refused client may still send before its connection is dropped.
LINGER_S: Final = 2.0
#: Bytes of an answer that the kernel may hold for a client that does not read.
_SEND_BUFFER: Final = 64 << 10
#: Looked up here and not for every request: a member of an enum costs as much as a call.
_IDLE: Final = ClientState.IDLE
_HEAD: Final = ClientState.HEAD
_BODY: Final = ClientState.BODY
_READ: Final = ClientState.READ
_ANSWERING: Final = ClientState.ANSWERING
_UPGRADED: Final = ClientState.UPGRADED
_CLOSING: Final = ClientState.CLOSING
_CLOSED: Final = ClientState.CLOSED
#: States in which requests are read.
_READS: Final = (_IDLE, _HEAD, _BODY, _READ)
_OPEN: Final = Reading.OPEN
_TURN: Final = Reading.TURN
_HELD: Final = Reading.HELD


class Clients:
    """All open connections, and what they share."""

    def __init__(self, driver: Driver, router: Router) -> None:
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
        #: Connections with more to read than one turn takes wait here for another.
        self.turns = turns(driver.loop)

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
        "_at", "_backlog", "_blank_lines", "_body", "_body_left", "_buffer", "_clients", "_decoder",
        "_exchange", "_fed_at", "_form", "_head", "_held", "_now", "_raw", "_searched", "_since", "_small",
        "_stalled_since", "_tenant", "_transport", "address", "cors", "reading", "state",
    )  # fmt: skip

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._transport: asyncio.Transport | None = None
        #: IP address of the client, "-" where it has none.
        self.address = "-"
        #: Header lines of CORS for the answer.
        self.cors = b""
        self.state = _IDLE
        self.reading = _OPEN
        #: The read that is looked at, and the position in it.
        self._buffer = b""
        self._at = 0
        #: Bytes that came while something else was done; the first `_searched` bytes are part of a head.
        self._backlog = bytearray()
        self._searched = 0
        self._blank_lines = 0
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
        #: Time at which the body began, or its last piece came.
        self._fed_at = 0.0
        self._since = 0.0
        #: Since when the client does not read what is written.
        self._stalled_since: float | None = None

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop has its own class
        self._transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            peer = transport.get_extra_info("peername")
            if peer:
                self.address = str(peer[0])
        transport.set_write_buffer_limits(high=64 << 10)
        self._since = self._now()
        if not self._clients.admit(self):
            self._refuse(Refusal(error_responses.TOO_MANY_CONNECTIONS, "Too many connections are open."))

    def data_received(self, data: bytes) -> None:
        state = self.state
        if state is _CLOSING or state is _CLOSED:
            transport = self._transport
            if len(data) >= _LARGE_READ and transport is not None and not transport.is_closing():
                transport.pause_reading()  # what is thrown away has its turn like anything else
                self._clients.driver.loop.call_soon(self._throw_away)
            return
        if state is _UPGRADED and self._raw is not None:
            self._raw(data)
            return
        if state is _ANSWERING or self._stalled_since is not None or self.reading is _TURN:
            self._backlog += data
            self._bound_reading()
            return
        if state is _IDLE:
            self._since = self._now()  # the head's time begins with its first byte
        self._buffer, self._at = data, 0
        if len(data) >= _LARGE_READ:
            self._continue_later()
        self._advance()

    def _throw_away(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        if self.state is _CLOSING:
            return False  # what was written still goes out
        # A client that closes its sending side is gone (HAProxy's abortonclose): a client that waits
        # for an answer keeps the connection open.
        self.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.state is _CLOSED:
            return
        self._enter(CLIENT_GONE)
        self._clients.left(self)
        self._release()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_gone()

    def pause_writing(self) -> None:
        self._stalled_since = self._now()
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self._stalled_since = None
        if self._exchange is not None:
            self._exchange.resume()
        else:
            self._read_on()

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
        self._enter(UPGRADED)
        self.hold(False)
        if early:
            take(early)

    def hold(self, held: bool) -> None:
        """Read nothing while the engine has no room for it."""
        transport = self._transport
        if transport is None or transport.is_closing() or held is not (self.reading is _OPEN):
            return
        if held:
            self._enter_reading(HELD_BACK)
            transport.pause_reading()
        else:
            self._enter_reading(READ_ON)
            transport.resume_reading()

    def end(self, *, keep: bool) -> None:
        """The answer is out; `keep` says that the client can tell where it ended."""
        here = self.state is _BODY or self.state is _READ
        head, self._head, self._exchange = self._head, None, None
        if not keep or head is None or not head.keep_alive or self._clients.stopping:
            self._close(LAST_HERE if here else LAST_ANSWERED)
            return
        self._enter(ANSWERED_HERE if here else ANSWERED)
        self._since = self._now()
        self._read_on()

    def break_off(self) -> None:
        """End an answer that must not look complete: what was written goes out, then the connection ends."""
        self._exchange = None
        if self.state is _UPGRADED:
            self._raw = None
            if self._transport is not None:
                self._clients.parting.add(self)
            self._linger(LAST_ANSWERED)  # the client may still be sending: a reset would lose the Close frame
        else:
            self._close(LAST_ANSWERED)

    # --- states ---

    def _enter(self, transition: Transition[ClientState]) -> None:
        assert self.state in transition.before, f"connection, {self.state}: {transition.event}"
        self.state = transition.after

    def _enter_reading(self, transition: Transition[Reading]) -> None:
        assert self.reading in transition.before, f"connection, {self.reading}: {transition.event}"
        self.reading = transition.after

    # --- from the listener ---

    @property
    def _unread(self) -> bool:
        """True if something is there that can be read on."""
        return self._at < len(self._buffer) or len(self._backlog) > self._searched

    def _read_on(self) -> None:
        """Read on, what is there already in a turn of its own: pipelined requests must not nest."""
        if self._unread:
            self._continue_later()
        else:
            self._bound_reading()

    def _continue_later(self) -> None:
        """Read on when the others have had their turn."""
        if self.reading is _TURN or self.state is _CLOSING or self._transport is None:
            return
        if self.reading is _OPEN:
            self._transport.pause_reading()
        self._enter_reading(TURN_TAKEN)
        self._clients.turns.later(self.go_on)

    def go_on(self) -> None:
        """The turn of this connection has come."""
        if self.reading is _TURN:
            self._enter_reading(HELD_BACK)
            self._advance()

    def _bound_reading(self) -> None:
        """Read from the socket only while few requests wait behind the one being answered.

        A head is smaller than the bound and a body leaves the buffer as it comes, so more than that can
        only be requests whose turn has not come.
        """
        reading, transport = self.reading, self._transport
        if reading is _TURN or self.state is _CLOSING or transport is None:
            return
        full = len(self._buffer) - self._at + len(self._backlog) > _MAX_PIPELINED
        if full and reading is _OPEN:
            self._enter_reading(HELD_BACK)
            transport.pause_reading()
        elif not full and reading is _HELD:
            self._enter_reading(READ_ON)
            transport.resume_reading()

    @property
    def idle(self) -> bool:
        """True if no request is read or answered here; the beginning of a head is none yet."""
        if self.state is not _IDLE and self.state is not _HEAD:
            return False
        return self._transport is not None and not self._transport.get_write_buffer_size()

    def close_if_idle(self) -> None:
        """Close a connection that has no request."""
        if self.state is _IDLE and not self._unread:
            self._close(UNUSED)

    def abort(self) -> None:
        """Drop the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def sweep(self, now: float) -> None:
        """End what has taken too long: heads, bodies, idle connections, clients that do not read."""
        table, state = self._clients.table, self.state
        if self._stalled_since is not None and now - self._stalled_since > table.write_timeout_s:
            self.abort()
        elif state is _ANSWERING or state is _UPGRADED:
            return
        elif state is _CLOSING:
            # A slow client may still be reading the end of its answer.
            unsent = self._transport is not None and self._transport.get_write_buffer_size() > 0
            if now - self._since > (table.write_timeout_s if unsent else LINGER_S):
                self.abort()
        elif state is _BODY or state is _READ:
            took_s = now - self._since
            slow = took_s > _BODY_GRACE_S and self._held < took_s * _LEAST_BODY_BYTES_PER_S
            stopped = now - self._fed_at > _BODY_STOP_S
            if slow or stopped or took_s > table.body_timeout_s:
                self._refuse(GateError(408, "The request body took too long."))
        elif state is _HEAD:
            if now - self._since > table.head_timeout_s:
                self._refuse(GateError(408, "The request head took too long."))
        elif now - self._since > table.keepalive_timeout_s:
            self._close(UNUSED)

    # --- reading requests ---

    def _advance(self) -> None:
        """Read on, up to one request that can be served."""
        # A client that does not read its answers gets no further ones: they would pile up here.
        state = self.state
        if self._stalled_since is not None or state not in _READS:
            return
        if self._at >= len(self._buffer) and self._backlog and not self._searched:
            self._buffer, self._at = bytes(self._backlog), 0
            self._backlog.clear()
        try:
            if (state is _BODY or state is _READ or self._read_head()) and self._read_body():
                if self._held >= _LARGE_BODY and state is not _READ:
                    self._enter(BODY_READ)  # to look at it is a turn of its own
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
            if self.state is _IDLE and (self._searched or self._blank_lines):
                self._enter(HEAD_BEGUN)
            return False
        clients, raw = self._clients, self._buffer[self._at : end]
        self._at = end
        self._blank_lines = 0
        head, length = clients.heads.find(raw)
        self._head, self._tenant = head, None  # first: how a refusal is written depends on them
        self._since = self._fed_at = self._now()
        self._enter(HEAD_PASSED)
        self.cors = clients.router.cors_lines(head)
        self._tenant = clients.router.authenticate(head)
        self._body = []
        self._body_left = length or 0
        self._decoder = ChunkedDecoder(MAX_SMALL_CHUNKS) if head.chunked else None
        most = self._clients.table.max_body_bytes
        if length is not None and length > most:
            raise GateError(413, f"The request body is larger than {most} bytes.")
        self._form = clients.router.form(head)
        if head.expects is not None:
            self._expected(head)
        return True

    def _find_head(self) -> int:
        """Position of the next head's end in the buffer, 0 if it is not whole. Raises `GateError`."""
        if self._searched:
            backlog = self._backlog
            backlog += self._buffer[self._at :]
            self._buffer, self._at = b"", 0
            if backlog[0] != 13 and not head_end(backlog, seen=self._searched):
                self._searched = len(backlog)
                return 0
            self._buffer = bytes(backlog)
            backlog.clear()
            self._searched = 0
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
            self._searched = len(self._backlog)
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
            if self._body_left > self._clients.table.max_body_bytes:
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
            self._enter(SUBMITTED)
            clients.driver.submit(taken)

    def _send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _reply(self, data: bytes) -> None:
        self._send(data.replace(b"\r\n", b"\r\n" + self.cors, 1) if self.cors else data)
        self.end(keep=True)

    def _refuse(self, error: GateError) -> None:
        """Answer what did not pass, and close: what follows on this connection cannot be trusted."""
        retry_after_s: float | None = None
        lines: tuple[tuple[bytes, bytes], ...] = ()
        named = False
        if isinstance(error, Refusal):
            answer = error.answer
            named = len(error.lines) > 0
            retry_after_s = error.retry_after_s if answer.should_retry else None
            lines = error_responses.header_pairs(error.lines)
        else:
            answer = error_responses.bad_request(error.status)
        head = self._head
        if head is None:
            self._clients.driver.refused(answer.outcome, error.status)
        else:
            label = self._clients.router.refused(
                head, self._tenant, answer, error.status, self._since, self.address
            )
            lines += ((b"x-request-id", label.encode("ascii")), *error_responses.header_pairs(self.cors))
        # A body that was read whole leaves the connection in a known state.
        whole = self._decoder.done if self._decoder is not None else not self._body_left
        known = error.status in (400, 403, 404, 405) or named
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
            self._linger(REFUSED)

    def _linger(self, transition: Transition[ClientState]) -> None:
        """Close our side only: bytes still on their way would otherwise reset what was just written."""
        self._enter(transition)
        self._head = None
        self._since = self._now()
        if self._transport is None or self._transport.is_closing():
            return
        self.hold(False)  # what still comes is thrown away, its end is heard
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client has reset the connection
                self._transport.write_eof()
        else:
            self._transport.close()  # TLS has no half-closed connections; its goodbye waits for the client's

    def _close(self, transition: Transition[ClientState]) -> None:
        """End the connection when what was written is out."""
        self._enter(transition)
        self._since = self._now()
        if self._transport is not None:
            self._transport.close()


def _nowhere(data: bytes) -> None:
    """The client is gone."""


def _half_of_the_descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft // 2)
