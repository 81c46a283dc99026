"""A gateway of its own making: streams of external processing over grpcio, message by message."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
from options.pick.rig import Engine, Rig

from hetlb.options.pick import messages
from hetlb.options.pick.messages import BUFFERED

PROCESS = f"/{messages.PROCESS_SERVICE}/Process"
REQUEST = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json"}


class Gateway:
    """Streams of external processing."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._process = channel.stream_stream(
            PROCESS,
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=messages.ProcessingResponse.FromString,
        )

    async def open(self, mode: int = BUFFERED, **more: str) -> Any:
        """A stream whose request's headers were sent; `more` are headers, "_" for "-" in their names."""
        call = self._process()
        await call.write(request_headers(mode, **more))
        if mode == BUFFERED:
            assert (await call.read()).HasField("request_headers")
        return call

    async def body(self, call: Any, body: bytes) -> Any:
        """Send the request's body; the picker's first word."""
        await call.write(body_of("request_body", body))
        return await call.read()

    async def answered(self, call: Any, body: bytes) -> None:
        """Send the engine's answer, and end the stream."""
        await call.write(response_headers())
        assert (await call.read()).HasField("response_headers")
        await call.write(body_of("response_body", body))
        assert (await call.read()).HasField("response_body")
        await call.done_writing()


def _set(headers: Any, fields: dict[str, str]) -> None:
    for name, value in fields.items():
        header = headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode()


def request_headers(mode: int, **more: str) -> Any:
    """The first message of a request, its body in one message or in pieces."""
    first = messages.ProcessingRequest()
    _set(first.request_headers, {**REQUEST, **{key.replace("_", "-"): each for key, each in more.items()}})
    first.protocol_config.request_body_mode = mode
    first.protocol_config.response_body_mode = messages.STREAMED
    first.protocol_config.send_body_without_waiting_for_header_response = mode == messages.STREAMED
    return first


def response_headers(status: str = "200", *, end: bool = False) -> Any:
    """The headers of an engine's answer."""
    head = messages.ProcessingRequest()
    fields = {":status": status, "content-type": "application/json", "date": "Sat, 21 Nov 2026 12:00:00 GMT"}
    _set(head.response_headers, fields)
    head.response_headers.end_of_stream = end
    return head


def body_of(part: str, body: bytes, *, end: bool = True) -> Any:
    """A piece of a body; `part` is `request_body` or `response_body`."""
    message = messages.ProcessingRequest()
    found = getattr(message, part)
    found.body, found.end_of_stream = body, end
    return message


def trailers() -> Any:
    """The end of a request's body by trailers."""
    message = messages.ProcessingRequest()
    message.request_trailers.SetInParent()
    return message


def insecure(made: Rig) -> grpc.aio.Channel:
    """A connection to a rig's picker."""
    limit = ("grpc.max_receive_message_length", 64 << 20)
    return grpc.aio.insecure_channel(f"127.0.0.1:{made.grpc_port}", options=[limit])


@contextlib.asynccontextmanager
async def picker(folder: Path, **tables: Any) -> AsyncIterator[Rig]:
    """A picker over one engine, without Envoy."""
    async with contextlib.AsyncExitStack() as stack:
        made = Rig(folder, [await Engine().start()])
        stack.push_async_callback(made.engines[0].stop)
        await made.start_picker(**tables)
        stack.push_async_callback(made.picker.stop, 0.0)
        yield made
        await made.settled()
