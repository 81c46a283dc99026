"""Prompts that were read alone show the speed of reading, which may differ from the speed of answers."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from helpers import MODEL, dispatched, make_scheduler, request
from sim.test_fleet import FAST, fleet, load

from hetlb.balancer.core.facts import ModelsLearned
from hetlb.balancer.core.latency import DEFAULT_LATENCY
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.speed import SpeedTracker
from hetlb.balancer.core.types import Capacity, InstanceSpec, Outcome
from hetlb.tools.sim.fleet_simulation import FleetSimulation

SLOW = 20.0


def tracker(factor: float) -> SpeedTracker:
    speed = SpeedTracker(False, 0.0)
    assert speed.told(1.0, factor, 0.0)
    assert speed.factor == speed.reading == factor
    return speed


@pytest.mark.parametrize(
    ("readings", "reading"),
    [
        ([(SLOW, 1.0)], 2.0),  # the first one of a process may wait for it to compile
        ([(SLOW, 1.0), (15.0, 0.6)], 15.0),
        ([(SLOW, 1.0), (SLOW, 1.0), (2.5, 0.1)], SLOW),  # a short one shows iterations
        ([(SLOW, 1.0), (3.0, 1.0)], 2.0),  # they disagree: one waited for something else
        ([(0.5, 1.0), (0.8, 1.0)], 0.8),
        ([(3.0, 1.0), (3.0, 1.0)], 2.0),
        ([(SLOW, 1.0), (SLOW, 1.0), (2.0, 4.0)], 2.0),  # a longer one was read in its time
        ([(SLOW, 1.0), (SLOW, 1.0), (15.0, 4.0)], 15.0),
        ([(1e6, 1.0), (1e6, 1.0)], 64.0),
    ],
)
def test_long_prompts_that_agree_show_a_factor_of_reading(
    readings: list[tuple[float, float]], reading: float
) -> None:
    speed = tracker(2.0)
    for factor, expected_s in readings:
        speed.read(expected_s, factor * expected_s, 1.0)
    assert speed.reading == reading
    assert speed.factor == 2.0
    model = speed.apart(DEFAULT_LATENCY)
    assert model.k1 == pytest.approx(DEFAULT_LATENCY.k1 * reading / 2.0)
    assert model.k8 == DEFAULT_LATENCY.k8


def test_a_reading_without_another_is_believed_for_a_while() -> None:
    speed = tracker(2.0)
    speed.read(1.0, SLOW, 1.0)
    assert speed.read(1.0, SLOW, 1.0)
    speed.age(120.0)
    assert speed.reading == SLOW
    assert not speed.changed
    speed.age(121.5)
    assert speed.reading == 2.0
    assert speed.changed
    assert speed.read(1.0, SLOW, 130.0)
    speed.age(369.0)
    assert speed.reading == SLOW


def alone(
    scheduler: Scheduler,
    number: int,
    first_s: float,
    answer_s: float,
    prompt: int = 2000,
    keys: tuple[tuple[str, int], ...] = (),
) -> float:
    """Serve one request alone. Return the time until its first token as it was forecast."""
    at = 100.0 * number
    lease = dispatched(
        scheduler.on_arrival(
            request(number, prompt=prompt, max_tokens=1000, streamed=True, prefix_keys=keys), at
        )
    )
    scheduler.on_first_token(lease, at + first_s)
    lease.output_tokens = 1000
    scheduler.on_lease_ended(lease, Outcome.OK, at + first_s + answer_s)
    return lease.forecast_first_s


def test_only_a_server_of_which_nothing_was_told_learns_it() -> None:
    for latency, learns in ((None, True), (FAST, False)):
        spec = InstanceSpec("a", MODEL, latency=latency, capacity=Capacity(kv_cache_tokens=100_000))
        scheduler = make_scheduler([replace(spec, gpu_alone=latency is not None)], "hetlb")
        forecasts = [alone(scheduler, n, 4.0, 3.0) for n in range(4)]
        assert (forecasts[-1] == pytest.approx(4.0, rel=0.1)) is learns


def test_a_very_long_prompt_shows_nothing_of_ordinary_ones() -> None:
    """Each of its tokens attends to many. The factor of all answers is what its server has."""
    spec = InstanceSpec("a", MODEL, capacity=Capacity(kv_cache_tokens=300_000))
    scheduler = make_scheduler([spec], "hetlb")
    for number in range(4):
        alone(scheduler, number, 60.0, 20.0, prompt=100_000)
    [instance] = scheduler.instances
    assert instance.speed.reading == instance.speed.factor


def test_a_prompt_that_a_cache_is_believed_to_hold_shows_nothing() -> None:
    """Its server may have dropped it since, and reads all of it again."""
    spec = InstanceSpec("a", MODEL, capacity=Capacity(kv_cache_tokens=300_000))
    scheduler = make_scheduler([spec], "hetlb")
    [instance] = scheduler.instances
    for number in range(10):
        alone(scheduler, number, 0.4 if number == 0 else 20.0, 13.0, 8000, (("system", 3000),))
    assert instance.speed.reading == instance.speed.factor


def test_few_requests_go_where_prompts_are_read_slowly() -> None:
    setup, engines = fleet(1.0, 1.0, policy="hetlb", predictor="online")
    slow = engines["i1"]
    engines["i1"] = replace(
        slow, latency=slow.latency.with_factors(2.0 * SLOW, 2.0 * SLOW, 2.0, 0.0, 0.0, 0.0)
    )
    plan = [replace(each, row=replace(each.row, input_tokens=1500)) for each in load(300, 2.0)]
    found = {}
    for profiled in (True, False):
        specs = tuple(
            replace(each, latency=engines[each.name].latency if profiled else None) for each in setup.specs
        )
        result = FleetSimulation(replace(setup, specs=specs, lengths=None), engines, plan, model="m").run()
        assert set(result.outcomes) == {Outcome.OK}
        found[profiled] = statistics.fmean(r.first_token_s - r.scheduled_s for r in result.records)
    assert found[False] < 1.25 * found[True], found


def test_a_server_that_loads_adapters_shows_nothing() -> None:
    """The time to load one is no time to read."""
    scheduler = make_scheduler(
        [InstanceSpec("a", MODEL, capacity=Capacity(kv_cache_tokens=300_000))], "hetlb"
    )
    scheduler.on_instance(ModelsLearned("a", (MODEL, "lora"), ("lora",)), 0.0)
    [instance] = scheduler.instances
    for number in range(10):
        alone(scheduler, number, 20.0, 13.0, 8000)
    assert instance.speed.reading == instance.speed.factor
