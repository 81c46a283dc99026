"""Logs: events as lines, and lines to a file descriptor without ever blocking the event loop.

A line costs the caller an append; a thread of its own writes them, a few times a second. A reader
that is slow or gone loses lines (they are counted), never a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

_UNSAFE = re.compile(r"[^!-~]|[\"\\=]")
_SAFE = re.compile(r"[!#-<>-\[\]-~]+")


def escape(text: str) -> str:
    """Return text as one safe word: other than visible ASCII, quotes, `=` and `\\` become `%xx`."""
    if _SAFE.fullmatch(text) is not None:
        return text
    return _UNSAFE.sub(lambda match: "".join(f"%{byte:02x}" for byte in match[0].encode()), text) or "-"


def _time(created: float) -> str:
    return datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds")


class KeyValueFormatter(logging.Formatter):
    """`time=… level=… event=… message="…"`, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and a traceback below it where there is one."""
        parts = [
            f"time={_time(record.created)} level={record.levelname.lower()}",
            f"event={getattr(record, 'event', 'log')} message={_quoted(record.getMessage())}",
            *(f"{name}={_word(value)}" for name, value in getattr(record, "fields", {}).items()),
        ]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """An object per line: `time`, `level`, `event`, `message`, the fields, `traceback` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "time": _time(record.created),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "log"),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(document, enc_hook=str).decode("utf-8", "replace")


#: Writers of events, by the value of `proxy.request_log_format`.
FORMATTERS: Final[dict[str, type[logging.Formatter]]] = {"keyvalue": KeyValueFormatter, "json": JsonFormatter}


def plain_line(message: str, style: str, event: str = "log", level: int = logging.INFO) -> str:
    """Return a line printed and not logged: the words alone, or as `style` json has them an object."""
    if style != "json":
        return message
    fields = {"msg": message, "levelno": level, "levelname": logging.getLevelName(level), "event": event}
    return JsonFormatter().format(logging.makeLogRecord(fields))


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(each if each.isprintable() else "?" for each in escaped) + '"'


def _word(value: object) -> str:
    text = "-" if value is None else str(value)
    return text if text.isprintable() and text and not set(text) & set(' "=\\') else _quoted(text)


_FLUSH_S = 0.2
#: Maximum number of batches that wait for a slow reader.
_MAX_BATCHES = 500


class LogWriter:
    """Collects lines on the event loop and hands them to a writing thread."""

    def __init__(self, fd: int, name: str, at_once: int | None = None) -> None:
        self._fd = fd
        #: Maximum bytes of one write of whole lines where several processes write to `fd`: at most `PIPE_BUF`
        #: bytes stay in one piece.
        self._at_once = at_once
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._batches: queue.Queue[bytes | None] = queue.Queue(_MAX_BATCHES)
        self.lost = 0
        #: Called with the reason why lines were lost, in any thread.
        self.on_lost: Callable[[str], object] = lambda why: None
        #: Line end before the next batch where the last one was cut in a line.
        self._gap = b""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def write(self, *lines: str) -> None:
        self._lines += lines
        if self._timer is None:
            try:
                self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self.flush)
            except RuntimeError:
                self._hand_over()  # before the event loop began, after it, or from another thread

    def flush(self) -> None:
        """Hand the queued lines to the thread. Call it on the event loop, or after the loop has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._hand_over()

    def _hand_over(self) -> None:
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            self._batches.put_nowait("".join(lines).encode())
        except queue.Full:
            self._lose(len(lines), "its reader is too slow")

    def _lose(self, lines: int, why: str) -> None:
        """Count lines that are not written."""
        self.lost += lines
        self.on_lost(why)

    def close(self, timeout_s: float = 2.0) -> None:
        self.flush()
        try:
            self._batches.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                self._write_whole(batch)
            except OSError as error:
                self._lose(batch.count(b"\n"), error.strerror or str(error))

    def _write_whole(self, batch: bytes) -> None:
        """Write a batch to its end. Raises `OSError`."""
        batch = self._gap + batch
        data = memoryview(batch)
        try:
            while data:
                data = data[os.write(self._fd, data[: self._piece(batch, len(data))]) :]
        except OSError:
            self._gap = b"\n" if len(data) < len(batch) else self._gap
            raise
        self._gap = b""

    def _piece(self, batch: bytes, left: int) -> int:
        """Return how many of the `left` bytes to write next: whole lines, `_at_once` bytes at most."""
        if self._at_once is None or left <= self._at_once:
            return left
        start = len(batch) - left
        end = batch.rfind(b"\n", start, start + self._at_once)
        return left if end < 0 else end + 1 - start


_STDERR = 2


class LogHandler(logging.Handler):
    """Python's own log through a `LogWriter`, so that no writer waits for a slow reader."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record as one line or, with a traceback, several."""
        try:
            self._writer.write(self.format(record) + "\n")
        except Exception:  # a log line must not end what it tells of
            self.handleError(record)


@contextlib.contextmanager
def logging_to_stderr(style: str = "keyvalue") -> Iterator[None]:
    """Send events to stderr without ever waiting for the reader; `style` is `proxy.request_log_format`."""
    writer = LogWriter(_STDERR, "log")
    handler = LogHandler(writer)
    handler.setFormatter(FORMATTERS[style]())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        writer.close()
