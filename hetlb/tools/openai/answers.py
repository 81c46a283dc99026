"""The shapes of OpenAI's answers, whole and streamed: for completions and for chat."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

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
