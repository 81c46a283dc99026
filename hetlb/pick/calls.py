"""Methods of the picker's gRPC service: external processing, and health checks."""

from __future__ import annotations

import logging
from collections.abc import Callable

from google.protobuf.message import DecodeError

from hetlb.pick import messages
from hetlb.pick.grpc_call import INTERNAL, INVALID_ARGUMENT, NOT_FOUND, GrpcCall
from hetlb.pick.http2 import MAX_FRAME, Http2Connection
from hetlb.pick.stream import HttpStream, PickerState

logger = logging.getLogger("hetlb.pick")


class ProcessCall(GrpcCall):
    """A stream of external processing: one HTTP request."""

    def __init__(self, connection: Http2Connection, number: int, state: PickerState) -> None:
        super().__init__(connection, number, state.largest)
        self._streams = state.streams
        self._stream = HttpStream(state, self.send)
        self._streams.add(self._stream)

    def on_message(self, data: bytes) -> None:
        """Take a message; an error of ours ends this request, not all of the connection."""
        stream = self._stream
        try:
            stream.receive(messages.ProcessingRequest.FromString(data))
            if stream.ended:
                self.finish()
        except DecodeError:
            self.finish(INVALID_ARGUMENT, "expected a ProcessingRequest")
        except Exception:
            logger.exception("a request of a gateway failed")
            self.finish(INTERNAL, "the endpoint picker failed")
        if self.finished:
            self.on_reset()

    def on_end(self) -> None:
        """The gateway sends nothing more: the request is over."""
        self.on_reset()
        self.finish()

    def on_reset(self) -> None:
        """The request is over, and nothing can be said to it."""
        self._streams.discard(self._stream)
        self._stream.closed()


class CheckCall(GrpcCall):
    """A health check. `serves` says whether a service does, None where there is none of that name."""

    def __init__(
        self, connection: Http2Connection, number: int, serves: Callable[[str], bool | None]
    ) -> None:
        super().__init__(connection, number, MAX_FRAME)
        self._serves = serves

    def on_message(self, data: bytes) -> None:
        """Answer the check."""
        try:
            service: str = messages.HealthCheckRequest.FromString(data).service
        except DecodeError:
            self.finish(INVALID_ARGUMENT, "expected a HealthCheckRequest")
            return
        serving = self._serves(service)
        if serving is None:
            self.finish(NOT_FOUND, "unknown service")
            return
        status = messages.SERVING if serving else messages.NOT_SERVING
        self.send(messages.HealthCheckResponse(status=status).SerializeToString())
        self.finish()

    def on_end(self) -> None:
        """The client asked for nothing."""
        self.finish(INVALID_ARGUMENT, "expected a HealthCheckRequest")

    def on_reset(self) -> None:
        """Nothing to do."""
