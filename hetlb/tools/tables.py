"""Tables and progress bars for terminals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hetlb.tools.console import Console


def table(
    title: str | None, columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], **look: Any
) -> Table:
    """Create a table; columns whose name begins with `>` are right-aligned. `look`: options of `Table`."""
    found = Table(title=title, title_justify="left", **look)
    for column in columns:
        found.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    for row in rows:
        found.add_row(*row)
    return found


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
