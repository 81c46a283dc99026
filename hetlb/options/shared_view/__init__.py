"""Shared view: several schedulers of one fleet tell each other their leases."""

import os
import secrets

from hetlb.balancer.config.fleet_tables import SharedTable
from hetlb.balancer.exchange.scheduler_driver import SchedulerDriver
from hetlb.errors import ConfigError
from hetlb.options.shared_view.sharing import Sharing


def hook(table: SharedTable, key: str, scheduling: SchedulerDriver) -> Sharing:
    """Let a scheduler share its view with its peers. Raises `ConfigError` that names `key`."""
    url = shared_url(table, key)
    sharing = Sharing(table, url, scheduling.scheduler, scheduling.carry_out, secrets.token_hex(6))
    scheduling.view = sharing.view
    return sharing


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
    if not url.startswith(("redis://", "rediss://", "unix://", "hub:")):
        raise ConfigError(f"{key}.url: expected redis://, rediss://, unix:// or hub: at its beginning")
    return url
