"""Anthropic's Messages API: a request read as the chat request that vLLM makes of it, and the answers."""

from __future__ import annotations

from typing import Any

import msgspec

from hetlb.emulator.fields import bad_type

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
#: Fields that mean the same in both.
_SHARED = ("model", "max_tokens", "temperature", "stream", "vllm_xargs", "chat_template_kwargs")


def chat_request(data: dict[str, Any]) -> dict[str, Any]:
    """The body of `/v1/chat/completions` for one of `/v1/messages`. Raises `ApiError`."""
    for key in ("model", "messages", "max_tokens"):
        if key not in data:
            raise bad_type("missing", f"body.{key}", "Field required", data)
    if not isinstance(data["messages"], list):
        raise bad_type("list_type", "body.messages", "Input should be a valid list", data["messages"])
    chat = {key: data[key] for key in _SHARED if key in data}
    if isinstance(limit := data["max_tokens"], int) and limit <= 0:
        raise bad_type("value_error", "body.max_tokens", "Value error, max_tokens must be positive", limit)
    messages: list[dict[str, Any]] = []
    if (system := data.get("system")) is not None:
        messages.append({"role": "system", "content": _text(system)})
    for number, message in enumerate(data["messages"]):
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            where = f"body.messages.{number}.role"
            shown = message.get("role") if isinstance(message, dict) else message
            raise bad_type("literal_error", where, "Input should be 'user', 'assistant' or 'system'", shown)
        messages += _chat_messages(message)
    chat["messages"] = messages
    if (tools := data.get("tools")) is not None:
        if not isinstance(tools, list):
            raise bad_type("list_type", "body.tools", "Input should be a valid list", tools)
        chat["tools"] = [_function(tool, number) for number, tool in enumerate(tools)]
    choice = data.get("tool_choice")
    if isinstance(choice, dict):
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = _TOOL_CHOICES.get(str(choice.get("type")), named)
    thinking = data.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive"):
        chat["chat_template_kwargs"] = {"enable_thinking": True}
    return chat


def _function(tool: object, number: int) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise bad_type("missing", f"body.tools.{number}.name", "Field required", tool)
    function = {"name": tool["name"], "parameters": tool.get("input_schema")}
    return {"type": "function", "function": function}


def _text(content: object) -> str:
    """The text of a string or of the text blocks of a list."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    texts = (block.get("text") for block in blocks if isinstance(block, dict))
    return "".join(text for text in texts if isinstance(text, str))


def _chat_messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A message and, as messages of their own, the results of tools in it."""
    content = message.get("content")
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
        found.insert(0, {"role": message["role"], "content": text + "".join(uses)})
    return found
