"""A process takes the place of another (`hetlb serve --replace`): listeners and the ledger go over a socket.

The old process offers an abstract Unix socket named by its listener's address. The new one asks there for the
listening sockets (SCM_RIGHTS), looks at the engines, and says that it begins; it then gets the leases of the
old process and books them, so that both together send an engine no more than it can take. The old one accepts
nothing more, ends what it has, and tells of every lease that ends and of every one that it still grants to
a request in its queue: a grant is told before the end that made room for it. Each side speaks only with a
process of its own user, as the kernel says.

new: take | old: listeners (descriptors) | new: begin | old: leases | new: accepting | old: leases ... end

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
from typing import TYPE_CHECKING, Final

import msgspec

from hetlb.core.journal import Booked, Change, Journal
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import Command
from hetlb.errors import HetlbError
from hetlb.proxy.lease_wire import WireChange, from_wire, to_wire
from hetlb.proxy.systemd import Listeners
from hetlb.proxy.telemetry.events import Event, Rarely
from hetlb.turns import Share

if TYPE_CHECKING:
    from hetlb.core.remote_leases import RemoteLeases

logger = logging.getLogger("hetlb.proxy")

VERSION: Final = 2
#: Leases in one packet: a packet must fit a socket's buffer.
_AT_ONCE: Final = 200
_MOST_BYTES: Final = 200_000
#: Descriptors that one packet can carry (SCM_MAX_FD of Linux).
MOST_LISTENERS: Final = 253
#: Seconds between tries to send to a process that does not read.
_RETRY_S: Final = 0.02
#: Name of the old process among those whose leases are booked, and the first id of its requests: peers of a
#: shared view have those above it.
_OLD: Final = "old"
_FIRST_ID: Final = -(1 << 41)
#: Seconds between tries of a process that took over to have the name itself.
_NAME_S: Final = 0.1
#: Seconds for which a new process accepts before the old one leaves.
PROVEN_S: Final = 1.0
#: Seconds that either side waits for the other's next step; engines are looked at meanwhile.
_STEP_S: Final = 30.0


class Packet(msgspec.Struct):
    """One step of either side."""

    step: str
    version: int = VERSION
    main: int = 0
    changes: list[WireChange] = []


def name_of(address: tuple[str, int]) -> str:
    """The abstract name that belongs to a listener's address."""
    return f"\0hetlb/{os.getuid()}/{address[0]}:{address[1]}"


def _socket() -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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


def read_packet(data: bytes) -> Packet:
    """A step of the other side. Raises `ValueError`."""
    try:
        return msgspec.json.decode(data, type=Packet)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"expected a step: {error}") from error


class _Channel:
    """One end of a handover."""

    def __init__(self, end: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = end

    async def send(self, packet: Packet, fds: Sequence[int] = ()) -> None:
        """Send one packet. Raises `OSError` where the other side is gone."""
        data = msgspec.json.encode(packet)
        while True:
            try:
                socket.send_fds(self._end, [data], list(fds))
                return
            except BlockingIOError:
                await asyncio.sleep(_RETRY_S)

    async def receive(self, most_fds: int = 0) -> tuple[Packet | None, list[int]]:
        """The next packet and its descriptors; None at the end. Raises `OSError` and `ValueError`."""
        readable: asyncio.Future[None] = self._loop.create_future()

        def wake() -> None:
            if not readable.done():
                readable.set_result(None)

        self._loop.add_reader(self._end, wake)
        try:
            await readable
        finally:
            self._loop.remove_reader(self._end)
        data, fds, _, _ = socket.recv_fds(self._end, _MOST_BYTES, most_fds)
        return (read_packet(data) if data else None), list(fds)

    def close(self) -> None:
        """Close this end."""
        self._end.close()


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
                channel = _Channel(end)
                try:
                    telling = await self._hand_over(channel, end)
                    if telling is not None:
                        waiting.close()  # the successor takes the name
                        self._leave()
                        with contextlib.suppress(OSError):  # the successor is gone: it needs to know no more
                            await telling
                        return
                except (OSError, TimeoutError, ValueError) as error:
                    reason = str(error) or type(error).__name__
                    self._refusals.tell(logger, Event.HANDOVER_REFUSED, "a handover failed: %s", reason)
                finally:
                    channel.close()

    async def _hand_over(self, channel: _Channel, end: socket.socket) -> asyncio.Task[None] | None:
        """Give the listeners away. The task that tells of leases, once the other process accepts."""
        if not _is_own(end):
            self._refusals.tell(
                logger, Event.HANDOVER_REFUSED, "a process of another user asked for the listeners"
            )
            return None
        asked = await self._expect(channel, "take")
        if asked is None or asked.version != VERSION:
            return None
        main, admin = self._listeners()
        await channel.send(Packet("listeners", main=len(main)), [*main, *admin])
        if await self._expect(channel, "begin") is None:
            return None
        news = asyncio.Event()
        journal = Journal(news.set)
        self._scheduler.subscribe(journal)
        for packet in _packets(self._scheduler.live(asyncio.get_running_loop().time())):
            await channel.send(packet)
        await channel.send(Packet("told"))
        telling = asyncio.create_task(self._tell(channel, journal, news), name="tell of leases")
        accepting: Packet | None = None
        try:
            accepting = await self._expect(channel, "accepting")
        finally:
            if accepting is None:
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)
        return None if accepting is None else telling

    async def _expect(self, channel: _Channel, step: str) -> Packet | None:
        async with asyncio.timeout(_STEP_S):
            packet, _ = await channel.receive()
        return packet if packet is not None and packet.step == step else None

    async def _tell(self, channel: _Channel, journal: Journal, news: asyncio.Event) -> None:
        """Report, until this process ends, what becomes of its leases and which it still grants."""
        try:
            while True:
                await news.wait()
                news.clear()
                for packet in _packets(journal.take()):
                    await channel.send(packet)
        finally:
            self._scheduler.unsubscribe(journal)


def _packets(changes: Sequence[Change]) -> Iterable[Packet]:
    """Changes in packets, every grant before the ends."""
    ordered = sorted(changes, key=lambda change: not isinstance(change, Booked))
    for at in range(0, len(ordered), _AT_ONCE):
        yield Packet("leases", changes=to_wire(ordered[at : at + _AT_ONCE]))


class Takeover:
    """The new process's side."""

    def __init__(self, end: socket.socket, listeners: Listeners) -> None:
        self.end = end
        self.listeners = listeners
        self._channel: _Channel | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def ask(cls, address: tuple[str, int]) -> Takeover | None:
        """The listeners of the process that serves an address, None without one. Raises `HetlbError`."""
        loop = asyncio.get_running_loop()
        replaced = False
        try:
            async with asyncio.timeout(_STEP_S):
                while True:
                    end = _socket()
                    try:
                        await loop.sock_connect(end, name_of(address))
                    except OSError:
                        end.close()
                        if not replaced:
                            return None
                        await asyncio.sleep(_NAME_S)
                        continue
                    try:
                        return await cls._ask(end)
                    except ConnectionResetError:
                        replaced = True  # by another successor, which is about to have the name
        except (OSError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise HetlbError(f"--replace: the running process did not hand over: {reason}") from error

    @classmethod
    async def _ask(cls, end: socket.socket) -> Takeover:
        try:
            if not _is_own(end):
                raise HetlbError("--replace: a process of another user holds the name of the running process")
            channel = _Channel(end)
            await channel.send(Packet("take"))
            packet, fds = await channel.receive(MOST_LISTENERS)
            if packet is None or packet.step != "listeners" or packet.version != VERSION:
                raise HetlbError("--replace: the running process did not hand over its listeners")
        except BaseException:
            end.close()
            raise
        found = [socket.socket(fileno=fd) for fd in fds]
        for each in found:
            each.setblocking(False)
        return cls(end, Listeners(tuple(found[: packet.main]), tuple(found[packet.main :])))

    async def begin(self, scheduler: Scheduler, carry_out: Callable[[list[Command]], None]) -> None:
        """Book the leases of the old process; its further ones are followed until it has gone."""
        from hetlb.core.remote_leases import RemoteLeases

        channel = self._channel = _Channel(self.end)
        remote = RemoteLeases(scheduler, arrived=False, first_id=_FIRST_ID)
        await channel.send(Packet("begin"))
        while True:
            async with asyncio.timeout(_STEP_S):
                packet, _ = await channel.receive()
            if packet is None:
                raise HetlbError("--replace: the running process ended before it handed over")
            if packet.step == "told":
                break
            carry_out(_take(remote, packet))
        follow = self._follow(channel, remote, carry_out)
        self._task = asyncio.create_task(follow, name="follow the old process")

    async def accepting(self) -> None:
        """Tell the old process that requests are accepted here, once that has been so for a while."""
        assert self._channel is not None, "expected a handover that has begun"
        await asyncio.sleep(PROVEN_S)
        with contextlib.suppress(OSError):
            await self._channel.send(Packet("accepting"))

    async def _follow(
        self, channel: _Channel, remote: RemoteLeases, carry_out: Callable[[list[Command]], None]
    ) -> None:
        try:
            while True:
                packet, _ = await channel.receive()
                if packet is None:
                    return
                carry_out(_take(remote, packet))
        except (OSError, ValueError):
            return
        finally:
            carry_out(remote.gone(_OLD, asyncio.get_running_loop().time()))
            channel.close()

    async def close(self) -> None:
        """Follow no longer."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _take(remote: RemoteLeases, packet: Packet) -> list[Command]:
    """Book what the old process says. Raises `ValueError`."""
    return remote.receive(_OLD, from_wire(packet.changes), asyncio.get_running_loop().time())
