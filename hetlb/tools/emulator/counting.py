"""The emulated model: tokens without a tokenizer, lengths of answers, tool calls, reasoning.

4 bytes of text count as a token. The length of an answer follows from its prompt. The model calls the first
tool (or the one that `tool_choice` names) in answer to a user, and answers in text once it has a tool's
result, so that the loop of an agent ends. `reasoning_effort` and `chat_template_kwargs.enable_thinking` make
it reason first.
"""

from __future__ import annotations

import math
import zlib
from statistics import NormalDist
from typing import Any

import msgspec

from hetlb.tools.openai.requests import ChatRequest, bad, message_text

#: Size of the largest vocabulary of models in common use: ids from here on are out of it.
VOCABULARY_TOKENS = 262_144
BYTES_PER_TOKEN = 4
#: Token ids from here on are of answers: the one that stands for the last has this id, the one before it one
#: more, and so on; in an answer without an end of its own each has this id.
FIRST_ANSWER_ID = 196_608
#: Tokens that a chat template adds to a message.
TOKENS_PER_MESSAGE = 4
#: Answers without `max_tokens` end by themselves: log-normal lengths, mean about 220 tokens.
ANSWER_SIGMA = 0.8
ANSWER_MU = math.log(220) - ANSWER_SIGMA**2 / 2

_NORMAL = NormalDist()


def count_text(text: str) -> int:
    """Return the tokens of a text: one per 4 bytes of UTF-8, at least one."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return max(1, -(-size // BYTES_PER_TOKEN))


def token_ids(text: str) -> list[int]:
    """Make as many token ids as `count_text` counts, the same ones for the same text."""
    data = text.encode("utf-8", "surrogatepass")
    pieces = [data[at : at + BYTES_PER_TOKEN] for at in range(0, len(data), BYTES_PER_TOKEN)] or [b""]
    return [zlib.crc32(piece) % FIRST_ANSWER_ID for piece in pieces]


def text_seed(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def answer_length(seed: int, index: int) -> int:
    """Return the length of an answer that no limit cuts: deterministic, log-normal, at least one token."""
    uniform = (zlib.crc32(b"%d/%d" % (seed, index)) + 0.5) / 2**32
    return max(1, round(math.exp(ANSWER_MU + ANSWER_SIGMA * _NORMAL.inv_cdf(uniform))))


def chat_text(messages: list[dict[str, Any]]) -> tuple[str, int]:
    """Return the text of a conversation and its token count. Raises `ApiError` for a malformed message."""
    parts: list[str] = []
    tokens = 0
    for message in messages:
        if "role" not in message:
            raise bad("Expected a role in every message.", "messages")
        text = message_text(message)
        parts.append(text)
        tokens += TOKENS_PER_MESSAGE + count_text(text)
    return "\n".join(parts), tokens


#: Share of reasoning in an answer's tokens, by `reasoning_effort`.
_EFFORTS = {"none": 0.0, "minimal": 0.0, "low": 0.25, "medium": 0.5, "high": 0.75}
_THINKING_SHARE = 0.5
#: Tokens of reasoning before a tool call.
REASONING_BEFORE_CALL = 16
#: Objects within objects of a schema that get arguments.
_MAX_DEPTH = 8
#: Items of an array at most.
_MAX_ITEMS = 4
_EXAMPLES: dict[str, Any] = {"string": "t0", "integer": 0, "number": 0, "boolean": False, "null": None}


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call. `forced`: the request named the tool, so that vLLM's finish_reason stays "stop"."""

    name: str
    arguments: str
    forced: bool = False

    @property
    def tokens(self) -> int:
        """Output tokens: one for the name, then the arguments."""
        return 1 + -(-len(self.arguments) // BYTES_PER_TOKEN)

    def piece(self, number: int) -> str:
        """Return the part of the arguments that token `number` brings; token 0 brings the name."""
        return self.arguments[(number - 1) * BYTES_PER_TOKEN : number * BYTES_PER_TOKEN] if number else ""


def tool_call(fields: ChatRequest) -> ToolCall | None:
    """Return the call that answers a chat request; None if it answers in text. Raises `ApiError`."""
    choice = fields.tool_choice
    if not fields.tools:
        if choice not in (None, "none", "auto"):
            raise bad("When using `tool_choice`, `tools` must be set.", "tool_choice")
        return None
    functions = _functions(fields.tools)
    if choice == "none":
        return None
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if name not in functions:
            raise bad("`tool_choice` does not match any of the specified `tools`.", "tool_choice")
        return ToolCall(name=name, arguments=_arguments(functions[name]), forced=True)
    if choice not in (None, "auto", "required"):
        raise bad(f"Invalid value for `tool_choice`: {choice}!", "tool_choice")
    if choice != "required" and fields.messages[-1].get("role") != "user":
        return None
    name, schema = next(iter(functions.items()))
    return ToolCall(name=name, arguments=_arguments(schema))


def _functions(tools: list[dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad("Expected a function with a name in every tool.", "tools")
        found[function["name"]] = function.get("parameters")
    return found


def _arguments(schema: object) -> str:
    value = example(schema)
    return msgspec.json.encode(value if isinstance(value, dict) else {}).decode()


def example(schema: object, depth: int = 0) -> Any:
    """Return the least value that an everyday JSON schema accepts: required properties, first choices."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return {}
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        if isinstance(schema.get(key), list) and schema[key]:
            return schema[key][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return example(schema[key][0], depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0] if kind else None
    if kind == "array":
        count = schema.get("minItems")
        return [example(schema.get("items"), depth + 1)] * (
            min(count, _MAX_ITEMS) if isinstance(count, int) else 0
        )
    if isinstance(kind, str) and kind in _EXAMPLES:
        return _EXAMPLES[kind]
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    return {name: example(properties.get(name), depth + 1) for name in required if isinstance(name, str)}


def reasoning_share(fields: ChatRequest) -> float:
    if fields.reasoning_effort is not None:
        return _EFFORTS[fields.reasoning_effort]
    thinks = (fields.chat_template_kwargs or {}).get("enable_thinking") is True
    return _THINKING_SHARE if thinks else 0.0
