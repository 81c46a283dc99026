"""Sockets that the processes of one fleet listen on: every relay has one of its own on each address."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from hetlb.config.fleet import Fleet
from hetlb.proxy.admin_listener import named
from hetlb.proxy.systemd import Listeners


class FleetListeners:
    """Sockets that outlive the processes: those that come next accept on the same ones."""

    def __init__(self, fleet: Fleet, relays: int, given: Listeners) -> None:
        """Bind listeners that are not `given` (by systemd or a replaced process). Raises `HetlbError`."""
        #: Those of each relay.
        self.relays: list[list[socket.socket]] = [[] for _ in range(relays)]
        #: Those of the admin listener.
        self.admin = list(given.admin)
        self._deal_out(given.main)
        if not given.main:
            self._bind_main(fleet.file.listen.host, fleet.file.listen.port)
        if not given.admin:
            self._bind_admin(fleet.file.admin.host, fleet.file.admin.port)
        #: Host and port for clients, and of the admin listener.
        self.address: tuple[str, int] = self.relays[0][0].getsockname()[:2]
        self.admin_address: tuple[str, int] = self.admin[0].getsockname()[:2]

    @property
    def main(self) -> list[socket.socket]:
        """Those of all relays, each once."""
        return list(dict.fromkeys(each for own in self.relays for each in own))

    def keep(self, relay: int) -> None:
        """Close all but those of one relay, in its process."""
        for each in self.main:
            if each not in self.relays[relay]:
                each.close()
        self.close_admin()

    def close_main(self) -> None:
        """Close those of the relays here."""
        for each in self.main:
            each.close()
        self.relays = [[] for _ in self.relays]

    def close_admin(self) -> None:
        """Close those of the admin listener here."""
        for each in self.admin:
            each.close()
        self.admin = []

    def _deal_out(self, sockets: Sequence[socket.socket]) -> None:
        """Give every relay a socket on every address, and every socket a relay."""
        by_address: dict[Any, list[socket.socket]] = {}
        for each in sockets:
            by_address.setdefault(each.getsockname(), []).append(each)
        relays = self.relays
        for shared in by_address.values():
            for k in range(max(len(relays), len(shared))):
                relays[k % len(relays)].append(shared[k % len(shared)])

    def _bind_main(self, host: str, port: int) -> None:
        with named("listen", host, port):
            for family, kind, protocol, address in _addresses(host, port):
                with socket.socket(family, kind, protocol) as alone:
                    # A process that shares its port would let us in without a word.
                    alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    alone.bind((address, port))
                for own in self.relays:
                    own.append(_listener(family, kind, protocol, (address, port), shared=True))
                    port = own[-1].getsockname()[1]

    def _bind_admin(self, host: str, port: int) -> None:
        with named("admin", host, port):
            for family, kind, protocol, address in _addresses(host, port):
                one = _listener(family, kind, protocol, (address, port), shared=False)
                one.listen(128)
                self.admin.append(one)
                port = one.getsockname()[1]


def _addresses(host: str, port: int) -> list[tuple[int, int, int, str]]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    found = dict.fromkeys(
        (family, kind, protocol, str(where[0])) for family, kind, protocol, _, where in infos
    )
    return list(found)


def _listener(
    family: int, kind: int, protocol: int, address: tuple[str, int], *, shared: bool
) -> socket.socket:
    one = socket.socket(family, kind, protocol)
    if family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.setblocking(False)
    one.bind(address)
    return one
