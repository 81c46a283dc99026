"""A coordinator as a process: the OpenAI server in front of the stages that a file names.

To a proxy it is an engine like any other, at its URL. The file is read again when it changes or at SIGHUP:
the workers it names from then on are used at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hetlb.errors import ConfigError, InputError
from hetlb.files import readable_name
from hetlb.output_files import opened_log
from hetlb.tasks import ended
from hetlb.tools.stage.auth import read_key
from hetlb.tools.stage.checkpoint import load_config
from hetlb.tools.stage.coordinator import Coordinator
from hetlb.tools.stage.openai_api import OpenAIServer
from hetlb.tools.stage.stages_file import StageGroup
from hetlb.tools.stage.text import TextModel
from hetlb.watched_files import FileStates

log = logging.getLogger("hetlb.stage")

#: Seconds that start-up waits for stages that hold all layers.
FIRST_LOOK_S: Final = 3.0
#: Seconds between two looks at the file.
_POLL_S: Final = 1.0


class Coordination:
    """A coordinator, its server and its file. `load` reads the file again."""

    def __init__(
        self,
        group: StageGroup,
        load: Callable[[Path], StageGroup],
        *,
        event_log: Path | None = None,
        api_key: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Read model, tokenizer and key. Raises `InputError`."""
        self._load = load
        self._log: Any = None if event_log is None else _opened(event_log)
        self.coordinator = Coordinator(
            group,
            load_config(group.folder),
            key=read_key(group.key_file),
            tls=_authorities(group),
            write_event=None if self._log is None else self._log.write,
        )
        self.server = OpenAIServer(self.coordinator, TextModel(group.folder), api_key=api_key, tls=tls)
        self._reading = asyncio.Lock()

    async def run(self, host: str, port: int, stop: asyncio.Event, ready: Callable[[int], None]) -> None:
        """Serve until `stop`; `ready` is given the port. Raises `OSError` if it cannot listen."""
        loop, hangup = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, hangup.set)
        tasks: list[asyncio.Task[None]] = []
        try:
            await self.coordinator.start()
            if not await self.coordinator.wait_passable(FIRST_LOOK_S):
                log.warning("the stages that are up do not hold all layers")
            await self.server.start(host, port)
            tasks += [asyncio.create_task(self._watch()), asyncio.create_task(self._follow(hangup))]
            ready(self.server.port)
            await stop.wait()
        finally:
            loop.remove_signal_handler(signal.SIGHUP)
            await ended(*tasks)
            await self.coordinator.close()
            await self.server.close()
            if self._log is not None:
                self._log.close()

    async def _watch(self) -> None:
        """Read the file again once it has changed and then stayed as it is between two looks."""
        path, states = [self.coordinator.group.path], FileStates()
        read = before = states.of(path)
        while True:
            await asyncio.sleep(_POLL_S)
            now = await asyncio.to_thread(states.of, path)
            if now == before != read:
                read = now
                await self.reload()
            before = now

    async def _follow(self, hangup: asyncio.Event) -> None:
        while True:
            await hangup.wait()
            hangup.clear()
            await self.reload()

    async def reload(self) -> None:
        """Read the file again. A wrong one is logged and changes nothing."""
        async with self._reading:
            before = self.coordinator.group
            try:
                group = await asyncio.to_thread(self._load, before.path)
            except InputError as error:
                log.error("not reloaded, the last good file stays: %s", error)
                return
            fixed = [
                key
                for key in ("model", "folder", "key_file", "ca_file", "scheduler", "high_water")
                if getattr(group.table, key) != getattr(before.table, key)
            ]
            if fixed:
                log.error("not reloaded: only a restart changes %s", ", ".join(fixed))
            elif group != before:
                await self.coordinator.reconfigure(group)
                log.info("reloaded: %d workers", len(group.workers))


def _opened(path: Path) -> Any:
    try:
        return open(opened_log(path), "w", encoding="utf-8", buffering=1)
    except OSError as error:
        raise InputError(f"--event-log: expected a place to write {path}: {error.strerror}") from error


def _authorities(group: StageGroup) -> ssl.SSLContext | None:
    """Return the TLS context of connections to workers, None without a `ca_file`."""
    if group.ca_file is None:
        return None
    try:
        with readable_name(group.ca_file) as name:
            return ssl.create_default_context(cafile=name)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{group.ca_file}: expected a PEM file: {error}") from error
