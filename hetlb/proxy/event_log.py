"""Event log of a service: the file that its scheduler records every fact and decision in, for a replay."""

from __future__ import annotations

import os
from pathlib import Path

from hetlb.core.eventlog import RecordingScheduler, encode_setup
from hetlb.core.setup import SchedulerSetup
from hetlb.errors import InputError
from hetlb.proxy.telemetry.log_writer import LogWriter


class EventLog(LogWriter):
    """A file that is written from its beginning. Raises `InputError` where it cannot be."""

    def __init__(self, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise InputError(
                f"--event-log: expected a file that can be written, got {str(path)!r}: {error.strerror}"
            ) from error
        super().__init__(descriptor, "event log")
        self._descriptor = descriptor

    def scheduler(self, setup: SchedulerSetup) -> RecordingScheduler:
        """A scheduler that is recorded here."""
        self.write(encode_setup(setup))
        return RecordingScheduler(setup, write=self.write)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is left and close the file; harmless if it is closed."""
        if self._descriptor >= 0:
            super().close(timeout_s)
            os.close(self._descriptor)
            self._descriptor = -1
