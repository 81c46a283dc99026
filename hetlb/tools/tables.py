"""Consoles, tables, progress bars and the state of long commands for terminals."""

from __future__ import annotations

import asyncio
import contextlib
import string
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import rich.console
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table

from hetlb.errors import visible
from hetlb.tasks import end


def visible_lines(text: str) -> str:
    """Return a text of others as `visible`, on its own lines."""
    return "\n".join(map(visible, text.split("\n")))


class Console(rich.console.Console):
    """A console that shows texts of others: no markup, and control characters as escapes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"markup": False, "emoji": False} | options))

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        """Return the segments of what is printed; of a text's control characters only line ends stay."""
        for segment in super().render(*args, **kwargs):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                yield Segment(visible_lines(segment.text), segment.style)


def table(
    title: str | None, columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], **look: Any
) -> Table:
    """Create a table; columns named `>...` are right-aligned. `look`: options of `Table`."""
    found = Table(title=title, title_justify="left", **look)
    for column in columns:
        found.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    for row in rows:
        found.add_row(*row)
    return found


class _Cells(string.Formatter):
    """Formats of cells: null is empty; an object counts and keys, a list its one value or all; `G`: 10^9."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return ""
        if isinstance(value, dict):
            return " + ".join(f"{count} {name}" for name, count in value.items())
        if isinstance(value, list):
            return str(value[0]) if len(set(value)) == 1 else ",".join(map(str, value))
        return format(value / 1e9 if format_spec[:1] == "G" else value, format_spec.removeprefix("G"))


def document_table(title: str, columns: str, rows: Iterable[Mapping[str, Any]]) -> Table:
    """Create a table of objects. Columns with the formats of their cells: `name={key}|>share={share:.1%}`.

    A row with `bold` is shown so.
    """
    names, formats = zip(*(each.split("=", 1) for each in columns.split("|")), strict=True)
    found = table(title, names, ())
    for row in rows:
        cells = [_Cells().vformat(each, (), row) for each in formats]
        found.add_row(*cells, style="bold" if row.get("bold") else None)
    return found


def print_report(
    headlines: Iterable[str], tables: Iterable[Table], lines: Iterable[str], commands: Iterable[str]
) -> None:
    """Print a document: headlines, the first one bold; tables with rows; lines; commands to copy."""
    console = Console(highlight=False, soft_wrap=True)
    for number, line in enumerate(headlines):
        console.print(line, style=None if number else "bold")
    for each in tables:
        if each.row_count:
            console.print(each, soft_wrap=False)
    for line in lines:
        console.print(line)
    for command in commands:
        print(visible_lines(command))


@contextmanager
def bar(words: str, console: Console | None = None) -> Iterator[Callable[..., Any]]:
    """Show a progress bar on stderr if it is a terminal; `console` prints above it.

    Gives a function that takes `description`, `completed`, `total` and a `note` shown after the bar.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=8),  # a load test's line fits on 80 columns
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
    )
    console = console or Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=4, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(words, total=None, note="")
        yield lambda **changes: progress.update(task, **changes)


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
        self.tick()

    def plan(self, words: str) -> None:
        """Show a better plan, as soon as the command is a long one."""
        self._best = words
        self.tick()

    def tick(self) -> None:
        """Print the best plan so far, if it is time to."""
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


_REDRAW_S = 0.25


@dataclass(slots=True)
class LoadProgress:
    """Live counts of a run; a display reads them when it likes."""

    sent: int = 0
    completed: int = 0
    failed: int = 0
    output_tokens: int = 0

    @property
    def in_flight(self) -> int:
        return self.sent - self.ended

    @property
    def ended(self) -> int:
        return self.completed + self.failed


class Screen:
    """Progress of the runs of one command: a bar with live figures, on stderr, on a terminal only.

    Without a viewer (no terminal, or `quiet`) nothing is drawn; warnings are always printed. Drawing is cheap
    and rare, as it shares a process with the clock of every request.
    """

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
