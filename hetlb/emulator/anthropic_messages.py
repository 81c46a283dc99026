"""`POST /v1/messages` of Anthropic's API, read as vLLM 0.32 reads it: as a chat request; and its answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hetlb.emulator.generation import Generation, Reader
from hetlb.emulator.replies import ChatReply, ReplyChoice
from hetlb.openai.answers import event
from hetlb.openai.requests import ApiError, ChatRequest, message_text, read

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Any] | None = None


class _Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any] | None = None


class _Choice(msgspec.Struct):
    type: str = ""
    name: str | None = None


class _Thinking(msgspec.Struct):
    type: str = ""


class MessagesRequest(msgspec.Struct, kw_only=True):
    """The body of `/v1/messages`."""

    model: str
    messages: list[_Message]
    max_tokens: Annotated[int, Meta(ge=1)]
    system: str | list[Any] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    stream: bool | None = False
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    vllm_xargs: dict[str, Any] | None = None


def read_message(reader: Reader, body: bytes) -> Generation:
    """The request as vLLM serves it: as a chat.

    The answer may end before `max_tokens`, which is mandatory there and says nothing.
    """
    generation = reader.of_chat(chat_request(read(body, MessagesRequest)))
    generation.draws = generation.draws or generation.stops_after is None
    return generation


def prompt_tokens(reader: Reader, body: bytes) -> int:
    """Tokens of the prompt, for `/v1/messages/count_tokens`."""
    fields = read(body, dict[str, Any])
    [prompt] = reader.of_chat(chat_request(read({"max_tokens": 1} | fields, MessagesRequest))).prompts
    return prompt.tokens


def chat_request(asked: MessagesRequest) -> ChatRequest:
    """The chat request for one of `/v1/messages`."""
    messages = (
        [{"role": "system", "content": message_text({"content": asked.system})}]
        if asked.system is not None
        else []
    )
    for message in asked.messages:
        messages += _chat_messages(message)
    tools = [
        {"type": "function", "function": {"name": each.name, "parameters": each.input_schema}}
        for each in asked.tools or ()
    ]
    choice: str | dict[str, Any] | None = None
    if asked.tool_choice is not None:
        named = {"type": "function", "function": {"name": asked.tool_choice.name}}
        choice = _TOOL_CHOICES.get(asked.tool_choice.type, named)
    thinks = asked.thinking is not None and asked.thinking.type in ("enabled", "adaptive")
    return ChatRequest(
        model=asked.model,
        messages=messages,
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        stream=asked.stream,
        vllm_xargs=asked.vllm_xargs,
        tools=tools or None,
        tool_choice=choice,
        chat_template_kwargs={"enable_thinking": True} if thinks else None,
    )


def _chat_messages(message: _Message) -> list[dict[str, Any]]:
    """A message and, as messages of their own, the results of tools in it."""
    content = message.content
    blocks = [each for each in content if isinstance(each, dict)] if isinstance(content, list) else []
    found = [
        {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": message_text(block)}
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    text = message_text({"content": content})
    uses = [
        msgspec.json.encode(each.get("input")).decode() for each in blocks if each.get("type") == "tool_use"
    ]
    if text or uses or not found:
        found.insert(0, {"role": message.role, "content": text + "".join(uses)})
    return found


# --- answers ---------------------------------------------------------------------------------------------

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesReply(ChatReply):
    """One message: blocks of thinking, text and tool use."""

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

    def body(self) -> dict[str, Any]:
        [choice] = self.choices
        content: list[dict[str, Any]] = []
        if choice.reasoning is not None:
            content.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
        if (tool := self.generation.tool) is None:
            content.append({"type": "text", "text": choice.content})
        elif choice.finish_reason == "stop":
            given = msgspec.json.decode(tool.arguments)
            content.append(
                {"type": "tool_use", "id": self.call_id(choice), "name": tool.name, "input": given}
            )
        return self._message(content or [{"type": "text", "text": ""}], self._stop_reason())

    def _message(self, content: list[dict[str, Any]], stop_reason: str | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.generation.model,
            "stop_reason": stop_reason,
            "usage": self._usage(),
        }

    # --- streams ---

    def opening(self) -> list[bytes]:
        message = self._message([], None) | {"stop_sequence": None}
        return [_event({"type": "message_start", "message": message})]

    def event(self, choice: ReplyChoice, text: str, *, last: bool = False) -> bytes:
        number = choice.sent - 1 - choice.reasoning_tokens
        tool = self.generation.tool
        if number < 0:
            return self._enter({"type": "thinking", "thinking": "", "signature": ""}) + self._delta_event(
                {"type": "thinking_delta", "thinking": text}
            )
        if tool is None:
            begun = self._enter({"type": "text", "text": ""})
            return begun + self._delta_event({"type": "text_delta", "text": text})
        if number == 0:
            call = {"type": "tool_use", "id": self.call_id(choice), "name": tool.name, "input": {}}
            return self._enter(call)
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
            self._delta_event({"type": "signature_delta", "signature": ""})
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
    return msgspec.json.encode({"type": "error", "error": {"type": error.kind, "message": error.message}})
