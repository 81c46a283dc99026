"""Peers of one fleet, as the fleet file states them."""

from __future__ import annotations

import os
from typing import Final

from hetlb.balancer.config.fleet_tables import SharedTable
from hetlb.errors import ConfigError
from hetlb.extras import check_extra

#: Start of the URL of a hub: the path of its Unix socket follows.
HUB: Final = "hub:"


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
