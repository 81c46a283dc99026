"""Files checked for changes every `poll_s`: a network file system reports none."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from hetlb.files import content

#: Seconds between a change and the read of a file.
_SETTLED_S: Final = 0.05
#: Seconds between two reads of a file with the same time, size and inode: it may be written in place.
_CONTENT_S: Final = 3.0
#: Largest file read for that, bytes.
_MAX_CONTENT_BYTES: Final = 16 << 20
#: Files: path, time of change (ns), size, inode and digest of the content of each.
Stamp: TypeAlias = tuple[tuple[str, tuple[int, int, int], bytes], ...]


class FileStates:
    """States of files and of the YAML files in folders; an unchanged content is read every `_CONTENT_S`."""

    def __init__(self) -> None:
        #: By path: time, size and inode, the time of the last read, and the digest.
        self._digests: dict[str, tuple[tuple[int, int, int], float, bytes]] = {}

    def of(self, paths: Iterable[Path]) -> Stamp:
        """Return the states; reads files."""
        known, self._digests = self._digests, {}
        found: list[tuple[str, tuple[int, int, int], bytes]] = []
        for path in paths:
            for each in files_of(path):
                with contextlib.suppress(OSError):
                    name, status, now = str(each), each.stat(), time.monotonic()
                    state = status.st_mtime_ns, status.st_size, status.st_ino
                    before, read_at, digest = known.get(name, (None, 0.0, b""))
                    if before != state or now - read_at >= _CONTENT_S:
                        read_at, digest = now, _digest(each)
                    self._digests[name] = state, read_at, digest
                    found.append((name, state, digest))
        return tuple(found)


def _digest(path: Path) -> bytes:
    """Return the digest of a file's content, empty if it cannot be read."""
    try:
        return hashlib.blake2b(content(path, _MAX_CONTENT_BYTES), digest_size=16).digest()
    except OSError:
        return b""


def files_of(path: Path) -> list[Path]:
    """Return a file, or the files of a folder; names that begin with a dot are still being written."""
    if not path.is_dir():
        return [path]
    names = sorted(each for each in path.iterdir() if each.suffix in (".yaml", ".yml"))
    return [each for each in names if not each.name.startswith(".")]


async def changes(paths: Sequence[Path], poll_s: float) -> AsyncIterator[Stamp]:
    """Yield the state of the files at the beginning and after every change."""
    states, last = FileStates(), None
    while True:
        now = await asyncio.to_thread(states.of, paths)
        if now == last:
            await asyncio.sleep(poll_s)
            continue
        if last is not None:  # an editor writes in several steps
            await asyncio.sleep(_SETTLED_S)
            now = await asyncio.to_thread(states.of, paths)
        last = now
        yield now


class SeenFiles:
    """States of the files that a fleet names, from just before they were read.

    A file behind a link changes with the file that the link leads to, as when Kubernetes swaps a volume.
    """

    def __init__(self, named: Sequence[Path]) -> None:
        self._files = FileStates()
        self._named = tuple(named)
        self._state = self._files.of(named)

    def before_reading(self) -> None:
        """Look at the files that the fleet names until now; reads them."""
        self._state = self._files.of(self._named)

    def after_reading(self, named: Sequence[Path]) -> None:
        """Look at the files that the fleet names from now on and did not name before; reads them."""
        before, known = {each[0]: each for each in self._state}, {str(path) for path in self._named}
        self._named = tuple(named)
        # A file that came during the reading is no part of the state: it is a change.
        now = [before.get(each[0], each) for each in self._files.of(named)]
        self._state = tuple(each for each in now if each[0] in before or each[0] not in known)

    async def changes(self, poll_s: float) -> AsyncIterator[None]:
        """Yield each time a file has changed, came or went; the receiver reads them again."""
        while True:
            await asyncio.sleep(poll_s)
            if await asyncio.to_thread(self._files.of, self._named) != self._state:
                await asyncio.sleep(_SETTLED_S)  # an editor writes in several steps
                yield
