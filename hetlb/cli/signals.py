"""Signals that end a command."""

from __future__ import annotations

import asyncio
import signal


def cancel_on_signals() -> None:
    """Cancel the running task when SIGTERM or SIGHUP comes, as `asyncio.Runner` does at Ctrl-C."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "expected to be called in a task"
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)


def stop_event() -> asyncio.Event:
    """An event that SIGINT or SIGTERM sets."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop
