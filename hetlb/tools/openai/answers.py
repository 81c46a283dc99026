"""The shapes of OpenAI's answers, whole and streamed: for completions and for chat."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from hetlb.errors import NOT_JSON

#: Ends a stream of server-sent events.
DONE: Final = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def event(body: dict[str, Any], name: str = "") -> bytes:
    """Return one server-sent event, named if a name is given."""
    data = b"data: %b\n\n" % _encode(body)
    return b"event: %b\n%b" % (name.encode(), data) if name else data


def model_list(
    names: Sequence[str], owner: str, root: str, created: int, max_model_len: int
) -> dict[str, Any]:
    common = {"object": "model", "created": created, "owned_by": owner, "root": root, "parent": None}
    cards = [{"id": name, **common, "max_model_len": max_model_len} for name in names]
    return {"object": "list", "data": cards}


class Envelope:
    """Fields that all pieces of one answer share."""

    def __init__(self, request_id: str, model: str, *, chat: bool) -> None:
        self.chat = chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"
        self.model = model
        self.created = int(time.time())

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return self._body("chat.completion" if self.chat else "text_completion", choices, usage)

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._body("chat.completion.chunk" if self.chat else "text_completion", choices, usage)

    def _body(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        body = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if usage is not None:
            body["usage"] = usage
        return body

    def choice(
        self, index: int, text: str | dict[str, Any], finish: str | None, *, streamed: bool, **more: Any
    ) -> dict[str, Any]:
        """Return one choice of a piece. `text` may be the fields of a message or of a delta."""
        found: dict[str, Any] = {"index": index}
        if not self.chat:
            found["text"] = text
        elif streamed:
            found["delta"] = {"content": text} if isinstance(text, str) else text
        else:
            message = {"content": text} if isinstance(text, str) else text
            found["message"] = {"role": "assistant"} | message
        return found | {"logprobs": None, "finish_reason": finish} | more

    def role(self, index: int) -> dict[str, Any]:
        return self.choice(index, {"role": "assistant", "content": ""}, None, streamed=True)


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
