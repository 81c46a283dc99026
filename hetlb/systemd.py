"""systemd's two protocols, `sd_listen_fds(3)` and `sd_notify(3)`: a few lines that need no library."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hetlb.errors import HetlbError

_FIRST_FD: Final = 3
#: The name of the admin listener's socket (`FileDescriptorName=admin`); all others are for clients.
ADMIN: Final = "admin"


@dataclass(frozen=True, slots=True)
class Listeners:
    """Sockets that listen already: for clients, and for the admin listener. Empty: bind new ones."""

    main: tuple[socket.socket, ...] = ()
    admin: tuple[socket.socket, ...] = ()

    def at(self, places: Sequence[tuple[str, int]]) -> list[list[socket.socket]]:
        """Return the clients' sockets of each of these hosts and ports. Raises `HetlbError`.

        If there is one place, all sockets are its own, wherever they are bound.
        """
        if len(places) == 1:
            return [list(self.main)]
        found: list[list[socket.socket]] = [[] for _ in places]
        names = [_names(*each) for each in places] if self.main else []
        for each in self.main:
            host, port = each.getsockname()[:2]
            of = [number for number, there in enumerate(names) if (host, port) in there]
            if not of:
                raise HetlbError(f"listen: expected the address of a socket that is open, {host}:{port}")
            found[of[0]].append(each)
        return found

    def only(self, main: Iterable[socket.socket] = (), admin: Iterable[socket.socket] = ()) -> Listeners:
        """Close all sockets but these."""
        kept = Listeners(tuple(main), tuple(admin))
        for each in {*self.main, *self.admin}.difference(kept.main, kept.admin):
            each.close()
        return kept


def _names(host: str, port: int) -> set[tuple[str, int]]:
    """Return the addresses that a host and a port stand for."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return {(host, port)}
    return {(str(at[0]), port) for *_, at in infos}


NO_LISTENERS: Final = Listeners()


def inherited() -> Listeners:
    """Return the sockets that systemd listens on for this process; the variables are taken out."""
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    count, pid = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")
    if pid != str(os.getpid()) or not count.isdigit():
        return Listeners()
    main: list[socket.socket] = []
    admin: list[socket.socket] = []
    for index in range(int(count)):
        one = socket.socket(fileno=_FIRST_FD + index)
        os.set_inheritable(one.fileno(), False)
        one.setblocking(False)
        (admin if index < len(names) and names[index] == ADMIN else main).append(one)
    return Listeners(tuple(main), tuple(admin))


def notify(*lines: str) -> None:
    """Tell systemd of our state: `READY=1`, `STOPPING=1`. Without systemd it does nothing."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.sendto("\n".join(lines).encode(), address)


def reloading_begins() -> None:
    """Tell systemd that a reload begins; it is over with `READY=1` (`Type=notify-reload`)."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
