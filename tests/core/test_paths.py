"""The scheduler of pipelines: paths are whole, token-layers add up, whatever happens, under every policy."""

from __future__ import annotations

import dataclasses
import random

import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.balancer.core.length_samples import LengthDistribution, SamplePredictor
from hetlb.balancer.core.types import Outcome, Reject, RejectReason, Request
from hetlb.tools.paths.path_scheduler import MOST_REPLAYS, PATH_POLICIES, PathScheduler
from hetlb.tools.paths.stages import (
    SINK,
    SOURCE,
    BatchLimits,
    Curve,
    LinkSpec,
    PathLease,
    StageNetwork,
    StageSpec,
)

LIMITS = BatchLimits(prompts=1, prompt_tokens=4096, decodes=64, decode_context=100_000)


STEPS = (
    "arrive",
    "arrive",
    "token",
    "end",
    "break",
    "preempt",
    "lose",
    "cancel",
    "network",
)


def stage(name: str, first: int, end: int, *, kv: int = 100_000, layer_s: float = 0.005) -> StageSpec:
    prompt, decode = Curve((0, 1000), (0.0, 0.1)), Curve((0, 1, 101), (0.0, layer_s, 2 * layer_s))
    return StageSpec(name, first, end, prompt, decode, kv, LIMITS)


def network(
    *stages: StageSpec, layers: int, partial: bool = False, flows: dict[tuple[str, str], float] | None = None
) -> StageNetwork:
    names = [each.name for each in stages]
    edges = [(a, b) for a in names for b in names if a != b]
    edges += [(SOURCE, name) for name in names] + [(name, SINK) for name in names]
    links = {edge: LinkSpec(1e9, 0.001) for edge in edges}
    return StageNetwork(layers, stages, links, 1000, 2, partial, flows or {})


def two_by_two() -> StageNetwork:
    """Two replicas of each half of four layers."""
    edges = [
        (SOURCE, "a"),
        (SOURCE, "b"),
        ("a", "c"),
        ("a", "d"),
        ("b", "c"),
        ("b", "d"),
        ("c", SINK),
        ("d", SINK),
    ]
    return network(
        stage("a", 0, 2), stage("b", 0, 2), stage("c", 2, 4), stage("d", 2, 4), layers=4,
        flows=dict.fromkeys(edges, 10.0),
    )  # fmt: skip


def scheduler(net: StageNetwork, policy: str, **kwargs: object) -> PathScheduler:
    predictor = SamplePredictor(LengthDistribution([20]), capped=False)
    return PathScheduler(net, predictor, policy=policy, **kwargs)  # type: ignore[arg-type]


def request(number: int, prompt: int = 100) -> Request:
    return Request(number, "m", prompt, prompt_exact=True)


@settings(max_examples=examples(60))
@given(data=st.data(), policy=st.sampled_from(sorted(PATH_POLICIES)), seed=st.integers(0, 10**6))
def test_ledgers_add_up_whatever_happens(data: st.DataObject, policy: str, seed: int) -> None:
    rng = random.Random(seed)
    partial = rng.random() < 0.5
    stages = [
        stage(f"s{i}", first, min(6, first + rng.randint(1, 4)), kv=rng.randint(600, 6000))
        for i, first in enumerate([0, 0, *(rng.randint(0, 5) for _ in range(6))])
    ]
    edges = [(SOURCE, each.name) for each in stages] + [(each.name, SINK) for each in stages]
    edges += [(a.name, b.name) for a in stages for b in stages if a is not b]
    net = network(*stages, layers=6, partial=partial, flows=dict.fromkeys(edges, 1.0))
    paths = scheduler(net, policy, queue_limit=5)
    live: dict[int, PathLease] = {}
    now, number = 0.0, 0
    for _ in range(data.draw(st.integers(1, 40))):
        now += rng.random()
        step = data.draw(st.sampled_from(STEPS))
        if step == "arrive":
            number += 1
            commands = paths.on_arrival(request(number, rng.randint(1, 400)), now)
        elif step in ("token", "end", "break", "preempt") and live:
            lease = live[rng.choice(sorted(live))]
            if step == "token":
                lease.output_tokens += 1
                commands = paths.on_first_token(lease, now)
            else:
                del live[lease.id]
                lease.output_tokens += rng.randint(0, 30)
                if step == "preempt":
                    commands = paths.on_preempted(lease, now)
                else:
                    outcome = Outcome.OK if step == "end" else Outcome.BROKEN_STREAM
                    commands = paths.on_lease_ended(lease, outcome, now)
        elif step == "lose" and paths.ledgers:
            commands = paths.on_stage_lost(rng.choice(sorted(paths.ledgers)), now)
        elif step == "cancel":
            commands = paths.on_cancelled(rng.randint(1, number + 1), now)
        elif step == "network":
            busy = {name for name, ledger in paths.ledgers.items() if ledger.leases}
            there = [each for each in stages if each.name in busy or rng.random() < 0.7]
            net = dataclasses.replace(net, stages=tuple(there))
            commands = paths.on_network(net, now)
        else:
            continue
        for command in commands:
            if isinstance(command, PathLease):
                assert all(paths.ledgers[hop.stage].up for hop in command.hops)
                live[command.id] = command
        paths.check_integrity()
    for lease in list(live.values()):
        for command in paths.on_lease_ended(lease, Outcome.CLIENT_GONE, now):
            if isinstance(command, PathLease):
                paths.on_lease_ended(command, Outcome.CLIENT_GONE, now)
    paths.check_integrity()


@pytest.mark.parametrize("policy", sorted(PATH_POLICIES))
def test_replicas_are_all_used_and_given_back(policy: str) -> None:
    paths = scheduler(two_by_two(), policy)
    leases = []
    for number in range(40):
        (command,) = paths.on_arrival(request(number), float(number))
        assert isinstance(command, PathLease)
        leases.append(command)
    used = {hop.stage for lease in leases for hop in lease.hops}
    assert used == {"a", "b", "c", "d"}
    assert sum(ledger.kv_token_layers for ledger in paths.ledgers.values()) == 40 * 120 * 4
    for lease in leases:
        lease.output_tokens = 20
        paths.on_lease_ended(lease, Outcome.OK, 100.0)
    assert all(ledger.kv_token_layers == 0 for ledger in paths.ledgers.values())
    assert paths.kv_usage() == 0.0


def test_weighted_round_robin_follows_the_flow() -> None:
    net = network(
        stage("a", 0, 1, kv=10**8), stage("b", 0, 1, kv=10**8), stage("c", 1, 2, kv=10**8), layers=2,
        flows={(SOURCE, "a"): 30.0, (SOURCE, "b"): 10.0, ("a", "c"): 30.0, ("b", "c"): 10.0},
    )  # fmt: skip
    paths = scheduler(net, "iwrr")
    first = []
    for number in range(100):
        (command,) = paths.on_arrival(request(number), 0.0)
        assert isinstance(command, PathLease)
        first.append(command.hops[0].stage)
    assert first.count("a") == 75
    assert "bb" not in "".join(first)


def test_the_least_time_path_avoids_the_slow_replica_until_it_pays() -> None:
    net = network(stage("fast", 0, 2, kv=10**7), stage("slow", 0, 2, kv=10**7, layer_s=0.006), layers=2)
    paths = scheduler(net, "hetlb")
    chosen = []
    for number in range(60):
        (command,) = paths.on_arrival(request(number, 1000), 0.0)
        assert isinstance(command, PathLease)
        chosen.append(command.hops[0].stage)
    assert chosen[0] == "fast"
    assert chosen.count("fast") >= chosen.count("slow") > 0


def test_a_request_waits_for_room_and_is_turned_down_where_it_never_fits() -> None:
    net = network(stage("a", 0, 2, kv=1000), layers=2)
    paths = scheduler(net, "hetlb", queue_limit=1)
    (command,) = paths.on_arrival(request(1, 300), 0.0)
    assert isinstance(command, PathLease)
    assert paths.on_arrival(request(2, 300), 0.0) == []
    (full,) = paths.on_arrival(request(3, 300), 0.0)
    assert isinstance(full, Reject)
    assert full.reason is RejectReason.QUEUE_FULL
    (never,) = paths.on_arrival(request(4, 500), 0.0)
    assert isinstance(never, Reject)
    assert never.reason is RejectReason.TOO_LONG
    (placed,) = paths.on_lease_ended(command, Outcome.OK, 1.0)
    assert isinstance(placed, PathLease)
    assert placed.request.id == 2


def test_a_broken_path_is_replayed_from_the_tokens_so_far() -> None:
    paths = scheduler(two_by_two(), "hetlb")
    (command,) = paths.on_arrival(request(1), 0.0)
    assert isinstance(command, PathLease)
    lease = command
    lost = lease.hops[0].stage
    paths.on_first_token(lease, 0.5)
    lease.output_tokens = 7
    assert paths.on_stage_lost(lost, 1.0) == []
    (again,) = paths.on_lease_ended(lease, Outcome.BROKEN_STREAM, 1.0)
    assert isinstance(again, PathLease)
    assert lost not in {hop.stage for hop in again.hops}
    assert again.context_tokens == 107
    paths.check_integrity()


def test_a_request_that_breaks_every_path_is_given_up() -> None:
    paths = scheduler(two_by_two(), "random")
    (command,) = paths.on_arrival(request(1), 0.0)
    for _ in range(MOST_REPLAYS):
        assert isinstance(command, PathLease)
        (command,) = paths.on_lease_ended(command, Outcome.NO_RESPONSE, 1.0)
    assert isinstance(command, PathLease)
    (given_up,) = paths.on_lease_ended(command, Outcome.NO_RESPONSE, 1.0)
    assert isinstance(given_up, Reject)
    assert given_up.reason is RejectReason.NO_RESPONSE
    assert paths.in_flight == 0
    paths.check_integrity()


def test_partial_inference_enters_behind_the_first_layer() -> None:
    stages = (stage("a", 0, 3), stage("b", 2, 5))
    (none,) = scheduler(network(*stages, layers=5), "hetlb").on_arrival(request(1), 0.0)
    assert isinstance(none, Reject)
    (command,) = scheduler(network(*stages, layers=5, partial=True), "hetlb").on_arrival(request(1), 0.0)
    assert isinstance(command, PathLease)
    assert [(hop.first, hop.end) for hop in command.hops] == [(0, 3), (3, 5)]


def test_fixed_pipelines_take_turns_and_share_no_stage() -> None:
    net = network(
        stage("a", 0, 7), stage("b", 0, 6), stage("c", 5, 12), stage("d", 6, 12), layers=12, partial=True
    )
    paths = scheduler(net, "round-robin")
    taken = []
    for number in range(4):
        (command,) = paths.on_arrival(request(number), 0.0)
        assert isinstance(command, PathLease)
        taken.append([(hop.stage, hop.first, hop.end) for hop in command.hops])
    assert taken == [[("a", 0, 7), ("c", 7, 12)], [("b", 0, 6), ("d", 6, 12)]] * 2


def test_a_preempted_request_goes_first_and_counts_no_replay() -> None:
    net = network(stage("a", 0, 2, kv=600), layers=2)
    paths = scheduler(net, "hetlb")
    (command,) = paths.on_arrival(request(1, 200), 0.0)
    assert isinstance(command, PathLease)
    assert paths.on_arrival(request(2, 200), 0.0) == []
    lease = command
    for _ in range(MOST_REPLAYS + 2):
        lease.output_tokens = 5
        (command,) = paths.on_preempted(lease, 1.0)
        assert isinstance(command, PathLease)
        assert command.request.id == 1
        lease = command
    assert lease.context_tokens == 200 + 5 * (MOST_REPLAYS + 2)


def test_new_stages_are_used_and_old_ones_keep_their_ledger() -> None:
    whole = two_by_two()
    part = dataclasses.replace(whole, stages=tuple(each for each in whole.stages if each.name in "ac"))
    paths = scheduler(part, "hetlb")
    assert paths.passable
    (command,) = paths.on_arrival(request(1), 0.0)
    assert isinstance(command, PathLease)
    assert not paths.on_network(whole, 1.0)
    assert paths.ledgers["a"].in_flight == 1
    used = set()
    for number in range(2, 10):
        (command,) = paths.on_arrival(request(number), 2.0)
        assert isinstance(command, PathLease)
        used |= {hop.stage for hop in command.hops}
    assert used == {"a", "b", "c", "d"}
    assert not scheduler(dataclasses.replace(whole, stages=whole.stages[:2]), "hetlb").passable


def test_a_request_that_no_remaining_path_can_hold_does_not_hold_up_the_others() -> None:
    large, small = stage("large", 0, 2, kv=1000), stage("small", 0, 2, kv=300)
    net = network(large, small, layers=2)
    paths = scheduler(net, "hetlb")
    (command,) = paths.on_arrival(request(1, 400), 0.0)
    assert isinstance(command, PathLease)
    (other,) = paths.on_arrival(request(2, 100), 0.0)
    assert isinstance(other, PathLease)
    assert paths.on_arrival(request(3, 120), 0.0) == []
    paths.on_stage_lost("large", 1.0)
    paths.on_lease_ended(command, Outcome.BROKEN_STREAM, 1.0)
    (rejected,) = paths.on_network(dataclasses.replace(net, stages=(small,)), 1.0)
    assert isinstance(rejected, Reject)
    assert (rejected.request_id, rejected.reason) == (1, RejectReason.TOO_LONG)
    (next_,) = paths.on_lease_ended(other, Outcome.OK, 2.0)
    assert isinstance(next_, PathLease)
    assert next_.request.id == 3
    paths.check_integrity()
