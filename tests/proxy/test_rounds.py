"""Rounds of the watch: who is looked at next, how soon, and how much at once."""

from __future__ import annotations

import itertools

from helpers import dispatched, make_scheduler, request, spec

from hetlb.balancer.core.facts import EngineSample, ModelsLearned, Probed, ProbeResult
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Outcome
from hetlb.balancer.engines.rounds import Looked, Rounds

MOST_S = 15.0


def fleet(count: int = 1) -> tuple[Scheduler, Rounds, dict[str, Looked]]:
    scheduler = make_scheduler([spec(f"i{n}") for n in range(count)])
    return scheduler, Rounds(1.0, scheduler), {each.name: Looked() for each in scheduler.instances}


def looks(rounds: Rounds, seen: Looked, instance: Instance, name: str, until: float) -> list[float]:
    """Times of the looks at an instance up to then, by a clock of the rounds' own scans."""
    now, found = 0.0, []
    while now < until:
        if rounds.due({name: seen}, (), now):
            seen.looked_at = now
            found.append(now)
            rounds.looked(seen, instance, now)
        now += rounds.scan_s
    return found


def test_an_idle_engine_is_looked_at_more_and_more_rarely() -> None:
    scheduler, rounds, engines = fleet(200)
    times = looks(rounds, engines["i0"], scheduler.instances[0], "i0", 200.0)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[0] <= 2.0
    assert max(gaps) <= MOST_S + rounds.scan_s
    assert min(gaps[4:]) >= 0.7 * MOST_S
    scheduler, rounds, engines = fleet()  # of a small fleet each is looked at more often
    times = looks(rounds, engines["i0"], scheduler.instances[0], "i0", 200.0)
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= 5.0


def test_an_engine_with_a_request_is_looked_at_in_every_round() -> None:
    scheduler, rounds, engines = fleet()
    seen, instance = engines["i0"], scheduler.instances[0]
    looks(rounds, seen, instance, "i0", 100.0)
    lease = dispatched(scheduler.on_arrival(request(1), 100.0))
    now = seen.looked_at + 1.0
    assert rounds.due(engines, (), now) == ["i0"]  # though it was to be left alone for longer
    seen.looked_at = now
    assert rounds.looked(seen, instance, now)
    assert rounds.due(engines, (), now + 0.5) == []
    assert rounds.due(engines, (), now + 1.0) == ["i0"]
    scheduler.on_lease_ended(lease, Outcome.OK, now)
    assert not rounds.looked(seen, instance, now)


def test_the_list_of_an_engine_without_its_own_model_is_read_at_each_look() -> None:
    """It was read once in 60 intervals, and an engine that had loaded its model got no requests meanwhile."""
    scheduler, rounds, engines = fleet()
    seen, instance = engines["i0"], scheduler.instances[0]
    looks(rounds, seen, instance, "i0", 20.0)
    seen.models_at = 19.0
    assert not rounds.models_due(seen, instance, 20.0)
    scheduler.on_instance(ModelsLearned("i0", ("other",), ()), 20.0)
    assert rounds.models_due(seen, instance, 20.0)
    assert rounds.looked(seen, instance, 20.0)  # it is looked at in the next round
    scheduler.on_instance(ModelsLearned("i0", ("m", "other"), ()), 20.0)
    assert not rounds.models_due(seen, instance, 20.0)


def test_an_engine_that_refuses_a_request_is_looked_at_soon() -> None:
    """Another server may have its address. A client's mistakes are refusals, too: the doubt ends."""
    scheduler, rounds, engines = fleet()
    seen, instance = engines["i0"], scheduler.instances[0]
    for status, doubted in ((404, True), (400, True), (503, False), (429, False)):
        looks(rounds, seen, instance, "i0", 100.0)
        seen.looked_at, seen.models_at, instance.refused_at = 100.0, 99.0, -9.0
        lease = dispatched(scheduler.on_arrival(request(status), 101.0))
        scheduler.on_refused(lease, status, None, 101.0)
        scheduler.on_lease_ended(lease, Outcome.UPSTREAM_REFUSED, 101.0)
        assert (rounds.due(engines, (), 101.0) == ["i0"]) is doubted
        assert rounds.models_due(seen, instance, 101.5) is doubted
        assert not rounds.models_due(seen, instance, 104.0)


def test_an_engine_in_doubt_or_with_requests_of_others_is_looked_at_in_every_round() -> None:
    scheduler, rounds, engines = fleet(2)
    down, shared = scheduler.instances
    scheduler.on_instance(Probed("i0", ProbeResult.REFUSED), 0.0)
    scheduler.on_scrape("i1", EngineSample(running=3, waiting=0), 0.0)
    for instance in (down, shared):
        seen = engines[instance.name]
        seen.looked_at = 0.0
        assert rounds.looked(seen, instance, 0.0)
    assert sorted(rounds.due(engines, (), 1.0)) == ["i0", "i1"]
    scheduler.on_scrape("i1", EngineSample(running=0, waiting=0), 1.0)
    assert not rounds.looked(engines["i1"], shared, 1.0)


def test_the_most_overdue_is_first_and_what_is_being_looked_at_is_left_out() -> None:
    scheduler, rounds, engines = fleet(4)
    for n, each in enumerate(scheduler.instances):
        scheduler.on_instance(Probed(each.name, ProbeResult.REFUSED), 0.0)
        engines[each.name].looked_at = -float(n)
        rounds.looked(engines[each.name], each, 0.0)
    assert rounds.due(engines, {"i2"}, 5.0) == ["i3", "i1", "i0"]


def test_looks_have_a_share_of_the_loop() -> None:
    """With costly pages fewer looks begin in a round; none is left out for ever."""
    scheduler, rounds, engines = fleet(500)
    for each in scheduler.instances:
        scheduler.on_instance(Probed(each.name, ProbeResult.REFUSED), 0.0)
    cheap = len(rounds.due(engines, (), 1.0))
    for _ in range(500):
        rounds.spent(0.02)
    now, seen, most = 1.0, set[str](), 0
    while len(seen) < 500:
        names = rounds.due(engines, (), now)
        most = max(most, len(names))
        for name in names:
            engines[name].looked_at = now
            rounds.looked(engines[name], scheduler.fleet.instances[name], now)
        seen.update(names)
        now += rounds.scan_s
        assert now < 500.0
    assert most < cheap / 4
    assert most * rounds.pause_s <= rounds.scan_s + rounds.pause_s + 1.0


def test_an_idle_engine_is_probed_in_every_second_look() -> None:
    scheduler, rounds, engines = fleet()
    seen, instance = engines["i0"], scheduler.instances[0]
    assert not any(rounds.light(seen, instance, 0.0) for _ in range(4))  # it is new
    rounds.looked(seen, instance, 0.0)
    assert [rounds.light(seen, instance, 0.0) for _ in range(4)].count(True) == 2
    scheduler.on_instance(Probed("i0", ProbeResult.REFUSED), 0.0)  # by a request, between two looks
    assert not any(rounds.light(seen, instance, 1.0) for _ in range(4))
