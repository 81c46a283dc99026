"""Coordinators of a proxy: one for every `stages:` of its fleet, each behind a loopback port of its own.

To the proxy such a port is an engine like any other: probes, metrics, accounting, retries and access control
are those of every instance.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from hetlb.config.fleet import Fleet, load_fleet
from hetlb.config.stage_group import StageGroup
from hetlb.errors import ConfigError, InputError
from hetlb.stage.auth import read_key
from hetlb.stage.checkpoint import load_config
from hetlb.stage.coordinator import Coordinator
from hetlb.stage.openai_api import OpenAIServer
from hetlb.stage.text import TextModel

log = logging.getLogger("hetlb.stage")

#: Seconds that start-up waits for stages that hold all layers.
FIRST_LOOK_S: Final = 3.0


class StageGroups:
    """All coordinators of a fleet."""

    def __init__(self, fleet: Fleet, event_log: Path | None = None) -> None:
        """Read models, tokenizers and keys; paths are logged beside an event log. Raises `InputError`."""
        self._logs: list[Any] = []
        self._servers: dict[str, OpenAIServer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        for name, group in fleet.stages.items():
            coordinator = Coordinator(
                group,
                load_config(group.folder),
                key=read_key(group.key_file),
                tls=_tls(group),
                write_event=self._open_log(event_log, name),
            )
            self._servers[name] = OpenAIServer(coordinator, TextModel(group.folder))

    def _open_log(self, event_log: Path | None, name: str) -> Callable[[str], object] | None:
        if event_log is None:
            return None
        path = event_log.with_name(f"{event_log.name}.{name}")
        try:
            file = path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise InputError(
                f"--event-log: expected a place to write {path}: {os.strerror(error.errno or 0)}"
            ) from error
        self._logs.append(file)
        return file.write

    async def start(self) -> None:
        """Connect to the stages and listen; returns once they hold all layers, after some seconds at most."""
        for server in self._servers.values():
            await server.coordinator.start()
            await server.start()
        waits = (each.coordinator.wait_passable(FIRST_LOOK_S) for each in self._servers.values())
        for name, whole in zip(self._servers, await asyncio.gather(*waits), strict=True):
            if not whole:
                log.warning("%s: the stages that are up do not hold all layers", name)

    def located(self, fleet: Fleet) -> Fleet:
        """The fleet with the addresses of the coordinators. Raises `ConfigError` for new ones."""
        if new := [name for name in fleet.stages if name not in self._servers]:
            raise ConfigError(
                f"{fleet.where}stages: expected those that hetlb was started with, got {new[0]!r}: "
                "only a restart adds one"
            )
        specs = [
            dataclasses.replace(spec, url=f"http://127.0.0.1:{self._servers[spec.name].port}")
            if spec.name in fleet.stages
            else spec
            for spec in fleet.instances
        ]
        return msgspec.structs.replace(fleet, instances=tuple(specs))

    def reload(self, path: Path) -> Fleet:
        """Read a fleet file again; coordinators go on with the workers that it names. Raises `InputError`.

        It may be called in another thread than that of the event loop.
        """
        fleet = self.located(load_fleet(path))
        self._loop.call_soon_threadsafe(self._reconfigure, fleet)
        return fleet

    def _reconfigure(self, fleet: Fleet) -> None:
        for name, group in fleet.stages.items():
            coordinator = self._servers[name].coordinator
            if group != coordinator.group:
                task = asyncio.create_task(coordinator.reconfigure(group))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    @property
    def documents(self) -> dict[str, Callable[[], list[dict[str, Any]]]]:
        """Descriptions of the stages of each instance."""
        return {name: server.coordinator.documents for name, server in self._servers.items()}

    async def close(self) -> None:
        """End all."""
        for server in self._servers.values():
            await server.coordinator.close()
            await server.close()
        for file in self._logs:
            file.close()


def _tls(group: StageGroup) -> ssl.SSLContext | None:
    if group.ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=group.ca_file)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{group.ca_file}: expected a PEM file: {error}") from error
