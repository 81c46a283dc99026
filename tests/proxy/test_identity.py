"""Who answers at an instance's address: another engine after a restart, or this proxy itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from helpers import turns_until
from proxy.services import Engine, document, said, serving

from hetlb.balancer.core.evidence.table import RISE_PROBES
from hetlb.balancer.core.facts import Probed, ProbeResult
from hetlb.balancer.core.types import AdminState

#: No probe comes while a test runs: what is found out is found out by the requests themselves.
SELDOM = {"interval_s": 1000.0}


async def test_after_a_reconnect_the_next_request_does_not_go_to_another_model(tmp_path: Path) -> None:
    async with Engine() as engine, Engine() as other:
        async with serving(tmp_path, document(engine, other, scrape=SELDOM)) as running:
            assert (await running.ask()).status == 200
            first = engine if engine.asked else other
            answered = len(first.asked)
            # It restarts with another model at its address: its connections end.
            first.served = "another"
            for visit in list(first.visits):
                visit.writer.close()
            await first.closed()
            instance = next(each for each in running.scheduler.instances if each.spec.url == first.url)
            for _ in range(4):
                assert (await running.ask()).status == 200
            assert len(first.asked) == answered, "a request for the old model reached the new one"
            assert instance.served == ("another",)


async def test_an_engine_that_is_the_same_after_a_reconnect_is_used_on(tmp_path: Path) -> None:
    async with Engine() as engine:
        async with serving(tmp_path, document(engine, scrape=SELDOM)) as running:
            assert (await running.ask()).status == 200
            for visit in list(engine.visits):
                visit.writer.close()
            await engine.closed()
            lists = sum(b"/v1/models" in visit.head for visit in engine.visits)
            assert (await running.ask()).status == 200
            assert (await running.ask()).status == 200
            assert sum(b"/v1/models" in visit.head for visit in engine.visits) == lists + 1


async def test_after_a_reconnect_no_request_goes_to_an_engine_that_still_loads(tmp_path: Path) -> None:
    async with Engine() as engine:
        async with serving(tmp_path, document(engine, scrape=SELDOM)) as running:
            assert (await running.ask()).status == 200
            engine.served = ""
            for visit in list(engine.visits):
                visit.writer.close()
            await engine.closed()
            asked = len(engine.asked)
            waits = asyncio.create_task(running.ask())
            await turns_until(lambda: len(running.scheduler.queue) == 1)
            assert len(engine.asked) == asked
            assert running.scheduler.instances[0].evidence.health.reason == "loading: it lists no model"
            engine.served = "m"
            name = running.scheduler.instances[0].name
            for _ in range(RISE_PROBES):
                running.service.scheduling.change(Probed(name, ProbeResult.OK))
            assert (await waits).status == 200


async def test_a_request_for_the_model_of_an_engine_that_loads_waits(tmp_path: Path) -> None:
    async with Engine() as engine:
        engine.served = ""
        async with serving(tmp_path, document(engine, scrape={"interval_s": 0.05})) as running:
            waits = asyncio.create_task(running.ask())
            await turns_until(lambda: len(running.scheduler.queue) == 1)
            assert not engine.asked
            engine.served = "m"
            assert (await waits).status == 200
            assert running.scheduler.instances[0].served == ("m",)


async def completion(port: int, model: str) -> int:
    """Status of a completion by a model."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b'{"model":"%b","prompt":"x"}' % model.encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: p\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    try:
        writer.write(head % len(body) + body)
        return int((await reader.read()).split()[1])
    finally:
        writer.close()


async def test_a_model_that_was_loaded_a_moment_ago_is_found_by_its_first_request(tmp_path: Path) -> None:
    async with Engine() as engine, Engine() as other:
        async with serving(tmp_path, document(engine, other, scrape=SELDOM)) as running:
            assert (await running.ask()).status == 200
            engine.served = "loaded"
            found = await asyncio.gather(*(completion(running.port, "loaded") for _ in range(3)))
            assert found == [200, 200, 200]
            assert len(engine.asked) >= 3
            # A name that no engine has is refused; the engines are not asked again for each of these.
            lists = sum(b"/v1/models" in visit.head for visit in engine.visits)
            assert await completion(running.port, "none") == 404
            assert await completion(running.port, "none") == 404
            assert sum(b"/v1/models" in visit.head for visit in engine.visits) == lists


async def test_a_client_that_leaves_while_models_are_looked_up_leaves_nothing(tmp_path: Path) -> None:
    async with Engine() as engine:
        async with serving(tmp_path, document(engine, scrape=SELDOM)) as running:
            assert (await running.ask()).status == 200
            scheduling, looked_up = running.service.scheduling, []
            scheduling.look_up = lambda again: looked_up.append(again) or True
            client = asyncio.create_task(completion(running.port, "none"))
            await turns_until(lambda: len(looked_up) == 1)
            client.cancel()
            await turns_until(lambda: not scheduling._unknown)
            looked_up[0]()
            assert not running.service.driver.exchanges


async def test_a_client_that_leaves_while_the_engine_is_asked_leaves_nothing(tmp_path: Path) -> None:
    async with Engine() as engine:
        async with serving(tmp_path, document(engine, scrape=SELDOM)) as running:
            assert (await running.ask()).status == 200
            for visit in list(engine.visits):
                visit.writer.close()
            await engine.closed()
            (pool,) = running.service.driver.pools.all()
            engine.scripts[0] = _never
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            body = b'{"model":"m","prompt":"x"}'
            head = b"POST /v1/completions HTTP/1.1\r\nhost: p\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            await turns_until(lambda: len(pool._checks) == 1)
            writer.close()
            await turns_until(lambda: not pool._checks)
            assert not pool.busy
            del reader


async def _never(visit: object) -> None:
    await visit.until_left()  # type: ignore[attr-defined]


async def test_a_proxy_that_is_its_own_instance_takes_itself_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine() as engine:
        fleet = document(engine, admin={"port": 0, "registration": True})
        async with serving(tmp_path, fleet) as running:
            url = f"http://127.0.0.1:{running.port}"
            reply = await running.admin(
                "POST", "/v1/fleet/instances", {"name": "self", "url": url, "model": "m"}
            )
            assert reply.status == 201
            await running.up("self")
            for _ in range(4):
                assert (await running.ask()).status == 200
            assert running.instance("self").admin is AdminState.MAINT
            assert running.instance("i0").admin is AdminState.READY
            assert len(engine.asked) == 4
            assert running.scheduler.in_flight == 0
    assert len(said(caplog.records, "is this proxy itself")) == 1
