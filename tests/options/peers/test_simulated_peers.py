"""Several schedulers over one simulated fleet: every request ends once, and telling each other helps."""

from __future__ import annotations

from statistics import fmean

import pytest
from options.peers.shared_simulation import SharedSimulation
from sim.test_fleet import fleet, load

from hetlb.balancer.core.types import Outcome
from hetlb.tools.sim.fleet_simulation import FleetSimulation


@pytest.mark.parametrize("delay_s", [0.001, 0.1])
@pytest.mark.parametrize("count", [2, 4])
def test_every_request_ends_once_and_the_same_seed_gives_the_same_result(count: int, delay_s: float) -> None:
    setup, engines = fleet(1.0, 2.0, 4.0, policy="hetlb")
    runs = [
        SharedSimulation(setup, engines, load(200, 20.0), model="m", count=count, delay_s=delay_s).run()
        for _ in range(2)
    ]
    assert set(runs[0].outcomes) == {Outcome.OK}
    assert len(runs[0].outcomes) == 200
    assert runs[0].summary() == runs[1].summary()


def test_one_scheduler_without_peers_is_the_simulation_as_it_was() -> None:
    setup, engines = fleet(1.0, 2.0, 4.0, policy="hetlb")
    plan = load(200, 20.0)
    alone = FleetSimulation(setup, engines, plan, model="m").run().summary()
    assert SharedSimulation(setup, engines, plan, model="m", count=1, delay_s=0.01).run().summary() == alone


def test_two_that_tell_each_other_are_nearer_to_one_than_two_that_do_not() -> None:
    setup, engines = fleet(1.0, 1.0, 3.0, 3.0, policy="hetlb")
    plans = [load(600, 30.0, seed) for seed in range(4)]

    def p99(**options: object) -> float:
        """Return the mean over the plans: the p99 of one of them rests on six requests."""
        runs = [SharedSimulation(setup, engines, plan, model="m", count=8, **options) for plan in plans]  # type: ignore[arg-type]
        return fmean(float(run.run().summary()["p99_ttft_ms"]) for run in runs)

    alone = [FleetSimulation(setup, engines, plan, model="m").run().summary() for plan in plans]
    one = fmean(float(summary["p99_ttft_ms"]) for summary in alone)
    told, blind = p99(delay_s=0.001), p99(delay_s=0.0, blind=True)
    assert one <= told * 1.05
    assert told < blind
