"""Who was sent a beginning is asked again, unless that costs more than the reading it spares."""

from __future__ import annotations

from typing import Any

from helpers import dispatched, make_scheduler, request, spec
from hetlb.core.affinity import Affinity
from hypothesis import given
from hypothesis import strategies as st

from hetlb.core.types import InstanceAdded, InstanceRemoved, Outcome

SESSION = (("session:a", None),)


def turn(i: int, prompt: int = 3000, **more: Any) -> Any:
    return request(i, prompt=prompt, prefix_keys=SESSION, **more)


def fleet() -> Any:
    return make_scheduler([spec("a", kv=1_000_000), spec("b", kv=1_000_000)], "hetlb")


def test_a_conversation_returns_to_its_instance() -> None:
    scheduler = fleet()
    lease = dispatched(scheduler.on_arrival(turn(1), 0.0))
    busy = dispatched(scheduler.on_arrival(request(2, prompt=200), 0.0))
    assert (lease.instance, busy.instance) == ("a", "b")
    scheduler.on_first_token(busy, 0.5)
    scheduler.on_lease_ended(busy, Outcome.OK, 1.0)
    scheduler.on_first_token(lease, 0.5)
    # `a` still answers somebody, `b` is idle: a stranger goes to `b`, the next turn to `a`.
    stranger = dispatched(scheduler.on_arrival(request(3, prompt=3000), 2.0))
    assert stranger.instance == "b"
    scheduler.on_cancelled(3, 2.0)
    scheduler.on_lease_ended(stranger, Outcome.OK, 2.5)
    assert dispatched(scheduler.on_arrival(turn(4, prompt=3200), 3.0)).instance == "a"


def test_never_against_balance() -> None:
    scheduler = fleet()
    chosen = [dispatched(scheduler.on_arrival(turn(i), 0.0)).instance for i in range(12)]
    assert set(chosen) == {"a", "b"}


def test_an_instance_that_came_back_holds_nothing() -> None:
    scheduler = fleet()
    lease = dispatched(scheduler.on_arrival(turn(1), 0.0))
    assert lease.instance == "a"
    scheduler.on_first_token(lease, 0.5)
    scheduler.on_lease_ended(lease, Outcome.OK, 1.0)
    scheduler.on_instance(InstanceRemoved("a"), 2.0)
    scheduler.on_instance(InstanceAdded(spec("a", kv=1_000_000)), 3.0)
    held = scheduler._affinity.held(turn(2))
    assert all(i.cache_id not in held for i in scheduler.instances)


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 5000)), max_size=60),
    st.integers(1, 4),
)
def test_it_is_bounded_and_hopes_for_no_more_than_the_prompt(sent: list[tuple[str, int]], bound: int) -> None:
    memory = Affinity(bound)
    instance = make_scheduler([spec("a")]).instances[0]
    for i, (name, prompt) in enumerate(sent):
        asked = request(i, prompt=prompt, prefix_keys=((name, None), (name + "!", 100)))
        assert all(0 < tokens < prompt for tokens in memory.held(asked).values())
        memory.sent(asked, instance, 10.0)
        assert len(memory) <= bound
