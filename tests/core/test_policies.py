"""Each policy chooses as its name says, ties go to the first in file order, scores are hand-computable."""

import math
import random
from typing import cast

import pytest
from helpers import FAST, dispatched, make_scheduler, request, spec

from hetlb.balancer.core.demand import Demand
from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.length_samples import OraclePredictor
from hetlb.balancer.core.policies.base import PlannedType, PolicyParams
from hetlb.balancer.core.policies.baselines import (
    COMBINE_FORMS,
    DEFAULT_RTT_S,
    PeakEwma,
    PeakEwmaChoice,
    PrefixMatch,
    kv_used_tokens,
)
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.policies.sight import SchedulingContext
from hetlb.balancer.core.predictor import make_predictor
from hetlb.balancer.core.types import Capacity, Dispatch, InstanceSpec, Lease, Outcome, Request
from hetlb.cli.explain import explained
from hetlb.tools.sim.integrity import check_scheduler

COMBINE_BY_HAND = {
    "power": lambda t, u, theta: t * theta**u,
    "exp": lambda t, u, theta: t * math.exp(theta * u),
    "linear": lambda t, u, theta: t * (1 + theta * u),
    "sum": lambda t, u, theta: t + theta * u,
}


def shares(policy: str, count: int, *specs: object, seed: int = 0) -> list[str]:
    scheduler = make_scheduler(specs, policy, seed=seed)  # type: ignore[arg-type]
    return [dispatched(scheduler.on_arrival(request(i), 0.0)).instance for i in range(count)]


def test_the_contract_s_names_are_all_there() -> None:
    assert set(POLICIES) == {
        "rr", "wrr", "random", "least-requests", "p2c", "least-kv", "peak-ewma", "single",
        "prefix", "session", "paper", "paper-memory", "lmetric", "lmetric-speed", "planned", "hetlb",
    }  # fmt: skip


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"random"}))
def test_ties_go_to_the_first_in_file_order(policy: str) -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], policy)
    assert dispatched(scheduler.on_arrival(request(1), 0.0)).instance == "a"


def test_round_robin_takes_turns() -> None:
    assert shares("rr", 6, spec("a"), spec("b"), spec("c")) == ["a", "b", "c", "a", "b", "c"]


def test_weighted_round_robin_is_interleaved() -> None:
    # nginx's own example of the smooth form: weights 5, 1, 1.
    chosen = shares("wrr", 7, spec("a", weight=5), spec("b"), spec("c"))
    assert "".join(chosen) == "aabacaa"


def test_random_reaches_everyone_and_is_seeded() -> None:
    chosen = shares("random", 300, spec("a"), spec("b"), spec("c"), seed=1)
    assert all(chosen.count(name) > 60 for name in "abc")
    assert chosen == shares("random", 300, spec("a"), spec("b"), spec("c"), seed=1)


def test_least_requests_counts_requests_in_flight() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "least-requests")
    first = dispatched(scheduler.on_arrival(request(1), 0.0))
    assert dispatched(scheduler.on_arrival(request(2), 0.0)).instance == "b"
    scheduler.on_lease_ended(first, Outcome.OK, 1.0)
    assert dispatched(scheduler.on_arrival(request(3), 1.0)).instance == "a"


def test_two_choices_never_take_the_worst() -> None:
    scheduler = make_scheduler([spec("a"), spec("b"), spec("c")], "p2c")
    busy = [dispatched(scheduler.on_arrival(request(i), 0.0)) for i in range(60)]
    counts = [instance.in_flight for instance in scheduler.instances]
    assert max(counts) - min(counts) <= 4
    assert len(busy) == 60


def test_least_kv_takes_the_most_free_tokens_not_the_lowest_percentage() -> None:
    scheduler = make_scheduler([spec("small", kv=10_000), spec("large", kv=100_000)], "least-kv")
    # 50 % of the large cache is still more free tokens than the whole small one.
    scheduler.on_scrape("large", EngineSample(kv_usage=0.5), 0.0)
    assert dispatched(scheduler.on_arrival(request(1), 0.0)).instance == "large"
    scheduler.on_scrape("large", EngineSample(kv_usage=0.95), 0.0)
    assert dispatched(scheduler.on_arrival(request(2), 0.0)).instance == "small"


def test_a_stale_or_lower_report_never_undercuts_the_ledger() -> None:
    scheduler = make_scheduler([spec("a", kv=10_000)], "least-kv")
    lease = dispatched(scheduler.on_arrival(request(1, prompt=4000), 0.0))
    instance = scheduler.instances[0]
    scheduler.on_scrape("a", EngineSample(kv_usage=0.0), 0.0)
    assert kv_used_tokens(instance, 0.0) == lease.kv_tokens
    scheduler.on_scrape("a", EngineSample(kv_usage=0.9), 0.0)
    assert kv_used_tokens(instance, 4.0) == pytest.approx(9000)
    assert kv_used_tokens(instance, 6.0) == lease.kv_tokens


def test_single_uses_one_and_fails_over() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "single")
    first = dispatched(scheduler.on_arrival(request(1), 0.0))
    second = dispatched(scheduler.on_arrival(request(2), 0.0))
    assert (first.instance, second.instance) == ("a", "a")
    commands = scheduler.on_lease_ended(first, Outcome.CONNECT_FAILED, 0.1)
    assert dispatched(commands).instance == "b"


def test_peak_ewma_jumps_up_at_once_and_decays_slowly() -> None:
    estimate = PeakEwma(now=0.0)
    assert estimate.estimate_s(0.0) == pytest.approx(0.030)
    estimate.observe(2.0, 0.0)
    assert estimate.estimate_s(0.0) == pytest.approx(2.0)
    assert estimate.estimate_s(10.0) == pytest.approx(2.0 / math.e)
    estimate.observe(1.0, 10.0)
    keep = math.exp(-1)
    assert estimate.estimate_s(10.0) == pytest.approx(2.0 * keep + 1.0 * (1 - keep))


def test_peak_ewma_avoids_the_slow_one() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "peak-ewma")
    slow = dispatched(scheduler.on_arrival(request(1), 1.0))
    scheduler.on_first_token(slow, 5.0)
    scheduler.on_lease_ended(slow, Outcome.OK, 5.0)
    assert slow.instance == "a"
    policy = cast("PeakEwmaChoice", scheduler.placement.policy)
    first = [policy.first_byte_s(each, 5.0) for each in scheduler.instances]
    assert first == [4.0, DEFAULT_RTT_S], "it counts from the dispatch"
    chosen = [dispatched(scheduler.on_arrival(request(i), 5.0)).instance for i in range(2, 12)]
    assert chosen == ["b"] * 10


@pytest.mark.parametrize("combine", sorted(COMBINE_FORMS))
@pytest.mark.parametrize("theta", [2.0, 0.5])
@pytest.mark.parametrize("sequences", [1, 3])
def test_paper_scores_by_hand(combine: str, theta: float, sequences: int) -> None:
    lengths = {1: 137, 2: 64, 3: 200}
    scheduler = make_scheduler(
        [spec("a", kv=69_000), spec("b", slower=3.0, kv=20_000)],
        "paper",
        predictor=make_predictor("oracle", rng=random.Random(0), oracle=lengths),
        params=PolicyParams(theta=theta, combine=combine),
    )
    work = {"a": 0, "b": 0}
    kv = {"a": 0, "b": 0}
    limits = {"a": 69_000, "b": 20_000}
    slower = {"a": 1.0, "b": 3.0}
    for i, output in lengths.items():
        expected = {}
        for name in work:
            batch = min(64, max(1, math.floor(limits[name] / (300 + output))))
            k = FAST.scaled(slower[name])
            prefill = k.k1 * batch * 300 + k.k2 * batch + k.k3 * 300 + k.k4
            decode = sum(
                k.k5 * batch * (300 + j) + k.k6 * batch + k.k7 * (300 + j) + k.k8
                for j in range(1, output + 1)
            )
            t = (prefill + decode) / batch
            w = COMBINE_BY_HAND[combine](t, kv[name] / limits[name], theta) * sequences
            expected[name] = (work[name] / 1e9 + w, w)
        commands = scheduler.on_arrival(request(i, prompt=300, max_tokens=None, sequences=sequences), 0.0)
        lease = dispatched(commands)
        candidates = commands[0].candidates  # type: ignore[union-attr]
        for candidate in candidates:
            assert candidate.score == pytest.approx(expected[candidate.instance][0], rel=1e-9)
            assert candidate.workload == pytest.approx(expected[candidate.instance][1], rel=1e-9)
        best = min(work, key=lambda name: expected[name][0])
        assert lease.instance == best
        assert lease.work_ns == round(expected[best][1] * 1e9)
        work[best] += lease.work_ns
        kv[best] += sequences * (300 + output)
    by_name = {instance.name: instance for instance in scheduler.instances}
    assert {name: instance.kv_tokens for name, instance in by_name.items()} == kv


def test_hetlb_binds_late_and_in_order() -> None:
    scheduler = make_scheduler([spec("a", kv=100_000), spec("b", kv=100_000)], "hetlb")
    leases: list[Lease] = []
    for i in range(300):
        leases += [c.lease for c in scheduler.on_arrival(request(i), 0.0) if isinstance(c, Dispatch)]
    assert [instance.sequences for instance in scheduler.instances] == [64, 64]
    assert len(scheduler.queue) == 300 - 128
    commands = scheduler.on_lease_ended(leases[-1], Outcome.OK, 1.0)
    bound = dispatched(commands)
    assert (bound.request.id, bound.instance) == (128, leases[-1].instance)


def test_hetlb_passes_none_over_in_favour_of_its_equal() -> None:
    room = Capacity(kv_cache_tokens=100_000, kv_tokens_per_request=10_000, max_num_seqs=8)
    slow = [spec(name, capacity=room, slower=6.0) for name in ("slow-0", "slow-1")]
    scheduler, chosen = make_scheduler([spec("fast", capacity=room), *slow], "hetlb"), []
    for i in range(18):
        commands = scheduler.on_arrival(request(i), 0.1 * i)
        chosen += [each.lease.instance for each in commands if isinstance(each, Dispatch)]
    assert [chosen.count(name) for name in ("fast", "slow-0", "slow-1")] == [8, 5, 4]


def test_hetlb_waits_for_a_full_instance_only_where_its_score_is_better_with_the_wait() -> None:
    """With requests still coming: whole answers are sooner for the wait, first tokens are not."""
    room = Capacity(kv_cache_tokens=100_000, kv_tokens_per_request=10_000, max_num_seqs=8)
    fleet = [spec("fast", capacity=room), spec("slow", capacity=room, slower=6.0)]
    used = {}
    for weight in (0.0, 20.0):
        params = PolicyParams(weights=(("first_token_s", weight),))
        scheduler, chosen = make_scheduler(fleet, "hetlb", params=params), []
        for i in range(30):
            commands = scheduler.on_arrival(request(i), 0.5 * i)
            chosen += [each.lease.instance for each in commands if isinstance(each, Dispatch)]
        used[weight] = (chosen.count("fast"), chosen.count("slow"))
    assert used == {0.0: (8, 0), 20.0: (8, 8)}


def test_hetlb_leaves_memory_for_answers_that_get_longer_than_the_mean() -> None:
    """Half-grown, 19 of them would fill the KV cache exactly: any two that are long would evict a third."""
    room = Capacity(kv_cache_tokens=1900, kv_tokens_per_request=1900, max_num_seqs=256)
    scheduler = make_scheduler(
        [spec("a", capacity=room)], "hetlb", predictor=OraclePredictor(dict.fromkeys(range(40), 100))
    )
    for i in range(40):
        scheduler.on_arrival(request(i, prompt=50), 0.0)
    [instance] = scheduler.instances
    # Of 17 sequences one standard deviation is 0.25 x 100 x 17 ** 0.5 = 103 tokens.
    assert instance.sequences == 17


def test_hetlb_uses_a_slow_instance_sooner_where_what_keeps_coming_takes_the_fast_one() -> None:
    """The same queue lasts longer, and delays more requests, the less speed is left for it."""
    room = Capacity(kv_cache_tokens=100_000, kv_tokens_per_request=10_000, max_num_seqs=8)
    fleet = [spec("fast", capacity=room), spec("slow", capacity=room, slower=100.0)]
    waiting = {}
    for gap_s in (0.3, 0.03):
        scheduler, running = make_scheduler(fleet, "hetlb"), []
        for i in range(1000):  # a stream that the fast one serves alone
            running.append(dispatched(scheduler.on_arrival(request(i, max_tokens=400), gap_s * i)))
            scheduler.on_first_token(running[-1], gap_s * i + 0.01)
            if len(running) > 1:
                lease = running.pop(0)
                lease.output_tokens = 300
                scheduler.on_lease_ended(lease, Outcome.OK, gap_s * i + 0.02)
        held, commands = 0, []
        while not any(isinstance(each, Dispatch) and each.lease.instance == "slow" for each in commands):
            i += 1
            commands = scheduler.on_arrival(request(i, max_tokens=400), gap_s * 1000)
            held += not commands
        waiting[gap_s] = held
    # The answers are shorter than forecast: five in a row show the speed of the fast one.
    assert (waiting[0.3], waiting[0.03]) == (11, 9)


def test_hetlb_waits_for_memory_but_never_starves_a_large_request() -> None:
    scheduler = make_scheduler([spec("a", kv=10_000)], "hetlb")
    large = dispatched(scheduler.on_arrival(request(1, prompt=9500, max_tokens=400), 0.0))
    assert scheduler.on_arrival(request(2, prompt=1000), 0.0) == []
    assert dispatched(scheduler.on_lease_ended(large, Outcome.OK, 1.0)).request.id == 2


def test_hetlb_is_not_drawn_to_much_memory() -> None:
    scheduler = make_scheduler(
        [spec("big-and-slow", kv=1_000_000, slower=4.0), spec("fast", kv=20_000)], "hetlb"
    )
    chosen = [dispatched(scheduler.on_arrival(request(i), 0.0)).instance for i in range(50)]
    assert chosen.count("fast") >= 37


def test_a_burst_at_an_idle_fleet_is_spread_alike_whether_requests_came_before() -> None:
    fleet = [spec("fast", kv=100_000), spec("slow", kv=100_000, slower=4.0)]
    spread = {}
    for before in (0, 8):
        scheduler = make_scheduler(fleet, "hetlb")
        for i in range(before):
            lease = dispatched(scheduler.on_arrival(request(i, max_tokens=500), float(i)))
            scheduler.on_first_token(lease, i + 0.1)
            scheduler.on_lease_ended(lease, Outcome.OK, i + 0.5)
        for i in range(80):
            scheduler.on_arrival(request(1000 + i, max_tokens=500), 20.0)
        spread[before] = [each.in_flight for each in scheduler.instances]
    assert spread[8] == spread[0] == [64, 0]


def test_hetlb_passes_over_the_slowest_at_the_end_but_not_under_steady_load() -> None:
    fleet = [spec("fast", kv=100_000), spec("slow", kv=100_000, slower=20.0)]
    # A lone request: the fast one is done with everything long before the slow one would be.
    scheduler = make_scheduler(fleet, "hetlb")
    commands = scheduler.on_arrival(request(1), 0.0)
    assert dispatched(commands).instance == "fast"
    slow = commands[0].candidates[1]  # type: ignore[union-attr]
    assert (slow.terms or {})["finish_s"] > 0.0
    # A backlog that the fast one would need longer for than the slow one for one answer.
    scheduler = make_scheduler(fleet, "hetlb")
    chosen = []
    for i in range(4000):
        chosen += [c.lease.instance for c in scheduler.on_arrival(request(i), 0.0) if isinstance(c, Dispatch)]
    assert "slow" not in chosen[:50]
    assert "slow" in chosen


def test_how_much_an_engine_runs_at_once_is_seen_when_it_lets_others_wait() -> None:
    scheduler = make_scheduler([InstanceSpec("a", "m")], "hetlb")
    instance = scheduler.instances[0]
    assert instance.max_num_seqs == 256
    scheduler.on_scrape("a", EngineSample(running=40, waiting=3, kv_usage=0.99), 0.0)
    assert instance.max_num_seqs == 256
    scheduler.on_scrape("a", EngineSample(running=48, waiting=3, kv_usage=0.2), 1.0)
    assert instance.max_num_seqs == 256, "one scrape may have caught a request on its way"
    scheduler.on_scrape("a", EngineSample(running=48, waiting=2, kv_usage=0.2), 2.0)
    assert instance.max_num_seqs == 48


def test_an_engine_that_reads_long_prompts_lets_others_wait_for_tokens_not_for_places() -> None:
    scheduler = make_scheduler([spec("a", capacity=Capacity(kv_cache_tokens=100_000))])
    (instance,) = scheduler.instances
    waits = EngineSample(running=1, waiting=1, kv_usage=0.1)
    asked = [request(i, prompt=5000, streamed=True) for i in range(2)]
    leases = [dispatched(scheduler.on_arrival(each, 0.0)) for each in asked]
    for now in (1.0, 2.0, 3.0):
        scheduler.on_scrape("a", waits, now)
    assert instance.max_num_seqs == 256
    scheduler.on_first_token(leases[0], 3.5)
    for now in (4.0, 5.0):
        scheduler.on_scrape("a", waits, now)
    assert instance.max_num_seqs == 1, "it decodes, has memory, and lets another one wait"


def test_what_came_in_a_long_iteration_waits_for_its_end_not_for_a_slot() -> None:
    scheduler = make_scheduler([spec("a", capacity=Capacity(kv_cache_tokens=100_000))])
    (instance,) = scheduler.instances
    iteration_s = instance.load.prompt_token_s * instance.token_budget
    waits = EngineSample(running=1, waiting=1, kv_usage=0.1)
    asked = [request(i, prompt=50, streamed=True) for i in range(2)]
    leases = [dispatched(scheduler.on_arrival(each, 0.0)) for each in asked]
    for share in (0.5, 1.0, 1.5, 2.5, 3.0):
        scheduler.on_scrape("a", waits, share * iteration_s)
    assert instance.max_num_seqs == 256, "the iteration of the first one may not have ended"
    scheduler.on_first_token(leases[0], 3.2 * iteration_s)
    for share in (3.5, 4.0):
        scheduler.on_scrape("a", waits, share * iteration_s)
    assert instance.max_num_seqs == 1, "it still waits"


def test_the_memory_baseline_ignores_speed() -> None:
    chosen = shares("paper-memory", 40, spec("a", slower=50.0), spec("b"))
    assert chosen.count("a") == chosen.count("b") == 20


def test_paper_masks_nothing_by_kv() -> None:
    scheduler = make_scheduler([spec("a", kv=1000)], "paper")
    for i in range(50):
        commands = scheduler.on_arrival(request(i), 0.0)
        assert all(candidate.eligible for candidate in commands[0].candidates)  # type: ignore[union-attr]
    assert scheduler.instances[0].kv_utilization > 1


def test_an_absurd_utilisation_does_not_overflow() -> None:
    capacity = Capacity(kv_cache_tokens=10, kv_tokens_per_request=None)
    scheduler = make_scheduler([spec("a", capacity=capacity)], "paper", params=PolicyParams(theta=50.0))
    for i in range(2000):
        dispatched(scheduler.on_arrival(request(i, exact=False), 0.0))
    check_scheduler(scheduler)


def test_lmetric_multiplies_tokens_to_compute_by_the_batch() -> None:
    scheduler = make_scheduler([spec("a", kv=100_000), spec("b", slower=4.0, kv=100_000)], "lmetric")
    sent = [
        dispatched(scheduler.on_arrival(request(i, prompt=tokens), 0.0)) for i, tokens in ((1, 100), (2, 900))
    ]
    assert [each.instance for each in sent] == ["a", "b"]
    first, second = (each.score for each in explained(scheduler, request(3, prompt=50), 10.0, 0.0)[0])
    assert (first, second) == ((100 + 50) * 2, (900 + 50) * 2)
    scheduler.on_first_token(sent[1], 1.0)
    assert dispatched(scheduler.on_arrival(request(4, prompt=50), 1.0)).instance == "b"


def test_lmetric_by_speed_sends_more_to_the_fast() -> None:
    fleet = [spec("a", slower=4.0, kv=100_000), spec("b", kv=100_000)]
    chosen = shares("lmetric-speed", 40, *fleet)
    assert chosen[0] == "b"
    assert chosen.count("b") > 1.5 * chosen.count("a") > 0


# --- prefix, session ---------------------------------------------------------------------------------


def begins(request_id: int, *keys: tuple[str, int | None], tokens: int = 1000) -> Request:
    return request(request_id, prompt=tokens, prefix_keys=keys)


def test_prefix_goes_where_the_longest_prefix_was_sent() -> None:
    scheduler = make_scheduler([spec("a"), spec("b"), spec("c")], "prefix")
    sent = [
        dispatched(scheduler.on_arrival(begins(i, *keys), 0.0)).instance
        for i, keys in enumerate(
            [
                (("x", 256),),
                (("y", 256), ("y2", 512)),
                (("y", 256), ("y2", 512), ("y3", 900)),
                (("y", 256), ("y4", 512)),
                (("x", 256), ("z", 512), ("session:s", None)),
            ]
        )
    ]
    # 256 of 1000 tokens are below the threshold: then the fewest requests count.
    assert sent == ["a", "b", "b", "c", "a"]


def test_prefix_gives_way_to_balance() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "prefix")
    sent = [dispatched(scheduler.on_arrival(begins(i, ("x", 900)), 0.0)).instance for i in range(67)]
    assert sent == ["a"] * 65 + ["b", "b"]  # both have it now, and b has less to do


def test_prefix_remembers_a_bounded_number_of_prefixes() -> None:
    policy = PrefixMatch(PolicyParams(), random.Random())
    scheduler = make_scheduler([spec("a"), spec("b")], "prefix")
    instance = scheduler.instances[0]
    for i in range(1100):
        asked = begins(i, *((f"{i}/{j}", 900) for j in range(64)))
        policy.committed(SchedulingContext(asked, 1.0, 1.0, 0, Demand(), 0.0, None), instance, [instance])
    assert len(policy._sent) == 65_536


def test_a_session_keeps_its_instance_and_few_move_when_another_leaves() -> None:
    def homes(*names: str) -> list[str]:
        scheduler = make_scheduler([spec(name) for name in names], "session")
        return [
            dispatched(scheduler.on_arrival(begins(i, (f"session:{i % 300}", None)), 0.0)).instance
            for i in range(600)
        ]

    of_four = homes("a", "b", "c", "d")
    assert of_four[:300] == of_four[300:]
    assert min(of_four.count(name) for name in "abcd") > 100
    moved = [(old, new) for old, new in zip(of_four, homes("a", "b", "d"), strict=True) if old != new]
    assert {old for old, _ in moved} == {"c"}


def test_without_a_session_the_fewest_requests_decide() -> None:
    assert shares("session", 4, spec("a"), spec("b")) == ["a", "b", "a", "b"]


# --- planned --------------------------------------------------------------------------------------------

PLAN = PolicyParams(
    types=(
        PlannedType("m", 1000.0, 20.0, 0.75, (("a", 0.75), ("b", 0.25))),
        PlannedType("m", 1000.0, 200.0, 0.25, (("b", 1.0),)),
        PlannedType("m", 50.0, 50.0, 1.0, (("c", 1.0),)),
        PlannedType("n", 1000.0, 20.0, 1.0, (("z", 1.0),)),
    )
)
WIDE = Capacity(kv_cache_tokens=1_000_000, kv_tokens_per_request=1_000_000, max_num_seqs=1000)


def planned(prompt: int, output: int, count: int) -> list[str]:
    """Where requests of known length go, out of four instances with room for all."""
    lengths = dict.fromkeys(range(count), output)
    oracle = make_predictor("oracle", rng=random.Random(0), oracle=lengths)
    fleet = [spec(name, capacity=WIDE) for name in "abcd"]
    scheduler = make_scheduler(fleet, "planned", predictor=oracle, params=PLAN)
    arrivals = (request(i, prompt=prompt, max_tokens=None) for i in range(count))
    return [dispatched(scheduler.on_arrival(each, 0.0)).instance for each in arrivals]


def test_planned_holds_the_shares_of_each_type() -> None:
    read = planned(1000, 20, 40)
    assert (read.count("a"), read.count("b")) == (30, 10)
    assert set(planned(980, 210, 8)) == {"b"}
    assert set(planned(50, 50, 8)) == {"c"}


def test_planned_takes_the_mean_of_types_that_it_cannot_tell_apart() -> None:
    # Answers of 65 tokens are neither 20 nor 200 long: a mean of both types, three to one.
    mixed = planned(1000, 65, 160)
    assert (mixed.count("a"), mixed.count("b")) == (90, 70)


def test_planned_waits_for_an_instance_with_a_share() -> None:
    small = Capacity(kv_cache_tokens=1_000_000, kv_tokens_per_request=1_000_000, max_num_seqs=1)
    scheduler = make_scheduler([spec(name, capacity=small) for name in "cd"], "planned", params=PLAN)
    leases = [
        command.lease
        for i in range(8)
        for command in scheduler.on_arrival(request(i, prompt=50), 0.0)
        if isinstance(command, Dispatch)
    ]
    assert {lease.instance for lease in leases} == {"c"}
    assert len(scheduler.queue) == 8 - len(leases) > 0
    freed = scheduler.on_lease_ended(leases[0], Outcome.OK, 1.0)
    assert dispatched(freed).instance == "c"


def test_planned_leaves_what_is_not_planned_to_hetlb() -> None:
    fleet = [spec("x"), spec("y", slower=3.0)]
    for policy in ("planned", "hetlb"):
        scheduler = make_scheduler(fleet, policy, params=PLAN)
        assert dispatched(scheduler.on_arrival(request(1), 0.0)).instance == "x"


def test_the_end_of_a_burst_weighs_by_its_requests() -> None:
    scheduler = make_scheduler([spec("fast", kv=100_000), spec("slow", kv=100_000, slower=4.0)], "hetlb")

    def weight() -> float:
        return (explained(scheduler, request(99), 50.0, 0.0)[0][0].weights or {})["finish_s"]

    assert weight() == pytest.approx(0.2)
    leases = [dispatched(scheduler.on_arrival(request(i), 0.0)) for i in range(9)]
    assert weight() == pytest.approx(2.0)
    for lease in leases:
        scheduler.on_lease_ended(lease, Outcome.OK, 1.0)
    assert weight() == pytest.approx(0.2)
