"""One authenticated connection between coordinator and stage, or stage and stage: a WebSocket of aiohttp.

Frames arrive whole and in order, or the connection ends. It becomes a WebSocket once both sides proved that
they have the key (`auth`).
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
from hetlb.stage.stage_messages import (
    MAX_FRAME_BYTES,
    PATH,
    StageProtocolError,
    Welcome,
    decode,
)
from hetlb.turns import Share

#: Seconds to connect and to prove the key.
CONNECT_S: Final = 5.0
#: Seconds between a coordinator's pings. A stage that answers none within half of it is lost; so is a
#: coordinator that sends none for three times as long. Between stages there are none: one that is behind does
#: not read.
HEARTBEAT_S: Final = 10.0
SILENCE_S: Final = 3.0 * HEARTBEAT_S


class ChannelError(Exception):
    """A failed connection attempt; the message gives the reason."""


class StageChannel:
    """Frames to and from one peer. Sending never blocks: `pending_bytes` counts what is still queued."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse | web.WebSocketResponse) -> None:
        self._socket = socket
        self._frames: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._left = asyncio.Event()
        self.pending_bytes = 0
        #: Called when everything has left.
        self.drained: Callable[[], None] | None = None
        self._sender = asyncio.create_task(self._send())

    def send(self, frame: bytes) -> None:
        """Queue a frame."""
        self._frames.append(frame)
        self.pending_bytes += len(frame)
        self._left.clear()
        self._wake.set()

    async def flush(self) -> None:
        """Wait until everything has left."""
        if self.pending_bytes:
            await self._left.wait()

    async def _send(self) -> None:
        try:
            while True:
                while self._frames:
                    frame = self._frames.popleft()
                    await self._socket.send_bytes(frame)
                    self.pending_bytes -= len(frame)
                self._left.set()
                if self.drained is not None:
                    self.drained()
                self._wake.clear()
                await self._wake.wait()
        except (ConnectionError, aiohttp.ClientError):
            pass  # the reader of the connection sees its end

    async def frames(self, silence_s: float | None = None) -> AsyncIterator[bytes]:
        """Yield frames until the connection ends or stays silent for `silence_s`."""
        share = Share()
        while True:
            await share.spent()
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


async def connect(
    http: aiohttp.ClientSession, url: str, key: bytes, session: int, tls: ssl.SSLContext | None
) -> tuple[StageChannel, Welcome]:
    """Connect to a stage. `session` is 0 for a stage. Raises `ChannelError`."""
    try:
        async with asyncio.timeout(CONNECT_S):
            proof = await _prove(http, url, key, session, tls)
            socket = await http.ws_connect(
                url + PATH,
                headers=proof,
                heartbeat=HEARTBEAT_S if session else None,
                max_msg_size=MAX_FRAME_BYTES,
                ssl=tls or True,
            )
            try:
                return StageChannel(socket), await _welcome(socket)
            except BaseException:
                await socket.close()
                raise
    except TimeoutError as error:
        raise ChannelError(f"{url}: no answer within {CONNECT_S:g} s") from error
    except (OSError, aiohttp.ClientError, ChannelError) as error:
        raise ChannelError(f"{url}: {error}") from error


async def _prove(
    http: aiohttp.ClientSession, url: str, key: bytes, session: int, tls: ssl.SSLContext | None
) -> dict[str, str]:
    """Headers that prove the key, once the stage has proved it. Raises `ChannelError`."""
    nonce = auth.new_nonce()
    headers = auth.hello(session, nonce)
    async with http.get(url + PATH, headers=headers, ssl=tls or True, allow_redirects=False) as response:
        found = auth.challenge(response.headers)
    if found is None:
        raise ChannelError("expected a challenge: another version of hetlb?")
    stage_nonce, proof = found
    if not auth.same(proof, auth.stage_proof(key, nonce, stage_nonce)):
        raise ChannelError("it has another key")
    return headers | auth.proof(stage_nonce, auth.client_proof(key, nonce, stage_nonce, session))


async def _welcome(socket: aiohttp.ClientWebSocketResponse) -> Welcome:
    message = await socket.receive()
    if message.type is not aiohttp.WSMsgType.BINARY:
        raise ChannelError("expected its description, the connection ended")
    try:
        welcome = decode(message.data)[0]
    except StageProtocolError as error:
        raise ChannelError(str(error)) from error
    if not isinstance(welcome, Welcome):
        raise ChannelError("expected its description: another version of hetlb?")
    return welcome
