"""A process takes the place of another (`hetlb serve --replace`): listeners and the ledger go over a socket.

The old process offers an abstract Unix socket named by its listener's address. The new one asks there for the
listening sockets (SCM_RIGHTS), looks at the engines, and says that it begins; it then gets the leases of the
old process and books them, so that both together send an engine no more than it can take. The old one accepts
nothing more, ends what it has, and tells of every lease that ends and of every one that it still grants to
a request in its queue. Each side speaks only with a process of its own user, as the kernel says.

new: hello | old: hello, descriptors | new: begin | old: leases, told | new: accepting | old: leases

Behind the hello both speak over a `MessageChannel`. The new process says `accepting` when it has accepted for
`PROVEN_S`; until then both accept, and if it dies the old one goes on as if it had not been asked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec

from hetlb.core.journal import Journal
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import Command
from hetlb.errors import HetlbError
from hetlb.proxy.lease_wire import WireChange, from_wire, to_wire
from hetlb.proxy.message_channel import MessageChannel
from hetlb.proxy.systemd import Listeners
from hetlb.proxy.telemetry.events import Event, Rarely
from hetlb.turns import Share

logger = logging.getLogger("hetlb.proxy")

#: First bytes of both sides; the number is the version of what follows.
_HELLO: Final = b"hetlb takeover 3\n"
#: A frame of a successor, which says its steps alone, has at most so many bytes.
_MOST_STEPS: Final = 4096
#: Descriptors that one packet can carry (SCM_MAX_FD of Linux).
MOST_LISTENERS: Final = 253
#: Name of the old process among those whose leases are booked, and the first id of its requests: peers of a
#: shared view have those above it.
_OLD: Final = "old"
_FIRST_ID: Final = -(1 << 41)
#: Seconds between tries of a process that took over to have the name itself.
_NAME_S: Final = 0.1
#: Further looks for a name that is not there: from one process to the next it is free for a moment.
_NAMELESS: Final = 3
#: Seconds for which a new process accepts before the old one leaves.
PROVEN_S: Final = 1.0
#: Seconds that either side waits for the other's next step; engines are looked at meanwhile.
_STEP_S: Final = 30.0


class Step(msgspec.Struct, array_like=True, tag=8, frozen=True):
    """One step of either side."""

    name: Literal["begin", "told", "accepting"]


#: Decoder of what either side sends.
DECODER: Final = msgspec.msgpack.Decoder(list[WireChange | Step])


def name_of(address: tuple[str, int]) -> str:
    """The abstract name that belongs to a listener's address."""
    return f"\0hetlb/{os.getuid()}/{address[0]}:{address[1]}"


def _socket() -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    one.setblocking(False)
    return one


def _bound(one: socket.socket, address: tuple[str, int]) -> bool:
    try:
        one.bind(name_of(address))
    except OSError:
        return False
    return True


def _is_own(end: socket.socket) -> bool:
    """True if the process at the other end is of this one's user."""
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
        """`listeners` gives the descriptors of both listeners; `leave` is called when the other accepts."""
        self._scheduler = scheduler
        self._listeners = listeners
        self._leave = leave
        self._task: asyncio.Task[None] | None = None
        self._refusals = Rarely()

    def open(self, address: tuple[str, int]) -> None:
        """Wait for a successor at a listener's address."""
        self._task = asyncio.create_task(self._serve(address), name="handover")

    async def close(self) -> None:
        """Wait no longer; a successor learns of all ends before."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _serve(self, address: tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        with _socket() as waiting:
            # The process that this one replaces has the name for a little longer.
            while not _bound(waiting, address):  # noqa: ASYNC110
                await asyncio.sleep(_NAME_S)
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
        if not _is_own(end):
            self._refusals.tell(
                logger, Event.HANDOVER_REFUSED, "a process of another user asked for the listeners"
            )
            return False
        async with asyncio.timeout(_STEP_S):
            if await asyncio.get_running_loop().sock_recv(end, len(_HELLO)) != _HELLO:
                return False
        main, admin = self._listeners()
        if len(main) + len(admin) > MOST_LISTENERS:
            raise OSError(f"one packet carries {MOST_LISTENERS} listeners, not {len(main) + len(admin)}")
        socket.send_fds(end, [_HELLO + bytes([len(main)])], [*main, *admin])
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
        self._journal = Journal(lambda: self._loop.call_soon(self._tell))
        self._channel: MessageChannel[WireChange | Step] | None = None
        #: Steps that came, None at the end.
        self._steps: asyncio.Queue[str | None] = asyncio.Queue()

    async def open(self) -> None:
        """Speak with it from now on."""
        self._channel = MessageChannel(
            DECODER, self._receive, lambda: self._steps.put_nowait(None), _MOST_STEPS
        )
        await self._channel.open(self.end)

    def _receive(self, messages: list[WireChange | Step]) -> None:
        for message in messages:
            if not isinstance(message, Step):
                raise msgspec.DecodeError("expected a step")
            if self._steps.qsize() >= 2:
                raise msgspec.DecodeError("expected two steps")
            self._steps.put_nowait(message.name)

    async def said(self, step: str) -> bool:
        """True if its next step is this one. Raises `TimeoutError`."""
        async with asyncio.timeout(_STEP_S):
            return await self._steps.get() == step

    async def gone(self) -> None:
        """Return when it has closed its end."""
        while await self._steps.get() is not None:
            pass

    def follow(self) -> None:
        """Tell it of all leases, and from now on of what becomes of them and which are still granted."""
        assert self._channel is not None, "expected an open channel"
        self._scheduler.subscribe(self._journal)
        for change in to_wire(self._scheduler.ledger.live(self._loop.time())):
            self._channel.send(change)
        self._channel.send(Step("told"))

    def _tell(self) -> None:
        assert self._channel is not None, "expected an open channel"
        for change in to_wire(self._journal.take()):
            self._channel.send(change)

    def close(self) -> None:
        """Tell what is left to be told, and close this end."""
        if self._channel is None:
            self.end.close()
        else:
            self._scheduler.unsubscribe(self._journal)
            self._tell()
            self._channel.close()


class Takeover:
    """The new process's side."""

    def __init__(self, end: socket.socket, listeners: Listeners) -> None:
        self.end = end
        self.listeners = listeners
        self._channel: MessageChannel[WireChange | Step] | None = None

    @classmethod
    async def ask(cls, address: tuple[str, int]) -> Takeover | None:
        """The listeners of the process that serves an address, None without one. Raises `HetlbError`."""
        loop = asyncio.get_running_loop()
        replaced, looks = False, 0
        try:
            async with asyncio.timeout(_STEP_S):
                while True:
                    end = _socket()
                    try:
                        await loop.sock_connect(end, name_of(address))
                    except OSError:
                        end.close()
                        looks += 1
                        if not replaced and looks > _NAMELESS:
                            return None
                        await asyncio.sleep(_NAME_S)
                        continue
                    try:
                        return await cls._ask(end)
                    except (ConnectionResetError, BrokenPipeError):
                        replaced = True  # by another successor, which is about to have the name
        except (OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise HetlbError(f"--replace: the running process did not hand over: {reason}") from error

    @classmethod
    async def _ask(cls, end: socket.socket) -> Takeover:
        loop = asyncio.get_running_loop()
        try:
            if not _is_own(end):
                raise HetlbError("--replace: a process of another user holds the name of the running process")
            await loop.sock_sendall(end, _HELLO)
            readable = asyncio.Event()
            loop.add_reader(end, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(end)
            said, fds, _, _ = socket.recv_fds(end, len(_HELLO) + 1, MOST_LISTENERS)
            if said[:-1] != _HELLO:
                raise HetlbError("--replace: the running process did not hand over its listeners")
        except BaseException:
            end.close()
            raise
        found = [socket.socket(fileno=fd) for fd in fds]
        for each in found:
            each.setblocking(False)
        return cls(end, Listeners(tuple(found[: said[-1]]), tuple(found[said[-1] :])))

    async def begin(self, scheduler: Scheduler, carry_out: Callable[[list[Command]], None]) -> None:
        """Book the leases of the old process; its further ones are followed until it has gone."""
        from hetlb.core.remote_leases import RemoteLeases

        loop = asyncio.get_running_loop()
        remote = RemoteLeases(scheduler, arrived=False, first_id=_FIRST_ID)
        told: asyncio.Future[bool] = loop.create_future()

        def receive(messages: list[WireChange | Step]) -> None:
            changes = [each for each in messages if not isinstance(each, Step)]
            try:
                found = from_wire(changes)
            except ValueError as error:
                raise msgspec.DecodeError(str(error)) from error
            carry_out(remote.receive(_OLD, found, loop.time()))
            if len(changes) < len(messages) and not told.done():
                told.set_result(True)

        def gone() -> None:
            carry_out(remote.gone(_OLD, loop.time()))
            if not told.done():
                told.set_result(False)

        channel = self._channel = MessageChannel(DECODER, receive, gone)
        await channel.open(self.end)
        channel.send(Step("begin"))
        async with asyncio.timeout(_STEP_S):
            if not await told:
                raise HetlbError("--replace: the running process ended before it handed over")

    async def accepting(self) -> None:
        """Tell the old process that requests are accepted here, once that has been so for a while."""
        assert self._channel is not None, "expected a handover that has begun"
        await asyncio.sleep(PROVEN_S)
        self._channel.send(Step("accepting"))

    def close(self) -> None:
        """Follow no longer."""
        if self._channel is not None:
            self._channel.close()
