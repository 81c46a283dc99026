"""Reload of the fleet file: what is read again, and what only a restart changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from hetlb.config.fleet import Fleet
from hetlb.config.fleet_tables import FleetFile
from hetlb.errors import ConfigError


def read_again(running: Fleet, load: Callable[[Path], Fleet]) -> Fleet:
    """The fleet as its file has it now, with the listeners where they are. Raises `InputError`."""
    if running.path is None:
        raise ConfigError("there is no file to reload: hetlb was started with --instance")
    read = load(running.path)
    listen, admin, replace = running.file.listen, running.file.admin, msgspec.structs.replace
    return read.with_tables(
        listen=replace(listen, tls=read.file.listen.tls if listen.tls else None),
        admin=replace(
            read.file.admin,
            host=admin.host,
            port=admin.port,
            tls=read.file.admin.tls if admin.tls else None,
        ),
    )


def needs_restart(then: FleetFile, now: FleetFile) -> list[str]:
    """The keys that differ from those at the start and cannot be swapped."""
    pairs = {
        "listen.host": (then.listen.host, now.listen.host),
        "listen.port": (then.listen.port, now.listen.port),
        "listen.tls": (then.listen.tls is None, now.listen.tls is None),
        "admin.host": (then.admin.host, now.admin.host),
        "admin.port": (then.admin.port, now.admin.port),
        "admin.tls": (then.admin.tls is None, now.admin.tls is None),
        "policy": (
            msgspec.structs.replace(then.policy, name=""),
            msgspec.structs.replace(now.policy, name=""),
        ),
        "queue": (then.queue, now.queue),
        "health": (then.health, now.health),
        "scrape": (then.scrape, now.scrape),
        "proxy.workers": (then.proxy.workers, now.proxy.workers),
        "proxy.request_log": (then.proxy.request_log, now.proxy.request_log),
        "tracing": (then.tracing, now.tracing),
        "discovery": (then.discovery, now.discovery),
        "watch": (then.watch, now.watch),
        "pick": (then.pick, now.pick),
        "shared": (then.shared, now.shared),
        "proxy.request_log_format": (then.proxy.request_log_format, now.proxy.request_log_format),
        "models[].tokenizer": (_tokenizers(then), _tokenizers(now)),
        "models[].image_tokens": (_image_tokens(then), _image_tokens(now)),
    }
    return [key for key, (before, after) in pairs.items() if before != after]


def _image_tokens(file: FleetFile) -> dict[str, object]:
    return {model.name: model.image_tokens for model in file.models if model.image_tokens is not None}


def _tokenizers(file: FleetFile) -> dict[str, str | None]:
    return {model.name: model.tokenizer for model in file.models if model.tokenizer is not None}
