"""Offer of a process to its successor (`hetlb serve --replace`): its listeners and its view.

The old process offers an abstract Unix socket named by its listener's address. The new one (`takeover.py`)
asks there for the listening sockets (SCM_RIGHTS) and for the folder of a hub. Over the hub both are peers of
one view (`sharing.py`): the new one learns what the old one has at the engines, and each books what the other
still sends. Each side speaks only with a process of its own user, checked by the kernel.

new: hello | old: hello, number of main listeners, folder, descriptors | new: accepting

The new process says `accepting` when it has accepted for `PROVEN_S`. Until then both accept. If the new one
dies, the old one continues as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hetlb.balancer.telemetry.events import Event, Rarely
from hetlb.options.peers import share_in
from hetlb.options.peers.hub import remove_folder, view_folder
from hetlb.tasks import ended
from hetlb.turns import Share

if TYPE_CHECKING:
    from hetlb.balancer.fleet.service import FleetService

logger = logging.getLogger("hetlb.proxy")

#: First bytes of both sides; the number is the version of what follows.
HELLO: Final = b"hetlb takeover 4\n"
#: Last word of the new process.
ACCEPTING: Final = b"accepting\n"
#: Maximum bytes of the folder's name.
MOST_FOLDER_BYTES: Final = 4096
#: Descriptors that one packet can carry (SCM_MAX_FD of Linux).
MOST_LISTENERS: Final = 253
#: Seconds between tries of a process that took over to have the name itself.
NAME_RETRY_S: Final = 0.1
#: Seconds that either side waits for the other's next step; engines are looked at meanwhile.
STEP_S: Final = 30.0


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
    """The old process's side: waits for a successor of a service."""

    def __init__(self, service: FleetService) -> None:
        self._service = service
        #: True if the folder of the service's view is this process's to remove.
        self.owns_folder = False
        self._task: asyncio.Task[None] | None = None
        self._refusals = Rarely()
        self._replaced = False

    def open(self, address: tuple[str, int]) -> None:
        self._task = asyncio.create_task(self._serve(address), name="handover")

    async def close(self) -> None:
        if self._task is not None:
            await ended(self._task)
        folder = self._service.view_folder
        if folder is not None and self.owns_folder and not self._replaced:
            remove_folder(folder)

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
                with end:
                    try:
                        if await self._hand_over(end):
                            self._replaced = True
                            waiting.close()  # the successor takes the name
                            self._service.leave()
                            return
                    except (OSError, TimeoutError) as error:
                        reason = str(error) or type(error).__name__
                        self._refusals.tell(logger, Event.HANDOVER_REFUSED, "a handover failed: %s", reason)

    async def _hand_over(self, end: socket.socket) -> bool:
        """Give the listeners away. Return True once the other process accepts."""
        loop = asyncio.get_running_loop()
        if not is_own(end):
            self._refusals.tell(
                logger, Event.HANDOVER_REFUSED, "a process of another user asked for the listeners"
            )
            return False
        async with asyncio.timeout(STEP_S):
            if await loop.sock_recv(end, len(HELLO)) != HELLO:
                return False
        folder = b"" if (found := await self._view()) is None else os.fsencode(found)
        main, admin = self._service.open_sockets()
        if len(main) + len(admin) > MOST_LISTENERS:
            raise OSError(f"one packet carries {MOST_LISTENERS} listeners, not {len(main) + len(admin)}")
        socket.send_fds(end, [HELLO + bytes([len(main)]) + folder], [*main, *admin])
        async with asyncio.timeout(STEP_S):
            return await loop.sock_recv(end, len(ACCEPTING)) == ACCEPTING

    async def _view(self) -> Path | None:
        """Return the folder of the view for a successor, None if the fleet file names another view."""
        service = self._service
        if service.fleet.file.shared is not None:
            return None
        if service.sharing is None:
            service.view_folder, self.owns_folder = view_folder(), True
            sharing = share_in(service, service.view_folder)
            sharing.start()
            await sharing.linked(STEP_S)
        return service.view_folder
