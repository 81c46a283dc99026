"""The terminal that commands print to: texts of others hold no markup, their control characters are seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from hetlb.errors import visible_lines


class Console(rich.console.Console):
    """A console without markup and codes of emojis."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"markup": False, "emoji": False} | options))

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        """Return the segments of what is printed; of a text's control characters only line ends stay."""
        for segment in super().render(*args, **kwargs):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                yield Segment(visible_lines(segment.text), segment.style)
