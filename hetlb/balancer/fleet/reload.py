"""Reload of the fleet file: when it has changed, what is read again, and what only a restart changes.

Files are looked at every `poll_s` (a network file system tells of no changes).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from hetlb.balancer.config.fleet import Fleet, load_fleet
from hetlb.balancer.config.fleet_tables import FleetFile
from hetlb.errors import ConfigError

#: Seconds after a change was seen until a file is read.
_SETTLED_S = 0.05
#: One file: its path, time of change (ns), size and inode.
Stamp: TypeAlias = tuple[tuple[str, int, int, int], ...]


def stamp(paths: Sequence[Path]) -> Stamp:
    """Return the state of files and of the YAML files in folders."""
    found: list[tuple[str, int, int, int]] = []
    for path in paths:
        for each in files_of(path):
            with contextlib.suppress(OSError):
                status = each.stat()
                found.append((str(each), status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


def files_of(path: Path) -> list[Path]:
    """Return a file, or the files of a folder; those that begin with a dot are being written."""
    if not path.is_dir():
        return [path]
    names = sorted(each for each in path.iterdir() if each.suffix in (".yaml", ".yml"))
    return [each for each in names if not each.name.startswith(".")]


async def changes(paths: Sequence[Path], poll_s: float) -> AsyncIterator[Stamp]:
    """Yield the state of the files at the beginning and after every change."""
    last: Stamp | None = None
    while True:
        now = stamp(paths)
        if now == last:
            await asyncio.sleep(poll_s)
            continue
        if last is not None:  # an editor writes in several steps
            await asyncio.sleep(_SETTLED_S)
            now = stamp(paths)
        last = now
        yield now


class SeenFiles:
    """States of the files that a fleet names, from just before they were read.

    A file behind a link changes with the file that the link leads to, as when Kubernetes swaps a volume.
    """

    def __init__(self, named: Sequence[Path]) -> None:
        self._states = _states(named)

    def before_reading(self) -> None:
        """Look at the files that the fleet names until now."""
        self._states = _states(self._states)

    def after_reading(self, named: Sequence[Path]) -> None:
        """Look at the files that the fleet names from now on and did not name before."""
        self._states = _states(named) | {path: self._states[path] for path in named if path in self._states}

    async def changes(self, poll_s: float) -> AsyncIterator[None]:
        """Yield each time a file has changed, came or went; the receiver reads them again."""
        while True:
            await asyncio.sleep(poll_s)
            if _states(self._states) != self._states:
                await asyncio.sleep(_SETTLED_S)  # an editor writes in several steps
                yield


def _states(paths: Iterable[Path]) -> dict[Path, Stamp]:
    return {path: stamp([path]) for path in paths}


def read_again(running: Fleet) -> Fleet:
    """Return the fleet as its file has it now, with the listeners where they are. Raises `InputError`."""
    if running.path is None:
        raise ConfigError("there is no file to reload: hetlb was started with --instance")
    read = load_fleet(running.path)
    listen, admin, replace = running.file.listen, running.file.admin, msgspec.structs.replace
    return read.with_tables(
        listen=replace(listen, tls=read.file.listen.tls if listen.tls else None),
        admin=replace(
            read.file.admin, host=admin.host, port=admin.port, tls=read.file.admin.tls if admin.tls else None
        ),
    )


#: Keys that cannot be swapped, and what of the file they stand for.
_FIXED: Final[dict[str, Callable[[FleetFile], object]]] = {
    **{
        key: attrgetter(key)
        for key in (
            "listen.host", "listen.port", "admin.host", "admin.port", "queue", "health", "scrape",
            "proxy.workers", "proxy.request_log", "tracing", "discovery", "watch", "pick", "shared",
            "proxy.request_log_format",
        )
    },
    "listen.tls": lambda file: file.listen.tls is None,
    "admin.tls": lambda file: file.admin.tls is None,
    "policy": lambda file: msgspec.structs.replace(file.policy, name=""),
    "models[].tokenizer": lambda file: {each.name: each.tokenizer for each in file.models if each.tokenizer},
}  # fmt: skip


def needs_restart(then: FleetFile, now: FleetFile) -> list[str]:
    """Return the keys that differ from those at the start and cannot be swapped."""
    return [key for key, of in _FIXED.items() if of(then) != of(now)]
