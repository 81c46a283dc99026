"""The one way to a user's file: regular and of bounded size, or one line that says what it is instead.

A pipe of the command line is read once, to its end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from hetlb.errors import InputError

#: Largest file read whole if the reader states no other size, bytes.
MAX_BYTES: Final = 64 << 20
_PIECE_BYTES: Final = 1 << 20
#: Largest content of a pipe kept for a second read, bytes.
_MAX_KEPT_BYTES: Final = 8 << 20
_KINDS: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
#: Paths of the command line. Beside a pipe is its content once it was read: a second read would wait.
_given: dict[Path, bytes | None] = {}


#: First bytes of files taken for text; expected text, its present form, and the next step.
_NO_TEXT: Final = (
    (b"\x1f\x8b", "text, got a gzip file: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "text, got a Zstandard file: unpack it first"),
    (b"PK\x03\x04", "text, got a zip archive: unpack it first (of a spreadsheet: save it as CSV)"),
    (b"PAR1", "text, got a Parquet file: write it as JSON lines first"),
    ((b"\xff\xfe", b"\xfe\xff"), "UTF-8 text, got UTF-16: save it as UTF-8"),
)


def read_text(path: Path, error: type[InputError], most_bytes: int = MAX_BYTES) -> str:
    """Read a text file. Raises `error` if it is unreadable, too large or not UTF-8."""
    return text_of(path, read_bytes(path, error, most_bytes), error)


def read_bytes(path: Path, error: type[InputError], most_bytes: int = MAX_BYTES) -> bytes:
    """Read a file. Raises `error` if it is unreadable or too large."""
    try:
        return content(path, most_bytes)
    except FileNotFoundError as caught:
        raise error(f"{path}: no such file") from caught
    except OSError as caught:
        raise error(f"{path}: expected a readable file: {caught.strerror}") from caught


def content(path: Path, most_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes of a file. Raises `OSError`, also if there are more than `most_bytes`."""
    if (kept := _given.get(path)) is not None:
        return kept
    with reader(path) as file:
        status = os.fstat(file.fileno())
        if status.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"larger than {size_of(most_bytes)}", str(path))
        # A file of /proc has no size, and a log may grow during the read.
        data = file.read(min(status.st_size, most_bytes) + 1)
        while data and len(data) <= most_bytes and (more := file.read(min(_PIECE_BYTES, most_bytes))):
            data += more
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {size_of(most_bytes)}", str(path))
    if not stat.S_ISREG(status.st_mode):
        _given[path] = data if len(data) <= _MAX_KEPT_BYTES else None
    return data


def reader(path: Path) -> BinaryIO:
    """Open a regular file, or a pipe of the command line, for reading. Raises `OSError`."""
    where = Path("/dev/stdin") if path in _given and str(path) == "-" else path
    if path in _given and not stat.S_ISREG(mode := os.stat(where).st_mode) and not stat.S_ISDIR(mode):
        own = re.fullmatch(r"/dev/stdin|/(?:dev|proc/self)/fd/([0-9]{1,9})", str(where))
        # A socket cannot be opened by its name.
        found = os.open(where, os.O_RDONLY | os.O_CLOEXEC) if own is None else os.dup(int(own[1] or 0))
    else:
        found = opened(where)
    return os.fdopen(found, "rb")


def opened(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor; never waits. Raises `OSError` for anything else."""
    with contextlib.suppress(FileNotFoundError):
        # The opening alone would rewind a tape, or tell the writer of a pipe that it has a reader.
        _check_regular(os.stat(path).st_mode, path)
    found = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o644)
    try:
        _check_regular(os.fstat(found).st_mode, path)
    except OSError:
        os.close(found)
        raise
    return found


@contextlib.contextmanager
def readable_name(path: Path) -> Iterator[str]:
    """Name under which a library can open a file that `content` has read. Raises `OSError`."""
    data = content(path)
    with os.fdopen(os.memfd_create(path.name[:200]), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def expect_pipes(paths: Iterable[Path]) -> None:
    """Take the paths of a command line: only there a pipe is a file, as in `--config <(envsubst < f)`."""
    _given.clear()
    _given.update(dict.fromkeys(paths))


def _check_regular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "of another kind")
        raise OSError(errno.EINVAL, f"not a regular file but {kind}", str(path))


def size_of(count: int) -> str:
    """Return a number of bytes in words."""
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def text_of(path: Path, data: bytes, error: type[InputError]) -> str:
    """Return the text that a file's bytes are. Raises `error`."""
    if kind := next((kind for begin, kind in _NO_TEXT if data.startswith(begin)), None):
        raise error(f"{path}: expected {kind}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as caught:
        raise error(f"{path}: expected UTF-8 text, got byte {caught.object[caught.start]:#04x}") from caught
