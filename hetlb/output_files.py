"""Files of results and logs: paths checked before the work, files replaced whole, pipes not waited for."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from hetlb.errors import ConfigError, InputError


def output_path(text: str | Path, flag: str) -> Path:
    """Return the path of a result that can be written. Raises `InputError` naming the flag."""
    path = Path(text)
    target = Path(os.path.realpath(path))  # of links that lead in a circle too
    if not target.parent.is_dir() or target.is_dir():
        raise InputError(f"{flag}: expected a file in a folder that exists, got {path}")
    replaced = target.is_file() or not target.exists()  # devices and pipes are written directly
    if not os.access(target.parent if replaced else target, os.W_OK):
        raise InputError(f"{flag}: expected a file that can be written, got {path}")
    return path


def fleet_path(text: str) -> Path:
    """Return the value of `--write-fleet`. Raises `InputError`."""
    return output_path(text, "--write-fleet")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Scratch path with the same suffix that replaces `path` at the end of the block.

    If the block fails, `path` is unchanged. Devices and pipes are written directly. Raises `OSError`.
    """
    target = Path(os.path.realpath(path))  # of links that lead in a circle too
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


def opened_log(path: Path) -> int:
    """Open a log, emptied, and return its descriptor; it may be a pipe with a reader. Raises `OSError`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOCTTY
    try:
        # A pipe that has no reader would keep the start waiting for one.
        found = os.open(path, flags | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno == errno.ENXIO:
            error.strerror = "nothing reads this pipe"
        raise
    os.set_blocking(found, True)
    return found
