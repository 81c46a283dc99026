"""Shows that split requests run in two engines, that links are shared, and that nothing stays held."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.balancer.config.profile_file import load_profile
from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.length_samples import LengthDistribution
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Capacity, Connector, Health, InstanceSpec, KvLink, Outcome, Role
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.fleet_result import FleetResult
from hetlb.tools.sim.fleet_simulation import FleetSimulation, KvLinks, KvPath
from hetlb.tools.workload.arrivals import PlannedRequest
from hetlb.tools.workload.rows import Row

LATENCY = LatencyModel(k1=1e-4, k2=0.0, k3=0.0, k4=1e-2, k5=5e-8, k6=6e-5, k7=0.0, k8=1.3e-2)
LINK = KvLink(Connector.NIXL, bytes_per_token=1e5, bandwidth_bytes_per_s=1e9, latency_s=0.01)


def fleet(
    roles: Sequence[Role],
    plan: Sequence[PlannedRequest],
    *,
    kv_tokens: int = 50_000,
    link: KvLink = LINK,
    links: KvLinks | None = None,
) -> tuple[FleetSimulation, FleetResult]:
    limits = EngineLimits(kv_cache_tokens=kv_tokens, max_num_seqs=64)
    specs = tuple(
        InstanceSpec(
            name=f"{role}-{n}",
            model="m",
            latency=LATENCY,
            capacity=Capacity(kv_cache_tokens=kv_tokens, max_num_seqs=64, max_num_batched_tokens=2048),
            role=role,
            kv_transfer=link,
        )
        for n, role in enumerate(roles)
    )
    setup = SchedulerSetup(
        specs=specs,
        policy="hetlb",
        limits=QueueLimits(max_requests=None, max_bytes=None, timeout_s=None),
        predictor="empirical",
        lengths=LengthDistribution([100]),
        initial_health=Health.UP,
        seed=0,
    )
    engines = {spec.name: EngineSpec(LATENCY, limits) for spec in specs}
    simulation = FleetSimulation(setup, engines, plan, model="m", links=links)
    return simulation, simulation.run()


def requests(count: int, gap_s: float = 0.05, prompt: int = 1000, output: int = 50) -> list[PlannedRequest]:
    return [PlannedRequest(i, i * gap_s, Row(None, prompt, output)) for i in range(count)]


def test_one_request_takes_prefill_transfer_and_one_step_until_its_first_token() -> None:
    _, result = fleet([Role.PREFILL, Role.DECODE], requests(1))
    (record,) = result.records
    assert record.ok
    assert record.instance == "decode-1"
    prefill_s = LATENCY.prefill_s(1000)
    assert record.ttft_s == pytest.approx(prefill_s + 0.01 + 0.1 + LATENCY.step_s(1, 1000))
    assert record.output_tokens == 50
    assert (result.transfers, result.expired) == (1, 0)


@given(
    roles=st.lists(st.sampled_from(list(Role)), min_size=2, max_size=5),
    rows=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 300)), min_size=1, max_size=40),
    gap_s=st.sampled_from([0.0, 0.01, 0.2]),
    kv_tokens=st.sampled_from([4000, 50_000]),
    bandwidth=st.sampled_from([1e7, 1e9]),
)
@settings(max_examples=examples(60))
def test_every_request_ends_well_once_and_no_engine_keeps_a_block(
    roles: list[Role], rows: list[tuple[int, int]], gap_s: float, kv_tokens: int, bandwidth: float
) -> None:
    plan = [
        PlannedRequest(i, i * gap_s, Row(None, prompt, output)) for i, (prompt, output) in enumerate(rows)
    ]
    link = KvLink(Connector.NIXL, bytes_per_token=1e5, bandwidth_bytes_per_s=bandwidth, lease_s=60.0)
    simulation, result = fleet(roles, plan, kv_tokens=kv_tokens, link=link)
    assert all(outcome is Outcome.OK for outcome in result.outcomes)
    assert [record.output_tokens for record in result.records] == [output for _, output in rows]
    for engine in chain.from_iterable(simulation._engines.values()):
        engine.model.check_integrity()
        assert engine.model.kv.pool.used_blocks == 0
    assert simulation.scheduler.in_flight == 0


def test_a_link_carries_one_transfer_after_the_other() -> None:
    links = KvLinks(
        {"wire": 1e9, "side": 1e8},
        {("p", "d"): KvPath((("wire", 1e6),), 0.5), ("q", "d"): KvPath((("wire", 1e6), ("side", 1e5)), 0.0)},
    )
    assert links.send("p", "d", 1000, 0.0) == pytest.approx(1.5)
    assert links.send("q", "d", 1000, 0.5) == pytest.approx(2.0)
    assert links.send("q", "d", 1000, 9.0) == pytest.approx(10.0)


def test_a_slow_shared_link_delays_what_crosses_it() -> None:
    """Two prefill instances send over one wire: half as fast as over two."""
    plan = [PlannedRequest(i, 0.0, Row(None, 1000, 2)) for i in range(8)]
    names = ["prefill-0", "prefill-1", "decode-2"]
    ends = {}
    for label, wires in (("shared", ["w", "w"]), ("own", ["v", "w"])):
        links = KvLinks(
            {"v": 1e7, "w": 1e7},
            {(names[n], names[2]): KvPath(((wire, 1e5),)) for n, wire in enumerate(wires)},
        )
        _, result = fleet([Role.PREFILL, Role.PREFILL, Role.DECODE], plan, links=links)
        ends[label] = max(record.end_s for record in result.records if record.end_s is not None)
    assert ends["shared"] > 1.5 * ends["own"]


def test_what_is_fetched_after_its_lease_is_computed_again_and_still_answered() -> None:
    """The scheduler was told of a fast link; the real one takes longer than the lease."""
    links = KvLinks({"w": 1e6}, {("prefill-0", "decode-1"): KvPath((("w", 1e5),))})
    _, result = fleet([Role.PREFILL, Role.DECODE], requests(1), links=links)
    assert result.outcomes == [Outcome.OK]
    assert result.expired == 1


def test_without_roles_and_transfer_nothing_is_split() -> None:
    _, result = fleet([Role.DECODE], requests(5))
    assert result.transfers == 0
    assert all(record.ok for record in result.records)


def test_short_prompts_do_not_turn_decode_instances_into_both() -> None:
    """More prompts come than the prefill instance reads: the decode instance reads none of them."""
    _, result = fleet([Role.PREFILL, Role.DECODE], requests(300, gap_s=0.001, prompt=200, output=20))
    assert result.transfers == 300


PROFILES = Path(__file__).parents[3] / "bench" / "split"


def of_the_pair(roles: Sequence[Role] | None) -> tuple[float, int]:
    """Mean seconds of an answer, and split requests of 300, where one prefills and one decodes fast."""
    rng, now, plan = random.Random(0), 0.0, []
    for i in range(300):
        prompt, output = round(rng.lognormvariate(6.6, 0.8)), round(rng.lognormvariate(3.9, 0.6))
        plan.append(PlannedRequest(i, now, Row(None, min(8000, prompt), max(1, min(250, output)))))
        now += rng.expovariate(7.0)
    link = KvLink(Connector.NIXL, bytes_per_token=131_072, bandwidth_bytes_per_s=6e9)
    specs, engines = [], {}
    for n, name in enumerate(("reads", "decodes")):
        profile = load_profile(PROFILES / f"{name}.yaml")
        capacity, latency = profile.capacity, profile.latency
        engines[name] = EngineSpec(latency, EngineLimits.from_capacity(capacity))
        role, transfer = (Role.BOTH, None) if roles is None else (roles[n], link)
        specs.append(
            InstanceSpec(name, "m", latency=latency, capacity=capacity, role=role, kv_transfer=transfer)
        )
    setup = SchedulerSetup(
        tuple(specs),
        "hetlb",
        predictor="empirical",
        lengths=LengthDistribution([each.output_tokens for each in plan]),
        initial_health=Health.UP,
    )
    result = FleetSimulation(setup, engines, plan, model="m").run()
    stays = [record.end_s - record.scheduled_s for record in result.records if record.end_s is not None]
    assert len(stays) == 300
    return statistics.fmean(stays), result.transfers


def test_instances_that_may_do_both_come_to_do_what_suits_them() -> None:
    """An answer at the reader slows the prompts to come there: none should be the first."""
    whole_s, _ = of_the_pair(None)
    fixed_s, _ = of_the_pair((Role.PREFILL, Role.DECODE))
    mixed_s, split = of_the_pair((Role.BOTH, Role.BOTH))
    assert fixed_s < 0.6 * whole_s
    assert mixed_s < 0.75 * whole_s
    assert split > 100


def test_places_of_a_decode_instance_are_taken_while_prompts_are_on_their_way() -> None:
    """A prompt takes 1 s, an answer 1.7 s, and 16 answers fit: with places kept for prompts there are 9."""
    slow = KvLink(Connector.NIXL, bytes_per_token=1e5, bandwidth_bytes_per_s=1e11)
    roles = [Role.PREFILL] * 12 + [Role.DECODE]
    rows = requests(400, gap_s=0.01, prompt=10_000, output=80)
    _, result = fleet(roles, rows, kv_tokens=170_000, link=slow)
    decoding_s = lasted_s = 0.0
    for record in result.records:
        assert record.end_s is not None
        assert record.first_token_s is not None
        decoding_s += record.end_s - record.first_token_s
        lasted_s = max(lasted_s, record.end_s)
    assert decoding_s / lasted_s > 11.0
