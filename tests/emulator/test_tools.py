"""Tool calls, reasoning and Anthropic's messages: complete, counted, the same streamed as whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from emulator.wire import ask
from hypothesis import given
from hypothesis import strategies as st

from hetlb.tools.emulator import EmulatedEngine
from hetlb.tools.emulator.counting import ToolCall, example

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer"},
        "note": {"type": "string"},
    },
    "required": ["city", "unit", "days"],
}
ARGUMENTS = {"city": "t0", "unit": "C", "days": 0}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "other"}}


def chat(*, tools: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], **more}
    return body if tools is None else {**body, "tools": tools}


def of_stream(events: list[Any]) -> dict[str, Any]:
    """The message that the deltas of a chat stream add up to."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish_reason": None}
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else ():
            delta = choice["delta"]
            found["content"] += delta.get("content") or ""
            found["reasoning"] += delta.get("reasoning") or ""
            found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
            for call in delta.get("tool_calls", ()):
                kept = found["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                kept["name"] += call["function"].get("name") or ""
                kept["arguments"] += call["function"]["arguments"]
    return found


def of_answer(answer: dict[str, Any]) -> dict[str, Any]:
    [choice] = answer["choices"]
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning": message["reasoning"] or "",
        "calls": {
            number: {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            for number, call in enumerate(message.get("tool_calls", ()))
        },
        "finish_reason": choice["finish_reason"],
    }


@pytest.mark.parametrize("max_tokens", [1, 2, 8, 17, 200])
@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}], ids=["text", "call"])
@pytest.mark.parametrize("effort", ["none", "low", "high"])
async def test_a_stream_adds_up_to_the_whole_answer(
    engine: EmulatedEngine, effort: str, more: dict[str, Any], max_tokens: int
) -> None:
    body = chat(**more, reasoning_effort=effort, max_tokens=max_tokens)
    whole = (await ask(engine.url, "POST", CHAT, body)).json
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = (await ask(engine.url, "POST", CHAT, {**body, **options})).events
    assert of_stream(events) == of_answer(whole)
    assert events[-2]["usage"] == {
        key: whole["usage"][key] for key in ("prompt_tokens", "total_tokens", "completion_tokens")
    }


async def test_reasoning_is_a_part_of_the_answer_and_is_counted(engine: EmulatedEngine) -> None:
    answer = (await ask(engine.url, "POST", CHAT, chat(reasoning_effort="medium", max_tokens=10))).json
    assert of_answer(answer)["reasoning"] == " t0 t1 t2 t3 t4"
    assert of_answer(answer)["content"] == " t5 t6 t7 t8 t9"
    assert answer["usage"]["completion_tokens"] == 10


async def test_the_loop_of_an_agent_ends(engine: EmulatedEngine) -> None:
    """A user gets a call, the tool's result gets an answer in text."""
    body = chat(tools=[TOOL, OTHER])
    answer = (await ask(engine.url, "POST", CHAT, body)).json
    [choice] = answer["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    body["messages"] += [
        choice["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    after = of_answer((await ask(engine.url, "POST", CHAT, {**body, "max_tokens": 5})).json)
    assert (after["content"], after["calls"], after["finish_reason"]) == (" t0 t1 t2 t3 t4", {}, "length")


@pytest.mark.parametrize(
    ("choice", "name", "reason"),
    [
        ("auto", "weather", "tool_calls"),
        ("required", "weather", "tool_calls"),
        ({"type": "function", "function": {"name": "other"}}, "other", "stop"),
    ],
)
async def test_what_the_request_says_of_tools_is_done(
    engine: EmulatedEngine, choice: object, name: str, reason: str
) -> None:
    body = chat(tools=[TOOL, OTHER], tool_choice=choice)
    answer = of_answer((await ask(engine.url, "POST", CHAT, body)).json)
    assert (answer["calls"][0]["name"], answer["finish_reason"]) == (name, reason)
    body["tool_choice"] = "none"
    assert of_answer((await ask(engine.url, "POST", CHAT, {**body, "max_tokens": 3})).json)["calls"] == {}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tool_choice": "required"}, "`tools` must be set"),
        ({"tools": "x"}, "`$.tools`"),
        ({"tools": [{"type": "function"}]}, "a function with a name"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "x"}}}, "does not match any"),
        ({"tools": [TOOL], "tool_choice": "perhaps"}, "Invalid value for `tool_choice`"),
        ({"reasoning_effort": "huge"}, "`$.reasoning_effort`"),
    ],
)
async def test_wrong_tools_are_refused(engine: EmulatedEngine, more: dict[str, Any], message: str) -> None:
    response = await ask(engine.url, "POST", CHAT, {**chat(), **more})
    assert response.status == 400
    assert message in response.json["error"]["message"]


@given(st.text(max_size=40), st.integers(0, 60))
def test_the_pieces_of_a_call_are_its_arguments(arguments: str, more: int) -> None:
    call = ToolCall(name="f", arguments=arguments)
    assert "".join(call.piece(number) for number in range(call.tokens + more)) == arguments


SCHEMAS = st.recursive(
    st.sampled_from(["string", "integer", "number", "boolean", "null"]).map(lambda kind: {"type": kind})
    | st.sampled_from([{"enum": [3, 4]}, {"const": "x"}, {}]),
    lambda inner: (
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(
            lambda fields: {"type": "object", "properties": fields, "required": list(fields)}
        )
        | inner.map(lambda item: {"type": "array", "items": item, "minItems": 1})
        | inner.map(lambda item: {"anyOf": [item]})
    ),
    max_leaves=8,
)
PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None),
    "object": dict, "array": list,
}  # fmt: skip


def accepts(schema: dict[str, Any], value: Any) -> bool:
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    if "anyOf" in schema:
        return accepts(schema["anyOf"][0], value)
    if "type" not in schema:
        return True
    if not isinstance(value, PYTHON_TYPES[schema["type"]]):
        return False
    if schema["type"] == "object":
        return all(
            name in value and accepts(schema["properties"][name], value[name]) for name in schema["required"]
        )
    if schema["type"] == "array":
        return len(value) >= schema["minItems"] and all(accepts(schema["items"], each) for each in value)
    return True


@given(SCHEMAS)
def test_arguments_are_what_the_schema_accepts(schema: dict[str, Any]) -> None:
    assert accepts(schema, example(schema))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=5))
def test_what_is_no_schema_gives_a_value_all_the_same(schema: Any) -> None:
    for key in ("type", "enum", "anyOf", "properties", "required", "items", "minItems"):
        json.dumps(example({key: schema}))
