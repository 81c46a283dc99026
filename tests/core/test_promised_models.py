"""Names of models that outlive their instances: their requests wait, and are no mistake of the client."""

from __future__ import annotations

from helpers import dispatched, make_scheduler, request, spec

from hetlb.balancer.core.facts import InstanceAdded, InstanceRemoved, ModelsLearned, ModelsPromised
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Reject, RejectReason

HOUR_S = 3600.0


def reason(scheduler: Scheduler, model: str, now: float) -> RejectReason | None:
    """Return the reason for which a request is refused at once, None if it waits or is dispatched."""
    found = scheduler.on_arrival(request(int(now * 10), model=model), now)
    return found[0].reason if found and isinstance(found[0], Reject) else None


def test_a_request_waits_for_the_only_instance_to_come_back() -> None:
    scheduler = make_scheduler([spec("a"), spec("b", model="other")])
    model = scheduler.instances[0].spec.model
    scheduler.on_instance(InstanceRemoved("a"), 1.0)
    assert scheduler.on_arrival(request(1, model=model), 2.0) == []
    assert dispatched(scheduler.on_instance(InstanceAdded(spec("c")), 3.0)).instance == "c"


def test_a_name_is_forgotten_an_hour_after_its_last_instance() -> None:
    scheduler = make_scheduler([spec("a"), spec("b", model="other")])
    model = scheduler.instances[0].spec.model
    scheduler.on_instance(InstanceRemoved("a"), 1.0)
    scheduler.on_instance(ModelsPromised(()), HOUR_S)
    assert reason(scheduler, model, HOUR_S) is None
    scheduler.on_instance(ModelsPromised(()), 2.0 + HOUR_S)
    assert reason(scheduler, model, 3.0 + HOUR_S) is RejectReason.UNKNOWN_MODEL


def test_a_promised_name_is_known_without_an_instance_until_it_is_promised_no_more() -> None:
    scheduler = make_scheduler([spec("b", model="other")])
    assert reason(scheduler, "m9", 1.0) is RejectReason.UNKNOWN_MODEL
    scheduler.on_instance(ModelsPromised(("m9",)), 2.0)
    assert reason(scheduler, "m9", 3.0) is None
    scheduler.on_instance(ModelsPromised(()), 4.0)
    assert reason(scheduler, "m9", 5.0) is RejectReason.UNKNOWN_MODEL


def test_an_edit_that_takes_a_model_out_takes_its_name_out_too() -> None:
    scheduler = make_scheduler([spec("a"), spec("b", model="other")])
    model = scheduler.instances[0].spec.model
    scheduler.on_instance(ModelsPromised((model, "other")), 1.0)
    scheduler.on_instance(InstanceRemoved("a"), 2.0)
    scheduler.on_instance(ModelsPromised(("other",)), 2.0)
    assert reason(scheduler, model, 3.0) is RejectReason.UNKNOWN_MODEL


def test_a_list_that_becomes_empty_keeps_the_requests_waiting() -> None:
    scheduler = make_scheduler([spec("a"), spec("b", model="other")])
    model = scheduler.instances[0].spec.model
    scheduler.on_instance(ModelsLearned("a", ()), 1.0)
    assert scheduler.on_arrival(request(1, model=model), 2.0) == []
    assert dispatched(scheduler.on_instance(ModelsLearned("a", (model,)), 3.0)).instance == "a"


def test_the_names_that_are_kept_are_bounded() -> None:
    scheduler = make_scheduler([spec("b", model="other")])
    for number in range(1500):
        scheduler.on_instance(InstanceAdded(spec(f"i{number}", model=f"m{number}")), number / 1000)
        scheduler.on_instance(InstanceRemoved(f"i{number}"), number / 1000)
    assert len(scheduler.fleet.ready) == 1 + 1024
    assert reason(scheduler, "m0", 2.0) is RejectReason.UNKNOWN_MODEL
    assert reason(scheduler, "m1499", 2.1) is None


def test_without_any_instance_a_client_is_told_to_come_again() -> None:
    scheduler = make_scheduler([spec("b", model="other")])
    scheduler.on_instance(InstanceRemoved("b"), 1.0)
    assert reason(scheduler, "never-seen", 2.0) is RejectReason.NO_INSTANCE
