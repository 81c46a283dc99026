"""Answers of an OpenAI-compatible server as a client reads them: whole, or as server-sent events."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from hetlb.errors import NOT_JSON


class _Text(msgspec.Struct, gc=False):
    """A `delta` or a `message`."""

    content: str | list[Any] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class AnswerChoice(msgspec.Struct, gc=False):
    """One choice of an answer or an event."""

    index: int = 0
    text: str | None = None
    delta: _Text | None = None
    message: _Text | None = None
    finish_reason: str | None = None

    @property
    def says_something(self) -> bool:
        """True if it has text: reasoning and tool calls are some, a role or "" is none."""
        if self.text:
            return True
        part = self.delta or self.message
        return part is not None and bool(
            part.content or part.reasoning or part.reasoning_content or part.tool_calls
        )


class AnswerUsage(msgspec.Struct, gc=False):
    """Token counts of the server."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class AnswerEvent(msgspec.Struct, gc=False):
    """An event of a stream, or an answer that came whole."""

    choices: list[AnswerChoice] | None = None
    data: list[msgspec.Raw] | None = None
    usage: AnswerUsage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(AnswerEvent).decode


class AnswerError(Exception):
    """A server's bytes that are no answer. `kind` names them in a few words."""

    def __init__(self, kind: str, detail: object = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.detail = str(detail)[:500]


def read_answer(payload: bytes) -> AnswerEvent:
    """Return one event or a whole answer. Raises `AnswerError`."""
    try:
        event = _decode(payload)
    except NOT_JSON as error:
        raise AnswerError("malformed answer", f"{error}: {payload[:200]!r}") from None
    if event.error is not None:
        raise AnswerError("error event", event.error)
    return event


#: Maximum bytes of an incomplete event.
MAX_EVENT_BYTES: Final = 16 << 20


class EventReader:
    """Server-sent events, one line of data each (as every OpenAI-compatible server sends them)."""

    __slots__ = ("_rest", "begun", "done")

    def __init__(self) -> None:
        self._rest = bytearray()
        self.begun = self.done = False

    def feed(self, data: bytes) -> list[AnswerEvent]:
        """Return the events that these bytes complete. Raises `AnswerError` on one of an error or no JSON."""
        end = data.rfind(b"\n")
        if end < 0:
            self._rest += data
            if len(self._rest) > MAX_EVENT_BYTES:
                raise AnswerError("malformed answer", f"an event of more than {MAX_EVENT_BYTES} bytes")
            return []
        whole = bytes(self._rest) + data[:end]
        self._rest = bytearray(data[end + 1 :])
        events = []
        for line in whole.split(b"\n"):
            if line[:5] == b"data:":  # else blank lines between events, comments, names of events
                self.begun, payload = True, line[5:].strip()
                if payload == b"[DONE]":
                    self.done = True
                else:
                    events.append(read_answer(payload))
        return events
