"""Methods of the picker's gRPC service: external processing, and health checks."""

from __future__ import annotations

import logging
from collections.abc import Callable

from google.protobuf.message import DecodeError

from hetlb.pick import messages
from hetlb.pick.grpc_call import INTERNAL, INVALID_ARGUMENT, NOT_FOUND, GrpcCall
from hetlb.pick.http2 import MAX_FRAME, Http2Connection
from hetlb.pick.stream import HttpStream, PickerState
from hetlb.proxy.http.error_responses import TOO_MANY_BYTES, Refusal

logger = logging.getLogger("hetlb.pick")


class ProcessCall(GrpcCall):
    """A stream of external processing: one HTTP request."""

    def __init__(self, connection: Http2Connection, number: int, state: PickerState) -> None:
        super().__init__(connection, number, state.largest)
        self._state = state
        self._stream = HttpStream(state, self.send)
        #: Bytes of a request that is not whole.
        self._held = 0
        state.streams.add(self._stream)

    def on_data(self, piece: bytes, end: bool) -> None:
        """Take a part of a message; beyond `proxy.max_held_bytes` of all requests this one is refused."""
        super().on_data(piece, end)
        stream = self._stream
        held = self.unread + stream.body_bytes if stream.reading and not self.finished else 0
        if held != self._held:
            self._hold(held)

    def _hold(self, held: int) -> None:
        state = self._state
        state.held_bytes += held - self._held
        self._held = held
        if held and state.held_bytes > state.driver.table.max_held_bytes:
            self._stream.refuse(Refusal(TOO_MANY_BYTES, "Too many bytes of bodies are being read."))
            self.finish()
            self.on_reset()

    def on_message(self, data: bytes) -> None:
        """Take a message; an error of ours ends this request, not all of the connection."""
        stream = self._stream
        try:
            stream.receive(messages.ProcessingRequest.FromString(data))
            if stream.ended or stream.complete:
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
        self._state.streams.discard(self._stream)
        self._state.held_bytes -= self._held
        self._held = 0
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
