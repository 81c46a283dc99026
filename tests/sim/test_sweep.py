"""A sweep gives what its runs give one by one, on however many processes, and leaves no process behind."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from itertools import pairwise
from multiprocessing.connection import wait
from typing import Any

import pytest

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.length_samples import LengthDistribution
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.predictor import make_predictor
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Capacity, Health, InstanceSpec
from hetlb.errors import HetlbError
from hetlb.tools.sim.alone import run_alone
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.engine_model import EngineModel
from hetlb.tools.sim.engine_sequence import EngineSequence
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.fleet_result import FleetSeries
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.sim.iteration_times import IterationRule
from hetlb.tools.sim.simulation_sweep import TRACE, Study, StudyCell, fixed_split, run_sweep
from hetlb.tools.workload.arrivals import Load
from hetlb.tools.workload.rows import Row

FAST = LatencyModel(k1=1e-4, k2=1e-3, k3=0.0, k4=1e-2, k5=5e-8, k6=6e-5, k7=0.0, k8=1.3e-2)
CELLS = [
    StudyCell(policy, rate, seed)
    for rate in (20.0, math.inf, TRACE)
    for policy in ("random", "paper", "hetlb")
    for seed in (0, 5)
]


def study(*speeds: float, count: int = 60, predictor: str = "normal") -> Study:
    rng = random.Random(1)
    rows = [Row(0.1 * i, rng.randrange(10, 900), rng.choice((5, 60, 300))) for i in range(count)]
    capacity = Capacity(kv_cache_tokens=30_000, kv_tokens_per_request=30_000, max_num_seqs=64)
    specs = tuple(
        InstanceSpec(f"i{i}", "m", latency=FAST.scaled(speed), capacity=capacity)
        for i, speed in enumerate(speeds)
    )
    limits = EngineLimits.from_capacity(capacity)
    setup = SchedulerSetup(
        specs=specs,
        policy="rr",
        params=PolicyParams(),
        limits=QueueLimits(max_requests=None, max_bytes=None, timeout_s=None),
        predictor=predictor,
        seed=0,
        lengths=LengthDistribution(row.output_tokens for row in rows),
        initial_health=Health.UP,
    )
    engines = {spec.name: EngineSpec(spec.latency or FAST, limits) for spec in specs}
    return Study(setup, engines, "m", IterationRule.TOKEN, Load(rows))


def test_processes_change_nothing() -> None:
    here, there = (run_sweep(study(1.0, 3.0), CELLS, jobs=jobs) for jobs in (1, 2))
    assert here == there
    assert [each.cell for each in here] == CELLS
    assert all(each.summary["completed"] == 60 for each in here)
    assert [each.split is not None for each in here] == [each.cell.rate == math.inf for each in here]


def test_a_cell_in_company_is_what_it_is_alone() -> None:
    together = run_sweep(study(1.0, 3.0), CELLS)
    for index in (1, 8, 16):
        assert run_sweep(study(1.0, 3.0), [CELLS[index]]) == [together[index]]


def test_yardsticks_equal_the_references() -> None:
    whole = study(1.0, 3.0, 1.0)
    ran = run_sweep(whole, [StudyCell("paper", math.inf, 7)])[0]
    plan = whole.load.plan(math.inf, 7)
    alone = {name: run_alone(spec, plan, whole.rule).tokens_per_s for name, spec in whole.engines.items()}
    assert ran.bound == {"total_token_throughput": sum(alone.values())}
    predictor = make_predictor("normal", rng=random.Random(7), lengths=whole.setup.lengths)
    split = fixed_split(whole.engines, plan, whole.rule, alone, predictor, model="m")
    assert ran.split == {"total_token_throughput": split}


def test_progress_ends_with_everything_done() -> None:
    for jobs in (1, 2):
        seen: list[tuple[int, int]] = []
        run_sweep(
            study(1.0, 3.0),
            CELLS[:3],
            jobs=jobs,
            on_progress=lambda done, total, to=seen: to.append((done, total)),
        )
        assert seen == [(done, 2 + 3) for done in range(1, 6)]


def test_an_interrupted_sweep_leaves_no_process() -> None:
    started: list[int] = []

    def interrupt(done: int, total: int) -> None:
        started.extend(child.sentinel for child in multiprocessing.active_children())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(study(1.0, 3.0, count=500), CELLS, jobs=2, on_progress=interrupt)
    assert started
    assert sorted(map(str, wait(started, timeout=0))) == sorted(map(str, started)), "expected all to be gone"


def test_a_process_that_is_killed_is_one_line() -> None:
    def kill(done: int, total: int) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(HetlbError, match=r"a process of the simulation was killed.*--jobs"):
        run_sweep(study(1.0, 3.0, count=500), CELLS * 3, jobs=2, on_progress=kill)


ENDLESS = """
import math, sys
sys.path.insert(0, {folder!r})
from test_sweep import CELLS, study
from hetlb.tools.sim.simulation_sweep import run_sweep
def say(done, total):
    if done:
        print("running", flush=True)
if __name__ == "__main__":
    run_sweep(study(1.0, 3.0, count=20_000), CELLS, jobs=2, on_progress=say)
"""


def test_no_process_outlives_the_one_that_started_it(tmp_path: Any) -> None:
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS.format(folder=os.path.dirname(__file__)))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.kill()
    # The workers hold the other end too: it ends when the last of them is gone.
    process.stdout.read()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL


def test_watching_changes_nothing_and_sees_the_fleet() -> None:
    whole = study(1.0, 3.0, count=300)
    cells = [StudyCell("hetlb", 20.0, 0), StudyCell("hetlb", 20.0, 0, watched=True)]
    plain, watched = run_sweep(whole, cells)
    assert plain.summary == watched.summary
    assert plain.watched is None
    seen = watched.watched
    assert seen is not None
    assert len(seen.latencies_s["ttft"]) == len(seen.latencies_s["e2el"]) == 300
    assert 0 < len(seen.latencies_s["tpot"]) <= 300
    series = seen.series
    times_s = [moment.at_s for moment in series.moments]
    gaps = [after - before for before, after in pairwise(times_s)]
    assert gaps == pytest.approx([series.interval_s] * len(gaps))
    assert 200 < len(times_s) <= 801
    assert times_s[-1] <= plain.summary["duration"] < times_s[-1] + series.interval_s
    for entry in plain.summary["instances"]:
        usage = [moment.kv_usage[entry["name"]] for moment in series.moments]
        assert entry["kv_peak"] * 0.8 < max(usage) <= entry["kv_peak"]


def test_waiting_requests_are_seen_at_the_proxy_and_in_the_engines() -> None:
    early, late = run_sweep(
        study(1.0, 3.0, count=600),
        [StudyCell(policy, math.inf, 0, watched=True) for policy in ("rr", "hetlb")],
    )
    assert early.watched is not None
    assert late.watched is not None
    assert max(moment.held for moment in early.watched.series.moments) == 0
    assert max(moment.waiting["i1"] for moment in early.watched.series.moments) > 100
    assert max(moment.held for moment in late.watched.series.moments) > 100


def test_inside_a_stretch_the_blocks_equal_stepping() -> None:
    limits = EngineLimits(kv_cache_tokens=4000, block_size=16, max_num_seqs=8)
    fast, slow = EngineModel(FAST, limits), EngineModel(FAST, limits)
    for engine in (fast, slow):
        for prompt, output in ((100, 300), (37, 900), (500, 40)):
            engine.submit(EngineSequence(prompt, output))
    longest = 0
    while (stretch := fast.begin_run()) is not None:
        for step in range(stretch.steps):
            slow.begin_iteration()
            middle_s = (stretch.elapsed_s(step) + stretch.elapsed_s(step + 1)) / 2
            assert fast.kv_used_blocks_at(middle_s) == slow.kv.pool.used_blocks
            slow.end_iteration()
        longest = max(longest, stretch.steps)
        fast.end_iteration()
        assert fast.kv_used_blocks_at(0.0) == slow.kv.pool.used_blocks
    assert longest > 100


def test_a_long_run_has_no_more_moments_than_a_short_one() -> None:
    series = FleetSeries()
    whole = study(1.0, 3.0, count=2000)
    FleetSimulation(whole.setup, whole.engines, whole.load.plan(1.0, 0), model="m", series=series).run()
    assert series.moments[-1].at_s > 1900
    assert 400 <= len(series.moments) <= 801


def test_the_steady_bound_does_not_depend_on_the_number_of_requests() -> None:
    short, long = (
        run_sweep(study(1.0, 3.0, count=count), [StudyCell("rr", 20.0, 0)])[0] for count in (400, 1600)
    )
    steady = [each.steady_bound["total_token_throughput"] for each in (short, long)]
    whole = [each.bound["total_token_throughput"] for each in (short, long)]
    assert steady[0] == pytest.approx(steady[1], rel=0.03)
    assert abs(whole[0] / whole[1] - 1) > abs(steady[0] / steady[1] - 1)
    assert steady[0] > whole[0]
