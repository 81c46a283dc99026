"""The sentence that says whether the work is shared as the speeds say."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from proxy.services import Engine, document, serving

from hetlb.balancer.admin.dashboard.balance import BalancePart, documents, parts, sentence


def part(name: str, work: float, speed: float, busy: float = 1.0, out: str = "") -> BalancePart:
    return BalancePart(name, work, speed, busy, out)


@pytest.mark.parametrize(
    ("found", "waiting", "policy", "balanced", "text"),
    [
        ([], 0, "hetlb", False, "No instance takes requests."),
        ([part("a", 0, 0, out="ejected")], 0, "hetlb", False, "No instance takes requests (a is ejected)."),
        ([part("a", 0, 0.5), part("b", 0, 0.5)], 0, "hetlb", True, "No request in the last minute."),
        ([part("a", 1, 1)], 0, "hetlb", True, "a is the only one that takes requests."),
        (
            [part("a", 1, 1), part("b", 0, 0, out="draining")], 0, "hetlb", True,
            "a is the only one that takes requests (b is draining).",
        ),
        (
            [part("a", 0.68, 0.7), part("b", 0.32, 0.3)], 0, "hetlb", True,
            "Balanced: shares of work and speed agree within 2 points.",
        ),
        (
            [part("a", 1.0, 0.6, busy=0.1), part("b", 0.0, 0.4, busy=0.0)], 0, "hetlb", True,
            "b does 0 % of the work with 40 % of the speed: slots are free, and a request ends soonest at a.",
        ),
        (
            [part("a", 0.5, 0.8), part("b", 0.5, 0.2)], 9, "rr", False,
            "a does 50 % of the work with 80 % of the speed: the policy rr does not consider speed.",
        ),
        (
            [part("a", 1.0, 0.6), part("b", 0.0, 0.4, busy=0.0)], 3, "hetlb", False,
            "b does 0 % of the work with 40 % of the speed: "
            "3 requests wait: too large for it, or waiting for a faster one.",
        ),
        (
            [part("a", 1.0, 0.6), part("b", 0.0, 0.4, busy=0.0)], 0, "hetlb", False,
            "b does 0 % of the work with 40 % of the speed: "
            "the last decisions show why.",
        ),
    ],
)  # fmt: skip
def test_the_sentence(found: list[BalancePart], waiting: int, policy: str, balanced: bool, text: str) -> None:
    assert sentence(found, waiting, policy) == (balanced, text)


async def test_shares_follow_the_requests(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two, serving(tmp_path, document(one, two)) as running:
        for _ in range(4):
            await running.ask()
        shares = running.service.totals.recent.last(60.0, running.service.now()).shares
        assert sum(each.ended for each in shares.values()) == 4
        speed = running.scheduler.placement.speeds("m", running.scheduler.instances)
        found = parts(running.scheduler.instances, shares, speed, running.service.now())
        assert [each.work_share for each in found] == [0.5, 0.5]
        assert [each.speed_share for each in found] == [0.5, 0.5]


async def test_an_instance_whose_requests_still_run_is_not_idle(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two, serving(tmp_path, document(one, two)) as running:
        one.hold()
        two.hold()
        asked = [asyncio.create_task(running.ask()) for _ in range(2)]
        for engine in (one, two):
            async with engine.arrived:
                await engine.arrived.wait_for(lambda engine=engine: bool(engine.asked))
        scheduler = running.scheduler
        [found] = documents(scheduler, running.service.totals.recent, {"m": scheduler.instances}, 0.0)
        assert [each["work_share"] for each in found["instances"]] == [0.5, 0.5]
        assert found["balanced"]
        scheduler.instances[0].evidence.silence.stalled_since = 0.0
        [found] = documents(scheduler, running.service.totals.recent, {"m": scheduler.instances}, 0.0)
        assert found["sentence"] == "i1 is the only one that takes requests (i0 is stalled)."
        one.released.set()
        two.released.set()
        await asyncio.gather(*asked)


async def test_a_decision_is_found_by_the_id_of_its_request(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two, serving(tmp_path, document(one, two)) as running:
        ids = [(await running.ask()).headers["x-request-id"] for _ in range(6)]
        for number, label in enumerate(ids):
            [found] = (await running.admin("GET", f"/v1/decisions?request_id={label}")).json["decisions"]
            assert found["x_request_id"] == label
            assert found["chosen"] == f"i{number % 2}"
            assert found["outcome"] == "ok"
            assert found["took_s"] >= 0
        found = (await running.admin("GET", "/v1/decisions?instance=i1&last=100")).json["decisions"]
        assert [each["x_request_id"] for each in found] == ids[1::2]
        for query, number in (("outcome=ok", 6), ("outcome=running", 0), ("model=m", 6), ("model=x", 0),
                              ("longer_s=100", 0), ("longer_s=0", 6), ("request_id=none", 0)):  # fmt: skip
            found = (await running.admin("GET", f"/v1/decisions?{query}")).json["decisions"]
            assert len(found) == number, query
        assert (await running.admin("GET", "/v1/decisions?longer_s=soon")).status == 400


async def test_weighted_terms_add_up_to_the_score(tmp_path: Path) -> None:
    tables = document(policy={"name": "hetlb"})
    async with Engine() as one, Engine() as two:
        tables["models"][0]["instances"] = [{"url": one.url}, {"url": two.url}]
        async with serving(tmp_path, tables) as running:
            for _ in range(3):
                await running.ask()
            decisions = (await running.admin("GET", "/v1/decisions?last=3")).json["decisions"]
            for candidate in [each for decision in decisions for each in decision["candidates"]]:
                weights = candidate["weights"]
                total = sum(value * weights.get(name, 1.0) for name, value in candidate["terms"].items())
                assert total == pytest.approx(candidate["score"])


def test_a_few_requests_say_little() -> None:
    found = [part("a", 1, 0.5), part("b", 0, 0.5)]
    text = "Few requests: shares of work and speed agree within 50 points."
    assert sentence(found, 5, "hetlb", requests=1) == (True, text)
