"""Connections to engines, one protocol each; they carry clients' requests and the proxy's own.

An idle connection that fails before its answer began is replaced by a fresh one without the client noticing;
a connection is never used again if its answer was not cleanly framed.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from hetlb.addresses import refuse_special
from hetlb.balancer.exchange import ends
from hetlb.balancer.exchange.ends import End
from hetlb.balancer.http import connection_states as states
from hetlb.balancer.http.connection_states import EngineState, Reading
from hetlb.balancer.http.http1 import ChunkedDecoder, GateError, ResponseHead, head_end, parse_response_head
from hetlb.balancer.http.paced_reading import PacedReader

if TYPE_CHECKING:
    from hetlb.balancer.engines.engine_pools import EnginePool

#: Maximum number of interim answers (1xx).
MAX_INTERIM_ANSWERS: Final = 16
#: Bytes of an answer parsed before other connections have their turn, where parsing is costly.
TURN_BYTES: Final = 16 << 10
#: Least bytes of a read that takes a turn of its own: more is waiting in the kernel.
_LARGE_READ_BYTES: Final = 64 << 10
#: Maximum bytes of a page of models: a list of a thousand has 100 KiB.
MAX_PAGE_BYTES: Final = 1 << 20
#: Maximum bytes of the answer to a request of the proxy's own, and what a longer one fails with.
_MAX_ANSWER_BYTES: Final = 4 << 20
TOO_LONG: Final = "its answer is too long"
#: Maximum bytes of a body written in one piece with its head.
_MAX_COPIED_BYTES: Final = 16 << 10
#: Bytes of `tcp_info` with the mean round trip, in microseconds.
_RTT: Final = slice(68, 72)
_IDLE: Final = EngineState.IDLE
_OPEN: Final = Reading.OPEN
_TURN: Final = Reading.TURN
_HELD: Final = Reading.HELD
#: Ends of an engine that did not answer, by the state of its connection; of others it is `DROPPED`.
_UNANSWERED: Final = {EngineState.HEAD: ends.HEAD_CUT, EngineState.SENDING: ends.UNREAD}


class Carried:
    """One request as a connection sees it: the bytes to send, and the reports about its answer.

    A class and not a protocol: compiled, its methods are called without a lookup by name. `plain`: what comes
    of the answer is passed on as it stands. `resent`: an idle connection was lost under it, which counts once
    as no failure.
    """

    __slots__ = ("method", "plain", "resent")

    def __init__(self, method: bytes) -> None:
        self.method = method
        self.plain = True
        self.resent = False

    def engine_connected(self, connection: EngineConnection) -> None:
        raise NotImplementedError

    def engine_lost_idle(self) -> None:
        """Send it once more: a reused connection was closed before it answered."""
        raise NotImplementedError

    def not_connected(self, error: OSError) -> None:
        """Note why no connection was made; `engine_failed` follows."""

    def engine_head(self, head: ResponseHead, length: int | None) -> None:
        raise NotImplementedError

    def engine_events(self, chunks: bytes) -> bool:
        """Send one read of a body on to the client if it is whole events of text.

        Return True if it was sent. Return False if it is something else: then nothing has been done.
        """
        return False

    def engine_body(self, payload: bytes) -> None:
        raise NotImplementedError

    def engine_end(self, payload: bytes) -> None:
        raise NotImplementedError

    def engine_failed(self, end: End, detail: str) -> None:
        raise NotImplementedError

    def still_served(self) -> bool:
        """Return True if the engine after a reconnect has the model: it may be another one."""
        raise NotImplementedError

    def fault(self, error: Exception) -> None:
        raise NotImplementedError


class Upstream:
    """The way of requests to their engines."""

    __slots__ = ()

    def send(self, carried: Carried, *, fresh: bool = False) -> None:
        """Send a request, on a connection that was not used before if `fresh`."""
        raise NotImplementedError

    def cancel(self, carried: Carried) -> None:
        """Stop sending a request."""
        raise NotImplementedError


class EngineConnection(PacedReader):
    """One connection to an engine; carries one request at a time."""

    __slots__ = (
        "_buffer", "_decoder", "_interim", "_left", "_rest", "_rest_at", "carried", "head",
        "idle_since", "made_at", "may_upgrade", "pool", "state",
    )  # fmt: skip

    def __init__(self, pool: EnginePool) -> None:
        super().__init__(pool.turns)
        self.pool = pool
        self.state = EngineState.FRESH
        self.carried: Carried | None = None
        self.head: ResponseHead | None = None
        self.idle_since = self.made_at = 0.0
        #: The beginning of a head, and how many interim ones came before it.
        self._buffer = bytearray()
        self._interim = 0
        self._decoder: ChunkedDecoder | None = None
        self._left: int | None = None
        #: Bytes that were read and are looked at in later turns, from `_rest_at` on.
        self._rest = b""
        self._rest_at = 0
        #: True if the request asks for another protocol.
        self.may_upgrade = False

    def _leave(self) -> None:
        """Drop this connection and all unread bytes; the pool forgets it."""
        if self.state is not EngineState.CLOSED:
            self.state = states.CLOSED.take(self.state)
        self.pool.forget(self)
        self._rest, self._rest_at = b"", 0

    def refuse_special_peer(self) -> None:
        """Close and raise `OSError` where the engine's name led to where no engine can be."""
        assert self._transport is not None, "expected a connection"
        try:
            refuse_special(self._transport.get_extra_info("peername")[0])
        except OSError:
            self._transport.abort()
            raise

    # --- the request's side ---

    def begin(self, carried: Carried) -> None:
        self.carried = carried
        self.head = None
        self._decoder = None
        self.may_upgrade = False
        self._interim = 0
        self._buffer.clear()
        row = states.REUSED if self.state is _IDLE else states.BEGUN
        self.state = row.take(self.state)
        self.pool.busy.add(self)
        try:
            carried.engine_connected(self)
        except Exception:
            if self.carried is carried:
                self.abort()
            raise

    def round_trip_s(self) -> float:
        """Return how long a packet and its answer take by the kernel, in seconds, 0.0 if it does not say."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        try:
            told = b"" if sock is None else sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT.stop)
        except OSError:  # just closed
            return 0.0
        return int.from_bytes(told[_RTT], sys.byteorder) * 1e-6

    def send(self, head: bytes, body: bytes) -> None:
        transport = self._transport
        assert transport is not None, "expected a connection that was made"
        if len(body) <= _MAX_COPIED_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))

    def hand_over(self, protocol: asyncio.Protocol) -> tuple[asyncio.Transport, bytes]:
        """Give the transport to another protocol. Return it, and the bytes that came behind the head.

        `abort` still ends the connection.
        """
        unread = self._rest[self._rest_at :]
        self.carried, self._rest, self._rest_at = None, b"", 0
        return self._give(protocol), unread

    def pause(self) -> None:
        """Read no more for now: the client is slow."""
        if self.reading is not _HELD:
            self._hold_back()

    def resume(self) -> None:
        if self.reading is not _HELD:
            return
        if self._rest:
            self._continue_later()
        else:
            self._resume_reading()

    def abort(self) -> None:
        """Drop the connection at once: the engine stops working for its request."""
        self.carried = None
        self._leave()
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        self._leave()
        if self._transport is not None:
            self._transport.close()

    def _failed(self, carried: Carried, error: Exception) -> None:
        """End a request that raised an error, and this connection while it still carries it."""
        if self.carried is carried:
            self.abort()
        carried.fault(error)

    # --- asyncio's side ---

    def data_received(self, data: bytes) -> None:
        carried = self.carried
        if carried is None:
            # Bytes that no request asked for: the framing of this connection cannot be trusted.
            self.abort()
            return
        try:
            if len(data) > TURN_BYTES or self.reading is not _OPEN:
                self._rest = self._rest[self._rest_at :] + data if self._rest else data
                self._rest_at = 0
                if self.reading is _OPEN and self._turns.waiting:
                    self._continue_later()
                elif self.reading is _OPEN:
                    self._take_part(carried)
                return
            decoder = self._decoder
            # By far the most common read: an event in a chunk of its own.
            if decoder is not None and decoder.between and carried.engine_events(data):
                return
            self._receive_or_fail(carried, data)
        except Exception as error:
            self._failed(carried, error)

    def _take_part(self, carried: Carried) -> None:
        """Parse the next part of the buffer; the other connections have their turn before more is read."""
        at, size = self._rest_at, len(self._rest) - self._rest_at
        # Bytes that pass unchanged cost nothing to parse.
        if self.head is None or self._decoder is not None or not carried.plain:
            size = min(size, TURN_BYTES)
        data = self._rest[at : at + size]
        self._rest_at = at + size
        if self._rest_at >= len(self._rest):
            self._rest, self._rest_at = b"", 0
        if self._rest or size >= _LARGE_READ_BYTES or self.reading is _TURN:
            self._continue_later()
        self._receive_or_fail(carried, data)

    def turn_came(self) -> None:
        carried = self.carried
        if not self._rest or carried is None:
            self._resume_reading()
            return
        try:
            self._take_part(carried)
        except Exception as error:
            self._failed(carried, error)

    def _receive_or_fail(self, carried: Carried, data: bytes) -> None:
        try:
            self._receive(carried, data)
        except GateError as error:
            self.abort()
            carried.engine_failed(ends.JUNK, error.message)

    def _receive(self, carried: Carried, data: bytes) -> None:
        if self.head is None:
            seen = len(self._buffer)
            if seen:
                self._buffer += data
                if not head_end(self._buffer, seen=seen):
                    return
                data = bytes(self._buffer)
                self._buffer.clear()
            while True:
                end = head_end(data)
                if not end:
                    self._buffer += data
                    if self.state is not EngineState.HEAD:
                        self.state = states.ANSWER_BEGUN.take(self.state)
                    return
                raw, data = data[:end], data[end:]
                if carried.method == b"HEAD":
                    head, length = parse_response_head(raw, b"HEAD")
                else:
                    head, length = self.pool.heads.find(raw)
                if head.status >= 200:
                    break
                if head.status == 101:
                    if not self.may_upgrade:
                        raise GateError(502, "The engine switched protocols.")
                    length = None  # what follows is another protocol's
                    self._rest, self._rest_at, data = data + self._rest[self._rest_at :], 0, b""
                    break
                self._interim += 1
                if self._interim > MAX_INTERIM_ANSWERS:
                    raise GateError(502, f"The engine sent more than {MAX_INTERIM_ANSWERS} interim answers.")
            self.state = states.HEAD_READ.take(self.state)
            self.head = head
            self._decoder = ChunkedDecoder() if head.chunked else None
            self._left = length
            carried.engine_head(head, length)
            if self.carried is None:
                return
            carried = self.carried
        if self._decoder is not None:
            payload = self._decoder.feed(data) if data else b""
            if not self._decoder.done:
                if payload:
                    carried.engine_body(payload)
                return
            clean = not self._decoder.surplus and not self._rest
        elif self._left is not None:
            payload = data[: self._left]
            self._left -= len(payload)
            if self._left:
                if payload:
                    carried.engine_body(payload)
                return
            clean = len(data) == len(payload) and not self._rest
        else:
            if data:
                carried.engine_body(data)
            return
        self._end(carried, payload, clean)

    def _end(self, carried: Carried, payload: bytes, clean: bool) -> None:
        """End a whole answer: free the connection first, so that the next request may use it."""
        assert self.head is not None
        self.carried = None
        self.pool.busy.discard(self)
        transport = self._transport
        # An early answer leaves a request half-sent.
        whole = transport is not None and not transport.get_write_buffer_size()
        if clean and whole and self.head.keep_alive and transport is not None and not transport.is_closing():
            self.state = states.KEPT.take(self.state)
            if self.reading is not _OPEN:
                self._resume_reading()
            self.pool.put_back(self)
        else:
            self.close()
        carried.engine_end(payload)

    def eof_received(self) -> bool:
        if self.carried is None:
            self._leave()  # the transport closes in a later turn: it must not be taken until then
            self.pool.lost()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        left = self.state is not EngineState.CLOSED
        self._transport = None
        carried = self.carried
        try:
            while self._rest and carried is not None:  # what came before the end comes first
                self._take_part(carried)
                carried = self.carried
        except Exception as error:
            if carried is not None:
                self._failed(carried, error)
        state = self.state
        carried, self.carried = self.carried, None
        self._leave()
        if left:
            self.pool.lost()  # none of our own doing
        if carried is None:
            return
        try:
            self._lost(carried, state, exc)
        except Exception as error:
            carried.fault(error)

    def _lost(self, carried: Carried, state: EngineState, exc: Exception | None) -> None:
        """Tell a request that its connection is lost, which was in `state`."""
        if state is EngineState.RESENT and not carried.resent:
            # It was closed while idle and we learnt it too late: no failure. An engine that closes each
            # connection after a good answer would else be asked without end.
            carried.resent = True
            carried.engine_lost_idle()
        elif state is EngineState.BODY:
            if self._decoder is None and self._left is None and exc is None:
                carried.engine_end(b"")
            else:
                carried.engine_failed(ends.BROKEN, "the engine's answer broke off")
        else:
            # Part of an answer is an answer: only an engine that sent nothing may be replaced.
            end = _UNANSWERED.get(state, ends.DROPPED)
            carried.engine_failed(end, "the engine closed the connection")

    def pause_writing(self) -> None:
        # A request was written in one go: nothing to hold back.
        if self.state is EngineState.SENT:
            self.state = states.UNREAD.take(self.state)

    def resume_writing(self) -> None:
        if self.state is EngineState.SENDING:
            self.state = states.READ.take(self.state)


class SideCall(Carried):
    """A request of the proxy's own to an engine, and its whole answer, of bounded size.

    `head` is all of it but for `content-length` and the empty line. `feed` takes the body as it comes,
    instead of `done`; beyond the first `held_bytes`, which it only keeps, in turns of the loop. `error`: why
    no connection was made.
    """

    __slots__ = (
        "_answer", "_body", "_connection", "_done", "_failed", "_feed", "_head", "_held_bytes", "_most_bytes",
        "_on_fault",
        "_received", "_serves", "_size", "error", "pool",
    )  # fmt: skip

    def __init__(
        self,
        pool: EnginePool,
        head: bytes,
        body: bytes,
        done: Callable[[ResponseHead, bytes], None],
        failed: Callable[[End, str], None],
        serves: Callable[[], bool] = lambda: True,
        on_fault: Callable[[Exception], None] | None = None,
        feed: Callable[[bytes], None] | None = None,
        most_bytes: int = _MAX_ANSWER_BYTES,
        held_bytes: int = 0,
    ) -> None:
        """`on_fault` gets an error that `done` or `failed` raised; without it, `failed` is called."""
        super().__init__(b"POST" if body else b"GET")
        self.pool = pool
        self._head = head
        self._body = body
        self._done = done
        self._failed = failed
        self._serves = serves
        self._on_fault = on_fault
        self._connection: EngineConnection | None = None
        self._answer: ResponseHead | None = None
        self._received = bytearray()
        self._feed = feed
        self.plain = feed is None or held_bytes > 0
        self._held_bytes = held_bytes
        self._size, self._most_bytes = 0, most_bytes
        self.error: OSError | None = None

    def send(self) -> None:
        self.pool.send(self)

    def abort(self) -> None:
        """Abort it at the engine. No outcome is reported."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        else:
            self.pool.cancel(self)

    def engine_connected(self, connection: EngineConnection) -> None:
        self._connection = connection
        length = b"content-length: %d\r\n" % len(self._body) if self._body else b""
        connection.send(b"%b%b\r\n" % (self._head, length), self._body)

    def still_served(self) -> bool:
        return self._serves()

    def engine_lost_idle(self) -> None:
        """Note that a reused connection was closed before it answered: once more on a fresh one."""
        self._connection = None
        self.pool.send(self, fresh=True)

    def engine_head(self, head: ResponseHead, length: int | None) -> None:
        self._answer = head

    def not_connected(self, error: OSError) -> None:
        self.error = error.with_traceback(None)  # whose frames would hold this call

    def engine_body(self, payload: bytes) -> None:
        self._size += len(payload)
        if self._size > self._most_bytes:
            self.abort()
            self._failed(ends.JUNK, TOO_LONG)
        elif self._feed is None:
            self._received += payload
        else:
            self.plain = self._size < self._held_bytes
            self._feed(payload)

    def engine_end(self, payload: bytes) -> None:
        self._connection = None
        assert self._answer is not None, "expected a head before the end"
        if self._size + len(payload) > self._most_bytes:
            self._failed(ends.JUNK, TOO_LONG)
            return
        if self._feed is not None:
            if payload:
                self._feed(payload)
            payload = b""
        self._done(self._answer, bytes(self._received) + payload)

    def engine_failed(self, end: End, detail: str) -> None:
        self._connection = None
        self._failed(end, detail)

    def fault(self, error: Exception) -> None:
        self._connection = None
        if self._on_fault is not None:
            self._on_fault(error)
        else:
            self._failed(ends.FAULT, str(error))


class UnansweredError(Exception):
    """An engine did not answer a request of hetlb's own. `error`: why no connection was made."""

    def __init__(self, end: End, detail: str, error: OSError | None) -> None:
        super().__init__(detail)
        self.end = end
        self.detail = detail
        self.error = error


async def answer_of(
    pool: EnginePool,
    head: bytes,
    body: bytes = b"",
    *,
    feed: Callable[[bytes], None] | None = None,
    most_bytes: int = MAX_PAGE_BYTES,
    held_bytes: int = 0,
) -> tuple[int, bytes]:
    """Return status and body of an engine's answer to a request of hetlb's own; `feed` gets the body.

    Raises `UnansweredError`.
    """
    # No cycle of the call, the page that it feeds, and frames of an error: garbage is collected seldom.
    answer: asyncio.Future[tuple[int, bytes] | tuple[End, str]] = asyncio.get_running_loop().create_future()

    def done(head: ResponseHead, body: bytes) -> None:
        if not answer.done():
            answer.set_result((head.status, body))

    def failed(end: End, detail: str) -> None:
        if not answer.done():
            answer.set_result((end, detail))

    call = SideCall(pool, head, body, done, failed, feed=feed, most_bytes=most_bytes, held_bytes=held_bytes)
    call.send()
    try:
        found = await answer
    except BaseException:
        call.abort()
        raise
    if isinstance(found[1], str):
        raise UnansweredError(*found, call.error)
    return found
