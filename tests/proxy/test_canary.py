"""A canary gets its share of a model's requests, a session stays on its side, a dead side loses nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from helpers import make_scheduler, request, spec, turns_until
from hypothesis import given
from hypothesis import strategies as st
from proxy.services import Engine, Running, serving
from proxy.upstreams import Visit

from hetlb.balancer.clients.model_names import Canary
from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.config.fleet_tables import CanaryTable
from hetlb.balancer.core.facts import AdminStateSet
from hetlb.balancer.core.ready import ReadyInstances
from hetlb.balancer.core.types import AdminState, CanarySide, Capacity, Dispatch
from hetlb.errors import ConfigError


def fleet(canary: dict[str, Any], *engines: Engine) -> dict[str, Any]:
    """Return a fleet file: instances a, b, ... of the model m."""
    instances = [{"name": "abc"[i], "url": each.url} for i, each in enumerate(engines)]
    return {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": 0},
        "scrape": {"interval_s": 0.05},
        "models": [{"name": "m", "aliases": ["alias"], "canary": canary, "instances": instances}],
    }


async def ask(running: Running, count: int, session: str = "", model: str = "m") -> Counter[str]:
    """Send requests one after the other; return their number by instance."""
    url = f"http://127.0.0.1:{running.port}/v1/chat/completions"
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    headers = {"x-session-id": session} if session else {}
    found: Counter[str] = Counter()
    async with aiohttp.ClientSession(headers=headers) as client:
        for _ in range(count):
            async with client.post(url, json=body) as reply:
                assert reply.status == 200, await reply.text()
                found[reply.headers["x-hetlb-instance"]] += 1
    return found


@pytest.mark.parametrize(("share", "least", "most"), [(0, 0, 0), (0.05, 4, 6), (0.5, 49, 51), (1, 100, 100)])
async def test_an_instance_gets_its_share(tmp_path: Path, share: float, least: int, most: int) -> None:
    async with Engine() as a, Engine() as b, Engine() as c:
        tables = fleet({"instance": "b", "share": share}, a, b, c)
        async with serving(tmp_path, tables) as running:
            found = await ask(running, 50) + await ask(running, 50, model="alias")
            status = (await running.admin("GET", "/v1/status")).json
    assert least <= found["b"] <= most, found
    assert f"canary b gets {100 * share:g} %" in status["sentence"]
    assert status["models"][0]["canary"] == f"b gets {100 * share:g} %"


async def test_a_session_stays_and_a_side_that_is_down_is_served_by_the_other(tmp_path: Path) -> None:
    async with Engine() as a, Engine() as b:
        async with serving(tmp_path, fleet({"instance": "b", "share": 0.5}, a, b)) as running:
            sides = {name: await ask(running, 3, name) for name in map(str, range(20))}
            assert all(len(found) == 1 for found in sides.values())
            assert 3 <= sum("b" in found for found in sides.values()) <= 17
            for down, up in (("b", "a"), ("a", "b")):
                await running.admin("PUT", f"/v1/fleet/instances/{down}/state", {"state": "drain"})
                assert await ask(running, 10) == {up: 10}
                assert await ask(running, 1, "3") == {up: 1}
                await running.admin("PUT", f"/v1/fleet/instances/{down}/state", {"state": "ready"})
            assert {name: await ask(running, 3, name) for name in sides} == sides


class Closing(Engine):
    """An engine that closes each request without a byte."""

    async def _route(self, visit: Visit) -> None:
        if visit.head.startswith(b"POST"):
            visit.reset()
        else:
            await super()._route(visit)


async def test_a_canary_that_answers_no_request_costs_its_clients_nothing(tmp_path: Path) -> None:
    async with Engine() as a, Closing() as b:
        async with serving(tmp_path, fleet({"instance": "b", "share": 0.5}, a, b)) as running:
            assert await ask(running, 30) == {"a": 30}


async def test_another_model_is_a_canary_under_its_own_name(tmp_path: Path) -> None:
    async with Engine() as a, Engine() as b:
        b.served = "m2"
        tables = fleet({"name": "m2", "share": 0.25}, a)
        tables["models"].append({"name": "m2", "instances": [{"name": "b", "url": b.url}]})
        async with serving(tmp_path, tables) as running:
            await turns_until(lambda: len(running.scheduler.fleet.ready) == 2)
            assert 9 <= (await ask(running, 40))["b"] <= 11
            assert {msgspec.json.decode(each.body)["model"] for each in b.asked} == {"m2"}
            assert {msgspec.json.decode(each.body)["model"] for each in a.asked} == {"m"}
            await running.admin("PUT", "/v1/fleet/instances/b/state", {"state": "drain"})
            assert await ask(running, 10) == {"a": 10}


@pytest.mark.parametrize(
    ("canary", "more", "message"),
    [
        ({"instance": "b", "share": 1.1}, {}, r"canary.share: expected .*<= 1.*1.1"),
        ({"instance": "b", "share": -0.1}, {}, r"canary.share: expected .*>= 0.*-0.1"),
        ({"instance": "b", "share": ".nan"}, {}, r"canary.share: expected"),
        ({"instance": "b"}, {}, r"canary.share: "),
        ({"share": 0.1}, {}, r"canary: expected either `instance` or `name`, got none"),
        ({"instance": "b", "name": "z", "share": 0.1}, {}, r"canary: expected either .* got both"),
        ({"instance": "c", "share": 0.1}, {}, r"canary.instance: expected one of a, b, got 'c'"),
        ({"name": "m", "share": 0.1}, {}, r"canary.name: expected .*got 'm'"),
        (
            {"instance": "b", "share": 0.1},
            {"kv_transfer": "nixl"},
            r"canary.instance: expected none with kv_",
        ),
    ],
)
def test_canaries_that_cannot_be(
    tmp_path: Path, canary: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    instances = [{"name": name, "url": f"http://{name}:1"} for name in "ab"]
    table = {"name": "m", "instances": instances, "canary": canary, **more}
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump({"version": 1, "models": [table]}))
    with pytest.raises(ConfigError, match=rf"models\[0\].{message}"):
        load_fleet(tmp_path / "fleet.yaml")


@given(st.floats(0, 1), st.floats(0, 1), st.text(min_size=1))
def test_a_larger_share_keeps_the_sessions_of_a_smaller_one(one: float, other: float, session: str) -> None:
    small, large = (Canary(CanaryTable(share=each, instance="b")) for each in sorted((one, other)))
    assert large.takes(session) or not small.takes(session)
    assert small.takes(session) == small.takes(session)


@given(st.floats(0, 1), st.integers(0, 1000), st.integers(1, 300))
def test_any_few_requests_in_a_row_are_split_by_the_share(share: float, skipped: int, count: int) -> None:
    canary = Canary(CanaryTable(share=share, instance="b"))
    for _ in range(skipped):
        canary.takes(None)
    assert abs(sum(canary.takes(None) for _ in range(count)) - share * count) <= 4.0


CAPACITY = Capacity(kv_cache_tokens=10**6, kv_tokens_per_request=10**6, max_num_seqs=2)
INSIDE, OUTSIDE = CanarySide("b", True), CanarySide("b", False)


def test_a_full_side_waits_in_a_line_of_its_own_and_goes_over_when_the_other_is_gone() -> None:
    scheduler = make_scheduler([spec(name, capacity=CAPACITY) for name in "ab"], "hetlb")
    placed = [scheduler.on_arrival(request(i, side=INSIDE), 0.0) for i in range(3)]
    assert [bool(each) for each in placed] == [True, True, False]
    [dispatch] = scheduler.on_arrival(request(3, side=OUTSIDE), 0.0)
    assert isinstance(dispatch, Dispatch)
    assert dispatch.lease.instance == "a"
    commands = scheduler.on_instance(AdminStateSet("b", AdminState.DRAIN), 1.0)
    commands += scheduler.on_tick(1.0)
    assert [each.lease.instance for each in commands if isinstance(each, Dispatch)] == ["a"]


def test_a_request_too_long_for_the_canary_goes_to_the_others() -> None:
    small = Capacity(kv_cache_tokens=1000, kv_tokens_per_request=1000, max_model_len=1000, max_num_seqs=2)
    scheduler = make_scheduler([spec("a", capacity=CAPACITY), spec("b", capacity=small)], "hetlb")
    filtered = ReadyInstances(scheduler.instances, 0.0)
    for tokens, side, expected in ((500, INSIDE, "b"), (5000, INSIDE, "a"), (500, OUTSIDE, "a")):
        asked = request(1, prompt=tokens, side=side)
        found = filtered.choices(asked, None, 0.0, holds_back=True, side=side)
        assert [each.name for each in found.instances] == [expected]
