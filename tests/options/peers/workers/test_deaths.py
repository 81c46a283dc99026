"""Processes of `hetlb serve --workers N` killed or stopped under load."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from helpers import turns_until
from options.peers.workers.processes import PROMPT, Serve, Serving, alive, at_rest, in_flight, name_of
from proxy.services import Engine, document
from proxy.upstreams import DONE, LAST, SSE_HEAD, TOKEN, USAGE, Visit, chunk

from hetlb.cli.main import main

STREAMS = 200
WAITING = 40
#: Room for `STREAMS` requests of `PROMPT` at a time.
PROFILE = f"""
version: 1
name: small
engine: {{kv_cache_tokens: {130 * STREAMS}, max_num_seqs: {2 * STREAMS}, block_size: 16}}
prefill: {{k1: 1.1e-4, k2: 1.0e-3, k3: 0.0, k4: 1.0e-2}}
decode: {{k5: 5.0e-8, k6: 6.0e-5, k7: 0.0, k8: 1.3e-2}}
"""
#: Deaths: one, and more with the slow tests. A worker that dies again is replaced after 0.5 s, 1, 2, 4, ...:
#: with eight deaths two workers wait for 15 s in all.
WORKER_DEATHS = [
    pytest.param(1, marks=pytest.mark.light),
    pytest.param(8, marks=pytest.mark.slow),
]


class Streams(Engine):
    """An engine whose streams each get a token when `tick` is called, and end when `released` is set.

    They begin with eight: fewer are kept back of a trial, which an engine gets that was silent for seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streaming: set[Visit] = set()

    async def _route(self, visit: Visit) -> None:
        if visit.head.split()[1] != b"/v1/completions":
            await super()._route(visit)
            return
        visit.send(SSE_HEAD + 8 * chunk(TOKEN))
        self.streaming.add(visit)
        left = asyncio.create_task(visit.until_left())
        released = asyncio.create_task(self.released.wait())
        await asyncio.wait([left, released], return_when=asyncio.FIRST_COMPLETED)
        self.streaming.discard(visit)
        if left.done():
            return
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        visit.send(chunk(USAGE) + chunk(DONE) + LAST)

    def tick(self) -> None:
        for visit in self.streaming:
            visit.send(chunk(TOKEN))


class Stream:
    """One streamed request: how many tokens came, and how it ended."""

    def __init__(self, proxy: Serving) -> None:
        self.tokens = 0
        self.status = 0
        self.worker = ""
        self.whole = False
        self.changed = asyncio.Event()
        self.task = asyncio.create_task(self._read(proxy))

    async def _read(self, proxy: Serving) -> None:
        data = msgspec.json.encode({**PROMPT, "stream": True})
        url = proxy.url + "/v1/completions"
        try:
            timeout = aiohttp.ClientTimeout(total=300)
            async with proxy.session.post(url, data=data, timeout=timeout) as reply:
                self.status = reply.status
                self.worker = reply.headers["x-request-id"].rpartition("-")[0]
                async for line in reply.content:
                    self.tokens += line.startswith(b'data: {"choices":[{')
                    self.whole = self.whole or line == b"data: [DONE]\n"
                    self.changed.set()
        except (aiohttp.ClientError, ConnectionError):
            pass
        finally:
            self.changed.set()

    async def until(self, tokens: int) -> None:
        while self.tokens < tokens and not self.task.done():
            self.changed.clear()
            await self.changed.wait()


async def begin(serve: Serve, tmp_path: Path, engine: Streams, count: int) -> tuple[Serving, list[Stream]]:
    """A proxy of two workers with `count` streams, of which some wait where that is more than `STREAMS`."""
    (tmp_path / "small.yaml").write_text(PROFILE)
    fleet = document(engine, policy={"name": "hetlb"}, scrape={"interval_s": 0.2})
    fleet["models"][0]["instances"][0]["profile"] = "small.yaml"
    fleet["proxy"] = {"request_log": False}
    proxy = await serve(fleet, workers=2)
    engine.hold()
    return proxy, await more(proxy, [], count)


async def more(proxy: Serving, streams: list[Stream], count: int) -> list[Stream]:
    """Further streams up to `count`: no more connections at once than an engine's backlog holds."""
    streams = list(streams)
    while len(streams) < count:
        streams += [Stream(proxy) for _ in range(min(40, count - len(streams)))]
        wanted = len(streams)
        await proxy.fleet_until(lambda fleet, wanted=wanted: sum(load(fleet)) == wanted)
    await proxy.fleet_until(lambda fleet: sum(stream.tokens > 0 for stream in streams) >= load(fleet)[0])
    return streams


def load(fleet: dict[str, Any]) -> tuple[int, int]:
    """Requests that run and that wait."""
    return in_flight(fleet), fleet["queue"]["requests"]


@pytest.mark.parametrize("times", WORKER_DEATHS)
async def test_a_worker_is_killed_under_load(serve: Serve, tmp_path: Path, times: int) -> None:
    async with Streams() as engine:
        proxy, streams = await begin(serve, tmp_path, engine, STREAMS)
        for number in range(1, times + 1):
            killed = proxy.workers[number % 2]
            name = name_of(killed).rpartition("-")[2]
            os.kill(killed, signal.SIGKILL)
            await proxy.metric_until(f'hetlb_worker_restarts_total{{worker="{name}"}}', (number + 1) // 2)
            await proxy.metric_until(f'hetlb_worker_up{{worker="{name}"}}', 1.0)
            before = {stream.worker for stream in streams}
            await proxy.fleet_until(
                lambda fleet, all=streams: in_flight(fleet) == sum(not each.task.done() for each in all)
            )
            left = [each for each in streams if not each.task.done()]
            gone = {each.worker for each in streams} - {each.worker for each in left}
            assert len(gone) == len(before) - len({each.worker for each in left}) >= 1
            engine.tick()
            tokens = {each: each.tokens for each in left}
            await asyncio.gather(*(each.until(tokens[each] + 1) for each in left))
            assert not any(each.task.done() for each in left), "a stream of another worker was lost"
            streams = await more(proxy, left, STREAMS)
        engine.released.set()
        await asyncio.gather(*(each.task for each in streams))
        assert {(each.status, each.whole) for each in streams} == {(200, True)}
        await proxy.fleet_until(at_rest)


async def test_a_worker_that_hangs_is_replaced(serve: Serve) -> None:
    async with Engine() as engine:
        proxy = await serve(document(engine), workers=2)
        stopped = proxy.workers[0]
        name = name_of(stopped).rpartition("-")[2]
        os.kill(stopped, signal.SIGSTOP)
        await proxy.metric_until(f'hetlb_worker_up{{worker="{name}"}}', 0.0)
        await proxy.said("it is killed")
        await proxy.metric_until(f'hetlb_worker_up{{worker="{name}"}}', 1.0)
        await proxy.metric_until(f'hetlb_worker_hangs_total{{worker="{name}"}}', 1)
        assert {reply.status for reply in await proxy.both_serve()} == {200}


async def test_what_a_worker_knew_is_known_to_the_next_one(serve: Serve) -> None:
    async with Engine() as one, Engine() as two, Engine() as three:
        proxy = await serve(document(one, two, admin={"registration": True}), workers=2)
        await proxy.admin("/v1/fleet/instances", "POST", name="new", url=three.url, model="m")
        await proxy.admin("/v1/fleet/instances/i0/state", "PUT", state="drain")
        await proxy.admin("/v1/policy", "PUT", name="rr")
        for number in range(2):  # one after the other: what the first forgot the second would not tell
            os.kill(proxy.workers[0], signal.SIGKILL)
            await proxy.metric_until("hetlb_worker_restarts_total", number + 1)
            await proxy.metric_until("hetlb_worker_up", 2)
            await proxy.metric_until("hetlb_shared_peers", 1)
        fleet = (await proxy.admin("/v1/fleet")).json
        assert fleet["policy"] == "rr"
        states = {each["name"]: each["state"] for each in fleet["models"][0]["instances"]}
        assert states == {"i0": "drain", "i1": "ready", "new": "ready"}
        replies = await proxy.both_serve() + [await proxy.ask() for _ in range(6)]
        assert {reply.headers["x-hetlb-instance"] for reply in replies} == {"i1", "new"}


async def test_counts_outlive_the_worker_that_made_them(serve: Serve) -> None:
    """A sum that fell would be a burst to Prometheus, as large as all that is left."""
    async with Engine() as one:
        proxy = await serve(document(one), workers=2)
        replies = await proxy.both_serve()
        series = 'hetlb_requests_total{outcome="ok",phase="answer"}'
        await proxy.metric_until(series, len(replies))
        for pid in proxy.workers:
            os.kill(pid, signal.SIGKILL)
        await proxy.metric_until("hetlb_worker_restarts_total", 2)
        assert await proxy.metric(series) == len(replies)
        replies += await proxy.both_serve()
        await proxy.metric_until(series, len(replies))


async def test_the_event_log_of_each_worker_replays(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "events.jsonl"
    async with Engine() as one, Engine() as two:
        proxy = await serve(document(one, two), "--event-log", str(log), workers=2)
        await proxy.both_serve()
        one.hold()
        two.hold()
        asked = [asyncio.create_task(proxy.ask()) for _ in range(20)]
        await proxy.fleet_until(lambda fleet: in_flight(fleet) == 20)
        os.kill(proxy.workers[0], signal.SIGKILL)
        one.released.set()
        two.released.set()
        await asyncio.gather(*asked, return_exceptions=True)
        await proxy.metric_until("hetlb_worker_up", 2)
        await proxy.both_serve()
        await proxy.fleet_until(at_rest)
        assert await proxy.end() == 0
    logs = sorted(name for name in os.listdir(tmp_path) if name.startswith("events.jsonl."))
    assert len(logs) == 3
    assert any('"kind":"restore"' in (tmp_path / name).read_text() for name in logs)
    for name in (logs[0], logs[-1]):
        if name.count(".") == 2 and name.replace(".0", ".0.2") in logs:
            continue  # of the killed one: its last line may be half a line
        assert main(["simulate", "--event-log", str(tmp_path / name), "--json"]) == 0
        assert msgspec.json.decode(capsys.readouterr().out)["differing_lines"] == []


async def test_without_a_supervisor_the_port_is_free_while_streams_go_on(serve: Serve) -> None:
    async with Streams() as one:
        one.hold()
        orphans = await serve(document(one))
        port, admin = (url.rpartition(":")[2] for url in (orphans.url, orphans.admin_url))
        async with orphans.session.post(
            orphans.url + "/v1/completions", json=PROMPT | {"stream": True}
        ) as reply:
            assert TOKEN in await reply.content.readany()
            left = orphans.workers
            orphans.process.kill()
            await turns_until(lambda: not listening(int(port)) and not listening(int(admin)))
            # The old ones still end what they have.
            again = await serve(document(one), "--port", port, "--admin-port", admin)
            assert again.url == orphans.url
            assert alive(left)
            one.released.set()
            assert (await reply.read()).endswith(DONE)
        await turns_until(lambda: not alive(left))


def listening(port: int) -> bool:
    """True if some process of this machine listens there."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return any(each[1].endswith(f":{port:04X}") and each[3] == "0A" for each in fields)
