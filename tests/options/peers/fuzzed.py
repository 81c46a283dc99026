"""Messages of peers of the shared view, as a fuzzer and the tests of growth give them."""

from __future__ import annotations

import asyncio
import contextlib
import functools

from fuzz.costs import Make, Reader, framed, framed_in, many
from helpers import make_scheduler, spec
from msgspec import msgpack
from redis._parsers import Encoder
from redis.exceptions import RedisError

from hetlb.balancer.config.fleet_tables import SharedTable
from hetlb.options.peers.hub import _Frames
from hetlb.options.peers.lease_wire import PART_CHANGES
from hetlb.options.peers.peer_messages import MAX_MESSAGE_BYTES, VERSION
from hetlb.options.peers.redis_transport import RedisTransport, _Replies
from hetlb.options.peers.sharing import Sharing
from hetlb.tools.sim.integrity import check_scheduler

#: The loop of `sharing`, which lives as long as it.
_LOOP = asyncio.new_event_loop()


@functools.cache
def sharing() -> Sharing:
    """Knowledge that a process has of its peers, over a server that is not there."""

    async def make() -> Sharing:
        scheduler = make_scheduler([spec("a"), spec("b")])
        transport = RedisTransport("redis://127.0.0.1:1", "hetlb:leases", 1.0)
        return Sharing(SharedTable(), transport, scheduler, lambda _: None, "cd34")

    return _LOOP.run_until_complete(make())


def peers(data: bytes) -> None:
    """Messages of a peer of the shared view, each after its length in four bytes."""
    shared = sharing()
    for message in framed_in(data):
        shared._receive(message)
    for peer in shared.view.peers:
        shared._forget(peer, 0.0)
    shared._transport.discard()


def shared_view(data: bytes) -> None:
    """Messages of peers: taken or counted, no more leases than were sent, nothing left when they are gone."""
    shared = sharing()
    view, before = shared.view, shared.received + shared.rejected
    shared._receive(data)
    assert shared.received + shared.rejected - before in (0, 1)
    assert view.peer_leases <= len(data)
    check_scheduler(view._scheduler)
    for peer in view.peers:
        view.gone(peer, 0.0)
    assert view._scheduler.in_flight == 0


class _Member(_Frames):
    """A connection of the hub that keeps its frames."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)
        self.frames: list[bytes] = []

    def frame(self, message: bytes) -> None:
        self.frames.append(message)


class _End(asyncio.Transport):
    """A transport that is aborted where a frame is too long."""

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def hub(data: bytes) -> None:
    """Frames at the socket of a hub: the same for all cuts, and at most one message is kept."""

    async def read(size: int) -> list[bytes]:
        member, end = _Member(), _End()
        member.connection_made(end)
        for at in range(0, len(data), size):
            member.data_received(data[at : at + size])
            while member._paused and not end.aborted:
                await asyncio.sleep(0)
            assert end.aborted or len(member._rest) <= MAX_MESSAGE_BYTES + 4
            if end.aborted:
                break
        return member.frames

    whole = _LOOP.run_until_complete(read(len(data) or 1))
    assert _LOOP.run_until_complete(read(max(1, len(data) // 20))) == whole
    assert whole == list(framed_in(data))[: len(whole)]


class _Server:
    """A connection to a server of messages, as its replies are read from."""

    def __init__(self, data: bytes) -> None:
        self._reader = asyncio.StreamReader(loop=_LOOP)
        self._reader.feed_data(data)
        self._reader.feed_eof()
        self.encoder = Encoder("utf-8", "strict", False)


def replies(data: bytes) -> None:
    """Replies of a Valkey or Redis server, until it breaks off or sends none."""
    reader = _Replies(64 << 10)

    async def read() -> None:
        reader.on_connect(_Server(data))
        with contextlib.suppress(RedisError, OSError, ValueError):
            while True:
                await reader.read_response(disable_decoding=True)

    _LOOP.run_until_complete(read())


def peer(changes: list[list[object]]) -> bytes:
    """A message of a peer that tells all its leases."""
    return msgpack.encode([VERSION, "ab", 1, 1, 0.0, changes])


LEASE: list[object] = [0, 1, "a", ["m", 1, 1, 1, 1, True, [], None, 1, False], 1, 1.0, 1.0, False]
KEYED: list[object] = [
    *LEASE[:3],
    ["m", 1, 1, 1, 1, True, [["k", 1]] * 4096, None, 1, False],
    *LEASE[4:],
]


MESSAGE = b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n"
TARGETS = {"shared": shared_view, "hub": hub, "replies": replies}
PREFIXES: tuple[tuple[Reader, bytes], ...] = ((peers, b""),)
#: name -> (reader, input of a size, the smaller size).
GROWTH: dict[str, tuple[Reader, Make, int]] = {
    "changes of a peer": (peers, many(framed(peer([[1, 1]]))), 64 << 10),
    "leases of a peer": (peers, many(framed(peer([LEASE] * PART_CHANGES))), 256 << 10),
    "keys of a lease": (peers, many(framed(peer([KEYED]))), 256 << 10),
    "messages that are none": (peers, many(framed(peer([[9]]))), 64 << 10),
    "one message of a server of messages": (
        replies, lambda size: MESSAGE + b"$%d\r\n%b\r\n" % (size, b"x" * size), 64 << 10,
    ),
    "messages of a server of messages, event by event": (
        replies, many(MESSAGE + b"$1000\r\n" + b"x" * 1000 + b"\r\n"), 64 << 10,
    ),
    "a line of a server of messages": (replies, many(b"x", b"+"), 64 << 10),
    "too many changes": (peers, many(framed(peer([[1, 1]] * (PART_CHANGES + 1)))), 64 << 10),
}  # fmt: skip
