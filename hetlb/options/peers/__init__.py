"""Shared view: several processes of one fleet tell each other their leases and their operators' changes."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hetlb.balancer.config.fleet_tables import SharedTable
from hetlb.errors import ConfigError
from hetlb.extras import check_extra
from hetlb.options.peers.hub import HUB, HubTransport, hub_in
from hetlb.options.peers.peer_messages import PeerTransport
from hetlb.options.peers.sharing import Sharing, transport_of

if TYPE_CHECKING:
    from hetlb.balancer.fleet.service import FleetService

#: Seconds of silence after which a process of one proxy counts as gone. The hub tells of one that ended, and
#: the parent kills one that hangs for five seconds. A busy machine may keep one from a CPU for a second.
_HUB_SILENT_S: Final = 4.0


def shared_url(table: SharedTable, key: str) -> str:
    """Return the address of the server. Raises `ConfigError` that names `key`."""
    url = table.url
    if table.url_env is not None:
        if url is not None:
            raise ConfigError(f"{key}.url: expected either url or url_env, got both")
        url = os.environ.get(table.url_env)
        if url is None:
            raise ConfigError(f"{key}.url_env: expected the name of a variable that is set")
    if url is None:
        raise ConfigError(f"{key}.url: expected an address, but the key is missing")
    if not url.startswith(("redis://", "rediss://", "unix://", HUB)):
        raise ConfigError(f"{key}.url: expected redis://, rediss://, unix:// or hub: at its beginning")
    return url


def check_shared(table: SharedTable, key: str) -> None:
    """Raise `ConfigError` unless peers can meet: at a server, only with the package for it."""
    url = shared_url(table, key)
    if url.startswith(HUB):
        return
    check_extra(key, "redis", "peers")
    from redis.connection import parse_url

    try:
        parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError:  # its text may have part of a password
        raise ConfigError(f"{key}.url: expected an address like redis://host:6379/0") from None


def share(service: FleetService) -> None:
    """Let a service share its view with its peers, over what the fleet file names. Raises `ConfigError`."""
    table = service.fleet.file.shared
    assert table is not None, "expected a fleet file with shared"
    url = shared_url(table, f"{service.fleet.where}shared")
    share_over(service, table, transport_of(url, table.group, table.silent_s))


def share_in(service: FleetService, folder: Path) -> Sharing:
    """Let a service share its view with the other processes of its proxy, by the hub in their folder."""
    sharing = share_over(service, SharedTable(silent_s=_HUB_SILENT_S), HubTransport(hub_in(folder)))
    service.share_sleep(folder)
    return sharing


def share_over(service: FleetService, table: SharedTable, transport: PeerTransport) -> Sharing:
    """Let a service share its view with its peers, over a transport; return the exchange with them."""
    scheduling, knows = service.scheduling, lambda name: service.roster.spec(name) is not None
    sharing = Sharing(table, transport, service.scheduler, scheduling.carry_out, secrets.token_hex(6))
    sharing.share_changes(service.make, knows)
    service.sharing, scheduling.view = sharing, sharing.view
    scheduling.limiters.journal = sharing.share_keys(scheduling.limiters.of)
    sharing.share_kept(service.driver.kept)
    service.roster.on_edited = sharing.instances_changed
    return sharing
