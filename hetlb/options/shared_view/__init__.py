"""Shared view: several schedulers of one fleet tell each other their leases."""

import secrets
from typing import Any

from hetlb.balancer.exchange.scheduler_driver import SchedulerDriver
from hetlb.options.shared_view.shared_table import SharedTable, check_serving, shared_url
from hetlb.options.shared_view.sharing import Sharing

TABLES: dict[str, Any] = {"shared": SharedTable | None}


def hook(table: SharedTable, key: str, scheduling: SchedulerDriver) -> Sharing:
    """Let a scheduler share its view with its peers. Raises `ConfigError` that names `key`."""
    url = shared_url(table, key)
    sharing = Sharing(table, url, scheduling.scheduler, scheduling.carry_out, secrets.token_hex(6))
    scheduling.view = sharing.view
    return sharing


__all__ = ["TABLES", "check_serving", "hook"]
