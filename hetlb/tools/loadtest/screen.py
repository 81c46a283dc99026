"""Progress display while a load runs: a bar with live figures, on stderr, on a terminal only.

Nothing is drawn without a viewer (no terminal, or `quiet`); warnings are printed always. Drawing
is cheap and seldom: it shares a process with the clock of every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from hetlb.tasks import end
from hetlb.tools.loadtest.generator import LoadProgress
from hetlb.tools.tables import bar

_REDRAW_S = 0.25


class Screen:
    """Progress of the runs of one command."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._live = sys.stderr.isatty() and not quiet

    def say(self, text: str) -> None:
        if self._live:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Print a line in any case."""
        with contextlib.suppress(OSError):  # a full disk of a log takes no result away
            print(text, file=sys.stderr, flush=True)

    @contextlib.asynccontextmanager
    async def bar(self, label: str, progress: LoadProgress, total: int) -> AsyncIterator[None]:
        if not self._live:
            yield
            return
        with bar(label) as show:
            drawing = asyncio.create_task(_draw(show, progress, total))
            try:
                yield
            finally:
                end(drawing)


async def _draw(show: Callable[..., Any], progress: LoadProgress, total: int) -> None:
    start_s = time.monotonic()
    while True:
        await asyncio.sleep(_REDRAW_S)
        figures = live_figures(progress, time.monotonic() - start_s)
        show(completed=progress.ended, total=total, note=f"{progress.ended:,}/{total:,}, {figures}")


def live_figures(progress: LoadProgress, elapsed_s: float) -> str:
    parts = [f"{progress.in_flight:,} in flight", f"{progress.output_tokens / elapsed_s:,.0f} tok/s"]
    if progress.failed:
        parts.append(f"{progress.failed:,} failed")
    return ", ".join(parts)
