"""Answers of an OpenAI-compatible server, read into a record: bytes and the time they came in.

A token has come when text has: events with only a role, empty text or usage never stop the TTFT
clock; reasoning and tool calls are text. Token counts are the server's own where it sends `usage`, else
events with text are counted. Time is stamped by the caller before anything here is parsed.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from hetlb.workload.records import RequestResult


class _Text(msgspec.Struct, gc=False):
    """A `delta` or a `message`."""

    content: str | list[Any] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    text: str | None = None
    delta: _Text | None = None
    message: _Text | None = None

    @property
    def says_something(self) -> bool:
        if self.text:
            return True
        part = self.delta or self.message
        return part is not None and bool(
            part.content or part.reasoning or part.reasoning_content or part.tool_calls
        )


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    data: list[msgspec.Raw] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class AnswerError(Exception):
    """The server sent something that is no answer. The first words of `str()` name the kind."""

    def __init__(self, kind: str, detail: object = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.detail = str(detail)[:500]


class StreamReader:
    """Server-sent events, one line of data each (as every OpenAI-compatible server sends them)."""

    __slots__ = ("_last_s", "_record", "_rest", "_usage", "done", "tokens")

    def __init__(self, record: RequestResult) -> None:
        self._record = record
        self._rest = b""
        self._usage: _Usage | None = None
        self.done = False
        #: Events with text so far.
        self.tokens = 0
        #: Time of the last text of each choice, seconds.
        self._last_s: dict[int, float] = {}
        record.itl_s = array("d")

    def feed(self, data: bytes, now_s: float) -> int:
        """Take what was read at `now_s`; returns how many events with text it completed.

        Raises `AnswerError` on an error event or on what is not JSON.
        """
        if self._rest:
            data = self._rest + data
        lines = data.split(b"\n")
        self._rest = lines.pop()
        before = self.tokens
        for line in lines:
            if line[:5] != b"data:":
                continue  # blank lines between events, comments, names of events
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.done = True
                continue
            event = _read(payload)
            for choice in event.choices or ():
                if choice.says_something:
                    self._token(choice.index, now_s)
            if event.usage is not None:
                self._usage = event.usage
        return self.tokens - before

    def _token(self, index: int, now_s: float) -> None:
        record, before_s = self._record, self._last_s.get(index)
        if before_s is not None:
            record.itl_s.append(now_s - before_s)  # type: ignore[union-attr]
        elif record.first_token_s is None:
            record.first_token_s = now_s
        self._last_s[index] = record.last_token_s = now_s
        self.tokens += 1

    def close(self, now_s: float) -> None:
        """The body has ended at `now_s`. Raises `AnswerError` where the stream has not."""
        record = self._record
        _count(record, self._usage, self.tokens)
        if not self.done:
            raise AnswerError("broken stream", "the body ended without [DONE]")
        if record.last_token_s is None:
            record.last_token_s = now_s  # the model ended at once: an answer without text


def read_plain(body: bytes, record: RequestResult, now_s: float) -> None:
    """An answer that came whole at `now_s`. Raises `AnswerError`."""
    event = _read(body)
    if not event.choices and not event.data:
        raise AnswerError("malformed answer", "neither choices nor data")
    _count(record, event.usage, 0)
    record.last_token_s = now_s


def _read(payload: bytes) -> _Event:
    try:
        event = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AnswerError("malformed answer", f"{error}: {payload[:200]!r}") from None
    if event.error is not None:
        raise AnswerError("error event", event.error)
    return event


def _count(record: RequestResult, usage: _Usage | None, tokens: int) -> None:
    record.output_tokens = tokens
    if usage is not None:
        if usage.completion_tokens is not None:
            record.output_tokens = usage.completion_tokens
        if usage.prompt_tokens is not None:
            record.prompt_tokens = usage.prompt_tokens
