"""Instances that register themselves over the admin listener: what such a request may say."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from hetlb.config.fleet_tables import InstanceTable
from hetlb.config.yaml_file import convert
from hetlb.errors import ConfigError

#: Seconds that the name of an instance may take to resolve.
_RESOLVE_S = 5.0


class Registration(InstanceTable, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An instance as it registers itself: `model` "" where it names none; it holds for `ttl_s` seconds."""

    model: str = ""
    ttl_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] | None = None


def read_registration(table: Mapping[str, Any]) -> Registration:
    """Read the body of a registration. Raises `ConfigError`."""
    for key in ("profile", "api_key_file", "api_key_env", "ca_file"):
        # A right to register is none to learn what is on this machine.
        if table.get(key) is not None:
            raise ConfigError(f"{key}: expected none, only the fleet file may name files and variables")
    instance = convert(table, Registration)
    if instance.url is None:
        raise ConfigError("url: expected a value, but the key is missing")
    return instance


async def addresses(url: str) -> list[str]:
    """The addresses of an instance's host. Raises `ConfigError`."""
    host = urlsplit(url).hostname
    try:
        async with asyncio.timeout(_RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError) as error:
        raise ConfigError(f"url: expected a host with an address, got {host!r}, which has none") from error
    return [str(sockaddr[0]) for *_, sockaddr in found]
