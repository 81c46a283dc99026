"""One authenticated connection between coordinator and stage, or stage and stage: a WebSocket of aiohttp.

Frames arrive whole and in order, or the connection ends. Nothing is accepted before both sides
proved that they have the key.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

import aiohttp
from aiohttp import web

from hetlb.stage import auth
from hetlb.stage.messages import (
    MAX_FRAME_BYTES,
    PATH,
    VERSION,
    Challenge,
    Hello,
    Message,
    Proof,
    ProtocolError,
    Welcome,
    decode,
    encode,
)

#: Seconds to connect and to prove the key.
CONNECT_S: Final = 5.0
#: Seconds between a coordinator's pings. A stage that answers none within half of it is lost; so is a
#: coordinator that sends none for three times as long. Between stages there are none: one that is behind does
#: not read.
HEARTBEAT_S: Final = 10.0
SILENCE_S: Final = 3.0 * HEARTBEAT_S


class ChannelError(Exception):
    """A connection that could not be made; the text says why."""


class Channel:
    """Frames to and from one peer. Sending never waits: `pending_bytes` says how much has not left yet."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse | web.WebSocketResponse) -> None:
        self._socket = socket
        self._frames: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self.pending_bytes = 0
        #: Called when everything has left.
        self.drained: Callable[[], None] | None = None
        self._sender = asyncio.create_task(self._send())

    def send(self, frame: bytes) -> None:
        """Queue a frame."""
        self._frames.append(frame)
        self.pending_bytes += len(frame)
        self._wake.set()

    async def _send(self) -> None:
        try:
            while True:
                while self._frames:
                    frame = self._frames.popleft()
                    await self._socket.send_bytes(frame)
                    self.pending_bytes -= len(frame)
                if self.drained is not None:
                    self.drained()
                self._wake.clear()
                await self._wake.wait()
        except (ConnectionError, aiohttp.ClientError):
            pass  # the reader of the connection sees its end

    async def frames(self, silence_s: float | None = None) -> AsyncIterator[bytes]:
        """Frames until the connection ends, or neither frame nor ping came for so long."""
        while True:
            try:
                message = await self._socket.receive(timeout=silence_s)
            except TimeoutError:
                return
            if message.type is not aiohttp.WSMsgType.BINARY:
                return
            yield message.data

    async def close(self) -> None:
        """End the connection."""
        self._sender.cancel()
        await self._socket.close()


async def _receive(socket: aiohttp.ClientWebSocketResponse | web.WebSocketResponse) -> Message:
    message = await socket.receive()
    if message.type is not aiohttp.WSMsgType.BINARY:
        raise ChannelError("expected a message of the handshake, the connection ended")
    try:
        return decode(message.data)[0]
    except ProtocolError as error:
        raise ChannelError(str(error)) from error


async def connect(
    http: aiohttp.ClientSession, url: str, key: bytes, session: int, tls: ssl.SSLContext | None
) -> tuple[Channel, Welcome]:
    """Connect to a stage. `session` is 0 for a stage. Raises `ChannelError`."""
    try:
        async with asyncio.timeout(CONNECT_S):
            socket = await http.ws_connect(
                url + PATH,
                heartbeat=HEARTBEAT_S if session else None,
                max_msg_size=MAX_FRAME_BYTES,
                ssl=tls or True,
            )
            try:
                return await _prove(socket, key, session)
            except BaseException:
                await socket.close()
                raise
    except TimeoutError as error:
        raise ChannelError(f"{url}: no answer within {CONNECT_S:g} s") from error
    except (OSError, aiohttp.ClientError, ChannelError) as error:
        raise ChannelError(f"{url}: {error}") from error


async def _prove(
    socket: aiohttp.ClientWebSocketResponse, key: bytes, session: int
) -> tuple[Channel, Welcome]:
    nonce = auth.new_nonce()
    await socket.send_bytes(encode(Hello(VERSION, session, nonce)))
    challenge = await _receive(socket)
    if not isinstance(challenge, Challenge):
        raise ChannelError("expected a challenge: another version of hetlb?")
    if not auth.same(challenge.proof, auth.stage_proof(key, nonce, challenge.nonce)):
        raise ChannelError("it has another key")
    await socket.send_bytes(encode(Proof(auth.client_proof(key, nonce, challenge.nonce, session))))
    welcome = await _receive(socket)
    if not isinstance(welcome, Welcome):
        raise ChannelError("expected its description: another version of hetlb?")
    return Channel(socket), welcome


async def accept(socket: web.WebSocketResponse, key: bytes, welcome: Welcome) -> tuple[Channel, int]:
    """Let a coordinator or a stage in; returns its session. Raises `ChannelError`, `TimeoutError`."""
    async with asyncio.timeout(CONNECT_S):
        hello = await _receive(socket)
        if not isinstance(hello, Hello) or hello.version != VERSION or not 0 <= hello.session < 1 << 32:
            raise ChannelError("expected a greeting of this version")
        nonce = auth.new_nonce()
        await socket.send_bytes(encode(Challenge(nonce, auth.stage_proof(key, hello.nonce, nonce))))
        proof = await _receive(socket)
        expected = auth.client_proof(key, hello.nonce, nonce, hello.session)
        if not isinstance(proof, Proof) or not auth.same(proof.proof, expected):
            raise ChannelError("expected a proof of the key")
        await socket.send_bytes(encode(welcome))
        return Channel(socket), hello.session
