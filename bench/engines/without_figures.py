"""An Ollama-like server beside a vLLM, both without profiles, in virtual time.

`python bench/engines/without_figures.py [--streamed]`: one engine has few slots and shows no figures, the
other 32 and vLLM's page. Requests come at 65 % of both, then a burst of requests at once, then 65 % again. It
prints the tokens/s of the burst, over the tokens/s with stated slots, and the mean time of an answer
after the burst over that before it. Rates are shares of what both do at once with stated slots.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from typing import TypeAlias

from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Health, InstanceSpec
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.workload.arrivals import PlannedRequest
from hetlb.tools.workload.rows import Row

MODEL, OLLAMA = "m", "ollama"
SLOW = LatencyModel(k1=2e-4, k2=5e-4, k3=0.0, k4=2e-2, k5=6e-8, k6=2e-4, k7=0.0, k8=2e-2)
FAST = LatencyModel(k1=4e-5, k2=5e-4, k3=0.0, k4=1e-2, k5=3e-8, k6=3e-5, k7=0.0, k8=1e-2)
STEADY_S, LOAD = 200.0, 0.65
#: Arrival, time taken and tokens of each answer.
Answers: TypeAlias = list[tuple[float, float, int]]


class Mute(Scheduler):
    """A scheduler that is told no figures of the engine without any."""

    def on_scrape(self, name: str, sample: EngineSample, now: float) -> list[object]:  # type: ignore[override]
        if name == OLLAMA:
            sample = EngineSample()
        return super().on_scrape(name, sample, now)  # type: ignore[return-value]


def run(slots: int, stated: bool, plan: Sequence[PlannedRequest]) -> Answers:
    """Return arrival, time taken and tokens of each answer."""
    capacity = Capacity(max_num_seqs=slots) if stated else Capacity()
    specs = (InstanceSpec("vllm", MODEL), InstanceSpec(OLLAMA, MODEL, capacity=capacity))
    engines = {
        "vllm": EngineSpec(FAST, EngineLimits(200_000, max_num_seqs=32)),
        OLLAMA: EngineSpec(SLOW, EngineLimits(100_000, max_num_seqs=slots)),
    }
    limits = QueueLimits(max_requests=None, max_bytes=None, timeout_s=None)
    setup = SchedulerSetup(
        specs=specs, policy="hetlb", params=PolicyParams(), limits=limits, predictor="online", seed=0,
        lengths=None, initial_health=Health.UP,
    )  # fmt: skip
    simulation = FleetSimulation(setup, engines, plan, model=MODEL)
    simulation.scheduler.__class__ = Mute
    result = simulation.run()
    assert all(each.ok for each in result.records)
    return [(each.scheduled_s, each.e2el_s, each.output_tokens) for each in result.records]


def plan_of(rate: float, burst: int, streamed: bool, seed: int) -> tuple[list[PlannedRequest], float]:
    """Return the requests, and the time of the burst."""
    rng, now, plan = random.Random(seed), 0.0, list[PlannedRequest]()

    def add(at: float) -> None:
        row = Row(None, rng.randint(20, 400), rng.randint(40, 200), streamed=streamed)
        plan.append(PlannedRequest(len(plan), at, row))

    while rate and (now := now + rng.expovariate(rate)) < STEADY_S:
        add(now)
    burst_at = STEADY_S + 60.0 if rate else 0.0
    for _ in range(burst):
        add(burst_at)
    now = burst_at + 120.0
    while rate and (now := now + rng.expovariate(rate)) < burst_at + 120.0 + STEADY_S:
        add(now)
    return plan, burst_at


def speed_of(answers: Answers, at: float) -> float:
    """Return tokens/s of the requests that came together."""
    burst = [each for each in answers if each[0] == at]
    return sum(tokens for _, _, tokens in burst) / max(took_s for _, took_s, _ in burst)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streamed", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    for slots in (1, 4, 8):
        burst, found = 12 * (32 + slots), list[tuple[float, float, float]]()
        for seed in range(args.seeds):
            whole, _ = plan_of(0.0, burst, args.streamed, seed)
            rate = LOAD * speed_of(run(slots, True, whole), 0.0) / 120.0
            plan, at = plan_of(rate, burst, args.streamed, seed)
            stated, unstated = run(slots, True, plan), run(slots, False, plan)

            def mean_s(after: bool, answers: Answers, at: float = at) -> float:
                return statistics.mean(
                    took for came, took, _ in answers if (came > at) is after and came != at
                )

            found.append(
                (
                    speed_of(unstated, at) / speed_of(stated, at),
                    mean_s(True, unstated) / mean_s(False, unstated),
                    mean_s(True, unstated) / mean_s(True, stated),
                )
            )
        speed, after, other = (statistics.median(values) for values in zip(*found, strict=True))
        print(
            f"{slots} slots: burst {speed:.3f} of stated tokens/s; mean answer after it "
            f"{after:.3f} of before, {other:.3f} of stated slots",
            flush=True,
        )


if __name__ == "__main__":
    main()
