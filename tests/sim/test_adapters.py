"""LoRA adapters in the simulated fleet: slots are kept to, and affinity saves loads without starving any."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sim.test_fleet import fleet

from hetlb.balancer.core.adapters import AdapterLoadTime
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.types import Capacity, Outcome
from hetlb.cli.main import main
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.engine_sequence import EngineSequence, LoadedAdapters
from hetlb.tools.sim.fleet_result import FleetResult
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.workload.arrivals import PlannedRequest
from hetlb.tools.workload.rows import Row

NAMES = tuple(f"lora-{n}" for n in range(8))
LOAD_S = 0.5


def test_the_adapter_used_longest_ago_leaves_its_slot() -> None:
    slots = LoadedAdapters(2)
    assert slots.running is None
    slots.expect("a")
    assert [slots.begin(name, step) for step, name in enumerate(("a", "b"))] == [True, True]
    a, c, base = (EngineSequence(8, 4, adapter=name) for name in ("a", "c", ""))
    assert [slots.first_admitted(waiting) for waiting in ([c], [c, a], [c, base])] == [None, a, base]
    slots.end("a", 5)
    slots.end("b", 4)
    assert slots.begin("c", 6)  # in place of b
    assert not slots.begin("a", 6)
    assert (slots.loads, slots.running) == (3, ("c", "a"))


def simulate(stated_s: float, seed: int) -> tuple[FleetResult, FleetSimulation]:
    """Four equal engines of two slots; adapters are asked for by Zipf's law, and take `LOAD_S` to load."""
    setup, engines = fleet(1, 1, 1, 1, policy="hetlb", seed=seed)
    setup = replace(
        setup,
        params=PolicyParams(adapter_load_s=stated_s),
        specs=tuple(
            replace(spec, capacity=spec.capacity.updated(Capacity(max_loras=2))) for spec in setup.specs
        ),
    )
    for name, spec in engines.items():
        limits = EngineLimits.from_capacity(setup.specs[0].capacity)
        engines[name] = replace(spec, limits=limits, adapter_load_s=LOAD_S)
    rng = random.Random(seed)
    weights = [1.0 / (n + 1) for n in range(len(NAMES))]
    now, plan = 0.0, []
    for number in range(600):
        now += rng.expovariate(6.0)
        adapter = rng.choices(NAMES, weights)[0]
        plan.append(PlannedRequest(number, now, Row(None, 200, rng.choice([20, 60, 100]), adapter=adapter)))
    simulation = FleetSimulation(setup, engines, plan, model="m")
    return simulation.run(), simulation


@pytest.mark.parametrize("seed", range(3))
def test_affinity_beats_none_and_starves_no_adapter(seed: int) -> None:
    found: dict[float, dict[str, Any]] = {}
    for stated_s in (0.0, LOAD_S):
        result, _ = simulate(stated_s, seed)
        assert set(result.outcomes) == {Outcome.OK}
        found[stated_s] = result.summary()
    loads = {key: sum(each["adapter_loads"] for each in run["instances"]) for key, run in found.items()}
    assert loads[LOAD_S] < 0.7 * loads[0.0]
    for key in ("mean_e2el_ms", "p99_e2el_ms", "mean_ttft_ms"):
        assert found[LOAD_S][key] < found[0.0][key]


@pytest.mark.parametrize("stated_s", [0.02, 5.0])
def test_a_load_time_that_is_wrong_is_learnt(stated_s: float) -> None:
    _, simulation = simulate(stated_s, 0)
    learnt = simulation.scheduler.placement.adapter_load
    assert isinstance(learnt, AdapterLoadTime)
    assert learnt.seconds == pytest.approx(LOAD_S, rel=0.3)


def test_adapters_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.yaml").write_text(
        "version: 1\nname: p\nengine: {kv_cache_tokens: 40000, max_num_seqs: 32, max_loras: 2}\n"
        "prefill: {k1: 1.0e-4, k2: 1.0e-3, k3: 0.0, k4: 1.0e-2}\n"
        "decode: {k5: 5.0e-8, k6: 6.0e-5, k7: 0.0, k8: 1.0e-2}\n"
    )
    (tmp_path / "fleet.yaml").write_text(
        "version: 1\nmodels: [{name: m, instances: [{name: a, profile: p.yaml}]}]\n"
        "policy: {adapter_load_s: 3.0}\n"
    )
    rows = [f"{n},100,1,{adapter}" for n, adapter in enumerate(("x", "y", "", "x", "y", "z", "x"))]
    (tmp_path / "t.csv").write_text("arrival_s,input_tokens,output_tokens,adapter\n" + "\n".join(rows))
    files = ["--config", str(tmp_path / "fleet.yaml"), "--trace", str(tmp_path / "t.csv")]
    assert main(["simulate", *files, "--request-rate", "0.1", "--burstiness", "inf", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    # x and y once; then z in place of x, and x in place of y.
    assert [each["adapter_loads"] for each in run["instances"]] == [4]
    assert run["completed"] == 7
    assert run["p99_ttft_ms"] > 3000.0
