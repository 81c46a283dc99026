"""Calls of external processing over grpcio: messages of a gateway to an `HttpStream`, its answers back."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from hetlb.options.pick import messages
from hetlb.options.pick.envoy_fields import MalformedMessage
from hetlb.options.pick.stream import HttpStream, PickerState
from hetlb.options.pick.stream_states import StreamState

#: Bytes of a message beside the body in it, at most: headers, metadata, attributes. A byte of them costs more
#: than one of a body, in time and in memory.
MAX_BESIDE_BODY_BYTES: Final = 128 << 10
#: Tags of the fields `request_body`, `response_body` of a ProcessingRequest, and `body` of an HttpBody.
_BODIES: Final = (0x22, 0x2A)
_BODY: Final = 0x0A


class ProcessCall:
    """One call: an HTTP request. What its stream says is written in order.

    If a gateway does not read, its messages are not read either.
    """

    def __init__(self, state: PickerState, context: Any) -> None:
        self._state = state
        self._context = context
        self._stream = HttpStream(state, self._send)
        self._task = asyncio.current_task()
        self._out: deque[bytes] = deque()
        #: Held while something is written: grpcio takes one message of a call at a time.
        self._writing = asyncio.Lock()
        #: Writer of messages from outside of this call's own task.
        self._writer: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve the call until it is over."""
        stream, streams = self._stream, self._state.streams
        streams.add(stream)
        try:
            await self._take_all()
        except asyncio.CancelledError:
            if self._task is None or stream.state is not StreamState.REFUSED:
                raise
            self._task.uncancel()  # it was refused outside of this task: there is no more to send
        finally:
            self._task = None
            streams.discard(stream)
            stream.closed()

    async def _take_all(self) -> None:
        """Take messages until the request is over."""
        stream, read = self._stream, self._context.read
        while not stream.over:
            data = await read()
            if data is grpc.aio.EOF:
                return
            try:
                receive(stream, data)
            except (DecodeError, MalformedMessage) as error:
                said = str(error) if isinstance(error, MalformedMessage) else "expected a ProcessingRequest"
                await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, said)
            except Exception as error:
                self._state.failed(error)
                await self._context.abort(grpc.StatusCode.INTERNAL, "the endpoint picker failed")
            if self._out or self._writing.locked():
                await self._write()

    def _send(self, message: bytes) -> None:
        self._out.append(message)
        if self._task is not asyncio.current_task() and not self._writing.locked():
            self._writer = asyncio.create_task(self._write_outside())

    async def _write(self) -> None:
        out, write = self._out, self._context.write
        async with self._writing:
            while out:
                await write(out.popleft())

    async def _write_outside(self) -> None:
        """Write queued messages while this call waits for a message."""
        with contextlib.suppress(grpc.aio.BaseError):  # the call is over, which its own task learns too
            await self._write()
            if self._task is not None and self._stream.state is StreamState.REFUSED:
                self._task.cancel()
        self._writer = None


def receive(stream: HttpStream, data: bytes) -> None:
    """Give a message to its stream. Raises `DecodeError` and `MalformedMessage`."""
    if len(data) > MAX_BESIDE_BODY_BYTES and not is_body(data):
        raise MalformedMessage(f"expected at most {MAX_BESIDE_BODY_BYTES} bytes beside a body")
    stream.receive(messages.ProcessingRequest.FromString(data))


def is_body(data: bytes) -> bool:
    """Return True if a large message has at most `MAX_BESIDE_BODY_BYTES` beside a body: it is only copied."""
    if data[0] not in _BODIES:
        return False
    length, at = _varint(data, 1)
    if len(data) - length > MAX_BESIDE_BODY_BYTES or data[at] != _BODY:
        return False
    return len(data) - _varint(data, at + 1)[0] <= MAX_BESIDE_BODY_BYTES


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, of five bytes at most, and the place behind it."""
    value = 0
    for shift in range(0, 35, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return value, at
