"""Requests that wait go where they cost a plan least; nothing idles and nothing starves."""

from __future__ import annotations

import random

import pytest
from helpers import FAST, dispatched, make_scheduler, request, spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.policies.base import PlannedType, PolicyParams
from hetlb.balancer.core.policies.worth import Worth, busy_s
from hetlb.balancer.core.predictor import make_predictor
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Dispatch, Lease, Outcome
from hetlb.tools.sim.integrity import check_scheduler

READER = LatencyModel(k1=1e-5, k2=0.0, k3=0.0, k4=1e-3, k5=0.0, k6=0.0, k7=0.0, k8=4e-2)
WRITER = LatencyModel(k1=1e-4, k2=0.0, k3=0.0, k4=1e-3, k5=0.0, k6=0.0, k7=0.0, k8=4e-3)
#: Prompt and output tokens.
READ, WRITE = (4000, 2), (100, 400)
ONE = Capacity(kv_cache_tokens=100_000, kv_tokens_per_request=100_000, max_num_seqs=1)
WORTH = (("reader", 1.0), ("writer", 1.0))


def scheduler_of(lengths: dict[int, tuple[int, int]], worth: tuple[tuple[str, float], ...]) -> Scheduler:
    """Two unequal instances with a slot each, and lengths that are known."""
    outputs = {number: output for number, (_, output) in lengths.items()}
    oracle = make_predictor("oracle", rng=random.Random(0), oracle=outputs)
    fleet = [spec("reader", latency=READER, capacity=ONE), spec("writer", latency=WRITER, capacity=ONE)]
    return make_scheduler(fleet, "hetlb", predictor=oracle, params=PolicyParams(worth=worth))


def arrive(scheduler: Scheduler, lengths: dict[int, tuple[int, int]]) -> list[Lease]:
    found = []
    for number, (prompt, _) in lengths.items():
        commands = scheduler.on_arrival(request(number, prompt=prompt, max_tokens=None), 0.0)
        found += [each.lease for each in commands if isinstance(each, Dispatch)]
    return found


@pytest.mark.parametrize(("worth", "next_one"), [(WORTH, 3), ((), 2)])
def test_a_free_instance_gets_what_suits_it_not_the_head(
    worth: tuple[tuple[str, float], ...], next_one: int
) -> None:
    lengths = {0: READ, 1: WRITE, 2: READ, 3: WRITE}
    scheduler = scheduler_of(lengths, worth)
    leases = {each.instance: each for each in arrive(scheduler, {n: lengths[n] for n in (0, 1, 2)})}
    # Its prompt is short, but it comes so late that the long one is due before it.
    assert scheduler.on_arrival(request(3, prompt=WRITE[0], max_tokens=None), 9.0) == []
    assert set(leases) == {"reader", "writer"}
    placed = dispatched(scheduler.on_lease_ended(leases["writer"], Outcome.OK, 10.0))
    assert (placed.request.id, placed.instance) == (next_one, "writer")
    check_scheduler(scheduler)


def test_an_instance_takes_what_waits_when_nothing_suits_it() -> None:
    lengths = {0: READ, 1: WRITE, 2: READ, 3: READ}
    scheduler = scheduler_of(lengths, WORTH)
    leases = {each.instance: each for each in arrive(scheduler, lengths)}
    placed = dispatched(scheduler.on_lease_ended(leases["writer"], Outcome.OK, 5.0))
    assert (placed.request.id, placed.instance) == (2, "writer")


def test_a_request_that_many_overtook_goes_anywhere() -> None:
    lengths = {0: READ, 1: WRITE, 2: READ, **dict.fromkeys(range(3, 400), WRITE)}
    scheduler = scheduler_of(lengths, WORTH)
    first = {number: lengths[number] for number in (0, 1, 2)}
    lease = {each.instance: each for each in arrive(scheduler, first)}["writer"]
    order = []
    for step in range(300):  # the reader never ends what it has
        asked = request(3 + step, prompt=WRITE[0], max_tokens=None)
        assert scheduler.on_arrival(asked, 0.5 + step) == []
        lease = dispatched(scheduler.on_lease_ended(lease, Outcome.OK, 1.0 + step))
        order.append(lease.request.id)
    assert order[0] == 3
    assert 2 in order


def test_unknown_answers_are_the_plans() -> None:
    types = (PlannedType("m", 1000.0, 20.0, 3.0), PlannedType("m", 1000.0, 200.0, 1.0))
    worth = Worth((("a", 1.0),), types)
    assert worth.kind("m", 950, 200) == worth.kind("m", 990, 205)
    assert worth.kind("m", 1000, 70) == worth.kind("m", 1000, 65)  # of neither: their mean, 65
    assert worth.kind("m", 300, 500) != worth.kind("m", 300, 65)
    assert worth.kind("other", 1000, 500) != worth.kind("other", 1000, 65)


def test_a_learnt_speed_changes_no_cost() -> None:
    """Half of the time of an instance that is twice as fast as planned is worth as much as all of it was."""
    scheduler = scheduler_of({}, WORTH)
    reader = scheduler.fleet.instances["reader"]

    def suiting() -> list[frozenset[str]]:
        worth, able = Worth(WORTH, ()), scheduler.fleet.ready["m"].able
        kinds = [worth.kind("m", *lengths) for lengths in (READ, WRITE, (500, 50))]
        return [worth.suiting(kind, lag, able) for kind in kinds for lag in range(0, 1000, 10)]

    before = suiting()
    assert reader.speed.assume(0.25)
    reader.take_speed()
    assert reader.latency.step_s(1.0, 1.0) < 0.3 * READER.step_s(1.0, 1.0)
    assert suiting() == before


@given(
    prompt=st.integers(1, 100_000), output=st.integers(1, 20_000), cache=st.integers(1, 1_000_000),
    slots=st.integers(1, 1024), budget=st.integers(1024, 16_384),
)  # fmt: skip
def test_a_request_takes_no_more_of_a_full_engine_than_of_an_empty_one(
    prompt: int, output: int, cache: int, slots: int, budget: int
) -> None:
    chunks = -(-prompt // budget)
    alone_s = chunks * FAST.prefill_s(min(prompt, budget)) + FAST.answer_s(prompt, output)
    attention_s = FAST.prefill_s(prompt)
    assert 0.0 < busy_s(FAST, cache, slots, budget, prompt, output) <= 2.0 * (alone_s + attention_s)
