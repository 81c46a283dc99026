"""Output files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from hetlb.errors import ConfigError, InputError


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to, of the same suffix; what is there at the end of the block replaces `path`.

    Where the block fails `path` stays as it was. A device or a pipe is written to itself. Raises `OSError`.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        yield target
        return
    scratch = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        yield scratch
        scratch.replace(target)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()


def write_text(path: Path, text: str, error: type[InputError] = ConfigError) -> None:
    """Write a text file. Raises `error` naming the path."""
    try:
        with whole_file(path) as scratch:
            scratch.write_text(text, encoding="utf-8")
    except OSError as caught:
        raise error(f"{path}: expected a place to write to: {caught.strerror}") from caught
