"""Prefix keys: prompts that begin alike share keys up to where they part, others share none."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy.services import Engine, document, serving

from hetlb.balancer.clients.prompt_keys import id_keys, session_key, text_keys, token_ids
from hetlb.balancer.core.prefix_index import PrefixKey
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.http.openai_body import Call, read_json

SYSTEM = {"role": "system", "content": "You are terse. " * 200}
TOOLS = [
    {"type": "function", "function": {"name": f"f{i}", "description": "does it " * 60}} for i in range(4)
]


def call_of(kind: Kind, **body: Any) -> Call:
    call = read_json(kind, json.dumps({"model": "m", **body}).encode())
    if call.prompt_tokens_total is None:
        call.prompt_tokens_total = max(1, call.text_bytes // 4)
    return call


def keys_of(kind: Kind = Kind.CHAT, model: str = "m", **body: Any) -> tuple[PrefixKey, ...]:
    call = call_of(kind, **body)
    ids = token_ids(call) if call.ids else None
    return id_keys(ids, model, call.cache_salt) if ids else text_keys(call, model)


def shared(first: tuple[PrefixKey, ...], second: tuple[PrefixKey, ...]) -> int:
    """Tokens of the longest beginning that both have a key of."""
    names = {name for name, _ in second}
    return max((tokens or 0 for name, tokens in first if name in names), default=0)


def turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def test_the_next_turn_of_a_chat_begins_with_the_whole_of_the_last() -> None:
    asked = [SYSTEM, turn("user", "What is it? " * 50)]
    first = keys_of(messages=asked, tools=TOOLS)
    second = keys_of(messages=[*asked, turn("assistant", "That."), turn("user", "Why?")], tools=TOOLS)
    assert shared(first, second) == first[-1][1]
    assert abs(first[-1][1] - call_of(Kind.CHAT, messages=asked, tools=TOOLS).text_bytes // 4) <= 2  # type: ignore[operator]


def test_two_chats_share_their_system_prompt_and_tools_to_the_message() -> None:
    ours = keys_of(messages=[SYSTEM, turn("user", "a" * 4000)], tools=TOOLS)
    theirs = keys_of(messages=[SYSTEM, turn("user", "b" * 4000)], tools=TOOLS)
    common = len(json.dumps(TOOLS)) + len(json.dumps([SYSTEM])) - 1
    assert shared(ours, theirs) == pytest.approx(common / 4, abs=3)
    assert shared(ours, keys_of(messages=[SYSTEM, turn("user", "a" * 4000)])) == 0


def test_a_boundary_that_is_quoted_is_none() -> None:
    quoted = '"}, {"role": "user"' * 200
    plain = keys_of(Kind.COMPLETION, prompt="x" * len(json.dumps(quoted)))
    assert [tokens for _, tokens in keys_of(Kind.COMPLETION, prompt=quoted)] == pytest.approx(
        [tokens for _, tokens in plain], abs=1
    )


def test_models_salts_and_kinds_are_kept_apart() -> None:
    prompt = "word " * 2000
    plain = keys_of(Kind.COMPLETION, prompt=prompt)
    assert shared(plain, plain) > 2000
    for other in (
        keys_of(Kind.COMPLETION, model="adapter", prompt=prompt),
        keys_of(Kind.COMPLETION, prompt=prompt, cache_salt="mine"),
        keys_of(Kind.COMPLETION, prompt=[7] * 2500),
    ):
        assert other
        assert shared(plain, other) == 0


def test_short_prompts_have_no_keys() -> None:
    assert keys_of(Kind.COMPLETION, prompt="a" * 1000) == ()
    assert keys_of(Kind.COMPLETION, prompt=[1] * 255) == ()
    assert keys_of(messages=[turn("user", "hi")]) == ()
    assert keys_of(Kind.COMPLETION, prompt=[]) == ()


def test_blanks_between_ids_change_nothing() -> None:
    call = read_json(Kind.COMPLETION, b'{"prompt":[' + b", ".join(b"%d" % i for i in range(600)) + b"]}")
    ids = token_ids(call)
    assert ids is not None
    assert id_keys(ids, "m", None) == keys_of(Kind.COMPLETION, prompt=list(range(600)))


def test_several_prompts_have_the_keys_of_what_all_begin_with() -> None:
    head = "word " * 1000
    alone = keys_of(Kind.COMPLETION, prompt=head + "0")
    several = keys_of(Kind.COMPLETION, prompt=[head + str(i) for i in range(5)])
    assert shared(alone, several) >= 1000
    ids = list(range(1000))
    many = keys_of(Kind.COMPLETION, prompt=[[*ids, 5, 6], [*ids, 7], [*ids]])
    assert many[-1][1] == 1000
    assert shared(keys_of(Kind.COMPLETION, prompt=[*ids, 9]), many) == 768
    assert keys_of(Kind.COMPLETION, prompt=[head, "other"]) == ()


@pytest.mark.parametrize("ids", ["[1,2,3.5]", "[1,[2]]", "[[1],2]", "[123456789012345678901234]", "[[1,2"])
def test_ids_that_are_none_are_for_the_engine_to_refuse(ids: str) -> None:
    call = Call()
    call.ids, call.ids_nested = ids.encode(), ids.startswith("[[")
    assert token_ids(call) is None


@given(
    st.builds(list, st.builds(range, st.integers(256, 5000))),
    st.builds(list, st.builds(range, st.integers(0, 600))),
    st.builds(list, st.builds(range, st.integers(0, 600))),
)
def test_ids_that_begin_alike_share_all_but_an_eighth(head: list[int], a: list[int], b: list[int]) -> None:
    first, second = (keys_of(Kind.COMPLETION, prompt=[*head, *rest]) for rest in ([8, *a], [9, *b]))
    found = shared(first, second)
    assert found <= len(head)
    assert found >= len(head) - max(256, len(head) // 8 + 1)
    assert {name for name, end in first if end <= len(head)} == {  # type: ignore[operator]
        name
        for name, end in second
        if end <= len(head)  # type: ignore[operator]
    }


def test_sessions_are_seen_apart_by_owner_and_model() -> None:
    keys = {session_key(b"s", owner, model) for owner in (None, "ann", "bob") for model in ("m", "n")}
    assert len(keys) == 6
    assert session_key(b"two words", None, "m") is None
    assert session_key(None, None, "m") is None


def test_the_number_of_keys_grows_with_the_logarithm() -> None:
    def count(prompt: list[dict[str, str]]) -> int:
        return len(keys_of(messages=prompt))

    small, large = (count([turn("user", "a" * 10)] * n) for n in (10_000, 80_000))
    assert small <= large <= 96
    assert len(keys_of(Kind.COMPLETION, prompt="a" * (6 << 20))) <= 96


def test_work_is_linear_in_hostile_text() -> None:
    """Repeated near-boundaries: each is looked at once; quadratic work would not end within the timeout."""
    for text in (b"}" + b" " * (1 << 21), b"}," * (1 << 20), b"},{" * (1 << 20), b'","' * (1 << 20)):
        call = Call()
        call.text, call.prompt_tokens_total = b"[" + text, 1 << 19
        assert len(text_keys(call, "m")) <= 96
        call.prompts = 2
        assert len(text_keys(call, "m")) <= 96


async def test_a_body_reaches_the_scheduler_with_its_keys(tmp_path: Any) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        await running.up("i0")
        body = {"model": "m", "prompt": [list(range(500)), [*range(400), 7]], "max_tokens": 1}
        engine.hold()
        async with aiohttp.ClientSession() as session:
            headers = {"x-session-id": "talk"}
            url = f"http://127.0.0.1:{running.port}/v1/completions"
            asked = asyncio.create_task(session.post(url, json=body, headers=headers))
            await engine.asked_for()
            [exchange] = running.service.driver.exchanges.values()
            assert exchange.record.request.prefix_keys[-1][1] == 400
            assert all(name.startswith("ids:") for name, _ in exchange.record.request.prefix_keys)
            engine.released.set()
            async with await asked as reply:
                assert reply.status == 200
