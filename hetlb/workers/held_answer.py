"""The answer of a busy engine, held while the scheduler process looks for another instance."""

from __future__ import annotations

from typing import Final

from hetlb.core.types import RequestId
from hetlb.proxy.ends import End
from hetlb.proxy.exchange import Exchange
from hetlb.proxy.http.http1 import ResponseHead
from hetlb.proxy.upstream import EngineConnection

#: Bytes of a busy engine's answer that are held; more than that waits in its connection.
_HELD_BYTES: Final = 64 << 10


class HeldAnswer:
    """The answer of a busy engine, from behind its head on, while the scheduler process looks for another."""

    __slots__ = ("_body", "_connection", "_end", "_exchange", "_failure", "_registry", "_size")

    def __init__(self, exchange: Exchange, registry: dict[RequestId, HeldAnswer]) -> None:
        self._exchange = exchange
        self._registry = registry
        engine = exchange.engine
        assert engine is not None, "expected an engine that is answering"
        engine.exchange = self
        self._connection: EngineConnection | None = engine
        self._body: list[bytes] = []
        self._size = 0
        self._end: bytes | None = None
        self._failure: tuple[End, str] | None = None

    def pass_on(self) -> None:
        """Deliver the buffered answer to the exchange, then the rest as it arrives."""
        exchange, connection = self._exchange, self._connection
        self._registry.pop(exchange.request.id, None)
        if connection is not None:
            connection.exchange = exchange
        for payload in self._body:
            exchange.engine_body(payload)
        if self._failure is not None:
            end, detail = self._failure
            exchange.engine_failed(end, detail)
        elif self._end is not None:
            exchange.engine_end(self._end)
        elif connection is not None:
            connection.resume()

    # --- from the engine's connection ---

    @property
    def method(self) -> bytes:
        """The method of the request."""
        return self._exchange.method

    def engine_connected(self, connection: EngineConnection, own_headers: bytes, passthrough: bool) -> None:
        """Never called: the connection has carried the request."""
        raise AssertionError("expected an engine that has answered")

    def engine_identified(self) -> None:
        """Never called: the connection has carried the request."""
        raise AssertionError("expected an engine that has answered")

    def engine_lost_idle(self) -> None:
        """Never called: the engine has answered."""
        raise AssertionError("expected an engine that has answered")

    @property
    def plain(self) -> bool:
        """False: what comes is kept."""
        return False

    def engine_head(self, head: ResponseHead, length: int | None) -> None:
        """Never called: the head has come."""
        raise AssertionError("expected the body of an answer")

    def engine_events(self, chunks: bytes) -> bool:
        """False: this is no stream."""
        return False

    def engine_body(self, payload: bytes) -> None:
        """Buffer it; pause the engine at the limit."""
        self._body.append(payload)
        self._size += len(payload)
        if self._size > _HELD_BYTES and self._connection is not None:
            self._connection.pause()

    def engine_end(self, payload: bytes) -> None:
        """The answer is whole, and its connection free for others."""
        self._end = payload
        self._left()

    def engine_failed(self, end: End, detail: str) -> None:
        """The answer broke off."""
        self._failure = end, detail
        self._left()

    def _left(self) -> None:
        self._connection = None
        self._exchange.engine = None
