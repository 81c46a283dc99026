"""The default policy: room, cost, worth, and who in the queue suits a free instance."""

from __future__ import annotations

import ast
import heapq
import itertools
from pathlib import Path
from typing import Any, cast

import pytest
from helpers import FAST, MODEL, dispatched, make_scheduler, request, spec
from hypothesis import given
from hypothesis import strategies as st

import hetlb
from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.instance import DEFAULT_KV_CACHE_TOKENS
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.length_samples import OraclePredictor
from hetlb.balancer.core.objective import UNSTATED, ServiceClass
from hetlb.balancer.core.policies.hetlb import Hetlb
from hetlb.balancer.core.policies.score_terms import TERMS
from hetlb.balancer.core.predictor import PRIOR_OUTPUT_TOKENS, OnlinePredictor
from hetlb.balancer.core.types import Capacity, Dispatch, InstanceSpec, Lease, Outcome
from hetlb.cli.explain import explained
from hetlb.tools.sim.integrity import check_scheduler

#: As fast as `FAST` in decoding, fifty times as slow at reading.
SLOW_READER = LatencyModel(5e-3, 5e-2, 0.0, 1e-2, FAST.k5, FAST.k6, 0.0, FAST.k8)


class _Undocumented(ast.NodeTransformer):
    """Leaves docstrings and imports out."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node

    def visit_Import(self, node: ast.Import) -> None: ...
    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...


#: Functions of the core.
CORE = ("_decide", "best", "_hold")


def capacity(places: int, kv: int = 1_000_000) -> Capacity:
    return Capacity(kv_cache_tokens=kv, kv_tokens_per_request=kv, max_num_seqs=places)


def test_a_long_prompt_goes_where_it_is_read_fast() -> None:
    scheduler = make_scheduler([InstanceSpec("reads-slowly", MODEL, latency=SLOW_READER), spec("a")], "hetlb")
    assert dispatched(scheduler.on_arrival(request(1, prompt=5000), 0.0)).instance == "a"


@pytest.mark.parametrize("caches", [True, False])
def test_samples_of_a_prompt_are_read_once_where_prefixes_are_cached(caches: bool) -> None:
    stated = Capacity(kv_cache_tokens=1_000_000, max_num_seqs=64, enable_prefix_caching=caches)
    scheduler = make_scheduler([spec("a", capacity=stated)], "hetlb")
    [instance] = scheduler.instances
    asked = request(1, prompt=3000, sequences=8, samples=4)
    [candidate], _ = explained(scheduler, asked, 100.0, 0.0)
    read = 2 if caches else 8
    expected = instance.latency.first_token_s(3000, 0.0, 0.0, 0.0, 0.0, instance.token_budget, read)
    assert candidate.terms is not None
    assert candidate.terms["first_token_s"] == pytest.approx(expected)


def test_an_instance_that_is_surely_worse_is_not_foreseen_until_people_look() -> None:
    scheduler = make_scheduler([spec("a"), spec("b", slower=100.0)], "hetlb")
    ctx = scheduler.placement.context(request(1, prompt=1000), 50.0, 0, 0.0)
    policy = cast("Hetlb", scheduler.placement.policy)
    evaluation = policy.evaluate(ctx, scheduler.instances, True)
    assert [each.rated for each in evaluation.sights] == [True, False]
    assert all(each.rated for each in evaluation.ratings)


def test_an_idle_instance_is_better_than_one_that_reads_many_prompts() -> None:
    scheduler = make_scheduler([spec("a", kv=1_000_000), spec("b", slower=1.2, kv=1_000_000)], "hetlb")
    chosen = [dispatched(scheduler.on_arrival(request(i, prompt=4000), 0.0)).instance for i in range(2)]
    assert chosen == ["a", "b"]


def test_an_instance_gets_no_more_than_it_does_until_faster_ones_are_done_with_all() -> None:
    """Short answers, known to be: each is done in time on the slow one, all of them are not."""
    slower = LatencyModel(
        SLOW_READER.k1, SLOW_READER.k2, 0.0, SLOW_READER.k4, FAST.k5, 100 * FAST.k6, 0.0, FAST.k8
    )
    slow = InstanceSpec("slow", MODEL, latency=slower, capacity=capacity(256))
    lengths = {i: 400 if i % 2 else 2 for i in range(1000)}
    fleet = [spec("fast", capacity=capacity(64)), slow]
    scheduler = make_scheduler(fleet, "hetlb", predictor=OraclePredictor(lengths))
    placed = [
        command.lease.instance
        for i in lengths
        for command in scheduler.on_arrival(request(i, prompt=100, max_tokens=None), 0.0)
        if isinstance(command, Dispatch)
    ]
    mix = scheduler.placement.demands[MODEL].mix
    fast_s, slow_s = (mix.size / mix.speed(instance) for instance in scheduler.instances)
    assert 0 < placed.count("slow") * slow_s < len(lengths) * fast_s


def test_a_burst_does_not_fill_a_slow_instance_for_longer_than_the_fast_one_needs() -> None:
    """Requests come faster than the fast one does them: the slow one has slots for all, but not the speed.

    A third of the fast one's speed is taken to be left for what waits.
    """
    slow = InstanceSpec("slow", MODEL, latency=SLOW_READER, capacity=capacity(256))
    fleet = [spec("fast", capacity=capacity(64)), slow]
    scheduler = make_scheduler(fleet, "hetlb")
    placed = [
        command.lease.instance
        for i in range(300)
        for command in scheduler.on_arrival(request(i, prompt=1500), 0.1 * i)
        if isinstance(command, Dispatch)
    ]
    mix = scheduler.placement.demands[MODEL].mix
    fast_s, slow_s = (mix.size / mix.speed(instance) for instance in scheduler.instances)
    assert 0 < placed.count("slow") * slow_s < 3 * 300 * fast_s


def test_answers_at_once_of_unknown_lengths_have_room_for_half_a_long_one_until_some_have_ended() -> None:
    """Known lengths of the same mean are booked half-grown."""
    booked = {}
    for predictor in (OnlinePredictor(), OraclePredictor(dict.fromkeys(range(300), 256))):
        scheduler = make_scheduler([spec("a", capacity=capacity(256, 50_000))], "hetlb", predictor=predictor)
        for i in range(300):
            scheduler.on_arrival(request(i, prompt=100, max_tokens=None), 0.0)
        booked[type(predictor)] = scheduler.instances[0].sequences
    assert booked[OnlinePredictor] == int(50_000 / (100 + 4 * PRIOR_OUTPUT_TOKENS / 2))
    assert booked[OraclePredictor] > 1.5 * booked[OnlinePredictor]


def test_answers_that_run_on_make_a_long_one_longer_until_as_many_have_ended() -> None:
    scheduler = make_scheduler([spec("a", capacity=capacity(256))], "hetlb")
    leases = [
        dispatched(scheduler.on_arrival(request(i, prompt=100, max_tokens=None), 0.0)) for i in range(100)
    ]
    [instance] = scheduler.instances

    def long(now: float, max_tokens: int | None = None) -> float:
        asked = request(1000, prompt=100, max_tokens=max_tokens)
        predicted = scheduler.predictor.predict(asked)
        return scheduler.placement.context(asked, predicted, 0, now).long_output

    assert long(0.0) == 4 * PRIOR_OUTPUT_TOKENS
    scheduler.on_lease_ended(leases[0], Outcome.CLIENT_GONE, 60.0)
    age = instance.steps.grown_tokens / instance.sequences
    assert age > 1000
    assert long(60.0) == pytest.approx(4 * PRIOR_OUTPUT_TOKENS * (1 + age / PRIOR_OUTPUT_TOKENS))
    assert long(60.0, max_tokens=2000) == 2000
    for lease in leases[1:51]:
        lease.output_tokens = 1000
        scheduler.on_lease_ended(lease, Outcome.OK, 60.0)
    assert long(60.0) == scheduler.predictor.long(request(1000, max_tokens=None))


def test_terms_add_up_to_something_one_can_read() -> None:
    scheduler = make_scheduler([spec("a"), spec("b", slower=2.0)], "hetlb")
    command = scheduler.on_arrival(request(1), 0.0)[0]
    assert isinstance(command, Dispatch)
    a, b = command.candidates
    assert a.terms is not None
    assert b.terms is not None
    assert list(a.terms) == [term.name for term in TERMS]
    assert 0 < a.terms["first_token_s"] < a.terms["own_s"]
    assert b.terms["own_s"] > a.terms["own_s"]
    assert a.terms["others_s"] == 0.0


@given(
    slower=st.sampled_from((1.0, 3.7)),
    prompt=st.integers(1, 9000),
    cached=st.integers(0, 9000),
    sequences=st.integers(1, 40),
)
def test_the_first_token_on_an_idle_instance_is_the_latency_model_s(
    slower: float, prompt: int, cached: int, sequences: int
) -> None:
    scheduler = make_scheduler([spec("a", slower=slower, kv=1_000_000)], "hetlb")
    [instance] = scheduler.instances
    keys = (("x", cached),) if 0 < cached <= prompt else ()
    if keys:
        earlier = dispatched(scheduler.on_arrival(request(1, prompt=cached, prefix_keys=keys), 0.0))
        scheduler.on_first_token(earlier, 1.0)
        scheduler.on_lease_ended(earlier, Outcome.CLIENT_GONE, 1.0)
    asked = request(2, prompt=prompt, sequences=sequences, prefix_keys=keys)
    [candidate], _ = explained(scheduler, asked, 100.0, 2.0)
    held = min(cached, prompt - 1) if keys else 0
    expected = instance.latency.first_token_s(prompt, held, 0.0, 0.0, 0.0, instance.token_budget, sequences)
    assert candidate.terms is not None
    assert candidate.terms["first_token_s"] == pytest.approx(expected, rel=1e-9)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 6000), st.integers(1, 600), st.integers(1, 20), st.sampled_from(("", "x", "y"))
        ),
        min_size=1,
        max_size=40,
    ),
    st.booleans(),
)
def test_terms_with_their_weights_add_up_to_the_score(
    asked: list[tuple[int, int, int, str]], busy: bool
) -> None:
    fleet = [spec("a", kv=200_000), spec("b", slower=2.0, kv=200_000), spec("c", kv=200_000)]
    scheduler = make_scheduler(fleet, "hetlb")
    for number, (prompt, output, sequences, key) in enumerate(asked):
        keys = ((key, prompt),) if key else ()
        commands = scheduler.on_arrival(
            request(number, prompt=prompt, max_tokens=output, sequences=sequences, prefix_keys=keys), 0.0
        )
        for command in commands:
            if isinstance(command, Dispatch):
                if busy:
                    scheduler.on_refused(command.lease, 503, 30.0, 0.0)
                for each in command.candidates:
                    assert each.terms is not None
                    assert each.weights is not None
                    total = sum(each.weights[name] * seconds for name, seconds in each.terms.items())
                    assert each.score == pytest.approx(total, rel=1e-9, abs=1e-9)


def test_terms_are_fixed_at_the_moment_of_the_decision() -> None:
    """They are looked at later, when the instance has changed."""
    scheduler = make_scheduler([spec("a", kv=10_000)], "hetlb")
    command = scheduler.on_arrival(request(1, prompt=1000), 0.0)[0]
    assert isinstance(command, Dispatch)
    [candidate] = command.candidates
    assert candidate.kv_utilization == 0.0


@given(
    st.lists(
        st.tuples(st.integers(1, 4000), st.integers(1, 500), st.integers(0, 3)), min_size=1, max_size=80
    ),
    st.integers(1, 5),
)
def test_no_request_waits_for_ever_and_all_is_given_back(
    asked: list[tuple[int, int, int]], instances: int
) -> None:
    fleet = [spec(f"i{i}", slower=1.0 + 3 * i, capacity=capacity(2 + i, 20_000)) for i in range(instances)]
    scheduler = make_scheduler(fleet, "hetlb")
    running: list[Lease] = []
    seen: set[int] = set()

    def take(commands: list[object]) -> None:
        for command in commands:
            assert isinstance(command, Dispatch)
            assert command.request_id not in seen
            seen.add(command.request_id)
            running.append(command.lease)

    now = 0.0
    for i, (prompt, output, gap) in enumerate(asked):
        now += gap
        take(scheduler.on_arrival(request(i, prompt=prompt, max_tokens=output), now))  # type: ignore[arg-type]
    for _ in range(len(asked)):
        if not running:
            break
        lease = running.pop(0)
        now += 0.5
        take(scheduler.on_first_token(lease, now))  # type: ignore[arg-type]
        lease.output_tokens = lease.request.max_tokens or 1
        now += 0.5
        take(scheduler.on_lease_ended(lease, Outcome.OK, now))  # type: ignore[arg-type]
        check_scheduler(scheduler)
    assert seen == set(range(len(asked)))
    assert len(scheduler.queue) == 0
    assert all(instance.sequences == 0 for instance in scheduler.instances)


# --- no profile ---


def placed(commands: list[Any]) -> list[Lease]:
    return [command.lease for command in commands if isinstance(command, Dispatch)]


def test_a_turn_waits_for_a_slot_where_its_conversation_is_held() -> None:
    """The other one would read 3,000 tokens again, which all that run there would wait for."""
    scheduler = make_scheduler([spec(name, capacity=capacity(16)) for name in "ab"], "hetlb")
    talk = (("talk", 3000),)
    prompts = [request(0, prompt=50), request(1, prompt=3000, prefix_keys=talk)]
    prompts += [request(i, prompt=50) for i in range(2, 32)]
    leases: list[Lease] = []
    for each in prompts:
        leases += placed(scheduler.on_arrival(each, 0.0))
        scheduler.on_first_token(leases[-1], 0.0)
    a, b = ([each for each in leases if each.instance == name] for name in "ab")
    assert len(a) == len(b) == 16
    assert leases[1].instance == "b"
    scheduler.on_lease_ended(a[0], Outcome.OK, 2.0)
    assert not placed(scheduler.on_arrival(request(50, prompt=3100, prefix_keys=talk), 2.0))
    [turn] = placed(scheduler.on_lease_ended(b[1], Outcome.OK, 2.1))
    assert (turn.request.id, turn.instance) == (request(50).id, "b")
    assert dispatched(scheduler.on_arrival(request(51, prompt=3100), 2.1)).instance == "a"


def test_turns_at_once_join_their_conversation_though_more_is_to_be_read_there() -> None:
    """As many again as wait to be read would wait for what the other one reads twice.

    They are no more than one engine's part of all requests: 20 of 40.
    """
    scheduler = make_scheduler([spec(name, capacity=capacity(64)) for name in "ab"], "hetlb")
    talk = (("talk", 3000),)
    first = dispatched(scheduler.on_arrival(request(0, prompt=3000, prefix_keys=talk), 0.0))
    for i in range(1, 20):
        scheduler.on_arrival(request(i, prompt=500), 0.0)
    turns = [request(i, prompt=3400, prefix_keys=talk) for i in range(20, 40)]
    found = [dispatched(scheduler.on_arrival(each, 0.0)).instance for each in turns]
    assert found == [first.instance] * 20


def test_a_prompt_that_all_begin_with_is_read_by_a_slower_server_too() -> None:
    """Its first request there waits for all of it: it is charged the share of the others that will use it."""
    fleet = [spec("a", capacity=capacity(256)), spec("b", slower=3.0, capacity=capacity(256))]
    scheduler = make_scheduler(fleet, "hetlb")
    all_of_them = [request(i, prompt=8200, prefix_keys=(("system", 8000),)) for i in range(200)]
    leases = [dispatched(scheduler.on_arrival(each, 0.05 * i)) for i, each in enumerate(all_of_them)]
    there = [lease for lease in leases if lease.instance == "b"]
    assert len(there) >= 200 / 8
    slow = scheduler.instances[1]
    assert there[0].forecast_first_s >= slow.latency.prefill_s(8200), "the forecast counts all of it"


def test_in_a_burst_long_prompts_go_to_the_fast_one_and_short_ones_beside_it() -> None:
    """As many again as wait are delayed by each prompt that is read: more by a long one on the slow one."""
    fleet = [spec("a", capacity=capacity(256)), spec("b", slower=2.0, capacity=capacity(256))]
    scheduler = make_scheduler(fleet, "hetlb")
    prompts = [request(i, prompt=1000 if i % 4 == 0 else 50) for i in range(100)]
    leases = [dispatched(scheduler.on_arrival(each, 0.0)) for each in prompts]
    slow = [lease.request.prompt_tokens for lease in leases if lease.instance == "b"]
    assert slow.count(50) > 100 / 4
    assert slow.count(1000) < slow.count(50) / 6


@pytest.mark.parametrize("shows", ["a first token", "an answer", "time"])
def test_without_a_profile_each_first_token_lets_three_more_requests_run(shows: str) -> None:
    unknown = InstanceSpec("a", MODEL, capacity=capacity(64))
    scheduler = make_scheduler([unknown], "hetlb")
    leases = [
        lease
        for i in range(20)
        for lease in placed(scheduler.on_arrival(request(i, streamed=shows == "a first token"), 0.0))
    ]
    assert len(leases) == 3
    if shows == "a first token":
        assert len(placed(scheduler.on_first_token(leases[0], 0.5))) == 3
        assert len(placed(scheduler.on_first_token(leases[1], 0.75))) == 3
    elif shows == "an answer":
        leases[0].output_tokens = 1
        assert len(placed(scheduler.on_first_token(leases[0], 0.5))) == 3
        assert len(placed(scheduler.on_lease_ended(leases[0], Outcome.OK, 0.5))) == 1
    else:
        assert len(placed(scheduler.on_tick(5.0))) == 2
        assert len(placed(scheduler.on_tick(10.0))) == 1


def test_a_burst_without_profiles_goes_mostly_to_the_fast_instance() -> None:
    """Of 160 at once a server ten times as slow gets few more than it has begun when its speed shows."""
    engines = {name: InstanceSpec(name, MODEL, capacity=capacity(256)) for name in ("fast", "slow")}
    scheduler = make_scheduler(engines.values(), "hetlb")
    leases = [
        lease
        for i in range(160)
        for lease in placed(scheduler.on_arrival(request(i, streamed=True, max_tokens=100), 0.0))
    ]
    assert sorted(lease.instance for lease in leases) == ["fast"] * 3 + ["slow"] * 3
    first_s = {"fast": 0.1, "slow": 1.0}
    due = [(first_s[lease.instance], lease.id, lease) for lease in leases]
    found = [lease.instance for lease in leases]
    heapq.heapify(due)
    while due:
        now, _, lease = heapq.heappop(due)
        for each in placed(scheduler.on_first_token(lease, now)):
            found.append(each.instance)
            heapq.heappush(due, (now + first_s[each.instance], each.id, each))
    assert len(found) == 160
    assert found.count("slow") < 0.2 * len(found)


@pytest.mark.parametrize("order", list(itertools.permutations((1.0, 2.0, 3.0, 8.0))))
def test_a_lone_user_finds_the_fastest_of_four_without_profiles_at_once(order: tuple[float, ...]) -> None:
    """One request a minute, so that little is known of each. Short and long answers take turns."""
    slower = {f"e{i}": each for i, each in enumerate(order)}
    fleet = [InstanceSpec(name, MODEL, capacity=capacity(256)) for name in slower]
    scheduler = make_scheduler(fleet, "hetlb")
    got = []
    for i in range(30):
        now, tokens = 60.0 * i, (8, 300)[i % 2]
        lease = dispatched(scheduler.on_arrival(request(i, prompt=500, streamed=True, max_tokens=400), now))
        got.append(lease.instance)
        engine = FAST.scaled(slower[lease.instance])
        first_s = engine.first_token_s(500.0, 0.0, 0.0, 0.0, 0.0, 2048.0)
        scheduler.on_first_token(lease, now + first_s)
        lease.output_tokens = tokens
        scheduler.on_lease_ended(lease, Outcome.OK, now + first_s + engine.answer_s(500.0, tokens - 1.0))
    fastest = min(slower, key=lambda name: slower[name])
    assert fastest in got[:4]
    assert set(got[4:]) == {fastest}


@pytest.mark.parametrize("reading", [2.0, 15.0])
def test_leases_pay_for_a_prefix_elsewhere_only_if_they_run_while_it_is_read(reading: float) -> None:
    """An engine that takes twelve seconds for it, and two for an answer, reads it for none of forty."""
    slow = FAST.with_factors(reading, 1.0, 1.5, 0.0, 0.0, 0.0)
    fleet = [spec("fast", kv=10**6), spec("slow", latency=slow, kv=10**6)]
    scheduler = make_scheduler(fleet, "hetlb")
    asked = [request(i, prompt=8100, prefix_keys=(("system", 8000),), streamed=True) for i in range(40)]
    leases = [dispatched(scheduler.on_arrival(each, 0.05 * each.id)) for each in asked]
    assert any(lease.instance == "slow" for lease in leases) is (reading < 10.0)


def test_an_engine_that_tells_nothing_is_not_full_by_an_assumed_cache() -> None:
    """An engine with a page, and no size there, is."""
    sent, passes = [], Capacity(max_num_batched_tokens=65_536)
    for told in (False, True):
        scheduler = make_scheduler([InstanceSpec("a", MODEL, latency=FAST, capacity=passes)], "hetlb")
        if told:
            scheduler.on_scrape("a", EngineSample(running=0, waiting=0), 0.0)
        commands = [scheduler.on_arrival(request(i, prompt=2000), 0.0) for i in range(200)]
        sent.append(sum(len(placed(each)) for each in commands))
    assert sent[0] == 200
    assert sent[1] < DEFAULT_KV_CACHE_TOKENS / 2000


@pytest.mark.parametrize(
    ("targets", "room"),
    [
        ((ServiceClass("never", ttft_s=0.001),), True),
        ((ServiceClass("never", tpot_s=1e-6),), True),
        ((ServiceClass("never", e2e_s=0.001), ServiceClass("quick", ttft_s=0.4)), False),
        ((ServiceClass("quick", ttft_s=0.4),), False),
    ],
)
def test_targets_that_an_idle_instance_misses_keep_nothing_free(
    targets: tuple[ServiceClass, ...], room: bool
) -> None:
    """A target of others that can be met keeps its room all the same."""
    scheduler = make_scheduler([spec("a", kv=1_000_000)], "hetlb")
    for number in range(20):
        asked = request(number, prompt=1000, service=targets[number % len(targets)], streamed=True)
        scheduler.on_arrival(asked, 0.1 * number)
    night = ServiceClass("night", background=True)
    commands = scheduler.on_arrival(request(99, prompt=8000, service=night), 2.0)
    assert any(isinstance(command, Dispatch) for command in commands) == room


@pytest.mark.parametrize(
    ("service", "room"), [(ServiceClass("night", background=True), False), (UNSTATED, True)]
)
def test_only_background_and_looser_targets_leave_room(service: ServiceClass, room: bool) -> None:
    """A request without a class is no background: it could wait for good."""
    scheduler = make_scheduler([spec("a", kv=1_000_000)], "hetlb")
    quick = ServiceClass("quick", ttft_s=0.4)
    for number in range(20):
        scheduler.on_arrival(request(number, prompt=1000, service=quick, streamed=True), 0.1 * number)
    commands = scheduler.on_arrival(request(99, prompt=8000, service=service), 2.0)
    assert any(isinstance(command, Dispatch) for command in commands) == room


def test_errors_seen_beside_background_leave_a_class_its_room() -> None:
    """An idle instance meets the targets all the same, by its latency model."""
    scheduler = make_scheduler([spec("a", kv=1_000_000)], "hetlb")
    [instance] = scheduler.instances
    for _ in range(100):
        instance.errors.step.add(0.01, 1.0)
    quick = ServiceClass("quick", ttft_s=10.0, tpot_s=0.2)
    for number in range(20):
        asked = request(number, prompt=1000, service=quick, streamed=True)
        scheduler.on_arrival(asked, 0.1 * number)
    night = ServiceClass("night", background=True)
    commands = scheduler.on_arrival(request(99, prompt=8000, service=night), 2.0)
    assert not any(isinstance(command, Dispatch) for command in commands)


def test_answers_of_one_token_and_lax_targets_leave_room() -> None:
    """Prompts alone use the instance: at most one utilization of them is served."""
    scheduler = make_scheduler([spec("a", kv=1_000_000)], "hetlb")
    patient = ServiceClass("patient", ttft_s=1e6, attainment=0.9)
    for number in range(20):
        asked = request(number, prompt=1000, max_tokens=1, service=patient, streamed=True)
        scheduler.on_arrival(asked, 10.0 * number)
    night = ServiceClass("night", background=True)
    commands = scheduler.on_arrival(request(99, prompt=8000, service=night), 200.0)
    assert any(isinstance(command, Dispatch) for command in commands)


def test_requests_without_an_answer_have_targets_that_hinder_no_other() -> None:
    scheduler = make_scheduler([spec("a", kv=1_000_000)], "hetlb")
    quick, night = ServiceClass("quick", ttft_s=1.0, tpot_s=0.05), ServiceClass("night", background=True)
    for number in range(20):
        scheduler.on_arrival(request(number, service=quick, generates=False), 0.1 * number)
    assert dispatched(scheduler.on_arrival(request(99, service=night), 2.0)).instance == "a"


def test_requests_with_targets_that_nothing_is_known_of_hinder_no_request() -> None:
    """They run for another model of the instance, or since before this process: none of them arrived here."""
    scheduler = make_scheduler([spec("a")], "hetlb")
    quick = ServiceClass("quick", ttft_s=1.0, tpot_s=0.05)
    dispatched(scheduler.on_arrival(request(1, service=quick), 0.0))
    [instance] = scheduler.instances
    assert instance.stated_sequences == 1
    scheduler.placement.demands.clear()
    assert dispatched(scheduler.on_arrival(request(2), 0.1)).instance == "a"


def test_the_core_of_the_policy_is_one_screen() -> None:
    """Room, score, hold and pick have 40 lines, and the policy 450 with the steps of its features."""
    folder = Path(hetlb.__file__).parent / "balancer" / "core" / "policies"
    text = (folder / "hetlb.py").read_text()
    rows, core = text.splitlines(), 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name in CORE:
            own = rows[node.body[1].lineno - 1 : node.end_lineno]  # behind its docstring
            core += sum(1 for line in own if line.strip() and not line.strip().startswith("#"))
    assert 0 < core <= 40
    total = 0
    for name in ("hetlb", "sight", "score_terms", "rules"):
        tree = ast.parse((folder / f"{name}.py").read_text())
        total += ast.unparse(_Undocumented().visit(tree)).count("\n")
    assert total <= 450


@pytest.mark.parametrize("done", [0.1, 0.5, 0.9])
def test_a_prompt_waits_for_what_is_left_of_the_one_that_is_read(done: float) -> None:
    scheduler = make_scheduler([spec("a", capacity=capacity(64))], "hetlb")
    [instance] = scheduler.instances
    latency = instance.latency
    scheduler.on_arrival(request(1, prompt=1500, streamed=True), 0.0)
    whole_s, own_s = latency.prefill_s(1500.0), latency.prefill_s(200.0)
    second = dispatched(scheduler.on_arrival(request(2, prompt=200), done * whole_s))
    assert second.forecast_first_s == pytest.approx((1.0 - done) * whole_s + own_s, abs=0.01)


@pytest.mark.parametrize(("known", "more"), [({}, 1.0), ({"latency": None}, 19.0)])
def test_a_prompt_that_is_late_needs_as_much_again_without_bound_where_the_speed_is_a_guess(
    known: dict[str, Any], more: float
) -> None:
    scheduler = make_scheduler([spec("a", capacity=capacity(64), **known)], "hetlb")
    [instance] = scheduler.instances
    latency = instance.latency
    scheduler.on_arrival(request(1, prompt=1500, streamed=True), 0.0)
    whole_s, own_s = latency.prefill_s(1500.0), latency.prefill_s(200.0)
    second = dispatched(scheduler.on_arrival(request(2, prompt=200), 20.0 * whole_s))
    assert second.forecast_first_s == pytest.approx(more * whole_s + own_s, rel=0.05, abs=0.02)
