"""Event log of a service: the file that its scheduler records every fact and decision in, for a replay."""

from __future__ import annotations

import os
from pathlib import Path

from hetlb.core.eventlog import RecordingScheduler, encode_setup
from hetlb.core.setup import SchedulerSetup
from hetlb.errors import InputError
from hetlb.proxy.telemetry.log_writer import LogWriter


class EventLog:
    """A file that is written from its beginning. Raises `InputError` where it cannot be."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise InputError(
                f"--event-log: expected a file that can be written, got {str(path)!r}: {error.strerror}"
            ) from error
        self._writer = LogWriter(self._descriptor, "event log")

    def scheduler(self, setup: SchedulerSetup) -> RecordingScheduler:
        """A scheduler that is recorded here."""
        self._writer.write(encode_setup(setup))
        return RecordingScheduler(setup, write=self._writer.write)

    @property
    def lost(self) -> int:
        """Lines that a slow disk made us drop."""
        return self._writer.lost

    def close(self) -> None:
        """Write what is left and close the file; harmless if it is closed."""
        if self._descriptor >= 0:
            self._writer.close()
            os.close(self._descriptor)
            self._descriptor = -1
