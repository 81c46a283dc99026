"""Limits of keys and accounts of tenants: what is let in, what is told, and that both count the same."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import outcomes
from hypothesis import given
from hypothesis import strategies as st
from proxy.services import Engine, Running, document, serving
from proxy.upstreams import plain

from hetlb.balancer.clients import key_limits as limits
from hetlb.balancer.clients.api_keys import LimitsTable
from hetlb.balancer.clients.key_limits import WINDOW_S, Limiter, duration
from hetlb.balancer.http.answer_text import tokens_of_text
from hetlb.balancer.http.error_responses import Refusal
from hetlb.balancer.telemetry import events

ROOT = Path(__file__).parents[2]


def keys(folder: Path, *tables: dict[str, Any]) -> None:
    rows = [
        {"name": f"t{n}", "sha256": hashlib.sha256(b"key-%d" % n).hexdigest(), **table}
        for n, table in enumerate(tables)
    ]
    (folder / "keys.yaml").write_text(yaml.safe_dump(rows))


async def ask(running: Running, number: int = 0) -> Any:
    return await running.ask(Authorization=f"Bearer key-{number}")


# --- the window ---


@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 50), st.integers(0, 60)), max_size=60),
    st.integers(10, 200),
    st.integers(1, 20),
)
def test_no_60_seconds_hold_more_than_the_limit(
    steps: list[tuple[float, int, int]], tokens: int, requests: int
) -> None:
    """However requests come: limits hold, and who comes after the wait is let in."""
    limiter = Limiter(LimitsTable(tokens_per_minute=tokens, requests_per_minute=requests))
    now, admitted = 0.0, []
    for pause, prompt, output in steps:
        now += pause
        try:
            ticket = limiter.admit(prompt, 60, now)
        except Refusal:
            continue
        ticket.ended(prompt, output, now)
        admitted.append((now, prompt + output))
    for begin, _ in admitted:
        inside = [used for at, used in admitted if begin <= at < begin + WINDOW_S]
        assert len(inside) <= requests
        assert sum(inside[:-1]) <= tokens  # kept within one request: a large one passes an empty window


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 30)), min_size=1, max_size=40))
def test_retry_after_is_true(steps: list[tuple[float, int]]) -> None:
    limiter = Limiter(LimitsTable(tokens_per_minute=100))
    now = 0.0
    for pause, prompt in steps:
        now += pause
        try:
            limiter.admit(prompt, 10, now).ended(prompt, 10, now)
        except Refusal as refusal:
            now += refusal.retry_after_s
            limiter.admit(prompt, 10, now).ended(prompt, 10, now)


def test_a_window_stays_small() -> None:
    limiter = Limiter(LimitsTable(requests_per_minute=10**9))
    for step in range(100_000):
        limiter.admit(1, 1, step * 0.005)
    for window in (limiter._requests, limiter._tokens):  # tokens are counted where no limit is on them too
        assert len(window._slots) <= WINDOW_S / limits._SLOT_S + 1


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.02, b"20ms"), (1.5, b"1.5s"), (60, b"1m0s"), (366, b"6m6s"), (0, b"0ms")]
)
def test_times_as_openai_writes_them(seconds: float, text: bytes) -> None:
    assert duration(seconds) == text


# --- through the proxy ---


@pytest.mark.parametrize("where", ["text", "content", "reasoning_content", "arguments"])
async def test_an_answer_without_usage_counts_by_its_text(tmp_path: Path, where: str) -> None:
    """Answers of 40 words and no `usage`: a prompt and an answer, twice, are beyond 70 tokens."""
    keys(tmp_path, {"limits": {"tokens_per_minute": 70}})
    text = json.dumps(
        {"choices": [{"index": 0, where: "x " * 40, "finish_reason": "stop"}], "user": "y " * 99}
    )
    async with Engine(plain(text.encode())) as engine:
        fleet = document(engine, proxy={"api_keys_file": "keys.yaml"})
        async with serving(tmp_path, fleet) as running:
            statuses = [(await ask(running)).status for _ in range(4)]
    assert statuses == [200, 200, 429, 429]


@given(st.binary(max_size=2000))
def test_the_estimate_of_any_bytes_is_a_count(body: bytes) -> None:
    assert 0 <= tokens_of_text(body, len(body), 4.0) <= len(body) + 1


def test_a_long_answer_counts_by_the_text_of_its_end() -> None:
    tail = b'"text":"' + b"word " * 100 + b'"}'
    assert tokens_of_text(tail, len(tail), 4.0) == 125
    assert tokens_of_text(tail, 10 * len(tail), 4.0) == 1250
    backslashes = b"\\" * 400_000
    assert tokens_of_text(b'"text":"' + backslashes, 400_008, 4.0) == 100_000


async def test_requests_beyond_a_limit_are_429_and_say_when_to_come_again(tmp_path: Path) -> None:
    keys(tmp_path, {"limits": {"requests_per_minute": 3}}, {})
    async with Engine() as engine:
        fleet = document(engine, proxy={"api_keys_file": "keys.yaml"})
        async with serving(tmp_path, fleet) as running:
            for left in (2, 1, 0):
                reply = await ask(running)
                assert reply.status == 200
                assert reply.headers["x-ratelimit-limit-requests"] == "3"
                assert reply.headers["x-ratelimit-remaining-requests"] == str(left)
                assert re.fullmatch(r"(1m)?\d+(\.\d)?s", reply.headers["x-ratelimit-reset-requests"])
                assert "x-ratelimit-limit-tokens" not in reply.headers
            reply = await ask(running)
            assert reply.status == 429
            assert reply.json["error"]["code"] == "rate_limit_exceeded"
            assert 1 <= int(reply.headers["retry-after"]) <= 61
            assert reply.headers["x-ratelimit-remaining-requests"] == "0"
            assert reply.headers["x-should-retry"] == "true"
            assert len(engine.asked) == 3
            assert (await ask(running, 1)).status == 200  # a key without limits
            assert "x-ratelimit-limit-requests" not in (await ask(running, 1)).headers
            # A reload raises the limit and forgets nothing.
            keys(tmp_path, {"limits": {"requests_per_minute": 4}}, {})
            await running.admin("POST", "/v1/reload")
            assert [(await ask(running)).status for _ in range(2)] == [200, 429]
            # Requests beyond the limit are of the key's account, and in the log.
            usage = (await running.admin("GET", "/v1/usage")).json["usage"]
            assert [(each["tenant"], each["requests"]) for each in usage] == [("t0", 6), ("t1", 2)]
            assert outcomes(running.service.totals).count("rate_limited") == 2


async def test_tokens_are_settled_by_the_engines_counts(tmp_path: Path) -> None:
    # The engine says 3 + 2 tokens; a request reserves its prompt (3) and max_tokens (5).
    keys(tmp_path, {"limits": {"tokens_per_minute": 20}})
    async with Engine() as engine:
        fleet = document(engine, proxy={"api_keys_file": "keys.yaml"})
        async with serving(tmp_path, fleet) as running:
            replies = [await ask(running) for _ in range(4)]
            assert [each.status for each in replies] == [200, 200, 200, 429]
            assert replies[-1].headers["x-ratelimit-remaining-tokens"] == "5"


async def test_requests_in_flight_are_bounded_and_given_back(tmp_path: Path) -> None:
    keys(tmp_path, {"limits": {"in_flight": 2}})
    async with Engine() as engine:
        fleet = document(engine, proxy={"api_keys_file": "keys.yaml"})
        async with serving(tmp_path, fleet) as running:
            engine.hold()
            asking = [asyncio.create_task(ask(running)) for _ in range(2)]
            await engine.asked_for(2)
            assert (await ask(running)).status == 429
            engine.released.set()
            assert [(await each).status for each in asking] == [200, 200]
            assert (await ask(running)).status == 200


async def test_fifty_tenants_are_counted_as_their_engine_counts(tmp_path: Path) -> None:
    keys(tmp_path, *({} for _ in range(50)))
    async with Engine() as engine:
        fleet = document(engine, proxy={"api_keys_file": "keys.yaml"})
        async with serving(tmp_path, fleet) as running:
            await asyncio.gather(*(ask(running, n % 50) for n in range(150)))
            usage = (await running.admin("GET", "/v1/usage")).json["usage"]
            assert len(usage) == 50
            assert {each["requests"] for each in usage} == {3}
            # What the engine said in its `usage`.
            assert sum(each["prompt_tokens"] for each in usage) == 150 * 3
            assert sum(each["output_tokens"] for each in usage) == 150 * 2
            page = (await running.admin("GET", "/metrics")).body
            assert b'hetlb_tenant_requests_total{tenant="t7",model="m"} 3\n' in page
            assert b'hetlb_tenant_output_tokens_total{tenant="t7",model="m"} 6\n' in page


async def test_figures_to_scale_by(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        instance = running.instance("i0")
        engine.hold()
        asking = [asyncio.create_task(running.ask()) for _ in range(4)]
        await engine.asked_for(4)
        page = (await running.admin("GET", "/metrics")).body.decode()
        places = instance.max_num_seqs
        assert 'hetlb_queue_requests{model="m"} 0\n' in page
        assert 'hetlb_model_instances{model="m"} 1\n' in page
        assert f'hetlb_model_free_places{{model="m"}} {places - 4}\n' in page
        assert f'hetlb_model_saturation_ratio{{model="m"}} {4 / places!r}\n' in page
        engine.released.set()
        await asyncio.gather(*asking)


@pytest.mark.parametrize("name", ["keda.yaml", "keda-from-zero.yaml", "hpa.yaml"])
def test_autoscalers_name_metrics_that_are_there(name: str) -> None:
    text = (ROOT / "configs" / "autoscaling" / name).read_text()
    assert yaml.safe_load(text)["spec"]["scaleTargetRef"]["kind"] == "Deployment"
    described = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    for metric in re.findall(r"hetlb_[a-z_]+", text):
        assert f"| `{metric}` | gauge |" in described


def test_keda_counts_the_servers_of_the_deployment_that_it_scales() -> None:
    """A model may have servers of other kinds, which the Deployment does not start."""
    document = yaml.safe_load((ROOT / "configs" / "autoscaling" / "keda.yaml").read_text())
    name = document["spec"]["scaleTargetRef"]["name"]
    query = document["spec"]["triggers"][0]["metadata"]["query"]
    used = re.findall(r"hetlb_instance_\w+(\{[^}]*\})?", query)
    assert len(used) == 4
    assert set(used) == {f'{{server=~"{name}-.*"}}'}


# --- events ---


def test_every_event_has_a_name_of_its_own() -> None:
    assert len({each.event for each in events.Event}) == len(events.Event)


def test_nothing_is_logged_without_a_name() -> None:
    for path in [path for room in ("balancer", "options") for path in (ROOT / "hetlb" / room).rglob("*.py")]:
        if path.name != "events.py":
            assert not re.search(r"logger\.(info|warning|error|exception|log)\(", path.read_text()), path
