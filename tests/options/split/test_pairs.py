"""Prefill on one instance and decode on another: when, what is booked where, and what becomes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from helpers import FAST, make_scheduler, request, spec

from hetlb.balancer.core.facts import InstanceRemoved, Probed, ProbeResult
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.ledger import Booked
from hetlb.balancer.core.policies.hetlb import Evaluation
from hetlb.balancer.core.policies.score_terms import TERMS
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import (
    Capacity,
    Connector,
    Dispatch,
    InstanceSpec,
    KvLink,
    Lease,
    Outcome,
    Reject,
    Request,
    Role,
)
from hetlb.options.split.pairs import _Pairs, join_s
from hetlb.tools.sim.integrity import check_scheduler

LINK = KvLink(Connector.NIXL, lease_s=10.0, bandwidth_bytes_per_s=1e10, latency_s=0.001)

#: One reads faster, the other decodes faster.
READER, DECODER = replace(FAST, k1=1e-5, k8=0.2), replace(FAST, k1=1e-3, k8=0.01)


def part(name: str, role: Role = Role.BOTH, **more: Any) -> InstanceSpec:
    return spec(name, kv=100_000, role=role, kv_transfer=more.pop("link", LINK), **more)


def pair(**more: Any) -> Scheduler:
    return make_scheduler(
        [part("p", Role.PREFILL), part("d", Role.DECODE)], more.pop("policy", "hetlb"), **more
    )


def split_request(request_id: int, **more: Any) -> Request:
    return request(request_id, **{"prompt": 2000, "splittable": True, "streamed": True, **more})


def placed(commands: list[Any]) -> Lease:
    (command,) = commands
    assert isinstance(command, Dispatch), command
    return command.lease


def named(scheduler: Scheduler, name: str) -> Instance:
    return next(each for each in scheduler.instances if each.name == name)


@pytest.mark.parametrize("policy", ["hetlb", "rr", "paper", "least-requests"])
def test_the_two_legs_follow_each_other_and_the_prompt_is_held_until_it_is_fetched(policy: str) -> None:
    scheduler = pair(policy=policy)
    p, d = named(scheduler, "p"), named(scheduler, "d")
    lease = placed(scheduler.on_arrival(split_request(1), 0.0))
    decode = lease.decode
    assert decode is not None
    assert (lease.instance, decode.instance, decode.incoming) == ("p", "d", True)
    assert (p.pending_prompt_tokens, d.pending_prompt_tokens) == (2000, 1)
    check_scheduler(scheduler)

    assert placed(scheduler.on_prefilled(lease, 0.5)) is decode
    hold = decode.hold
    assert hold is not None
    assert (p.in_flight, p.sequences, p.kv_tokens, p.held_tokens) == (0, 0, 2000, 2000)
    assert (d.in_flight, decode.dispatched_at, hold.expires_at) == (1, 0.5, 10.5)
    check_scheduler(scheduler)

    scheduler.on_first_token(decode, 0.6)
    assert hold.ended
    assert p.kv_tokens == 0
    decode.output_tokens = 50
    scheduler.on_lease_ended(decode, Outcome.OK, 1.0)
    check_scheduler(scheduler)
    assert scheduler.in_flight == d.kv_tokens == d.work_ns == 0


def test_blocks_that_are_not_fetched_are_held_until_the_lease_ends() -> None:
    scheduler = pair()
    lease = placed(scheduler.on_arrival(split_request(1), 0.0))
    decode = placed(scheduler.on_prefilled(lease, 1.0))
    scheduler.on_lease_ended(decode, Outcome.CLIENT_GONE, 1.1, retry=False)
    p = named(scheduler, "p")
    assert p.held_tokens == 2000
    assert scheduler.next_deadline() is not None
    scheduler.on_tick(10.9)
    assert p.kv_tokens == 2000
    scheduler.on_tick(11.0)
    assert (p.kv_tokens, scheduler.next_deadline()) == (0, None)
    check_scheduler(scheduler)


def test_a_released_prompt_is_held_no_longer_and_only_once() -> None:
    scheduler = pair()
    decode = placed(scheduler.on_prefilled(placed(scheduler.on_arrival(split_request(1), 0.0)), 1.0))
    assert decode.hold is not None
    scheduler.on_lease_ended(decode, Outcome.CLIENT_GONE, 1.1, retry=False)
    scheduler.on_hold_released(decode.hold, 1.2)
    scheduler.on_hold_released(decode.hold, 1.3)
    assert named(scheduler, "p").kv_tokens == 0
    check_scheduler(scheduler)


def test_legs_that_are_sent_at_once_may_end_in_either_order() -> None:
    link = KvLink(Connector.MOONCAKE)
    scheduler = make_scheduler(
        [part("p", Role.PREFILL, link=link), part("d", Role.DECODE, link=link)], "hetlb"
    )
    lease = placed(scheduler.on_arrival(split_request(1), 0.0))
    assert lease.decode is not None
    scheduler.on_first_token(lease.decode, 0.5)
    assert scheduler.on_prefilled(lease, 0.6) == []
    assert named(scheduler, "p").kv_tokens == 0
    check_scheduler(scheduler)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_failed_hand_over_sends_the_whole_request_to_one_instance(leg: str) -> None:
    scheduler = pair()
    lease = placed(scheduler.on_arrival(split_request(1), 0.0))
    if leg == "decode":
        lease = placed(scheduler.on_prefilled(lease, 1.0))
    again = placed(scheduler.on_unsplit(lease, Outcome.CLIENT_GONE, 2.0))
    assert (again.instance, again.decode, again.hold) == ("d", None, None)
    assert again.unread_tokens == 2000
    check_scheduler(scheduler)
    again.output_tokens = 3
    scheduler.on_lease_ended(again, Outcome.OK, 3.0)
    assert placed(scheduler.on_arrival(split_request(2), 3.0)).decode is not None


def test_a_reader_answers_where_the_only_decode_instance_dropped_the_request() -> None:
    scheduler = pair()
    lease = placed(scheduler.on_arrival(split_request(1), 0.0))
    decode = placed(scheduler.on_prefilled(lease, 1.0))
    whole = placed(scheduler.on_unsplit(decode, Outcome.NO_RESPONSE, 1.1))
    assert (whole.instance, whole.decode) == ("p", None)
    check_scheduler(scheduler)


def test_a_request_that_every_instance_dropped_is_given_up() -> None:
    scheduler = pair()
    lease = placed(scheduler.on_arrival(split_request(1), 0.0))
    decode = placed(scheduler.on_prefilled(lease, 1.0))
    scheduler.on_instance(InstanceRemoved("p"), 1.0)
    (command,) = scheduler.on_unsplit(decode, Outcome.NO_RESPONSE, 1.1)
    assert isinstance(command, Reject)
    assert not scheduler.in_flight
    check_scheduler(scheduler)


def test_an_instance_that_refuses_the_first_leg_gives_back_both() -> None:
    scheduler = make_scheduler(
        [part("p", Role.PREFILL), part("q", Role.PREFILL), part("d", Role.DECODE)], "hetlb"
    )
    lease = placed(scheduler.on_arrival(split_request(1), 0.0))
    commands = scheduler.on_lease_ended(lease, Outcome.CONNECT_FAILED, 0.1)
    again = next(each.lease for each in commands if isinstance(each, Dispatch))
    assert {lease.instance, again.instance} == {"p", "q"}
    assert again.decode is not None
    assert scheduler.in_flight == 2
    check_scheduler(scheduler)


@pytest.mark.parametrize("how", ["removed", "refuses"])
def test_a_decode_instance_that_is_gone_when_the_prompt_is_read(how: str) -> None:
    scheduler = make_scheduler([part("p", latency=replace(FAST, k8=0.2)), part("d", Role.DECODE)], "hetlb")
    lease = placed(scheduler.on_arrival(split_request(1), 0.0))
    assert lease.decode is not None
    change = InstanceRemoved("d") if how == "removed" else Probed("d", ProbeResult.REFUSED)
    scheduler.on_instance(change, 0.5)
    commands = scheduler.on_prefilled(lease, 1.0)
    again = next(each.lease for each in commands if isinstance(each, Dispatch))
    assert (again.instance, again.decode) == ("p", None)
    check_scheduler(scheduler)


def test_requests_that_cannot_be_split_go_to_decode_instances_whole() -> None:
    scheduler = pair()
    for n, kwargs in enumerate(({"splittable": False}, {"sequences": 2, "splittable": False}), 1):
        lease = placed(scheduler.on_arrival(split_request(n, **kwargs), 0.0))
        assert (lease.instance, lease.decode) == ("d", None)


def test_without_a_prefill_instance_the_decode_instance_does_it_all_and_the_reverse() -> None:
    for gone, left in (("p", "d"), ("d", "p")):
        scheduler = pair()
        scheduler.on_instance(Probed(gone, ProbeResult.REFUSED), 0.0)
        lease = placed(scheduler.on_arrival(split_request(1), 0.0))
        assert (lease.instance, lease.decode) == (left, None)


def test_a_plain_answer_is_split_only_if_it_ends_well_before_the_lease() -> None:
    scheduler = pair()
    for _ in range(20):
        scheduler.predictor.observe(split_request(99, max_tokens=5000), 1500)
    plain = placed(scheduler.on_arrival(split_request(1, max_tokens=5000, streamed=False), 0.0))
    streamed = placed(scheduler.on_arrival(split_request(2, max_tokens=5000), 0.0))
    assert (plain.instance, plain.decode) == ("d", None)
    assert streamed.decode is not None


def test_with_enough_of_it_in_its_cache_the_decode_instance_reads_the_rest_itself() -> None:
    scheduler = pair()
    keys = (("k", 1900),)
    first = placed(scheduler.on_arrival(split_request(1, prefix_keys=keys), 0.0))
    assert first.decode is not None
    decode = placed(scheduler.on_prefilled(first, 1.0))
    scheduler.on_first_token(decode, 1.1)
    scheduler.on_lease_ended(decode, Outcome.OK, 2.0)
    second = placed(scheduler.on_arrival(split_request(2, prefix_keys=keys), 3.0))
    assert (second.instance, second.decode) == ("d", None)


def test_mixed_roles_split_where_the_bandwidth_is_worth_it() -> None:
    for bandwidth, expected in ((1e10, ("reader", "decoder")), (1e6, ("decoder", None))):
        link = replace(LINK, bandwidth_bytes_per_s=bandwidth)
        specs = [part("reader", latency=READER, link=link), part("decoder", latency=DECODER, link=link)]
        lease = placed(make_scheduler(specs, "hetlb").on_arrival(split_request(1, max_tokens=None), 0.0))
        got = lease.instance, None if lease.decode is None else lease.decode.instance
        if expected[1] is None:
            assert got[1] is None, got
        else:
            assert got == expected


@pytest.mark.parametrize(
    ("slower", "roles", "expected"),
    [
        (4.0, (Role.BOTH, Role.BOTH), ("a", "b")),
        (0.25, (Role.BOTH, Role.BOTH), ("b", "a")),
        (1.0, (Role.BOTH, Role.BOTH), None),
        (0.25, (Role.PREFILL, Role.BOTH), ("a", "b")),
        (0.25, (Role.BOTH, Role.DECODE), ("a", "b")),
    ],
)
def test_prompts_go_from_faster_readers_to_slower_ones_unless_roles_say_otherwise(
    slower: float, roles: tuple[Role, Role], expected: tuple[str, str] | None
) -> None:
    """`b` reads `slower` times slower than `a`, which is busy; any pair is cheap enough."""
    specs = [
        part("a", roles[0], latency=FAST),
        part("b", roles[1], latency=replace(FAST, k1=slower * FAST.k1, k4=slower * FAST.k4)),
    ]
    scheduler = make_scheduler(specs, "hetlb")
    placed(scheduler.on_arrival(request(0, prompt=30_000, subset=("a",)), 0.0))
    asked, instances = split_request(1), scheduler.instances
    ctx = scheduler.placement.context(asked, 100.0, 0, 0.0)
    mixed = roles == (Role.BOTH, Role.BOTH)
    evaluation = Evaluation(ctx, instances, (20.0, *[term.weight for term in TERMS[1:]]), hold=False)
    found = _Pairs(ctx, evaluation, scheduler.placement.splits.transfers, mixed).best_pair(math.inf)
    assert (found and (instances[found.source].name, instances[found.target].name)) == expected


def test_a_prompt_is_not_handed_to_an_instance_that_reads_a_long_one() -> None:
    """The first token would wait for that one, wherever the prompt is read."""
    specs = [part("reader", latency=READER), part("decoder", latency=DECODER)]
    for long, expected in ((0, "decoder"), (6000, None)):
        scheduler = make_scheduler(specs, "hetlb")
        if long:
            placed(scheduler.on_arrival(request(1, prompt=long, max_tokens=8, subset=("decoder",)), 0.0))
        lease = placed(scheduler.on_arrival(split_request(2), 0.0))
        assert lease.instance == "reader"
        assert (None if lease.decode is None else lease.decode.instance) == expected


def test_a_token_of_a_fetched_prompt_waits_for_the_prompts_that_are_read() -> None:
    scheduler = make_scheduler([part("p", latency=READER), part("d", latency=DECODER)], "hetlb")
    d = named(scheduler, "d")
    idle_s = join_s(d, 1000.0)
    assert idle_s == pytest.approx(1.5 * DECODER.step_s(1.0, 1000.0))
    placed(scheduler.on_arrival(request(1, prompt=3000, subset=("d",)), 0.0))
    assert join_s(d, 1000.0) > DECODER.prefill_s(3000.0) > 100 * idle_s


def test_what_is_read_at_the_decode_instance_counts_for_a_while() -> None:
    scheduler = make_scheduler([part("d", latency=DECODER)], "hetlb")
    (d,) = scheduler.instances
    for number in range(60):
        lease = placed(scheduler.on_arrival(request(number, prompt=500), float(number)))
        scheduler.on_first_token(lease, number + 0.6)
        lease.output_tokens = 2
        scheduler.on_lease_ended(lease, Outcome.OK, number + 0.7)
    assert d.speed.prefilling.per_s(60.0) == pytest.approx(500.0, rel=0.05)
    assert d.speed.prefilling.per_s(180.0) < 5.0


def test_an_answer_pays_for_the_prompts_to_come_where_it_decodes() -> None:
    """Each pays for all of it, whether others decode there or not."""
    scheduler = make_scheduler([part("d", latency=DECODER)], "hetlb")
    (d,) = scheduler.instances

    def cost_s(now: float) -> float:
        ctx = scheduler.placement.context(split_request(1000), 100.0, 0, now)
        evaluation = Evaluation(ctx, [d], (20.0, *[term.weight for term in TERMS[1:]]), hold=False)
        pairs = _Pairs(ctx, evaluation, scheduler.placement.splits.transfers, mixed=False)
        return pairs._delay_to_come_s(evaluation.ratings[0], 1.0)

    assert cost_s(0.0) == 0.0
    for number in range(60):
        lease = placed(scheduler.on_arrival(request(number, prompt=500), float(number)))
        scheduler.on_first_token(lease, number + 0.6)
        lease.output_tokens = 2
        scheduler.on_lease_ended(lease, Outcome.OK, number + 0.7)
    alone_s = cost_s(60.0)
    half_a_step_s = 0.5 * DECODER.step_s(1.0, 2050.0)
    assert alone_s > 0.9 * 21.0 * half_a_step_s
    for number in range(3):
        placed(scheduler.on_arrival(request(100 + number, prompt=10), 60.0))
    assert cost_s(60.0) == pytest.approx(alone_s, rel=0.2)


def test_answers_that_end_until_a_prompt_comes_make_room_for_it() -> None:
    """One decodes, and by its age a prompt takes a second: answers of 50 tokens end in it."""
    few = Capacity(kv_cache_tokens=100_000, kv_tokens_per_request=100_000, max_num_seqs=16)
    scheduler = make_scheduler([part("p", Role.PREFILL), part("d", Role.DECODE, capacity=few)], "hetlb")
    leases = [placed(scheduler.on_arrival(split_request(number), 0.0)) for number in range(16)]
    assert not scheduler.on_arrival(split_request(16), 0.0)
    commands = scheduler.on_prefilled(leases[0], 1.0)
    assert {each.request_id for each in commands if isinstance(each, Dispatch)} == {0, 16}


def test_a_slow_pair_is_learnt_from_what_was_seen() -> None:
    specs = [part("p", Role.PREFILL), part("near", Role.DECODE), part("far", Role.DECODE)]
    scheduler = make_scheduler(specs, "hetlb")
    p, now = named(scheduler, "p"), 0.0
    before = scheduler.placement.splits.transfers.estimate_s(p, named(scheduler, "far"), 2000, 0.0)
    for number in range(1, 12):
        now += 10.0
        lease = placed(scheduler.on_arrival(split_request(number), now))
        assert lease.decode is not None
        decode = placed(scheduler.on_prefilled(lease, now + 1.0))
        took = 5.0 if decode.instance == "far" else 0.05
        scheduler.on_first_token(decode, now + 1.0 + took)
        decode.output_tokens = 2
        scheduler.on_lease_ended(decode, Outcome.OK, now + 1.1 + took)
    assert scheduler.placement.splits.transfers.estimate_s(p, named(scheduler, "near"), 2000, now) < 0.1
    assert before < 0.1
    lease = placed(scheduler.on_arrival(split_request(100), now + 20))
    assert lease.decode is not None
    assert lease.decode.instance == "near"


def test_a_pair_that_was_slow_is_tried_again_after_a_while() -> None:
    scheduler = pair()
    p, d = scheduler.instances
    times = scheduler.placement.splits.transfers
    nominal = times.estimate_s(p, d, 1000, 0.0)
    for _ in range(3):
        times.observe(p, d, LINK, 1000, 2.0, 10.0)
    assert times.estimate_s(p, d, 1000, 10.0) > 20 * nominal
    assert times.estimate_s(p, d, 1000, 1000.0) < 1.1 * nominal


def test_a_slow_prefill_instance_is_found_out_though_it_never_decodes() -> None:
    scheduler = pair()
    p, now = named(scheduler, "p"), 0.0
    for number in range(1, 20):
        lease = placed(scheduler.on_arrival(split_request(number), now))
        decode = placed(scheduler.on_prefilled(lease, now + 2.0))  # by its profile: 0.21 s
        scheduler.on_first_token(decode, now + 2.1)
        scheduler.on_lease_ended(decode, Outcome.OK, now + 2.2)
        now += 3.0
    assert p.latency.prefill_s(2000) > 2 * p.nominal.prefill_s(2000)


def test_a_lease_of_a_split_request_is_restored_as_what_it_was_at_its_instance() -> None:
    scheduler = pair()
    lease = placed(scheduler.on_arrival(split_request(1), 0.0))
    other = pair()
    live = Booked(1, "p", lease.request, lease.work_ns, lease.predicted_output)
    restored = other.restore(live, 0.0)
    assert restored is not None
    other.on_lease_ended(restored, Outcome.CLIENT_GONE, 1.0)
    check_scheduler(other)
