"""Sharing of several schedulers of one fleet, over a hub or Redis: leases, waiting requests, use of keys.

Each process also receives messages of its own; their round trip is the assumed age of the others' news. It
sends at least four messages in `silent_s`; a peer silent for `silent_s` is dead. It sends its whole state if
it joins, on request, and after a loss of the connection. Without a connection each goes on with its own view
and the engines' own figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import SharedTable
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Command
from hetlb.balancer.exchange.kept_places import KeptPlaces, Place
from hetlb.balancer.fleet.shared_fleet import OperatorChange
from hetlb.balancer.telemetry.events import Event, Rarely, tell
from hetlb.options.peers import peer_messages
from hetlb.options.peers.hub import HUB, HubTransport
from hetlb.options.peers.lease_wire import (
    PeerChange,
    WireAdmitted,
    WireChange,
    WireKept,
    WireUsed,
    parts,
)
from hetlb.options.peers.operators import OperatorChanges
from hetlb.options.peers.peer_messages import PeerTransport
from hetlb.options.peers.shared_view import SharedView
from hetlb.tasks import ended
from hetlb.turns import turns

if TYPE_CHECKING:
    from hetlb.balancer.clients.key_limits import Limiter, Ticket
    from hetlb.balancer.fleet.shared_fleet import SleepWatch

logger = logging.getLogger("hetlb.shared")

_RETRY_S: Final = 0.25
#: Seconds to collect changes for one message: each message wakes the hub and every peer.
_POST_S: Final = 0.001
#: Longest wait for the last messages to be published, in seconds; beyond `silent_s` peers need none of them.
_LAST_WORDS_S: Final = 1.0
#: Peers at once, and their leases in all: a message beyond is none.
_MOST_PEERS: Final = 256
_MOST_LEASES: Final = 1 << 18
#: Longest way of an own message, in seconds, that says something of the way.
_MOST_AGE_S: Final = 60.0
#: Weight of one more echo in the mean age of news.
_ECHO_WEIGHT: Final = 0.1
#: Longest time, in seconds, that a peer takes to follow to a new connection: its hub may have ended with it.
_REJOIN_S: Final = 1.0
#: Messages of each process in `silent_s`, and multiple of it without an own message after which a connection
#: is dead.
_BEATS: Final = 4
_DEAF_FACTOR: Final = 2.0
#: Maximum counted requests in flight of one peer.
_MOST_TICKETS: Final = 1 << 14


class KeyUse:
    """Tells peers how keys with limits are used here, and counts their use at peers.

    `tell` is called once `take` has something to return.
    """

    def __init__(self, limiter: Callable[[str], Limiter | None], tell: Callable[[], object]) -> None:
        self._limiter = limiter
        self._tell = tell
        self._own: dict[int, Ticket] = {}
        self._number = 0
        self._unsent: list[PeerChange] = []
        self._of: dict[str, dict[int, Ticket]] = {}

    def admitted(self, ticket: Ticket) -> None:
        self._number += 1
        ticket.number = self._number
        self._own[ticket.number] = ticket
        self._add(WireAdmitted(ticket.number, ticket.limiter.name, ticket.reserved))

    def used(self, ticket: Ticket, prompt_tokens: int, output_tokens: int, last: bool) -> None:
        if last:
            self._own.pop(ticket.number, None)
        self._add(WireUsed(ticket.number, prompt_tokens, output_tokens, last))

    def _add(self, change: PeerChange) -> None:
        self._unsent.append(change)
        if len(self._unsent) == 1:
            self._tell()

    def take(self) -> list[PeerChange]:
        """Return the changes for peers since the last call."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def live(self, now: float) -> list[PeerChange]:
        """Return the requests in flight, for a new peer."""
        return [WireAdmitted(number, each.limiter.name, 0, False) for number, each in self._own.items()]

    def receive(self, peer: str, changes: Sequence[PeerChange], now: float) -> None:
        tickets = self._of.setdefault(peer, {})
        for each in changes:
            if isinstance(each, WireAdmitted):
                limiter = self._limiter(each.key)
                if limiter is not None and each.number not in tickets and len(tickets) < _MOST_TICKETS:
                    tickets[each.number] = limiter.adopt(each.reserved, each.fresh, now)
            elif isinstance(each, WireUsed) and (ticket := tickets.get(each.number)) is not None:
                if each.last:
                    del tickets[each.number]
                    ticket.ended(each.prompt_tokens, each.output_tokens, now)
                else:
                    ticket.used(each.prompt_tokens, each.output_tokens, now)

    def gone(self, peer: str, now: float) -> None:
        """End the requests of a peer: what it reserved stays reserved."""
        for ticket in self._of.pop(peer, {}).values():
            ticket.ended(ticket.reserved, 0, now)


class KeptNews:
    """Tells peers which instances keep answers, and takes over what peers tell."""

    def __init__(self, kept: KeptPlaces) -> None:
        self._kept = kept

    def take(self) -> list[PeerChange]:
        return [WireKept(name, *place) for name, place in self._kept.take()]

    def live(self, now: float) -> list[PeerChange]:
        return [WireKept(name, *place) for name, place in self._kept.by_id.items()]

    def receive(self, peer: str, changes: Sequence[PeerChange], now: float) -> None:
        for each in changes:
            if isinstance(each, WireKept):
                self._kept.adopt(each.id, Place(each.instance, each.model, each.owner))

    def gone(self, peer: str, now: float) -> None:
        """Do nothing: its answers are kept all the same."""


class SharedPart(Protocol):
    """One kind of changes that peers tell each other."""

    def take(self) -> Sequence[PeerChange]: ...
    def live(self, now: float) -> Sequence[PeerChange]: ...
    def receive(self, peer: str, changes: Sequence[PeerChange], now: float) -> None: ...
    def gone(self, peer: str, now: float) -> None: ...


class Sharing:
    """Exchange of state with the other processes; `name` is this one's, in hexadecimal digits."""

    def __init__(
        self,
        table: SharedTable,
        transport: PeerTransport,
        scheduler: Scheduler,
        carry_out: Callable[[list[Command]], None],
        name: str,
    ) -> None:
        self._table = table
        self._carry_out = carry_out
        self._loop = asyncio.get_running_loop()
        self.name = name
        self.view = SharedView(scheduler, int(name, 16), name)
        self.view.journal.on_change = self._tell_soon
        #: Shared besides leases, if at all: operators' changes, the use of clients' keys, and others.
        self.operators: OperatorChanges | None = None
        self.key_use: KeyUse | None = None
        self._parts: list[SharedPart] = []
        self._transport = transport
        self._own = peer_messages.own_start(name)
        self._heard_at: dict[str, float] = {}
        self._next: dict[str, int] = {}
        #: Peers with their whole state received.
        self._whole: set[str] = set()
        #: Messages so far.
        self.sent = self.received = self.rejected = 0
        self._rejections = Rarely()
        #: Kinds of messages that peers made due, their timer, and when the last ones were sent.
        self._due: set[int] = set()
        self._speaks: asyncio.TimerHandle | None = None
        self._spoke_at = -_RETRY_S
        #: Ends of peers that were believed, the last one of each.
        self._left_at: dict[str, float] = {}
        #: True while leases that peers left behind are being ended.
        self._ends = False
        #: True while the server is reached, and when an own message came back last.
        self.connected = False
        self._echoed_at = math.inf
        #: Set when the server was reached for the first time.
        self._reached = asyncio.Event()
        #: Set for a moment when the whole state of a peer has come.
        self._state_came = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        #: Called when the last peer has gone.
        self.on_alone: Callable[[], object] = lambda: None

    @property
    def peers(self) -> int:
        return len(self.view.peers)

    def share_changes(
        self, make: Callable[[OperatorChange], Awaitable[object]], knows: Callable[[str], bool]
    ) -> None:
        """Exchange changes of operators too: `make` makes one here, `knows` says which instances are here."""
        self.operators = OperatorChanges(
            self.name, make, knows, lambda: list(self._heard_at), self._tell_soon
        )
        self._parts.append(self.operators)

    def share_keys(self, limiter: Callable[[str], Limiter | None]) -> KeyUse:
        """Exchange the use of clients' keys too; return the journal to be told of it."""
        self.key_use = KeyUse(limiter, self._tell_soon)
        self._parts.append(self.key_use)
        return self.key_use

    def share_kept(self, kept: KeptPlaces) -> None:
        """Tell peers which instances keep which answers, and hear theirs, from now on."""
        kept.tell = self._tell_soon
        self._parts.append(KeptNews(kept))

    def share_sleep(self, sleep: SleepWatch, folder: Path) -> None:
        """Exchange sleep and wake of instances too, about which one process in the folder decides."""
        from hetlb.options.peers.sleep_news import SleepNews

        self._parts.append(SleepNews(sleep, folder, self._tell_soon))
        if self.connected:
            self._send(peer_messages.ASK, [])

    async def spread(self, change: OperatorChange) -> list[str]:
        """Send an operator's change to all peers, and wait for them; return what went wrong there."""
        return [] if self.operators is None else await self.operators.spread(change, self._loop.time())

    def reloaded(self, before: Fleet, after: Fleet) -> None:
        """Note that the fleet file was read again: what it says of instances and policy holds from now on."""
        if self.operators is not None:
            new_policy = before.written.policy.name != after.written.policy.name
            self.operators.reloaded([each.name for each in after.instances], new_policy)

    def instances_changed(self) -> None:
        """Make the operators' changes that waited for an instance."""
        if self.operators is not None:
            self.operators.instances_changed()

    def start(self) -> None:
        """Begin. A missing server is retried in the background; nothing else waits for it."""
        self._tasks = [self._loop.create_task(each) for each in (self._listen(), self._beat())]

    async def linked(self, most_s: float) -> None:
        """Return when the server is reached. Raises `TimeoutError`."""
        async with asyncio.timeout(most_s):
            await self._reached.wait()

    async def caught_up(self, most_s: float, least: int = 0) -> bool:
        """Wait for the whole state of all peers, at most `most_s`. Return True if `least` have sent it."""
        deadline = self._loop.time() + most_s
        self._whole.clear()
        if self.connected:
            self._send(peer_messages.ASK, [])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while not self.connected or len(self._whole) < max(least, len(self._heard_at), 1):
                    self._state_came.clear()
                    await self._state_came.wait()
        return len(self._whole) >= least

    async def close(self) -> None:
        """Stop: peers hear the last changes and forget this process."""
        if self._speaks is not None:
            self._speaks.cancel()
        if self.operators is not None:
            await self.operators.close()
        tasks, self._tasks = self._tasks, []
        await ended(*tasks)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_LAST_WORDS_S, self._table.silent_s)):
                if tasks and self.connected:
                    self._send(peer_messages.LEAVE, self._take())
                    await self._transport.flush()
        await self._transport.close()

    # --- out ---

    def _tell_soon(self) -> None:
        self._loop.call_later(_POST_S, self._tell)

    def _take(self) -> list[PeerChange]:
        changes: list[PeerChange] = [*self.view.take(self._loop.time())]
        for each in self._parts:
            changes += each.take()
        return changes

    def _tell(self) -> None:
        """Send the changes of the last moment."""
        if self._tasks and (changes := self._take()):
            self._send(peer_messages.CHANGES, changes)

    def _send(self, kind: int, changes: list[PeerChange]) -> None:
        """Send changes in parts. The `kind` is on the first part of a whole state, else on the last one."""
        some = parts(changes)
        at = 0 if kind == peer_messages.STATE else len(some) - 1
        for number, part in enumerate(some):
            self.sent += 1
            part_kind = kind if number == at else peer_messages.CHANGES
            now = self._loop.time()
            self._transport.send(peer_messages.message(self.name, part_kind, self.sent, now, part))

    def _send_state(self) -> None:
        """Send the whole state, after the earlier changes."""
        if changes := self._take():
            self._send(peer_messages.CHANGES, changes)
        now = self._loop.time()
        held: list[PeerChange] = [*self.view.live(now)]
        for each in self._parts:
            held += each.live(now)
        self._send(peer_messages.STATE, held)

    def _soon(self, kind: int) -> None:
        """Send a question, or the whole state. Many calls within a second make a few messages."""
        self._due.add(kind)
        if self._speaks is None:
            self._speaks = self._loop.call_at(self._spoke_at + _RETRY_S, self._speak)

    def _speak(self) -> None:
        due, self._due = self._due, set()
        self._speaks, self._spoke_at = None, self._loop.time()
        if self._transport.lost:
            self._introduce()
        elif peer_messages.STATE in due:
            self._send_state()
        if peer_messages.ASK in due:
            self._send(peer_messages.ASK, [])

    async def _beat(self) -> None:
        """Send heartbeats, and drop each peer once it was silent for `silent_s`."""
        silent_s = self._table.silent_s
        beat_at = self._loop.time()
        while True:
            due = min([beat_at, *[heard_at + silent_s for heard_at in self._heard_at.values()]])
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            now = self._loop.time()
            if now - due > silent_s / _BEATS:  # this process stood still: their words wait to be read
                heard = max(0.0, now - silent_s * (1.0 - 1.0 / _BEATS))
                self._heard_at = {peer: max(heard, at) for peer, at in self._heard_at.items()}
                self._echoed_at = max(heard, self._echoed_at)
            if now >= beat_at:
                beat_at = now + silent_s / _BEATS
                self._send(peer_messages.CHANGES, self._take())
            if now - self._echoed_at > _DEAF_FACTOR * silent_s:
                self._echoed_at = math.inf
                self._transport.drop()
            self._drop_silent()

    def _drop_silent(self) -> None:
        if not self._tasks:
            return
        now = self._loop.time()
        for peer, heard_at in list(self._heard_at.items()):
            if now - heard_at >= self._table.silent_s:
                text = "shared state: peer %s is gone, and its leases with it"
                tell(logger, Event.SHARED_PEER_GONE, text, peer[:32], peer=peer[:32])
                self._forget(peer, now)

    # --- in ---

    async def _listen(self) -> None:
        told = ""
        while True:
            try:
                await self._transport.run(self._introduce, self._receive)
            except Exception as error:  # of whatever kind: a process that hears nothing must not seem to
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                if self.connected or reason != told:
                    text = "shared state: the connection is lost (%s): this process goes on with its own view"
                    tell(logger, Event.SHARED_LOST, text, reason, reason=reason)
                told, self.connected = reason, False
            await asyncio.sleep(_RETRY_S)

    def _introduce(self) -> None:
        """Send the whole state, and ask the others for theirs."""
        self._transport.lost = False
        self._transport.discard()
        self._echoed_at = now = self._loop.time()
        if self._transport.by_peer and self._heard_at:
            latest = now + _REJOIN_S - self._table.silent_s
            self._heard_at = {peer: min(latest, at) for peer, at in self._heard_at.items()}
            self._loop.call_later(_REJOIN_S, self._drop_silent)
        self._send_state()
        self._send(peer_messages.ASK, [])

    def _receive(self, data: object) -> None:
        """Take a message; an invalid one is counted, and the next one is taken like any other."""
        now = self._loop.time()
        if not self.connected:
            self.connected = True
            self._reached.set()
            tell(logger, Event.SHARED, "shared state: connected (group %s)", self._table.group)
        if self._transport.lost:
            self._soon(peer_messages.STATE)
        try:
            if isinstance(data, bytes) and data.startswith(self._own, 1):
                self._echo(peer_messages.decode_head(data), now)
                return
            if not isinstance(data, bytes) or len(data) > peer_messages.MAX_MESSAGE_BYTES:
                raise ValueError(f"expected a message of at most {peer_messages.MAX_MESSAGE_BYTES >> 20} MiB")
            message = peer_messages.decode(data)
            if message.name not in self._heard_at and len(self._heard_at) >= _MOST_PEERS:
                raise ValueError(f"expected at most {_MOST_PEERS} peers")
            if self.view.peer_leases + len(message.changes) > _MOST_LEASES:
                raise ValueError(f"expected at most {_MOST_LEASES} leases of peers")
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            self.rejected += 1
            reason = " ".join(str(error).split())[:200]
            self._rejections.tell(
                logger, Event.SHARED_MESSAGE, "shared state: an invalid message: %s", reason
            )
            return
        self._heard(message, now)

    def _echo(self, head: peer_messages.PeerHead, now: float) -> None:
        """Take an own message that came back. Its round trip is the assumed age of the messages of peers."""
        if head.kind == peer_messages.LEAVE:  # of an earlier connection with a late end, or forged
            self._soon(peer_messages.STATE)
            return
        self._echoed_at = now
        age_s = min(_MOST_AGE_S, max(0.0, now - head.sent_at))
        self.view.delay_s += _ECHO_WEIGHT * (age_s - self.view.delay_s)

    def _heard(self, message: peer_messages.PeerMessage, now: float) -> None:
        """Take the message of a peer."""
        peer, kind, sequence = message.name, message.kind, message.sequence
        self.received += 1
        if kind == peer_messages.LEAVE and peer not in self._heard_at:
            return
        self._heard_at[peer] = now
        whole = kind == peer_messages.STATE or self._next.get(peer) == sequence
        self._next[peer] = sequence + 1
        changes = message.changes if whole else ()  # without a whole state before, changes have no meaning
        leases = [each for each in changes if isinstance(each, WireChange)]
        if kind == peer_messages.STATE:
            self._carry_out(self.view.replace(peer, leases, now))
            self._whole.add(peer)
            self._state_came.set()
        else:
            self._carry_out(self.view.receive(peer, leases, now))
        if kind == peer_messages.STATE and self.key_use is not None:
            self.key_use.gone(peer, now)
        if len(leases) < len(changes):
            for part in self._parts:
                part.receive(peer, changes, now)
        self._end_soon()
        if kind == peer_messages.LEAVE and now - self._left_at.get(peer, -math.inf) >= self._table.silent_s:
            self._forget(peer, now)
            self._left_at = dict([*self._left_at.items(), (peer, now)][-_MOST_PEERS:])
            return
        if not whole:
            self._soon(peer_messages.ASK)
        if kind == peer_messages.ASK:
            self._soon(peer_messages.STATE)

    def _forget(self, peer: str, now: float) -> None:
        """End the leases of a peer that left, or is silent."""
        del self._heard_at[peer]
        self._next.pop(peer, None)
        self._whole.discard(peer)
        for each in self._parts:
            each.gone(peer, now)
        self._carry_out(self.view.gone(peer, now))
        self._end_soon()
        self._state_came.set()
        if not self._heard_at:
            self.on_alone()

    def _end_soon(self) -> None:
        """End the other leases that peers left behind in later turns."""
        if self.view.leaving and not self._ends:
            self._ends = True
            turns().later(self._end_some)

    def _end_some(self) -> None:
        self._ends = False
        self._carry_out(self.view.end_some(self._loop.time()))
        self._end_soon()


def transport_of(url: str, group: str, silent_s: float) -> PeerTransport:
    """Return the carrier that a URL names."""
    if url.startswith(HUB):
        return HubTransport(Path(url.removeprefix(HUB)))
    from hetlb.options.peers.redis_transport import RedisTransport

    return RedisTransport(url, f"{group}:leases", silent_s)
