"""The file of an event log, written beside the event loop."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.placement import Splitting
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.errors import InputError
from hetlb.logs import LogWriter
from hetlb.options.event_log.eventlog import RecordingScheduler, encode_setup
from hetlb.output_files import opened_log

logger = logging.getLogger("hetlb.proxy")


class EventLog(LogWriter):
    """A file written from its beginning. Raises `InputError` if it cannot be written."""

    def __init__(self, path: Path) -> None:
        try:
            descriptor = opened_log(path)
        except OSError as error:
            raise InputError(
                f"--event-log: expected a file that can be written, got {str(path)!r}: {error.strerror}"
            ) from error
        super().__init__(descriptor, "event log")
        self._descriptor = descriptor
        self._path = path
        #: Bytes of whole lines in the file.
        self._bytes = 0
        #: True if a write failed; and if lines are missing, without which later ones mean nothing, and why.
        self._failed = self._ended = False
        self._why = ""

    def write(self, *lines: str) -> None:
        """Write lines, unless some before them are missing."""
        if self._ended:
            super()._lose(len(lines), self._why)
        else:
            super().write(*lines)

    def _write_whole(self, batch: bytes) -> None:
        if self._failed:
            raise OSError("the log has ended")
        try:
            super()._write_whole(batch)
        except OSError:
            self._failed = True
            with contextlib.suppress(OSError):  # a pipe has no part that could be taken back
                os.ftruncate(self._descriptor, self._bytes)
            raise
        self._bytes += len(batch)

    def _lose(self, lines: int, why: str) -> None:
        super()._lose(lines, why)
        if not self._ended:
            self._ended, self._why = True, why
            tell(logger, Event.EVENT_LOG, "the event log ends, %s cannot be written: %s", self._path, why)

    def scheduler(
        self, setup: SchedulerSetup, splitting: Callable[[Scheduler], Splitting]
    ) -> RecordingScheduler:
        """Return a scheduler that writes every fact, and its commands, to the file."""
        self.write(encode_setup(setup))
        return RecordingScheduler(setup, write=self.write, splitting=splitting)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the rest and close the file, if it is still open."""
        if self._descriptor >= 0:
            super().close(timeout_s)
            os.close(self._descriptor)
            self._descriptor = -1
