"""Shared view: several schedulers of one fleet tell each other their leases."""

import secrets

from hetlb.balancer.clients.access import shared_url
from hetlb.balancer.config.fleet_tables import SharedTable
from hetlb.balancer.exchange.scheduler_driver import SchedulerDriver
from hetlb.options.shared_view.sharing import Sharing


def hook(table: SharedTable, key: str, scheduling: SchedulerDriver) -> Sharing:
    """Let a scheduler share its view with its peers. Raises `ConfigError` that names `key`."""
    url = shared_url(table, key)
    sharing = Sharing(table, url, scheduling.scheduler, scheduling.carry_out, secrets.token_hex(6))
    scheduling.view = sharing.view
    return sharing
