"""Samples on disk as they are measured, so that an interrupted sweep goes on where it was.

A half-written last line is dropped. A file of another server, model or version is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from hetlb.errors import ProfileError
from hetlb.files import content, opened
from hetlb.tools.profiler.grid import Size


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identity of a file's server and settings: all of it must be the same to go on."""

    model: str
    engine_version: str | None
    kv_cache_tokens: int | None
    max_model_len: int | None
    max_num_seqs: int | None
    journal: int = 2


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measurement. `iterations` of a prefill: iterations with the end of a prompt, None if not counted.

    Without `seconds` the point was given up, for the `reason`.
    """

    size: Size
    seconds: float | None = None
    iterations: int | None = None
    reason: str | None = None


class SampleFile:
    """The samples of one sweep, read from the file and added."""

    def __init__(self, path: Path, identity: Identity) -> None:
        """Open or make the file. Raises `ProfileError` if it is another sweep's."""
        self.path = path
        self.samples: list[Sample] = []
        try:
            found = path.exists()
            kept = self._read(identity) if found else 0
            self._file: BinaryIO = os.fdopen(opened(path, os.O_RDWR | os.O_CREAT), "r+b")
            if not found:
                self._write(identity)
            else:
                self._file.truncate(kept)
                self._file.seek(kept)
        except OSError as error:
            raise ProfileError(f"{path}: expected a place to keep samples: {error.strerror}") from error

    def add(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self._write(sample)
            self.samples.append(sample)

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """Remove the samples: the profile is written, and has them."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _write(self, what: msgspec.Struct) -> None:
        self._file.write(msgspec.json.encode(what) + b"\n")
        self._file.flush()

    def _read(self, identity: Identity) -> int:
        """Read the file; returns how many bytes of it are whole lines."""
        text = content(self.path)
        lines = text.splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        try:
            found = msgspec.json.decode(lines[0], type=Identity)
            self.samples = [msgspec.json.decode(line, type=Sample) for line in lines[1:]]
        except (IndexError, msgspec.DecodeError) as error:
            raise ProfileError(
                f"{self.path}: expected samples of an interrupted sweep (delete it to start anew): {error}"
            ) from error
        for key in Identity.__struct_fields__:
            old, new = getattr(found, key), getattr(identity, key)
            if old != new:
                raise ProfileError(
                    f"{self.path}: {key}: expected the server that the sweep was begun on, with {old}, "
                    f"got one with {new} (delete it to start anew)"
                )
        return sum(map(len, lines))
