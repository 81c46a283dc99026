"""The policy is put back however a test ends, and a busy fleet is waited for. Against a listener on a real
socket that answers as hetlb's does; `tests/cli/test_bench.py` uses hetlb's own."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from hetlb.errors import HetlbError
from hetlb.tools.loadtest.fleet_admin import FleetAdmin, busy_figures, fleet_admin
from hetlb.tools.workload.records import Counted

IDLE = {"in_flight": 0, "queued": 0, "workload": 0.0, "kv_reserved_tokens": 0, "health": "up"}


def fleet_of(policy: str, *instances: dict[str, Any], waiting: int = 0) -> dict[str, Any]:
    return {
        "policy": policy,
        "models": [
            {"name": "m", "instances": [{"name": f"i{n}", **each} for n, each in enumerate(instances)]}
        ],
        "queue": {"requests": waiting, "bytes": 0},
    }


class Listener:
    """What is answered, and what was asked."""

    def __init__(self) -> None:
        self.policy = "hetlb"
        self.put: list[str] = []
        self.refuse = False
        self.busy = 0
        self.polled = 0
        #: What each look at the fleet finds next; the last stays.
        self.looks: list[list[dict[str, Any]]] = []

    async def fleet(self, _: web.Request) -> web.Response:
        self.polled += 1
        if self.looks:
            found = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
            return web.json_response(fleet_of(self.policy, *found))
        busy = {**IDLE, "in_flight": 1} if self.polled <= self.busy else IDLE
        return web.json_response(fleet_of(self.policy, IDLE, busy))

    async def set_policy(self, request: web.Request) -> web.Response:
        if self.refuse:
            return web.Response(status=400, text="no such policy")
        self.policy = (await request.json())["name"]
        self.put.append(self.policy)
        return web.json_response({"policy": self.policy})

    def server(self) -> TestServer:
        app = web.Application()
        app.add_routes([web.get("/v1/fleet", self.fleet), web.put("/v1/policy", self.set_policy)])
        return TestServer(app)


async def test_the_policy_is_put_back_also_after_a_failure() -> None:
    listener = Listener()

    async def fail(url: str) -> None:
        async with fleet_admin(url) as admin:
            assert await admin.instances() == ["i0", "i1"]
            await admin.set_policy("rr")
            assert await admin.policy() == "rr"
            raise ZeroDivisionError

    async with listener.server() as server:
        with pytest.raises(ZeroDivisionError):
            await fail(f"http://{server.host}:{server.port}")
    assert listener.put == ["rr", "hetlb"]


async def test_a_policy_that_was_not_changed_is_left_alone() -> None:
    listener = Listener()
    async with listener.server() as server:
        async with fleet_admin(f"http://{server.host}:{server.port}") as admin:
            assert await admin.policy() == "hetlb"
    assert listener.put == []


async def test_it_says_so_when_the_policy_cannot_be_put_back() -> None:
    listener = Listener()

    async def lose(url: str) -> None:
        async with fleet_admin(url) as admin:
            await admin.set_policy("rr")
            listener.refuse = True

    async with listener.server() as server:
        with pytest.raises(HetlbError, match=r"^the policy hetlb could not be put back: .* no such policy$"):
            await lose(f"http://{server.host}:{server.port}")


async def test_a_busy_fleet_is_waited_for() -> None:
    listener = Listener()
    listener.busy = 4
    async with listener.server() as server:
        async with fleet_admin(f"http://{server.host}:{server.port}") as admin:
            await admin.idle()
    assert listener.polled == 5


def report(age_s: float | None, preemptions: int | None, kv: float | None) -> dict[str, Any]:
    """One engine's report. A negative age is newer than anything, a large one older."""
    return {**IDLE, "signal_age_s": age_s, "preemptions": preemptions, "kv_reported": kv}


async def reported(*looks: list[dict[str, Any]]) -> Counted:
    """What is made of these looks at the fleet; the run, which does nothing, is after the first."""
    listener = Listener()
    listener.looks = [looks[0], *looks]  # one more: the policy is asked for first
    async with listener.server() as server:
        async with fleet_admin(f"http://{server.host}:{server.port}") as admin:
            async with admin.reported() as found:
                pass
    return found


async def test_preemptions_count_the_run_and_the_peak_is_the_largest_share_seen() -> None:
    before = [report(-1.0, 3, 0.2), report(-1.0, None, None)]
    after = [report(-1.0, 8, 0.7), report(-1.0, None, 0.4)]
    found = await reported(before, after)
    assert found == {"i0": {"preemptions": 5, "kv_peak": 0.7}, "i1": {"kv_peak": 0.4}}


async def test_what_an_engine_said_before_the_run_ended_is_not_taken_for_its_end() -> None:
    old, end = [report(60.0, 4, 0.1)], [report(-1.0, 11, 0.9)]
    found = await reported([report(-1.0, 9, 0.3)], old, old, end)
    assert found == {"i0": {"preemptions": 2, "kv_peak": 0.9}}


async def test_an_engine_that_was_started_anew_and_one_that_is_not_heard_have_no_preemptions() -> None:
    before = [report(-1.0, 9, 0.5), report(None, None, None)]
    found = await reported(before, [report(-1.0, 2, 0.1), report(None, None, None)])
    assert found == {"i0": {"kv_peak": 0.1}}


async def test_a_proxy_that_no_longer_answers_fails_no_run() -> None:
    listener = Listener()
    listener.looks = [[report(-1.0, 1, 0.5)]]
    async with listener.server() as server, aiohttp.ClientSession() as session:
        async with FleetAdmin(session, f"http://{server.host}:{server.port}").reported() as found:
            await server.close()
    assert found == {}


@pytest.mark.parametrize(
    ("fleet", "busy"),
    [
        (fleet_of("rr", IDLE, IDLE), []),
        (fleet_of("rr", {**IDLE, "workload": 0.5}), ["i0.workload: 0.5"]),
        (fleet_of("rr", IDLE, {**IDLE, "health": "ejected"}), ["i1 is ejected"]),
        (fleet_of("rr", waiting=2), ["requests in the queue: 2"]),
    ],
)
def test_what_keeps_a_fleet_busy(fleet: dict[str, Any], busy: list[str]) -> None:
    assert busy_figures(fleet) == busy
