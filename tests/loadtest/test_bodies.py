"""Prompts have their length to the token and share exactly what their rows say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hetlb.tools.emulator.counting import VOCABULARY_TOKENS
from hetlb.tools.loadtest.bodies import CHAT, RequestBodies
from hetlb.tools.workload.arrivals import PlannedRequest
from hetlb.tools.workload.chats import estimate_tokens
from hetlb.tools.workload.rows import Row

BLOCK = 8


def plan_of(rows: Sequence[Row]) -> list[PlannedRequest]:
    return [PlannedRequest(i, 0.0, row) for i, row in enumerate(rows)]


def prompts(rows: Sequence[Row], salt: str = "s", *, text: bool = False) -> list[Any]:
    plan = plan_of(rows)
    made = RequestBodies("m", plan, salt, text=text, hash_block_tokens=BLOCK)
    return [json.loads(made.prompt(planned)) for planned in plan]


def shared(one: Sequence[Any], two: Sequence[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


ROWS = st.lists(
    st.builds(
        Row,
        st.none(),
        st.integers(1, 60),
        st.integers(1, 9),
        st.none(),
        st.sampled_from(["", "a", "b"]),
        st.lists(st.sampled_from("123"), max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=12,
)


@given(ROWS)
def test_prompts_are_exact(rows: list[Row]) -> None:
    for row, ids, text in zip(rows, prompts(rows), prompts(rows, text=True), strict=True):
        assert len(ids) == row.input_tokens
        assert all(0 <= token < VOCABULARY_TOKENS for token in ids)
        assert estimate_tokens(text) == row.input_tokens
    assert prompts(rows) == prompts(rows)


@given(ROWS)
def test_another_salt_shares_nothing(rows: list[Row]) -> None:
    for one, two in zip(prompts(rows, "s"), prompts(rows, "t"), strict=True):
        assert shared(one, two) < 4


def test_unrelated_prompts_begin_differently() -> None:
    rows = [Row(None, 100, 1)] * 2000
    assert len({tuple(prompt[:4]) for prompt in prompts(rows)}) == 2000


def test_turns_of_a_session_begin_alike() -> None:
    rows = [
        Row(None, length, 1, session=name) for length, name in ((30, "a"), (50, "a"), (50, "b"), (50, ""))
    ]
    first, second, other, alone = prompts(rows)
    assert second[:30] == first
    assert max(shared(second, other), shared(second, alone), shared(other, alone)) < 4


def test_blocks_are_the_same_wherever_they_occur() -> None:
    ids = [("1", "2", "3"), ("1", "2", "4"), ("2", "1"), ("1",)]
    rows = [Row(None, length, 1, hash_ids=names) for length, names in zip((24, 20, 12, 30), ids, strict=True)]
    one, two, three, four = prompts(rows)
    assert two[: 2 * BLOCK] == one[: 2 * BLOCK]
    assert shared(one, two) < 2 * BLOCK + 4
    assert three == [*one[BLOCK : 2 * BLOCK], *one[: 12 - BLOCK]]
    assert four[:BLOCK] == one[:BLOCK]
    assert shared(one, four) < BLOCK + 4  # what its blocks do not cover is its own


def test_a_conversation_is_named_and_another_one_in_another_run() -> None:
    rows = [Row(None, 5, 1, session=name) for name in ("a", "b\r\n", "a", "")]
    first, second = (
        [RequestBodies("m", [], salt, session_header="x-session-id").headers(each) for each in plan_of(rows)]
        for salt in "st"
    )
    assert first[0] == first[2]
    assert first[3] == {}
    names = {each["x-session-id"] for each in (*first[:3], *second[:3])}
    assert len(names) == 4
    assert all(name.isalnum() for name in names)


def body(path: str, row: Row, *, ignore_eos: bool = True) -> dict[str, Any]:
    plan = plan_of([row])
    made = RequestBodies("m", plan, "s", endpoint=path, ignore_eos=ignore_eos).body(plan[0])
    document: dict[str, Any] = json.loads(made)
    return document


def test_a_completion() -> None:
    made = body("/v1/completions", Row(None, 5, 0))
    assert len(made.pop("prompt")) == 5
    assert made == {
        "model": "m",
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "max_tokens": 1,  # a trace may say 0, a server cannot
    }
    assert "ignore_eos" not in body("/v1/completions", Row(None, 5, 3), ignore_eos=False)


def test_a_chat_with_the_text_of_a_row() -> None:
    made = body(CHAT, Row(None, 5, 3, text='Say "ä"\n'))
    assert made["messages"] == [{"role": "user", "content": 'Say "ä"\n'}]
    assert made["max_completion_tokens"] == 3
    (message,) = body(CHAT, Row(None, 5, 3))["messages"]
    assert estimate_tokens(message["content"]) == 5


def test_several_prompts_begin_alike_where_the_row_says_so_and_nowhere_else() -> None:
    row = Row(None, 30, 4, hash_ids=("head=20",), sequences=3, n=2, tenant="acme")
    made = body("/v1/completions", row)
    assert (made["n"], made["temperature"]) == (2, 1)
    assert made["user"] == "acme"
    assert [len(prompt) for prompt in made["prompt"]] == [30, 30, 30]
    first, second, third = made["prompt"]
    assert first[:20] == second[:20] == third[:20]
    assert max(shared(first[20:], second[20:]), shared(second[20:], third[20:])) < 4


def test_inputs_of_an_embedding() -> None:
    row = Row(None, 12, 0, sequences=5, endpoint="embeddings")
    plan = [planned] = plan_of([row])
    bodies = RequestBodies("m", plan, "s")
    assert bodies.path(planned) == "/v1/embeddings"
    assert not bodies.streams(planned)
    made = json.loads(bodies.body(planned))
    assert made.keys() == {"model", "input"}
    assert [len(each) for each in made["input"]] == [12] * 5


def test_an_adapter_is_asked_for_as_a_model() -> None:
    bodies = RequestBodies("m", [], "s")
    for adapter, model in (("", "m"), ("lora", "lora")):
        for endpoint in ("completions", "embeddings"):
            planned = PlannedRequest(0, 0.0, Row(None, 1, 1, endpoint=endpoint, adapter=adapter))
            assert json.loads(bodies.body(planned))["model"] == model


def test_a_tenant_and_a_conversation_have_their_headers() -> None:
    rows = [Row(None, 5, 1, session="s", tenant="acme"), Row(None, 5, 1)]
    named = RequestBodies("m", [], "salt", session_header="x-session-id", tenant_header="x-tenant")
    first, second = (named.headers(planned) for planned in plan_of(rows))
    assert first["x-tenant"] == "acme"
    assert first.keys() == {"x-session-id", "x-tenant"}
    assert second == {}


def test_the_length_of_an_answer_hidden_from_routers() -> None:
    """Every request looks the same but for its prompt and where the emulated model stops."""
    plan = plan_of([Row(None, 5, output) for output in (0, 1, 2)])
    bodies = RequestBodies("m", plan, "s", eos_max_tokens=200)
    made = [json.loads(bodies.body(planned)) for planned in plan]
    assert {body["max_tokens"] for body in made} == {200}
    assert [body["vllm_xargs"] for body in made] == [{"output_tokens": n} for n in (1, 1, 2)]
    assert not any("ignore_eos" in body for body in made)


def test_plain_requests_ask_for_no_stream_options() -> None:
    (planned,) = plan = plan_of([Row(None, 5, 3)])
    body = json.loads(RequestBodies("m", plan, "s", stream=False).body(planned))
    assert body["stream"] is False
    assert "stream_options" not in body


def test_a_part_of_a_plan_has_its_own_lengths() -> None:
    plan = plan_of([Row(None, 1 + 37 * i % 900, 1) for i in range(300)])
    made = RequestBodies("m", plan[1::2], "s").body(plan[299])
    assert len(json.loads(made)["prompt"]) == plan[299].prompt_tokens
