"""Messages of peers over publish and subscribe of a Valkey or Redis server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from redis._parsers import _AsyncRESP2Parser

from hetlb.options.peers.peer_messages import MAX_MESSAGE_BYTES, Receive
from hetlb.tasks import ended
from hetlb.turns import Share

#: Messages that wait to be published, at most.
_MAX_WAITING_MESSAGES: Final = 1000
_RETRY_S: Final = 0.25
#: Items of a reply: a message has three, its kind, channel and content.
_MAX_ITEMS: Final = 8


class _Replies(_AsyncRESP2Parser):
    """Replies with a bound: the server itself allows 512 MiB, and any client of it may publish.

    A longer one ends the connection before it is read.
    """

    __slots__ = ("_nested",)

    async def _readline(self) -> bytes:
        try:
            line: bytes = await super()._readline()
        except ValueError as error:
            raise ConnectionError("a line of a reply is too long") from error
        kind, number = line[:1], line[1:]
        if kind not in b"$*:":
            return line
        if not number.isdigit() or len(number) > 10:
            raise ConnectionError(f"no number in a reply: {line[:40]!r}")
        nested, self._nested = getattr(self, "_nested", False), kind == b"*"
        most = {b"$": MAX_MESSAGE_BYTES, b"*": -1 if nested else _MAX_ITEMS}.get(kind)
        if most is not None and int(number) > most:
            raise ConnectionError(f"a reply is too long: {line[:40]!r}")
        return line


class RedisTransport:
    """A client of the server."""

    by_peer = False

    def __init__(self, url: str, channel: str, silent_s: float) -> None:
        import redis.asyncio

        limit_s = max(0.2, silent_s)
        self._redis = redis.asyncio.Redis.from_url(
            url, socket_connect_timeout=limit_s, socket_timeout=limit_s, protocol=2, parser_class=_Replies
        )
        self._channel, self._silent_s = channel, silent_s
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(_MAX_WAITING_MESSAGES)
        self._publisher: asyncio.Task[None] | None = None
        self.lost = self._dropped = False

    async def run(self, joined: Callable[[], None], receive: Receive) -> None:
        if self._publisher is None:
            self._publisher = asyncio.create_task(self._publish())
        async with self._redis.pubsub() as subscription:
            await subscription.subscribe(self._channel)
            joined()
            share = Share()
            self._dropped = False
            while not self._dropped:
                await share.spent()
                message = await subscription.get_message(
                    ignore_subscribe_messages=True, timeout=self._silent_s
                )
                if message is not None:
                    receive(message["data"])
            raise ConnectionError("not even own messages come back")

    def send(self, message: bytes) -> None:
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.lost = True

    def discard(self) -> None:
        while not self._outbox.empty():
            self._outbox.get_nowait()
            self._outbox.task_done()

    async def flush(self) -> None:
        await self._outbox.join()

    def drop(self) -> None:
        self._dropped = True

    async def close(self) -> None:
        if self._publisher is not None:
            await ended(self._publisher)
        await self._redis.aclose()

    async def _publish(self) -> None:
        from redis.exceptions import RedisError

        while True:
            message = await self._outbox.get()
            try:
                await self._redis.publish(self._channel, message)
            except (RedisError, OSError, TimeoutError):
                self.lost = True
                await asyncio.sleep(_RETRY_S)
            finally:
                self._outbox.task_done()
