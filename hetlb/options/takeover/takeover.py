"""Takeover of a running process: the new one's side of `hetlb serve --replace` (the protocol: `offer.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Command
from hetlb.errors import HetlbError
from hetlb.options.message_channel import MessageChannel
from hetlb.options.remote_leases import RemoteLeases
from hetlb.options.takeover import offer
from hetlb.options.takeover.offer import DECODER, HELLO, MOST_LISTENERS, Message, Step
from hetlb.systemd import Listeners

#: Name of the old process among processes whose leases are booked, and the first id of its requests: peers
#: of a shared view have ids above it.
_OLD: Final = "old"
_FIRST_ID: Final = -(1 << 41)
#: Further tries for a name that is missing: between two processes it is free for a moment.
_NAME_TRIES: Final = 3
#: Seconds for which a new process accepts before the old one leaves.
PROVEN_S: Final = 1.0


class Takeover:
    """The listeners of the process that is replaced, and its leases until it has gone."""

    def __init__(self, end: socket.socket, listeners: Listeners) -> None:
        self.end = end
        self.listeners = listeners
        self._channel: MessageChannel[Message] | None = None

    @classmethod
    async def ask(cls, address: tuple[str, int]) -> Takeover | None:
        """Return the listeners of the process that serves an address, or None. Raises `HetlbError`."""
        replaced, looks = False, 0
        try:
            async with asyncio.timeout(offer.STEP_S):
                while True:
                    end = offer.local_socket()
                    try:
                        end.connect(offer.name_of(address))
                    except OSError as error:
                        end.close()
                        looks += 1
                        replaced = replaced or isinstance(error, BlockingIOError)  # others ask it too
                        if not replaced and looks > _NAME_TRIES:
                            return None
                        await asyncio.sleep(offer.NAME_RETRY_S)
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
            if not offer.is_own(end):
                raise HetlbError("--replace: a process of another user holds the name of the running process")
            await loop.sock_sendall(end, HELLO)
            readable = asyncio.Event()
            loop.add_reader(end, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(end)
            said, fds, _, _ = socket.recv_fds(end, len(HELLO) + 1, MOST_LISTENERS)
            if said[:-1] != HELLO:
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
        loop = asyncio.get_running_loop()
        remote = RemoteLeases(scheduler, arrived=False, first_id=_FIRST_ID)
        told: asyncio.Future[bool] = loop.create_future()

        def receive(messages: list[Message]) -> None:
            changes = [each for each in messages if not isinstance(each, Step)]
            carry_out(remote.receive(_OLD, changes, loop.time()))
            if len(changes) < len(messages) and not told.done():
                told.set_result(True)

        def gone() -> None:
            carry_out(remote.gone(_OLD, loop.time()))
            if not told.done():
                told.set_result(False)

        channel = self._channel = MessageChannel(DECODER, receive, gone)
        await channel.open(self.end)
        channel.send(Step("begin"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(offer.STEP_S):
                if await told:
                    return
        raise HetlbError("--replace: the running process ended, or fell silent, before it handed over")

    async def accepting(self) -> None:
        """Tell the old process, after a while, that requests are accepted here."""
        assert self._channel is not None, "expected a handover that has begun"
        await asyncio.sleep(PROVEN_S)
        self._channel.send(Step("accepting"))

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
