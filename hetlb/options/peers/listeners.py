"""Sockets that the workers of one fleet listen on: every worker has one of its own on each address.

They outlive the processes: the next ones accept on the same sockets.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import Any

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.fleet.admin_listener import named
from hetlb.systemd import Listeners


def bind_listeners(fleet: Fleet, workers: int, given: Listeners) -> Listeners:
    """Bind what is not `given` (by systemd or a replaced process). Raises `HetlbError`."""
    addresses, keys, admin = fleet.file.addresses, fleet.file.address_keys, fleet.file.admin
    admin_sockets = given.admin
    main_sockets: list[socket.socket] = []
    there = given.at([(each.host, each.port) for each in addresses])
    for number, (listen, sockets) in enumerate(zip(addresses, there, strict=True)):
        if not sockets:
            with named(keys[number], listen.host, listen.port):
                sockets = list(_bound(listen.host, listen.port, workers))
        main_sockets += sockets
    if not admin_sockets:
        with named("admin", admin.host, admin.port):
            admin_sockets = tuple(_bound(admin.host, admin.port, 1))
            for each in admin_sockets:
                each.listen(128)
    return Listeners(tuple(main_sockets), admin_sockets)


def share_of(worker: int, workers: int, sockets: Sequence[socket.socket]) -> list[socket.socket]:
    """Return the sockets of one worker: one on every address at least, and no socket is without a worker."""
    by_address: dict[Any, list[socket.socket]] = {}
    for each in sockets:
        by_address.setdefault(each.getsockname(), []).append(each)
    return [
        alike[number % len(alike)]
        for alike in by_address.values()
        for number in range(worker, max(workers, len(alike)), workers)
    ]


def _bound(host: str, port: int, count: int) -> Iterator[socket.socket]:
    """Yield the sockets, `count` on each address of a host; several share the port."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    places = dict.fromkeys((family, kind, number, str(at[0])) for family, kind, number, _, at in infos)
    for family, kind, protocol, address in places:
        with socket.socket(family, kind, protocol) as alone:
            # With SO_REUSEPORT the bind succeeds even if another process listens on the port.
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                alone.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != "::"))
            alone.bind((address, port))
        for _ in range(count):
            one = socket.socket(family, kind, protocol)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != "::"))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if count > 1:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.setblocking(False)
            one.bind((address, port))
            port = one.getsockname()[1]
            yield one
