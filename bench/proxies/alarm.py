"""A kernel timer (timerfd) for an event loop: finer than the millisecond that uvloop's own timers have.

`Alarm` calls back at the time it was set for, as late as the loop is busy and no later. Times are
seconds of `time.monotonic()`. Linux only.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

_LIBC = ctypes.CDLL(None, use_errno=True)
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_ABSOLUTE = 1


class _Spec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """One timer: `set` it as often as you like; only the last setting holds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._fd = _LIBC.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = loop
        self._callback = callback
        loop.add_reader(self._fd, self._ring)

    def set(self, at: float) -> None:
        """Ring at `at`, seconds of the monotonic clock; at once if that is past."""
        ns = max(1, int(at * 1e9))
        spec = _Spec(0, 0, ns // 1_000_000_000, ns % 1_000_000_000)
        if _LIBC.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """Never ring again."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _ring(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._callback()
