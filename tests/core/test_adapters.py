"""LoRA adapters: what an engine is believed to have in its slots, and what that is worth to a decision."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers import make_scheduler, spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.adapters import AdapterLoadTime, AdapterSlots
from hetlb.balancer.core.facts import CapacityLearned, ModelsLearned
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Dispatch, Lease, Outcome, Request
from hetlb.balancer.engines.engine_metrics import parse
from hetlb.cli.explain import explained
from hetlb.tools.sim.integrity import check_scheduler

NAMES = tuple(f"lora-{n}" for n in range(8))


@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=80))
def test_slots_hold_what_runs_and_what_was_used_last(slots: int, steps: list[tuple[bool, int]]) -> None:
    belief = AdapterSlots(frozenset(NAMES), 1)
    belief.slots = slots
    running: Counter[str] = Counter()
    for begins, number in steps:
        name = NAMES[number]
        if begins:
            belief.begin(name)
            running[name] += 1
            assert belief.held[-1] == name
        elif running[name]:
            belief.end(name)
            running[name] -= 1
        live = {each for each, count in running.items() if count}
        assert belief.count() == {each: running[each] for each in live}
        assert live <= set(belief.held)
        assert len(belief.held) <= max(slots, len(live) + 1)
        for each in NAMES:
            cost = belief.cost_s(each, 1.0, 10.0)
            assert cost in (0.0, 1.0, 2.0, 12.0)
            assert (cost == 0.0) == (each in belief.held)


def test_what_is_no_adapter_costs_nothing() -> None:
    belief = AdapterSlots(frozenset({"a", "b"}), 1)
    belief.begin("m")
    belief.begin("a")
    assert belief.cost_s("m", 1.0, 10.0) == 0.0
    belief.told(["b", "m"])
    assert belief.held == ("a", "b")  # `a` runs, `b` was used last
    belief.end("m")
    belief.end("a")
    assert belief.held == ("b",)


def test_vllm_tells_its_slots() -> None:
    page = (
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="a",waiting_lora_adapters=""} 1.7e9\n'
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="b,c",waiting_lora_adapters="a"} 1.8e9\n'
    )
    sample = parse(page)
    assert (sample.capacity.max_loras, sample.adapters) == (2, ("b", "c"))
    assert parse("").adapters is None


def fleet(count: int, *, told: bool, slots: int = 2) -> Scheduler:
    scheduler = make_scheduler([spec(f"i{n}") for n in range(count)], "hetlb")
    for n in range(count):
        scheduler.on_instance(CapacityLearned(f"i{n}", Capacity(max_loras=slots, max_num_seqs=8)), 0.0)
        scheduler.on_instance(ModelsLearned(f"i{n}", ("m", *NAMES), NAMES if told else ()), 0.0)
    return scheduler


def lease_of(commands: object) -> Lease:
    assert isinstance(commands, list)
    [dispatch] = [each for each in commands if isinstance(each, Dispatch)]
    return dispatch.lease


def test_an_adapter_goes_where_it_is_and_explain_says_why() -> None:
    scheduler = fleet(2, told=True)
    first = lease_of(scheduler.on_arrival(Request(1, NAMES[0], 100), 0.0))
    again = lease_of(scheduler.on_arrival(Request(2, NAMES[0], 100), 0.0))
    other = lease_of(scheduler.on_arrival(Request(3, NAMES[1], 100), 0.0))
    assert again.instance == first.instance
    assert other.instance != first.instance
    candidates, _ = explained(scheduler, Request(9, NAMES[0], 100), 100.0, 0.0)
    terms = {each.instance: each.terms or {} for each in candidates}
    assert terms[first.instance]["adapter_s"] == 0.0
    assert terms[other.instance]["adapter_s"] > 0.0
    for each in candidates:
        weights = each.weights or {}
        total = sum(value * weights.get(name, 1.0) for name, value in (each.terms or {}).items())
        assert each.score == pytest.approx(total)
    # A request for the base model knows nothing of it.
    candidates, _ = explained(scheduler, Request(9, "m", 100), 100.0, 0.0)
    assert not any((each.terms or {})["adapter_s"] for each in candidates)
    check_scheduler(scheduler)


def test_balance_wins_where_the_server_with_the_adapter_is_loaded() -> None:
    scheduler = fleet(2, told=True)
    instances = [lease_of(scheduler.on_arrival(Request(n, NAMES[0], 100), 0.0)).instance for n in range(16)]
    assert set(instances) == {"i0", "i1"}


@given(
    st.floats(0.05, 5.0),
    st.floats(-0.5, 0.5),
    st.lists(st.tuples(st.booleans(), st.floats(0.0, 0.01)), min_size=80, max_size=120),
)
def test_the_time_to_load_is_learnt_from_first_tokens(
    load_s: float, bias_s: float, seen: list[tuple[bool, float]]
) -> None:
    """Whatever all first tokens are late by is no part of it, nor is one of them that is very late."""
    learnt = AdapterLoadTime(0.25)
    assert learnt.seconds == 0.25
    learnt.observe(60.0, True)
    for loaded, late_s in seen:
        learnt.observe(bias_s + late_s + (load_s if loaded else 0.0), loaded)
    with_load = sum(loaded for loaded, _ in seen)
    if with_load >= 5 and len(seen) - with_load >= 5:
        assert learnt.seconds == pytest.approx(load_s, abs=0.011)


def test_a_scheduler_weighs_the_time_that_it_has_seen() -> None:
    scheduler = fleet(2, told=True, slots=1)
    now, before = 0.0, {f"i{n}": () for n in range(2)}
    for number in range(40):
        now += 10.0
        # Three adapters take turns in two slots.
        lease = lease_of(scheduler.on_arrival(Request(number, NAMES[number % 3], 100, 1), now))
        loads = NAMES[number % 3] not in before[lease.instance]
        scheduler.on_first_token(lease, now + 0.1 + (2.0 if loads else 0.0))
        lease.output_tokens = 1
        scheduler.on_lease_ended(lease, Outcome.OK, now + 5.0)
        before = {each.name: each.adapters.held for each in scheduler.instances if each.adapters is not None}
    candidates, _ = explained(scheduler, Request(99, NAMES[7], 100), 100.0, now)
    weighed = [
        (each.terms or {})["adapter_s"] * (each.weights or {}).get("adapter_s", 1.0) for each in candidates
    ]
    # Two loads: its own, and a later one of the adapter that leaves and is to come back.
    assert all(each > 2.0 for each in weighed), weighed
    check_scheduler(scheduler)
