"""State file (`policy.state_file`): what a proxy has learnt, kept over restarts.

A file that is damaged or not ours costs one warning; the event loop is never held up for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path
from typing import Any, Final

import msgspec

from hetlb.core.predictor import OnlinePredictor
from hetlb.core.scheduler import Scheduler
from hetlb.files import whole_file
from hetlb.proxy.telemetry.events import Event, tell
from hetlb.proxy.token_estimator import TokenEstimator

logger = logging.getLogger("hetlb.proxy")

STATE_KIND: Final = "hetlb-state"
STATE_VERSION: Final = 1
#: Seconds between writes of the file.
SAVE_S: Final = 60.0
#: A larger file is not ours.
_MAX_BYTES: Final = 256 << 20
#: Histograms copied before the event loop gets its turn.
_AT_ONCE: Final = 64


class StateFile:
    """Reads what was learnt at the start, writes it every `SAVE_S` and at the end."""

    def __init__(self, path: Path, scheduler: Scheduler, token_estimator: TokenEstimator) -> None:
        self._path = path
        self._scheduler = scheduler
        self._token_estimator = token_estimator
        self._task: asyncio.Task[None] | None = None
        self._told = False

    def load(self) -> None:
        """Take over what the file holds. A file that is not there yet is no news."""
        path = self._path
        try:
            with path.open("rb") as file:
                raw = file.read(_MAX_BYTES + 1)
            document = msgspec.json.decode(raw, type=dict[str, Any])
            if (document.get("kind"), document.get("version")) != (STATE_KIND, STATE_VERSION):
                raise ValueError(f"expected {STATE_KIND} of version {STATE_VERSION}")
            if document["lengths"] is not None:
                self._scheduler.restore_lengths(document["lengths"])
            self._token_estimator.restore(document["tokens"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            text, shown = "policy.state_file: %s is not used: %s", " ".join(str(reason).split())[:200]
            tell(logger, Event.STATE_FILE, text, path, shown)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._save_for_ever())

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await self._save()

    async def _save_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            await self._save()

    async def _save(self) -> None:
        path = self._path
        document = {
            "kind": STATE_KIND,
            "version": STATE_VERSION,
            "lengths": await self._lengths(),
            "tokens": self._token_estimator.state(),
        }
        try:
            await asyncio.to_thread(_write, path, document)
            self._told = False
        except OSError as error:
            if not self._told:
                text = "policy.state_file: %s cannot be written: %s"
                tell(logger, Event.STATE_FILE, text, path, error.strerror)
            self._told = True

    async def _lengths(self) -> dict[str, Any] | None:
        predictor = self._scheduler.predictor
        if not isinstance(predictor, OnlinePredictor):
            return None
        parts = []
        for number, part in enumerate(predictor.parts(), start=1):
            parts.append(part)
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return predictor.state(parts)


def _write(path: Path, document: dict[str, Any]) -> None:
    with whole_file(path) as scratch, scratch.open("wb") as file:
        file.write(msgspec.json.encode(document))
        file.flush()
        os.fsync(file.fileno())
