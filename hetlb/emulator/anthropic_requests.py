"""Requests of Anthropic's Messages API, read as the chat requests that vLLM makes of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hetlb.openai.requests import ChatRequest

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


def chat_request(asked: MessagesRequest) -> ChatRequest:
    """The chat request for one of `/v1/messages`."""
    messages = [{"role": "system", "content": _text(asked.system)}] if asked.system is not None else []
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


def _text(content: object) -> str:
    """The text of a string or of the text blocks of a list."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    texts = (block.get("text") for block in blocks if isinstance(block, dict))
    return "".join(text for text in texts if isinstance(text, str))


def _chat_messages(message: _Message) -> list[dict[str, Any]]:
    """A message and, as messages of their own, the results of tools in it."""
    content = message.content
    blocks = [each for each in content if isinstance(each, dict)] if isinstance(content, list) else []
    found = [
        {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _text(block.get("content"))}
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    text = _text(content)
    uses = [
        msgspec.json.encode(each.get("input")).decode() for each in blocks if each.get("type") == "tool_use"
    ]
    if text or uses or not found:
        found.insert(0, {"role": message.role, "content": text + "".join(uses)})
    return found
