"""`hetlb serve --workers N` with real processes: one proxy to its clients and its operator."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from pathlib import Path

import msgspec
import pytest
import yaml
from helpers import HANG_S, turns_until
from options.peers.workers.processes import (
    PROMPT,
    Serve,
    Serving,
    at_rest,
    in_flight,
    worker_of,
)
from proxy.services import Engine, Reply, document
from proxy.upstreams import Visit, plain

#: Room for one such request at a time.
PROFILE = """
version: 1
name: small
engine: {kv_cache_tokens: 200, max_num_seqs: 64, block_size: 16}
prefill: {k1: 1.1e-4, k2: 1.0e-3, k3: 0.0, k4: 1.0e-2}
decode: {k5: 5.0e-8, k6: 6.0e-5, k7: 0.0, k8: 1.3e-2}
"""


class Turns(Engine):
    """An engine that answers one request at a time, each when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = asyncio.Semaphore(0)
        self.order: list[str] = []

    async def _route(self, visit: Visit) -> None:
        path = visit.head.split()[1]
        if path != b"/v1/completions":
            await super()._route(visit)
            return
        self.order.append(msgspec.json.decode(visit.body)["user"])
        async with self.arrived:
            self.arrived.notify_all()
        await self.turns.acquire()
        visit.send(plain())

    async def has_served(self, count: int) -> list[str]:
        """Return the first `count` requests, when they have come."""
        async with asyncio.timeout(HANG_S), self.arrived:
            await self.arrived.wait_for(lambda: len(self.order) >= count)
        return self.order


# --- one proxy ---


async def test_a_balancer_that_asks_for_health_is_told_that_it_serves(serve: Serve) -> None:
    async with Engine() as one:
        proxy = await serve(document(one), workers=2)
        for _ in range(8):  # a connection each: either worker may answer
            assert (await proxy.ask("/health", "GET")).status == 200


async def test_figures_counters_and_decisions_are_of_all_processes(serve: Serve) -> None:
    async with Engine() as one, Engine() as two:
        proxy = await serve(document(one, two), workers=2)
        assert len(proxy.workers) == 2
        replies = await proxy.both_serve()
        one.hold()
        two.hold()
        asked = [asyncio.create_task(proxy.ask()) for _ in range(12)]
        fleet = await proxy.fleet_until(lambda fleet: in_flight(fleet) == 12)
        # Two workers choose at the same time: news of a lease is on its way meanwhile.
        one_has, two_has = (each["in_flight"] for each in fleet["models"][0]["instances"])
        assert abs(one_has - two_has) <= 4
        one.released.set()
        two.released.set()
        replies += await asyncio.gather(*asked)
        total = len(replies)
        assert {reply.status for reply in replies} == {200}
        await proxy.metric_until('hetlb_requests_total{outcome="ok",phase="answer"}', total)
        await proxy.metric_until("hetlb_decisions_total", total)
        await proxy.metric_until('hetlb_e2e_request_latency_seconds_count{model="m"}', total)
        await proxy.metric_until('hetlb_worker_up{worker="1"}', 1)
        decisions = (await proxy.admin("/v1/decisions?last=1000")).json["decisions"]
        assert len(decisions) == total
        times = [each["dispatched_at_s"] for each in decisions]
        assert times == sorted(times)
        assert all(len(each["candidates"]) == 2 for each in decisions)
        assert len({each["lease"] for each in decisions}) == total
        again = (await proxy.admin(f"/v1/decisions/{decisions[0]['lease']}")).json
        assert again == decisions[0]
        label = replies[0].headers["x-request-id"]
        [found] = (await proxy.admin(f"/v1/decisions?request_id={label}")).json["decisions"]
        assert found["request_id"] == int(label.rpartition("-")[2], 16)
        assert len(await lines(proxy, total)) == total


async def test_each_worker_knows_where_a_response_is_kept(serve: Serve) -> None:
    kept = plain(b'{"id":"resp_a","object":"response","output":[],"status":"completed"}')
    async with Engine(kept) as one, Engine(kept) as two:
        proxy = await serve(document(one, two), workers=2)
        first = await proxy.ask("/v1/responses", model="m", input="y")
        found: dict[str, str] = {}
        async with asyncio.timeout(HANG_S):
            while len(found) < 2:
                reply = await proxy.ask("/v1/responses/resp_a", "GET")
                if reply.status == 200:
                    found[worker_of(reply)] = reply.headers["x-hetlb-instance"]
        assert set(found.values()) == {first.headers["x-hetlb-instance"]}


async def lines(proxy: Serving, count: int) -> list[str]:
    """Return the lines of the request log, once there are `count`; each is whole."""
    async with asyncio.timeout(HANG_S), proxy._news:
        await proxy._news.wait_for(lambda: sum("request=" in line for line in proxy.errors) >= count)
    found = [line for line in proxy.errors if "request=" in line]
    assert all(line.startswith("time=") and " retries=0" in line for line in found)
    return found


# --- the queue ---


async def test_the_queue_is_one_over_all_workers(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(PROFILE)
    async with Turns() as engine:
        fleet = document(engine, policy={"name": "hetlb"}, queue={"max_requests": 8})
        fleet["models"][0]["instances"][0]["profile"] = "small.yaml"
        proxy = await serve(fleet, workers=3)
        asked = [asyncio.create_task(proxy.ask(**PROMPT, user="first"))]
        await engine.has_served(1)
        await proxy.everywhere(lambda fleet: in_flight(fleet) == 1)
        names = [f"n{number}" for number in range(8)]
        for number, name in enumerate(names):
            asked.append(asyncio.create_task(proxy.ask(**PROMPT, user=name)))
            await proxy.fleet_until(lambda fleet, wanted=number + 1: fleet["queue"]["requests"] == wanted)
        await proxy.metric_until('hetlb_queue_requests{model="m"}', 8)
        refused = [await proxy.ask(**PROMPT, user="late") for _ in range(6)]
        assert {reply.status for reply in refused} == {429}
        for served in range(1, 9):
            engine.turns.release()
            await engine.has_served(served + 1)
        engine.turns.release()
        replies = await asyncio.gather(*asked)
        assert {reply.status for reply in replies} == {200}
        assert len({worker_of(reply) for reply in replies + refused}) >= 2
        # Over the workers it is the oldest's turn (`test_shared_view.py`), but for late news or workers.
        waited = list(zip(names, map(worker_of, replies[1:]), strict=True))
        for each in {worker for _, worker in waited}:
            own = [name for name, worker in waited if worker == each]
            assert sorted(own, key=engine.order.index) == own, engine.order


# --- processes that die ---


async def test_nothing_is_left_of_a_killed_worker_and_another_serves(serve: Serve) -> None:
    async with Engine() as one, Engine() as two:
        proxy = await serve(document(one, two), workers=2)
        await proxy.both_serve()
        one.hold()
        two.hold()
        asked = [asyncio.create_task(proxy.ask()) for _ in range(20)]
        await proxy.fleet_until(lambda fleet: in_flight(fleet) == 20)
        before = await proxy.metric("hetlb_decisions_total")
        killed = proxy.workers[0]
        os.kill(killed, signal.SIGKILL)
        line = await proxy.said("was ended by signal 9")
        assert "another takes its place at once" in line
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        await proxy.metric_until('hetlb_worker_up{worker="0"}', 1.0)
        await proxy.metric_until('hetlb_worker_up{worker="1"}', 1.0)
        lost = sum(task.done() for task in asked)
        assert 0 < lost < 20
        assert len(done) <= lost
        fleet = await proxy.fleet_until(lambda fleet: in_flight(fleet) == 20 - lost)
        assert not at_rest(fleet)
        await turns_until(lambda: killed not in (workers := proxy.workers) and len(workers) == 2)
        one.released.set()
        two.released.set()
        replies = await asyncio.gather(*asked, return_exceptions=True)
        kept = [reply for reply in replies if isinstance(reply, Reply)]
        assert len(kept) == 20 - lost
        assert {reply.status for reply in kept} == {200}
        await proxy.fleet_until(at_rest)
        assert {reply.status for reply in await proxy.both_serve()} == {200}
        async with asyncio.timeout(HANG_S):
            while await proxy.metric("hetlb_decisions_total") <= before:
                pass
        restarts = [await proxy.metric(f'hetlb_worker_restarts_total{{worker="{n}"}}') for n in range(2)]
        assert sorted(restarts) == [0, 1]


# --- what an operator changes ---


async def test_a_change_is_in_force_everywhere_when_it_is_answered(serve: Serve) -> None:
    async with Engine() as one, Engine() as two:
        proxy = await serve(document(one, two), workers=2)
        await proxy.both_serve()
        assert (await proxy.admin("/v1/fleet/instances/i0/state", "PUT", state="drain")).status == 200
        count = len(one.asked)
        replies = await proxy.both_serve() + [await proxy.ask() for _ in range(8)]
        assert {reply.headers["x-hetlb-instance"] for reply in replies} == {"i1"}
        assert len(one.asked) == count
        assert (await proxy.admin("/v1/policy", "PUT", name="least-requests")).status == 200
        replies = await proxy.both_serve()
        last = (await proxy.admin(f"/v1/decisions?last={len(replies)}")).json["decisions"]
        assert {each["policy"] for each in last} == {"least-requests"}
        # A process that is started later knows of it.
        os.kill(proxy.workers[0], signal.SIGKILL)
        await proxy.said("was ended by signal 9")
        for number in range(2):
            await proxy.metric_until(f'hetlb_worker_up{{worker="{number}"}}', 1.0)
        replies = await proxy.both_serve()
        assert {reply.headers["x-hetlb-instance"] for reply in replies} == {"i1"}
        last = (await proxy.admin(f"/v1/decisions?last={len(replies)}")).json["decisions"]
        assert {each["policy"] for each in last} == {"least-requests"}


async def test_instances_come_and_go_in_all_workers(serve: Serve) -> None:
    async with Engine() as one, Engine() as two:
        proxy = await serve(document(one, admin={"registration": True}), workers=2)
        added = await proxy.admin("/v1/fleet/instances", "POST", name="i1", url=two.url, model="m")
        assert added.status == 201
        await proxy.admin("/v1/fleet/instances/i0/state", "PUT", state="drain")
        replies = await proxy.both_serve()
        assert {reply.headers["x-hetlb-instance"] for reply in replies} == {"i1"}
        os.kill(proxy.workers[0], signal.SIGKILL)
        await proxy.said("was ended by signal 9")
        replies = await proxy.both_serve()
        assert {reply.headers["x-hetlb-instance"] for reply in replies if reply.status == 200} == {"i1"}
        assert (await proxy.admin("/v1/fleet/instances/i1", "DELETE")).status == 200
        await proxy.admin("/v1/fleet/instances/i0/state", "PUT", state="ready")
        replies = await proxy.both_serve()
        assert {reply.headers["x-hetlb-instance"] for reply in replies} == {"i0"}


@pytest.mark.parametrize("by_signal", [False, True])
async def test_a_reload_is_whole_in_all_workers_or_nowhere(serve: Serve, by_signal: bool) -> None:
    async with Engine() as one, Engine() as two:
        proxy = await serve(document(one), workers=2)
        assert (await proxy.admin("/readyz")).status == 200
        proxy.path.write_text(yaml.safe_dump(document(one) | {"wrong": 1}))
        if by_signal:
            proxy.process.send_signal(signal.SIGHUP)
        else:
            assert (await proxy.admin("/v1/reload", "POST")).status == 400
        assert "wrong" in await proxy.said("not reloaded")
        assert {reply.headers["x-hetlb-instance"] for reply in await proxy.both_serve()} == {"i0"}
        other = document(two)
        other["models"][0]["instances"][0]["name"] = "new"
        proxy.path.write_text(yaml.safe_dump(other))
        if by_signal:
            proxy.process.send_signal(signal.SIGHUP)
            await proxy.said("reloaded: 1 instances out, 1 in")
        else:
            assert (await proxy.admin("/v1/reload", "POST")).status == 200
        await proxy.fleet_until(lambda fleet: fleet["models"][0]["instances"][0]["health"] == "up")
        replies = await proxy.both_serve()
        assert {reply.headers["x-hetlb-instance"] for reply in replies if reply.status == 200} == {"new"}
        await proxy.metric_until('hetlb_config_reloads_total{result="done"}', 1)
        await proxy.metric_until('hetlb_config_reloads_total{result="refused"}', 1)
        os.kill(proxy.workers[0], signal.SIGKILL)
        await proxy.said("was ended by signal 9")
        replies = await proxy.both_serve()
        assert {reply.headers["x-hetlb-instance"] for reply in replies if reply.status == 200} == {"new"}


# --- engines ---


@pytest.mark.parametrize("body", [b'{"error":"full"}', b"", b"x" * 200_000], ids=["short", "empty", "long"])
async def test_a_busy_engine_is_relieved_by_another_and_heard_where_there_is_none(
    serve: Serve, body: bytes
) -> None:
    busy = plain(body, b"503 Service Unavailable", b"retry-after: 30\r\n")
    async with Engine(busy) as one, Engine() as two:
        proxy = await serve(document(one, two), workers=2)
        replies = [await proxy.ask() for _ in range(6)]
        assert {(reply.status, reply.headers["x-hetlb-instance"]) for reply in replies} == {(200, "i1")}
        assert len(one.asked) >= 1
        await proxy.metric_until("hetlb_retries_total", len(one.asked))
        await proxy.admin("/v1/fleet/instances/i1/state", "PUT", state="drain")
        heard = await proxy.ask()
        assert (heard.status, heard.body) == (503, body)
        assert heard.headers["retry-after"] == "30"
        await proxy.fleet_until(at_rest)


async def test_a_refused_connection_is_tried_elsewhere(serve: Serve) -> None:
    async with Engine() as one:
        fleet = document(one, one)
        fleet["models"][0]["instances"][0]["url"] = "http://127.0.0.1:9"
        proxy = await serve(fleet, workers=2)
        assert {reply.status for reply in await proxy.both_serve()} == {200}


async def test_clients_keys_are_reloaded_in_every_worker(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"

    def write(key: bytes) -> None:
        keys.write_text(yaml.safe_dump([{"name": "t", "sha256": hashlib.sha256(key).hexdigest()}]))

    write(b"old")
    async with Engine() as one:
        proxy = await serve(document(one, proxy={"api_keys_file": "keys.yaml"}), workers=2)
        statuses = [(await proxy.ask(key="old")).status for _ in range(8)]
        assert set(statuses) == {200}
        keys.write_text("nonsense")
        assert (await proxy.admin("/v1/reload", "POST")).status == 400
        assert (await proxy.ask(key="old")).status == 200
        write(b"new")
        assert (await proxy.admin("/v1/reload", "POST")).status == 200
        assert {(await proxy.ask(key="old")).status for _ in range(8)} == {401}
        assert {(await proxy.ask(key="new")).status for _ in range(8)} == {200}
