"""Lines to a file descriptor without ever blocking the event loop: the request log and the event log.

Promise: a line costs the caller an append; a thread of its own writes them, a few times a second. A reader
that is slow or gone loses lines (they are counted), never a request.
"""

from __future__ import annotations

import asyncio
import os
import queue
import re
import threading

_UNSAFE = re.compile(r"[^!-~]|[\"\\=]")
_FLUSH_S = 0.2
#: Batches that may wait for a slow reader.
_MAX_BATCHES = 500


def escape(text: str) -> str:
    """Text from outside as one safe word: other than visible ASCII, quotes, `=` and `\\` become `%xx`."""
    return _UNSAFE.sub(lambda match: "".join(f"%{byte:02x}" for byte in match[0].encode()), text) or "-"


class LineWriter:
    """Collects lines on the event loop and hands them to a writing thread."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._batches: queue.Queue[bytes | None] = queue.Queue(_MAX_BATCHES)
        self.lost = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queue one line (with its newline). On the event loop only."""
        self._lines.append(line)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self.flush)

    def flush(self) -> None:
        """Hand what is queued to the thread."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            self._batches.put_nowait("".join(lines).encode())
        except queue.Full:
            self.lost += len(lines)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is left, for at most `timeout_s`."""
        self.flush()
        try:
            self._batches.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            data = memoryview(batch)
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:
                self.lost += batch.count(b"\n")
