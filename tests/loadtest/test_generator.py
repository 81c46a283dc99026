"""The generator sends on time whatever the server does, and never blames the server for its own faults."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import time
from array import array
from typing import Any

import pytest
from helpers import HANG_S
from loadtest.stub import Call, stub

from hetlb.tools.loadtest.bodies import RequestBodies
from hetlb.tools.loadtest.generator import LoadInterruptedError, run_load
from hetlb.tools.loadtest.load_result import LoadResult
from hetlb.tools.tables import LoadProgress
from hetlb.tools.workload.arrivals import PlannedRequest, make_plan
from hetlb.tools.workload.records import RequestResult
from hetlb.tools.workload.rows import Row


def plan_of(count: int, *, gap_s: float = 0.0, output: int = 3) -> list[PlannedRequest]:
    return [PlannedRequest(i, i * gap_s, Row(None, 10 + i, output)) for i in range(count)]


def bodies_of(plan: list[PlannedRequest], **options: Any) -> RequestBodies:
    return RequestBodies("m", plan, "0", **options)


async def load(plan: list[PlannedRequest], url: str, **options: Any) -> LoadResult:
    bodies = options.pop("bodies", None) or bodies_of(plan)
    return await run_load(plan, bodies, url, **options)


def only(result: LoadResult) -> RequestResult:
    (record,) = result.records
    return record


async def answer(call: Call) -> None:
    await call.answer(instance=f"i{call.number % 2}")


async def test_a_request_has_headers_of_its_own() -> None:
    plan = plan_of(2)
    bodies = bodies_of(plan)
    bodies.headers = lambda planned: {"x-session-id": f"s{planned.index}"} if planned.index else {}  # type: ignore[method-assign]
    async with stub(answer) as server:
        await load(plan, server.url, bodies=bodies)
        sent = {len(call.body["prompt"]): call.headers.get("x-session-id") for call in server.calls}
    assert sent == {10: None, 11: "s1"}


@pytest.mark.parametrize("in_turn", [True, False])
async def test_a_turn_of_a_session_waits_for_the_answer_before_it(in_turn: bool) -> None:
    rows = [Row(None, 10 + i, 3, session="ab"[i % 2]) for i in range(8)]
    plan = [PlannedRequest(i, 0.0, row) for i, row in enumerate(rows)]
    open_, most, all_came = {"a": 0, "b": 0}, 0, asyncio.Event()

    async def slowly(call: Call) -> None:
        nonlocal most
        session = "ab"[len(call.body["prompt"]) % 2]
        open_[session] += 1
        most = max(most, open_[session])
        if sum(open_.values()) == (2 if in_turn else 8):
            all_came.set()
        await all_came.wait()
        open_[session] -= 1
        await call.answer()

    async with stub(slowly) as server:
        result = await load(plan, server.url, in_turn=in_turn)
    assert len([each for each in result.records if each.ok]) == 8
    assert most == (1 if in_turn else 4)
    starts = [(each.scheduled_s, each.end_s) for each in result.records[::2]]
    if in_turn:
        assert all(later[0] >= before[1] for before, later in itertools.pairwise(starts))


async def test_a_turn_that_waits_for_the_one_before_it_takes_no_place_of_others() -> None:
    """Two conversations, one after the other in the plan, two requests at a time: both run at once."""
    rows = [Row(None, 10 + i // 3, 3, session="ab"[i // 3]) for i in range(6)]
    plan = [PlannedRequest(i, 0.0, row) for i, row in enumerate(rows)]
    open_, together = set[int](), asyncio.Event()

    async def slowly(call: Call) -> None:
        size = len(call.body["prompt"])
        open_.add(size)
        if len(open_) == 2:
            together.set()
        async with asyncio.timeout(HANG_S):
            await together.wait()
        await call.answer()

    async with stub(slowly) as server:
        result = await load(plan, server.url, in_turn=True, max_concurrency=2)
    assert len([each for each in result.records if each.ok]) == 6


@pytest.mark.parametrize("stream", [True, False])
async def test_every_request_is_sent_once_and_recorded(stream: bool) -> None:
    plan = plan_of(20, output=4)
    progress = LoadProgress()
    async with stub(answer) as server:
        result = await load(plan, server.url, bodies=bodies_of(plan, stream=stream), progress=progress)
        lengths = sorted(len(call.body["prompt"]) for call in server.calls)
    assert lengths == [planned.prompt_tokens for planned in plan]
    assert {call.path for call in server.calls} == {"/v1/completions"}
    assert [record.prompt_tokens for record in result.records] == lengths
    for record in result.records:
        assert record.ok
        assert record.error == ""
        assert record.output_tokens == 4
        assert record.sent_s is not None
        assert record.last_token_s is not None
        assert record.end_s is not None
        assert record.sent_s <= record.last_token_s <= record.end_s
        if stream:
            assert record.first_token_s is not None
            assert record.itl_s is not None
            assert len(record.itl_s) == 3
            assert sum(record.itl_s) == pytest.approx(record.last_token_s - record.first_token_s)
        else:
            assert record.first_token_s is None
    assert (progress.sent, progress.completed, progress.failed) == (20, 20, 0)
    assert progress.output_tokens == 80
    summary = result.summary()
    assert (summary["completed"], summary["total_output_tokens"]) == (20, 80)
    assert [(each["name"], each["completed"]) for each in summary["instances"]] == [("i0", 10), ("i1", 10)]


async def test_a_server_that_names_no_instance_gives_none() -> None:
    async with stub(lambda call: call.answer()) as server:
        result = await load(plan_of(2), server.url)
    assert result.summary()["instances"] == []


async def test_sending_waits_for_no_answer_and_latency_counts_from_the_due_time() -> None:
    """The server answers nothing before the last request is there: a closed loop would never finish, and a
    harness that pauses while the server stalls would report no delay at all."""
    plan = plan_of(12, gap_s=0.02)
    everyone = asyncio.Event()

    async def script(call: Call) -> None:
        if call.number == len(plan) - 1:
            everyone.set()
        await everyone.wait()
        await call.answer()

    async with stub(script) as server:
        result = await load(plan, server.url)
    last_due = plan[-1].scheduled_s
    for planned, record in zip(plan, result.records, strict=True):
        assert record.ok
        assert record.ttft_s is not None
        # 2 ms: a timer of the loop counts whole milliseconds.
        assert record.ttft_s >= last_due - planned.scheduled_s - 0.002


async def test_a_client_that_stalls_shows_in_latency_and_makes_the_run_suspect() -> None:
    """The client is busy for 0.3 s with its first request: all others are due meanwhile and go out after."""
    plan = plan_of(10, gap_s=0.02)
    stall_s = 0.3

    class Stalling(RequestBodies):
        def body(self, planned: PlannedRequest) -> bytes:
            if planned.index == 0:
                time.sleep(stall_s)
            return super().body(planned)

    async with stub(answer) as server:
        result = await load(plan, server.url, bodies=Stalling("m", plan, "0"))
    for planned, record in zip(plan[1:], result.records[1:], strict=True):
        assert record.lateness_s is not None
        assert record.ttft_s is not None
        assert record.ttft_s >= record.lateness_s >= stall_s - planned.scheduled_s
    client = result.summary()["client"]
    assert client["verdict"] == "SUSPECT"
    assert client["p99_lateness_ms"] >= 1e3 * (stall_s - plan[-1].scheduled_s)
    assert any(reason.startswith("late:") for reason in client["reasons"])


async def test_tokens_count_when_text_comes_not_when_events_do() -> None:
    """Over a real connection; `test_answers` has the details."""
    progress = LoadProgress()

    async def script(call: Call) -> None:
        await call.head()
        await call.event("")
        await call.chunk(b": comment\n\n")
        await call.chunk(b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n')
        await call.event("a")
        await call.event("b")
        await call.event(usage={"prompt_tokens": 10, "completion_tokens": 2})
        await call.chunk(b"data: [DONE]\n\n")
        await call.end()

    async with stub(script) as server:
        record = only(await load(plan_of(1, output=2), server.url, progress=progress))
    assert record.ok
    assert record.output_tokens == progress.output_tokens == 2
    assert record.itl_s is not None
    assert len(record.itl_s) == 1


async def refuse(call: Call) -> None:
    await call.head(503)
    await call.chunk(b'{"error": {"message": "no instance"}}')
    await call.end()


async def hang_up(call: Call) -> None:
    call.abort()


async def break_off(call: Call) -> None:
    await call.head()
    await call.event("a")
    call.abort()


async def forget_the_end(call: Call) -> None:
    await call.head()
    await call.event("a")
    await call.end()


async def answer_whole(call: Call) -> None:
    await call.head()
    await call.chunk(b'{"choices": [{"index": 0, "text": "a"}]}')
    await call.end()


async def fail_midway(call: Call) -> None:
    await call.head()
    await call.event("a")
    await call.event(error={"message": "engine died"})
    await call.client_gone()


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (refuse, "http 503"),
        (hang_up, "broken connection"),
        (break_off, "broken connection"),
        (forget_the_end, "broken stream"),
        (answer_whole, "no stream"),
        (fail_midway, "error event"),
    ],
)
async def test_failures_are_counted_by_kind_with_an_example(script: Any, kind: str) -> None:
    progress = LoadProgress()
    async with stub(script) as server:
        result = await load(plan_of(3), server.url, progress=progress)
    assert {record.error for record in result.records} == {kind}
    assert all(not record.ok and record.end_s is not None for record in result.records)
    assert result.errors == {kind: 3}
    assert set(result.examples) == {kind}
    assert (progress.completed, progress.failed, progress.ended) == (0, 3, 3)
    summary = result.summary()
    assert (summary["completed"], summary["failed"], summary["client"]["errors"]) == (0, 3, {kind: 3})
    assert summary["client"]["verdict"] == "SUSPECT"


async def test_a_failure_in_the_middle_of_the_run_leaves_the_others_alone() -> None:
    async def script(call: Call) -> None:
        await (refuse(call) if call.number % 3 == 0 else call.answer())

    async with stub(script) as server:
        result = await load(plan_of(9), server.url)
    assert result.errors == {"http 503": 3}
    assert sum(record.ok for record in result.records) == 6


async def test_a_server_that_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        result = await load(plan_of(2), f"http://127.0.0.1:{free.getsockname()[1]}")
    (kind,) = result.errors
    assert kind.startswith("connect")
    assert result.records[0].sent_s is None


async def test_a_kept_connection_that_the_server_closed_costs_no_request() -> None:
    async def script(call: Call) -> None:
        if call.first_of_connection:
            await call.answer()
        else:
            call.abort()

    async with stub(script) as server:
        result = await load(plan_of(10, gap_s=0.02), server.url)
    assert result.errors == {}


async def test_cancelling_closes_every_connection() -> None:
    plan = plan_of(8)
    everyone = asyncio.Event()

    async def script(call: Call) -> None:
        await call.head()
        await call.event("a")
        if call.number == len(plan) - 1:
            everyone.set()
        await call.client_gone()

    async with stub(script) as server:
        running = asyncio.create_task(load(plan, server.url))
        await everyone.wait()
        running.cancel()
        with pytest.raises(LoadInterruptedError) as caught:
            await running
    assert (caught.value.result.records, caught.value.result.interrupted) == ([], len(plan))
    assert len(server.calls) == len(plan)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("begun", [True, False])
async def test_a_request_without_an_end_fails_by_its_timeout(begun: bool) -> None:
    async def script(call: Call) -> None:
        if call.number != 3:
            await call.answer()
            return
        if begun:
            await call.head()
            await call.event("a")
        await call.client_gone()

    async with stub(script) as server:
        result = await load(plan_of(8), server.url, max_concurrency=1, timeout_s=0.2)
    assert [record.ok for record in result.records].count(True) == 7
    assert result.errors == {"timed out": 1}
    assert result.examples == {"timed out": "no end of the answer within 0.2 s"}


async def test_what_has_ended_is_there_when_the_run_is_stopped() -> None:
    asked = asyncio.Event()

    async def script(call: Call) -> None:
        if call.number < 7:
            await call.answer()
            return
        asked.set()
        await call.client_gone()

    async with stub(script) as server:
        running = asyncio.create_task(load(plan_of(20), server.url, max_concurrency=1))
        await asked.wait()
        running.cancel()
        with pytest.raises(LoadInterruptedError) as caught:
            await running
    result = caught.value.result
    assert [record.ok for record in result.records] == [True] * 7
    assert result.summary()["client"]["reasons"][-1] == "interrupted: 7 of 20 requests had ended"


async def test_a_new_load_shares_no_prompt_with_the_one_before() -> None:
    """Or the second run would measure the engines' prefix caches."""
    plan = make_plan([Row(None, 20, 1)], 30, float("inf"), random.Random(0))
    async with stub(answer) as server:
        for seed in (1, 2):
            await load(plan, server.url, bodies=RequestBodies("m", plan, f"{seed}"))
        beginnings = [tuple(call.body["prompt"][:5]) for call in server.calls]
    assert len(set(beginnings)) == 60


async def test_a_cap_closes_the_loop_of_a_load_that_is_due_at_once() -> None:
    """Never more in flight; a request is due when its turn comes, so none is late."""
    in_flight = most = 0
    all_turns_taken = asyncio.Event()

    async def script(call: Call) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        if in_flight == 3:
            all_turns_taken.set()
        await all_turns_taken.wait()
        await call.head()
        in_flight -= 1
        for _ in range(3):
            await call.event("a")
        await call.chunk(b"data: [DONE]\n\n")
        await call.end()

    async with stub(script) as server:
        result = await load(plan_of(12), server.url, max_concurrency=3)
    assert result.errors == {}
    assert most == 3
    due = [record.scheduled_s for record in result.records]
    assert due == sorted(due)
    assert due[3] >= min(record.end_s or 0.0 for record in result.records) > due[0]


async def test_under_a_cap_what_was_due_before_its_turn_is_late() -> None:
    """The wait for a turn is the server's: it is in the latency, and the run says so."""
    plan = plan_of(4, gap_s=0.01)
    second_is_due = plan[1].scheduled_s + 0.05

    async def script(call: Call) -> None:
        if call.number == 0:
            await asyncio.sleep(second_is_due)
        await call.answer()

    async with stub(script) as server:
        result = await load(plan, server.url, max_concurrency=1)
    assert [record.scheduled_s for record in result.records] == [planned.scheduled_s for planned in plan]
    for record in result.records[1:]:
        assert record.lateness_s is not None
        assert record.ttft_s is not None
        assert record.ttft_s >= record.lateness_s > 0.02
    assert result.summary()["client"]["verdict"] == "SUSPECT"


# --- the verdict, on made-up runs ---------------------------------------------------------------------


def fared(
    *,
    gap_s: float = 0.1,
    late_s: float = 0.0,
    ttft_s: float = 0.2,
    lag_s: float = 0.0,
    cpu: float = 0.1,
    failed: int = 0,
    short: int = 0,
    longer_prompts: int = 0,
    stretch: float = 1.0,
) -> dict[str, Any]:
    plan = plan_of(100, gap_s=gap_s)
    records = []
    for planned in plan:
        sent = planned.scheduled_s * stretch + late_s
        ok = planned.index >= failed
        records.append(
            RequestResult(
                scheduled_s=planned.scheduled_s,
                prompt_tokens=planned.prompt_tokens + (planned.index < longer_prompts),
                output_tokens=planned.output_tokens - (planned.index >= 100 - short),
                first_token_s=planned.scheduled_s + ttft_s,
                last_token_s=planned.scheduled_s + ttft_s + 0.1,
                ok=ok,
                error="" if ok else "timeout",
                sent_s=sent,
                itl_s=array("d"),
            )
        )
    client: dict[str, Any] = LoadResult(plan, records, cpu, [lag_s] * 50).summary()["client"]
    return client


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ({}, None),
        ({"late_s": 0.004}, None),
        ({"late_s": 0.006}, "late"),
        ({"late_s": 0.006, "ttft_s": 1.0}, None),  # beside a TTFT of 1 s that is nothing
        ({"lag_s": 0.006}, "lag"),
        ({"stretch": 1.03, "ttft_s": 400.0}, "rate"),
        ({"cpu": 0.95}, "cpu"),
        ({"failed": 1}, None),
        ({"failed": 2}, "failed"),
        ({"short": 2}, "length"),
        ({"longer_prompts": 1}, None),
        ({"longer_prompts": 2}, "prompt"),
        ({"gap_s": 0.0, "late_s": 0.029}, None),  # all at once: beside a duration of 0.3 s
        ({"gap_s": 0.0, "late_s": 0.031}, "late"),
    ],
)
def test_the_verdict_names_what_makes_a_run_suspect(run: dict[str, Any], reason: str | None) -> None:
    client = fared(**run)
    assert [text.partition(":")[0] for text in client["reasons"]] == ([reason] if reason else [])
    assert client["verdict"] == ("SUSPECT" if reason else "VALID")


def test_offered_and_achieved_rate() -> None:
    client = fared(gap_s=0.1, stretch=2.0, ttft_s=1000.0)
    assert client["offered_rate"] == pytest.approx(10.0)
    assert client["achieved_rate"] == pytest.approx(5.0)
    assert fared(gap_s=0.0)["offered_rate"] is None
