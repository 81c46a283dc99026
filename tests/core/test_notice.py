"""An instance that has been given notice: it gets what ends in time, and nothing else."""

from __future__ import annotations

import pytest
from helpers import dispatched, make_scheduler, request, spec

from hetlb.balancer.core.facts import AdminStateSet
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import AdminState, Dispatch
from hetlb.tools.sim.integrity import check_scheduler


def noticed(deadline_s: float, *, slower: float = 50.0, policy: str = "hetlb") -> Scheduler:
    """A fast instance with a notice, and one that is slower."""
    scheduler = make_scheduler([spec("leaves"), spec("stays", slower=slower)], policy)
    scheduler.on_instance(AdminStateSet("leaves", AdminState.READY, deadline_s), 0.0)
    return scheduler


@pytest.mark.parametrize("policy", ["hetlb", "rr", "least-requests"])
def test_what_ends_in_time_may_still_go_there(policy: str) -> None:
    scheduler = noticed(3600.0, policy=policy)
    names = {dispatched(scheduler.on_arrival(request(each), 0.0)).instance for each in range(1, 5)}
    assert "leaves" in names


@pytest.mark.parametrize("policy", ["hetlb", "rr", "least-requests"])
def test_what_does_not_end_in_time_goes_elsewhere(policy: str) -> None:
    scheduler = noticed(1.6, policy=policy)
    for each in range(1, 5):
        lease = dispatched(scheduler.on_arrival(request(each, max_tokens=4000), 0.0))
        assert lease.instance == "stays"


def test_it_waits_where_every_instance_leaves() -> None:
    scheduler = make_scheduler([spec("leaves")], "hetlb")
    scheduler.on_instance(AdminStateSet("leaves", AdminState.READY, 1.6), 0.0)
    assert scheduler.on_arrival(request(1, max_tokens=4000), 0.0) == []
    taken_back = scheduler.on_instance(AdminStateSet("leaves", AdminState.READY), 0.5)
    assert [type(each) for each in taken_back] == [Dispatch]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_notice_and_a_throttled_instance_leave_the_third(policy: str) -> None:
    """Whatever the policy, and each decision shows all three."""
    scheduler = make_scheduler([spec(name) for name in ("busy", "leaves", "stays")], policy)
    scheduler.instances[0].evidence.asked(3.0, 0.0)
    scheduler.on_instance(AdminStateSet("leaves", AdminState.READY, 1.0), 0.0)
    for number in range(1, 9):
        (command,) = scheduler.on_arrival(request(number, max_tokens=4000), 0.0)
        assert isinstance(command, Dispatch)
        shown = [each.instance for each in command.candidates]
        assert (command.lease.instance, shown) == ("stays", ["busy", "leaves", "stays"])
    check_scheduler(scheduler)
