"""Sending work to stages: passes become frames, addresses become connections.

A route comes from a coordinator, so the addresses in it are checked when they are connected to.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp

from hetlb.addresses import is_loopback, is_special
from hetlb.stage.stage_channel import ChannelError, StageChannel, connect
from hetlb.stage.stage_messages import MOST_PASSES, SPLIT_BYTES, Pass, Passes, encode


def frames(parts: Sequence[tuple[Pass, bytes]]) -> Iterator[bytes]:
    """Passes with their rows as few frames; rows that are too many for one frame are several passes."""
    passes: list[Pass] = []
    rows: list[bytes | memoryview] = []
    size = 0
    for each, data in parts:
        for piece, part in _pieces(each, data):
            if passes and (size + len(part) > SPLIT_BYTES or len(passes) == MOST_PASSES):
                yield encode(Passes(passes), *rows)
                passes, rows, size = [], [], 0
            passes.append(piece)
            rows.append(part)
            size += len(part)
    if passes:
        yield encode(Passes(passes), *rows)


def _pieces(each: Pass, data: bytes) -> Iterator[tuple[Pass, bytes | memoryview]]:
    row = len(data) // each.count
    most = max(1, SPLIT_BYTES // max(1, row))
    if each.count <= most:
        yield each, data
        return
    view = memoryview(data)
    for at in range(0, each.count, most):
        count = min(most, each.count - at)
        last = each.last and at + count == each.count
        opening = each.opening if at == 0 else None
        yield (
            Pass(each.lease, each.hop, each.position + at, count, last, opening),
            view[at * row : (at + count) * row],
        )


def check_peer(address: str, *, loopback: bool) -> None:
    """Raise `OSError` unless a stage may connect there. `loopback`: to this machine alone."""
    if is_special(address) or (loopback and not is_loopback(address)):
        expected = "an address of this machine (there is no key)" if loopback else "an address of a machine"
        raise OSError(errno.EACCES, f"expected {expected}, got {address}")


class Peers:
    """Connections to other stages, made when first needed."""

    def __init__(
        self,
        key: bytes,
        tls: ssl.SSLContext | None,
        lost: Callable[[str, str], None],
        drained: Callable[[], None],
    ) -> None:
        """`lost(url, reason)` is called when a connection ends; its queued frames are dropped."""
        self._key, self._tls = key, tls
        self._loopback = not key
        self._lost, self._drained = lost, drained
        self._http: aiohttp.ClientSession | None = None
        self._peers: dict[str, _Peer] = {}

    def send(self, url: str, frame: bytes) -> None:
        """Queue a frame for a stage."""
        peer = self._peers.get(url)
        if peer is None:
            if self._http is None:
                connector = aiohttp.TCPConnector(socket_factory=self._socket)
                self._http = aiohttp.ClientSession(connector=connector)
            peer = self._peers[url] = _Peer()
            peer.task = asyncio.create_task(self._run(url, peer, self._http))
        peer.send(frame)

    def _socket(self, address: tuple[Any, ...]) -> socket.socket:
        """Create a socket for a stage's resolved address. Raises `OSError`."""
        family, kind, protocol, _, place = address
        check_peer(place[0], loopback=self._loopback)
        return socket.socket(family, kind, protocol)

    def pending_bytes(self, url: str) -> int:
        """Bytes queued for a stage."""
        peer = self._peers.get(url)
        return 0 if peer is None else peer.pending_bytes

    async def _run(self, url: str, peer: _Peer, http: aiohttp.ClientSession) -> None:
        reason = f"{url}: the connection ended"
        try:
            channel, _ = await connect(http, url, self._key, 0, self._tls)
            channel.drained = self._drained
            peer.connected(channel)
            try:
                async for _ in channel.frames():
                    break  # a stage has nothing to say to another one
            finally:
                await channel.close()
        except ChannelError as error:
            reason = str(error)
        del self._peers[url]
        self._lost(url, reason)

    async def close(self) -> None:
        """End all connections."""
        for peer in list(self._peers.values()):
            if peer.task is not None:
                peer.task.cancel()
        if self._http is not None:
            await self._http.close()


class _Peer:
    """A connection, open or in progress."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self._channel: StageChannel | None = None
        self._early: list[bytes] = []

    @property
    def pending_bytes(self) -> int:
        return self._channel.pending_bytes if self._channel is not None else sum(map(len, self._early))

    def send(self, frame: bytes) -> None:
        if self._channel is not None:
            self._channel.send(frame)
        else:
            self._early.append(frame)

    def connected(self, channel: StageChannel) -> None:
        self._channel = channel
        for frame in self._early:
            channel.send(frame)
        self._early.clear()
