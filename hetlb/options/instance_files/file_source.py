"""Instances in files and folders of files, watched for changes.

A file with a mistake changes nothing; the removal of a file from a folder removes its instances.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import DiscoveryTable, ModelTable
from hetlb.balancer.fleet.source import Found, Publish, logger
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.errors import ConfigError, InputError
from hetlb.inputs.urls import check_url
from hetlb.inputs.yaml_file import load_yaml
from hetlb.watched_files import changes, files_of


class InstanceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of instances: `models` as in a fleet file, with the keys of instances alone."""

    models: tuple[ModelTable, ...]
    version: int = 1


class FileSource:
    """Files and folders of instances."""

    def __init__(self, paths: Sequence[Path], poll_s: float) -> None:
        self.name = "files " + ", ".join(map(str, paths))
        self._paths = paths
        self._poll_s = poll_s
        self._known: dict[Path, list[Found]] = {}

    async def run(self, publish: Publish) -> None:
        async for _ in changes(self._paths, self._poll_s):
            mistakes = await asyncio.to_thread(self._read)
            publish([found for each in self._known.values() for found in each])
            for text in mistakes:
                tell(
                    logger, Event.DISCOVERY_FAILED, "%s; its last list stays in force", text,
                    source=self.name,
                )  # fmt: skip

    def _read(self) -> list[str]:
        """Read all files; return the mistakes of files that stay as they were."""
        mistakes: list[str] = []
        known: dict[Path, list[Found]] = {}
        for path in [each for folder in self._paths for each in files_of(folder)]:
            try:
                known[path] = read_instances(path)
            except InputError as error:
                mistakes.append(str(error))
                known[path] = self._known.get(path, [])
        self._known = known
        return mistakes


def read_instances(path: Path) -> list[Found]:
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
            profile = None if table.profile is None else str(path.parent / table.profile)
            own = {"name": table.name or url.partition("//")[2], "url": url, "profile": profile}
            found.append(Found(model=model.name, **{**msgspec.structs.asdict(table), **own}))
    return found


def sources_of(fleet: Fleet, table: DiscoveryTable) -> list[FileSource]:
    """Return the source of `discovery.files`, none if it names only the fleet file."""
    paths = [fleet.base / each for each in table.files]
    own = None if fleet.path is None else os.path.realpath(fleet.path)
    others = [each for each in paths if os.path.realpath(each) != own]
    return [FileSource(others, table.poll_s)] if others else []
