"""The fleet file read once more: what of it may change while the process runs."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Final

import msgspec

from hetlb.balancer.clients.access import Access, load_access
from hetlb.balancer.config.fleet import Fleet, load_fleet
from hetlb.balancer.config.fleet_mistakes import check_extras
from hetlb.balancer.config.fleet_tables import FleetFile
from hetlb.errors import ConfigError


def read_again(running: Fleet) -> Fleet:
    """Return the fleet as its file is now, with the listeners where they are. Raises `InputError`."""
    if running.path is None:
        raise ConfigError("there is no file to reload: hetlb was started with --instance")
    read = load_fleet(running.path)
    before, after, admin = running.file.addresses, read.file.addresses, running.file.admin
    replace = msgspec.structs.replace
    if len(before) == len(after):
        before = tuple(
            replace(old, tls=new.tls if old.tls else None) for old, new in zip(before, after, strict=True)
        )
    return read.with_tables(
        listen=before if len(before) > 1 else before[0],
        admin=replace(
            read.file.admin, host=admin.host, port=admin.port, tls=read.file.admin.tls if admin.tls else None
        ),
    )


#: Keys that cannot be swapped, and their values in the file.
_FIXED: Final[dict[str, Callable[[FleetFile], object]]] = {
    "listen.host": lambda file: [each.host for each in file.addresses],
    "listen.port": lambda file: [each.port for each in file.addresses],
    **{
        key: attrgetter(key)
        for key in (
            "admin.host", "admin.port", "queue", "health", "scrape",
            "proxy.workers", "proxy.request_log", "tracing", "discovery", "watch", "pick", "shared",
            "proxy.request_log_format",
        )
    },
    "listen.tls": lambda file: [each.tls is None for each in file.addresses],
    "admin.tls": lambda file: file.admin.tls is None,
    "policy": lambda file: msgspec.structs.replace(file.policy, name=""),
    "models[].tokenizer": lambda file: {each.name: each.tokenizer for each in file.models if each.tokenizer},
}  # fmt: skip


def needs_restart(then: FleetFile, now: FleetFile) -> list[str]:
    """Return the keys that differ from the start and cannot be swapped."""
    return [key for key, of in _FIXED.items() if of(then) != of(now)]


def require_urls(fleet: Fleet) -> Access:
    """Read the keys and certificates that a fleet is served with. Raises `ConfigError`."""
    for spec in fleet.instances:
        if not spec.url:
            raise ConfigError(
                f"{fleet.where}{spec.name}: url: expected the server's URL, but the key is missing"
            )
    check_extras(fleet)
    return load_access(fleet)
