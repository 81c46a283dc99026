"""Connections of clients: requests are read, one at a time, and answered in order.

A client that leaves is noticed in every phase. Held bytes of bodies and of requests behind the one being
answered are bounded; no connection has more than one read parsed before the others have their turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from hetlb.balancer.core.state_transition import Transition
from hetlb.balancer.exchange.exchange import Exchange
from hetlb.balancer.http import connection_states as states
from hetlb.balancer.http import error_responses
from hetlb.balancer.http.connection_states import ClientState, Reading
from hetlb.balancer.http.error_responses import Refusal
from hetlb.balancer.http.http1 import GateError, RequestHead
from hetlb.balancer.http.paced_reading import PacedReader
from hetlb.balancer.http.request_reader import RequestReader

if TYPE_CHECKING:
    from hetlb.balancer.clients.api_keys import Tenant
    from hetlb.balancer.clients.server import ProxyServer

#: Maximum bytes of a next request that may wait behind the one being answered.
_MAX_PIPELINED_BYTES: Final = 64 << 10
#: Least bytes of a read that takes a turn of its own: more is waiting in the kernel.
_LARGE_READ_BYTES: Final = 128 << 10
#: Least bytes of a body parsed in a turn of its own.
_LARGE_BODY_BYTES: Final = 256 << 10
#: Seconds before the minimum rate of a body applies.
_BODY_GRACE_S: Final = 5.0
_LEAST_BODY_BYTES_PER_S: Final = 1024.0
#: Minimum rate of a body that takes longer than `body_timeout_s`.
_STEADY_BODY_BYTES_PER_S: Final = 8192.0
#: Maximum seconds between two pieces of a body.
_BODY_STOP_S: Final = 10.0
#: Seconds that a refused client may still send before its connection is dropped.
LINGER_S: Final = 2.0
#: Seconds that a new connection has for the beginning of its first request.
FRESH_S: Final = 1.0
#: Bytes of the kernel's send buffer of a client's connection.
_SEND_BUFFER_BYTES: Final = 64 << 10
_IDLE: Final = ClientState.IDLE
_HEAD: Final = ClientState.HEAD
_BODY: Final = ClientState.BODY
_READ: Final = ClientState.READ
_ANSWERING: Final = ClientState.ANSWERING
_UPGRADED: Final = ClientState.UPGRADED
_CLOSING: Final = ClientState.CLOSING
_CLOSED: Final = ClientState.CLOSED
#: States that requests are read in.
_READS: Final = (_IDLE, _HEAD, _BODY, _READ)
_OPEN: Final = Reading.OPEN
_TURN: Final = Reading.TURN
_HELD: Final = Reading.HELD


class ClientConnection(PacedReader):
    """One connection of a client."""

    __slots__ = (
        "_exchange", "_fed_at", "_head", "_held", "_now", "_reader", "_server", "_since",
        "_stalled_since", "_tenant", "address", "cors", "state",
    )  # fmt: skip

    def __init__(self, server: ProxyServer) -> None:
        super().__init__(server.turns)
        self._server = server
        self._reader = RequestReader()
        #: IP address of the client, "-" where it has none.
        self.address = "-"
        #: Header lines of CORS for the answer.
        self.cors = b""
        self.state = _IDLE
        self._head: RequestHead | None = None
        self._tenant: Tenant | None = None
        #: Bytes of the body that count in the bodies of all connections.
        self._held = 0
        self._exchange: Exchange | None = None
        self._now = server.driver.now
        #: Time when the body began, or its last piece came.
        self._fed_at = 0.0
        self._since = 0.0
        #: Time since which the client does not read, None while it does.
        self._stalled_since: float | None = None

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            peer = transport.get_extra_info("peername")
            if peer:
                self.address = str(peer[0]).removeprefix("::ffff:")  # IPv4 at a socket of both
        transport.set_write_buffer_limits(high=64 << 10)
        self._since = self._now()
        if not self._server.admit(self):
            self._refuse(self._server.refusal)
            if self._server.crowded:
                transport.close()

    def data_received(self, data: bytes) -> None:
        state = self.state
        if state is _CLOSING or state is _CLOSED:
            if len(data) >= _LARGE_READ_BYTES:
                self._continue_later()  # discarded bytes have their turn like any others
            return
        self._reader.feed(data)
        if state is _ANSWERING or self._stalled_since is not None or self.reading is _TURN:
            self._bound_reading()
            return
        if state is _IDLE:
            self._since = self._now()  # the head's time begins with its first byte
        if len(data) >= _LARGE_READ_BYTES:
            self._continue_later()
        self._advance()

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
        self.state = states.CLIENT_GONE.take(self.state)
        self._server.left(self)
        self._release()
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        try:
            exchange.client_gone()
        except Exception as error:
            exchange.fault(error)

    def pause_writing(self) -> None:
        self._stalled_since = self._now()
        self._hold(True)

    def resume_writing(self) -> None:
        self._stalled_since = None
        if self._exchange is not None:
            self._hold(False)
        else:
            self._read_on()

    def _hold(self, held: bool) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        try:
            exchange.pause(held)
        except Exception as error:
            exchange.fault(error)

    # --- the exchange's side ---

    @property
    def write(self) -> Callable[[bytes], None]:
        return _nowhere if self._transport is None else self._transport.write

    def hand_over(self, protocol: asyncio.Protocol) -> tuple[asyncio.Transport, bytes]:
        """Let another protocol have the transport, and the bytes behind the request; `break_off` ends it."""
        reader = self._reader
        self.state = states.UPGRADED.take(self.state)
        unread, reader.buffer, reader.at = reader.buffer[reader.at :], b"", 0
        return self._give(protocol), unread

    def end(self, *, keep: bool) -> None:
        """Note that the response is sent. `keep`: its end is marked, so that another response can follow."""
        head, self._head, self._exchange = self._head, None, None
        if not keep or head is None or not head.keep_alive or self._server.stopping:
            self._close(states.LAST_ANSWERED)
            return
        self.state = states.ANSWERED.take(self.state)
        self._since = self._now()
        self._read_on()

    def break_off(self) -> None:
        """End an answer that must not look complete: sent bytes go out, then the connection ends."""
        self._exchange = None
        if self.state is _UPGRADED:
            if self._transport is None or self._transport.is_closing():
                self.connection_lost(None)  # the other protocol was told
                return
            self._transport.set_protocol(self)
            self._server.parting.add(self)
            # The client may still be sending: a reset would lose the Close frame.
            self._linger(states.LAST_ANSWERED)
        else:
            self._close(states.LAST_ANSWERED)

    def forsake(self, exchange: object) -> None:
        """Drop the connection if it still waits for an exchange that has failed without an answer."""
        if self._exchange is exchange:
            self._exchange = None
            self.abort()

    # --- from the listener ---

    def _read_on(self) -> None:
        """Read on, buffered bytes in a turn of their own: pipelined requests must not nest."""
        if self._reader.unread and self.state is not _CLOSING:
            self._continue_later()
        else:
            self._bound_reading()

    def turn_came(self) -> None:
        """Read the next request, or discard the rest of an unused one."""
        if self.state is _CLOSING:
            self._resume_reading()
        elif self.state is not _UPGRADED:
            self._hold_back()
            self._advance()
            self._bound_reading()  # a request that was whole is being answered, and its client may leave

    def _bound_reading(self) -> None:
        """Read from the socket only while few requests wait behind the one being answered."""
        reading, reader = self.reading, self._reader
        if reading is _TURN or self.state is _CLOSING or self._transport is None:
            return
        full = len(reader.buffer) - reader.at > _MAX_PIPELINED_BYTES
        if full and reading is _OPEN:
            self._hold_back()
        elif not full and reading is _HELD:
            self._resume_reading()

    @property
    def idle(self) -> bool:
        """True if no request is read or answered here. An incomplete head does not count as a request."""
        if self.state is not _IDLE and self.state is not _HEAD:
            return False
        return self._transport is not None and not self._transport.get_write_buffer_size()

    def makes_room(self) -> bool:
        """Return True if it may be closed for another client: not while its first request is on its way."""
        return self.idle and (self._fed_at > 0.0 or self._now() - self._since >= FRESH_S)

    def close_if_idle(self) -> None:
        if self.state is _IDLE and not self._reader.unread:
            self._close(states.UNUSED)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def sweep(self, now: float) -> None:
        """End late heads and bodies, idle connections, and clients that do not read."""
        table, state = self._server.table, self.state
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
            slow = took_s > _BODY_GRACE_S and self._reader.held < took_s * _LEAST_BODY_BYTES_PER_S
            stopped = now - self._fed_at > _BODY_STOP_S
            late = took_s > table.body_timeout_s and self._reader.held < took_s * _STEADY_BODY_BYTES_PER_S
            if slow or stopped or late:
                self._refuse(GateError(408, "The request body took too long."))
        elif state is _HEAD:
            if now - self._since > table.head_timeout_s:
                self._refuse(GateError(408, "The request head took too long."))
        elif now - self._since > table.keepalive_timeout_s:
            self._close(states.UNUSED)

    # --- reading requests ---

    def _advance(self) -> None:
        """Read on, up to one request that can be served."""
        # A client that does not read its answers gets no further ones: they would pile up here.
        state = self.state
        if self._stalled_since is not None or state not in _READS:
            return
        reader = self._reader
        try:
            if not (state is _BODY or state is _READ or self._read_head()):
                if reader.unread:
                    self._continue_later()
            elif reader.read_body():
                if reader.held >= _LARGE_BODY_BYTES and state is not _READ:
                    self.state = states.BODY_READ.take(self.state)  # to look at it is a turn of its own
                    self._continue_later()
                else:
                    self._serve()
            else:
                self._count_held()
                if reader.unread:
                    self._continue_later()
        except GateError as error:
            self._refuse(error)
        except Exception as error:
            self._server.driver.guard.log(error, f"reading a request of {self.address}")
            if self.state in _READS:
                self._refuse(Refusal(error_responses.FAULT, "The proxy failed on this request."))
            else:
                self.abort()
        if reader.at >= len(reader.buffer):
            reader.buffer, reader.at = b"", 0  # a connection that waits keeps no read in memory
        self._bound_reading()

    def _read_head(self) -> bool:
        """Take in a head; False if it is not whole. Raises `GateError`."""
        server, reader = self._server, self._reader
        raw = reader.find_head()
        if not raw:
            if self.state is _IDLE and reader.begun:
                self.state = states.HEAD_BEGUN.take(self.state)
            return False
        head, length = server.heads.find(raw)
        self._head, self._tenant = head, None  # first: how a refusal is written depends on them
        self._since = self._fed_at = self._now()
        self.state = states.HEAD_PASSED.take(self.state)
        router = server.router
        self.cors = router.cors_lines(head)
        self._tenant = router.authenticate(head)
        reader.begin_body(length, head.chunked, server.table.max_body_bytes)
        if head.expects is not None:
            if head.expects != b"100-continue":
                raise GateError(417, "The only expectation understood is 100-continue.")
            if not router.knows(head.path):
                raise GateError(404, "Not Found")  # before the body is asked for
            if head.http11 and not reader.whole and not reader.unread:
                self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _count_held(self) -> None:
        """Count the bytes of an incomplete body. Raises `Refusal` if all bodies hold too much."""
        server, more = self._server, self._reader.held - self._held
        if more:
            self._fed_at = self._now()
            self._held += more
            server.held_bytes += more
            if server.held_bytes > server.table.max_held_bytes:
                raise Refusal(error_responses.TOO_MANY_BYTES, "Too many bytes of bodies are being read.")

    def _release(self) -> None:
        """Drop the parts of a body that is complete or unused."""
        self._server.held_bytes -= self._held
        self._held = 0
        self._reader.drop_body()

    # --- answering ---

    def _serve(self) -> None:
        head, server = self._head, self._server
        assert head is not None
        body = self._reader.body()
        server.held_bytes -= self._held
        self._held = 0
        if server.leaving:
            head = self._head = head.closing()
        elif server.stopping:
            raise Refusal(error_responses.SHUTTING_DOWN, "The proxy is shutting down.")
        taken = server.router.handle(self, head, body, self._tenant)
        if isinstance(taken, bytes):
            self._send(taken.replace(b"\r\n", b"\r\n" + self.cors, 1) if self.cors else taken)
            self.end(keep=True)
        else:
            self._exchange = taken
            self.state = states.SUBMITTED.take(self.state)
            server.driver.submit(taken)

    def _send(self, data: bytes) -> None:
        """Send bytes outside of an exchange.

        A method, since compiled code cannot call the value of a property.
        """
        if self._transport is not None:
            self._transport.write(data)

    def _refuse(self, error: GateError) -> None:
        """Answer a refused request, and close: later bytes on this connection cannot be trusted."""
        answer, retry_after_s, lines = error_responses.refused_for(error)
        # A body that was read whole leaves the connection in a known state.
        known = self._reader.whole and (answer.status in (400, 403, 404, 405) or lines != b"")
        head, path, keep, head_only = self._head, "", False, False
        if head is None:
            self._server.driver.refused(answer.outcome, answer.status)
        else:
            label = self._server.router.refused(head, self._tenant, answer, self._since, self.address)
            lines = b"%bx-request-id: %b\r\n%b" % (lines, label.encode("ascii"), self.cors)
            path, keep, head_only = head.path, head.keep_alive and known, head.method == b"HEAD"
        self._send(
            error_responses.refusal(
                answer, error.message, retry_after_s, lines, path, close=not keep, head_only=head_only
            )
        )
        self._release()
        if keep:
            self.end(keep=True)
        else:
            self._linger(states.REFUSED)

    def _linger(self, transition: Transition[ClientState]) -> None:
        """Close our side only: bytes still on their way would otherwise reset what was just written."""
        self.state = transition.take(self.state)
        self._head = None
        self._since = self._now()
        if self._transport is None or self._transport.is_closing():
            return
        if self.reading is _HELD:
            self._resume_reading()  # further bytes are discarded, their end is noticed
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client has reset the connection
                self._transport.write_eof()
        else:
            self._transport.close()  # TLS has no half-closed connections; its goodbye waits for the client's

    def _close(self, transition: Transition[ClientState]) -> None:
        """End the connection when all written bytes are out."""
        self.state = transition.take(self.state)
        self._since = self._now()
        if self._transport is not None:
            self._transport.close()


def _nowhere(data: bytes) -> None:
    """Note that the client is gone."""
