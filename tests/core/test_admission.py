"""The queue by its edges: where its bounds lie, who counts for whom, and that a wrong count is noticed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from helpers import head, request, waiting

from hetlb.core.admission import Flow, Queue, QueueKey, QueueLimits
from hetlb.core.types import Request

LINE = QueueKey("m", None, False)


def asked(number: int, tenant: str | None = None, priority: int = 0, body: int = 0, **more: Any) -> Request:
    return request(number, tenant=tenant, priority=priority, body_bytes=body, **more)


def filled(limits: QueueLimits, *requests: Request, size: int = 10) -> Queue:
    queue = Queue(limits)
    for each in requests:
        queue.push(each, 0.0, size=size)
        queue.check_integrity()
    return queue


def served(queue: Queue, count: int) -> list[int]:
    """Who is served next, by whose turn it is."""
    ids = []
    for _ in range(count):
        ids.append(queue.take(head(queue).request.id, 0).request.id)
        queue.check_integrity()
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
    queue.push(asked(2, pinned="a"), 0.0, size=2)
    queue.push(asked(3, model="other"), 0.0, size=4)
    assert queue.keys == [LINE, ("m", "a", False), ("other", None, False)]
    queue.push(asked(4), 0.0, size=8, retry=True)
    assert queue.keys[0] == ("m", None, True)
    assert set(queue.keys[1:]) == {LINE, ("m", "a", False), ("other", None, False)}
    assert (queue.waiting("m"), queue.waiting("other"), queue.waiting("none")) == (11, 4, 0)
    assert [entry.request.id for entry in waiting(queue, QueueKey("m", None, True))] == [4]
    assert queue.heads(QueueKey("none", None, False)) == []
    assert {entry.request.id for entry in queue} == {1, 2, 3, 4}
    for number in (1, 2, 4):
        assert queue.remove(number) is not None
        queue.check_integrity()
    assert queue.waiting("m") == 0
    assert queue.keys == [("other", None, False)]
    assert queue.remove(1) is None
    assert (1 in queue, 3 in queue, len(queue)) == (False, True, 1)


def test_an_entry_holds_what_was_said_of_it() -> None:
    queue = Queue(QueueLimits())
    queue.push(asked(1), 7.0, 33.0, 5)
    queue.push(asked(2), 8.0)
    first, second = waiting(queue, LINE)
    assert (first.arrived_at, first.predicted_output, first.size, first.fit) == (7.0, 33.0, 5, 0)
    assert queue.overtaken(first) == 0
    assert (second.arrived_at, second.predicted_output, second.size) == (8.0, 0.0, 0)
    assert queue.take(1, 0) is first
    assert queue.remove(2) is second


def test_a_request_waits_once() -> None:
    queue = filled(QueueLimits(), asked(1))
    with pytest.raises(AssertionError, match=r"^request 1 is queued already$"):
        queue.push(asked(1), 0.0)


def test_only_a_better_priority_of_the_same_line_goes_before() -> None:
    queue = filled(
        QueueLimits(),
        asked(1, priority=3),
        asked(2, pinned="a", priority=-9),
        asked(3, model="o", priority=-9),
    )
    queue.push(asked(4, priority=-9), 0.0, retry=True)
    assert not queue.may_pass(asked(9, priority=4))
    assert queue.may_pass(asked(9, priority=3))
    assert queue.may_pass(asked(9, priority=-5))
    assert not queue.may_pass(asked(9, priority=-5, pinned="a"))
    assert queue.may_pass(asked(9, priority=9, model="none"))


def test_the_first_are_of_the_best_priority_and_whose_turn_it_is() -> None:
    queue = filled(
        QueueLimits(), asked(1, priority=5), asked(2, "a"), asked(3, "b"), asked(4, "a"), asked(5, "a")
    )
    assert [entry.request.id for entry in waiting(queue, LINE)[:2]] == [2, 4]
    assert [entry.request.id for entry in waiting(queue, LINE)] == [2, 4, 5]
    assert [[entry.request.id for entry in flow] for flow in queue.flows()] == [[2, 4, 5], [3], [1]]


# --- whose turn ---


def test_what_is_served_past_the_queue_counts_for_its_tenant() -> None:
    """By its size, in its own line and priority; not where nothing waits."""
    queue = Queue(QueueLimits())
    for number in range(10):
        queue.push(asked(number, "a"), 0.0, size=10)
        queue.push(asked(100 + number, "b"), 0.0, size=10)
    queue.passed(asked(50, "a"), 50.0, 0)
    # 'a' has had five: 'b' is served until it has had as much.
    assert served(queue, 7) == [100, 101, 102, 103, 104, 0, 105]
    queue = Queue(QueueLimits())
    for number in range(4):
        queue.push(asked(number, "a"), 0.0, size=10)
        queue.push(asked(100 + number, "b"), 0.0, size=10)
    queue.passed(asked(50, "a", priority=1), 500.0, 0)
    queue.passed(asked(50, "a", pinned="x"), 500.0, 0)
    queue.passed(asked(50, "a", model="o"), 500.0, 0)
    assert sorted(served(queue, 4)) == [0, 1, 100, 101]


def test_it_counts_for_a_tenant_that_waits_for_nothing_too() -> None:
    queue = Queue(QueueLimits())
    for number in range(10):
        queue.push(asked(number, "a"), 0.0, size=10)
    for number in range(4):
        queue.passed(asked(50 + number, "b"), 10.0, 0)
    for number in range(4):
        queue.push(asked(100 + number, "b"), 0.0, size=10)
    assert served(queue, 4) == [0, 1, 2, 3]
    assert sorted(served(queue, 2)) == [4, 100]


def test_the_least_that_a_request_counts_for_is_one() -> None:
    """Requests of no size take turns all the same, whether they waited or not."""
    queue = Queue(QueueLimits())
    for number in range(6):
        queue.push(asked(number, "a"), 0.0, size=0)
        queue.push(asked(100 + number, "b"), 0.0, size=0)
    assert sorted(served(queue, 4)) == [0, 1, 100, 101]
    queue.passed(asked(50, "a"), 0.0, 0)
    queue.passed(asked(51, "a"), 0.0, 0)
    assert sorted(served(queue, 2)) == [102, 103]


def test_weights_hold_for_what_is_served_past_the_queue() -> None:
    queue = Queue(QueueLimits(tenant_weights={"gold": 4.0}))
    for number in range(10):
        queue.push(asked(number, "gold"), 0.0, size=10)
        queue.push(asked(100 + number, "plain"), 0.0, size=10)
    queue.passed(asked(50, "gold"), 40.0, 0)  # as much as one of 'plain'
    assert served(queue, 6) == [100, 0, 101, 1, 2, 3]


def test_weights_hold_for_tenants_that_do_not_wait() -> None:
    queue = Queue(QueueLimits(tenant_weights={"gold": 4.0}))
    for number in range(10):
        queue.push(asked(number, "plain"), 0.0, size=10)
    queue.passed(asked(50, "gold"), 80.0, 0)  # as much as two of 'plain'
    for number in range(4):
        queue.push(asked(100 + number, "gold"), 0.0, size=10)
    assert served(queue, 2) == [0, 1]
    assert sorted(served(queue, 5)) == [2, 100, 101, 102, 103]


def test_a_tenant_without_a_name_has_the_weight_of_one() -> None:
    queue = Queue(QueueLimits(tenant_weights={"gold": 3.0}))
    for number in range(8):
        queue.push(asked(number, "gold"), 0.0, size=10)
        queue.push(asked(100 + number, None), 0.0, size=10)
    ids = served(queue, 8)
    assert sum(number < 100 for number in ids) == 6


def test_finish_tags_do_not_pile_up() -> None:
    """Thousands of tenants that came once leave nothing behind but what still lies ahead."""
    queue = Queue(QueueLimits(max_requests=None))
    for number in range(3000):
        queue.push(asked(number, "steady"), 0.0, size=10)
    for number in range(2500):
        queue.push(asked(10_000 + number, f"once-{number}"), 0.0, size=10)
        for _ in range(2):
            queue.take(head(queue).request.id, 0)
    queue.check_integrity()
    fair = next(iter(queue._lines[LINE].values()))
    assert len(fair._finished) <= 1025


def test_a_tenant_that_emptied_its_queue_waits_its_turn_again() -> None:
    queue = filled(QueueLimits(), asked(1, "a"), *(asked(10 + n, "b") for n in range(9)), size=10)
    queue.take(1, 0)
    queue.push(asked(2, "a"), 0.0, size=10)
    assert served(queue, 3) == [10, 2, 11]


# --- figures ---


def test_figures_of_waiting_requests() -> None:
    queue = Queue(QueueLimits())
    assert (queue.oldest_at(), queue.by_model(), queue.count(LINE)) == (None, {}, 0)
    for number, (tenant, priority, at) in enumerate(
        (("a", 0, 5.0), ("a", 0, 6.0), ("b", 0, 4.0), ("a", 3, 3.0))
    ):
        queue.push(asked(number, tenant, priority), at)
    queue.push(asked(9, model="other"), 7.0)
    assert queue.oldest_at() == 3.0
    assert queue.by_model() == {"m": 4, "other": 1}
    assert (queue.count(LINE), queue.count(("other", None, False)), queue.count(("m", None, True))) == (
        4,
        1,
        0,
    )
    queue.remove(3)
    assert queue.oldest_at() == 4.0
    queue.remove(2)
    assert (queue.oldest_at(), queue.count(LINE)) == (5.0, 2)


# --- noticing ---


def test_a_count_that_is_wrong_is_noticed() -> None:
    def wrong_bytes(queue: Queue) -> None:
        queue.bytes += 1

    def forgotten(queue: Queue) -> None:
        del queue.held[1]

    def unknown(queue: Queue) -> None:
        queue.held[99] = queue.held[1]

    def empty_flow(queue: Queue) -> None:
        fair = queue._lines[LINE][0]
        fair.flows["nobody"] = Flow("nobody", 0, 1.0)
        fair.flows["nobody"].by_fit[0] = OrderedDict()

    def empty_priority(queue: Queue) -> None:
        queue._lines[LINE][7] = type(queue._lines[LINE][0])()

    def empty_line(queue: Queue) -> None:
        queue._lines[QueueKey("x", None, False)] = {}

    def out_of_order(queue: Queue) -> None:
        queue._lines[LINE] = dict(reversed(queue._lines[LINE].items()))

    def wrong_share(queue: Queue) -> None:
        queue._shares["a"].requests += 1

    def wrong_share_bytes(queue: Queue) -> None:
        queue._shares["a"].bytes += 1

    def share_of_nobody(queue: Queue) -> None:
        queue._shares["nobody"] = type(queue._shares["a"])()

    def line_of_none(queue: Queue) -> None:
        fair = queue._lines[LINE][0]
        fair.lines[7] = type(fair.lines[0])()

    def overtaken_too_often(queue: Queue) -> None:
        queue.held[1][3].credit = -1

    def forgotten_key(queue: Queue) -> None:
        queue._keys.clear()

    for break_it, says in (
        (wrong_bytes, None),
        (forgotten, None),
        (unknown, None),
        (empty_flow, "^an empty flow was left behind$"),
        (empty_priority, "^an empty priority$"),
        (empty_line, "^an empty line was left behind$"),
        (out_of_order, "^priorities out of order$"),
        (wrong_share, None),
        (wrong_share_bytes, None),
        (share_of_nobody, None),
        (line_of_none, "^fits$"),
        (overtaken_too_often, "^overtaken too often$"),
        (forgotten_key, "^keys of lines$"),
    ):
        queue = filled(QueueLimits(), asked(1, "a", body=5), asked(2, "a", body=6), asked(3, "b", priority=4))
        queue.check_integrity()
        break_it(queue)
        with pytest.raises(AssertionError, match=says):
            queue.check_integrity()


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
