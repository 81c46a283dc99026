"""Shows that plans of disaggregated serving keep every limit, and that the search finds the best one."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.clusters import Steps
from plan.every_split import Exhaustive

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.types import Role
from hetlb.cli import split as split_command
from hetlb.cli.main import main
from hetlb.errors import ConfigError, PlanError
from hetlb.tools.plan.check import check_split
from hetlb.tools.plan.cluster import load_split
from hetlb.tools.plan.common.plan_tables import Machine, Model, RooflineTable
from hetlb.tools.plan.common.servers import write_servers
from hetlb.tools.plan.disaggregation import split_simulation
from hetlb.tools.plan.disaggregation.cost import GroupTable, PaperCost, ProfileCost, capacity_of
from hetlb.tools.plan.disaggregation.network import LINK_SHARE, Network
from hetlb.tools.plan.disaggregation.rates import both_rate, decode_rate, prefill_rate
from hetlb.tools.plan.disaggregation.split_cluster import (
    GroupStage,
    Links,
    RequestLengths,
    ServerGroup,
    Slo,
    SplitCluster,
    SplitPlan,
)
from hetlb.tools.plan.disaggregation.split_search import search
from hetlb.tools.plan.disaggregation.split_servers import servers_of
from hetlb.tools.plan.disaggregation.split_simulation import (
    Simulated,
    make_servers,
    simplest,
    simulate_plan,
)
from hetlb.tools.plan.highs import Interrupt, SolveLimits
from hetlb.tools.plan.throughput import saturated_rate
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec

GIB = 1 << 30
#: FLOP/s, memory bytes/s, memory, bytes/s between GPUs of a machine.
GPUS = {
    "H100": (989e12, 3.35e12, 80 * GIB, 300e9),
    "A100": (312e12, 2.04e12, 80 * GIB, 300e9),
    "L40": (181e12, 0.864e12, 48 * GIB, 25e9),
}
LLAMA_8B = Model(
    name="llama-3-8b", parameters=8.03e9, bytes_per_parameter=2.0,
    kv_bytes_per_token=131072, layers=32, hidden_size=4096,
)  # fmt: skip
OPT_30B = Model(
    name="opt-30b", parameters=30e9, bytes_per_parameter=2.0,
    kv_bytes_per_token=2 * 48 * 7168 * 2, layers=48, hidden_size=7168,
)  # fmt: skip


def machine(name: str, gpu: str, gpus: int) -> Machine:
    flops, bandwidth, memory, _ = GPUS[gpu]
    table = RooflineTable(flops=flops, bandwidth_bytes_per_s=bandwidth)
    return Machine(name, gpu, gpus, memory, roofline=table)


def cluster(
    machines: list[Machine],
    model: Model = LLAMA_8B,
    rows: tuple[tuple[int, int], ...] = ((1000, 200),),
    between: float = 5e9,
) -> SplitCluster:
    rates = tuple(
        tuple(GPUS[a.gpu][3] if i == j else between for j in range(len(machines)))
        for i, a in enumerate(machines)
    )
    return SplitCluster(Path("c.yaml"), model, tuple(machines), Links(rates, 2e-4), RequestLengths(rows))


def appendix_e() -> SplitCluster:
    return cluster([machine("h", "H100", 4), machine("a", "A100", 4)], OPT_30B, ((268, 279),))


clusters = st.builds(
    lambda kinds, model, rows, between: cluster(
        [machine(f"m{n}", gpu, gpus) for n, (gpu, gpus) in enumerate(kinds)], model, (rows,), between
    ),
    st.lists(st.tuples(st.sampled_from(list(GPUS)), st.integers(1, 3)), min_size=1, max_size=3).filter(
        lambda kinds: sum(n for _, n in kinds) <= 6
    ),
    st.sampled_from([LLAMA_8B, OPT_30B]),
    st.sampled_from([(1000, 200), (300, 300), (2000, 20)]),
    st.sampled_from([1e8, 5e9, 1e11]),
)


# --- the cost models ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(1237, 221), (268, 279), (1673, 60)])
@pytest.mark.parametrize("limits", [(500_000, 256, 2048), (30_000, 256, 2048), (500_000, 256, 16384)])
def test_rates_equal_the_engine_model(rows: tuple[int, int], limits: tuple[int, int, int]) -> None:
    """A group that does both, and prefill alone: the arithmetic against a saturated engine."""
    latency = LatencyModel(k1=1e-4, k2=0.0, k3=0.0, k4=2e-2, k5=1e-7, k6=1e-5, k7=0.0, k8=2e-2)
    engine = EngineLimits(limits[0], max_num_seqs=limits[1], max_num_batched_tokens=limits[2])
    workload = RequestLengths((rows,))
    spec = EngineSpec(latency, engine)
    served = saturated_rate(spec, [(1.0, [rows])])
    assert both_rate(latency, engine, workload, Slo()) == pytest.approx(served, rel=0.12)
    prompts = saturated_rate(spec, [(1.0, [(rows[0], 1)])])
    assert prefill_rate(latency, engine, workload, Slo()) == pytest.approx(prompts, rel=0.08)


def test_an_slo_lowers_rates_down_to_nothing() -> None:
    latency = LatencyModel(k1=1e-4, k2=0.0, k3=0.0, k4=2e-2, k5=1e-7, k6=1e-5, k7=0.0, k8=2e-2)
    limits, workload = EngineLimits(200_000), RequestLengths(((1000, 200),))
    for rate in (prefill_rate, decode_rate, both_rate):
        values = [rate(latency, limits, workload, Slo(s, s)) for s in (math.inf, 1.0, 0.15, 0.03, 0.001)]
        assert values == sorted(values, reverse=True)
        assert values[-1] == 0.0 < values[0]


def test_memory_comes_from_the_tightest_stage() -> None:
    of = cluster([machine("h", "H100", 2), machine("l", "L40", 2)], OPT_30B)
    stages = (GroupStage(0, 2, 36), GroupStage(1, 2, 12))
    usable = of.machines[0].usable_bytes, of.machines[1].usable_bytes
    by_stage = [
        (2 * room - 60e9 * layers / 48) / (of.model.kv_bytes_per_token * layers / 48)
        for room, layers in zip(usable, (36, 12), strict=True)
    ]
    assert capacity_of(of, stages) == math.floor(min(by_stage))


def test_groups_of_alike_machines_are_alike() -> None:
    of = cluster([machine("a", "A100", 2), machine("b", "A100", 2)])
    table = GroupTable(of, ProfileCost(of))
    one, other = table.group(((0, 2),), Role.DECODE), table.group(((1, 2),), Role.DECODE)
    assert one is not None
    assert other is not None
    assert (one.capacity, one.kv_cache_tokens) == (other.capacity, other.kv_cache_tokens)
    assert {stage.machine for stage in other.stages} == {1}


# --- flows ----------------------------------------------------------------------------------------------


def group(role: Role, machine: int, capacity: float, gpus: int = 1, layers: int = 32) -> ServerGroup:
    return ServerGroup(role, (GroupStage(machine, gpus, layers),), capacity, 100_000)


def without_links(groups: Sequence[ServerGroup]) -> float:
    """Requests/s if links were no limit."""
    rates = {role: math.fsum(g.capacity for g in groups if g.role is role) for role in Role}
    return min(rates[Role.PREFILL], rates[Role.DECODE]) + rates[Role.BOTH]


def test_a_link_that_all_pairs_share_carries_its_rate_once() -> None:
    """Two pairs over one link: a maximum flow with an arc per pair would count the link twice."""
    of = cluster([machine("p", "H100", 2), machine("d", "A100", 2)], between=131072 * 1000 * 3.0)
    groups = [group(Role.PREFILL, 0, 5.0), group(Role.PREFILL, 0, 5.0), group(Role.DECODE, 1, 4.0)]
    groups.append(group(Role.DECODE, 1, 4.0))
    plan = Network(of).solve(groups)
    assert plan.throughput == pytest.approx(3.0 * LINK_SHARE)


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Role)), st.integers(0, 2), st.floats(0.1, 10.0)),
        min_size=1,
        max_size=7,
    ),
    st.sampled_from([1e8, 1e9, 1e12]),
)
def test_flows_keep_every_limit(parts: list[tuple[Role, int, float]], between: float) -> None:
    of = cluster([machine(name, "A100", 8) for name in "abc"], between=between)
    groups = [group(role, m, capacity) for role, m, capacity in parts]
    capacities = {id(g.stages): g.capacity for g in groups}
    plan = Network(of).solve(groups)
    check_split(of, plan, lambda stages, role, tokens: capacities[id(stages)])
    assert plan.throughput <= without_links(groups) * (1 + 1e-9)


@pytest.mark.parametrize(
    "fault", ["GPUs", "layers", "capacity", "KV", "flow", "link", "role", "pipeline", "longest"]
)
def test_a_plan_that_breaks_a_limit_is_refused(fault: str) -> None:
    of = cluster([machine("h", "H100", 2), machine("a", "A100", 2)], between=1e9)
    cost = ProfileCost(of)
    table = GroupTable(of, cost)
    prefill, decode = table.group(((0, 1),), Role.PREFILL), table.group(((1, 1),), Role.DECODE)
    assert prefill is not None
    assert decode is not None
    plan = Network(of).solve([prefill, decode])
    check_split(of, plan, cost.capacity)
    if fault == "GPUs":
        plan = replace(plan, groups=(prefill, decode, decode, decode))
    elif fault == "layers":
        plan = replace(plan, groups=(replace(prefill, stages=(GroupStage(0, 1, 31),)), decode))
    elif fault == "capacity":
        plan = replace(plan, groups=(replace(prefill, capacity=prefill.capacity * 1.01), decode))
    elif fault == "KV":
        plan = replace(plan, groups=(prefill, replace(decode, kv_cache_tokens=10**7)))
    elif fault == "flow":
        plan = replace(plan, flows={(0, 1): decode.capacity * 10})
    elif fault == "link":
        slow = replace(of, links=Links(((3e11, 1e6), (1e6, 3e11)), 0.0))
        with pytest.raises(PlanError):
            check_split(slow, plan, cost.capacity)
        return
    elif fault == "role":
        plan = replace(plan, flows={(1, 0): 0.1})
    elif fault == "pipeline":
        stages = (GroupStage(0, 1, 16), GroupStage(0, 1, 16))
        tokens = capacity_of(of, stages)
        capacity = cost.capacity(stages, Role.PREFILL, tokens)
        plan = replace(plan, groups=(ServerGroup(Role.PREFILL, stages, capacity, tokens), decode))
    else:
        of = replace(of, workload=RequestLengths(((1000, 200), (10**7, 1))))
    with pytest.raises(PlanError):
        check_split(of, plan, cost.capacity)


# --- the search -----------------------------------------------------------------------------------------


@given(of=clusters)
@settings(max_examples=15)
def test_the_search_finds_what_exhaustive_search_finds(of: SplitCluster) -> None:
    found_is_best(of, PaperCost(of))


@given(of=clusters)
@settings(max_examples=examples(3))
def test_the_search_finds_what_exhaustive_search_finds_by_profiles(of: SplitCluster) -> None:
    """Fewer clusters: simulating the bubbles of their pipelines takes nearly all the time."""
    found_is_best(of, ProfileCost(of))


def found_is_best(of: SplitCluster, cost: ProfileCost | PaperCost) -> None:
    table = GroupTable(of, cost)
    every = Exhaustive(table)
    best = every.run(SolveLimits())
    assert every.complete
    found = search(table, SolveLimits())
    if best is None:
        assert found.plans == []
        return
    assert found.bound < math.inf
    check_split(of, best, cost.capacity)
    for plan in found.plans:
        check_split(of, plan, cost.capacity)
    assert found.plans[0].throughput == pytest.approx(best.throughput, rel=1e-6)
    assert found.bound >= best.throughput * (1 - 1e-6)


def test_a_group_that_takes_part_in_no_transfer_takes_no_gpus_of_a_plan_that_splits() -> None:
    """A pipeline for both phases over two machines, beside a prefill and a decode group: NIXL takes none."""
    machines = [machine("a", "A100", 5), machine("b", "L40", 1), machine("c", "L40", 2)]
    of = cluster(machines, OPT_30B, ((268, 279),), 1e8)
    found_is_best(of, ProfileCost(of))


def test_exhaustive_search_is_exhaustive() -> None:
    """Against plain enumeration of all ways to give one of four GPUs to one of four groups with a role."""
    of = cluster([machine("h", "H100", 2), machine("l", "L40", 2)])
    table, network = GroupTable(of, ProfileCost(of)), Network(of)
    most = 0.0
    for labels in itertools.product(range(4), repeat=4):
        parts: dict[int, dict[int, int]] = {}
        for gpu, label in enumerate(labels):
            held = parts.setdefault(label, {})
            held[gpu // 2] = held.get(gpu // 2, 0) + 1
        shapes = [tuple(sorted(held.items())) for held in parts.values()]
        for roles in itertools.product(Role, repeat=len(shapes)):
            groups = [g for shape, role in zip(shapes, roles, strict=True) if (g := table.group(shape, role))]
            if without_links(groups) > most:
                most = max(most, network.solve(groups).throughput)
    best = Exhaustive(table).run(SolveLimits())
    assert best is not None
    assert best.throughput == pytest.approx(most)


def test_appendix_e_with_heavy_decoding_gives_three_gpus_of_each_kind_to_decode() -> None:
    """HexGen-2, appendix E.3: one H100 and one A100 prefill, three and three decode (its roles alone)."""
    of = appendix_e()
    table = GroupTable(of, PaperCost(of))
    best = Exhaustive(table, (Role.PREFILL, Role.DECODE)).run(SolveLimits())
    assert best is not None
    gpus = dict.fromkeys(Role, 0)
    for each in best.groups:
        gpus[each.role] += sum(n for _, n in each.composition)
    assert gpus[Role.DECODE] >= 6
    assert 1 <= gpus[Role.PREFILL] <= 2


@pytest.mark.parametrize("roles", [(Role.PREFILL, Role.DECODE), (Role.BOTH,)])
def test_plans_use_something_and_are_the_same_each_time(roles: tuple[Role, ...]) -> None:
    """The program that they come from has the empty answer too."""
    of = cluster([machine("a", "A100", 12)], OPT_30B, ((1673, 60),))
    once, again = (search(GroupTable(of, ProfileCost(of)), SolveLimits(), roles=roles) for _ in range(2))
    assert once.plans
    assert all(plan.throughput > 0.0 and {g.role for g in plan.groups} <= {*roles} for plan in once.plans)
    assert once.plans == again.plans


def test_an_interrupt_ends_the_search_with_a_plan_though_no_program_is_solved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hetlb.tools.plan.highs._LEAST_SOLVE_S", 0.0)
    of = cluster([machine("h", "H100", 8), machine("a", "A100", 8)])
    interrupt = Interrupt()
    interrupt.requested = True
    found = search(GroupTable(of, ProfileCost(of)), SolveLimits(interrupt=interrupt))
    assert found.plans
    assert all(plan.throughput > 0 for plan in found.plans)
    assert found.colocated == found.plans[0]


@pytest.mark.parametrize("looks", [100.0, 400.0])
def test_a_search_ends_with_its_time(looks: float) -> None:
    of = cluster([machine("h", "H100", 6), machine("a", "A100", 6)], OPT_30B)
    limits = SolveLimits(deadline=looks, clock=Steps())
    assert search(GroupTable(of, PaperCost(of)), limits).plans
    assert limits.clock() <= 1.1 * looks


def test_a_plan_serves_in_simulation_what_it_says() -> None:
    of = cluster([machine("h", "H100", 1), machine("a", "A100", 1)], rows=((1000, 100),))
    cost = ProfileCost(of)
    best = Exhaustive(GroupTable(of, cost), (Role.PREFILL, Role.DECODE)).run(SolveLimits())
    assert best is not None
    simulated = simulate_plan(of, best, cost, count=1500)
    assert simulated.request_throughput >= 0.9 * best.throughput
    assert simulated.transfers > 0.9 * 1500


# --- the file and the command ---------------------------------------------------------------------------

FILE = """
version: 1
model: {name: llama-3-8b, parameters: 8.03e9, kv_bytes_per_token: 131072, layers: 32, hidden_size: 4096}
workload: {input_tokens: 1000, output_tokens: 200}
machines:
  - name: h
    gpu: H100
    gpus: 2
    memory_bytes: 85899345920
    roofline: {flops: 989e12, bandwidth_bytes_per_s: 3.35e12}
  - name: l
    gpu: L40
    gpus: 2
    memory_bytes: 51539607552
    roofline: {flops: 181e12, bandwidth_bytes_per_s: 0.864e12}
links: {inside: {H100: 300e9, default: 25e9}, between: 5e9}
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("between: 5e9", "betwen: 5e9", "betwen"),
        ("layers: 32, ", "", "model.layers: expected a value or model.config, got neither"),
        (
            "workload: {input_tokens: 1000, output_tokens: 200}",
            "",
            "workload: expected a workload, or --trace",
        ),
        ("parameters: 8.03e9, ", "", "model.parameters: expected a value or model.config, got neither"),
        ("gpus: 2", "gpus: 2\n    colour: red", "machines[0].colour: unknown key, expected"),
        ("name: l\n", "name: h\n", "machines: expected every name once, got 'h' again"),
        ("H100: 300e9", "B200: 300e9", "links.inside: expected GPUs out of H100, L40 or default, got 'B200'"),
        (
            "    roofline: {flops: 989e12, bandwidth_bytes_per_s: 3.35e12}\n",
            "",
            "machines[0].profiles: expected",
        ),
        (
            "inside: {H100: 300e9, default: 25e9}, between: 5e9",
            "matrix: [[1e9]]",
            "links.matrix: expected 2 rows",
        ),
        ("between: 5e9", "between: -1", "between"),
        ("gpus: 2", "gpus: 0", "gpus"),
    ],
)
def test_a_wrong_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(FILE.replace(old, new, 1))
    assert main(["split", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(path) in error
    assert said in error


def test_a_matrix_of_gpus_is_one_of_machines_or_an_error(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    inside, across = "3e11", "5e9"
    rows = [[inside if (i < 2) == (j < 2) else across for j in range(4)] for i in range(4)]
    text = FILE.replace("inside: {H100: 300e9, default: 25e9}, between: 5e9", "matrix: [[1]]")
    path.write_text(text.replace("[[1]]", str(rows).replace("'", "")))
    assert load_split(path).links.bytes_per_s == ((3e11, 5e9), (5e9, 3e11))
    rows[0][3] = "1e9"
    path.write_text(text.replace("[[1]]", str(rows).replace("'", "")))
    with pytest.raises(ConfigError, match=r"matrix\[0\]\[3\]: expected 5e\+09"):
        load_split(path)


def test_the_command_prints_a_checked_plan_and_writes_a_fleet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, fleet = tmp_path / "c.yaml", tmp_path / "fleet.yaml"
    path.write_text(FILE)
    arguments = ["split", "--config", str(path), "--exhaustive", "--simulate", "0", "--json"]
    assert main([*arguments, "--write-fleet", str(fleet)]) == 0
    document = json.loads(capsys.readouterr().out)
    for key in ("throughput_req_s", "groups", "kv_flows", "colocated", "simulated", "solve_s", "commands"):
        assert key in document
    assert document["throughput_req_s"] >= document["colocated"]["throughput_req_s"]
    assert len(document["commands"]) == len(document["groups"])
    shares = [flow["share"] for flow in document["kv_flows"]]
    assert not shares or sum(shares) == pytest.approx(1.0)
    loaded = load_fleet(fleet)
    assert [i["name"] for i in yaml.safe_load(fleet.read_text())["models"][0]["instances"]] == [
        g["name"] for g in document["groups"]
    ]
    assert loaded is not None


def test_no_server_of_a_split_has_pipeline_stages() -> None:
    """Two L40S hold an 8B model only together here: alone in a pipeline, which NIXL cannot pull from."""
    small = replace(machine("l", "L40", 2), memory_bytes=14 << 30)
    of = cluster([machine("h", "H100", 2), small], rows=((1000, 100),))
    cost = ProfileCost(of)
    table = GroupTable(of, cost)
    assert table.group(((1, 2),), Role.BOTH) is not None
    found = table.group(((1, 2),), Role.PREFILL)
    assert found is None or len(found.stages) == 1
    for plan in search(table, SolveLimits(clock=Steps(0.01))).plans:
        assert not plan.splits or all(len(group.stages) == 1 for group in plan.groups)


def test_the_headline_is_the_simulated_gain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever is simulated, however short: both commands plan the same, and it is simulated once.
    monkeypatch.setattr(split_simulation, "_RUN_STAYS", 0.2)
    monkeypatch.setattr(split_simulation, "_LEAST_REQUESTS", 100)
    choose, chosen = split_command.choose, []

    def once(*arguments: object) -> object:
        if not chosen:
            chosen.append(choose(*arguments))
        return chosen[0]

    monkeypatch.setattr(split_command, "choose", once)
    path = tmp_path / "c.yaml"
    path.write_text(FILE.replace("between: 5e9", "between: 100e9"))
    arguments = ["split", "--config", str(path), "--exhaustive", "--simulate", "1"]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    served, other = document["simulated"], document["colocated"]["simulated"]
    assert main(arguments) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"{served['request_throughput']:.4g} requests/s")
    if document["split"]:
        gain = served["request_throughput"] / max(other.values()) - 1.0
        assert document["gain"] == pytest.approx(gain)
        assert f"{gain:+.1%}" in first
    else:
        assert document["gain"] is None


def test_commands_state_the_limits_that_were_simulated(tmp_path: Path) -> None:
    of = replace(cluster([machine("h", "H100", 2), machine("l", "L40", 2)]), path=tmp_path / "c.yaml")
    cost = ProfileCost(of)
    alone, pipeline = (GroupStage(0, 1, 32),), (GroupStage(1, 1, 16), GroupStage(1, 1, 16))
    groups = []
    for own in (alone, pipeline):
        tokens = capacity_of(of, own)
        groups.append(ServerGroup(Role.BOTH, own, cost.capacity(own, Role.BOTH, tokens), tokens))
    plan = SplitPlan(tuple(groups), {}, {0: 0.1, 1: 0.1})
    simulated, _ = make_servers(of, plan, cost)
    for server, engine, stages in zip(servers_of(of, plan), simulated, (1, 2), strict=True):
        limits = engine.engine.limits
        assert f"--max-num-batched-tokens {limits.max_num_batched_tokens // stages} " in server.command()
        assert f"--max-num-seqs {limits.max_num_seqs} " in server.command()


def test_of_plans_as_good_the_simplest_is_chosen() -> None:
    of = cluster([machine("l", "L40", 2)], rows=((1000, 100),))

    def plan(tp: int) -> SplitPlan:
        groups = tuple(ServerGroup(Role.BOTH, (GroupStage(0, tp, 32),), 1.0, 1000) for _ in range(2 // tp))
        return SplitPlan(groups, {}, dict.fromkeys(range(len(groups)), 1.0))

    def judged(tp: int, served: float) -> tuple[SplitPlan, Simulated]:
        return plan(tp), Simulated(served, 0.0, 0.0, 0.0, 0, 100)

    assert of.gpus == 2
    assert len(simplest([judged(2, 10.0), judged(1, 9.9)])[0].groups) == 2
    assert len(simplest([judged(2, 10.0), judged(1, 9.0)])[0].groups) == 1


def test_commands_say_role_layers_and_gpus(tmp_path: Path) -> None:
    of = replace(cluster([machine("h", "H100", 2), machine("l", "L40", 2)]), path=tmp_path / "c.yaml")
    stages = (GroupStage(0, 1, 20), GroupStage(1, 1, 12))
    cost = ProfileCost(of)
    groups = []
    alone = (GroupStage(0, 1, 32),)
    for role, own in ((Role.PREFILL, stages), (Role.DECODE, alone), (Role.BOTH, alone)):
        tokens = capacity_of(of, own)
        groups.append(ServerGroup(role, own, cost.capacity(own, role, tokens), tokens))
    plan = SplitPlan(tuple(groups[:2]), {(0, 1): 0.1}, {})
    servers = servers_of(of, plan)
    first, second = (server.command() for server in servers)
    assert "VLLM_PP_LAYER_PARTITION=20,12" in first
    assert "--pipeline-parallel-size 2" in first
    assert '"kv_role":"kv_producer"' in first
    assert '"kv_role":"kv_consumer"' in second
    assert "CUDA_VISIBLE_DEVICES=1 " in second
    write_servers(tmp_path / "f.yaml", "A plan.", servers)
    roles = [i["role"] for i in yaml.safe_load((tmp_path / "f.yaml").read_text())["models"][0]["instances"]]
    assert roles == ["prefill", "decode"]
    # One that does both transfers too, unless nothing is split.
    for flows, whole in (({(0, 1): 0.1}, '"kv_role":"kv_both"'), ({}, "vllm serve")):
        plan = SplitPlan((groups[0], groups[2]), flows, {1: 0.1})
        last = servers_of(of, plan)[-1].command()
        assert whole in last
        assert ("kv-transfer-config" in last) == plan.splits
    load_fleet(tmp_path / "f.yaml")


def test_a_model_that_fits_nowhere_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(FILE.replace("parameters: 8.03e9", "parameters: 700e9"))
    assert main(["split", "--config", str(path), "--time-limit", "1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "expected GPU memory of at least" in error
