"""Bodies hold prompts of exact length that share no beginning, and say how long the answer shall be."""

from __future__ import annotations

import json
import random
from typing import Any

from hetlb.loadtest.bodies import TOKEN_IDS, CompletionBodies
from hetlb.workload.arrivals import PlannedRequest

PLAN = [PlannedRequest(i, 0.0, 1 + 37 * i % 900, i % 5) for i in range(300)]


def bodies(seed: int = 1, **options: Any) -> list[dict[str, Any]]:
    made = CompletionBodies("m", PLAN, random.Random(seed), **options)
    return [json.loads(made.body(planned)) for planned in PLAN]


def test_prompts_are_exact_and_share_no_beginning() -> None:
    prompts = [body["prompt"] for body in bodies()]
    assert [len(prompt) for prompt in prompts] == [planned.prompt_tokens for planned in PLAN]
    assert all(token in TOKEN_IDS for prompt in prompts for token in prompt)
    beginnings = [tuple(prompt[:5]) for prompt in prompts if len(prompt) >= 5]
    assert len(set(beginnings)) == len(beginnings)


def test_the_seed_decides_the_prompts() -> None:
    assert bodies(1) == bodies(1)
    one, two = ([body["prompt"][:5] for body in bodies(seed)] for seed in (1, 2))
    assert not {tuple(p) for p in one if len(p) == 5} & {tuple(p) for p in two if len(p) == 5}


def test_the_length_of_an_answer_by_ignoring_eos() -> None:
    body = bodies()[3]
    assert (body["ignore_eos"], body["max_tokens"]) == (True, 3)
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert bodies()[0]["max_tokens"] == 1  # a trace may say 0, a server cannot


def test_the_length_of_an_answer_hidden_from_routers() -> None:
    """Every request looks the same but for its prompt and where the emulated model stops."""
    made = bodies(eos_max_tokens=200)
    assert {body["max_tokens"] for body in made} == {200}
    assert [body["vllm_xargs"] for body in made[:3]] == [{"output_tokens": n} for n in (1, 1, 2)]
    assert not any("ignore_eos" in body for body in made)


def test_plain_requests_ask_for_no_stream_options() -> None:
    body = bodies(stream=False)[0]
    assert body["stream"] is False
    assert "stream_options" not in body


def test_a_part_of_a_plan_has_its_own_lengths() -> None:
    made = CompletionBodies("m", PLAN[1::2], random.Random(1))
    assert len(json.loads(made.body(PLAN[299]))["prompt"]) == PLAN[299].prompt_tokens


def test_an_empty_plan_has_no_bodies() -> None:
    CompletionBodies("m", [], random.Random(0))
