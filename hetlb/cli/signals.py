"""Event loops of commands, and the signals that end them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from hetlb.errors import HetlbError

_T = TypeVar("_T")


def run_until_signal(main: Coroutine[Any, Any, _T]) -> _T:
    """Run on uvloop; SIGTERM and SIGHUP end it as Ctrl-C does. Raises `KeyboardInterrupt`."""

    async def interruptible() -> _T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "expected to be called in a task"
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, task.cancel)
        return await main

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(interruptible())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def run_listener(main: Coroutine[Any, Any, _T], host: str, port: int) -> _T:
    """Run a server on uvloop. Raises `HetlbError` if it cannot listen."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main)
    except OSError as error:
        raise HetlbError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def stop_event() -> asyncio.Event:
    """Event that is set on SIGINT or SIGTERM."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop
