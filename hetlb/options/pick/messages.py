"""Messages of Envoy's external processing, from the descriptor of `ext_proc.proto`.

The types are made while the program starts, so that any version of the protobuf runtime will do. Constant
messages ("go on") are kept as bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PROCESS_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"

#: Modes of Envoy for sending a body (`BodySendMode`).
NONE: Final = 0
STREAMED: Final = 1
BUFFERED: Final = 2
FULL_DUPLEX: Final = 4

SERVING: Final = 1
NOT_SERVING: Final = 2

_OVERWRITE: Final = 2  # HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD


def _types() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()  # a pool of its own: others may have Envoy's messages loaded
    files = descriptor_pb2.FileDescriptorSet.FromString(
        Path(__file__).with_name("ext_proc.binpb").read_bytes()
    )
    for file in files.file:
        pool.AddSerializedFile(file.SerializeToString())
    messages: dict[str, Any] = message_factory.GetMessageClassesForFiles(
        [file.name for file in files.file], pool
    )
    return {name.removeprefix("hetlb.pick."): each for name, each in messages.items()}


_TYPES: Final = _types()
ProcessingRequest: Final = _TYPES["ProcessingRequest"]
ProcessingResponse: Final = _TYPES["ProcessingResponse"]
HealthCheckRequest: Final = _TYPES["HealthCheckRequest"]
HealthCheckResponse: Final = _TYPES["HealthCheckResponse"]


def _present(name: str) -> bytes:
    """Return a response with the named part, empty: the message to continue."""
    response = ProcessingResponse()
    getattr(response, name).SetInParent()
    return bytes(response.SerializeToString())


REQUEST_HEADERS_GO_ON: Final = _present("request_headers")
REQUEST_BODY_GO_ON: Final = _present("request_body")
RESPONSE_HEADERS_GO_ON: Final = _present("response_headers")
RESPONSE_BODY_GO_ON: Final = _present("response_body")
REQUEST_TRAILERS_GO_ON: Final = _present("request_trailers")
RESPONSE_TRAILERS_GO_ON: Final = _present("response_trailers")


def set_headers(mutation: Any, headers: Iterable[tuple[str, bytes]]) -> None:
    """Add headers to a mutation; they replace headers of the same name."""
    for name, value in headers:
        option = mutation.set_headers.add()
        option.header.key = name
        option.header.raw_value = value
        option.append_action = _OVERWRITE


def go_on_for(seconds: float) -> bytes:
    """Return a message that lets Envoy wait `seconds` more for the answer to its last message."""
    response = ProcessingResponse()
    response.override_message_timeout.seconds = max(1, int(seconds))
    return bytes(response.SerializeToString())


def immediate(status: int, headers: Iterable[tuple[str, bytes]], body: bytes, details: str) -> bytes:
    """Return an answer that Envoy gives in place of an engine."""
    response = ProcessingResponse()
    answer = response.immediate_response
    answer.status.code = status
    set_headers(answer.headers, headers)
    answer.body = body
    answer.details = details
    return bytes(response.SerializeToString())


def streamed_body(part: str, body: bytes, *, end: bool) -> bytes:
    """Return a part of a body in full duplex mode; `part` is `request_body` or `response_body`."""
    response = ProcessingResponse()
    streamed = getattr(response, part).response.body_mutation.streamed_response
    streamed.body = body
    streamed.end_of_stream = end
    return bytes(response.SerializeToString())


def replaced_body(part: str, body: bytes) -> bytes:
    """Return another piece of a body in place of the one that came; `part` as in `streamed_body`."""
    response = ProcessingResponse()
    getattr(response, part).response.body_mutation.body = body
    return bytes(response.SerializeToString())


def _cleared() -> bytes:
    response = ProcessingResponse()
    response.request_body.response.body_mutation.clear_body = True
    return bytes(response.SerializeToString())


#: A piece of a request's body is dropped.
REQUEST_BODY_CLEAR: Final = _cleared()
