"""The queue by its edges: where its bounds lie, who counts for whom, and that a wrong count is noticed."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import head, request, waiting
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.queue import FlowName, Queue, QueueFlow, QueueKey, QueueLimits
from hetlb.balancer.core.types import Request
from hetlb.balancer.core.waiting_targets import late
from hetlb.tools.sim.integrity import check_queue

LINE = QueueKey("m", None, False)


def asked(number: int, tenant: str | None = None, priority: int = 0, body: int = 0, **more: Any) -> Request:
    return request(number, tenant=tenant, priority=priority, body_bytes=body, **more)


def filled(limits: QueueLimits, *requests: Request, size: int = 10) -> Queue:
    queue = Queue(limits)
    for each in requests:
        queue.push(each, 0.0, size=size)
        check_queue(queue)
    return queue


def served(queue: Queue, count: int) -> list[int]:
    """The next to be dispatched, of which none ends meanwhile."""
    ids = []
    for _ in range(count):
        entry = queue.remove(head(queue).request.id)
        assert entry is not None
        queue.booked(entry.request.tenant, entry.size)
        ids.append(entry.request.id)
        check_queue(queue)
    return ids


# --- bounds ---


def test_the_last_place_and_the_last_byte_may_be_taken() -> None:
    queue = filled(QueueLimits(max_requests=3, max_bytes=100), asked(1, body=40), asked(2, body=40))
    assert queue.has_room(asked(3, body=20))
    assert not queue.has_room(asked(3, body=21))
    queue.push(asked(3, body=20), 0.0)
    assert queue.bytes == 100
    assert not queue.has_room(asked(4))
    queue.remove(1)
    assert queue.has_room(asked(4, body=40))


def test_without_a_bound_there_is_none() -> None:
    queue = filled(QueueLimits(max_requests=None, max_bytes=None), *(asked(n, body=10**9) for n in range(5)))
    assert queue.has_room(asked(9, body=10**12))
    only_bytes = filled(QueueLimits(max_requests=None, max_bytes=10), *(asked(n) for n in range(50)))
    assert only_bytes.has_room(asked(99, body=10))
    assert not only_bytes.has_room(asked(99, body=11))


def test_a_share_bounds_requests_and_bytes_of_one_tenant() -> None:
    limits = QueueLimits(max_requests=10, max_bytes=1000, tenant_share=0.3)
    queue = filled(limits, asked(1, "x", body=100), asked(2, "x", body=100))
    assert queue.has_room(asked(3, "x", body=100))
    assert not queue.has_room(asked(3, "x", body=101))
    assert queue.has_room(asked(3, "y", body=800)), "a tenant that holds nothing may have one"
    queue.push(asked(3, "x"), 0.0)
    assert not queue.has_room(asked(4, "x"))
    assert queue.crowding_out(asked(4, "x")) == ()
    by_bytes = QueueLimits(max_requests=None, max_bytes=None, tenant_share=0.3)
    unbounded = filled(by_bytes, *(asked(n, "x", body=10**6) for n in range(9)))
    assert unbounded.has_room(asked(10, "x", body=10**9))


def test_a_tenant_that_holds_its_share_crowds_no_other_out() -> None:
    limits = QueueLimits(max_requests=4, max_bytes=1000, tenant_share=0.5)
    queue = filled(limits, *(asked(n, "x", body=200) for n in (1, 2)), *(asked(n, "y") for n in (3, 4)))
    assert queue.crowding_out(asked(9, "y")) == ()
    assert queue.crowding_out(asked(9, "z", body=501)) == [2], "one is always allowed"
    assert queue.crowding_out(asked(9, "z", body=900)) == ()


def test_a_whole_share_is_no_share() -> None:
    queue = filled(QueueLimits(max_requests=2, max_bytes=100, tenant_share=1.0), asked(1, "x", body=60))
    assert queue.has_room(asked(2, "x", body=40))


# --- who has to leave ---


def test_several_leave_where_one_does_not_make_room() -> None:
    """By bytes: as many of the newest as it takes, and no more than leaves the largest with more."""
    limits = QueueLimits(max_requests=None, max_bytes=1000)
    queue = filled(
        limits,
        *(asked(n, "big", body=200) for n in range(4)),
        asked(9, "small", body=100),
        asked(10, body=100),
    )
    assert queue.crowding_out(asked(20, "small", body=100)) == [3]
    assert queue.crowding_out(asked(20, "small", body=200)) == [3]
    assert queue.crowding_out(asked(20, "small", body=201)) == [3, 2]
    assert queue.crowding_out(asked(20, "small", body=300)) == [3, 2]
    assert queue.crowding_out(asked(20, "small", body=301)) == ()
    assert queue.crowding_out(asked(20, "new", body=400)) == [3, 2]
    assert queue.crowding_out(asked(20, "new", body=401)) == ()
    assert queue.crowding_out(asked(20, "big", body=1)) == ()
    assert len(queue) == 6, "asking removes no request"


def test_by_count_one_leaves_for_one_and_both_then_hold_as_much() -> None:
    queue = filled(QueueLimits(max_requests=5), *(asked(n, "big") for n in range(4)), asked(9, "small"))
    assert queue.crowding_out(asked(20, "small")) == [3]
    queue.remove(3)
    queue.push(asked(20, "small"), 0.0)
    assert queue.crowding_out(asked(21, "small")) == ()  # three and three would be fair, three and two are
    assert queue.crowding_out(asked(21, "third")) == [2]
    assert queue.crowding_out(asked(21, "big")) == ()


def test_both_bounds_at_once_are_heeded() -> None:
    """Full by count; and the place that one leaves is too small for the body."""
    limits = QueueLimits(max_requests=4, max_bytes=100)
    queue = filled(limits, *(asked(n, "big", body=20) for n in range(4)))
    assert queue.crowding_out(asked(9, "small", body=40)) == [3]
    assert queue.crowding_out(asked(9, "small", body=41)) == [3, 2]
    assert queue.crowding_out(asked(9, "small", body=60)) == [3, 2]
    assert queue.crowding_out(asked(9, "small", body=61)) == [3, 2, 1]
    assert queue.crowding_out(asked(9, "small", body=81)) == ()


def test_the_worst_priority_of_all_lines_leaves_first() -> None:
    queue = filled(
        QueueLimits(max_requests=4),
        asked(1, "big", priority=1),
        asked(2, "big", priority=5),
        asked(3, "big", priority=5, model="other"),
        asked(4, "big", priority=-1),
    )
    assert queue.crowding_out(asked(9, "small")) in ([2], [3])
    queue.remove(2)
    queue.remove(3)
    for number in (5, 6):
        queue.push(asked(number, "big", priority=0), 0.0)
    assert queue.crowding_out(asked(9, "small")) == [1]


def test_a_large_request_alone_crowds_no_other_out() -> None:
    empty = Queue(QueueLimits(max_bytes=10))
    assert empty.crowding_out(asked(1, "x", body=11)) == ()
    alone = filled(QueueLimits(max_requests=1), asked(1, "x"))
    assert alone.crowding_out(asked(2, "x")) == ()
    assert alone.crowding_out(asked(2, "y")) == (), "who holds one holds no more than the other would"


# --- lines ---


def test_lines_are_by_model_instance_and_whether_it_is_tried_again() -> None:
    queue = Queue(QueueLimits())
    queue.push(asked(1), 0.0, size=1)
    queue.push(asked(2, subset=("a",)), 0.0, size=2)
    queue.push(asked(3, model="other"), 0.0, size=4)
    assert queue.keys == [LINE, ("m", "a/", False), ("other", None, False)]
    queue.push(asked(4), 0.0, size=8, retry=True)
    assert queue.keys[0] == ("m", None, True)
    assert set(queue.keys[1:]) == {LINE, ("m", "a/", False), ("other", None, False)}
    assert (queue.waiting("m"), queue.waiting("other"), queue.waiting("none")) == (11, 4, 0)
    assert [entry.request.id for entry in waiting(queue, QueueKey("m", None, True))] == [4]
    assert queue.heads(QueueKey("none", None, False)) == []
    assert {entry.request.id for entry in queue} == {1, 2, 3, 4}
    for number in (1, 2, 4):
        assert queue.remove(number) is not None
        check_queue(queue)
    assert queue.waiting("m") == 0
    assert queue.keys == [("other", None, False)]
    assert queue.remove(1) is None
    assert (1 in queue, 3 in queue, len(queue)) == (False, True, 1)


def test_other_restrictions_are_other_lines_however_instances_are_named() -> None:
    first, second = asked(1, subset=("a",)), asked(2, subset=("a-b",))
    first.kept_from, second.kept_from = ("b-c",), ("c",)
    assert first.restriction != second.restriction


def test_an_entry_holds_what_was_said_of_it() -> None:
    queue = Queue(QueueLimits())
    queue.push(asked(1), 7.0, 5)
    queue.push(asked(2), 8.0)
    first, second = waiting(queue, LINE)
    assert (first.arrived_at, first.size, first.flow.name.fit) == (7.0, 5, 0)
    assert (second.arrived_at, second.size) == (8.0, 0)
    assert queue.remove(1) is first
    assert queue.remove(2) is second


def test_a_request_waits_once() -> None:
    queue = filled(QueueLimits(), asked(1))
    with pytest.raises(AssertionError, match=r"^request 1 is queued already$"):
        queue.push(asked(1), 0.0)


def test_what_waits_ahead_is_of_the_same_line_and_no_worse_priority() -> None:
    queue = filled(
        QueueLimits(),
        asked(1, priority=3),
        asked(2, subset=("a",), priority=-9),
        asked(3, model="o", priority=-9),
    )
    queue.push(asked(4, priority=-9), 0.0, retry=True)
    assert queue.ahead(asked(9, priority=4))
    assert queue.ahead(asked(9, priority=3))
    assert not queue.ahead(asked(9, priority=2))
    assert queue.ahead(asked(9, priority=-5, subset=("a",)))
    assert not queue.ahead(asked(9, priority=9, model="none"))
    background = ServiceClass("night", background=True)
    assert not queue.ahead(asked(9, priority=2, service=background))
    queue.push(asked(5, priority=-1, service=background), 0.0)
    assert not queue.ahead(asked(9, priority=-1))
    assert queue.ahead(asked(9, priority=-1, service=background))


def test_the_first_are_of_the_best_priority_and_whose_turn_it_is() -> None:
    queue = filled(
        QueueLimits(), asked(1, "a", 5), asked(2, "a"), asked(3, "b"), asked(4, "a"), asked(5, "a")
    )
    assert [entry.request.id for entry in waiting(queue, LINE)] == [2, 4, 5]
    assert [list(flow.entries) for flow in queue.flows] == [[2, 4, 5], [3], [1]]


# --- whose turn ---


def test_the_tenant_with_the_least_in_service_is_next() -> None:
    queue = Queue(QueueLimits())
    for number in range(10):
        queue.push(asked(number, "a"), 0.0, size=10)
        queue.push(asked(100 + number, "b"), 0.0, size=10)
    queue.booked("a", 50)
    assert served(queue, 7) == [100, 101, 102, 103, 104, 0, 105]


def test_weights_are_shares_of_what_is_in_service() -> None:
    queue = Queue(QueueLimits(tenant_weights={"gold": 3.0}))
    for number in range(8):
        queue.push(asked(number, "gold"), 0.0, size=10)
        queue.push(asked(100 + number, None), 0.0, size=10)
    ids = served(queue, 8)
    assert sum(number < 100 for number in ids) == 6


def test_of_equal_tenants_the_request_that_is_due_first_is_next() -> None:
    queue = Queue(QueueLimits())
    quick, slow = ServiceClass("quick", ttft_s=1.0), ServiceClass("slow", ttft_s=9.0)
    queue.push(asked(1, service=slow), 0.0, due=9.0)
    queue.push(asked(2, service=quick), 1.0, due=2.0)
    queue.push(asked(3, "a", service=quick), 1.0, due=1.5)
    assert served(queue, 3) == [3, 2, 1]


def test_late_requests_come_after_requests_in_time_and_before_the_background() -> None:
    queue = Queue(QueueLimits())
    quick, night = ServiceClass("quick", ttft_s=1.0), ServiceClass("night", background=True)
    queue.push(asked(1, service=night), 0.0, due=0.0)
    queue.push(asked(2, service=quick), 0.0, due=1.0)
    queue.push(asked(3, service=quick), 3.0, due=4.0)
    queue.push(asked(4), 0.0, due=0.0)
    [found] = late(queue, LINE, 2.0)
    assert found.request.id == 2
    queue.demote(found)
    check_queue(queue)
    assert late(queue, LINE, 2.0) == []
    assert [entry.request.id for entry in queue.heads(LINE)] == [4, 1]
    assert served(queue, 4) == [4, 3, 2, 1]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.sampled_from((None, "x", "y")), st.integers(0, 2), st.integers(1, 50)
        ),
        max_size=40,
    ),
    st.lists(st.integers(0, 39), max_size=20),
)
def test_heads_are_the_best_of_each_fit(
    pushed: list[tuple[int, str | None, int, int]], removed: list[int]
) -> None:
    queue = Queue(QueueLimits(max_requests=None))
    known: dict[int, tuple[int, str | None, int]] = {}
    for number, (priority, tenant, fit, size) in enumerate(pushed):
        queue.push(asked(number, tenant, priority), float(number), size=size, fit=fit, due=float(number))
        known[number] = priority, tenant, fit
    for number in removed:
        assert (queue.remove(number) is not None) == (number in known)
        known.pop(number, None)
    check_queue(queue)
    # No tenant was served: the one whose next request came first is first, with its own in their order.
    tenants = {tenant for _, tenant, _ in known.values()}
    turns = {one: min((p, n) for n, (p, tenant, _) in known.items() if tenant == one)[1] for one in tenants}
    order = sorted((turns[tenant], priority, number) for number, (priority, tenant, _) in known.items())
    first_of = {known[number][2]: number for _, _, number in reversed(order)}
    assert [entry.request.id for entry in queue.heads(LINE)] == [
        number for _, _, number in order if first_of[known[number][2]] == number
    ]
    shift = {number: (fit + 1) % 3 for number, (_, _, fit) in known.items()}
    queue.refit(lambda request: shift[request.id])
    check_queue(queue)
    assert {entry.request.id: entry.flow.name.fit for entry in queue} == shift


# --- figures ---


def test_figures_of_waiting_requests() -> None:
    queue = Queue(QueueLimits())
    assert (queue.oldest_at(), queue.by_model()) == (None, {})
    for number, (tenant, priority, at) in enumerate(
        (("a", 0, 5.0), ("a", 0, 6.0), ("b", 0, 4.0), ("a", 3, 3.0))
    ):
        queue.push(asked(number, tenant, priority), at)
    queue.push(asked(9, model="other"), 7.0)
    assert queue.oldest_at() == 3.0
    assert queue.by_model() == {"m": 4, "other": 1}
    queue.remove(3)
    assert queue.oldest_at() == 4.0
    queue.remove(2)
    assert queue.oldest_at() == 5.0
    queue.push(asked(5), 7.5, due=2.0)
    queue.push(asked(6), 8.0, due=1.0)
    queue.remove(9)
    assert queue.oldest_by_model() == {"m": 5.0}, "the order of due times has no say in the age"
    for number in (0, 1):
        queue.remove(number)
    assert queue.oldest_at() == 7.5


# --- noticing ---


def shares(queue: Queue) -> dict[str | None, list[int]]:
    """Return the requests and bytes that wait, by tenant."""
    assert queue.tenants is not None
    return queue.tenants.waiting


def test_a_count_that_is_wrong_is_noticed() -> None:
    def wrong_bytes(queue: Queue) -> None:
        queue.bytes += 1

    def forgotten(queue: Queue) -> None:
        del queue.held[1]

    def unknown(queue: Queue) -> None:
        queue.held[99] = queue.held[1]

    def empty_flow(queue: Queue) -> None:
        name = FlowName(0, "stranger", "", 0)
        queue._lines[LINE][name] = QueueFlow(LINE, name)

    def empty_line(queue: Queue) -> None:
        queue._lines[QueueKey("x", None, False)] = {}

    def wrong_flow(queue: Queue) -> None:
        queue.held[1].flow = QueueFlow(LINE, FlowName(0, "stranger", "", 0))

    def wrong_share(queue: Queue) -> None:
        shares(queue)["a"][0] += 1

    def wrong_share_bytes(queue: Queue) -> None:
        shares(queue)["a"][1] += 1

    def share_of_stranger(queue: Queue) -> None:
        shares(queue)["stranger"] = [0, 0]

    for break_it, says in (
        (wrong_bytes, None),
        (forgotten, None),
        (unknown, None),
        (empty_flow, "^an empty flow was left behind$"),
        (empty_line, "^an empty line was left behind$"),
        (wrong_flow, "^an entry has a wrong flow$"),
        (wrong_share, None),
        (wrong_share_bytes, None),
        (share_of_stranger, None),
    ):
        queue = filled(QueueLimits(), asked(1, "a", body=5), asked(2, "a", body=6), asked(3, "b", priority=4))
        check_queue(queue)
        break_it(queue)
        with pytest.raises(AssertionError, match=says):
            check_queue(queue)


def test_bytes_never_fall_below_zero() -> None:
    queue = filled(QueueLimits(), asked(1, body=5))
    queue.bytes = 4
    with pytest.raises(AssertionError, match=r"^queued bytes fell below zero$"):
        queue.remove(1)


def test_sizes_that_do_not_add_up_are_noticed() -> None:
    queue = filled(QueueLimits(), asked(1), size=10)
    queue._sizes["m"] += 1
    with pytest.raises(AssertionError, match=r"^sizes waiting for m do not add up$"):
        queue.remove(1)
