"""Requests of the proxy's own to engines: prefill legs, questions to bootstrap servers, releases of KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hetlb.proxy.ends import End
from hetlb.proxy.http.http1 import ResponseHead
from hetlb.proxy.upstream import EngineConnection, EnginePool

#: Answers beyond this are none.
_MAX_ANSWER_BYTES: Final = 4 << 20


class SideCall:
    """A request of the proxy's own to an engine, and its whole answer, of bounded size.

    `lines` makes its head from the engine's own header lines, without `content-length` and the empty line.
    """

    __slots__ = (
        "_body", "_connection", "_done", "_failed", "_fresh", "_head", "_lines", "_over",
        "_received", "_serves", "method", "plain", "pool",
    )  # fmt: skip

    def __init__(
        self,
        pool: EnginePool,
        method: bytes,
        lines: Callable[[bytes, bool], bytes],
        body: bytes,
        done: Callable[[ResponseHead, bytes], None],
        failed: Callable[[End | None, str], None],
        serves: Callable[[], bool] = lambda: True,
    ) -> None:
        self.method = method
        self.plain = True
        self.pool = pool
        self._lines = lines
        self._body = body
        self._done = done
        self._failed = failed
        self._serves = serves
        self._connection: EngineConnection | None = None
        self._head: ResponseHead | None = None
        self._received = bytearray()
        self._fresh = self._over = False

    def send(self) -> None:
        """Send it."""
        self.pool.send(self)

    def abort(self) -> None:
        """Abort it at the engine. No outcome is reported."""
        self._over = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        else:
            self.pool.cancel(self)

    def engine_connected(self, connection: EngineConnection, own_headers: bytes, passthrough: bool) -> None:
        """Write the request."""
        self._connection = connection
        length = b"" if self.method == b"GET" else b"content-length: %d\r\n" % len(self._body)
        connection.send(b"%b%b\r\n" % (self._lines(own_headers, passthrough), length), [self._body])

    def engine_identified(self) -> None:
        """After a reconnect it was looked at what the engine serves."""
        if self._serves():
            self.pool.send(self)
        else:
            self.engine_failed(None, "another model is served there")

    def engine_lost_idle(self) -> None:
        """A reused connection was closed before it answered: once more on a fresh one."""
        self._connection = None
        if self._fresh:
            self.engine_failed(None, "the engine closed the connection")
        else:
            self._fresh = True
            self.pool.send(self, fresh=True)

    def engine_head(self, head: ResponseHead, length: int | None) -> None:
        """The answer begins."""
        self._head = head

    def engine_events(self, chunks: bytes) -> bool:
        """Nothing of it is passed on as it stands."""
        return False

    def engine_body(self, payload: bytes) -> None:
        """More of the answer."""
        self._received += payload
        if len(self._received) > _MAX_ANSWER_BYTES and not self._over:
            self.abort()
            self._failed(None, "its answer is too long")

    def engine_end(self, payload: bytes) -> None:
        """The answer is whole."""
        self._connection = None
        if self._over:
            return
        self._over = True
        assert self._head is not None, "expected a head before the end"
        self._done(self._head, bytes(self._received) + payload)

    def engine_failed(self, end: End | None, detail: str) -> None:
        """The engine, or this machine, failed."""
        self._connection = None
        if not self._over:
            self._over = True
            self._failed(end, detail)
