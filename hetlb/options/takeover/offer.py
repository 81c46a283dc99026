"""Offer of a process to one that takes its place (`hetlb serve --replace`): its listeners and its ledger.

The old process offers an abstract Unix socket named by its listener's address. The new one (`takeover.py`)
asks there for the listening sockets (SCM_RIGHTS), looks at the engines, and books the leases of the old one,
which ends what it has and tells of every lease that ends and of every one that it still grants to a request
in its queue. Each side speaks only with a process of its own user, as the kernel says.

new: hello | old: hello, descriptors | new: begin | old: leases, told | new: accepting | old: leases

The new process says `accepting` when it has accepted for `PROVEN_S`; until then both accept, and if it dies
the old one goes on as if it had not been asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.telemetry.events import Event
from hetlb.balancer.telemetry.rarely import Rarely
from hetlb.options.lease_wire import LeaseJournal, WireChange, live
from hetlb.options.message_channel import MessageChannel
from hetlb.tasks import ended
from hetlb.turns import Share

logger = logging.getLogger("hetlb.proxy")

#: First bytes of both sides; the number is the version of what follows.
HELLO: Final = b"hetlb takeover 3\n"
#: Maximum bytes of a successor's frame, which names its steps alone.
_MOST_STEP_BYTES: Final = 4096
#: Descriptors that one packet can carry (SCM_MAX_FD of Linux).
MOST_LISTENERS: Final = 253
#: Seconds between tries of a process that took over to have the name itself.
NAME_RETRY_S: Final = 0.1
#: Seconds that either side waits for the other's next step; engines are looked at meanwhile.
STEP_S: Final = 30.0


class Step(msgspec.Struct, array_like=True, tag=8, frozen=True):
    """One step of either side."""

    name: Literal["begin", "told", "accepting"]


Message: TypeAlias = WireChange | Step
#: Decoder of what either side sends.
DECODER: Final = msgspec.msgpack.Decoder(list[Message])


def name_of(address: tuple[str, int]) -> str:
    """Return the abstract name that belongs to a listener's address."""
    return f"\0hetlb/{os.getuid()}/{address[0]}:{address[1]}"


def local_socket() -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    one.setblocking(False)
    return one


def _bound(one: socket.socket, address: tuple[str, int]) -> bool:
    try:
        one.bind(name_of(address))
    except OSError:
        return False
    return True


def _is_of_another(address: tuple[str, int]) -> bool:
    """Return True if a process of another user waits at the name of a listener's address."""
    with contextlib.suppress(OSError), local_socket() as end:
        end.connect(name_of(address))
        return not is_own(end)
    return False


def is_own(end: socket.socket) -> bool:
    """Return True if the process at the other end is of this one's user."""
    _, user, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())


class Offer:
    """The old process's side: waits for a successor."""

    def __init__(
        self,
        scheduler: Scheduler,
        listeners: Callable[[], tuple[Sequence[int], Sequence[int]]],
        leave: Callable[[], None],
    ) -> None:
        """Make an offer: `listeners` gives both listeners' descriptors; `leave` is called at the end."""
        self._scheduler = scheduler
        self._listeners = listeners
        self._leave = leave
        self._task: asyncio.Task[None] | None = None
        self._refusals = Rarely()

    def open(self, address: tuple[str, int]) -> None:
        self._task = asyncio.create_task(self._serve(address), name="handover")

    async def close(self) -> None:
        if self._task is not None:
            await ended(self._task)

    async def _serve(self, address: tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        with local_socket() as waiting:
            # The process that this one replaces has the name for a little longer.
            while not _bound(waiting, address):
                if _is_of_another(address):
                    text = "a process of another user holds the name at which --replace looks for this one"
                    self._refusals.tell(logger, Event.HANDOVER_REFUSED, text)
                await asyncio.sleep(NAME_RETRY_S)
            waiting.listen(1)
            share = Share()
            while True:
                await share.spent()  # of a process that connects without end too
                end, _ = await loop.sock_accept(waiting)
                successor = _Successor(self._scheduler, end)
                try:
                    if await self._hand_over(successor):
                        waiting.close()  # the successor takes the name
                        self._leave()
                        await successor.gone()
                        return
                except (OSError, TimeoutError) as error:
                    reason = str(error) or type(error).__name__
                    self._refusals.tell(logger, Event.HANDOVER_REFUSED, "a handover failed: %s", reason)
                finally:
                    successor.close()

    async def _hand_over(self, successor: _Successor) -> bool:
        """Give the listeners away, and tell of leases. True once the other process accepts."""
        end = successor.end
        if not is_own(end):
            self._refusals.tell(
                logger, Event.HANDOVER_REFUSED, "a process of another user asked for the listeners"
            )
            return False
        async with asyncio.timeout(STEP_S):
            if await asyncio.get_running_loop().sock_recv(end, len(HELLO)) != HELLO:
                return False
        main, admin = self._listeners()
        if len(main) + len(admin) > MOST_LISTENERS:
            raise OSError(f"one packet carries {MOST_LISTENERS} listeners, not {len(main) + len(admin)}")
        socket.send_fds(end, [HELLO + bytes([len(main)])], [*main, *admin])
        await successor.open()
        if await successor.said("begin"):
            successor.follow()
            return await successor.said("accepting")
        return False


class _Successor:
    """A process that is about to take this one's place."""

    def __init__(self, scheduler: Scheduler, end: socket.socket) -> None:
        self.end = end
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._journal = LeaseJournal(lambda: self._loop.call_soon(self._tell))
        self._channel = MessageChannel(DECODER, self._receive, self._closed, _MOST_STEP_BYTES)
        self._opened = False
        #: Steps that came, None at the end.
        self._steps: asyncio.Queue[str | None] = asyncio.Queue()

    async def open(self) -> None:
        self._opened = True
        await self._channel.open(self.end)

    def _closed(self) -> None:
        self._steps.put_nowait(None)

    def _receive(self, messages: list[Message]) -> None:
        for message in messages:
            if not isinstance(message, Step) or self._steps.qsize() >= 2:
                raise msgspec.DecodeError("expected two steps")
            self._steps.put_nowait(message.name)

    async def said(self, step: str) -> bool:
        """Return True if its next step is this one. Raises `TimeoutError`."""
        async with asyncio.timeout(STEP_S):
            return await self._steps.get() == step

    async def gone(self) -> None:
        """Return when it has closed its end."""
        while await self._steps.get() is not None:
            pass

    def follow(self) -> None:
        """Send all leases, and from now on their ends and new grants."""
        self._scheduler.subscribe(self._journal)
        self._send(live(self._scheduler.ledger.leases(), self._loop.time()))
        self._channel.send(Step("told"))

    def _tell(self) -> None:
        self._send(self._journal.take())

    def _send(self, changes: Iterable[WireChange]) -> None:
        for change in changes:
            self._channel.send(change)

    def close(self) -> None:
        """Send the rest, and close this end."""
        if not self._opened:
            self.end.close()
            return
        self._scheduler.unsubscribe(self._journal)
        self._tell()
        self._channel.close()
