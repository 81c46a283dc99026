"""Instances in files: a folder of instance files, and the fleet file itself, watched for changes.

Files are looked at every `poll_s` (a network file system tells of no changes). A file with a mistake changes
nothing; one that is gone from a folder takes its instances along.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from hetlb.config.fleet_tables import ModelTable
from hetlb.config.urls import check_url
from hetlb.config.yaml_file import load_yaml
from hetlb.errors import ConfigError, InputError
from hetlb.proxy.discovery.source import Found, Publish, logger
from hetlb.proxy.telemetry.events import Event, tell

#: Seconds after a change was seen until a file is read.
_SETTLED_S = 0.05
#: One file: its path, time of change (ns), size and inode.
Stamp: TypeAlias = tuple[tuple[str, int, int, int], ...]


class InstanceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of instances: `models` as in a fleet file, of each instance `url` and what goes with it."""

    models: tuple[ModelTable, ...]
    version: int = 1


def stamp(paths: Sequence[Path]) -> Stamp:
    """The state of files and of the YAML files in folders."""
    found: list[tuple[str, int, int, int]] = []
    for path in paths:
        for each in _files(path):
            with contextlib.suppress(OSError):
                status = each.stat()
                found.append((str(each), status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


def _files(path: Path) -> list[Path]:
    """A file, or the files of a folder; those that begin with a dot are being written."""
    if not path.is_dir():
        return [path]
    names = sorted(each for each in path.iterdir() if each.suffix in (".yaml", ".yml"))
    return [each for each in names if not each.name.startswith(".")]


async def changes(paths: Sequence[Path], poll_s: float) -> AsyncIterator[None]:
    """One item at the beginning and after every change of the files."""
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
        yield


class FileSource:
    """Files and folders of instances."""

    def __init__(self, paths: Sequence[Path], poll_s: float) -> None:
        self.name = "files " + ", ".join(map(str, paths))
        self._paths = paths
        self._poll_s = poll_s
        self._known: dict[Path, list[Found]] = {}

    async def run(self, publish: Publish) -> None:
        """Publish what the files hold, now and after every change."""
        async for _ in changes(self._paths, self._poll_s):
            mistakes = await asyncio.to_thread(self._read)
            publish([found for each in self._known.values() for found in each])
            for text in mistakes:
                tell(
                    logger, Event.DISCOVERY_FAILED, "%s; what the file gave last stays", text,
                    source=self.name,
                )  # fmt: skip

    def _read(self) -> list[str]:
        """Read all files; returns the mistakes of those that stay as they were."""
        mistakes: list[str] = []
        known: dict[Path, list[Found]] = {}
        for path in [each for folder in self._paths for each in _files(folder)]:
            try:
                known[path] = read_instances(path)
            except InputError as error:
                mistakes.append(str(error))
                known[path] = self._known.get(path, [])
        self._known = known
        return mistakes


def read_instances(path: Path) -> list[Found]:
    """The instances of one file. Raises `ConfigError`."""
    found: list[Found] = []
    for m, model in enumerate(load_yaml(path, InstanceFile, ConfigError).models):
        for i, table in enumerate(model.instances):
            key = f"{path}: models[{m}].instances[{i}]"
            if table.url is None:
                raise ConfigError(f"{key}.url: expected the server's URL, but the key is missing")
            for name in ("api_key_file", "api_key_env", "ca_file", "kv_events"):
                if getattr(table, name) is not None:
                    raise ConfigError(f"{key}.{name}: expected none, this key belongs in the fleet file")
            url = check_url(table.url, f"{key}.url")
            named = table.name or url.partition("//")[2]
            profile = "" if table.profile is None else str(path.parent / table.profile)
            found.append(Found(named, url, model.name, table.labels, profile, table.weight))
    return found


class FleetFileSource:
    """The fleet file itself: it is reloaded after every change. Gives no instances of its own."""

    def __init__(self, path: Path, poll_s: float, reload: Callable[[], None]) -> None:
        self.name = f"fleet file {path}"
        self._path = path
        self._poll_s = poll_s
        self._reload = reload

    async def run(self, publish: Publish) -> None:
        """Reload after every change; the first look changes nothing."""
        publish([])
        first = True
        async for _ in changes([self._path], self._poll_s):
            if not first and self._path.exists():
                self._reload()
            first = False
