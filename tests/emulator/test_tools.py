"""Tool calls, reasoning and Anthropic's messages: complete, counted, the same streamed as whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from emulator.wire import Response, ask
from hypothesis import given
from hypothesis import strategies as st

from hetlb.emulator import EmulatedEngine
from hetlb.emulator.tools import ToolCall, example

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
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


# --- messages ----------------------------------------------------------------------------------------------


def message(content: Any = "Hello", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 40, "messages": [{"role": "user", "content": content}], **more}


ANTHROPIC_TOOL = {"name": "weather", "input_schema": SCHEMA}
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def named_events(response: Response) -> list[dict[str, Any]]:
    """The events of a stream; every one is named as its type says."""
    found = []
    for block in response.body.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def message_of_stream(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events make, block by block."""
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    found = {**events[0]["message"]}
    blocks: list[dict[str, Any]] = []
    partial = ""
    for event in events[1:-1]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"]})
            partial = ""
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                partial += delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                blocks[-1][key] = blocks[-1].get(key, "") + delta[key]
        elif event["type"] == "content_block_stop":
            assert event["index"] == len(blocks) - 1
            if partial:
                blocks[-1]["input"] = json.loads(partial)
        else:
            assert event["type"] == "message_delta"
            found |= {"stop_reason": event["delta"]["stop_reason"], "usage": event["usage"]}
    found["content"] = blocks
    return found


@pytest.mark.parametrize("more", [{}, THINKING], ids=["text", "thinking"])
@pytest.mark.parametrize("tools", [{}, {"tools": [ANTHROPIC_TOOL]}], ids=["text", "call"])
async def test_a_streamed_message_is_the_whole_one(
    engine: EmulatedEngine, more: dict[str, Any], tools: dict[str, Any]
) -> None:
    headers = {"x-request-id": "r1"}
    body = message(**more, **tools)
    whole = (await ask(engine.url, "POST", MESSAGES, body, headers)).json
    response = await ask(engine.url, "POST", MESSAGES, {**body, "stream": True}, headers)
    streamed = message_of_stream(named_events(response))
    assert streamed.pop("stop_sequence") is None
    assert streamed == whole
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking"] * bool(more) + ["tool_use" if tools else "text"]


async def test_messages_end_by_themselves_below_their_cap(engine: EmulatedEngine) -> None:
    """The cap is mandatory there, so it says nothing of the length."""
    answer = (await ask(engine.url, "POST", MESSAGES, message(max_tokens=5000))).json
    assert answer["stop_reason"] == "end_turn"
    assert answer["usage"]["output_tokens"] < 5000
    short = (await ask(engine.url, "POST", MESSAGES, message(max_tokens=2))).json
    assert (short["stop_reason"], short["usage"]["output_tokens"]) == ("max_tokens", 2)


async def test_the_loop_of_an_agent_ends_with_messages_too(engine: EmulatedEngine) -> None:
    body = message(system="Be brief.", tools=[ANTHROPIC_TOOL], tool_choice={"type": "auto"})
    answer = (await ask(engine.url, "POST", MESSAGES, body)).json
    [use] = answer["content"]
    assert (answer["stop_reason"], use["name"], use["input"]) == ("tool_use", "weather", ARGUMENTS)
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "sunny"}]}
    body["messages"] += [
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result]},
    ]
    after = (await ask(engine.url, "POST", MESSAGES, body)).json
    assert [block["type"] for block in after["content"]] == ["text"]
    assert after["usage"]["input_tokens"] > answer["usage"]["input_tokens"]


async def test_a_call_that_a_message_names_is_made(engine: EmulatedEngine) -> None:
    choice = {"type": "tool", "name": "weather"}
    answer = (
        await ask(engine.url, "POST", MESSAGES, message(tools=[ANTHROPIC_TOOL], tool_choice=choice))
    ).json
    assert (answer["stop_reason"], answer["content"][0]["type"]) == ("tool_use", "tool_use")


async def test_tokens_of_a_message_are_counted_as_they_are_charged(engine: EmulatedEngine) -> None:
    body = message("How many?" * 20, system="Be brief.", tools=[ANTHROPIC_TOOL])
    charged = (await ask(engine.url, "POST", MESSAGES, body)).json["usage"]["input_tokens"]
    del body["max_tokens"]
    counted = (await ask(engine.url, "POST", f"{MESSAGES}/count_tokens", body)).json
    assert counted["input_tokens"] == charged > 40


async def test_errors_of_messages_have_the_form_of_anthropic(engine: EmulatedEngine) -> None:
    for body, status, kind in (
        ({"model": "tiny", "messages": []}, 400, "BadRequestError"),
        ({**message(), "max_tokens": 0}, 400, "BadRequestError"),
        ({**message(), "model": "x"}, 404, "NotFoundError"),
    ):
        answer = await ask(engine.url, "POST", MESSAGES, body)
        assert answer.status == status
        assert answer.json["type"] == "error"
        assert answer.json["error"]["type"] == kind
