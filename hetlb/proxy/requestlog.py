"""Lines to a file descriptor without ever blocking the event loop: the request log and the event log.

Promise: a line costs the caller an append; a thread of its own writes them, a few times a second. A reader
that is slow or gone loses lines (they are counted), never a request. A finished request is one line in every
format, whatever its client called it or asked for.
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
from typing import Protocol

import msgspec

from hetlb.core.types import Lease, Outcome, Request

_UNSAFE = re.compile(r"[^!-~]|[\"\\=]")
_SAFE = re.compile(r"[!#-<>-\[\]-~]+")
#: JSON may hold these as they are, but some readers of lines take them for the end of one.
_LINE_ENDS = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_FLUSH_S = 0.2
#: Batches that may wait for a slow reader.
_MAX_BATCHES = 500


def escape(text: str) -> str:
    """Text from outside as one safe word: other than visible ASCII, quotes, `=` and `\\` become `%xx`."""
    if _SAFE.fullmatch(text) is not None:
        return text
    return _UNSAFE.sub(lambda match: "".join(f"%{byte:02x}" for byte in match[0].encode()), text) or "-"


class Ended(Protocol):
    """What is told of a request that is over. Times in seconds on one clock; `ended_in` names its phase."""

    @property
    def label(self) -> str: ...
    @property
    def tenant(self) -> str | None: ...
    @property
    def path(self) -> str: ...
    @property
    def request(self) -> Request: ...
    @property
    def lease(self) -> Lease | None: ...
    @property
    def outcome(self) -> Outcome | None: ...
    @property
    def ended_in(self) -> str: ...
    @property
    def status(self) -> int: ...
    @property
    def retries(self) -> int: ...
    @property
    def prompt_tokens_used(self) -> int | None: ...
    @property
    def arrived_at(self) -> float: ...
    @property
    def dispatched_at(self) -> float | None: ...
    @property
    def first_byte_at(self) -> float | None: ...
    @property
    def ended_at(self) -> float | None: ...


def keyvalue_line(ended: Ended, _: float = 0.0) -> str:
    """`key=value` words, with a newline. What stands for text of a client has no blank in it."""
    lease, outcome, request = ended.lease, ended.outcome, ended.request
    arrived, first, end = ended.arrived_at, ended.first_byte_at, ended.ended_at
    assert end is not None, "expected a request that is over"
    assert outcome is not None, "expected a request that is over"
    return (
        f"request={escape(ended.label)} tenant={escape(ended.tenant) if ended.tenant else '-'} "
        f"model={escape(request.model)} path={escape(ended.path)} "
        f"instance={lease.instance if lease else '-'} outcome={outcome} "
        f"phase={ended.ended_in} status={ended.status} "
        f"prompt_tokens={ended.prompt_tokens_used or request.prompt_tokens} "
        f"output_tokens={lease.output_tokens if lease else 0} "
        f"predicted_output={lease.predicted_output if lease else 0:.0f} "
        f"queue_s={(end if ended.dispatched_at is None else ended.dispatched_at) - arrived:.4f} "
        f"ttft_s={f'{first - arrived:.4f}' if first is not None else '-'} "
        f"total_s={end - arrived:.4f} retries={ended.retries}\n"
    )


class _Line(msgspec.Struct):
    """The same as a JSON object; null where the words have a `-`."""

    time: str
    request: str
    tenant: str | None
    model: str
    path: str
    instance: str | None
    outcome: str
    phase: str
    status: int
    prompt_tokens: int
    output_tokens: int
    predicted_output: float
    queue_s: float
    ttft_s: float | None
    total_s: float
    retries: int


def json_line(ended: Ended, epoch_s: float) -> str:
    """A JSON object, with a newline; `epoch_s` is the Unix time of second 0 of the request's clock."""
    lease, outcome, request = ended.lease, ended.outcome, ended.request
    arrived, first, end = ended.arrived_at, ended.first_byte_at, ended.ended_at
    assert end is not None, "expected a request that is over"
    assert outcome is not None, "expected a request that is over"
    line = _Line(
        time=datetime.fromtimestamp(epoch_s + end, UTC).isoformat(timespec="milliseconds"),
        request=_whole(ended.label),
        tenant=None if ended.tenant is None else _whole(ended.tenant),
        model=_whole(request.model),
        path=_whole(ended.path),
        instance=lease.instance if lease else None,
        outcome=outcome.value,
        phase=str(ended.ended_in),
        status=ended.status,
        prompt_tokens=ended.prompt_tokens_used or request.prompt_tokens,
        output_tokens=lease.output_tokens if lease else 0,
        predicted_output=round(lease.predicted_output, 1) if lease else 0.0,
        queue_s=round((end if ended.dispatched_at is None else ended.dispatched_at) - arrived, 6),
        ttft_s=None if first is None else round(first - arrived, 6),
        total_s=round(end - arrived, 6),
        retries=ended.retries,
    )
    return msgspec.json.encode(line).decode() + "\n"


#: How a line of the request log is written, by the value of `proxy.request_log_format`.
FORMATS: dict[str, Callable[[Ended, float], str]] = {"keyvalue": keyvalue_line, "json": json_line}


def _whole(text: str) -> str:
    """Text without what is no character and no line end in anybody's eyes, so that it can be encoded."""
    return _LINE_ENDS.sub("\ufffd", text)


class LineWriter:
    """Collects lines on the event loop and hands them to a writing thread."""

    def __init__(self, fd: int, name: str, at_once: int | None = None) -> None:
        self._fd = fd
        #: Whole lines of so many bytes at most are written at once where several processes write to `fd`:
        #: what is no longer than `PIPE_BUF` stays in one piece.
        self._at_once = at_once
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._batches: queue.Queue[bytes | None] = queue.Queue(_MAX_BATCHES)
        self.lost = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queue one line (with its newline)."""
        self._lines.append(line)
        if self._timer is None:
            try:
                self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self.flush)
            except RuntimeError:
                self._hand_over()  # before the event loop began, after it, or from another thread

    def flush(self) -> None:
        """Hand what is queued to the thread. On the event loop, whose timer this ends, or after it."""
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
                    data = data[os.write(self._fd, data[: self._piece(batch, len(data))]) :]
            except OSError:
                self.lost += batch.count(b"\n")

    def _piece(self, batch: bytes, left: int) -> int:
        """How many of the bytes that are left of a batch are written at once."""
        if self._at_once is None or left <= self._at_once:
            return left
        start = len(batch) - left
        end = batch.rfind(b"\n", start, start + self._at_once)
        return left if end < 0 else end + 1 - start


_STDERR = 2


class LineHandler(logging.Handler):
    """Python's own log through a `LineWriter`: who has something to say does not wait for who reads it."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record as one line or, with a traceback, several."""
        try:
            self._writer.write(self.format(record) + "\n")
        except Exception:  # a log line must not end what it tells of
            self.handleError(record)


@contextlib.contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Send what is logged to stderr without ever waiting for who reads it."""
    writer = LineWriter(_STDERR, "log")
    handler = LineHandler(writer)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", handlers=[handler])
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        writer.close()
