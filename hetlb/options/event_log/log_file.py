"""The file of an event log, written beside the event loop."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from hetlb.balancer.core.setup import SchedulerSetup
from hetlb.errors import InputError
from hetlb.logs import LogWriter
from hetlb.options.event_log.eventlog import RecordingScheduler, encode_setup


class EventLog(LogWriter):
    """A file that is written from its beginning. Raises `InputError` where it cannot be."""

    def __init__(self, path: Path) -> None:
        try:
            # A pipe that has no reader would keep the start waiting for one.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
            os.set_blocking(descriptor, True)
        except OSError as error:
            why = "nothing reads this pipe" if error.errno == errno.ENXIO else error.strerror
            raise InputError(
                f"--event-log: expected a file that can be written, got {str(path)!r}: {why}"
            ) from error
        super().__init__(descriptor, "event log")
        self._descriptor = descriptor

    def scheduler(self, setup: SchedulerSetup) -> RecordingScheduler:
        """Return a scheduler that writes every fact, and its commands, to the file."""
        self.write(encode_setup(setup))
        return RecordingScheduler(setup, write=self.write)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the rest and close the file, if it is still open."""
        if self._descriptor >= 0:
            super().close(timeout_s)
            os.close(self._descriptor)
            self._descriptor = -1
