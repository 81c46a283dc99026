"""The end of tasks. A library may take a cancellation for its own timeout: it is said until the task ends."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import Any, Final

_RETRY_S: Final = 0.5
_ATTEMPTS: Final = 10
#: Seconds that a process has to end by itself after a second signal.
_FORCED_EXIT_S: Final = 10.0


def end(task: asyncio.Task[Any], attempts: int = _ATTEMPTS) -> None:
    """Cancel a task, again until it ends; return at once."""
    if task.done():
        return
    if not attempts:
        _tell(task)
        return
    task.cancel()
    task.get_loop().call_later(_RETRY_S, end, task, attempts - 1)


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and return once all have ended, with any result; log one that goes on for long."""
    left = {task for task in tasks if not task.done()}
    for _ in range(_ATTEMPTS):
        if not left:
            break
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_RETRY_S)
    for task in tasks:
        if not task.done():
            _tell(task)
        elif not task.cancelled():
            task.exception()  # or asyncio logs that nothing looked at it


def exit_by_force() -> threading.Timer:
    """End this process soon, whatever it waits for; the timer that is returned can be cancelled."""
    timer = threading.Timer(_FORCED_EXIT_S, os._exit, (1,))
    timer.daemon = True
    timer.start()
    return timer


def _tell(task: asyncio.Task[Any]) -> None:
    seconds = _ATTEMPTS * _RETRY_S
    logging.getLogger("hetlb").error("%s goes on %.0f s after its cancellation", task.get_name(), seconds)
