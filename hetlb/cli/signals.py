"""Handlers of the signals that end a command."""

from __future__ import annotations

import asyncio
import signal


def cancel_on_signals() -> None:
    """Cancel the current task on SIGTERM or SIGHUP, as `asyncio.Runner` does on Ctrl-C."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "expected to be called in a task"
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)


def stop_event() -> asyncio.Event:
    """Event that is set on SIGINT or SIGTERM."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop
