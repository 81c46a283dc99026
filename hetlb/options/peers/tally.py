"""Counts of one worker, in memory that its siblings read and that outlives it."""

from __future__ import annotations

import mmap
import os
import zlib
from struct import Struct
from typing import Final

#: Bytes of each of the two halves of the memory: one is written while the other one holds.
_HALF_BYTES: Final = 32 << 20
#: Number of a report, its length, and its checksum.
_HEAD: Final = Struct("!QII")


class Tally:
    """Place for the newest report of one worker; made by the parent, inherited by all workers.

    A report that its writer could not finish does not count: the one before it holds.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("hetlb-tally", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, 2 * _HALF_BYTES)
        self._memory = mmap.mmap(self._fd, 2 * _HALF_BYTES)

    def write(self, report: bytes) -> None:
        """Replace the last report. Ignore a report above the maximum size."""
        if len(report) > _HALF_BYTES - _HEAD.size:
            return
        number, half = self._newest()
        at = 0 if half else _HALF_BYTES
        self._memory[at + _HEAD.size : at + _HEAD.size + len(report)] = report
        self._memory[at : at + _HEAD.size] = _HEAD.pack(number + 1, len(report), zlib.crc32(report))

    def read(self) -> tuple[int, bytes]:
        """Return the newest whole report and its number, 0 before the first."""
        for half in sorted((0, _HALF_BYTES), key=self._number, reverse=True):
            number, length, checksum = _HEAD.unpack_from(self._memory, half)
            report = self._memory[half + _HEAD.size : half + _HEAD.size + length]
            if number and len(report) == length and zlib.crc32(report) == checksum:
                return number, report
        return 0, b""

    def _number(self, half: int) -> int:
        return int(_HEAD.unpack_from(self._memory, half)[0])

    def _newest(self) -> tuple[int, int]:
        half = max((0, _HALF_BYTES), key=self._number)
        return self._number(half), half

    def close(self) -> None:
        self._memory.close()
        os.close(self._fd)
