"""Reading of text files with one-line errors, and atomic writing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hetlb.errors import ConfigError, InputError


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Scratch path with the same suffix that replaces `path` at the end of the block.

    If the block fails, `path` is unchanged. Devices and pipes are written directly. Raises `OSError`.
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


#: First bytes of files that are taken for text; expected text, its present form, and the next step.
_NO_TEXT: Final = (
    (b"\x1f\x8b", "text, got a gzip file: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "text, got a Zstandard file: unpack it first"),
    (b"PK\x03\x04", "text, got a zip archive: unpack it first (of a spreadsheet: save it as CSV)"),
    (b"PAR1", "text, got a Parquet file: write it as JSON lines first"),
    ((b"\xff\xfe", b"\xfe\xff"), "UTF-8 text, got UTF-16: save it as UTF-8"),
)


def write_text(path: Path, text: str, error: type[InputError] = ConfigError) -> None:
    """Write a text file. Raises `error` naming the path."""
    try:
        with whole_file(path) as scratch:
            scratch.write_text(text, encoding="utf-8")
    except OSError as caught:
        raise error(f"{path}: expected a place to write to: {caught.strerror}") from caught


def read_text(path: Path, error: type[InputError], most_bytes: int | None = None) -> str:
    """Read a text file. Raises `error` if it is unreadable, too large or not UTF-8."""
    return text_of(path, read_bytes(path, error, most_bytes), error)


def read_bytes(path: Path, error: type[InputError], most_bytes: int | None = None) -> bytes:
    """Read a file. Raises `error` if it is unreadable or too large."""
    try:
        with path.open("rb") as file:
            data = file.read() if most_bytes is None else file.read(most_bytes + 1)
    except OSError as caught:
        raise error(f"{path}: expected a readable file: {os.strerror(caught.errno or 0)}") from caught
    if most_bytes is not None and len(data) > most_bytes:
        raise error(f"{path}: expected at most {most_bytes >> 20} MiB, got more")
    return data


def text_of(path: Path, data: bytes, error: type[InputError]) -> str:
    """Return the text that a file's bytes are. Raises `error`."""
    if kind := next((kind for begin, kind in _NO_TEXT if data.startswith(begin)), None):
        raise error(f"{path}: expected {kind}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as caught:
        raise error(f"{path}: expected UTF-8 text, got byte {caught.object[caught.start]:#04x}") from caught
