"""The harness itself: it notices what it is there to notice."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from faults import checker as checking
from faults.client import Client, body_of, request
from faults.engine import MODES, FaultEngine
from faults.everything import CASES, FILES
from faults.rig import Checker, check_requests, engines, in_process
from faults.wire import BlackHole


def test_every_way_to_fail_is_used() -> None:
    assert len(MODES) >= 40
    incidents = Path(__file__).parents[1] / "proxy" / "test_incidents.py"  # it makes some of its own
    text = "".join(path.read_text() for path in (*FILES, incidents))
    statuses = {"400", "404", "413", "422", "429", "503"}
    unused = [name for name in MODES if f'"{name}"' not in text and name.partition("-")[0] not in statuses]
    assert unused == ["ok-stream"]  # the other half of `ok`


def test_what_is_known_to_be_missing_is_one_line() -> None:
    for each in CASES:
        assert each.known is None or re.fullmatch(r"[^\n|*]{10,110}", each.known), each.known


async def test_what_is_left_behind_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "QUIESCE_S", 0.3)
    async with engines(1) as (made, neighbour), in_process(tmp_path, made, neighbour, {}) as rig:
        checker = Checker(rig.admin_port, (*made, neighbour), own_process=True)
        before = await checker.snapshot()
        made[0].mode = "held"
        # More than come and go by themselves.
        async with Client(rig.port) as client, Client(rig.port), Client(rig.port):
            client.send(request("q", body_of("q")))
            await made[0].visit()
            with pytest.raises(AssertionError, match=r"not at rest: .*i0\.in_flight"):
                await checker.snapshot()
            made[0].released.set()
            assert (await client.answer()).done
            with pytest.raises(AssertionError, match="left behind: descriptors"):
                await checker.back_to(before)  # the clients' own connections
        tasks = [asyncio.create_task(asyncio.sleep(60)) for _ in range(5)]
        with pytest.raises(AssertionError, match=r"left behind: .*tasks"):
            await checker.back_to(before)
        for task in tasks:
            task.cancel()
        now = await checker.back_to(before)
        check_requests(rig, before, now, None, 1)
        with pytest.raises(AssertionError, match="2 requests, but 1 outcomes"):
            check_requests(rig, before, now, None, 2)
        made[0].executions["q"] += 1
        with pytest.raises(AssertionError, match="q was run 2 times"):
            check_requests(rig, before, now, None, 1)


async def test_tokens_of_another_request_are_noticed() -> None:
    async with FaultEngine() as engine, Client(engine.port) as client:
        client.send(request("mine", body_of("mine")))
        answer = await client.answer()
    assert answer.tokens("mine") == 4
    with pytest.raises(AssertionError, match="expected token 0 of yours"):
        answer.tokens("yours")


async def test_a_black_hole_takes_no_connection() -> None:
    with BlackHole() as hole:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await asyncio.open_connection("127.0.0.1", hole.port)
