"""A peer of a picker's gRPC port that sends any bytes behind the preface of HTTP/2, over real sockets."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import tempfile
from pathlib import Path

from helpers import HANG_S, turns_until
from options.pick.frames import ACK, GOAWAY, HELLO, PING, frame, next_frame
from options.pick.gateway import Gateway, insecure, picker
from options.pick.rig import Rig

#: The last frame of every peer: a server that reads so far answers it.
LAST = b"the last"


class Peers:
    """Peers of one picker, one after the other."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stack = contextlib.AsyncExitStack()
        self._rig = self._loop.run_until_complete(self._start())
        atexit.register(self._close)

    async def _start(self) -> Rig:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        return await self._stack.enter_async_context(picker(Path(folder)))

    def _close(self) -> None:
        self._loop.run_until_complete(self._stack.aclose())

    def check(self, data: bytes) -> None:
        """Whatever a peer sends: it is answered or left, nothing of it stays, and others are served."""
        self._loop.run_until_complete(self._check(data))

    async def _check(self, data: bytes) -> None:
        async with asyncio.timeout(HANG_S):
            await self._send(HELLO + data + frame(PING, 0, 0, LAST))
        rig = self._rig
        await turns_until(lambda: not rig.picker.server.state.streams)
        await rig.settled()
        assert rig.picker.server.state.held_bytes == 0
        async with insecure(rig) as channel:
            gateway = Gateway(channel)
            call = await gateway.open()
            assert (await gateway.body(call, rig.body())).HasField("request_body")
        await turns_until(lambda: not rig.picker.server.state.streams)

    async def _send(self, data: bytes) -> None:
        """Send bytes; return when the last frame is answered or the connection is left."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._rig.grpc_port)
        try:
            writer.write(data)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                # A frame that says it is longer than the bytes that follow waits for the rest: there is none.
                writer.write_eof()
                while (found := await next_frame(reader))[0] != GOAWAY:
                    if found[:2] == (PING, ACK) and found[3] == LAST:
                        break
        finally:
            writer.transport.abort()
