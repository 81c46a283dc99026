"""Sharing of several schedulers of one fleet, over a hub or Redis: live leases, and waiting requests.

Each process hears of every change and of its own, whose way there and back is the age that the others' news
have. It says something at least four times in `silent_s`, so that a silent peer is dead. It tells all it has
when it comes, when it is asked to, and when it was cut off. Without a connection each goes on with its own
view and the engines' own figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Command
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.balancer.telemetry.rarely import Rarely
from hetlb.options.lease_wire import PART_BYTES, PART_CHANGES, WireChange, parts
from hetlb.options.shared_view.hub import HubTransport
from hetlb.options.shared_view.peer_transport import PeerTransport
from hetlb.options.shared_view.redis_transport import RedisTransport
from hetlb.options.shared_view.shared_table import HUB, SharedTable
from hetlb.options.shared_view.shared_view import SharedView

logger = logging.getLogger("hetlb.shared")

_VERSION: Final = 3
#: Kinds of messages: changes, all that holds, the question for all that holds, and the last changes of a
#: process that stops.
_CHANGES: Final = 0
_STATE: Final = 1
_ASK: Final = 2
_LEAVE: Final = 3
_RETRY_S: Final = 0.25
#: Longest wait for the last messages to be published, in seconds; beyond `silent_s` peers need none of them.
_LAST_WORDS_S: Final = 1.0
#: Maximum bytes of a message.
MAX_MESSAGE_BYTES: Final = 2 * PART_BYTES
#: Peers at once, and their leases in all: a message beyond is none.
_MOST_PEERS: Final = 256
_MOST_LEASES: Final = 1 << 18
#: Longest way of an own message, in seconds, that says something of the way.
_MOST_AGE_S: Final = 60.0
#: Weight of one more echo in the mean age of news.
_ECHO_WEIGHT: Final = 0.1


class _Message(msgspec.Struct, array_like=True, frozen=True):
    """One message of a process; `sent_at` by its own clock."""

    version: Literal[3]
    name: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{1,32}$")]
    kind: Literal[0, 1, 2, 3]
    sequence: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    sent_at: float
    changes: Annotated[list[WireChange], msgspec.Meta(max_length=PART_CHANGES)]


class _Head(msgspec.Struct, array_like=True, frozen=True):
    """A message without its changes."""

    version: int
    name: str
    kind: int
    sequence: int
    sent_at: float


_decode = msgspec.msgpack.Decoder(_Message).decode
_decode_head = msgspec.msgpack.Decoder(_Head).decode


class Sharing:
    """Exchange of state with the other processes; `name` is this one's, in hexadecimal digits."""

    def __init__(
        self,
        table: SharedTable,
        url: str,
        scheduler: Scheduler,
        carry_out: Callable[[list[Command]], None],
        name: str,
    ) -> None:
        self._table = table
        self._carry_out = carry_out
        self._loop = asyncio.get_running_loop()
        self.name = name
        self.view = SharedView(scheduler, int(name, 16), name)
        self.view.journal.on_change = lambda: self._loop.call_soon(self._tell)
        self._transport = transport_of(url, table.group, table.silent_s)
        self._own = msgspec.msgpack.encode([_VERSION, name])[1:]
        self._heard_at: dict[str, float] = {}
        self._next: dict[str, int] = {}
        #: Messages so far.
        self.sent = self.received = self.rejected = 0
        self._rejections = Rarely()
        #: The timer of the answer to peers that asked for the whole state, and when the last one was sent.
        self._answer: asyncio.TimerHandle | None = None
        self._answered_at = -_RETRY_S
        #: True while the server is reached.
        self.connected = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def peers(self) -> int:
        return len(self.view.peers)

    def start(self) -> None:
        """Begin; a server that is not there yet is waited for, and nothing else waits for it."""
        self._tasks = [self._loop.create_task(each) for each in (self._listen(), self._beat())]

    async def close(self) -> None:
        """Stop: peers hear the last changes and forget this process."""
        if self._answer is not None:
            self._answer.cancel()
        tasks, self._tasks = self._tasks, []
        await _cancel(tasks)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_LAST_WORDS_S, self._table.silent_s)):
                if tasks and self.connected:
                    self._send(_LEAVE, self.view.take())
                    await self._transport.flush()
        await self._transport.close()

    # --- out ---

    def _tell(self) -> None:
        """Send the changes of the last turn of the event loop."""
        if self._tasks and (changes := self.view.take()):
            self._send(_CHANGES, changes)

    def _send(self, kind: int, changes: list[WireChange]) -> None:
        """Send changes in parts: of a state the first part has the `kind`, else the last one."""
        some = parts(changes)
        at = 0 if kind == _STATE else len(some) - 1
        for number, part in enumerate(some):
            self.sent += 1
            head = [_VERSION, self.name, kind if number == at else _CHANGES, self.sent]
            message = msgspec.msgpack.encode([*head, self._loop.time(), part])
            self._transport.send(message)

    def _send_state(self) -> None:
        """Send the whole state, after the earlier changes."""
        if changes := self.view.take():
            self._send(_CHANGES, changes)
        self._send(_STATE, self.view.live(self._loop.time()))

    def _answer_all(self) -> None:
        """Send the whole state to peers that asked since the last time."""
        self._answer, self._answered_at = None, self._loop.time()
        self._send_state()

    async def _beat(self) -> None:
        """Send a heartbeat, and find peers that have gone silent."""
        while True:
            await asyncio.sleep(self._table.silent_s / 4.0)
            now = self._loop.time()
            self._send(_CHANGES, self.view.take())
            for peer, heard_at in list(self._heard_at.items()):
                if now - heard_at > self._table.silent_s:
                    text = "shared state: peer %s is gone, and its leases with it"
                    tell(logger, Event.SHARED_PEER_GONE, text, peer[:32], peer=peer[:32])
                    self._forget(peer, now)

    # --- in ---

    async def _listen(self) -> None:
        lost = False
        while True:
            try:
                await self._transport.run(self._introduce, self._receive)
            except Exception as error:  # of whatever kind: a process that hears nothing must not seem to
                if self.connected or not lost:
                    reason = " ".join(str(error).split())[:200] or type(error).__name__
                    text = "shared state: the connection is lost (%s): this process goes on with its own view"
                    tell(logger, Event.SHARED_LOST, text, reason, reason=reason)
                lost, self.connected = True, False
            await asyncio.sleep(_RETRY_S)

    def _introduce(self) -> None:
        """Send the whole state, and ask the others for theirs."""
        self._transport.lost = False
        self._transport.discard()
        self._send_state()
        self._send(_ASK, [])

    def _receive(self, data: object) -> None:
        """Take a message; an invalid one is counted, and the next one is taken like any other."""
        now = self._loop.time()
        if not self.connected:
            self.connected = True
            tell(logger, Event.SHARED, "shared state: connected (group %s)", self._table.group)
        if self._transport.lost:
            self._introduce()
        try:
            if isinstance(data, bytes) and data.startswith(self._own, 1):
                age_s = min(_MOST_AGE_S, max(0.0, now - _decode_head(data).sent_at))
                self.view.delay_s += _ECHO_WEIGHT * (age_s - self.view.delay_s)
                return
            if not isinstance(data, bytes) or len(data) > MAX_MESSAGE_BYTES:
                raise ValueError(f"expected a message of at most {MAX_MESSAGE_BYTES >> 20} MiB")
            message = _decode(data)
            if message.name not in self._heard_at and len(self._heard_at) >= _MOST_PEERS:
                raise ValueError(f"expected at most {_MOST_PEERS} peers")
            if self.view.peer_leases + len(message.changes) > _MOST_LEASES:
                raise ValueError(f"expected at most {_MOST_LEASES} leases of peers")
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            self.rejected += 1
            reason = " ".join(str(error).split())[:200]
            self._rejections.tell(logger, Event.SHARED_MESSAGE, "shared state: a message is none: %s", reason)
            return
        peer, kind, sequence, changes = message.name, message.kind, message.sequence, message.changes
        self.received += 1
        self._heard_at[peer] = now
        whole = kind == _STATE or self._next.get(peer) == sequence
        self._next[peer] = sequence + 1
        if kind == _STATE:
            self._carry_out(self.view.replace(peer, changes, now))
        else:  # without a whole state before, changes have no meaning
            self._carry_out(self.view.receive(peer, changes if whole else (), now))
        if not whole:
            self._send(_ASK, [])
        if kind == _ASK and self._answer is None:
            self._answer = self._loop.call_at(self._answered_at + _RETRY_S, self._answer_all)
        if kind == _LEAVE:
            self._forget(peer, now)

    def _forget(self, peer: str, now: float) -> None:
        """End the leases of a peer that left, or is silent."""
        del self._heard_at[peer]
        self._next.pop(peer, None)
        self._carry_out(self.view.gone(peer, now))


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        # redis-py takes a cancellation for a timeout now and then: it is said again.
        _, left = await asyncio.wait(left, timeout=_RETRY_S)


def transport_of(url: str, group: str, silent_s: float) -> PeerTransport:
    """Return the carrier that a URL names."""
    if url.startswith(HUB):
        return HubTransport(Path(url.removeprefix(HUB)))
    return RedisTransport(url, f"{group}:leases", silent_s)
