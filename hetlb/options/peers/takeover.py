"""Takeover of a running process: the new one's side of `hetlb serve --replace` (the protocol: `offer.py`)."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hetlb.errors import HetlbError
from hetlb.options.peers import offer, share_in
from hetlb.options.peers.hub import remove_folder
from hetlb.options.peers.offer import ACCEPTING, HELLO, MOST_FOLDER_BYTES, MOST_LISTENERS, Offer
from hetlb.systemd import Listeners

if TYPE_CHECKING:
    from hetlb.balancer.fleet.service import FleetService

#: Further tries for a missing name: between two processes it is free for a moment.
_NAME_TRIES: Final = 3
#: Seconds that a new process accepts before the old one leaves.
PROVEN_S: Final = 1.0


class Takeover:
    """The listeners of the replaced process, and its view until it has gone."""

    def __init__(self, end: socket.socket, listeners: Listeners, folder: Path | None = None) -> None:
        self.end = end
        self.listeners = listeners
        #: Folder of the replaced process's view, None if a fleet file names it.
        self.folder = folder
        self._service: FleetService | None = None

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
            most = len(HELLO) + 1 + MOST_FOLDER_BYTES
            said, fds, _, _ = socket.recv_fds(end, most, MOST_LISTENERS)
            if not said.startswith(HELLO) or len(said) == len(HELLO):
                raise HetlbError(
                    "--replace: the running process did not hand over its listeners (if it is of an earlier"
                    " version, restart it)"
                )
        except BaseException:
            end.close()
            raise
        found = [socket.socket(fileno=fd) for fd in fds]
        for each in found:
            each.setblocking(False)
        number, folder = said[len(HELLO)], said[len(HELLO) + 1 :]
        listeners = Listeners(tuple(found[:number]), tuple(found[number:]))
        return cls(end, listeners, Path(os.fsdecode(folder)) if folder else None)

    def join(self, service: FleetService) -> None:
        """Make a service without peers a peer of the old process, until that is gone."""
        folder = self.folder
        if folder is None or service.sharing is not None:
            return
        sharing = share_in(service, folder)
        service.view_folder, self._service = folder, service

        def alone() -> None:
            if service.sharing is sharing:
                service.sharing = service.scheduling.view = service.view_folder = None
                service.scheduler.ledger.unsubscribe(sharing.view.journal)
                service.scheduling.limiters.journal = None
                service.driver.kept.tell = None
                service.share_sleep(None)
                service.do(sharing.close())
                remove_folder(folder)

        sharing.on_alone = alone

    async def accepting(self) -> None:
        """Tell the old process, after a while, that requests are accepted here."""
        await asyncio.sleep(PROVEN_S)
        await asyncio.get_running_loop().sock_sendall(self.end, ACCEPTING)
        if self._service is not None and isinstance(self._service.offer, Offer):
            self._service.offer.owns_folder = True

    def close(self) -> None:
        self.end.close()
