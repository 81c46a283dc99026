"""A proxy without sockets and with a clock of its own: real connections, exchanges and scheduler.

Bytes go through the protocols that `hetlb serve` uses, over transports in memory with the watermarks
of the real ones, and time passes only when everything that is due was done. So a state machine can let
minutes pass thousands of times, and the cost of a reader can be measured without a kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable
from typing import Any

import msgspec
from helpers import make_scheduler, spec

from hetlb.balancer.clients.connection import ClientConnection
from hetlb.balancer.clients.server import ProxyServer
from hetlb.balancer.clients.token_estimator import TokenEstimator
from hetlb.balancer.config.fleet_tables import ProxyTable
from hetlb.balancer.exchange.driver import Driver
from hetlb.cli.serving_options import OPTIONS

#: What a kernel holds for a reader that does not read.
KERNEL = 64 << 10


class _Selector(selectors.SelectSelector):
    """Waits for nothing: the clock jumps to what is due next. (There is no descriptor to wait for.)"""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is not None and timeout > 0:
            self.now += timeout
        return []


class Loop(asyncio.SelectorEventLoop):
    """An event loop in virtual time whose connections stay in this process."""

    def __init__(self) -> None:
        selector = _Selector()
        super().__init__(selector)
        self._clock = selector
        #: Makes the far end of a connection, by port; None refuses it.
        self.listeners: dict[int, Callable[[], End] | None] = {}
        self.failures: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.failures.append(context))

    def time(self) -> float:
        return self._clock.now

    async def create_connection(self, factory: Any, host: Any, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        listener = self.listeners.get(port)
        if listener is None:
            raise ConnectionRefusedError(111, "refused")
        protocol = factory()
        end = listener()
        transport = Transport(self, protocol, end)
        protocol.connection_made(transport)
        return transport, protocol

    def turn(self, seconds: float = 0.0) -> None:
        """Do what is due, and what becomes due within `seconds`."""
        self.call_later(seconds, self.stop)
        self.run_forever()
        if self.failures:
            raise AssertionError(self.failures[0])

    def settle(self, turns: int = 8) -> None:
        """Do what is due now, and what follows from it."""
        for _ in range(turns):
            self.turn()

    def rest(self) -> None:
        """Do all that can be done without time passing."""
        self.turn()
        while self._ready:
            self.turn()


class End:
    """The far end of a connection: what it got, and whether it reads."""

    def __init__(self) -> None:
        self.transport: Transport | None = None
        self.got = bytearray()
        self.reading = True
        self.closed = False

    def on_data(self, data: bytes) -> None:
        """Bytes came."""
        self.got += data

    def on_closed(self) -> None:
        """The near end closed."""
        self.closed = True

    def send(self, data: bytes) -> None:
        """Send bytes."""
        if self.transport is not None:
            self.transport.arrived(data)

    def set_reading(self, reading: bool) -> None:
        """Read on, or read nothing more."""
        self.reading = reading
        if reading and self.transport is not None:
            self.transport.drain()

    def leave(self) -> None:
        """Close."""
        if self.transport is not None:
            self.transport.lost(None)


class Transport(asyncio.Transport):
    """The near end, with the watermarks that a protocol is told of."""

    def __init__(self, loop: Loop, protocol: Any, end: End) -> None:
        super().__init__()
        self._loop = loop
        self._protocol = protocol
        self._end = end
        end.transport = self
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._in: list[bytes] = []
        self._paused = False
        self._full = False
        self._closing = self._gone = self._eof = False
        self._high = 64 << 10

    # --- the protocol's side ---

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high if high is not None else 64 << 10

    def get_write_buffer_size(self) -> int:
        return max(0, self._out_bytes - KERNEL)

    def write(self, data: Any) -> None:
        if self._gone or self._closing:
            return
        if self._end.reading and not self._out:
            self._end.on_data(bytes(data))
            return
        self._out.append(bytes(data))
        self._out_bytes += len(data)
        if not self._full and self.get_write_buffer_size() > self._high:
            self._full = True
            self._protocol.pause_writing()

    def writelines(self, data: Any) -> None:
        self.write(b"".join(data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._eof = True
        self._end.closed = True

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        if self._in:
            self._loop.call_soon(self._deliver)

    def is_closing(self) -> bool:
        return self._closing or self._gone

    def close(self) -> None:
        self._closing = True
        if not self.get_write_buffer_size():
            self._loop.call_soon(self.lost, None)

    def abort(self) -> None:
        self._closing = True
        self._loop.call_soon(self.lost, None)

    # --- the far side ---

    def arrived(self, data: bytes) -> None:
        """Bytes for the protocol."""
        if not self._gone:
            self._in.append(data)
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        while self._in and not self._paused and not self._gone:
            self._protocol.data_received(self._in.pop(0))

    def drain(self) -> None:
        """The far end reads again."""
        out, self._out, self._out_bytes = self._out, [], 0
        for data in out:
            self._end.on_data(data)
        if self._full and not self._gone:
            self._full = False
            self._protocol.resume_writing()
        if self._closing:
            self._loop.call_soon(self.lost, None)

    def lost(self, error: Exception | None) -> None:
        """The connection is over."""
        if self._gone:
            return
        while self._in and not self._paused:  # what came before its end comes first
            self._protocol.data_received(self._in.pop(0))
            if self._gone:
                return
        self._gone = True
        self._end.on_closed()
        self._protocol.connection_lost(error)


class View:
    """What `/v1/models` and `/health` say."""

    def models(self) -> list[dict[str, Any]]:
        return [{"id": "m", "object": "model"}]

    def routable(self) -> bool:
        return True


class Proxy:
    """A proxy over engines in memory; `engines` make the far ends of connections to them."""

    def __init__(self, *engines: Callable[[], End] | None, policy: str = "rr", **table: Any) -> None:
        self.loop = Loop()
        for port, engine in enumerate(engines, 1):
            self.loop.listeners[port] = engine
        specs = [spec(f"i{n}", url=f"http://engine:{n}", kv=None) for n in range(1, len(engines) + 1)]
        self.scheduler = make_scheduler(specs, policy)
        self.ended: list[Any] = []
        settings = msgspec.structs.replace(ProxyTable(), **table)
        with self._running():
            self.driver = Driver(settings, TokenEstimator(), self.loop, {}, OPTIONS.splits)
            self.driver.on_ended = self.ended.extend
            self.scheduling = self.driver.drive(self.scheduler)
            self.server = ProxyServer(self.driver, View(), OPTIONS)

    @contextlib.contextmanager
    def _running(self) -> Any:
        asyncio.set_event_loop(self.loop)
        yield

    def client(self) -> End:
        """One more client."""
        end = End()
        connection = ClientConnection(self.server)
        connection.connection_made(Transport(self.loop, connection, end))
        return end

    def close(self) -> None:
        """End everything."""
        self.server.abort()
        self.loop.settle()
        self.driver.close()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.settle(2)
        self.loop.close()
        asyncio.set_event_loop(None)
