"""The state of a long command on stderr: how far it is, and the best plan so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hetlb.tools.tables import Console, bar

#: Seconds of a command that shows nothing, and between lines where no terminal shows a bar.
_QUIET_S, _LINE_S = 2.0, 5.0


class PlanProgress:
    """The state of a search: `at` says how far it is, `plan` what it has found."""

    def __init__(self, change: Callable[..., Any], console: Console) -> None:
        self._change = change
        self._console = console
        self._began = time.monotonic()
        self._printed_s = -_LINE_S
        self._shown = ""
        self._best = ""

    def at(self, words: str, done: int | None = None, total: int | None = None) -> None:
        """Show the phase, and how much of it is done."""
        self._change(description=words, completed=done or 0, total=total)
        self._print()

    def plan(self, words: str) -> None:
        """Show a better plan, as soon as the command is a long one."""
        self._best = words
        self._print()

    def _print(self) -> None:
        now = time.monotonic() - self._began
        if self._best != self._shown and now >= max(_QUIET_S, self._printed_s + _LINE_S):
            self._printed_s, self._shown = now, self._best
            self._console.print(f"{self._best} ({now:.0f} s)", highlight=False)


@contextmanager
def plan_progress(words: str) -> Iterator[PlanProgress]:
    """Show a bar on a terminal, and the best plan so far in lines."""
    console = Console(stderr=True, soft_wrap=True)
    with bar(words, console) as change:
        yield PlanProgress(change, console)
