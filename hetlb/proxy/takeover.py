"""A process takes the place of another (`hetlb serve --replace`): listeners and the ledger go over a socket.

The old process offers an abstract Unix socket named by its listener's address. The new one asks there for the
listening sockets (SCM_RIGHTS), looks at the engines, and says that it begins; it then gets the leases of the
old process and books them, so that both together send an engine no more than it can take. The old one accepts
nothing more, ends what it has, and tells of every lease that ends and of every one that it still grants to
a request in its queue: a grant is told before the end that made room for it. Only a process of the same user
is let in.

new: take | old: listeners (descriptors) | new: begin | old: leases | new: accepting | old: leases ... end
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from hetlb.core.scheduler import Scheduler
from hetlb.core.types import Command, Lease, LiveLease, Outcome, Request
from hetlb.errors import HetlbError
from hetlb.proxy.systemd import Listeners
from hetlb.proxy.telemetry.events import Event, tell

logger = logging.getLogger("hetlb.proxy")

VERSION: Final = 1
#: Leases in one packet: a packet must fit a socket's buffer.
_AT_ONCE: Final = 200
_MOST_BYTES: Final = 200_000
#: Descriptors that one packet can carry (SCM_MAX_FD of Linux).
MOST_LISTENERS: Final = 253
#: Seconds between reports of the old process on leases that were granted and that ended.
TELL_S: Final = 0.02
#: Seconds between tries of a process that took over to have the name itself.
_NAME_S: Final = 0.1
#: Seconds that either side waits for the other's next step; engines are looked at meanwhile.
_STEP_S: Final = 30.0


class Granted(msgspec.Struct):
    """A lease of the old process: what it books at its instance. `age_s`: since its dispatch."""

    id: int
    instance: str
    model: str
    prompt_tokens: int
    sequences: int
    max_tokens: int | None
    generates: bool
    work_ns: int
    predicted_output: float
    age_s: float
    begun: bool


class Packet(msgspec.Struct):
    """One step of either side."""

    step: str
    version: int = VERSION
    main: int = 0
    granted: list[Granted] = []
    ended: list[int] = []


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
                await asyncio.sleep(TELL_S)

    async def receive(self) -> tuple[Packet | None, list[int]]:
        """The next packet and its descriptors; None at the end."""
        readable: asyncio.Future[None] = self._loop.create_future()

        def wake() -> None:
            if not readable.done():
                readable.set_result(None)

        self._loop.add_reader(self._end, wake)
        try:
            await readable
        finally:
            self._loop.remove_reader(self._end)
        data, fds, _, _ = socket.recv_fds(self._end, _MOST_BYTES, MOST_LISTENERS)
        return (msgspec.json.decode(data, type=Packet) if data else None), list(fds)

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
        self._known: dict[int, bool] = {}

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
            while True:
                end, _ = await loop.sock_accept(waiting)
                channel = _Channel(end)
                try:
                    if await self._hand_over(channel, end):
                        waiting.close()  # the successor takes the name
                        self._leave()
                        with contextlib.suppress(OSError):  # the successor is gone: it needs to know no more
                            await self._tell_of_leases(channel)
                        return
                except (OSError, TimeoutError, msgspec.DecodeError) as error:
                    reason = str(error) or type(error).__name__
                    tell(logger, Event.HANDOVER_REFUSED, "a handover failed: %s", reason)
                finally:
                    channel.close()

    async def _hand_over(self, channel: _Channel, end: socket.socket) -> bool:
        """Give the listeners away. True when the other process accepts."""
        _, user, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user not in (os.getuid(), 0):
            tell(logger, Event.HANDOVER_REFUSED, "a process of user %d asked for the listeners", user)
            return False
        asked = await self._expect(channel, "take")
        if asked is None or asked.version != VERSION:
            return False
        main, admin = self._listeners()
        await channel.send(Packet("listeners", main=len(main)), [*main, *admin])
        if await self._expect(channel, "begin") is None:
            return False
        for packet in self._changes():
            await channel.send(packet)
        await channel.send(Packet("told"))
        return await self._expect(channel, "accepting") is not None

    async def _expect(self, channel: _Channel, step: str) -> Packet | None:
        async with asyncio.timeout(_STEP_S):
            packet, _ = await channel.receive()
        return packet if packet is not None and packet.step == step else None

    async def _tell_of_leases(self, channel: _Channel) -> None:
        """Until this process ends: which leases were granted, and which have ended."""
        while True:
            for packet in self._changes():
                await channel.send(packet)
            await asyncio.sleep(TELL_S)

    def _changes(self) -> Iterable[Packet]:
        """Changes since the last call; every grant before the ends."""
        leases = [lease for each in self._scheduler.instances for lease in each.leases.values()]
        now = asyncio.get_running_loop().time()
        live = {lease.id: lease.first_token_at is not None for lease in leases}
        new = [_granted(each, now) for each in leases if self._known.get(each.id) is not live[each.id]]
        ended = list(self._known.keys() - live.keys())
        self._known = live
        for at in range(0, max(len(new), len(ended)), _AT_ONCE):
            yield Packet("leases", granted=new[at : at + _AT_ONCE], ended=ended[at : at + _AT_ONCE])


def _granted(lease: Lease, now: float) -> Granted:
    request = lease.request
    return Granted(
        lease.id,
        lease.instance,
        request.model,
        request.prompt_tokens,
        request.sequences,
        request.max_tokens,
        request.generates,
        lease.work_ns,
        lease.predicted_output,
        now - lease.dispatched_at,
        lease.first_token_at is not None,
    )


class Takeover:
    """The new process's side."""

    def __init__(self, end: socket.socket, listeners: Listeners) -> None:
        self.end = end
        self.listeners = listeners
        self._channel: _Channel | None = None
        self._task: asyncio.Task[None] | None = None
        #: Leases of the old process by its numbers.
        self._leases: dict[int, Lease] = {}

    @classmethod
    async def ask(cls, address: tuple[str, int]) -> Takeover | None:
        """The listeners of the process that serves an address, None without one. Raises `HetlbError`."""
        end = _socket()
        try:
            await asyncio.get_running_loop().sock_connect(end, name_of(address))
        except OSError:
            end.close()
            return None
        channel = _Channel(end)
        try:
            await channel.send(Packet("take"))
            async with asyncio.timeout(_STEP_S):
                packet, fds = await channel.receive()
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            end.close()
            raise HetlbError(f"--replace: the running process did not hand over: {error}") from error
        if packet is None or packet.step != "listeners" or packet.version != VERSION:
            end.close()
            raise HetlbError("--replace: the running process did not hand over its listeners")
        found = [socket.socket(fileno=fd) for fd in fds]
        for each in found:
            each.setblocking(False)
        return cls(end, Listeners(tuple(found[: packet.main]), tuple(found[packet.main :])))

    async def begin(self, scheduler: Scheduler, carry_out: Callable[[list[Command]], None]) -> None:
        """Book the leases of the old process; its further ones are followed until it has gone."""
        channel = self._channel = _Channel(self.end)
        await channel.send(Packet("begin"))
        while True:
            async with asyncio.timeout(_STEP_S):
                packet, _ = await channel.receive()
            if packet is None:
                raise HetlbError("--replace: the running process ended before it handed over")
            if packet.step == "told":
                break
            self._take(packet, scheduler, carry_out)
        follow = self._follow(channel, scheduler, carry_out)
        self._task = asyncio.create_task(follow, name="follow the old process")

    async def accepting(self) -> None:
        """Tell the old process that requests are accepted here."""
        assert self._channel is not None, "expected a handover that has begun"
        with contextlib.suppress(OSError):
            await self._channel.send(Packet("accepting"))

    async def _follow(
        self, channel: _Channel, scheduler: Scheduler, carry_out: Callable[[list[Command]], None]
    ) -> None:
        try:
            while True:
                packet, _ = await channel.receive()
                if packet is None:
                    return
                self._take(packet, scheduler, carry_out)
        except (OSError, msgspec.DecodeError):
            return
        finally:
            self._take(Packet("leases", ended=list(self._leases)), scheduler, carry_out)
            channel.close()

    async def close(self) -> None:
        """Follow no longer."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _take(self, packet: Packet, scheduler: Scheduler, carry_out: Callable[[list[Command]], None]) -> None:
        now = asyncio.get_running_loop().time()
        for each in packet.granted:
            known = self._leases.get(each.id)
            if known is not None:
                carry_out(scheduler.on_first_token(known, now))
            elif (lease := scheduler.restore(_live(each, now), now)) is not None:
                self._leases[each.id] = lease
        for number in packet.ended:
            ended = self._leases.pop(number, None)
            if ended is not None:
                carry_out(scheduler.on_lease_ended(ended, Outcome.CLIENT_GONE, now, retry=False))


def _live(granted: Granted, now: float) -> LiveLease:
    """A lease of the old process; its request's number is below all of this one's."""
    fields: dict[str, Any] = {
        "prompt_tokens": granted.prompt_tokens,
        "max_tokens": granted.max_tokens,
        "sequences": granted.sequences,
        "generates": granted.generates,
    }
    return LiveLease(
        Request(-granted.id, granted.model, **fields),
        granted.instance,
        granted.work_ns,
        granted.predicted_output,
        now - granted.age_s,
        granted.begun,
    )
