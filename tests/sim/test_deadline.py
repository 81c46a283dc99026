"""A deadline stops every simulation of a command as it runs; none of them takes it as an argument."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from hetlb.balancer.config.profile_file import load_profile
from hetlb.tools.plan.common.fleet_run import SimulatedServer, arrivals, run_fleet
from hetlb.tools.plan.throughput import Measured, SloLimits, rate_within, saturated_rate
from hetlb.tools.plan.trace_throughput import Throughputs
from hetlb.tools.sim.deadline import LOOK_EVENTS, StoppedError, ends_when, is_over
from hetlb.tools.sim.staged_engine import EngineStage
from hetlb.tools.sim.study import engine_of

PROFILE = load_profile(Path(__file__).parents[2] / "hetlb" / "tools" / "demo" / "fast.yaml")
SPEC = engine_of(PROFILE)
ROWS = [(700, 200)] * 400
MIX = [(1.0, ROWS)]
STAGES = [EngineStage(SPEC.latency, 0.5)] * 2


def fleet() -> object:
    outputs = [output for _, output in ROWS]
    return run_fleet([SimulatedServer("a", SPEC)], arrivals(ROWS, math.inf, random.Random(0)), outputs)


SIMULATIONS: dict[str, Callable[[], object]] = {
    "fleet": fleet,
    "saturated": lambda: saturated_rate(SPEC, MIX),
    "stages": lambda: saturated_rate(SPEC, MIX, STAGES),
    "slo": lambda: rate_within(SPEC, MIX, SloLimits(ttft_s=1.0)),
    "measured": lambda: Measured().of_mix(PROFILE, MIX, ()),
    "trace": lambda: Throughputs(ROWS, "simulate").of(PROFILE),
}


@pytest.mark.parametrize("name", SIMULATIONS)
def test_every_simulation_asks_for_the_deadline_as_it_runs(name: str) -> None:
    looks = 0

    def over() -> bool:
        nonlocal looks
        looks += 1
        return looks > 3

    with pytest.raises(StoppedError), ends_when(over):
        SIMULATIONS[name]()
    assert looks == 4, "it goes on behind its deadline"
    assert SIMULATIONS[name](), "a deadline holds behind its context"


def test_the_earliest_of_several_deadlines_holds() -> None:
    with ends_when(lambda: True):
        with ends_when(lambda: False):
            assert is_over()
        assert is_over()
    assert not is_over()
    assert LOOK_EVENTS <= 100, "a look takes longer than a second on a slow machine"
