"""A recorded log, replayed, gives the same decisions; a log that was tampered with does not pass unseen."""

from __future__ import annotations

import functools
import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from helpers import FAST, MODEL, dispatched, examples, request, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.balancer.config.profile_file import kv_need
from hetlb.balancer.core.evidence.table import HealthParams
from hetlb.balancer.core.facts import (
    AdminStateSet,
    CapacityLearned,
    EngineSample,
    InstanceAdded,
    InstanceRemoved,
    ModelsLearned,
    Probed,
    ProbeResult,
)
from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.latency import DEFAULT_LATENCY
from hetlb.balancer.core.ledger import Booked
from hetlb.balancer.core.length_samples import LengthDistribution
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.step_times import (
    DecodeTable,
    LaunchTime,
    MixedTerm,
    PnormPrefill,
    PrefillGrid,
    SplitKv,
)
from hetlb.balancer.core.types import (
    AdminState,
    CanarySide,
    Capacity,
    Dispatch,
    Health,
    InstanceSpec,
    Lease,
    Outcome,
)
from hetlb.options.event_log.eventlog import RecordingScheduler, Replay, decode_setup, encode_setup
from hetlb.options.split.hand_overs import HandOvers
from hetlb.tools.sim.integrity import check_scheduler


def record(policy: str, predictor: str, seed: int, steps: int = 120) -> list[str]:
    """Drive a recording scheduler with every kind of fact, at random."""
    rng = random.Random(seed)
    setup = SchedulerSetup(
        specs=(spec("a"), spec("b", slower=2.7, kv=5000), spec("c", latency=None)),
        policy=policy,
        params=PolicyParams(),
        limits=QueueLimits(max_requests=6, tenant_share=0.8, tenant_weights={"x": 3.0}),
        health=HealthParams(slow_start_s=7.0),
        predictor=predictor,
        seed=seed,
        lengths=LengthDistribution([3, 77, 400]),
    )
    lines = [encode_setup(setup)]
    scheduler = RecordingScheduler(setup, write=lines.append)
    now = 0.0
    leases: list[Lease] = []
    for i in range(steps):
        now += rng.random() / 3
        name = rng.choice("abc")
        kind = rng.randrange(13)
        commands = []
        if kind < 5:
            asked = request(
                i, prompt=rng.randrange(1, 900), max_tokens=rng.choice([None, 50]),
                priority=rng.randrange(3), tenant=rng.choice([None, "x", "y"]),
            )  # fmt: skip
            commands = scheduler.on_arrival(asked, now)
        elif kind == 5 and leases:
            lease = rng.choice(leases)
            commands = scheduler.on_refused(lease, 503, rng.choice([None, 3.0]), now)
            if lease.ended:
                leases.remove(lease)
        elif kind < 7 and leases:
            lease = leases.pop(rng.randrange(len(leases)))
            scheduler.on_first_token(lease, now)
            lease.output_tokens = rng.randrange(1, 500)
            commands = scheduler.on_lease_ended(lease, rng.choice(list(Outcome)), now + 0.1)
        elif kind == 7:
            commands = scheduler.on_scrape(name, EngineSample(1, 2, rng.random(), missing=("x",)), now)
        elif kind == 8:
            commands = scheduler.on_instance(Probed(name, rng.choice(list(ProbeResult))), now)
        elif kind == 9:
            change = rng.choice(
                [
                    AdminStateSet(name, rng.choice(list(AdminState))),
                    ModelsLearned(name, (MODEL, "lora")),
                    CapacityLearned(name, Capacity(kv_cache_tokens=rng.randrange(900, 9000))),
                ]
            )
            commands = scheduler.on_instance(change, now)
        elif kind == 12:
            again = request(1000 + i, prompt=70)
            restored = scheduler.restore(Booked(1, name, again, 10**9, 20.0, 1.0, i % 2 == 0), now)
            leases += [] if restored is None else [restored]
        elif kind == 10:
            commands = scheduler.on_tick(now) + scheduler.on_cancelled(i - 1, now)
        else:
            commands = scheduler.set_policy(rng.choice(sorted(POLICIES)), now)
            commands += scheduler.on_instance(InstanceRemoved(name), now)
            commands += scheduler.on_instance(InstanceAdded(spec(name, slower=rng.random() + 0.5)), now)
        leases += [command.lease for command in commands if isinstance(command, Dispatch)]
    return lines


@settings(max_examples=examples(40))
@given(
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(("online", "normal", "mean", "empirical")),
    st.integers(0, 1 << 20),
)
def test_replay_decides_the_same(policy: str, predictor: str, seed: int) -> None:
    replay = Replay(record(policy, predictor, seed), HandOvers)
    assert all(step.same for step in replay)
    check_scheduler(replay.scheduler)


def test_a_changed_decision_is_noticed() -> None:
    lines = record("paper", "online", 1)
    index = next(i for i, line in enumerate(lines) if '"dispatch"' in line)
    fact = json.loads(lines[index])
    fact["out"][0][4] += 1  # one nanosecond of work
    lines[index] = json.dumps(fact)
    assert [step.line for step in Replay(lines, HandOvers) if not step.same] == [index + 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "line 2: ValueError: expected JSON"),
        ("[]", "line 2: ValueError: expected a JSON object"),
        ('{"t":0,"kind":"nap","out":[]}', "unknown kind 'nap'"),
        ('{"t":0,"kind":"first_token","lease":9,"out":[]}', "line 2: KeyError: 9"),
        ('{"kind":"tick"}', "line 2: KeyError: 't'"),
        ("[" * 100_000, "line 2: ValueError: expected JSON"),
        ('{"t":0,"kind":"instance","change":"Probed","with":[],"out":[]}', "Error: "),
        ('{"t":0,"kind":"scrape","name":"a","sample":[],"out":[]}', "Error: "),
        ('{"t":0,"kind":"restore","live":null,"out":[]}', "Error: "),
    ],
)
def test_a_broken_log_names_its_line(line: str, message: str) -> None:
    setup = record("paper", "online", 1, steps=0)[0]
    with pytest.raises(ValueError, match="line 2") as caught:
        list(Replay([setup, line]))
    assert message in str(caught.value)


@pytest.mark.parametrize("first", ["", "{}", '{"kind":"setup","version":99}', '{"kind":"setup","version":1}'])
def test_a_log_without_its_set_up_is_refused(first: str) -> None:
    with pytest.raises(ValueError, match=r"set-up|JSON"):
        Replay([first])


#: Replacements of a value of a line.
VALUES: list[Any] = [None, True, -1, 0, 1e300, 1 << 70, "", "x", [], {}, [1], {"a": 1}, math.nan, "inf"]


def spots(value: Any) -> list[tuple[Any, Any]]:
    """Return each place within a value: its container, and its key there."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [spot for key in keys for spot in spots(value[key])]


@settings(max_examples=examples(200))
@given(st.sampled_from((("hetlb", 1), ("paper", 2), ("rr", 3))), st.randoms(use_true_random=False))
def test_a_line_with_any_value_is_one_line(log: tuple[str, int], rng: random.Random) -> None:
    """Whatever stands in place of one value: the log is replayed, or one line names the place."""
    lines = recorded(*log)[: rng.choice([3, 20, 60])]
    at = rng.randrange(len(lines))
    document = json.loads(lines[at])
    container, key = rng.choice(spots(document))
    container[key] = rng.choice(VALUES)
    lines[at] = json.dumps(document)
    said = ""
    try:
        for step in Replay(lines, HandOvers):
            assert step.same in (True, False)
    except ValueError as error:
        said = str(error)
    assert "\n" not in said


@functools.cache
def recorded(policy: str, seed: int) -> list[str]:
    return record(policy, "online", seed)


def test_a_set_up_has_all_of_a_profile() -> None:
    latency = replace(
        DEFAULT_LATENCY,
        better_prefill=PnormPrefill(1e-2, 1e-5, 1e-9, 4.0, PrefillGrid((1, 2), (8, 16), ((0.1, 0.2),) * 2)),
        better_decode=DecodeTable(1e-8, 1e-7, (1, 8), (0.01, 0.02)),
        mixed=MixedTerm(1e-6, 1e-9, 1e-8, 1e-8),
        split_kv=SplitKv(10.0, 1e-6),
        launch=LaunchTime(512.0, 1e-3, 2e-3),
    )
    capacity = Capacity(kv_cache_tokens=100_000, kv_need=kv_need(1000.0, [(512, 2000.0)], 0.0))
    specs = (InstanceSpec("a", MODEL, "", latency=latency, capacity=capacity),)
    setup = SchedulerSetup(specs=specs, policy="hetlb")
    assert decode_setup(encode_setup(setup)) == setup


def test_what_a_wrong_profile_misplaced_is_replayed_to_its_new_places() -> None:
    capacity = Capacity(kv_cache_tokens=10**6, max_num_seqs=64, max_num_batched_tokens=2048)
    specs = (
        spec("a", latency=FAST.scaled(0.5), capacity=capacity),
        spec("b", latency=FAST, capacity=capacity),
    )
    setup = SchedulerSetup(specs, "hetlb", PolicyParams(), QueueLimits(), initial_health=Health.UP)
    lines = [encode_setup(setup)]
    scheduler = RecordingScheduler(setup, write=lines.append)
    leases = [
        dispatched(scheduler.on_arrival(request(i, prompt=2048, max_tokens=50, streamed=True), 0.0))
        for i in range(16)
    ]
    now = FAST.prefill_s(2048)
    scheduler.on_first_token(next(each for each in leases if each.instance == "a"), now)
    moved = [
        command for lease in scheduler.failover.misplaced() for command in scheduler.on_misplaced(lease, now)
    ]
    moved += scheduler.wait_again(now)
    assert len(moved) > 3
    assert all(each.same for each in Replay(lines, HandOvers))


@pytest.mark.parametrize(
    "asked", [{"subset": ("b",)}, {"side": CanarySide("b", True)}, {"side": CanarySide("a", False)}]
)
def test_a_request_for_some_instances_alone_is_replayed(asked: dict[str, Any]) -> None:
    setup = SchedulerSetup(
        (spec("a"), spec("b", slower=2.0)), "hetlb", PolicyParams(), QueueLimits(), initial_health=Health.UP
    )
    lines = [encode_setup(setup)]
    scheduler = RecordingScheduler(setup, write=lines.append)
    assert dispatched(scheduler.on_arrival(request(1, **asked), 1.0)).instance == "b"
    assert [each.same for each in Replay(lines)] == [True]
