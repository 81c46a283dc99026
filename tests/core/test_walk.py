"""A reader follows a request through `Scheduler.on_arrival` without going back and forth between modules.

A stay is an unbroken run of calls into one module; a return is a stay in a module that was left before. The
policy is one stay, and so is its forecast: which modules they ask is a question to them.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from helpers import dispatched, make_scheduler, request, spec

from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Outcome
from hetlb.build import compiled

MOST_STAYS = 18
MOST_RETURNS = 4
_POLICY = ("choose", "committed", "forecast")
_POLICIES = ("hetlb.balancer.core.policies.",)


def stays(scheduler: Scheduler, number: int, now: float) -> list[str]:
    """The modules that an arrival visits, in order."""
    visited: list[str] = []
    inside: list[FrameType] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals["__name__"]
        if event == "return" and inside and inside[-1] is frame:
            inside.pop()
        if event != "call" or inside or not name.startswith("hetlb."):
            return
        if name.startswith(_POLICIES) and frame.f_code.co_name in _POLICY:
            inside.append(frame)
        if not visited or visited[-1] != name:
            visited.append(name)

    arrived = request(number, exact=False)
    sys.setprofile(note)
    try:
        commands = scheduler.on_arrival(arrived, now)
    finally:
        sys.setprofile(None)
    dispatched(commands)
    return visited


@pytest.mark.skipif(compiled(), reason="compiled code has no frames")
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_an_arrival_is_followed_straight_through(policy: str) -> None:
    scheduler = make_scheduler([spec("a"), spec("b", slower=2.0)], policy)
    now = 0.0
    for number in range(100):  # until lengths are learnt and the fleet's figures are known
        now += 0.01
        lease = dispatched(scheduler.on_arrival(request(number, exact=False), now))
        scheduler.on_first_token(lease, now)
        lease.output_tokens = 20
        scheduler.on_lease_ended(lease, Outcome.OK, now)
    visited = stays(scheduler, 100, now + 0.01)
    returns = len(visited) - len(set(visited))
    assert len(visited) <= MOST_STAYS, visited
    assert returns <= MOST_RETURNS, visited


@pytest.mark.skipif(compiled(), reason="compiled code has no frames")
def test_a_decision_asks_for_each_figure_of_an_instance_once() -> None:
    scheduler = make_scheduler([spec("a", kv=100_000), spec("b", kv=100_000)], "hetlb")
    keys, quick = (("k", 80),), ServiceClass("quick", ttft_s=5.0, tpot_s=0.1)
    for number in range(30):
        asked = request(number, prompt=1000, prefix_keys=keys, service=quick)
        scheduler.on_arrival(asked, 0.01 * number)
    called: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        commands = scheduler.on_arrival(request(30, prefix_keys=keys, service=quick), 0.4)
    finally:
        sys.setprofile(None)
    dispatched(commands)
    names = ("cached_tokens", "expected_kv_tokens", "_room", "foresee", "lost_by_others_s")
    assert {name: called[name] for name in names} == dict.fromkeys(names, len(scheduler.instances))
