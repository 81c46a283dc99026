"""Requests that wait: refusals without room, the order of placement, and when waiting ends."""

from __future__ import annotations

from collections import Counter

from helpers import dispatched, make_scheduler, request, spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.demand import PROMPT_WEIGHT
from hetlb.balancer.core.facts import AdminStateSet, CapacityLearned, InstanceRemoved
from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.predictor import OnlinePredictor
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.scheduler import TICK_S, Scheduler
from hetlb.balancer.core.types import (
    AdminState,
    Capacity,
    Command,
    Dispatch,
    Lease,
    Outcome,
    Reject,
    RejectReason,
)
from hetlb.tools.sim.integrity import check_scheduler


def drained(limits: QueueLimits | None = None, policy: str = "single", names: str = "a") -> Scheduler:
    """A fleet that takes nothing: whatever comes waits."""
    scheduler = make_scheduler([spec(name) for name in names], policy, limits=limits)
    for name in names:
        scheduler.on_instance(AdminStateSet(name, AdminState.DRAIN), 0.0)
    return scheduler


def back(scheduler: Scheduler, name: str = "a", now: float = 1.0) -> list[Command]:
    return scheduler.on_instance(AdminStateSet(name, AdminState.READY), now)


def sent(commands: list[Command]) -> list[tuple[int, str]]:
    """Requests that were dispatched, and where."""
    return [(each.request_id, each.lease.instance) for each in commands if isinstance(each, Dispatch)]


def told(commands: list[Command]) -> list[tuple[int, RejectReason, str, float | None]]:
    return [
        (each.request_id, each.reason, each.detail, each.retry_after_s)
        for each in commands
        if isinstance(each, Reject)
    ]


# --- what cannot wait ---


def test_without_time_to_wait_for_an_instance_none_waits() -> None:
    scheduler = drained(QueueLimits(no_instance_timeout_s=0.0))
    no_instance = "No instance of the model `m` is up."
    assert told(scheduler.on_arrival(request(1), 1.0)) == [(1, RejectReason.NO_INSTANCE, no_instance, 1.0)]
    assert not len(scheduler.queue)
    patient = drained(QueueLimits(no_instance_timeout_s=0.5))
    assert patient.on_arrival(request(1), 1.0) == []


def test_a_full_queue_says_so_to_the_arrival_or_to_evicted_requests() -> None:
    scheduler = drained(QueueLimits(max_requests=2))
    for number in (1, 2):
        assert scheduler.on_arrival(request(number, tenant="x"), 0.0) == []
    full = (RejectReason.QUEUE_FULL, "Too many requests are waiting for an instance.", 1.0)
    assert told(scheduler.on_arrival(request(3, tenant="x"), 0.0)) == [(3, *full)]
    assert told(scheduler.on_arrival(request(4, tenant="y"), 0.0)) == [(2, *full)]
    assert [entry.request.id for entry in scheduler.queue] == [1, 4]
    check_scheduler(scheduler)


def test_a_retry_that_leaves_a_full_queue_is_forgotten() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "single", limits=QueueLimits(max_requests=2), seed=1)
    leases = [dispatched(scheduler.on_arrival(request(number, tenant="x"), 0.0)) for number in range(5)]
    for lease in leases:
        moved = sent(scheduler.on_lease_ended(lease, Outcome.NO_RESPONSE, 0.1))
        assert moved == ([(lease.request.id, "b")] if lease.request.id < 3 else [])
    scheduler.on_instance(AdminStateSet("a", AdminState.DRAIN), 0.2)
    commands = scheduler.on_arrival(request(9, tenant="y", subset=("a",)), 0.2)
    assert [each[0] for each in told(commands)] == [4]
    assert scheduler.placement.retries.attempts.keys() == {0, 1, 2, 3}
    check_scheduler(scheduler)


def test_an_entry_waits_with_its_size() -> None:
    scheduler = drained(policy="hetlb")
    scheduler.on_arrival(request(1, prompt=1000, max_tokens=7, sequences=3), 2.0)
    [entry] = scheduler.queue
    assert entry.size == round(3 * (PROMPT_WEIGHT * 1000 + 7))
    assert (entry.arrived_at, scheduler.queue.waiting("m")) == (2.0, entry.size)


# --- time ---


def test_the_first_that_waits_begins_the_ticks() -> None:
    scheduler = drained()
    assert scheduler.next_deadline() is None
    scheduler.on_arrival(request(1), 5.0)
    assert scheduler.next_deadline() == 5.0 + TICK_S
    scheduler.on_arrival(request(2), 5.2)
    assert scheduler.next_deadline() == 5.0 + TICK_S
    scheduler.on_tick(6.0)
    assert scheduler.next_deadline() == 6.0 + TICK_S
    for number in (1, 2):
        scheduler.on_cancelled(number, 6.1)
    assert scheduler.next_deadline() is None


def test_each_request_gives_up_at_its_own_limit() -> None:
    scheduler = drained(QueueLimits(timeout_s=60.0, no_instance_timeout_s=1e9))
    for number, at in ((1, 10.0), (2, 11.0), (3, 40.0)):
        scheduler.on_arrival(request(number), at)
    scheduler.on_arrival(request(4, priority=1), 12.0)
    assert scheduler.on_tick(69.999) == []
    text = "The request waited 60 s for an instance and none became free."
    assert told(scheduler.on_tick(70.0)) == [(1, RejectReason.QUEUE_EXPIRED, text, 1.0)]
    assert [each[0] for each in told(scheduler.on_tick(75.0))] == [2, 4]
    assert [each[0] for each in told(scheduler.on_tick(99.9))] == []
    assert [each[0] for each in told(scheduler.on_tick(100.0))] == [3]
    check_scheduler(scheduler)


def test_without_a_limit_a_request_waits_for_as_long_as_an_instance_is_up() -> None:
    scheduler = make_scheduler(
        [spec("a"), spec("b")], "single", limits=QueueLimits(timeout_s=None, no_instance_timeout_s=30.0)
    )
    scheduler.on_instance(AdminStateSet("a", AdminState.DRAIN), 0.0)
    assert scheduler.on_arrival(request(1, subset=("a",)), 0.0) == []
    assert scheduler.on_tick(1e6) == []
    scheduler.on_instance(AdminStateSet("b", AdminState.DRAIN), 1e6)
    assert scheduler.on_arrival(request(2), 1e6 + 10.0) == []
    assert scheduler.on_tick(1e6 + 29.9) == []
    assert [each[:2] for each in told(scheduler.on_tick(1e6 + 30.0))] == [(1, RejectReason.NO_INSTANCE)]
    assert scheduler.on_tick(1e6 + 39.9) == [], "it waits since it came"
    assert [each[0] for each in told(scheduler.on_tick(1e6 + 40.0))] == [2]


# --- order ---


def test_waiting_requests_go_in_order_when_an_instance_is_back() -> None:
    scheduler = drained(names="ab")
    for number, more in ((1, {}), (2, {"subset": ("b",)}), (3, {"priority": -1}), (4, {})):
        assert scheduler.on_arrival(request(number, **more), 0.0) == []  # type: ignore[arg-type]
    assert sent(back(scheduler)) == [(3, "a"), (1, "a"), (4, "a")]
    assert sent(back(scheduler, "b")) == [(2, "b")]
    assert not len(scheduler.queue)
    check_scheduler(scheduler)


def test_requests_of_a_model_that_is_gone_wait_for_it() -> None:
    scheduler = drained()
    scheduler.on_arrival(request(1), 0.0)
    scheduler.on_instance(InstanceRemoved("a"), 1.0)
    assert scheduler.on_tick(2.0) == []
    assert 1 in scheduler.queue
    assert [each[0] for each in told(scheduler.on_tick(31.0))] == [1]


def test_a_prompt_that_no_instance_takes_any_more_is_turned_down() -> None:
    scheduler = drained()
    scheduler.on_arrival(request(1, prompt=5000), 0.0)
    scheduler.on_arrival(request(2, prompt=5000, exact=False), 0.0)
    scheduler.on_arrival(request(3, prompt=999), 0.0)
    scheduler.on_arrival(request(4, prompt=1000), 0.0)
    commands = scheduler.on_instance(CapacityLearned("a", Capacity(max_model_len=1000)), 0.5)
    commands += back(scheduler)
    assert sorted(each[:2] for each in told(commands)) == [
        (1, RejectReason.TOO_LONG),
        (4, RejectReason.TOO_LONG),
    ]
    assert {each[0] for each in sent(commands)} == {2, 3}, "an estimate may be wrong"
    check_scheduler(scheduler)


def test_a_capacity_that_is_known_already_changes_nothing() -> None:
    """Each look at an engine tells it: a fleet of a thousand sorts its instances by model for news alone."""
    scheduler = make_scheduler([spec("a")])
    [model] = scheduler.fleet.ready
    known, sorted_anew = scheduler.fleet.ready[model], []
    for now, longest in ((1.0, 1000), (2.0, 1000), (3.0, None), (4.0, 2000), (5.0, 2000)):
        scheduler.on_instance(CapacityLearned("a", Capacity(max_model_len=longest)), now)
        if scheduler.fleet.ready[model] is not known:
            known = scheduler.fleet.ready[model]
            sorted_anew.append(now)
    assert sorted_anew == [1.0, 4.0]


def full(policy: str = "hetlb", places: int = 2, **more: object) -> tuple[Scheduler, list[Lease]]:
    """One instance whose places are taken by requests from 0 on, and their leases."""
    capacity = Capacity(kv_cache_tokens=10**6, kv_tokens_per_request=10**6, max_num_seqs=places)
    scheduler = make_scheduler([spec("a", capacity=capacity)], policy, **more)  # type: ignore[arg-type]
    leases: list[Lease] = []
    for number in range(100):
        commands = scheduler.on_arrival(request(number), 0.0)
        if not commands:
            scheduler.on_cancelled(number, 0.0)
            break
        leases.append(dispatched(commands))
    assert 0 < len(leases) < 100
    return scheduler, leases


def test_lengths_are_predicted_again_a_few_at_a_time_from_the_newest_on() -> None:
    """20 wait; each answer of 5 tokens, where 200 were expected, is news for 8 of them."""
    predictor = OnlinePredictor()
    for _ in range(50):
        predictor.observe(request(0, max_tokens=None), 200.0)
    scheduler, leases = full(predictor=predictor)
    for number in range(100, 120):
        assert scheduler.on_arrival(request(number, max_tokens=None), 1.0) == []
    before = {entry.request.id: entry.size for entry in scheduler.queue}
    for _ in range(200):
        predictor.observe(request(0, max_tokens=None), 5.0)
    leases[0].output_tokens = 5
    scheduler.on_lease_ended(leases[0], Outcome.OK, 2.0)
    waiting = {entry.request.id: entry for entry in scheduler.queue}
    changed = {number for number, entry in waiting.items() if entry.size != before[number]}
    assert changed == set(range(112, 120)) & waiting.keys()
    for number in changed:
        predicted = predictor.predict(waiting[number].request)
        assert waiting[number].size == round(PROMPT_WEIGHT * 100 + predicted)
    assert scheduler.queue.waiting("m") == sum(entry.size for entry in waiting.values())
    check_scheduler(scheduler)


def test_what_has_no_answer_is_not_predicted_again() -> None:
    scheduler, leases = full()
    assert scheduler.on_arrival(request(100, generates=False, max_tokens=None), 1.0) == []
    [entry] = scheduler.queue
    scheduler.on_instance(AdminStateSet("a", AdminState.DRAIN), 1.5)
    scheduler.on_lease_ended(leases[0], Outcome.OK, 2.0)
    assert entry.size == round(PROMPT_WEIGHT * 100)


def test_a_retry_waits_for_the_budget_and_then_counts_in_it() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "single")
    leases = [dispatched(scheduler.on_arrival(request(number), 0.0)) for number in range(6)]
    again = [dispatched(scheduler.on_lease_ended(each, Outcome.NO_RESPONSE, 0.1)) for each in leases[:3]]
    for lease in leases[3:5]:
        assert sent(scheduler.on_lease_ended(lease, Outcome.NO_RESPONSE, 0.1)) == []
    assert sent(scheduler.on_tick(0.5)) == []
    assert sent(scheduler.on_lease_ended(again[0], Outcome.OK, 1.0)) == [(3, "b")]
    assert sent(scheduler.on_tick(1.5)) == []
    assert sent(scheduler.on_lease_ended(again[1], Outcome.OK, 2.0)) == [(4, "b")]
    check_scheduler(scheduler)


def test_a_retry_that_has_been_everywhere_by_its_turn_is_given_up() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "single")
    leases = [dispatched(scheduler.on_arrival(request(number), 0.0)) for number in range(4)]
    for lease in leases[:3]:
        dispatched(scheduler.on_lease_ended(lease, Outcome.NO_RESPONSE, 0.1))
    assert scheduler.on_lease_ended(leases[3], Outcome.NO_RESPONSE, 0.1) == []
    commands = scheduler.on_instance(InstanceRemoved("b"), 0.2)
    closed = "The instance closed the connection without answering."
    assert told(commands) == [(3, RejectReason.NO_RESPONSE, closed, None)]
    check_scheduler(scheduler)


# --- targets ---


def test_late_requests_are_refused_or_served_after_requests_in_time() -> None:
    patient = ServiceClass("patient", ttft_s=2.0)
    strict = ServiceClass("strict", ttft_s=2.0, refuse_hopeless=True)
    scheduler = drained()
    for number, service in ((1, patient), (2, strict), (3, patient)):
        assert scheduler.on_arrival(request(number, service=service), float(number)) == []
    text = "The targets of the class `strict` can no longer be met for this request."
    [refused, *sent_now] = back(scheduler, now=4.5)
    assert told([refused]) == [(2, RejectReason.QUEUE_EXPIRED, text, 1.0)]
    assert sent(sent_now) == [(3, "a"), (1, "a")]
    check_scheduler(scheduler)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(50, 3000)), min_size=30, max_size=60),
    st.integers(5, 20),
)
def test_a_greedy_tenant_leaves_others_their_share_of_what_runs(
    others: list[tuple[str, int]], slots: int
) -> None:
    """One tenant fills the fleet before the others come: as it drains they get what runs, to one request."""
    capacity = Capacity(kv_cache_tokens=10**7, kv_tokens_per_request=10**7, max_num_seqs=slots)
    scheduler = make_scheduler([spec("a", capacity=capacity)], "hetlb")
    running: list[Lease] = []
    for number in range(100):
        running += leases_of(scheduler.on_arrival(request(number, prompt=500, tenant="greedy"), 0.0))
    for number, (tenant, prompt) in enumerate(others):
        running += leases_of(scheduler.on_arrival(request(1000 + number, prompt=prompt, tenant=tenant), 0.0))
    waits = {tenant for tenant, _ in others}
    for now in range(slots):
        lease = running.pop(0)
        lease.output_tokens = 50
        running += leases_of(scheduler.on_lease_ended(lease, Outcome.OK, float(now)))
        check_scheduler(scheduler)
    held = Counter[str | None]()
    for lease in running:
        held[lease.request.tenant] += lease.promised_tokens
    largest = max(lease.promised_tokens for lease in running)
    still = waits & {entry.request.tenant for entry in scheduler.queue}
    for tenant in still:
        assert held[tenant] + largest >= held["greedy"]


def leases_of(commands: list[Command]) -> list[Lease]:
    return [each.lease for each in commands if isinstance(each, Dispatch)]


def test_of_what_waits_short_prompts_go_first_but_no_prompt_waits_for_ever() -> None:
    """Each is due 20 times the time to read its prompt after it came, 30 s at most."""
    room = Capacity(kv_cache_tokens=400_000, kv_tokens_per_request=200_000, max_num_seqs=1)
    scheduler = make_scheduler([spec("a", capacity=room)], "hetlb")
    lease = dispatched(scheduler.on_arrival(request(0), 0.0))
    for number, prompt, at in (
        (1, 100_000, 0.1),
        (2, 1000, 0.2),
        (3, 100, 0.3),
        (4, 1000, 0.4),
        (5, 100, 60.0),
    ):
        assert scheduler.on_arrival(request(number, prompt=prompt), at) == []
    order = []
    for _ in range(5):
        lease = dispatched(scheduler.on_lease_ended(lease, Outcome.OK, 60.0))
        order.append(lease.request.id)
    assert order == [3, 2, 4, 1, 5]
