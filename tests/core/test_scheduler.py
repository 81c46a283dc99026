"""The mapper's rules one by one: who may take a request, what a failure leads to, what waits and expires."""

import pytest
from helpers import dispatched, make_scheduler, request, spec

from hetlb.balancer.core.facts import (
    AdminStateSet,
    CapacityLearned,
    InstanceAdded,
    InstanceRemoved,
    ModelsLearned,
    Probed,
    ProbeResult,
)
from hetlb.balancer.core.instance import DEFAULT_KV_CACHE_TOKENS
from hetlb.balancer.core.latency import DEFAULT_LATENCY
from hetlb.balancer.core.predictor import OnlinePredictor
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import (
    AdminState,
    Capacity,
    Dispatch,
    Health,
    HealthChanged,
    InstanceSpec,
    Outcome,
    Reject,
    RejectReason,
)
from hetlb.tools.sim.integrity import check_scheduler


def reject(commands: list[object]) -> RejectReason:
    reasons = [command.reason for command in commands if isinstance(command, Reject)]
    assert len(reasons) == 1, commands
    return reasons[0]


def test_unknown_model_is_rejected() -> None:
    scheduler = make_scheduler([spec("a")])
    assert reject(scheduler.on_arrival(request(1, model="other"), 0.0)) is RejectReason.UNKNOWN_MODEL


def test_a_model_is_not_unknown_while_an_instance_has_not_listed_its_models() -> None:
    scheduler = make_scheduler([InstanceSpec("a", "")])
    assert reject(scheduler.on_arrival(request(1), 0.0)) is RejectReason.NO_INSTANCE
    scheduler.on_instance(ModelsLearned("a", ("m", "lora")), 0.0)
    assert dispatched(scheduler.on_arrival(request(2), 0.0)).instance == "a"
    assert dispatched(scheduler.on_arrival(request(3, model="lora"), 0.0)).instance == "a"
    assert reject(scheduler.on_arrival(request(4, model="x"), 0.0)) is RejectReason.UNKNOWN_MODEL


def test_aliases_and_adapters_go_where_they_are() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    scheduler.on_instance(ModelsLearned("a", ("m",)), 0.0)
    scheduler.on_instance(ModelsLearned("b", ("m", "my-lora")), 0.0)
    assert [
        dispatched(scheduler.on_arrival(request(i, model="my-lora"), 0.0)).instance for i in range(3)
    ] == ["b", "b", "b"]


def test_an_instance_that_serves_something_else_gets_nothing() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    scheduler.on_instance(ModelsLearned("a", ("another",)), 0.0)
    assert {dispatched(scheduler.on_arrival(request(i), 0.0)).instance for i in range(4)} == {"b"}


def test_pools_are_apart() -> None:
    scheduler = make_scheduler([spec("a", model="x"), spec("b", model="y")], "rr")
    assert dispatched(scheduler.on_arrival(request(1, model="y"), 0.0)).instance == "b"
    assert dispatched(scheduler.on_arrival(request(2, model="x"), 0.0)).instance == "a"


def test_too_small_instances_are_not_eligible() -> None:
    scheduler = make_scheduler([spec("small", kv=1000), spec("large", kv=10_000)], "rr")
    commands = scheduler.on_arrival(request(1, prompt=900, max_tokens=200), 0.0)
    assert dispatched(commands).instance == "large"
    assert not commands[0].candidates[0].eligible  # type: ignore[union-attr]
    assert dispatched(scheduler.on_arrival(request(2, prompt=800, max_tokens=200), 0.0)).instance == "small"
    scheduler.on_instance(CapacityLearned("small", Capacity(max_model_len=100)), 0.0)
    assert {
        dispatched(scheduler.on_arrival(request(i, prompt=80, max_tokens=21), 0.0)).instance
        for i in range(3, 6)
    } == {"large"}


def test_a_prompt_too_long_for_all_is_rejected_only_if_it_was_counted() -> None:
    scheduler = make_scheduler([spec("a", kv=1000), spec("b", kv=2000)])
    assert reject(scheduler.on_arrival(request(1, prompt=3000), 0.0)) is RejectReason.TOO_LONG
    # An estimate may be wrong: the largest engine has the last word.
    assert dispatched(scheduler.on_arrival(request(2, prompt=3000, exact=False), 0.0)).instance == "b"
    # A prompt that fits is served, and the answer cut at the context length, as vLLM does.
    assert dispatched(scheduler.on_arrival(request(3, prompt=900, max_tokens=5000), 0.0)).instance == "b"


def test_one_request_books_at_most_one_instance() -> None:
    scheduler = make_scheduler([spec("a", kv=10_000)])
    lease = dispatched(scheduler.on_arrival(request(1, prompt=100, sequences=16_384), 0.0))
    assert lease.kv_tokens == 10_000


def test_requests_without_output_book_their_prompt() -> None:
    scheduler = make_scheduler([spec("a")])
    lease = dispatched(scheduler.on_arrival(request(1, generates=False, max_tokens=None), 0.0))
    assert lease.kv_tokens == 100
    assert lease.predicted_output == 0


@pytest.mark.parametrize("state", [AdminState.DRAIN, AdminState.MAINT])
def test_nothing_goes_to_a_drained_instance(state: AdminState) -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    scheduler.on_instance(AdminStateSet("a", state), 0.0)
    assert {dispatched(scheduler.on_arrival(request(i), 0.0)).instance for i in range(4)} == {"b"}
    scheduler.on_instance(AdminStateSet("a", AdminState.READY), 0.0)
    assert {dispatched(scheduler.on_arrival(request(i), 0.0)).instance for i in range(4, 8)} == {"a", "b"}


def test_suspects_are_used_only_when_none_is_up() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "rr", health=Health.SUSPECT)
    assert dispatched(scheduler.on_arrival(request(1), 0.0)).instance == "a"
    scheduler.on_instance(Probed("b", ProbeResult.OK), 0.0)
    assert {dispatched(scheduler.on_arrival(request(i), 0.0)).instance for i in range(2, 6)} == {"b"}


def test_a_refused_connection_goes_elsewhere_and_takes_the_instance_out() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    lease = dispatched(scheduler.on_arrival(request(1), 0.0))
    commands = scheduler.on_lease_ended(lease, Outcome.CONNECT_FAILED, 0.1)
    assert HealthChanged("a", Health.EJECTED, "it accepts no connection") in commands
    again = dispatched(commands)
    assert (again.instance, again.request.id) == ("b", 1)
    assert {dispatched(scheduler.on_arrival(request(i), 0.2)).instance for i in range(2, 6)} == {"b"}
    for _ in range(2):
        scheduler.on_instance(Probed("a", ProbeResult.OK), 1.0)
    assert {dispatched(scheduler.on_arrival(request(i), 1.0)).instance for i in range(6, 10)} == {"a", "b"}


def test_a_dropped_request_is_tried_once_more_and_no_more() -> None:
    scheduler = make_scheduler([spec("a"), spec("b"), spec("c")], "rr")
    first = dispatched(scheduler.on_arrival(request(1), 0.0))
    second = dispatched(scheduler.on_lease_ended(first, Outcome.NO_RESPONSE, 0.1))
    assert second.instance != first.instance
    commands = scheduler.on_lease_ended(second, Outcome.NO_RESPONSE, 0.2)
    assert reject(commands) is RejectReason.NO_RESPONSE
    check_scheduler(scheduler)
    assert scheduler.in_flight == 0


def test_retries_of_dropped_requests_have_a_budget() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "single")
    leases = [dispatched(scheduler.on_arrival(request(i), 0.0)) for i in range(8)]
    outcomes = [scheduler.on_lease_ended(lease, Outcome.NO_RESPONSE, 0.1) for lease in leases]
    retried = [commands for commands in outcomes if any(isinstance(c, Dispatch) for c in commands)]
    assert len(retried) == 3


def test_a_deadline_passed_is_not_retried() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    lease = dispatched(scheduler.on_arrival(request(1), 0.0))
    assert scheduler.on_lease_ended(lease, Outcome.NO_RESPONSE, 300.0, retry=False) == []


def test_answers_that_break_leave_an_instance_trials_alone_but_not_the_last() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "single")
    leases = [dispatched(scheduler.on_arrival(request(i), 0.0)) for i in range(30)]
    assert {lease.instance for lease in leases} == {"a"}
    for lease in leases:
        scheduler.on_first_token(lease, 0.0)  # it begins well and breaks off
        assert scheduler.on_lease_ended(lease, Outcome.BROKEN_STREAM, 0.0) == []
    at = []
    for i in range(30, 60):
        lease = dispatched(scheduler.on_arrival(request(i), 0.0))
        at.append(lease.instance)
        assert scheduler.on_lease_ended(lease, Outcome.BROKEN_STREAM, 0.0) == []
    assert at[0] == "b"
    assert "a" in at, "both alike: none is in doubt"


@pytest.mark.parametrize("outcome", [Outcome.UPSTREAM_REFUSED, Outcome.CLIENT_GONE, Outcome.LOCAL_FAULT])
def test_what_is_not_the_engine_s_fault_never_ejects(outcome: Outcome) -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "single")
    for i in range(50):
        lease = dispatched(scheduler.on_arrival(request(i), 0.0))
        assert scheduler.on_lease_ended(lease, outcome, 0.0) == []
        assert lease.instance == "a" or outcome is Outcome.UPSTREAM_REFUSED


def test_requests_wait_while_everyone_is_down_and_go_first_in_first_out() -> None:
    scheduler = make_scheduler([spec("a")])
    scheduler.on_instance(Probed("a", ProbeResult.REFUSED), 0.0)
    for i in range(3):
        assert scheduler.on_arrival(request(i), 1.0) == []
    assert scheduler.next_deadline() is not None
    scheduler.on_instance(Probed("a", ProbeResult.OK), 2.0)
    commands = scheduler.on_instance(Probed("a", ProbeResult.OK), 3.0)
    assert [c.request_id for c in commands if isinstance(c, Dispatch)] == [0, 1, 2]
    assert scheduler.next_deadline() is None
    check_scheduler(scheduler)


def test_waiting_for_an_instance_ends_after_its_limit() -> None:
    scheduler = make_scheduler([spec("a")])
    scheduler.on_instance(AdminStateSet("a", AdminState.MAINT), 0.0)
    scheduler.on_arrival(request(1), 10.0)
    assert scheduler.on_tick(39.9) == []
    assert reject(scheduler.on_tick(40.0)) is RejectReason.NO_INSTANCE
    assert len(scheduler.queue) == 0


def test_waiting_can_be_switched_off() -> None:
    scheduler = make_scheduler([spec("a")], limits=QueueLimits(no_instance_timeout_s=0))
    scheduler.on_instance(AdminStateSet("a", AdminState.DRAIN), 0.0)
    assert reject(scheduler.on_arrival(request(1), 0.0)) is RejectReason.NO_INSTANCE


@pytest.mark.parametrize(
    "limits", [QueueLimits(max_requests=2, max_bytes=None), QueueLimits(max_requests=None, max_bytes=200)]
)
def test_the_queue_is_bounded_by_count_and_bytes(limits: QueueLimits) -> None:
    scheduler = make_scheduler([spec("a")], limits=limits)
    scheduler.on_instance(AdminStateSet("a", AdminState.DRAIN), 0.0)
    for i in range(2):
        assert scheduler.on_arrival(request(i, body_bytes=100), 0.0) == []
    assert reject(scheduler.on_arrival(request(2, body_bytes=100), 0.0)) is RejectReason.QUEUE_FULL
    scheduler.on_cancelled(0, 0.0)
    assert scheduler.on_arrival(request(3, body_bytes=100), 0.0) == []
    check_scheduler(scheduler)


def test_a_lease_outlives_its_instance_and_a_namesake() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "single")
    old = dispatched(scheduler.on_arrival(request(1), 0.0))
    scheduler.on_instance(InstanceRemoved("a"), 1.0)
    scheduler.on_instance(InstanceAdded(spec("a")), 2.0)
    new = next(instance for instance in scheduler.instances if instance.name == "a")
    assert (new.in_flight, new.work_ns, new.kv_tokens) == (0, 0, 0)
    scheduler.on_lease_ended(old, Outcome.OK, 3.0)
    assert (new.in_flight, new.work_ns, new.kv_tokens) == (0, 0, 0)
    check_scheduler(scheduler)


def test_a_lease_cannot_be_given_back_twice() -> None:
    scheduler = make_scheduler([spec("a")])
    lease = dispatched(scheduler.on_arrival(request(1), 0.0))
    scheduler.on_lease_ended(lease, Outcome.OK, 1.0)
    with pytest.raises(KeyError):
        scheduler.on_lease_ended(lease, Outcome.OK, 1.0)


def test_requests_of_one_instance_go_to_their_instance_and_block_no_other() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "single")
    assert dispatched(scheduler.on_arrival(request(1, subset=("b",)), 0.0)).instance == "b"
    scheduler.on_instance(AdminStateSet("b", AdminState.MAINT), 0.0)
    assert scheduler.on_arrival(request(2, subset=("b",)), 0.0) == []
    assert dispatched(scheduler.on_arrival(request(3), 0.0)).instance == "a"


def test_without_a_profile_speed_is_learnt_while_serving() -> None:
    scheduler = make_scheduler([InstanceSpec("a", "m")])
    instance = scheduler.instances[0]
    assert instance.latency is DEFAULT_LATENCY
    assert instance.kv_cache_tokens == DEFAULT_KV_CACHE_TOKENS
    now = 0.0
    for i in range(40):
        lease = dispatched(scheduler.on_arrival(request(i), now))
        scheduler.on_first_token(lease, now + 1.0)
        lease.output_tokens = 51
        # Five times as slow as the default model for a batch of one at the mean context.
        step = 5.0 * DEFAULT_LATENCY.step_s(1, 100 + 51 / 2)
        now += 1.0 + 50 * step
        scheduler.on_lease_ended(lease, Outcome.OK, now)
    assert instance.latency.step_s(1, 100) == pytest.approx(5.0 * DEFAULT_LATENCY.step_s(1, 100), rel=1e-3)


def test_switching_the_policy_keeps_the_ledger() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    leases = [dispatched(scheduler.on_arrival(request(i), 0.0)) for i in range(4)]
    before = [(i.work_ns, i.kv_tokens, i.in_flight) for i in scheduler.instances]
    assert scheduler.set_policy("paper", 0.0) == []
    assert [(i.work_ns, i.kv_tokens, i.in_flight) for i in scheduler.instances] == before
    assert all(work > 0 for work, _, _ in before)
    for lease in leases:
        scheduler.on_lease_ended(lease, Outcome.OK, 1.0)
    assert [(i.work_ns, i.kv_tokens, i.in_flight) for i in scheduler.instances] == [(0, 0, 0)] * 2


def test_a_request_refused_by_the_last_instance_waits_and_goes_when_one_is_back() -> None:
    scheduler = make_scheduler([spec("a")])
    lease = dispatched(scheduler.on_arrival(request(1), 0.0))
    commands = scheduler.on_lease_ended(lease, Outcome.CONNECT_FAILED, 0.1)
    assert not any(isinstance(command, Dispatch | Reject) for command in commands)
    assert 1 in scheduler.queue
    scheduler.on_instance(Probed("a", ProbeResult.OK), 1.0)
    assert dispatched(scheduler.on_instance(Probed("a", ProbeResult.OK), 2.0)).request.id == 1
    check_scheduler(scheduler)


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.UPSTREAM_REFUSED])
def test_an_answer_by_the_engine_brings_a_suspect_up(outcome: Outcome) -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "single", health=Health.SUSPECT)
    lease = dispatched(scheduler.on_arrival(request(1), 0.0))
    commands = scheduler.on_lease_ended(lease, outcome, 0.2)
    changes = [command for command in commands if isinstance(command, HealthChanged)]
    assert [(c.instance, c.health) for c in changes] == [("a", Health.UP)]
    assert scheduler.instances[0].evidence.health.state is Health.UP


def test_lengths_are_learnt_for_each_sequence() -> None:
    predictor = OnlinePredictor()
    scheduler = make_scheduler([spec("a")], predictor=predictor)
    for i in range(60):
        lease = dispatched(scheduler.on_arrival(request(i, sequences=4, samples=4, max_tokens=None), 0.0))
        lease.output_tokens = 400
        scheduler.on_lease_ended(lease, Outcome.OK, 0.1)
    assert predictor.predict(request(100, max_tokens=None)) == pytest.approx(100.0, rel=0.2)
