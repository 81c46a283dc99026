"""Files that are checked for changes every `poll_s`: a network file system reports none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

#: Seconds between a change and the read of a file.
_SETTLED_S = 0.05
#: One file: its path, time of change (ns), size and inode.
Stamp: TypeAlias = tuple[tuple[str, int, int, int], ...]


def stamp(paths: Sequence[Path]) -> Stamp:
    """Return the state of files and of the YAML files in folders."""
    found: list[tuple[str, int, int, int]] = []
    for path in paths:
        for each in files_of(path):
            with contextlib.suppress(OSError):
                status = each.stat()
                found.append((str(each), status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


def files_of(path: Path) -> list[Path]:
    """Return a file, or the files of a folder; names that begin with a dot are still being written."""
    if not path.is_dir():
        return [path]
    names = sorted(each for each in path.iterdir() if each.suffix in (".yaml", ".yml"))
    return [each for each in names if not each.name.startswith(".")]


async def changes(paths: Sequence[Path], poll_s: float) -> AsyncIterator[Stamp]:
    """Yield the state of the files at the beginning and after every change."""
    last: Stamp | None = None
    while True:
        now = stamp(paths)
        if now == last:
            await asyncio.sleep(poll_s)
            continue
        if last is not None:  # an editor writes in several steps
            await asyncio.sleep(_SETTLED_S)
            now = stamp(paths)
        last = now
        yield now


class SeenFiles:
    """States of the files that a fleet names, from just before they were read.

    A file behind a link changes with the file that the link leads to, as when Kubernetes swaps a volume.
    """

    def __init__(self, named: Sequence[Path]) -> None:
        self._states = _states(named)

    def before_reading(self) -> None:
        """Look at the files that the fleet names until now."""
        self._states = _states(self._states)

    def after_reading(self, named: Sequence[Path]) -> None:
        """Look at the files that the fleet names from now on and did not name before."""
        self._states = _states(named) | {path: self._states[path] for path in named if path in self._states}

    async def changes(self, poll_s: float) -> AsyncIterator[None]:
        """Yield each time a file has changed, came or went; the receiver reads them again."""
        while True:
            await asyncio.sleep(poll_s)
            if _states(self._states) != self._states:
                await asyncio.sleep(_SETTLED_S)  # an editor writes in several steps
                yield


def _states(paths: Iterable[Path]) -> dict[Path, Stamp]:
    return {path: stamp([path]) for path in paths}
