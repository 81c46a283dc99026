"""Text of files of requests and of logs, packed by gzip or not: read in lines, so that memory has a bound."""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from hetlb.errors import TraceError
from hetlb.files import MAX_BYTES, content, reader, size_of, text_of

#: Default of `--max-input-mib`.
DEFAULT_MIB: Final = 1024
#: Bytes of the limit that a value takes at least: as many as in memory.
VALUE_BYTES: Final = 64
_PIECE_BYTES: Final = 1 << 20
#: Packed bytes given to zlib at once: what a short member leaves of them is copied.
_GIVEN_BYTES: Final = 16 << 10
#: The limit in bytes of this run.
_limit = [DEFAULT_MIB << 20]


def set_limit(mib: int) -> None:
    _limit[0] = mib << 20


def max_input_bytes() -> int:
    """Return the limit of this run."""
    return _limit[0]


def unpacked(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of a file in pieces, of a gzip file unpacked. Raises `zlib.error`, `EOFError`."""
    given = file.read(_GIVEN_BYTES)
    if not given.startswith(b"\x1f\x8b"):
        while given:
            yield given
            given = file.read(_PIECE_BYTES)
    while given:
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            piece = member.decompress(given, _PIECE_BYTES)
            if not piece and not given and not member.eof:
                raise EOFError("it ends in the middle")
            given = (member.unused_data if member.eof else member.unconsumed_tail) or file.read(_GIVEN_BYTES)
            yield piece
        while given and not (given := given.lstrip(b"\0")):  # padding
            given = file.read(_GIVEN_BYTES)


class TextLines(Iterator[str]):
    """Lines of a file without their ends, each of at most `most` characters.

    Reading raises `TraceError` of a file that is no text, is broken or has more than `limit` bytes.
    """

    def __init__(self, path: Path, file: BinaryIO, most: int, limit: float) -> None:
        self.most = most
        self._path, self._file = path, file
        self._left_bytes, self._left_values = limit, limit / VALUE_BYTES
        self._pieces: Iterator[str] = self._texts()
        self._lines = self._read()

    def head(self) -> str:
        """Return the first character that is no blank, "" if there is none near the begin."""
        begun = ""
        for text in self._pieces:
            begun += text
            if len(begun) > _PIECE_BYTES or not begun.isspace():
                break
        self._pieces = itertools.chain((begun,), self._pieces)
        return begun.lstrip()[:1]

    def __next__(self) -> str:
        return next(self._lines)

    def rest(self) -> str:
        """Return all that was not read yet."""
        return "\n".join(self._lines)

    def count(self, values: int) -> None:
        """Count values against the limit of the file."""
        self._left_values -= values
        if self._left_values < 0:
            raise self._above(f"{_limit[0] // VALUE_BYTES:,} values")

    def _above(self, most: str) -> TraceError:
        return TraceError(f"{self._path}: expected at most {most} (--max-input-mib), got more")

    def _read(self) -> Iterator[str]:
        """Yield the lines."""
        held, characters, number = list[str](), 0, 0
        for text in self._pieces:
            parts = text.split("\n")
            for each in parts[:-1]:
                number += 1
                line = "".join([*held, each]) if held else each
                held, characters = [], 0
                self._check(len(line), number)
                yield line
            if parts[-1]:
                held.append(parts[-1])
                characters += len(parts[-1])
                self._check(characters, number + 1)
        if held:
            yield "".join(held)

    def _check(self, characters: int, number: int) -> None:
        if characters > self.most:
            most = f"a line of at most {size_of(self.most)}"
            raise TraceError(f"{self._path}: line {number}: expected {most}, got a longer one")

    def _texts(self) -> Iterator[str]:
        """Yield the text in pieces."""
        decode, begin = codecs.getincrementaldecoder("utf-8-sig")().decode, b""
        try:
            for piece in unpacked(self._file):
                begin = begin or piece[:4]
                self._left_bytes -= len(piece)
                if self._left_bytes < 0:
                    raise self._above(f"{_limit[0] >> 20} MiB")
                yield decode(piece)
            yield decode(b"", final=True)
        except UnicodeDecodeError as caught:
            text_of(self._path, begin + b" " + caught.object[caught.start :], TraceError)
        except (EOFError, zlib.error) as caught:
            raise TraceError(f"{self._path}: expected a whole gzip file: {caught}") from caught


@contextlib.contextmanager
def text_lines(path: Path, most: int = MAX_BYTES, *, endless: bool = False) -> Iterator[TextLines]:
    """Open a file, or a pipe of the command line; only an `endless` one may exceed the limit of this run.

    Raises `TraceError`.
    """
    try:
        # What a pipe gave is kept: some commands read their requests twice.
        whole = not (endless or path.is_file())
        with io.BytesIO(content(path, _limit[0])) if whole else reader(path) as file:
            yield TextLines(path, file, most, math.inf if endless else _limit[0])
    except FileNotFoundError as caught:
        raise TraceError(f"{path}: no such file") from caught
    except OSError as caught:
        raise TraceError(f"{path}: expected a readable file: {caught.strerror}") from caught


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file of requests with their numbers, but blank ones. Raises `TraceError`."""
    with text_lines(path) as lines:
        yield from ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
