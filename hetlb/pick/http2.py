"""HTTP/2 of a server, as far as gRPC needs it (RFC 9113): bytes in, calls of streams, bytes out. No sockets.

Read: preface, SETTINGS, HEADERS with CONTINUATION (HPACK by the package `hpack`), DATA, WINDOW_UPDATE, PING,
RST_STREAM, GOAWAY; PRIORITY and frames of unknown types are ignored. Written: the same, with header blocks
that use no dynamic table. Both directions are flow-controlled.

A peer cannot make the server hold or do more than the limits below: bytes of header blocks, streams, bytes
that wait for a window, and frames that carry nothing of a message (pings, settings, resets, empty frames,
windows of a byte), of which so many a second are taken. Beyond them the connection ends with GOAWAY.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias, cast

import hpack
from mypy_extensions import mypyc_attr

Fields: TypeAlias = list[tuple[bytes, bytes]]

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
_WITH_PRIORITY: Final = 0x20

#: Error codes (RFC 9113, 7).
NO_ERROR: Final = 0
PROTOCOL_ERROR: Final = 1
FLOW_CONTROL_ERROR: Final = 3
STREAM_CLOSED: Final = 5
FRAME_SIZE_ERROR: Final = 6
REFUSED_STREAM: Final = 7
COMPRESSION_ERROR: Final = 9
ENHANCE_YOUR_CALM: Final = 11

#: Identifiers of settings (RFC 9113, 6.5.2).
_ENABLE_PUSH: Final = 2
_MAX_CONCURRENT_STREAMS: Final = 3
_INITIAL_WINDOW_SIZE: Final = 4
_MAX_FRAME_SIZE: Final = 5
_MAX_HEADER_LIST_SIZE: Final = 6

#: The largest frame that is taken (the default of the protocol), and the largest that is sent.
MAX_FRAME: Final = 16_384
_DEFAULT_WINDOW: Final = 65_535
_MAX_WINDOW: Final = (1 << 31) - 1
#: Bytes that a peer may send ahead, per stream and in all.
STREAM_WINDOW: Final = 1 << 20
CONNECTION_WINDOW: Final = 16 << 20
#: Streams open at once; a gateway opens another connection for more.
MAX_STREAMS: Final = 10_000
#: A header block, compressed and as a list; frames that it may come in.
MAX_BLOCK: Final = 32 << 10
MAX_HEADER_LIST: Final = 64 << 10
MAX_CONTINUATIONS: Final = 8
#: Frames that carry nothing of a message: so many at once, so many each second.
LIGHT_BURST: Final = 10_000
LIGHT_PER_S: Final = 10_000
#: Header blocks whose fields are remembered.
_MOST_KNOWN: Final = 64
_PSEUDO: Final = (b":method", b":scheme", b":authority", b":path")
#: Fields of a connection: a message that has one is malformed (RFC 9113, 8.2.2).
_OF_CONNECTIONS: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)


class ConnectionFailure(Exception):
    """The connection cannot go on: GOAWAY with `code` is its end."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@mypyc_attr(allow_interpreted_subclasses=True)
class Http2Stream:
    """One stream, that is one request: subclasses take what comes."""

    def __init__(self, connection: Http2Connection, number: int) -> None:
        self.connection = connection
        self.number = number
        #: True once the peer has said that nothing more comes.
        self.half_closed = False
        #: True once nothing more may be sent: it was ended or reset, from here or from there.
        self.over = False
        self.credit = STREAM_WINDOW
        self.taken = 0
        #: Its send window, less the peer's initial one, which the peer may change.
        self.window = 0
        #: Bytes that wait for a window, and the trailers behind them.
        self.pending: deque[bytes] | None = None
        self.trailers: bytes | None = None

    def on_data(self, piece: bytes, end: bool) -> None:
        """A part of the request's body came; `end`: it was the last."""
        raise NotImplementedError

    def on_reset(self) -> None:
        """The peer reset the stream, or the connection is gone."""
        raise NotImplementedError


Accept: TypeAlias = Callable[["Http2Connection", int, Fields], Http2Stream]


class Http2Connection:
    """The server's side of a connection.

    `accept` makes the stream of a request's fields; `wake` is called when there is something to write that no
    call of `receive` is about to return from. `most_pending`: bytes that may wait for windows.
    """

    def __init__(self, accept: Accept, wake: Callable[[], None], most_pending: int) -> None:
        self._accept = accept
        self._wake = wake
        self._most_pending = most_pending
        self.streams: dict[int, Http2Stream] = {}
        #: True once the connection is to be closed, after what `take` returns was written.
        self.closing = False
        #: True once the preface came.
        self.greeted = False
        self._last = 0
        self._parts: list[bytes] = []
        self._have = 0
        self._need = len(PREFACE)
        self._settled = False
        self._now = 0.0
        self._light = 0.0
        self._light_at = 0.0
        # Header block that is not whole: its stream, flags of its first frame, pieces.
        self._block_of = 0
        self._block_flags = 0
        self._block: list[bytes] = []
        self._block_bytes = 0
        self._decoder = hpack.Decoder(max_header_list_size=MAX_HEADER_LIST)
        self._known: dict[bytes, Fields | None] = {}
        # Flow control: what the peer may send, and what may be sent to it.
        self._credit = CONNECTION_WINDOW
        self._taken = 0
        self._window = _DEFAULT_WINDOW
        self._initial = _DEFAULT_WINDOW
        self._pending_bytes = 0
        #: Streams with bytes that wait for the connection's window, the longest waiting first.
        self._starved: dict[int, Http2Stream] = {}
        self._receiving = False
        self._pinged = False
        settings = (
            (_MAX_CONCURRENT_STREAMS, MAX_STREAMS),
            (_INITIAL_WINDOW_SIZE, STREAM_WINDOW),
            (_MAX_HEADER_LIST_SIZE, MAX_HEADER_LIST),
        )
        body = b"".join([key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in settings])
        self._out: list[bytes] = [
            _frame(SETTINGS, 0, 0, body),
            _number(WINDOW_UPDATE, 0, CONNECTION_WINDOW - _DEFAULT_WINDOW),
        ]

    @property
    def incomplete(self) -> bool:
        """True if a preface or a header block has begun to come and is not whole."""
        return not self.greeted or self._block_of != 0

    def take(self) -> bytes:
        """Bytes to be written now."""
        out = self._out
        if len(out) == 1:
            data = out[0]
        else:
            data = b"".join(out)
        self._out = []
        return data

    # --- in ---

    def receive(self, data: bytes, now: float) -> None:
        """Take what was read at the time `now`. Nothing is raised: an error ends in GOAWAY and `closing`."""
        if self.closing:
            return
        self._pinged = False
        self._now = now
        if self._parts or len(data) < self._need:
            self._parts.append(data)
            self._have += len(data)
            if self._have < self._need:
                return
            data = b"".join(self._parts)
            self._parts = []
        self._receiving = True
        try:
            rest = self._frames(data)
            self._have = len(rest)
            if rest:
                self._parts.append(rest)
        except ConnectionFailure as failure:
            self.fail(failure.code, failure.reason)
        finally:
            self._receiving = False

    def _frames(self, data: bytes) -> bytes:
        """Take every whole frame; returns the rest. Raises `ConnectionFailure`."""
        at = 0
        if not self.greeted:
            at = len(PREFACE)
            if data[:at] != PREFACE:
                raise ConnectionFailure(PROTOCOL_ERROR, "no preface of HTTP/2")
            self.greeted = True
        size = len(data)
        self._need = 9
        while size - at >= 9:
            length = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            if length > MAX_FRAME:
                raise ConnectionFailure(FRAME_SIZE_ERROR, "a frame is larger than announced")
            begin = at + 9
            end = begin + length
            if end > size:
                self._need = length + 9
                break
            kind = data[at + 3]
            flags = data[at + 4]
            number = (data[at + 5] & 0x7F) << 24 | data[at + 6] << 16 | data[at + 7] << 8 | data[at + 8]
            at = end
            if self._block_of != 0 and (kind != CONTINUATION or number != self._block_of):
                raise ConnectionFailure(PROTOCOL_ERROR, "a header block was interrupted")
            if kind == DATA and self._settled:
                self._data(number, flags, data[begin:end])
            else:
                self._other(kind, number, flags, data[begin:end])
            if self.closing:
                return b""
        return data[at:] if at < size else b""

    def _other(self, kind: int, number: int, flags: int, payload: bytes) -> None:
        if not self._settled and (kind != SETTINGS or flags & ACK):
            raise ConnectionFailure(PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if kind == HEADERS:
            self._headers(number, flags, payload)
        elif kind == WINDOW_UPDATE:
            self._window_update(number, payload)
        elif kind == RST_STREAM:
            self._rst_stream(number, payload)
        elif kind == SETTINGS:
            self._settings(number, flags, payload)
        elif kind == PING:
            self._ping(number, flags, payload)
        elif kind == CONTINUATION:
            self._continuation(number, flags, payload)
        elif kind == GOAWAY:
            if number:
                raise ConnectionFailure(PROTOCOL_ERROR, "GOAWAY on a stream")
            self._count_light(1)  # the peer opens no further stream, and closes when it likes
        elif kind == PUSH_PROMISE:
            raise ConnectionFailure(PROTOCOL_ERROR, "a client pushes nothing")
        elif kind == PRIORITY:
            if number == 0:
                raise ConnectionFailure(PROTOCOL_ERROR, "PRIORITY without a stream")
            self._count_light(1)
            if len(payload) != 5:
                self._reset(number, FRAME_SIZE_ERROR)
        else:
            self._count_light(1)

    def _count_light(self, count: int) -> None:
        """A frame came that carries nothing of a message. Raises `ConnectionFailure` at too many."""
        now = self._now
        self._light = max(0.0, self._light - (now - self._light_at) * LIGHT_PER_S) + count
        self._light_at = now
        if self._light > LIGHT_BURST:
            raise ConnectionFailure(ENHANCE_YOUR_CALM, "too many frames that carry nothing")

    def _data(self, number: int, flags: int, payload: bytes) -> None:
        size = len(payload)
        self._credit -= size
        if self._credit < 0:
            raise ConnectionFailure(FLOW_CONTROL_ERROR, "more data than the window")
        self._taken += size
        if self._taken >= CONNECTION_WINDOW // 2:
            self._out.append(_number(WINDOW_UPDATE, 0, self._taken))
            self._credit += self._taken
            self._taken = 0
        if flags & PADDED:
            payload = _without_padding(payload)
        stream = self.streams.get(number)
        if stream is None:
            self._closed_before(number)
            self._count_light(1)
            return
        if stream.half_closed:
            self._count_light(1)
            self._abort(stream, STREAM_CLOSED)
            return
        stream.credit -= size
        if stream.credit < 0:
            self._abort(stream, FLOW_CONTROL_ERROR)
            return
        end = flags & END_STREAM != 0
        if end:
            stream.half_closed = True
        else:
            if not payload:
                self._count_light(1)
            stream.taken += size
            if stream.taken >= STREAM_WINDOW // 2:
                self._out.append(_number(WINDOW_UPDATE, number, stream.taken))
                stream.credit += stream.taken
                stream.taken = 0
        stream.on_data(payload, end)

    def _closed_before(self, number: int) -> None:
        """Raise `ConnectionFailure` unless a stream of this number was open and is not any more."""
        if number > self._last or number & 1 == 0:
            raise ConnectionFailure(PROTOCOL_ERROR, f"stream {number} was never opened")

    def _headers(self, number: int, flags: int, payload: bytes) -> None:
        if number & 1 == 0:
            raise ConnectionFailure(PROTOCOL_ERROR, f"a client opens no stream {number}")
        if flags & PADDED:
            payload = _without_padding(payload)
        if flags & _WITH_PRIORITY:
            if len(payload) < 5:
                raise ConnectionFailure(FRAME_SIZE_ERROR, "HEADERS without its priority")
            payload = payload[5:]
        if flags & END_HEADERS:
            self._header_block(number, flags, payload)
            return
        self._block_of, self._block_flags = number, flags
        self._block, self._block_bytes = [payload], len(payload)

    def _continuation(self, number: int, flags: int, payload: bytes) -> None:
        if self._block_of == 0:
            raise ConnectionFailure(PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._block.append(payload)
        self._block_bytes += len(payload)
        if self._block_bytes > MAX_BLOCK or len(self._block) > MAX_CONTINUATIONS:
            raise ConnectionFailure(ENHANCE_YOUR_CALM, "a header block is too long")
        if flags & END_HEADERS:
            block, self._block = b"".join(self._block), []
            self._block_of = 0
            self._header_block(number, self._block_flags, block)

    def _header_block(self, number: int, flags: int, block: bytes) -> None:
        fields = self._decoded(block)
        end = flags & END_STREAM != 0
        stream = self.streams.get(number)
        if stream is not None:
            if stream.half_closed:
                self._count_light(1)
                self._abort(stream, STREAM_CLOSED)
            elif not end:
                self._abort(stream, PROTOCOL_ERROR)
            else:
                stream.half_closed = True
                stream.on_data(b"", True)
            return
        if number <= self._last:
            self._count_light(1)  # trailers of a stream that was ended from here
            return
        self._last = number
        if fields is None:
            self._count_light(1)
            self._reset(number, PROTOCOL_ERROR)
        elif len(self.streams) >= MAX_STREAMS:
            self._count_light(1)
            self._reset(number, REFUSED_STREAM)
        else:
            stream = self._accept(self, number, fields)
            if not stream.over:
                self.streams[number] = stream
                if end:
                    stream.half_closed = True
                    stream.on_data(b"", True)

    def _decoded(self, block: bytes) -> Fields | None:
        """Fields of a header block, None if they are malformed. Raises `ConnectionFailure`.

        A block that came before, with the same dynamic table, is not decoded again.
        """
        known = self._known
        if block in known:
            return known[block]
        newest = self._newest_entry()
        try:
            fields = cast(Fields, [(name, value) for name, value in self._decoder.decode(block, raw=True)])
        except hpack.OversizedHeaderListError as error:
            raise ConnectionFailure(ENHANCE_YOUR_CALM, "a list of fields is too long") from error
        except (hpack.HPACKError, UnicodeDecodeError) as error:
            raise ConnectionFailure(COMPRESSION_ERROR, "a header block cannot be decoded") from error
        read = None if _malformed(fields) else fields
        resized = len(block) > 0 and block[0] & 0xE0 == 0x20
        changed = resized or self._newest_entry() is not newest
        if changed or len(known) >= _MOST_KNOWN:
            known.clear()
        if not changed:
            known[block] = read
        return read

    def _newest_entry(self) -> object:
        """Newest entry of the dynamic table: another one after each change but of the table's size."""
        entries = self._decoder.header_table.dynamic_entries
        return entries[0] if entries else None

    def _rst_stream(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFailure(FRAME_SIZE_ERROR, "RST_STREAM has four bytes")
        stream = self.streams.get(number)
        if stream is None:
            self._closed_before(number)
            self._count_light(1)
            return
        if stream.credit == STREAM_WINDOW and not stream.taken:
            self._count_light(1)  # opened and reset: nothing of a message came
        self._forget(stream)
        stream.on_reset()

    def _settings(self, number: int, flags: int, payload: bytes) -> None:
        if number:
            raise ConnectionFailure(PROTOCOL_ERROR, "SETTINGS on a stream")
        self._count_light(1)
        size = len(payload)
        if flags & ACK:
            if size:
                raise ConnectionFailure(FRAME_SIZE_ERROR, "an acknowledgement of SETTINGS is empty")
            return
        if size % 6:
            raise ConnectionFailure(FRAME_SIZE_ERROR, "SETTINGS are of six bytes each")
        self._settled = True
        for at in range(0, size, 6):
            key = payload[at] << 8 | payload[at + 1]
            value = payload[at + 2] << 24 | payload[at + 3] << 16 | payload[at + 4] << 8 | payload[at + 5]
            if key == _INITIAL_WINDOW_SIZE:
                if value > _MAX_WINDOW:
                    raise ConnectionFailure(FLOW_CONTROL_ERROR, "the initial window is too large")
                self._resize_windows(value)
            elif key == _ENABLE_PUSH and value > 1:
                raise ConnectionFailure(PROTOCOL_ERROR, "ENABLE_PUSH is 0 or 1")
            elif key == _MAX_FRAME_SIZE and not MAX_FRAME <= value < 1 << 24:
                raise ConnectionFailure(PROTOCOL_ERROR, "MAX_FRAME_SIZE is out of range")
        self._out.append(_frame(SETTINGS, ACK, 0, b""))

    def _resize_windows(self, initial: int) -> None:
        grows = initial > self._initial
        self._count_light(len(self.streams) // 100)  # every window is looked at
        self._initial = initial
        for stream in list(self.streams.values()):
            if initial + stream.window > _MAX_WINDOW:
                raise ConnectionFailure(FLOW_CONTROL_ERROR, "a window is too large")
            if grows and stream.pending is not None:
                self._send_pending(stream)

    def _ping(self, number: int, flags: int, payload: bytes) -> None:
        if number:
            raise ConnectionFailure(PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise ConnectionFailure(FRAME_SIZE_ERROR, "PING has eight bytes")
        self._count_light(1)
        if not flags & ACK:
            self._out.append(_frame(PING, ACK, 0, payload))

    def _window_update(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFailure(FRAME_SIZE_ERROR, "WINDOW_UPDATE has four bytes")
        self._count_light(1)
        more = (payload[0] & 0x7F) << 24 | payload[1] << 16 | payload[2] << 8 | payload[3]
        if number == 0:
            self._window += more
            if more == 0:
                raise ConnectionFailure(PROTOCOL_ERROR, "a window grows by nothing")
            if self._window > _MAX_WINDOW:
                raise ConnectionFailure(FLOW_CONTROL_ERROR, "the window is too large")
            while self._starved and self._window > 0:
                first = next(iter(self._starved))
                self._send_pending(self._starved.pop(first))
            return
        stream = self.streams.get(number)
        if stream is None:
            self._closed_before(number)
            return
        stream.window += more
        if more == 0:
            self._abort(stream, PROTOCOL_ERROR)
        elif self._initial + stream.window > _MAX_WINDOW:
            self._abort(stream, FLOW_CONTROL_ERROR)
        elif stream.pending is not None:
            self._send_pending(stream)

    # --- out ---

    def send_headers(self, stream: Http2Stream, block: bytes) -> None:
        """Begin the response. `block` uses no dynamic table."""
        if not stream.over:
            self._write(_frame(HEADERS, END_HEADERS, stream.number, block))

    def send_data(self, stream: Http2Stream, data: bytes) -> None:
        """Send a part of the response's body, as soon as the windows allow it."""
        if stream.over:
            return
        size = len(data)
        if (
            stream.pending is None
            and size <= MAX_FRAME
            and size <= self._window
            and size <= self._initial + stream.window
        ):
            self._window -= size
            stream.window -= size
            self._write(_frame(DATA, 0, stream.number, data))
            return
        if stream.pending is None:
            stream.pending = deque()
        for at in range(0, size, MAX_FRAME):
            stream.pending.append(data[at : at + MAX_FRAME])
        self._pending_bytes += size
        if stream.number not in self._starved:
            self._send_pending(stream)
        if self._pending_bytes > self._most_pending:
            self.fail(ENHANCE_YOUR_CALM, "too many bytes wait for a window")

    def send_end(self, stream: Http2Stream, block: bytes) -> None:
        """End the response with these trailers, after what waits for a window."""
        if stream.over:
            return
        if stream.pending is not None:
            stream.trailers = block
            return
        self._write(_frame(HEADERS, END_HEADERS | END_STREAM, stream.number, block))
        if not stream.half_closed:
            self._write(_number(RST_STREAM, stream.number, NO_ERROR))
        self._forget(stream)

    def _send_pending(self, stream: Http2Stream) -> None:
        """Send of what waits as much as the windows allow."""
        pending = stream.pending
        if stream.over or pending is None:
            return
        while pending:
            data = pending[0]
            size = min(len(data), self._window, self._initial + stream.window)
            if size <= 0:
                if self._window <= 0:
                    self._starved[stream.number] = stream
                return
            if size < len(data):
                pending[0] = data[size:]
                data = data[:size]
            else:
                pending.popleft()
            self._window -= size
            stream.window -= size
            self._pending_bytes -= size
            self._write(_frame(DATA, 0, stream.number, data))
        stream.pending = None
        if stream.trailers is not None:
            self.send_end(stream, stream.trailers)

    def ping(self) -> bool:
        """Ask for a sign of life; False if nothing came since the last time."""
        if self._pinged:
            return False
        self._pinged = True
        self._write(_frame(PING, 0, 0, b"hetlb   "))
        return True

    def go_away(self) -> None:
        """Ask the peer to open its next streams elsewhere; those that are open go on."""
        self._write(_frame(GOAWAY, 0, 0, _MAX_WINDOW.to_bytes(4, "big") + bytes(4)))

    def fail(self, code: int, reason: str) -> None:
        """End the connection: every stream is reset, and GOAWAY is the last frame."""
        if self.closing:
            return
        self.closing = True
        body = self._last.to_bytes(4, "big") + code.to_bytes(4, "big") + reason.encode("ascii")
        self._write(_frame(GOAWAY, 0, 0, body))
        self.lost()

    def lost(self) -> None:
        """The connection is gone, and every stream with it."""
        self.closing = True
        streams, self.streams = self.streams, {}
        self._starved = {}
        for stream in streams.values():
            stream.over = True
            stream.on_reset()

    def _abort(self, stream: Http2Stream, code: int) -> None:
        """A stream cannot go on."""
        self._reset(stream.number, code)
        self._forget(stream)
        stream.on_reset()

    def _reset(self, number: int, code: int) -> None:
        self._write(_number(RST_STREAM, number, code))

    def _forget(self, stream: Http2Stream) -> None:
        stream.over = True
        self.streams.pop(stream.number, None)
        self._starved.pop(stream.number, None)
        pending, stream.pending = stream.pending, None
        if pending is not None:
            self._pending_bytes -= sum([len(each) for each in pending])

    def _write(self, frame: bytes) -> None:
        if not self._out and not self._receiving:
            self._wake()
        self._out.append(frame)


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    head = len(payload) << 48 | kind << 40 | flags << 32 | number
    return head.to_bytes(9, "big") + payload


def _number(kind: int, number: int, value: int) -> bytes:
    """A frame of one number."""
    return _frame(kind, 0, number, value.to_bytes(4, "big"))


def _without_padding(payload: bytes) -> bytes:
    """Raises `ConnectionFailure`."""
    size = len(payload)
    if size == 0 or payload[0] >= size:
        raise ConnectionFailure(PROTOCOL_ERROR, "more padding than frame")
    end = size - payload[0]
    return payload[1:end]


def _malformed(fields: Fields) -> bool:
    """True if a request may not have these fields (RFC 9113, 8.2 and 8.3); trailers have no pseudo-fields."""
    seen: set[bytes] = set()
    regular = False
    for name, value in fields:
        if name[:1] == b":":
            if regular or name in seen or name not in _PSEUDO:
                return True
            seen.add(name)
            continue
        regular = True
        if not name or name != name.lower() or name in _OF_CONNECTIONS:
            return True
        if name == b"te" and value != b"trailers":
            return True
    return not {b":method", b":scheme", b":path"} <= seen
