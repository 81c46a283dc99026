"""HTTP/2 in memory: two readings agree, windows hold, and no peer makes the server do or hold too much."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pick.frames import LARGEST, PATH, Peer, block, data, frame, message, opened

from hetlb.pick import http2
from hetlb.pick.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    MAX_FRAME,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    STREAM_WINDOW,
    WINDOW_UPDATE,
)

CALL = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", PATH.decode()),
    (":authority", "picker"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]


class Client:
    """The package h2 as a client of a server in memory: it raises at whatever the server may not send."""

    def __init__(self, window: int, connection_window: int, cut: int) -> None:
        self.peer = Peer()
        self.cut = cut
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        self.h2.initiate_connection()
        self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        if connection_window > 65_535:
            self.h2.increment_flow_control_window(connection_window - 65_535)
        self.bodies: dict[int, bytes] = {}
        self.status: dict[int, str] = {}
        self.waiting: dict[int, bytes] = {}
        self._to_client = b"".join(frame(*each[:3], each[3]) for each in self.peer.written)

    def turn(self) -> bool:
        """Exchange what there is; False if there was nothing."""
        for number, body in list(self.waiting.items()):
            room = min(self.h2.local_flow_control_window(number), len(body))
            for at in range(0, room, MAX_FRAME):
                piece = body[at : min(room, at + MAX_FRAME)]
                self.h2.send_data(number, piece, end_stream=at + len(piece) == len(body))
            self.waiting[number] = body[room:]
            if room == len(body):
                del self.waiting[number]
        sent = self.h2.data_to_send()
        for at in range(0, len(sent), self.cut):
            written = self.peer.send(sent[at : at + self.cut])
            self._to_client += b"".join(frame(*each[:3], each[3]) for each in written)
        came, self._to_client = self._to_client, b""
        for event in self.h2.receive_data(came) if came else ():
            if isinstance(event, h2.events.DataReceived):
                self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
                self.status[event.stream_id] = dict(event.headers).get("grpc-status", "")
        return bool(sent or came)


@settings(max_examples=40)
@given(
    calls=st.lists(st.lists(st.integers(0, 60_000), max_size=3), min_size=1, max_size=4),
    window=st.sampled_from([1000, 16_384, 65_535, 1 << 20]),
    connection_window=st.sampled_from([65_535, 1 << 20]),
    cut=st.sampled_from([1000, 16_393, 1 << 20]),
)
def test_what_another_client_sends_comes_back(
    calls: list[list[int]], window: int, connection_window: int, cut: int
) -> None:
    client = Client(window, connection_window, cut)
    expected: dict[int, bytes] = {}
    for sizes in calls:
        number = client.h2.get_next_available_stream_id()
        body = b"".join(message(bytes([number]) * size) for size in sizes)
        client.h2.send_headers(number, CALL, end_stream=not body)
        if body:
            client.waiting[number] = expected[number] = body
        else:
            expected[number] = b""
    while client.turn():
        pass
    assert {number: client.bodies.get(number, b"") for number in expected} == expected
    assert client.status == dict.fromkeys(expected, "0")
    assert not client.peer.http2.streams
    assert client.peer.goaway is None


@pytest.mark.parametrize("size", [0, 1, 5, MAX_FRAME, 3 * MAX_FRAME + 1])
def test_reads_of_single_bytes_give_the_same(size: int) -> None:
    body = message(b"x" * size)
    parts = [data(1, body[at : at + MAX_FRAME]) for at in range(0, len(body), MAX_FRAME)]
    raw = PREFACE + frame(SETTINGS) + opened() + b"".join(parts) + data(1, b"", end=True)
    whole, single = Peer(), Peer()
    whole.send(raw)
    single.send(*(raw[at : at + 1] for at in range(len(raw))))
    assert whole.messages == single.messages == [b"x" * size]
    assert whole.written == single.written


def test_fields_are_read_in_pieces_and_with_a_dynamic_table() -> None:
    """The same bytes of a block mean other fields once the table has changed."""
    peer, encoder = Peer().greet(), hpack.Encoder()
    for number in range(1, 41, 2):
        tag = b"%d" % (number // 8)
        encoded = encoder.encode([*((n.encode(), v.encode()) for n, v in CALL), (b"x-tag", tag)])
        half = len(encoded) // 2
        peer.send(
            frame(HEADERS, END_STREAM, number, encoded[:half])
            + frame(CONTINUATION, END_HEADERS, number, encoded[half:])
        )
    assert peer.goaway is None
    assert len(peer.calls) == 20


def test_a_block_that_is_remembered_is_forgotten_when_the_table_changes() -> None:
    peer = Peer().greet()
    fields = [(n.encode(), v.encode()) for n, v in CALL]
    encoder = hpack.Encoder()
    first = encoder.encode(fields)  # the table gets path, authority, content-type and te
    second = encoder.encode(fields)  # all of them by their places in it
    peer.send(frame(HEADERS, END_HEADERS, 1, first), frame(HEADERS, END_HEADERS, 3, second))
    peer.send(frame(HEADERS, END_HEADERS, 5, second))
    assert len(peer.calls) == 3
    other = [(n, b"/other" if n == b":path" else v) for n, v in fields]
    peer.send(frame(HEADERS, END_HEADERS, 7, encoder.encode(other)))
    # Every place has moved by one: these bytes are another request now, and no valid one.
    peer.send(frame(HEADERS, END_HEADERS, 9, second))
    assert len(peer.calls) == 3
    assert peer.resets[9] == http2.PROTOCOL_ERROR


SETTING = b"\0%c%b"
PINGED = frame(PING, 0, 0, bytes(8))
LARGEST_WINDOW = frame(SETTINGS, 0, 0, SETTING % (4, b"\x7f\xff\xff\xff"))
CONNECTION_ERRORS: dict[str, tuple[bytes, int]] = {
    "HTTP/1.1": (b"GET / HTTP/1.1\r\nhost: picker\r\n\r\n", http2.PROTOCOL_ERROR),
    "no SETTINGS first": (PREFACE + frame(PING, 0, 0, bytes(8)), http2.PROTOCOL_ERROR),
    "data first": (PREFACE + data(1, b"x"), http2.PROTOCOL_ERROR),
    "an ACK first": (PREFACE + frame(SETTINGS, ACK), http2.PROTOCOL_ERROR),
}
FRAME_ERRORS: dict[str, tuple[bytes, int]] = {
    "a frame too large": (frame(DATA, 0, 1, bytes(MAX_FRAME + 1)), http2.FRAME_SIZE_ERROR),
    "data on no stream": (data(0, b"x"), http2.PROTOCOL_ERROR),
    "data on an idle stream": (data(1, b"x"), http2.PROTOCOL_ERROR),
    "data on a stream of ours": (data(2, b"x"), http2.PROTOCOL_ERROR),
    "headers on no stream": (frame(HEADERS, END_HEADERS, 0, block()), http2.PROTOCOL_ERROR),
    "headers on a stream of ours": (frame(HEADERS, END_HEADERS, 2, block()), http2.PROTOCOL_ERROR),
    "headers without priority": (frame(HEADERS, END_HEADERS | 0x20, 1, b"abc"), http2.FRAME_SIZE_ERROR),
    "padding of headers": (frame(HEADERS, END_HEADERS | PADDED, 1, b"\x05abc"), http2.PROTOCOL_ERROR),
    "padding of data": (opened() + frame(DATA, PADDED, 1, b"\x01"), http2.PROTOCOL_ERROR),
    "padding of nothing": (opened() + frame(DATA, PADDED, 1), http2.PROTOCOL_ERROR),
    "a block that is none": (frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff"), http2.COMPRESSION_ERROR),
    "an index of nothing": (frame(HEADERS, END_HEADERS, 1, b"\x80"), http2.COMPRESSION_ERROR),
    "a table too large": (frame(HEADERS, END_HEADERS, 1, b"\x3f\xe1\xff\x03"), http2.COMPRESSION_ERROR),
    "an interrupted block": (frame(HEADERS, 0, 1, block()) + PINGED, http2.PROTOCOL_ERROR),
    "another stream's block": (
        frame(HEADERS, 0, 1, block()) + frame(CONTINUATION, END_HEADERS, 3), http2.PROTOCOL_ERROR,
    ),
    "a continuation of nothing": (frame(CONTINUATION, END_HEADERS, 1, block()), http2.PROTOCOL_ERROR),
    "priority of no stream": (frame(PRIORITY, 0, 0, bytes(5)), http2.PROTOCOL_ERROR),
    "a reset of no stream": (frame(RST_STREAM, 0, 0, bytes(4)), http2.PROTOCOL_ERROR),
    "a reset of an idle stream": (frame(RST_STREAM, 0, 1, bytes(4)), http2.PROTOCOL_ERROR),
    "a reset of three bytes": (opened() + frame(RST_STREAM, 0, 1, bytes(3)), http2.FRAME_SIZE_ERROR),
    "settings of a stream": (frame(SETTINGS, 0, 1), http2.PROTOCOL_ERROR),
    "settings of five bytes": (frame(SETTINGS, 0, 0, bytes(5)), http2.FRAME_SIZE_ERROR),
    "an ACK with settings": (frame(SETTINGS, ACK, 0, bytes(6)), http2.FRAME_SIZE_ERROR),
    "push is 2": (frame(SETTINGS, 0, 0, SETTING % (2, b"\0\0\0\2")), http2.PROTOCOL_ERROR),
    "a window of 2^31": (frame(SETTINGS, 0, 0, SETTING % (4, b"\x80\0\0\0")), http2.FLOW_CONTROL_ERROR),
    "frames of 100 bytes": (frame(SETTINGS, 0, 0, SETTING % (5, b"\0\0\0\x64")), http2.PROTOCOL_ERROR),
    "a promise": (frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4)), http2.PROTOCOL_ERROR),
    "a ping of a stream": (frame(PING, 0, 1, bytes(8)), http2.PROTOCOL_ERROR),
    "a ping of seven bytes": (frame(PING, 0, 0, bytes(7)), http2.FRAME_SIZE_ERROR),
    "GOAWAY of a stream": (frame(GOAWAY, 0, 1, bytes(8)), http2.PROTOCOL_ERROR),
    "a window of three bytes": (frame(WINDOW_UPDATE, 0, 0, bytes(3)), http2.FRAME_SIZE_ERROR),
    "a window of nothing": (frame(WINDOW_UPDATE, 0, 0, bytes(4)), http2.PROTOCOL_ERROR),
    "a window too large": (frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), http2.FLOW_CONTROL_ERROR),
    "a window of an idle stream": (frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1"), http2.PROTOCOL_ERROR),
    "initial windows too large": (
        opened() + frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1") + LARGEST_WINDOW,
        http2.FLOW_CONTROL_ERROR,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CONNECTION_ERRORS, *FRAME_ERRORS])
def test_an_error_of_the_connection_ends_it(name: str) -> None:
    """RFC 9113: the code of GOAWAY; every stream that was open is told, once, and nothing else is read."""
    peer = Peer()
    if name in CONNECTION_ERRORS:
        raw, code = CONNECTION_ERRORS[name]
    else:
        raw, code = FRAME_ERRORS[name]
        peer.greet()
    peer.send(raw)
    assert peer.goaway == code
    assert peer.http2.closing
    assert peer.written[-1][0] == GOAWAY
    assert [call.resets for call in peer.calls] == [1] * len(peer.calls)
    assert peer.send(opened(11)) == []


STREAM_ERRORS: dict[str, tuple[bytes, int]] = {
    "a name in capitals": (frame(HEADERS, END_HEADERS, 1, block((b"X-A", b"1"))), http2.PROTOCOL_ERROR),
    "a pseudo-field that is none": (frame(HEADERS, END_HEADERS, 1, block(status=b"1")), http2.PROTOCOL_ERROR),
    "a pseudo-field behind others": (
        frame(HEADERS, END_HEADERS, 1, block((b":authority", b"a"))), http2.PROTOCOL_ERROR,
    ),
    "no path": (frame(HEADERS, END_HEADERS, 1, block(path=None)), http2.PROTOCOL_ERROR),
    "no fields": (frame(HEADERS, END_HEADERS, 1), http2.PROTOCOL_ERROR),
    "a field of connections": (
        frame(HEADERS, END_HEADERS, 1, block((b"connection", b"close"))), http2.PROTOCOL_ERROR,
    ),
    "te: gzip": (frame(HEADERS, END_HEADERS, 1, block((b"te", b"gzip"))), http2.PROTOCOL_ERROR),
    "headers twice": (opened() + opened(), http2.PROTOCOL_ERROR),
    "headers after the end": (opened(end=True) + opened(), 0),
    "a window of nothing": (opened() + frame(WINDOW_UPDATE, 0, 1, bytes(4)), http2.PROTOCOL_ERROR),
    "a window too large": (
        opened() + frame(WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff"), http2.FLOW_CONTROL_ERROR,
    ),
    "priority of four bytes": (opened() + frame(PRIORITY, 0, 1, bytes(4)), http2.FRAME_SIZE_ERROR),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAM_ERRORS)
def test_an_error_of_a_stream_ends_that_alone(name: str) -> None:
    raw, code = STREAM_ERRORS[name]
    peer = Peer().greet()
    peer.send(raw)
    assert peer.resets.get(1, 0) == code
    assert peer.goaway is None
    peer.send(opened(3) + data(3, message(b"more"), end=True))
    assert peer.messages == [b"more"]
    assert not [number for number in peer.http2.streams if number != 1]


def test_data_after_the_end_is_an_error_of_the_stream() -> None:
    peer = Peer().greet()
    # The window is shut, so that the answer, and with it the stream, is still there.
    peer.send(frame(SETTINGS, 0, 0, SETTING % (4, bytes(4))))
    peer.send(opened() + data(1, message(b"x"), end=True) + data(1, b"more"))
    assert peer.resets == {1: http2.STREAM_CLOSED}
    assert peer.calls[0].resets == 1


def test_more_data_than_the_windows_is_an_error() -> None:
    piece = bytes(MAX_FRAME)
    large = b"\0" + (LARGEST - 5).to_bytes(4, "big")
    stream = Peer().greet()
    stream.send(opened())
    stream.http2.streams[1].taken = -STREAM_WINDOW  # as if the window was not given back
    stream.send(data(1, large))
    stream.send(*[data(1, piece)] * (STREAM_WINDOW // MAX_FRAME))
    assert stream.resets == {1: http2.FLOW_CONTROL_ERROR}
    # Bytes of streams that are gone count for the connection all the same, and the window is given back.
    gone = Peer().greet()
    gone.send(opened(), frame(RST_STREAM, 0, 1, bytes(4)))
    gone.send(*[data(1, piece)] * (2 * http2.CONNECTION_WINDOW // MAX_FRAME))
    assert gone.goaway is None
    given = sum(
        int.from_bytes(body, "big") for kind, _, n, body in gone.written if (kind, n) == (WINDOW_UPDATE, 0)
    )
    assert given >= 2 * http2.CONNECTION_WINDOW


FLOODS: dict[str, bytes] = {
    "pings": frame(PING, 0, 0, bytes(8)),
    "settings": frame(SETTINGS, 0, 0, SETTING % (4, b"\0\1\0\0")),
    "priorities": frame(PRIORITY, 0, 1, bytes(5)),
    "unknown frames": frame(0x42, 0, 1, b"x"),
    "empty data": data(1, b""),
    "windows of a byte": frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1"),
    "resets of nothing": frame(RST_STREAM, 0, 3, bytes(4)),
    "data of a stream that is gone": data(3, b""),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_ends_the_connection_and_the_usual_does_not(name: str) -> None:
    unit = FLOODS[name]
    before = opened(1) + opened(3) + frame(RST_STREAM, 0, 3, bytes(4))
    usual = Peer().greet()
    usual.send(before)
    for second in range(20):
        usual.send(unit * 1000, now=float(second))
    assert usual.goaway is None
    flooded = Peer().greet()
    flooded.send(before)
    written = flooded.send(*[unit * 1000] * 12)
    assert flooded.goaway == http2.ENHANCE_YOUR_CALM
    assert len(written) <= http2.LIGHT_BURST + 2


def test_streams_that_are_opened_and_reset_at_once_end_the_connection() -> None:
    """CVE-2023-44487; streams of which a message came are requests, however many are given up."""
    rapid = Peer().greet()
    pairs = [opened(n) + frame(RST_STREAM, 0, n, bytes(4)) for n in range(1, 2 * http2.LIGHT_BURST + 3, 2)]
    rapid.send(*pairs[:-100])
    assert rapid.goaway is None
    rapid.send(*pairs[-100:])
    assert rapid.goaway == http2.ENHANCE_YOUR_CALM
    honest = Peer().greet()
    window = frame(WINDOW_UPDATE, 0, 0, (1 << 20).to_bytes(4, "big"))
    honest.send(
        window,
        *(
            opened(n) + data(n, message(b"x")) + frame(RST_STREAM, 0, n, bytes(4))
            for n in range(1, 30_000, 2)
        ),
    )
    assert honest.goaway is None
    assert len(honest.messages) == 15_000
    assert {call.resets for call in honest.calls} == {1}


def test_a_header_block_without_end_ends_the_connection() -> None:
    """CVE-2024-27316: in many frames, in empty ones, and as few bytes that decode to many."""
    many = Peer().greet()
    many.send(frame(HEADERS, 0, 1, b""), *[frame(CONTINUATION, 0, 1, bytes(4096))] * 9)
    assert many.goaway == http2.ENHANCE_YOUR_CALM
    empty = Peer().greet()
    empty.send(frame(HEADERS, 0, 1, b""), *[frame(CONTINUATION, 0, 1)] * 100)
    assert empty.goaway == http2.ENHANCE_YOUR_CALM
    bomb = Peer().greet()
    long = bytes(hpack.Encoder().encode([(b"x", b"y" * 3000)]))
    bomb.send(frame(HEADERS, END_HEADERS, 1, long + b"\xbe" * 10_000))
    assert bomb.goaway == http2.ENHANCE_YOUR_CALM


def test_more_streams_than_announced_are_refused() -> None:
    peer = Peer().greet()
    peer.send(*(opened(number) for number in range(1, 2 * http2.MAX_STREAMS + 5, 2)))
    refused = [number for number, code in peer.resets.items() if code == http2.REFUSED_STREAM]
    assert refused == [2 * http2.MAX_STREAMS + 1, 2 * http2.MAX_STREAMS + 3]
    assert len(peer.calls) == http2.MAX_STREAMS
    assert peer.goaway is None


def test_what_waits_for_a_window_is_bounded() -> None:
    peer = Peer(most_pending=1 << 20).greet()
    peer.send(frame(SETTINGS, 0, 0, SETTING % (4, bytes(4))))
    peer.send(opened())
    for _ in range(16):
        peer.send(*(data(1, piece) for piece in _cut(message(bytes(100_000)))))
    assert peer.goaway == http2.ENHANCE_YOUR_CALM
    assert peer.calls[0].resets == 1


def test_windows_open_in_any_order() -> None:
    """A stream that waits for the connection's window goes on when that grows, and after its own."""
    peer = Peer().greet()
    body = message(bytes(100_000))
    for number in (1, 3):
        peer.send(opened(number), *(data(number, piece) for piece in _cut(body)), data(number, b"", end=True))

    def sent(number: int) -> int:
        return sum(len(body) for kind, _, n, body in peer.written if (kind, n) == (DATA, number))

    assert (sent(1), sent(3)) == (65_535, 0)
    grow = (1 << 20).to_bytes(4, "big")
    peer.send(frame(WINDOW_UPDATE, 0, 0, grow))
    assert (sent(1), sent(3)) == (65_535, 65_535)
    peer.send(frame(WINDOW_UPDATE, 0, 3, grow))
    assert (sent(1), sent(3)) == (65_535, len(body))
    peer.send(frame(SETTINGS, 0, 0, SETTING % (4, grow)))
    assert (sent(1), sent(3)) == (len(body), len(body))
    assert not peer.http2.streams
    assert not peer.http2._pending_bytes


def test_what_a_call_may_not_send_is_its_status() -> None:
    peer = Peer().greet()
    statuses = {
        1: b"\1\0\0\0\1x",  # compressed
        3: b"\0" + (LARGEST + 1).to_bytes(4, "big"),
        5: b"\0\0\0\0\5ab",  # ends within a message
    }
    for number, body in statuses.items():
        peer.send(opened(number) + data(number, body, end=True))
    peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 7, block(path=b"/other")))
    peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 9, block(method=b"GET")))
    trailers = {n: body for kind, _, n, body in peer.written if kind == HEADERS}
    said = {n: dict(hpack.Decoder().decode(body, raw=True)) for n, body in trailers.items()}
    assert {n: fields.get(b"grpc-status") for n, fields in said.items()} == {
        1: b"12", 3: b"8", 5: b"13", 7: b"12", 9: None,
    }  # fmt: skip
    assert said[9] == {b":status": b"415"}
    assert not peer.http2.streams


def test_a_connection_that_is_lost_ends_each_call_once() -> None:
    peer = Peer().greet()
    peer.send(opened(1) + opened(3) + frame(RST_STREAM, 0, 3, bytes(4)) + opened(5, end=True))
    peer.http2.lost()
    peer.http2.lost()
    assert [call.resets for call in peer.calls] == [1, 1, 0]
    peer.calls[0].send(b"late")
    peer.calls[0].finish()
    assert peer.http2.take() == b""


def test_a_message_outside_a_read_asks_for_a_write() -> None:
    peer = Peer().greet()
    peer.send(opened())
    peer.calls[0].send(b"a")
    peer.calls[0].send(b"b")
    assert peer.woken == 1
    assert peer.http2.take()


def test_a_sign_of_life_is_asked_for_once() -> None:
    peer = Peer().greet()
    assert peer.http2.ping()
    assert not peer.http2.ping()
    peer.send(frame(PING, ACK, 0, bytes(8)))
    assert peer.http2.ping()


def _cut(body: bytes) -> list[bytes]:
    return [body[at : at + MAX_FRAME] for at in range(0, len(body), MAX_FRAME)]
