"""Progress display while a load runs: a bar with live figures, on stderr, on a terminal only.

Nothing is drawn without a viewer (no terminal, or `quiet`); warnings are printed always. Drawing
is cheap and seldom: it shares a process with the clock of every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from hetlb.loadtest.generator import LoadProgress

_REDRAW_S = 0.25


class Screen:
    """Progress of the runs of one command."""

    def __init__(self, *, quiet: bool = False) -> None:
        console = Console(stderr=True, highlight=False, markup=False)
        self._live = console.is_terminal and not quiet
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=4),  # a line fits on 80 columns
            MofNCompleteColumn(),
            TextColumn("{task.fields[live]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not self._live,
            transient=True,
            auto_refresh=False,
        )

    def __enter__(self) -> Screen:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """A line for the viewer."""
        if self._live:
            self.warn(text)

    def warn(self, text: str) -> None:
        """A line that is printed in any case."""
        self._bars.console.print(text, soft_wrap=True)

    @contextlib.asynccontextmanager
    async def bar(self, label: str, progress: LoadProgress, total: int) -> AsyncIterator[None]:
        """A bar for as long as a run lasts."""
        if not self._live:
            yield
            return
        bar = self._bars.add_task(label, total=total, live="")
        drawing = asyncio.create_task(self._draw(bar, progress))
        try:
            yield
        finally:
            drawing.cancel()
            self._bars.remove_task(bar)
            self._bars.refresh()

    async def _draw(self, bar: TaskID, progress: LoadProgress) -> None:
        start_s = time.monotonic()
        while True:
            await asyncio.sleep(_REDRAW_S)
            live = live_figures(progress, time.monotonic() - start_s)
            self._bars.update(bar, completed=progress.ended, live=live, refresh=True)


def live_figures(progress: LoadProgress, elapsed_s: float) -> str:
    """A run so far, in a few words."""
    parts = [
        f"{progress.in_flight:,} in flight",
        f"{progress.output_tokens / elapsed_s:,.0f} tok/s",
    ]
    if progress.failed:
        parts.append(f"{progress.failed:,} failed")
    return ", ".join(parts)
