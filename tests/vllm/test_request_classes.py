"""The gate against vLLM's own request classes, on bodies that are drawn from them: no server, no model."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from engines import VENV_PYTHON
from forks import answered

from hetlb.balancer.http.endpoints import ENDPOINTS
from hetlb.balancer.http.http1 import GateError
from hetlb.balancer.http.openai_body import Call, read_json

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
BODIES = 2000
#: Fields that the gate reads: of these it says the same as vLLM.
READ = ("stream", "n", "max_tokens", "max_completion_tokens", "max_output_tokens", "priority", "model")
#: Tokens beyond which no engine could go: vLLM's classes take the number, its servers do not.
MOST_TOKENS = 1 << 31


@pytest.fixture(scope="module")
def judged() -> list[dict[str, Any]]:
    if not VENV_PYTHON.is_file():
        pytest.skip("there is no .venv-vllm: run tests/vllm/install.sh first")
    return [json.loads(line) for line in answered("judge_bodies.py", str(BODIES), "7").splitlines()]


def _cap(read: dict[str, Any]) -> int | None:
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    return next((read[name] for name in names if read[name] is not None), None)


def _call(each: dict[str, Any]) -> Call | str:
    try:
        return read_json(ENDPOINTS[each["path"]], each["body"].encode())
    except GateError as error:
        return error.message


def test_a_body_is_refused_only_where_vllm_refuses_it(judged: list[dict[str, Any]]) -> None:
    refused = [(each, call) for each in judged if isinstance(call := _call(each), str)]
    wrong = [
        (call, each["body"])
        for each, call in refused
        if each["read"] and (_cap(each["read"]) or 0) < MOST_TOKENS
    ]
    assert wrong == []
    assert len(refused) > 50


def test_of_a_field_that_is_read_the_gate_says_what_vllm_says(judged: list[dict[str, Any]]) -> None:
    """Null and 0 are the exceptions: vLLM's classes differ in them, and each engine decides."""
    wrong = [
        (each["where"], each["body"])
        for each in judged
        if not isinstance(_call(each), str) and each["read"] is None
        for name in each["where"]
        if name in READ and json.loads(each["body"]).get(name) not in (None, 0, False)
    ]
    assert wrong == []


def test_what_both_take_they_read_alike(judged: list[dict[str, Any]]) -> None:
    seen: Counter[str] = Counter()
    for each in judged:
        call, read = _call(each), each["read"]
        if isinstance(call, str) or read is None:
            continue
        assert (call.model, call.stream) == (read["model"], bool(read["stream"])), each["body"]
        assert call.priority == max(-(1 << 31), min(1 << 31, read["priority"] or 0)), each["body"]
        cap = _cap(read)
        if call.max_tokens is not None or each["path"] != "/v1/completions":  # 16 is vLLM's own limit there
            assert call.max_tokens == (1 if cap == 0 else cap), each["body"]
        if read["n"] is not None:
            best_of = json.loads(each["body"]).get("best_of")
            assert call.n == read["n"] or best_of is not None, each["body"]
        seen[each["path"]] += 1
    assert len(seen) == 8
    assert sum(seen.values()) > BODIES / 3
