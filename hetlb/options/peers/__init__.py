"""Shared view: several processes of one fleet tell each other their leases and their operators' changes."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hetlb.balancer.config.fleet_tables import SharedTable
from hetlb.options.peers.hub import HubTransport, hub_in
from hetlb.options.peers.peer_messages import PeerTransport
from hetlb.options.peers.shared_table import shared_url
from hetlb.options.peers.sharing import Sharing, transport_of

if TYPE_CHECKING:
    from hetlb.balancer.fleet.service import FleetService

#: Seconds of silence after which a process of one proxy counts as gone. The hub tells of one that ended, and
#: the parent kills one that hangs for five seconds. A busy machine may keep one from a CPU for a second.
_HUB_SILENT_S: Final = 4.0


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
