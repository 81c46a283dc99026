"""Changes of operators among peers: a change at one process is made at all, and a new peer learns them.

Example: two operators change the policy at two processes. The newer change holds everywhere, by its stamp: a
process gives each change a stamp larger than every stamp it has seen. The same holds for the state of an
instance and its registration.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from hetlb.balancer.fleet.shared_fleet import (
    OperatorChange,
    Register,
    ReloadFile,
    SetPolicy,
    SetState,
    Unregister,
)
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.errors import InputError
from hetlb.options.peers.lease_wire import PeerChange, WireDone, WireOperated
from hetlb.tasks import ended

logger = logging.getLogger("hetlb.shared")

#: Maximum changes kept for a new peer, and maximum changes of peers waiting to be made.
_MOST_CHANGES: Final = 4096
_MOST_WAITING: Final = 256
#: Seconds that peers may take to make a change, and to read the fleet file again.
_DONE_S: Final = 2.0
_RELOADED_S: Final = 10.0
#: Smallest step of a stamp.
_STAMP_S: Final = 1e-6


def _subject(change: OperatorChange) -> str:
    """Return the thing that a change is about. It is "" for a change that only holds for the moment."""
    if isinstance(change, SetPolicy):
        return "policy"
    if isinstance(change, SetState):
        return f"state {change.instance}"
    if isinstance(change, Register):
        return f"member {change.name}"
    return f"member {change.instance}" if isinstance(change, Unregister) else ""


class OperatorChanges:
    """The operators' changes that hold, and the way to have one made by every peer.

    `make` makes one here. `peers` names the peers; `tell` has what `take` gives sent to them.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[OperatorChange], Awaitable[object]],
        knows: Callable[[str], bool],
        peers: Callable[[], Sequence[str]],
        tell: Callable[[], object],
    ) -> None:
        self._name = name
        self._make = make
        self._knows = knows
        self._peers = peers
        self._tell = tell
        #: By subject, with the local time of the change.
        self._held: dict[str, tuple[WireOperated, float]] = {}
        #: Changes of peers to be made, with the peer, and the task that makes them.
        self._inbox: list[tuple[str, WireOperated]] = []
        self._maker: asyncio.Task[None] | None = None
        #: States of unknown instances, kept until they come.
        self._early: dict[str, tuple[str, WireOperated]] = {}
        self._unsent: list[PeerChange] = []
        self._stamp = 0.0
        self._number = 0
        #: Peers that have yet to make a numbered change, and the errors of some of them.
        self._awaited: dict[int, set[str]] = {}
        self._errors: dict[int, list[str]] = {}
        self._came = asyncio.Event()

    # --- of this process ---

    async def spread(self, change: OperatorChange, now: float) -> list[str]:
        """Send a change that was made here to all peers, and wait for them; return what went wrong there."""
        self._stamp = max(time.time(), self._stamp + _STAMP_S)
        self._number += 1
        number = self._number
        told = WireOperated(number, self._stamp, self._name, change)
        self._hold(told, now)
        self._awaited[number], self._errors[number] = set(self._peers()), []
        self._unsent.append(told)
        self._tell()
        try:
            async with asyncio.timeout(_RELOADED_S if isinstance(change, ReloadFile) else _DONE_S):
                while self._awaited[number]:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            late = sorted(self._awaited[number])
            self._errors[number] += [f"peer {each} has not said that it is done" for each in late]
        del self._awaited[number]
        return self._errors.pop(number)

    def _hold(self, told: WireOperated, now: float) -> None:
        if (subject := _subject(told.change)) and (subject in self._held or len(self._held) < _MOST_CHANGES):
            self._held[subject] = told, now

    def reloaded(self, names: Sequence[str], policy: bool) -> None:
        """Forget the changes that a new fleet file undoes: of its instances, and of a new policy."""
        for name in names:
            self._held.pop(f"member {name}", None)
        if policy:
            self._held.pop("policy", None)

    def instances_changed(self) -> None:
        """Make the changes of instances that came meanwhile."""
        for name in [each for each in self._early if self._knows(each)]:
            self._take_in(*self._early.pop(name))

    def take(self) -> list[PeerChange]:
        """Return the changes for peers since the last call."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def live(self, now: float) -> list[PeerChange]:
        """Return all that holds, for a peer that comes."""
        found: list[PeerChange] = []
        for told, made_at in self._held.values():
            change = told.change
            if isinstance(change, SetState) and change.deadline_s is not None:
                left_s = max(0.0, change.deadline_s - (now - made_at))
                change = msgspec.structs.replace(change, deadline_s=left_s)
            if not isinstance(change, Register) or self._knows(change.name):
                found.append(WireOperated(0, told.stamp, told.origin, change))
        return found

    # --- of peers ---

    def receive(self, peer: str, changes: Sequence[PeerChange], now: float) -> None:
        for each in changes:
            if isinstance(each, WireOperated):
                self._take_in(peer, each)
            elif isinstance(each, WireDone) and each.origin == self._name:
                awaited = self._awaited.get(each.number)
                if awaited is not None and peer in awaited:
                    awaited.discard(peer)
                    if each.error:
                        self._errors[each.number].append(f"peer {peer}: {each.error}")
                    self._came.set()

    def gone(self, peer: str, now: float) -> None:
        for awaited in self._awaited.values():
            awaited.discard(peer)
        self._came.set()

    def _take_in(self, peer: str, told: WireOperated) -> None:
        """Queue a change of a peer behind the ones before it."""
        if len(self._inbox) >= _MOST_WAITING:
            return  # its peer waits for an answer, and says that none came
        self._inbox.append((peer, told))
        if self._maker is None or self._maker.done():
            self._maker = asyncio.create_task(self._make_all(), name="operators")

    async def _make_all(self) -> None:
        while self._inbox:
            peer, told = self._inbox.pop(0)
            error = ""
            if self._is_newer(told):
                try:
                    await self._make_one(peer, told)
                except InputError as failed:
                    error = str(failed)
                except Exception as failed:  # a change of a peer ends nothing else
                    error = f"{type(failed).__name__}: {failed}"
                    tell(
                        logger, Event.SHARED_MESSAGE, "shared state: a change of a peer failed", exc_info=True
                    )
            if told.number:
                self._unsent.append(WireDone(peer, told.number, error[:200]))
                self._tell()

    async def _make_one(self, peer: str, told: WireOperated) -> None:
        change, now = told.change, asyncio.get_running_loop().time()
        if isinstance(change, SetState | Unregister) and not self._knows(change.instance):
            if isinstance(change, SetState) and len(self._early) < _MOST_CHANGES:
                self._early[change.instance] = peer, msgspec.structs.replace(told, number=0)
            return
        await self._make(change)
        self._stamp = max(self._stamp, told.stamp)
        if self._is_newer(told):  # one of this process may have come meanwhile
            self._hold(told, now)

    def _is_newer(self, told: WireOperated) -> bool:
        held = self._held.get(_subject(told.change))
        return held is None or (told.stamp, told.origin) > (held[0].stamp, held[0].origin)

    async def close(self) -> None:
        self._inbox.clear()
        if self._maker is not None:
            await ended(self._maker)
