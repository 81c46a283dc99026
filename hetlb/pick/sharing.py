"""Sharing of several pickers of one fleet, over Valkey or Redis: live leases, what waits, and the leader.

Publish/subscribe carries the changes, one message for all of a turn of the event loop; every picker hears of
every change and of its own, whose way there and back is the age that the others' news have. A picker says
something at least four times in `silent_s`, so that silence is death. It tells all it has when it comes, when
it is asked to, and when it was cut off. Without the server nothing is heard of the others, and each picker
goes on with its own view and the engines' own figures.

The leader, where one picker serves and the others are ready to, holds a key that expires; it has the highest
number ever drawn, and one that hears of a higher one is the leader no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from hetlb.config.fleet import SharedTable
from hetlb.core.prefix_index import PrefixKey
from hetlb.core.scheduler import Scheduler
from hetlb.core.shared_view import Begun, Booked, Change, Ended, SharedView, Waits
from hetlb.core.types import Command, Outcome, Request
from hetlb.errors import ConfigError

logger = logging.getLogger("hetlb.pick")

_VERSION: Final = 1
#: Kinds of messages: changes, all that holds, and the question for all that holds.
_CHANGES: Final = 0
_STATE: Final = 1
_ASK: Final = 2
#: Messages that wait to be published, at most; more is told as a whole later.
_MOST_WAITING: Final = 1000
_RETRY_S: Final = 0.25
#: Own messages come back: after so many times `silent_s` without any the connection is dead.
_DEAF: Final = 2.0
_BookedFields: TypeAlias = tuple[
    int,
    str,
    int,
    float,
    float,
    bool,
    str,
    int,
    int | None,
    int,
    int,
    bool,
    int,
    tuple[PrefixKey, ...],
    str | None,
]
#: A leader's key lives for so many times `silent_s`.
_LEADER_LIVES: Final = 2.0
#: Weight of one more echo in the mean age of news.
_ECHO_WEIGHT: Final = 0.1
_RENEW: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 0
"""
_RELEASE: Final = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
)


def shared_url(table: SharedTable, where: str) -> str:
    """Address of the server. Raises `ConfigError`."""
    url = table.url
    if table.url_env is not None:
        if url is not None:
            raise ConfigError(f"{where}pick.shared.url: expected either url or url_env, got both")
        url = os.environ.get(table.url_env)
        if url is None:
            raise ConfigError(f"{where}pick.shared.url_env: expected the name of a variable that is set")
    if url is None:
        raise ConfigError(f"{where}pick.shared.url: expected an address, but the key is missing")
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError(f"{where}pick.shared.url: expected redis://, rediss:// or unix:// at its beginning")
    return url


class Sharing:
    """Tells the other pickers and hears of them. `carry_out` does what the scheduler says then."""

    def __init__(
        self,
        table: SharedTable,
        url: str,
        scheduler: Scheduler,
        carry_out: Callable[[list[Command]], None],
    ) -> None:
        self._table = table
        self._carry_out = carry_out
        self._loop = asyncio.get_running_loop()
        self.name = secrets.token_hex(6)
        self.view = SharedView(scheduler, int(self.name, 16))
        limit_s = max(0.2, table.silent_s)
        self._redis = redis.asyncio.Redis.from_url(
            url, socket_connect_timeout=limit_s, socket_timeout=limit_s, protocol=2
        )
        self._channel = f"{table.group}:leases"
        self._leader_key, self._epoch_key = f"{table.group}:leader", f"{table.group}:epoch"
        #: True if this picker leads, and the number of the last time that it became the leader.
        self.leads = False
        self._epoch = 0
        self._heard_at: dict[str, float] = {}
        self._next: dict[str, int] = {}
        self._sequence = 0
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(_MOST_WAITING)
        self._missed = True
        self._telling = False
        #: True while the server is reached.
        self.connected = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def serves(self) -> bool:
        """True if gateways should send requests here."""
        return self._table.mode == "active-active" or self.leads

    def start(self) -> None:
        """Begin; a server that is not there yet is waited for, and nothing else waits for it."""
        runs = [self._listen(), self._publish(), self._beat()]
        if self._table.mode == "active-standby":
            runs.append(self._lead())
        self._tasks = [self._loop.create_task(each) for each in runs]

    async def close(self) -> None:
        """Stop; a leader lets another lead at once."""
        tasks, self._tasks = set(self._tasks), []
        while tasks:
            for task in tasks:
                task.cancel()
            # redis-py takes a cancellation for a timeout now and then: it is said again.
            _, tasks = await asyncio.wait(tasks, timeout=_RETRY_S)
        if self.leads:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await self._redis.eval(_RELEASE, 1, self._leader_key, self.name)
        await self._redis.aclose()

    # --- out ---

    def changed(self) -> None:
        """Something is to be told: with all else of this turn of the event loop."""
        if not self._telling:
            self._telling = True
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = False
        if changes := self.view.take():
            self._send(_CHANGES, changes)

    def _send(self, kind: int, changes: list[Change]) -> None:
        self._sequence += 1
        head = [_VERSION, self.name, kind, self._sequence, self._loop.time(), self._epoch]
        message = msgspec.msgpack.encode([*head, [_encoded(each) for each in changes]])
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self._missed = True

    def _send_state(self) -> None:
        """Tell all that holds, after what changed before."""
        if changes := self.view.take():
            self._send(_CHANGES, changes)
        self._send(_STATE, self.view.live(self._loop.time()))

    async def _publish(self) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await self._redis.publish(self._channel, message)
            except (RedisError, OSError, TimeoutError):
                self._missed = True
                await asyncio.sleep(_RETRY_S)

    async def _beat(self) -> None:
        """Be heard of, and find out which peers are not heard of any more."""
        while True:
            await asyncio.sleep(self._table.silent_s / 4.0)
            now = self._loop.time()
            self._send(_CHANGES, self.view.take())
            for peer, heard_at in list(self._heard_at.items()):
                if now - heard_at > self._table.silent_s:
                    self._forget(peer, now)

    # --- in ---

    async def _listen(self) -> None:
        lost = False
        while True:
            try:
                async with self._redis.pubsub() as subscription:
                    await subscription.subscribe(self._channel)
                    self._introduce()
                    await self._hear(subscription)
            except (RedisError, OSError, TimeoutError) as error:
                if self.connected or not lost:
                    reason = " ".join(str(error).split())[:200] or type(error).__name__
                    logger.warning(
                        "shared state: the server is gone (%s): this picker goes on with its own view", reason
                    )
                lost, self.connected = True, False
            await asyncio.sleep(_RETRY_S)

    def _introduce(self) -> None:
        """Tell all, and ask the others to."""
        self._missed = False
        while not self._outbox.empty():
            self._outbox.get_nowait()
        self._send_state()
        self._send(_ASK, [])

    async def _hear(self, subscription: Any) -> None:
        heard_at = self._loop.time()
        while True:
            message = await subscription.get_message(
                ignore_subscribe_messages=True, timeout=self._table.silent_s
            )
            if message is not None:
                heard_at = self._loop.time()
                if not self.connected:
                    self.connected = True
                    logger.info("shared state: the server is reached (group %s)", self._table.group)
                self._receive(message["data"])
            elif self._loop.time() - heard_at > _DEAF * self._table.silent_s:
                raise ConnectionError("not even own messages come back")
            if self._missed:
                self._introduce()

    def _receive(self, data: bytes) -> None:
        """Take a message; one that is not ours is none."""
        now = self._loop.time()
        try:
            version, peer, kind, sequence, sent_at, epoch, raw = msgspec.msgpack.decode(data)
            if version != _VERSION:
                return
            changes = [_decoded(each) for each in raw]
        except (msgspec.MsgspecError, ValueError, TypeError, IndexError, KeyError):
            return
        if peer == self.name:
            age_s = max(0.0, now - sent_at)
            self.view.delay_s += _ECHO_WEIGHT * (age_s - self.view.delay_s)
            return
        if self.leads and epoch > self._epoch:
            self._resign("another picker leads")
        self._heard_at[peer] = now
        if kind == _ASK:
            self._send_state()
            return
        expected = self._next.get(peer)
        self._next[peer] = sequence + 1
        if kind == _STATE:
            self._carry_out(self.view.replace(peer, changes, now))
        elif expected is None or expected != sequence:
            self._carry_out(self.view.receive(peer, (), now))
            self._send(_ASK, [])
        else:
            self._carry_out(self.view.receive(peer, changes, now))

    def _forget(self, peer: str, now: float) -> None:
        del self._heard_at[peer]
        self._next.pop(peer, None)
        logger.warning("shared state: picker %s is gone, and its leases with it", peer[:32])
        self._carry_out(self.view.gone(peer, now))

    # --- the leader ---

    async def _lead(self) -> None:
        """Hold the leader's key, or wait for it to be free."""
        lives_ms = int(self._table.silent_s * _LEADER_LIVES * 1e3)
        while True:
            try:
                if self.leads:
                    if not await self._redis.eval(_RENEW, 1, self._leader_key, self.name, str(lives_ms)):
                        self._resign("its key is another's")
                elif await self._redis.set(self._leader_key, self.name, nx=True, px=lives_ms):
                    self._epoch = int(await self._redis.incr(self._epoch_key))
                    self.leads = True
                    logger.info("shared state: this picker leads (%d)", self._epoch)
            except (RedisError, OSError, TimeoutError):
                pass  # one that leads goes on: no other can take over without the server
            await asyncio.sleep(self._table.silent_s / 2.0)

    def _resign(self, reason: str) -> None:
        self.leads = False
        logger.warning("shared state: this picker leads no more: %s", reason)


# --- the short form ----------------------------------------------------------------------------------


def _encoded(change: Change) -> list[Any]:
    if isinstance(change, Booked):
        request = change.request
        return [
            0, change.number, change.instance, change.work_ns, change.predicted_output, change.age_s,
            change.begun, request.model, request.prompt_tokens, request.max_tokens, request.sequences,
            request.longest_prompt_tokens, request.generates, request.samples, request.prefix_keys,
            request.tenant,
        ]  # fmt: skip
    if isinstance(change, Begun):
        return [1, change.number]
    if isinstance(change, Ended):
        outcome = change.outcome.value
        return [2, change.number, outcome, change.output_tokens, change.cached_tokens, change.server_error]
    return [3, change.sizes]


def _decoded(raw: list[Any]) -> Change:
    """A change; fields may be added. Raises `ValueError` or `IndexError` where it is none."""
    kind = raw[0]
    if kind == 0:
        number, instance, work_ns, predicted, age_s, begun, *rest = msgspec.convert(raw[1:16], _BookedFields)
        model, prompt, most, sequences, longest, generates, samples, keys, tenant = rest
        request = Request(
            0,
            model,
            prompt,
            most,
            sequences,
            longest,
            generates,
            prefix_keys=keys,
            tenant=tenant,
            samples=samples,
        )
        return Booked(number, instance, request, work_ns, predicted, age_s, begun)
    if kind == 1:
        return Begun(msgspec.convert(raw[1], int))
    if kind == 2:
        return Ended(*msgspec.convert(raw[1:6], tuple[int, Outcome, int, int | None, bool]))
    if kind == 3:
        return Waits(msgspec.convert(raw[1], dict[str, int]))
    raise ValueError(f"unknown kind {kind!r}")


__all__ = ["Sharing", "shared_url"]
