"""Tables for a terminal, and the bar that says how far a search is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


def table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table; a column whose name begins with `>` is of numbers and stands to the right."""
    found = Table(title=title, title_justify="left")
    for column in columns:
        found.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    for row in rows:
        found.add_row(*row)
    return found


@contextmanager
def bar(words: str) -> Iterator[Callable[..., Any]]:
    """A bar on a terminal's stderr, nothing elsewhere; call what it gives with new words or figures."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task(words, total=None)
        yield lambda **changes: progress.update(task, **changes)
