"""Placement of a request: what a policy is told, what is booked of its choice, and what is shown of it."""

from __future__ import annotations

import math
from array import array

import pytest
from helpers import FAST, dispatched, make_scheduler, request, spec

from hetlb.balancer.core.block_index import BlocksStored, KvEventBatch, block_digests
from hetlb.balancer.core.demand import PROMPT_WEIGHT
from hetlb.balancer.core.facts import AdminStateSet, ModelsLearned
from hetlb.balancer.core.latency import processing_s
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.policies.sight import SchedulingContext
from hetlb.balancer.core.queue import WaitingElsewhere
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import AdminState, Capacity, Dispatch, Outcome, Request
from hetlb.cli.explain import explained

ROOMY = Capacity(kv_cache_tokens=10**6, kv_tokens_per_request=10**6, max_num_seqs=64)


def fleet(names: str = "ab", policy: str = "hetlb", **slower: float) -> Scheduler:
    specs = [spec(name, capacity=ROOMY, slower=slower.get(name, 1.0)) for name in names]
    return make_scheduler(specs, policy)


def context(scheduler: Scheduler, asked: Request, waiting: int = 0, now: float = 0.0) -> SchedulingContext:
    assert asked.model in scheduler.fleet.ready
    return scheduler.placement.context(asked, 50.0, waiting, now)


def sole(scheduler: Scheduler, asked: Request, now: float = 0.0) -> Dispatch:
    [command] = scheduler.on_arrival(asked, now)
    assert isinstance(command, Dispatch)
    return command


# --- what a policy is told ---


def test_a_policy_is_told_the_request_and_what_waits_beside_it() -> None:
    scheduler = fleet()
    asked = request(1, prompt=300, max_tokens=None)
    ctx = context(scheduler, asked, 70, 3.0)
    assert (ctx.request, ctx.predicted_output, ctx.waiting, ctx.now) == (asked, 50.0, 70, 3.0)
    assert (ctx.held, ctx.restraints, ctx.adapter_load_s) == (None, None, 0.0)
    predictor = scheduler.predictor
    assert ctx.long_output == predictor.long(asked) > 0.0
    assert ctx.waited_s == 0.0
    known = scheduler.placement.context(asked, 50.0, 0, 0.0, 99.0)
    assert known.long_output == 99.0
    # To explain one request before the first: it is the mean one.
    assert (ctx.demand.mix.count, ctx.demand.mix.prompt, ctx.demand.mix.output) == (1, 300.0, 50.0)
    assert ctx.demand is not scheduler.placement.demands["m"]
    assert not scheduler.placement.demands["m"].mix.count


def test_what_has_no_answer_has_no_long_one_either() -> None:
    ctx = context(fleet(), request(1, generates=False, max_tokens=None))
    assert ctx.long_output == 0.0


def test_the_demand_of_a_model_is_kept() -> None:
    scheduler = fleet()
    for number, prompt in enumerate((100, 300)):
        sole(scheduler, request(number, prompt=prompt))
    demand = scheduler.placement.demands["m"]
    assert (demand.mix.count, demand.mix.prompt) == (2, 200.0)
    assert context(scheduler, request(9, prompt=5000)).demand is demand
    assert scheduler.placement.demands["other"] is not demand


def test_the_work_of_others_in_the_queue_counts_and_its_own_does_not() -> None:
    scheduler = fleet("a")
    placement = scheduler.placement
    asked = request(9)
    ready = scheduler.fleet.ready["m"]
    alone = placement.choose(asked, ready, 0.0, 50.0, own_size=30)
    assert alone is not None
    assert alone.ctx.waiting == 0
    scheduler.on_waiting_elsewhere({"m": 40, "other": 7}, 0.0)
    found = placement.choose(asked, ready, 0.0, 50.0)
    assert found is not None
    assert (found.ctx.waiting, found.ctx.predicted_output, found.ctx.now) == (40, 50.0, 0.0)
    scheduler.queue.push(request(10), 0.0, size=100)
    found = placement.choose(asked, ready, 0.0, 50.0, own_size=30)
    assert found is not None
    assert found.ctx.waiting == 110
    scheduler.on_waiting_elsewhere({}, 0.0, WaitingElsewhere(1, 0, {"m": -1.0}))  # an older one: none goes
    found = placement.choose(asked, ready, 0.0, 50.0, own_size=30)
    assert found is not None
    assert found.ctx.waiting == 70


def test_a_place_is_left_to_an_older_request_of_another_scheduler() -> None:
    scheduler = make_scheduler([spec("a", capacity=Capacity(1000, 1000, max_num_seqs=2))], "hetlb")
    first, second = [sole(scheduler, request(n), n / 10).lease for n in (1, 2)]
    assert scheduler.on_arrival(request(3), 0.3) == []
    scheduler.on_waiting_elsewhere({}, 0.4, WaitingElsewhere(1, 0, {"m": -1.0}))
    assert scheduler.on_lease_ended(first, Outcome.OK, 0.5) == []
    assert scheduler.on_first_token(second, 0.6) == []
    [command] = scheduler.on_waiting_elsewhere({}, 0.7)
    assert isinstance(command, Dispatch)
    assert command.lease.request.id == request(3).id


def test_what_caches_hold_of_a_prompt_is_told_and_exact_where_engines_tell() -> None:
    scheduler = fleet()
    digests = block_digests(array("q", range(1200)), 50)
    keys = (("k", 1000),)
    running = [
        dispatched(scheduler.on_arrival(request(n, prompt=1200, prefix_keys=keys), 0.0)) for n in (1, 2)
    ]
    a, b = scheduler.instances
    asked = request(9, prompt=1200, prefix_keys=keys, blocks=(50, digests))
    held = context(scheduler, asked).held
    assert held is not None
    assert held.tokens == {
        each.tree.cache_id: 1000 for each in {scheduler.ledger.leased[lease.id] for lease in running}
    }
    assert context(scheduler, request(9, prompt=1200)).held is None
    stored = BlocksStored((0,), None, digests[:1], 50)
    scheduler.on_kv_events("b", KvEventBatch((stored,), begins=True), 0.0)
    held = context(scheduler, asked).held
    assert held is not None
    assert held.tokens[b.tree.cache_id] == 50
    plain = context(scheduler, request(9, prompt=1200, prefix_keys=keys)).held
    assert plain is not None
    assert plain.tokens.get(b.tree.cache_id) in (None, 1000)
    by_blocks = context(scheduler, request(9, prompt=1200, blocks=(50, digests))).held
    assert by_blocks is not None
    assert by_blocks.tokens == {b.tree.cache_id: 50}
    assert a.tree.cache_id not in by_blocks.tokens


def test_the_time_to_load_an_adapter_is_told_for_adapters_alone() -> None:
    scheduler = make_scheduler([spec("a")], "hetlb", params=PolicyParams(adapter_load_s=0.75))
    scheduler.on_instance(ModelsLearned("a", ("m", "lora"), ("lora",)), 0.0)
    assert context(scheduler, request(1, model="lora")).adapter_load_s == 0.75
    assert context(scheduler, request(1)).adapter_load_s == 0.0


# --- capacity ---


def test_capacity_is_by_a_usual_request_until_the_first_and_by_the_mean_one_then() -> None:
    scheduler = fleet(b=2.0)
    placement = scheduler.placement
    a, b = scheduler.instances
    usual = {each.name: placement._usual.speed(each) for each in (a, b)}
    assert placement._usual.size == pytest.approx(PROMPT_WEIGHT * 512.0 + 256.0)
    assert placement.speeds("m", [a, b]) == usual
    assert (placement.capacity(a), placement.capacity(b)) == (usual["a"], usual["b"])
    assert usual["a"] > usual["b"] > 0.0
    sole(scheduler, request(1, prompt=4000, max_tokens=3))
    mean = scheduler.placement.demands["m"].mix
    assert placement.speeds("m", [a]) == {"a": mean.speed(a)}
    assert placement.capacity(b) == mean.speed(b) != usual["b"]


# --- the filter ---


def test_instances_that_are_kept_for_others_are_not_chosen() -> None:
    scheduler = make_scheduler([spec("a", kv=1000), spec("b", kv=5000)], "hetlb")
    placement, ready = scheduler.placement, scheduler.fleet.ready["m"]
    for ceiling, names in ((None, "ab"), (2, "ab"), (1, "a"), (0, "")):
        found = placement.choose(request(1), ready, 0.0, 50.0, ceiling=ceiling)
        chosen = [] if found is None else found.choices.instances
        assert "".join(each.name for each in chosen) == names


def test_restraints_go_with_the_instances_that_are_left() -> None:
    scheduler = make_scheduler([spec("a", kv=1000), spec("b", kv=5000), spec("c", kv=1000)], "hetlb")
    c = scheduler.instances[2]
    c.evidence.asked(10.0, 0.0)
    scheduler.fleet.reindex(0.0)
    ready = scheduler.fleet.ready["m"]
    found = scheduler.placement.choose(request(1), ready, 1.0, 50.0, ceiling=1)
    assert found is not None
    assert found.ctx.restraints is not None
    assert [each.name for each in found.choices.instances] == ["a", "c"]
    assert list(found.ctx.restraints) == ["c"]


def test_most_requests_go_to_all_without_a_look() -> None:
    scheduler = make_scheduler([spec("a", kv=1000), spec("b", kv=5000)], "hetlb")
    placement, ready = scheduler.placement, scheduler.fleet.ready["m"]

    def able(asked: Request) -> str:
        found = placement.able(asked, ready, 0.0)
        assert found.restraints is None
        return "".join(each.name for each in found.instances)

    assert placement.able(request(1, prompt=950), ready, 0.0) is ready.everyone
    assert placement.able(request(1, prompt=999, max_tokens=None), ready, 0.0) is ready.everyone
    assert able(request(1, prompt=951)) == "b"
    assert able(request(1, prompt=100, longest=951)) == "b"
    assert able(request(1, prompt=1000, max_tokens=None)) == "b", "one token of output is the least"
    assert able(request(1, subset=("a",))) == "a"
    assert able(request(1, subset=("b",))) == "b"
    scheduler.placement.retries.attempts[1].tried.append("a")
    assert able(request(1)) == "b"
    assert able(request(2)) == "ab"


def test_a_restraint_that_is_over_is_forgotten_at_the_next_request() -> None:
    scheduler = fleet()
    scheduler.instances[0].evidence.asked(10.0, 0.0)
    scheduler.fleet.reindex(0.0)
    assert sole(scheduler, request(1), 1.0).lease.instance == "b"
    assert scheduler.fleet.ready["m"].throttled
    sole(scheduler, request(2), 10.0)
    assert not scheduler.fleet.ready["m"].throttled


# --- what is booked ---


def test_a_dispatch_tells_the_policy_and_all_instances_in_their_places() -> None:
    scheduler = fleet("abc", "paper")
    scheduler.on_instance(AdminStateSet("b", AdminState.DRAIN), 0.0)
    command = sole(scheduler, request(7))
    assert (command.request_id, command.reason, command.lease.instance) == (7, "paper", "a")
    assert [(each.instance, each.eligible, each.reason) for each in command.candidates] == [
        ("a", True, ""),
        ("b", False, "draining"),
        ("c", True, ""),
    ]
    scheduler.set_policy("rr", 0.0)
    assert sole(scheduler, request(8)).reason == "rr"
    assert scheduler.placement.policy_name == "rr"


def test_what_a_request_took_of_a_cache_is_part_of_the_mean_request() -> None:
    """Of each sequence: 250 tokens beyond a prefix of 200 and half of that, which two share."""
    scheduler = fleet("a")
    asked = request(1, prompt=500, sequences=2, samples=2, prefix_keys=(("k", 200),))
    lease = sole(scheduler, asked).lease
    assert (lease.kv_prompt_tokens, lease.unread_tokens) == (300, 500)
    mix = scheduler.placement.demands["m"].mix
    assert (mix.booked, mix.prefill) == ((300 + 200) / 2, 500 / 2)
    sole(scheduler, request(2, prompt=500, prefix_keys=(("k", 200),)))
    assert (mix.booked, mix.prefill) == ((250 + 300) / 2, (250 + 300) / 2)


def test_in_doubt_a_request_is_a_trial_until_that_is_answered() -> None:
    scheduler = fleet(policy="rr")
    a = scheduler.instances[0]
    for _ in range(3):
        a.evidence.ended_badly(0, 0.0, "", "", 0.0)
    scheduler.fleet.account().judge(a, 0.0)
    scheduler.fleet.reindex(0.0)
    for number in range(2):
        assert sole(scheduler, request(number), 0.5).lease.instance == "b"
    assert sole(scheduler, request(2), 1.0).lease.instance == "a", "the pause is over"
    assert a.evidence.held(1.0)
    assert a.evidence.held(100.0), "until that one is answered"


def test_a_policy_that_remembers_is_told_of_what_was_booked_alone() -> None:
    scheduler = fleet(policy="rr")
    placement = scheduler.placement
    for _ in range(3):
        found = placement.choose(request(1), scheduler.fleet.ready["m"], 0.0, 50.0)
        assert found is not None
        assert found.instance.name == "a"
    assert dispatched([placement.book(found)]).instance == "a"
    assert sole(scheduler, request(2)).lease.instance == "b"


# --- explaining ---


def test_an_explanation_books_nothing_and_fills_in_the_terms_of_the_paper() -> None:
    scheduler = fleet("abc", "least-requests", c=2.0)
    scheduler.on_instance(AdminStateSet("a", AdminState.MAINT), 0.0)
    asked = request(1, prompt=400)
    candidates, chosen = explained(scheduler, asked, 100.0, 0.0)
    assert (chosen, scheduler.in_flight) == ("b", 0)
    assert [(each.instance, each.eligible, each.reason) for each in candidates] == [
        ("a", False, "in maintenance"),
        ("b", True, ""),
        ("c", True, ""),
    ]
    first, second, third = candidates
    assert (first.score, second.score) == (math.inf, 0.0)
    for each, slower in ((first, 1.0), (second, 1.0), (third, 2.0)):
        assert each.ideal_batch == 64
        assert each.processing_s == pytest.approx(processing_s(FAST.scaled(slower), 64, 400, 100.0))
        assert (each.kv_utilization, each.workload) == (0.0, each.processing_s)


def test_of_a_model_that_is_not_there_nothing_is_explained() -> None:
    scheduler = fleet()
    assert explained(scheduler, request(1, model="none"), 10.0, 0.0) == ([], None)
    for name in "ab":
        scheduler.on_instance(AdminStateSet(name, AdminState.DRAIN), 0.0)
    candidates, chosen = explained(scheduler, request(1), 10.0, 0.0)
    assert ([each.reason for each in candidates], chosen) == (["draining", "draining"], None)


def test_what_waits_is_part_of_an_explanation() -> None:
    """A slow instance would be done later than the fast one with all, unless that has much to do."""
    scheduler = fleet("ab", b=20.0)
    sole(scheduler, request(1))
    for size, later in ((0, True), (10**6, False)):
        if size:
            scheduler.queue.push(request(9, subset=("a",)), 0.0, size=size)
        candidates, chosen = explained(scheduler, request(2), 50.0, 5.0)
        assert ((candidates[1].terms or {})["finish_s"] > 0.0, chosen) == (later, "a")
