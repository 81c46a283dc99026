"""`POST /v1/messages`: answers of Anthropic's Messages API, as vLLM 0.32 makes them of a chat answer."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from hetlb.emulator.replies import ChatReply, ReplyChoice
from hetlb.openai.answers import event
from hetlb.openai.requests import ApiError

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesReply(ChatReply):
    """One message: blocks of thinking, text and tool use."""

    ALIKE = False
    #: The type of the block that the stream is in, and the number of it.
    _block = ""
    _block_number = -1

    def _usage(self) -> dict[str, int]:
        usage = self.usage
        return {"output_tokens": usage["completion_tokens"], "input_tokens": usage["prompt_tokens"]}

    def _stop_reason(self) -> str:
        [choice] = self.choices
        if self.generation.tool is not None and choice.finish_reason == "stop":
            return "tool_use"  # a call that the request named, too
        return _STOP_REASONS[self.finish_reason(choice)]

    @property
    def _signature(self) -> str:
        return f"{zlib.crc32(self.id.encode()):032x}"

    def body(self) -> dict[str, Any]:
        [choice] = self.choices
        content: list[dict[str, Any]] = []
        if choice.reasoning is not None:
            content.append({"type": "thinking", "thinking": choice.reasoning, "signature": self._signature})
        if (tool := self.generation.tool) is None:
            content.append({"type": "text", "text": choice.content})
        elif choice.finish_reason == "stop":
            given = msgspec.json.decode(tool.arguments)
            content.append(
                {"type": "tool_use", "id": self.call_id(choice), "name": tool.name, "input": given}
            )
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content or [{"type": "text", "text": ""}],
            "model": self.generation.model,
            "stop_reason": self._stop_reason(),
            "usage": self._usage(),
        }

    # --- streams ---

    def opening(self) -> list[bytes]:
        message: dict[str, Any] = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self.generation.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        return [_event({"type": "message_start", "message": message})]

    def event(self, choice: ReplyChoice, text: str, *, last: bool = False) -> bytes:
        number = choice.sent - 1 - choice.reasoning_tokens
        tool = self.generation.tool
        if number < 0:
            return self._enter({"type": "thinking", "thinking": ""}) + self._delta_event(
                {"type": "thinking_delta", "thinking": text}
            )
        if tool is None:
            return self._enter({"type": "text", "text": ""}) + self._delta_event(
                {"type": "text_delta", "text": text}
            )
        if number == 0:
            return self._enter(
                {"type": "tool_use", "id": self.call_id(choice), "name": tool.name, "input": {}}
            )
        return self._delta_event({"type": "input_json_delta", "partial_json": tool.piece(number)})

    def _enter(self, block: dict[str, Any]) -> bytes:
        """Begin a block of this type, unless the stream is in one."""
        if self._block == block["type"]:
            return b""
        left = self._leave()
        self._block, self._block_number = block["type"], self._block_number + 1
        return left + _event(
            {"type": "content_block_start", "content_block": block, "index": self._block_number}
        )

    def _leave(self) -> bytes:
        """End the block that the stream is in."""
        if not self._block:
            return b""
        signature = (
            self._delta_event({"type": "signature_delta", "signature": self._signature})
            if self._block == "thinking"
            else b""
        )
        self._block = ""
        return signature + _event({"type": "content_block_stop", "index": self._block_number})

    def _delta_event(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "delta": delta, "index": self._block_number})

    def closing(self) -> list[bytes]:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": None}
        end = _event({"type": "message_delta", "delta": delta, "usage": self._usage()})
        return [self._leave() + end + _event({"type": "message_stop"})]


def _event(fields: dict[str, Any]) -> bytes:
    return event(fields, fields["type"])


def anthropic_error(error: ApiError) -> bytes:
    """The JSON of an error in Anthropic's form."""
    return msgspec.json.encode({"type": "error", "error": {"type": error.kind, "message": error.message}})
