"""Prompts that no engine reads soon wait at the proxy."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from helpers import dispatched, make_scheduler, request, spec

from hetlb.balancer.core.facts import CapacityLearned, ModelsLearned
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Dispatch, Lease, Outcome

CAPACITY = Capacity(kv_cache_tokens=10**6, max_num_seqs=256, max_num_batched_tokens=2048)


def placed(commands: Iterable[object]) -> list[Lease]:
    return [command.lease for command in commands if isinstance(command, Dispatch)]


def filled(*names: str) -> tuple[Scheduler, list[Lease]]:
    """Equal engines, and prompts of an iteration each until one waits."""
    scheduler = make_scheduler([spec(name, capacity=CAPACITY) for name in names], "hetlb")
    leases: list[Lease] = []
    for number in range(100):
        sent = placed(scheduler.on_arrival(request(number, prompt=2048, streamed=True), 0.0))
        if not sent:
            return scheduler, leases
        leases += sent
    raise AssertionError("expected a prompt to wait")


def test_a_prompt_waits_while_each_engine_has_many_to_read_and_short_ones_go_first() -> None:
    scheduler, leases = filled("a", "b")
    assert len(leases) == 2 * 16
    assert placed(scheduler.on_arrival(request(1000, prompt=1000, streamed=True), 0.1)) == []
    assert dispatched(scheduler.on_first_token(leases[0], 0.2)).request.id == 1000
    assert dispatched(scheduler.on_first_token(leases[1], 0.3)).request.id == len(leases)


def test_a_prompt_longer_than_an_engine_may_have_ahead_waits_for_its_own_length_alone() -> None:
    scheduler, leases = filled("a")
    scheduler.on_cancelled(len(leases), 0.0)
    sent = placed(scheduler.on_arrival(request(1000, prompt=100_000, streamed=True), 0.1))
    assert [lease.request.id for lease in sent] == [1000]


@pytest.mark.parametrize("slots", [1, 2])
def test_prompts_wait_at_their_engine_if_they_would_take_a_slot_elsewhere(slots: int) -> None:
    """Many unread prompts there wait for a slot of an adapter. Another engine would load theirs again."""
    scheduler = make_scheduler(
        [spec("a", capacity=CAPACITY), spec("b", slower=1e4, capacity=CAPACITY)], "hetlb"
    )
    for name in "ab":
        scheduler.on_instance(ModelsLearned(name, ("m", "lora", "other"), ("lora", "other")), 0.0)
        scheduler.on_instance(CapacityLearned(name, Capacity(max_loras=slots)), 0.0)
    for name, model in (("a", "lora"), ("b", "other")):
        asked = request(ord(name), prompt=16, streamed=True, model=model, subset=(name,))
        placed(scheduler.on_arrival(asked, 0.0))
    sent: list[Lease] = []
    for number in range(60):  # `b` would load it once more, and `other` would leave its slot
        asked = request(number, prompt=2048, streamed=True, model="lora")
        sent += placed(scheduler.on_arrival(asked, 0.0))
    assert (len(sent) == 60) is (slots == 1)


def test_a_slower_engine_gets_no_more_of_a_queue_than_its_share_of_speed() -> None:
    """Prompts come faster than both read them. The faster one's unread prompts are counted once."""
    fleet = [spec("a", capacity=CAPACITY), spec("b", slower=10.0, capacity=CAPACITY)]
    scheduler = make_scheduler(fleet, "hetlb")
    sent: list[Lease] = []
    for number in range(80):
        sent += placed(scheduler.on_arrival(request(number, prompt=2048, streamed=True), 0.05 * number))
    assert 1 <= sum(lease.instance == "b" for lease in sent) <= 80 / 10.0


def test_an_idle_engine_leaves_the_decision_as_it_was() -> None:
    """A prompt goes to a faster one that has many to read, as the idle one would answer later."""
    fleet = [spec("a", capacity=CAPACITY), spec("b", slower=100.0, capacity=CAPACITY)]
    scheduler = make_scheduler(fleet, "hetlb")
    sent = [
        dispatched(scheduler.on_arrival(request(number, prompt=2048, streamed=True), 0.0))
        for number in range(20)
    ]
    assert {lease.instance for lease in sent} == {"a"}


def test_what_waits_is_in_the_order_of_what_caches_hold_now() -> None:
    """A second turn came before its first was read anywhere. It goes before a shorter prompt afterwards."""
    few = Capacity(kv_cache_tokens=10**6, max_num_seqs=1, max_num_batched_tokens=2048)
    scheduler = make_scheduler([spec("a", capacity=few)], "hetlb")
    running = dispatched(scheduler.on_arrival(request(0, prompt=100), 0.0))
    turns = (("one", 1000),), (("one", 1000), ("two", 2000))
    for number, keys in ((1, turns[0]), (2, (("other", 1500),)), (3, turns[1])):
        asked = request(number, prompt=max(end for _, end in keys), prefix_keys=keys)
        assert placed(scheduler.on_arrival(asked, 0.01 * number)) == []
    order = []
    for _ in range(3):
        running.output_tokens = 1
        running = dispatched(scheduler.on_lease_ended(running, Outcome.OK, 1.0))
        order.append(running.request.id)
    assert order == [1, 3, 2]
