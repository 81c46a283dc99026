"""The page's part of the admin listener: its files, its one stream, single decisions, and who may ask."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from helpers import dispatched, make_scheduler, request, spec, turns_until
from proxy.services import Engine, Running, document, serving
from proxy.upstreams import DONE, LAST, SSE_HEAD, TOKEN, chunk

from hetlb.balancer.admin.dashboard import page as events
from hetlb.balancer.admin.dashboard.page import EventStream
from hetlb.balancer.admin.dashboard.snapshot import (
    DECISIONS_SHOWN,
    INSTANCES_SHOWN,
    shown_instances,
    totals_of,
)
from hetlb.balancer.core.facts import AdminStateSet
from hetlb.balancer.core.types import AdminState

FILES = {
    "/": "text/html; charset=utf-8",
    "/dashboard.css": "text/css; charset=utf-8",
    "/dashboard.js": "text/javascript; charset=utf-8",
    "/theme.css": "text/css; charset=utf-8",
    "/charts.js": "text/javascript; charset=utf-8",
    "/dom.js": "text/javascript; charset=utf-8",
}


@asynccontextmanager
async def listening(running: Running, **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """The open event stream."""
    url = f"http://127.0.0.1:{running.service.admin.address[1]}/v1/events"
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as reply:
        yield reply


async def next_snapshot(reply: aiohttp.ClientResponse) -> dict[str, Any]:
    """The next event."""
    lines = [await reply.content.readuntil(b"\n") for _ in range(3)]
    assert lines[0] == b"event: snapshot\n"
    assert lines[2] == b"\n"
    snapshot: dict[str, Any] = msgspec.json.decode(lines[1].removeprefix(b"data: "))
    return snapshot


async def test_the_files_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        for path, kind in FILES.items():
            reply = await running.admin("GET", path)
            assert (reply.status, reply.headers["content-type"]) == (200, kind), path
            policy = reply.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "unsafe" not in policy
            assert reply.headers["x-content-type-options"] == "nosniff"
            urls = set(re.findall(r"https?://[^\s\"'%]+", reply.body.decode()))
            assert urls <= {"http://www.w3.org/2000/svg"}, path


def test_of_a_large_fleet_the_instances_in_trouble_the_busiest_and_the_ones_looked_for_are_shown() -> None:
    names = [f"node-{number:03}" for number in range(INSTANCES_SHOWN + 100)]
    scheduler = make_scheduler([spec(name) for name in names])
    scheduler.on_instance(AdminStateSet(names[-2], AdminState.DRAIN), 1.0)
    busy = dispatched(scheduler.on_arrival(request(1), 2.0)).instance
    shown = shown_instances(scheduler.instances)
    assert shown is not None
    assert len(shown) == INSTANCES_SHOWN
    assert {names[-2], busy} <= shown
    assert shown_instances(scheduler.instances, ("node-19",)) == set(names[190:200])
    assert shown_instances(scheduler.instances, ("node-19", "drain")) == {names[-2]}
    assert shown_instances(scheduler.instances, ("none",)) == set()
    sums = totals_of(scheduler.instances)
    assert (sums["instances"], sums["in_flight"], sums["ready"]) == (len(names), 1, len(names) - 1)
    assert shown_instances(scheduler.instances[:INSTANCES_SHOWN], ("none",)) is None


async def test_viewers_that_look_for_others_have_streams_of_their_own(tmp_path: Path) -> None:
    servers = {
        f"node-{number:03}": f"http://127.0.0.{number + 1}:9" for number in range(INSTANCES_SHOWN + 50)
    }
    fleet = document()
    fleet["models"] = [
        {"name": "m", "instances": [{"name": name, "url": url} for name, url in servers.items()]}
    ]
    async with serving(tmp_path, fleet) as running:
        url = f"http://127.0.0.1:{running.service.admin.address[1]}/v1/events"
        async with aiohttp.ClientSession() as session:
            for words, count in (("", INSTANCES_SHOWN), ("?words=node-14", 10), ("?words=" + "x" * 900, 0)):
                async with session.get(url + words) as reply:
                    [model] = (await next_snapshot(reply))["fleet"]["models"]
                assert (len(model["instances"]), model["totals"]["instances"]) == (count, len(servers))


async def test_a_snapshot_holds_what_the_page_shows(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two, serving(tmp_path, document(one, two)) as running:
        for _ in range(3):
            await running.ask()
        await running.settled()
        async with listening(running) as reply:
            assert reply.headers["content-type"] == "text/event-stream"
            snapshot = await next_snapshot(reply)
        fleet = (await running.admin("GET", "/v1/fleet")).json
        shown = snapshot["fleet"]
        assert [each["name"] for each in shown["models"][0]["instances"]] == ["i0", "i1"]
        for mine, theirs in zip(
            shown["models"][0]["instances"], fleet["models"][0]["instances"], strict=True
        ):
            assert mine["health_reason"] == "probe answered"
            assert set(mine.pop("model_factors")) == {"prefill", "mixed", "decode"}
            assert mine.keys() == theirs.keys()
        assert shown["queue"] == {"requests": 0, "bytes": 0, "models": {}, "oldest_s": None}
        assert (shown["policy"], snapshot["policies"][0]) == ("rr", "rr")
        assert snapshot["decisions"]["total"] == 3
        assert [each["chosen"] for each in snapshot["decisions"]["last"]] == ["i0", "i1", "i0"]
        assert "candidates" not in snapshot["decisions"]["last"][0]
        assert snapshot["accuracy"]["instances"] == ["i0", "i1"]
        assert snapshot["status"] == (await running.admin("GET", "/v1/status")).json
        assert snapshot["status"]["state"] == "well"
        [balance] = snapshot["balance"]
        assert (balance["model"], balance["balanced"]) == ("m", True)
        assert sum(each["work_share"] for each in balance["instances"]) == pytest.approx(1.0, abs=1e-3)
        assert sum(each["speed_share"] for each in balance["instances"]) == pytest.approx(1.0, abs=1e-3)


async def test_what_waits_is_counted_by_model_and_age(tmp_path: Path) -> None:
    fleet = document(*[], policy={"name": "hetlb"})
    async with Engine() as engine:
        fleet["models"][0]["instances"] = [{"name": "i0", "url": engine.url}]
        async with serving(tmp_path, fleet) as running:
            await running.admin("PUT", "/v1/fleet/instances/i0/state", {"state": "drain"})
            asking = asyncio.create_task(running.ask())
            await turns_until(lambda: len(running.scheduler.queue) == 1)
            async with listening(running) as reply:
                queue = (await next_snapshot(reply))["fleet"]["queue"]
            assert (queue["requests"], queue["models"]) == (1, {"m": 1})
            assert queue["oldest_s"] >= 0
            await running.admin("PUT", "/v1/fleet/instances/i0/state", {"state": "ready"})
            assert (await asking).status == 200


async def test_one_decision_with_its_candidates(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two, serving(tmp_path, document(one, two)) as running:
        for _ in range(DECISIONS_SHOWN + 2):
            await running.ask()
        async with listening(running) as reply:
            last = (await next_snapshot(reply))["decisions"]["last"]
        assert len(last) == DECISIONS_SHOWN
        assert last[0]["lease"] > last[1]["lease"]
        decision = (await running.admin("GET", f"/v1/decisions/{last[1]['lease']}")).json
        assert {name: decision[name] for name in last[1]} == last[1]
        assert [each["instance"] for each in decision["candidates"]] == ["i0", "i1"]
        assert decision["ended"] is True
        gone = await running.admin("GET", "/v1/decisions/123456789")
        assert (gone.status, gone.message) == (404, "this decision is not kept any more")
        for path in ("/v1/decisions/x", "/v1/decisions/-1", "/v1/decisions/1234567890123456789"):
            assert (await running.admin("GET", path)).status == 404


async def test_with_a_token_only_the_files_are_public(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame")
    fleet = document(admin={"token_file": str(tmp_path / "token")})
    async with Engine() as engine:
        fleet["models"][0]["instances"] = [{"name": "i0", "url": engine.url}]
        async with serving(tmp_path, fleet) as running:
            await running.ask()
            for path in FILES:
                assert (await running.admin("GET", path)).status == 200, path
            for method, path in (
                ("GET", "/v1/events"), ("GET", "/v1/decisions/1"), ("GET", "/v1/status"),
            ):  # fmt: skip
                assert (await running.admin(method, path)).status == 401, path
            async with listening(running, authorization="Bearer sesame") as reply:
                assert (await next_snapshot(reply))["fleet"]["models"][0]["name"] == "m"


async def test_another_page_in_the_browser_hears_nothing(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        for path in ("/v1/events", "/v1/decisions/1", "/v1/status"):
            assert (await running.admin("GET", path, origin="http://evil.example")).status == 403


# --- the stream ---


class Counted:
    """Snapshots that say how many there were."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> bytes:
        self.count += 1
        return b"%d" % self.count


@asynccontextmanager
async def served(stream: EventStream) -> AsyncIterator[str]:
    """A server with the stream alone; its address."""
    app = web.Application()
    app.router.add_get("/", stream.serve)
    app.on_shutdown.append(lambda _: asyncio.sleep(0, stream.close()))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


async def test_nothing_is_computed_without_listeners() -> None:
    counted = Counted()
    stream = EventStream(counted, interval_s=0.01)
    async with served(stream) as url, aiohttp.ClientSession() as session:
        assert counted.count == 0
        async with session.get(url) as reply:
            await reply.content.readuntil(b"\n\n")
            assert stream.listeners == 1
        await turns_until(lambda: stream.listeners == 0 and stream._timer is None)
        before = counted.count
        # A new listener gets a fresh one.
        async with session.get(url) as reply:
            assert await reply.content.readuntil(b"\n\n") == b"event: snapshot\ndata: %d\n\n" % (before + 1)


async def test_all_listeners_share_one_snapshot() -> None:
    counted = Counted()
    async with served(EventStream(counted, interval_s=3600)) as url, aiohttp.ClientSession() as session:
        for _ in range(3):
            async with session.get(url) as reply:
                assert await reply.content.readuntil(b"\n\n") == b"event: snapshot\ndata: 1\n\n"
        assert counted.count == 1


async def test_a_snapshot_that_takes_long_is_made_less_often() -> None:
    spent_s = 0.0

    def costly() -> bytes:
        nonlocal spent_s
        began_s = time.thread_time()
        while (spent_s := time.thread_time() - began_s) < 0.02:
            pass
        return b"1"

    stream = EventStream(costly, interval_s=0.1)
    async with served(stream) as url, aiohttp.ClientSession() as session, session.get(url) as reply:
        await reply.content.readuntil(b"\n\n")
        assert stream._timer is not None
        assert stream._timer.when() - asyncio.get_running_loop().time() > 0.5


async def test_the_stream_goes_on_and_ends_with_the_server() -> None:
    counted = Counted()
    async with aiohttp.ClientSession() as session:
        async with served(EventStream(counted, interval_s=0.01)) as url:
            reply = await session.get(url)
            for number in range(1, 4):
                assert await reply.content.readuntil(b"\n\n") == b"event: snapshot\ndata: %d\n\n" % number
        assert await reply.read() == b""


async def test_there_are_no_more_listeners_than_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_LISTENERS", 2)
    stream = EventStream(Counted(), interval_s=3600)
    async with served(stream) as url, aiohttp.ClientSession() as session:
        async with session.get(url) as one, session.get(url) as two, session.get(url) as refused:
            assert (one.status, two.status, refused.status) == (200, 200, 503)
            assert await refused.text() == "2 pages are open, no more are served"


async def test_a_snapshot_that_fails_is_not_the_last_one() -> None:
    counted = Counted()

    def sometimes() -> bytes:
        text = counted()
        if counted.count == 2:
            raise ValueError("expected by this test")
        return text

    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    async with served(EventStream(sometimes, interval_s=0.01)) as url, aiohttp.ClientSession() as session:
        async with session.get(url) as reply:
            assert await reply.content.readuntil(b"\n\n") == b"event: snapshot\ndata: 1\n\n"
            assert await reply.content.readuntil(b"\n\n") == b"event: snapshot\ndata: 3\n\n"
    assert ["expected by this test" in str(context["exception"]) for context in told] == [True]


async def test_a_decision_says_how_many_tokens_came_so_far(tmp_path: Path) -> None:
    async with Engine(SSE_HEAD + 3 * chunk(TOKEN)) as engine, serving(tmp_path, document(engine)) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        body = b'{"model":"m","prompt":"hello","max_tokens":5,"stream":true}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        for _ in range(3):
            await reader.readuntil(TOKEN)

        async def counted() -> list[tuple[int, bool]]:
            listed = (await running.admin("GET", "/v1/decisions")).json["decisions"]
            single = (await running.admin("GET", f"/v1/decisions/{listed[0]['lease']}")).json
            return [(each["output_tokens"], each["ended"]) for each in (*listed, single)]

        assert await counted() == [(3, False)] * 2
        (await engine.asked_for()).send(chunk(TOKEN) + chunk(DONE) + LAST)
        await reader.readuntil(LAST)
        assert await counted() == [(4, True)] * 2
        writer.close()
