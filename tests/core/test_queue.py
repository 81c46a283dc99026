"""Who goes next: by priority, fairly between tenants, by arrival; and who has to leave a full queue."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from helpers import dispatched, examples, head, make_scheduler, request, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.balancer.core.facts import AdminStateSet
from hetlb.balancer.core.queue import Queue, QueueLimits
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import AdminState, Capacity, Dispatch, Outcome, Reject, RejectReason, Request
from hetlb.tools.sim.integrity import check_queue, check_scheduler


def asked(number: int, tenant: str | None = None, priority: int = 0, body: int = 0) -> Request:
    return request(number, tenant=tenant, priority=priority, body_bytes=body)


def drain(queue: Queue, count: int = 10**9) -> list[Request]:
    """Dispatch them one by one; none ends meanwhile."""
    served: list[Request] = []
    while len(queue) and len(served) < count:
        entry = queue.remove(head(queue).request.id)
        assert entry is not None
        queue.booked(entry.request.tenant, entry.size)
        served.append(entry.request)
        check_queue(queue)
    return served


def test_the_lower_priority_goes_first_and_alike_by_arrival() -> None:
    queue = Queue(QueueLimits())
    for number, priority in enumerate((5, 0, -3, 0, 5, -3)):
        queue.push(asked(number, priority=priority), 0.0, size=10)
    assert [each.id for each in drain(queue)] == [2, 5, 1, 3, 0, 4]


def test_one_tenant_is_served_by_arrival() -> None:
    rng = random.Random(1)
    queue = Queue(QueueLimits())
    for number in range(200):
        queue.push(asked(number, "only"), 0.0, size=rng.randrange(1, 1000))
        if rng.random() < 0.3:
            queue.remove(head(queue).request.id)
    left = [each.id for each in drain(queue)]
    assert left == sorted(left)


def test_a_tenant_with_ten_thousand_waiting_does_not_hold_up_another() -> None:
    queue = Queue(QueueLimits())
    for number in range(10_000):
        queue.push(asked(number, "greedy"), 0.0, size=100)
    drain(queue, 50)
    queue.push(asked(10_000, "modest"), 1.0, size=100)
    queue.push(asked(10_001, None), 1.0, size=100)
    assert {10_000, 10_001} < {each.id for each in drain(queue, 3)}


def test_weights_are_shares() -> None:
    queue = Queue(QueueLimits(tenant_weights={"gold": 3.0}))
    for number in range(400):
        queue.push(asked(2 * number, "gold"), 0.0, size=10)
        queue.push(asked(2 * number + 1, "plain"), 0.0, size=10)
    served = Counter(each.tenant for each in drain(queue, 200))
    assert served["gold"] == pytest.approx(150, abs=1)


def test_what_is_fair_is_the_work_not_the_count() -> None:
    queue = Queue(QueueLimits())
    for number in range(400):
        queue.push(asked(2 * number, "long"), 0.0, size=90)
        queue.push(asked(2 * number + 1, "short"), 0.0, size=10)
    served = Counter(each.tenant for each in drain(queue, 200))
    assert served["long"] == pytest.approx(20, abs=1)


def test_what_has_ended_gives_a_tenant_no_debt() -> None:
    """Only what is in service counts: who was served long ago starts level with who comes now."""
    queue = Queue(QueueLimits())
    for number in range(1000):
        queue.push(asked(number, "early"), 0.0, size=10)
    drain(queue, 500)
    queue.ended("early", 5000)
    for number in range(1000, 1500):
        queue.push(asked(number, "late"), 1.0, size=10)
    served = Counter(each.tenant for each in drain(queue, 100))
    assert served["late"] == pytest.approx(50, abs=1)


@settings(max_examples=examples(60))
@given(st.data())
def test_what_was_served_differs_by_one_request_at_most_while_both_wait(data: st.DataObject) -> None:
    weights = {"a": data.draw(st.sampled_from((0.5, 1.0, 4.0))), "b": 1.0}
    queue = Queue(QueueLimits(max_requests=None, max_bytes=None, tenant_weights=weights))
    sizes = data.draw(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 500)), max_size=80))
    for number, (tenant, size) in enumerate(sizes):
        queue.push(asked(number, tenant), 0.0, size=size)
    most = max((size for _, size in sizes), default=0)
    count = len(sizes)
    while len(queue):
        if {entry.request.tenant for entry in queue} == {"a", "b"}:
            assert queue.tenants is not None
            used = [queue.tenants.served(tenant) for tenant in weights]
            assert abs(used[0] - used[1]) <= most / min(weights.values())
        drain(queue, 1)
        count -= 1
        assert len(queue) == count


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 2), st.integers(1, 99)), max_size=80))
def test_it_is_work_conserving_in_order_of_priority(pushed: list[tuple[str, int, int]]) -> None:
    queue = Queue(QueueLimits(max_requests=None, max_bytes=None))
    for number, (tenant, priority, size) in enumerate(pushed):
        queue.push(asked(number, tenant, priority), 0.0, size=size)
    served = drain(queue)
    for name in "abcde":  # each tenant's own, by its priorities
        own = sorted(priority for tenant, priority, _ in pushed if tenant == name)
        assert [each.priority for each in served if each.tenant == name] == own
    assert len({each.id for each in served}) == len(pushed)
    assert (queue.bytes, queue.waiting("m")) == (0, 0)


# --- a full queue ---


def full(limits: QueueLimits) -> Scheduler:
    scheduler = make_scheduler([spec("a")], limits=limits)
    scheduler.on_instance(AdminStateSet("a", AdminState.DRAIN), 0.0)
    return scheduler


def test_in_a_full_queue_the_newest_of_the_largest_tenant_makes_room() -> None:
    scheduler = full(QueueLimits(max_requests=6))
    for number in range(6):
        assert scheduler.on_arrival(asked(number, "greedy", priority=number % 2), 0.0) == []
    gone = []
    for number in range(6, 12):
        commands = scheduler.on_arrival(asked(number, "modest"), 0.0)
        assert all(isinstance(c, Reject) and c.reason is RejectReason.QUEUE_FULL for c in commands)
        gone += [c.request_id for c in commands if isinstance(c, Reject)]
        check_scheduler(scheduler)
    # The newest of the worst priority first; then both hold three, and no other has to leave.
    assert gone == [5, 3, 1, 9, 10, 11]
    assert len(scheduler.queue) == 6


def test_alone_a_tenant_crowds_no_other_out() -> None:
    scheduler = full(QueueLimits(max_requests=2))
    rejected = []
    for number in range(4):
        rejected += scheduler.on_arrival(asked(number, "only"), 0.0)
    assert [c.request_id for c in rejected if isinstance(c, Reject)] == [2, 3]


def test_bytes_are_shared_the_same() -> None:
    scheduler = full(QueueLimits(max_requests=None, max_bytes=1000))
    for number in range(10):
        assert scheduler.on_arrival(asked(number, "greedy", body=100), 0.0) == []
    commands = scheduler.on_arrival(asked(20, "modest", body=250), 0.0)
    assert [c.request_id for c in commands if isinstance(c, Reject)] == [9, 8, 7]
    assert 20 in scheduler.queue
    commands = scheduler.on_arrival(asked(21, "modest", body=600), 0.0)
    assert [c.request_id for c in commands if isinstance(c, Reject)] == [21], "more than its share"
    check_scheduler(scheduler)


@pytest.mark.parametrize("weight", [1e-300, 1e-9, 1e9, 1.7e308])
def test_no_weight_is_too_small_or_too_large(weight: float) -> None:
    queue = Queue(QueueLimits(tenant_weights={"odd": weight}))
    for number in range(40):
        queue.push(
            asked(number, "odd" if number % 2 else "even"), float(number), size=1_000_000, due=float(number)
        )
    served = [each.tenant for each in drain(queue, 40)]
    assert served.count("odd") == 20
    assert served[:20].count("odd") == (1 if weight < 1 else 19)


def test_a_tenant_holds_no_more_than_its_share_of_the_queue() -> None:
    scheduler = full(QueueLimits(max_requests=10, tenant_share=0.3))
    rejected = [c for number in range(6) for c in scheduler.on_arrival(asked(number, "x"), 0.0)]
    assert [c.request_id for c in rejected if isinstance(c, Reject)] == [3, 4, 5]
    assert scheduler.on_arrival(asked(9, "y"), 0.0) == []


# --- in the scheduler ---


def test_a_free_place_goes_to_whose_turn_it_is() -> None:
    capacity = Capacity(kv_cache_tokens=10**6, kv_tokens_per_request=10**6, max_num_seqs=8)
    scheduler = make_scheduler([spec("a", capacity=capacity)], "hetlb")
    running = []
    for number in range(300):
        commands = scheduler.on_arrival(asked(number, "greedy"), 0.0)
        running += [c.lease for c in commands if isinstance(c, Dispatch)]
    assert len(scheduler.queue) > 250
    scheduler.on_arrival(asked(1000, "modest"), 1.0)
    scheduler.on_arrival(asked(1001, "greedy", priority=-1), 1.0)
    served = []
    for step in range(3):
        lease = dispatched(scheduler.on_lease_ended(running.pop(0), Outcome.OK, 2.0 + step))
        served.append(lease.request.id)
        running.append(lease)
    assert served[0] == 1000, "a priority is for its own tenant alone"
    assert served[1] == 1001
    check_scheduler(scheduler)


def test_an_arrival_does_not_pass_a_better_priority() -> None:
    scheduler = full(QueueLimits())
    scheduler.on_arrival(asked(1, priority=-1), 0.0)
    scheduler.on_arrival(asked(2, priority=1), 0.0)
    commands = scheduler.on_instance(AdminStateSet("a", AdminState.READY), 1.0)
    assert [c.request_id for c in commands if isinstance(c, Dispatch)] == [1, 2]
