"""Event loops of commands, and the signals that end them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvloop

from hetlb.errors import HetlbError
from hetlb.tasks import exit_by_force

_T = TypeVar("_T")
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[Coroutine[Any, Any, _T]], _T]]:
    """Give a function that runs a coroutine on uvloop until SIGINT, SIGTERM or SIGHUP; see below.

    Later signals are ignored: the results of finished work are then written and printed. A loop that does not
    end after the second one is ended by force.
    """
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
    #: One for each signal.
    stopped: list[threading.Timer | None] = []

    def stop(*_: object) -> None:
        if not running:
            raise KeyboardInterrupt
        loop, task = running[0]
        stopped.append(None if len(stopped) != 1 or loop.is_closed() else exit_by_force())
        if task.cancel():
            loop.call_soon_threadsafe(lambda: None)  # the loop may sleep

    async def noted(main: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.current_task()
        assert task is not None, "expected to be called in a task"
        running.append((asyncio.get_running_loop(), task))
        return await main

    def run(main: Coroutine[Any, Any, _T]) -> _T:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(noted(main))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            for timer in stopped:
                if timer is not None:
                    timer.cancel()

    before = {number: signal.signal(number, stop) for number in _ENDING}
    try:
        yield run
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_until_signal(main: Coroutine[Any, Any, _T]) -> _T:
    """Run on uvloop; SIGTERM and SIGHUP end it as Ctrl-C does. Raises `KeyboardInterrupt`."""
    with stoppable() as run:
        return run(main)


def run_listener(main: Coroutine[Any, Any, _T], host: str, port: int) -> _T:
    """Run a server on uvloop. Raises `HetlbError` if it cannot listen."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main)
    except OSError as error:
        raise HetlbError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def stop_event() -> asyncio.Event:
    """Return an event, set on SIGINT or SIGTERM."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop
