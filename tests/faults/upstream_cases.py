"""Rows U: what an engine can do wrong, and what its clients and the other engines notice of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from faults.cases import PATIENCE_S, case
from faults.client import Answer, Client, body_of, request
from faults.engine import WHOLE_ANSWER
from faults.rig import Rig
from faults.wire import BlackHole, FaultWire, Toxics

Check: TypeAlias = Callable[[Rig], Awaitable[None]]

#: Probes so rare that what is seen comes from the requests alone.
QUIET = {"interval_s": 60.0}


def whole(answer: Answer, tokens: int = 4) -> None:
    """A stream that is complete."""
    assert (answer.status, answer.end, answer.done) == (200, "clean", True), answer.body
    assert answer.tokens(answer.label) == tokens  # type: ignore[attr-defined]


def broken(answer: Answer, tokens: int = 2) -> None:
    """A stream that broke after its second token, and says so."""
    assert answer.status == 200
    assert answer.honest, (answer.end, answer.body)
    assert answer.tokens(answer.label) == tokens  # type: ignore[attr-defined]


def refused(answer: Answer, status: int, *, retry: bool) -> None:
    """An error of the proxy's own."""
    assert (answer.status, answer.end) == (status, "clean"), answer.body
    assert set(answer.error) == {"message", "type", "code", "param"}
    assert answer.header("x-should-retry") == str(retry).lower()


@case("U1", "closed-port", engines=2, outcomes={"ok": 3}, scrape=QUIET)
async def refuses_connect(rig: Rig) -> None:
    await rig.engine.stop()
    for _ in range(3):
        answer = await rig.ask()
        whole(answer)
        assert answer.header("x-hetlb-instance") == "i1"
    assert await rig.health("i0") == "ejected"


@case(
    "U1",
    "all-closed",
    engines=2,
    outcomes={"no_instance": 1},
    scrape=QUIET,
    queue={"no_instance_timeout_s": 0.01},
)
async def all_refuse(rig: Rig) -> None:
    for engine in rig.engines:
        await engine.stop()
    answer = await rig.ask()
    refused(answer, 503, retry=True)
    assert int(answer.header("retry-after") or 0) >= 1


@case(
    "U2", "black-hole", engines=2, outcomes={"ok": 6}, scrape=QUIET, proxy={"connect_timeout_s": PATIENCE_S}
)
async def black_hole(rig: Rig) -> None:
    await rig.engine.stop()
    with BlackHole(rig.engine.port):
        whole(await rig.ask())
        whole(await rig.ask())
        assert await rig.health("i0") == "ejected"
        for answer in await rig.ask_many(4):
            whole(answer)
            assert answer.header("x-hetlb-instance") == "i1"


@case("U3", "never-answers", outcomes={"no_response": 1}, proxy={"first_byte_timeout_s": PATIENCE_S})
async def never_answers(rig: Rig) -> None:
    answer = await rig.ask("stall")
    refused(answer, 504, retry=False)
    visit = await rig.engine.visit()
    await rig.engine.until(visit.left.is_set)


@case(
    "U3",
    "is-taken-out",
    engines=2,
    outcomes={"no_response": 5, "ok": 9},
    modes=("stall",),
    proxy={"first_byte_timeout_s": PATIENCE_S},
)
async def never_answers_is_doubted(rig: Rig) -> None:
    answers = await rig.ask_many(10)
    assert sorted(answer.status for answer in answers) == [200] * 5 + [504] * 5
    for _ in range(4):
        answer = await rig.ask()
        assert answer.header("x-hetlb-instance") == "i1"


@case(
    "U3",
    "attracts-no-request",
    engines=2,
    outcomes={"ok": 8, "client_gone": 4},
    policy={"name": "least-requests"},
    modes=("stall",),
)
async def silent_is_not_idle(rig: Rig) -> None:
    other = rig.engines[1]
    other.mode = "held"
    async with contextlib.AsyncExitStack() as stack:
        clients: dict[str, Client] = {}
        for label in [rig.label() for _ in range(8)]:
            clients[label] = await stack.enter_async_context(rig.client())
            clients[label].send(request(label, body_of(label)))
        await rig.engine.visit(4)
        await other.visit(4)
        assert (await rig.instance("i0"))["in_flight"] == 4
        other.released.set()
        for visit in other.visits:
            assert (await clients[visit.id].answer()).done
        # Four hang at i0 and count there: the next request goes to the other.
        for _ in range(4):
            whole(await rig.ask())
        assert len(rig.engine.visits) == 4


@case("U4", "close-elsewhere", engines=2, outcomes={"ok": 1}, modes=("close",))
async def drops_once(rig: Rig) -> None:
    label = rig.label()
    whole(await rig.ask(runs=2, label=label))
    assert rig.runs(label) == 2


@case("U4", "reset-elsewhere", engines=2, outcomes={"ok": 1}, modes=("reset",))
async def resets_once(rig: Rig) -> None:
    whole(await rig.ask(runs=2))


@case("U4", "all-close", engines=3, outcomes={"no_response": 1}, modes=("close", "close", "close"))
async def all_drop(rig: Rig) -> None:
    label = rig.label()
    refused(await rig.ask(runs=2, label=label), 502, retry=False)
    assert rig.runs(label) == 2


@case("U4", "stale-connection", outcomes={"ok": 4}, modes=("idle-close",))
async def stale(rig: Rig) -> None:
    for _ in range(4):
        whole(await rig.ask(runs=2))
    assert await rig.health("i0") == "up"
    assert await rig.metric("hetlb_retries_total") == 0


@case(
    "U4",
    "dropped-on-warm-connections",
    engines=2,
    outcomes={"ok": 2, "no_response": 1},
)
async def drops_on_warm_connections(rig: Rig) -> None:
    for _ in range(2):
        whole(await rig.ask())
    label = rig.label()
    # Once more on a fresh connection, and once at the other one, on a fresh connection at once.
    refused(await rig.ask("close", runs=3, label=label), 502, retry=False)
    assert rig.runs(label) == 3


@case(
    "U4",
    "killed-on-warm-connections",
    engines=4,
    outcomes={"ok": 8, "no_response": 1},
)
async def kills_on_warm_connections(rig: Rig) -> None:
    """Its first engine closes the connection that was idle before, and refuses a new one."""
    await rig.ask_many(8)
    label = rig.label()
    refused(await rig.ask("die", runs=2, label=label), 502, retry=False)
    assert rig.runs(label) == 2


@case("U4", "empty-answer", engines=2, outcomes={"no_response": 1}, modes=("empty-200", "empty-200"))
async def head_and_nothing(rig: Rig) -> None:
    # vLLM sends the head of a stream before the prompt is read: it is as if it had said nothing.
    refused(await rig.ask(runs=2), 502, retry=False)


@case("U5", "500", engines=2, outcomes={"upstream_error": 12}, modes=("500", "500"))
async def internal_error(rig: Rig) -> None:
    for _ in range(12):
        answer = await rig.ask(runs=2)
        assert (answer.status, answer.error["message"]) == (500, "500")
        assert answer.header("x-should-retry") is None
    assert [await rig.health(name) for name in ("i0", "i1")] == ["up", "up"]


def verbatim(status: str) -> None:
    @case("U6", status, engines=2, outcomes={"upstream_refused": 12, "ok": 1})
    async def client_error(rig: Rig) -> None:
        for _ in range(12):
            answer = await rig.ask(status, runs=2)
            assert (answer.status, answer.error["message"]) == (int(status), status)
        assert [await rig.health(name) for name in ("i0", "i1")] == ["up", "up"]
        whole(await rig.ask())


for status in ("400", "404", "413", "422"):
    verbatim(status)


def busy(status: str) -> None:
    told = "upstream_busy" if status == "429" else "upstream_error"

    @case("U7", f"{status}-plain", engines=2, outcomes={told: 4}, modes=(status, status))
    async def without_retry_after(rig: Rig) -> None:
        for _ in range(4):
            answer = await rig.ask(runs=2)
            assert (answer.status, answer.error["message"]) == (int(status), status)

    @case(
        "U7",
        f"{status}-elsewhere",
        engines=2,
        outcomes={"ok": 1},
        modes=(f"{status}-retry-after",),
    )
    async def with_retry_after(rig: Rig) -> None:
        label = rig.label()
        whole(await rig.ask(runs=2, label=label))
        assert rig.runs(label) == 2

    @case(
        "U7",
        f"{status}-everywhere",
        engines=3,
        outcomes={"upstream_busy": 1},
        modes=(f"{status}-retry-after",) * 3,
    )
    async def with_retry_after_everywhere(rig: Rig) -> None:
        label = rig.label()
        answer = await rig.ask(runs=2, label=label)
        assert (answer.status, answer.header("retry-after")) == (int(status), "60")
        assert rig.runs(label) == 2

    @case("U7", f"{status}-ranked-last", engines=2, outcomes={"ok": 6})
    async def ranked_last(rig: Rig) -> None:
        label = rig.label()
        rig.engine.modes[label] = f"{status}-retry-after"
        whole(await rig.ask(runs=2, label=label))
        seen = len(rig.engine.visits)
        for _ in range(5):
            whole(await rig.ask())
        assert len(rig.engine.visits) == seen
        assert await rig.health("i0") == "up"


for status in ("429", "503"):
    busy(status)


def no_http(row: str, mode: str) -> None:
    @case(row, mode, engines=2, outcomes={"no_response": 1}, modes=(mode, mode))
    async def answers_nonsense(rig: Rig) -> None:
        refused(await rig.ask(runs=2), 502, retry=False)
        for engine in rig.engines:
            await engine.until(lambda each=engine: not each.working)


for mode in ("junk", "http09", "half-head", "upgrade"):
    no_http("U8", mode)
for mode in ("big-head", "many-headers", "huge-head"):
    no_http("U9", mode)
for mode in ("te-cl", "dup-cl", "list-cl", "chunk-ext"):
    no_http("U14", mode)
no_http("U19", "redirect")


@case("U8", "is-a-failure", engines=2, outcomes={"ok": 11}, modes=("junk",))
async def nonsense_counts(rig: Rig) -> None:
    for _ in range(11):
        whole(await rig.ask(runs=2))
    assert len(rig.engine.visits) <= 5


@case("U9", "drip-head", outcomes={"no_response": 1}, proxy={"first_byte_timeout_s": PATIENCE_S})
async def head_by_the_byte(rig: Rig) -> None:
    refused(await rig.ask("drip-head"), 504, retry=False)


@case("U10", "interim", outcomes={"ok": 2})
async def interim_answers(rig: Rig) -> None:
    whole(await rig.ask("interim"))
    plain = await rig.ask("interim", stream=False)
    assert (plain.status, plain.end) == (200, "clean")
    assert plain.header("link") is None


def breaks(row: str, mode: str, known: str | None = None, **tables: object) -> None:
    @case(row, mode, engines=2, outcomes={"broken_stream": 1, "ok": 1}, known=known, **tables)
    async def breaks_off(rig: Rig) -> None:
        label = rig.label()
        broken(await rig.ask(mode, label=label))
        assert rig.runs(label) == 1
        whole(await rig.ask())


for mode in ("fin", "rst", "no-done"):
    breaks("U11", mode)
for mode in ("fin-mid-event", "fin-mid-utf8"):
    breaks("U11", mode)
for mode in ("no-length-cut",):
    breaks("U13", mode)
for mode in ("bad-chunk", "chunk-ext-late", "trailers"):
    breaks("U14", mode)
breaks("U12", "short-length-stream")
breaks("U15", "stall-mid", proxy={"idle_timeout_s": PATIENCE_S})


@case("U12", "short-length", outcomes={"broken_stream": 1})
async def shorter_than_it_says(rig: Rig) -> None:
    answer = await rig.ask("short-length", stream=False)
    assert answer.status == 502 or answer.end in ("cut", "reset"), answer.body


def surplus(mode: str) -> None:
    @case("U12", mode, outcomes={"ok": 2})
    async def more_than_it_says(rig: Rig) -> None:
        for _ in range(2):
            answer = await rig.ask(mode, stream=False)
            assert (answer.status, answer.end, answer.body) == (200, "clean", WHOLE_ANSWER)
        # A connection on which something else came is never used again.
        assert rig.engine.visits[0].writer is not rig.engine.visits[1].writer


surplus("long-length")
surplus("second-response")


@case("U13", "whole-without-length", outcomes={"ok": 1})
async def close_delimited(rig: Rig) -> None:
    answer = await rig.ask("no-length-whole")
    assert (answer.status, answer.end, answer.done) == (200, "clean", True)
    assert answer.header("content-length") is None


@case("U15", "others-go-on", outcomes={"broken_stream": 1, "ok": 3}, proxy={"idle_timeout_s": PATIENCE_S})
async def a_stall_is_one_streams_own(rig: Rig) -> None:
    rig.engine.pace_s, rig.engine.length = 0.05, 20
    stalled, *others = await asyncio.gather(rig.ask("stall-mid"), *(rig.ask() for _ in range(3)))
    broken(stalled)
    for answer in others:
        whole(answer, 20)


@case("U16", "big-chunk", outcomes={"ok": 1})
async def a_megabyte_at_once(rig: Rig) -> None:
    answer = await rig.ask("big-chunk")
    assert (answer.end, answer.done, len(answer.body) > 1 << 20) == ("clean", True, True)


@case("U16", "tiny-chunks", outcomes={"ok": 1})
async def a_hundred_thousand_chunks(rig: Rig) -> None:
    answer = await rig.ask("tiny-chunks")
    assert (answer.end, answer.done, len(answer.body) > 99_900) == ("clean", True, True)


@case("U16", "long-line", outcomes={"ok": 1})
async def no_line_feed(rig: Rig) -> None:
    answer = await rig.ask("long-line")
    assert (answer.end, answer.done) == ("clean", True)
    assert answer.body.count(b"x") >= 20 * (16 << 10)


@case("U16", "byte-by-byte", outcomes={"ok": 1})
async def one_byte_at_a_time(rig: Rig) -> None:
    whole(await rig.ask("drip"), 3)


@case("U17", "error-late", outcomes={"broken_stream": 1})
async def an_error_event_passes(rig: Rig) -> None:
    answer = await rig.ask("error-late")
    assert (answer.status, answer.end) == (200, "clean")
    assert b'{"error":{"message":"the engine died"' in answer.body
    assert answer.tokens(answer.label) == 2  # type: ignore[attr-defined]


@case("U17", "error-first", outcomes={"broken_stream": 1})
async def an_error_event_comes_first(rig: Rig) -> None:
    answer = await rig.ask("error-first")
    assert answer.status in (200, 502, 503)
    assert "the engine died" in answer.body.decode()


@case("U18", "gzip", outcomes={"ok": 1})
async def encoded_answers_pass(rig: Rig) -> None:
    answer = await rig.ask("gzip", "Accept-Encoding: gzip, br", stream=False)
    assert answer.header("content-encoding") == "gzip"
    assert gzip.decompress(answer.body) == b'{"choices":[]}'
    assert (await rig.engine.visit()).headers["accept-encoding"] == "identity"


@case("U16", "slow-read", outcomes={"ok": 1})
async def reads_slowly(rig: Rig) -> None:
    answer = await rig.ask("slow-read", stream=False, prompt="x" * 4_000_000)
    assert (answer.status, len((await rig.engine.visit()).body) > 4_000_000) == (200, True)


# --- the same on a network that is bad: between the proxy and an engine that is well ---


def on_a_wire(
    row: str, toxic: str, outcomes: dict[str, int], check: Check, toxics: dict[str, object], **how: Any
) -> None:
    """A request over a wire that was good while the instance was found to be up."""

    @case(row, f"wire-{toxic}", outcomes=outcomes, **how)
    async def over_a_bad_wire(rig: Rig) -> None:
        document = rig.document()
        instance = document["models"][0]["instances"][0]
        async with FaultWire("127.0.0.1", rig.engine.port) as wire:
            instance["url"] = wire.url
            rig.write(document)
            assert (await rig.reload())[0] == 200
            await rig.becomes("i0", health="up")
            wire.spoil(**toxics)
            await check(rig)
            wire.spoil(**dataclasses.asdict(Toxics()))
            instance["url"] = rig.engine.url
            rig.write(document)
            assert (await rig.reload())[0] == 200


async def is_whole(rig: Rig) -> None:
    whole(await rig.ask())


async def is_cut(rig: Rig) -> None:
    rig.engine.length = 2000
    answer = await rig.ask()
    assert answer.status == 200
    assert answer.honest, answer.body[-200:]
    assert 0 < answer.tokens(answer.label) < 2000  # type: ignore[attr-defined]


async def is_no_response(rig: Rig) -> None:
    refused(await rig.ask(), 502, retry=False)


async def is_too_late(rig: Rig) -> None:
    refused(await rig.ask(), 504, retry=False)


on_a_wire("U16", "latency", {"ok": 1}, is_whole, {"latency_s": 0.05})
on_a_wire("U16", "slicer", {"ok": 1}, is_whole, {"slicer": 7})
on_a_wire("U16", "bandwidth", {"ok": 1}, is_whole, {"bandwidth": 20_000.0})
on_a_wire("U12", "slow_close", {"ok": 1}, is_whole, {"slow_close_s": 0.2})
on_a_wire("U11", "limit_data", {"broken_stream": 1}, is_cut, {"limit_data": 40_000})
on_a_wire("U4", "reset_peer", {"no_response": 1}, is_no_response, {"reset_peer": True}, scrape=QUIET)
on_a_wire(
    "U3",
    "timeout",
    {"no_response": 1},
    is_too_late,
    {"timeout": True},
    proxy={"first_byte_timeout_s": PATIENCE_S},
)
