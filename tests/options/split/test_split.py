"""Prompts read at one emulated engine and answered by another, through a live proxy."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from options.split.split_rig import DEMO, WHOLE, rig, serving
from proxy.test_transfer_fields import PARAMS
from proxy.upstreams import Upstream, Visit, plain

DATA = Path(__file__).parents[2] / "vllm" / "data"


@pytest.mark.parametrize("connector", ["nixl", "nixl-push", "mooncake"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_equals_one_engines_and_its_prompt_is_computed_once(
    tmp_path: Path, connector: str, stream: bool
) -> None:
    async with rig(tmp_path, connector) as fleet:
        for _ in range(5):
            assert await fleet.ask(stream=stream) == (200, WHOLE, "e1", "e0")
        await fleet.idle()
        assert fleet.handovers == {"done": 5}
        kv = fleet.engines["e1"].kv
        assert kv is not None
        assert kv.fetched_tokens >= 5 * 496
        assert fleet.engines["e1"].model.prefilled_tokens <= 5 * 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("connector", ["nixl", "nixl-push"])
async def test_a_chat_is_split(tmp_path: Path, connector: str, stream: bool) -> None:
    messages = [{"role": "user", "content": "a" * 4000}]
    async with rig(tmp_path, connector) as fleet:
        status, got, *names = await fleet.ask("/v1/chat/completions", stream=stream, messages=messages)
        assert (status, got.split()[:3], names) == (200, ["t0", "t1", "t2"], ["e1", "e0"])
        await fleet.idle()


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_response_is_split_and_blocks_are_pushed_to_the_id_in_its_body(
    tmp_path: Path, mode: str
) -> None:
    """vLLM takes the id of a response from the body alone."""
    given = {"do_remote_prefill": True, "remote_host": "h", "remote_port": 1, "transfer_mode": mode}
    first = {"id": "resp_1", "output": [], "kv_transfer_params": given}
    legs: list[tuple[str, dict[str, Any]]] = []

    def engine(answer: bytes) -> Upstream:
        async def script(visit: Visit) -> None:
            path = visit.head.split(b" ")[1].decode()
            if visit.body:
                legs.append((path, json.loads(visit.body)))
            models = b'{"data":[{"id":"m"}]}'
            visit.send(plain(answer if visit.body else models if path == "/v1/models" else b""))

        return Upstream(script)

    recorded = (DATA / "responses-plain.http").read_bytes().partition(b"\r\n\r\n")[2]
    async with engine(json.dumps(first).encode()) as reads, engine(recorded) as answers:
        instances = [
            {"url": reads.url, "role": "prefill", "profile": str(DEMO / "fast.yaml")},
            {"url": answers.url, "role": "decode", "profile": str(DEMO / "fast.yaml")},
        ]
        async with serving(tmp_path, {"connector": "nixl"}, instances) as (service, session):
            body = {"model": "m", "input": "a" * 4000, "max_output_tokens": 6}
            url = f"http://127.0.0.1:{service.address[1]}/v1/responses"
            async with session.post(url, json=body) as reply:
                assert (reply.status, (await reply.json())["object"]) == (200, "response")
    (read_at, read), (answered_at, answered) = legs
    assert (read_at, read["max_output_tokens"], read["store"]) == ("/v1/responses", 1, False)
    assert (answered_at, answered["kv_transfer_params"]) == ("/v1/responses", given)
    assert answered.get("request_id") == ("resp_1" if mode == "push" else None)


@pytest.mark.parametrize(
    "body",
    [{"prompt": [[1] * 300, [2] * 300]}, {"n": 2, "temperature": 1.0}, {"echo": True, "prompt": "x" * 900}],
    ids=["two prompts", "n", "echo"],
)  # fmt: skip
async def test_what_cannot_be_split_goes_to_one_engine(tmp_path: Path, body: dict[str, Any]) -> None:
    async with rig(tmp_path) as fleet:
        status, _, name, reader = await fleet.ask(**body)
        assert (status, name, reader) == (200, "e1", None)
        await fleet.idle()


async def test_stop_words_minimum_and_usage_are_the_clients(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet:
        body = {
            "model": "m", "prompt": [1] * 400, "max_tokens": 9, "min_tokens": 5, "stop": ["zzz"],
            "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with fleet.session.post(fleet.url + "/v1/completions", json=body) as reply:
            events = [json.loads(line[6:]) async for line in reply.content if line.startswith(b"data: {")]
        assert events[-1]["usage"] == {"prompt_tokens": 400, "completion_tokens": 9, "total_tokens": 409}
        assert len({event["id"] for event in events}) == 1
        await fleet.idle()


async def test_a_hundred_at_once(tmp_path: Path) -> None:
    async with rig(tmp_path, roles=("prefill", "decode", "decode", "both"), lease_s=20.0) as fleet:
        asked = [fleet.ask(stream=i % 2 == 0, prompt=[i] * (50 + 17 * i)) for i in range(100)]
        for status, text, *_ in await asyncio.gather(*asked):
            assert (status, text) == (200, WHOLE)
        await fleet.idle()
        assert fleet.handovers["done"] > 0
        # On a starved machine a first token may take longer than a hand-over waits for it.
        assert set(fleet.handovers) <= {"done", "late"}


async def test_an_error_of_the_first_leg_is_the_answer(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet:
        status, text, *_ = await fleet.ask(temperature=9)
        assert status == 400
        assert "temperature" in text
        await fleet.idle()


async def test_a_decision_names_the_pair_and_shows_every_candidate(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet:
        await fleet.ask()
        await fleet.idle()
        admin = f"http://127.0.0.1:{fleet.service.admin.address[1]}"
        async with fleet.session.get(admin + "/v1/decisions?last=10") as reply:
            (decision,) = (await reply.json())["decisions"]
        assert (decision["chosen"], decision["output_tokens"], decision["ended"]) == ("e0 > e1", 6, True)
        found = {each["instance"]: each for each in decision["candidates"]}
        assert found.keys() == {"e0", "e1", "e0 > e1"}
        assert [each["eligible"] for each in found.values()] == [False, False, True]


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
async def test_a_split_request_with_anothers_blocks_is_split_like_any_other(
    tmp_path: Path, connector: str
) -> None:
    async with rig(tmp_path, connector) as fleet:
        own = await fleet.ask(prompt=[7] * 500)
        other = await fleet.ask(prompt=[7] * 500, kv_transfer_params=PARAMS)
        assert other == own
        await fleet.idle()
