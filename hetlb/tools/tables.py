"""Consoles, tables and progress bars for terminals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import rich.console
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table

from hetlb.errors import visible_lines


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
