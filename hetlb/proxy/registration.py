"""Instances that register themselves over the admin listener: what such a request may say."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from hetlb.config.fleet_tables import InstanceTable
from hetlb.config.mistakes import short
from hetlb.config.yaml_file import convert
from hetlb.errors import ConfigError

#: Seconds that the name of an instance may take to resolve.
_RESOLVE_S = 5.0
#: The longest time for which a registration may hold.
MOST_TTL_S = 86_400


def read_registration(table: Mapping[str, Any], default_ttl_s: float) -> tuple[InstanceTable, str, float]:
    """The instance, its model ("" where none is named) and the seconds it holds. Raises `InputError`."""
    fields = dict(table)
    ttl_s = fields.pop("ttl_s", None)
    if ttl_s is None:
        ttl_s = default_ttl_s
    if not isinstance(ttl_s, int | float) or isinstance(ttl_s, bool) or not 0 <= ttl_s <= MOST_TTL_S:
        raise ConfigError(f"ttl_s: expected seconds from 0 to {MOST_TTL_S}, got {short(ttl_s)}")
    model = fields.pop("model", "")
    if not isinstance(model, str):
        raise ConfigError(f"model: expected text, got {model!r}")
    for key in ("profile", "api_key_file", "api_key_env", "ca_file"):
        # A right to register is none to learn what is on this machine.
        if fields.get(key) is not None:
            raise ConfigError(f"{key}: expected none, only the fleet file may name files and variables")
    instance = convert(fields, InstanceTable)
    if instance.url is None:
        raise ConfigError("url: expected a value, but the key is missing")
    return instance, model, ttl_s


async def addresses(url: str) -> list[str]:
    """The addresses of an instance's host. Raises `ConfigError`."""
    host = urlsplit(url).hostname
    try:
        async with asyncio.timeout(_RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError) as error:
        raise ConfigError(f"url: expected a host with an address, got {host!r}, which has none") from error
    return [str(sockaddr[0]) for *_, sockaddr in found]
