"""Status of a fleet in its incidents: the state, what limits it and the advice are right in each."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers import MODEL, dispatched, make_scheduler, request, spec
from hypothesis import example, given
from hypothesis import strategies as st
from proxy.incidents import Watched
from proxy.rows import ended

from hetlb.balancer.admin.beliefs import BeliefSource, believed, slots_source, speed_source
from hetlb.balancer.admin.fleet_status import lasting, pools, status
from hetlb.balancer.admin.rare_causes import CauseLog
from hetlb.balancer.core.evidence.clients import client_of
from hetlb.balancer.core.exploration import Exploration
from hetlb.balancer.core.facts import AdminStateSet, EngineSample, Probed, ProbeResult, SpeedTried
from hetlb.balancer.core.latency import DEFAULT_LATENCY
from hetlb.balancer.core.learning import learn_models
from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.types import AdminState, Capacity, Dispatch, InstanceSpec, Outcome


def test_without_traffic_it_is_well() -> None:
    found = Watched().look()
    assert (found["state"], found["load"], found["request_rate"]) == ("well", 0.0, 0.0)
    assert found["advice"] == "No recent requests."


def test_below_saturation_it_is_well_and_says_what_room_there_is() -> None:
    fleet = Watched()
    fleet.arrive(12)
    fleet.end(4)
    found = fleet.look()
    assert found["state"] == "well"
    assert 0.2 < found["load"] < 0.8
    assert found["advice"] == "Nothing to do."
    assert found["headroom_req_s"] == pytest.approx(found["capacity_req_s"] * (1 - found["load"]), rel=1e-3)
    assert "room for" in found["sentence"]


def test_saturated_and_balanced_it_is_busy() -> None:
    fleet = Watched()
    for _ in range(20):  # as many come as end: the queue stays
        fleet.arrive(40 - len(fleet.leases) - len(fleet.scheduler.queue))
        fleet.end(10)
        fleet.now += 1.0
        fleet.arrive(10)
        fleet.look()
    found = fleet.look()
    assert found["state"] == "busy"
    assert found["load"] >= 1.0
    assert found["headroom_req_s"] == 0.0
    assert "All servers are full. Add " in found["advice"]


def test_a_queue_that_grows_is_degraded() -> None:
    fleet = Watched()
    for _ in range(20):
        fleet.arrive(12)
        fleet.end(4)
        fleet.look()
        fleet.now += 1.0
    found = fleet.look()
    assert found["state"] == "degraded"
    assert "More comes than can be served" in found["advice"]
    assert found["limited_by"] == "the queue: all servers are full"


def test_a_burst_of_which_nothing_has_ended_says_nothing_of_the_capacity() -> None:
    fleet = Watched()
    fleet.arrive(12)
    fleet.end(12)
    fleet.now += 40.0
    quiet = fleet.look()["capacity_req_s"]
    fleet.arrive(60)
    fleet.now += 2.0
    found = fleet.look()
    running = sum(each.in_flight for each in fleet.scheduler.instances)
    assert found["state"] == "busy"
    assert found["capacity_req_s"] >= quiet
    assert found["load"] >= 1.0
    fleet.now += 2.0
    assert fleet.look()["capacity_req_s"] == pytest.approx(min(quiet, running / 4.0), rel=1e-3)


def test_a_moment_of_waiting_makes_no_overload_of_a_load_that_is_served() -> None:
    """Twenty seconds after the start a request waits, and one has run since then."""
    fleet = Watched()
    fleet.arrive(1)
    for _ in range(20):
        fleet.arrive(12)
        fleet.now += 1.0
        fleet.leases.append(fleet.leases.pop(0))
        fleet.end(12)
        fleet.look()
    fleet.arrive(12)
    fleet.now += 1.0
    fleet.arrive(12)
    found = fleet.look()
    assert len(fleet.scheduler.queue) == 1
    assert 1.0 <= found["load"] < 1.2


def test_servers_that_were_taken_out_by_hand_are_named_where_requests_wait() -> None:
    fleet = Watched()
    fleet.scheduler.on_instance(AdminStateSet("a", AdminState.DRAIN), 0.0)
    fleet.scheduler.on_instance(AdminStateSet("b", AdminState.MAINT), 0.0)
    for _ in range(20):
        fleet.arrive(12)
        fleet.end(4)
        fleet.look()
        fleet.now += 1.0
    expected = r"More comes than can be served: set a and b ready again, add \d servers like these, or limit"
    assert re.search(expected, fleet.look()["advice"])


def test_two_of_three_dead_is_degraded_and_names_them() -> None:
    fleet = Watched()
    fleet.arrive(30)
    for name in "bc":
        fleet.refuse(name)
    found = fleet.look()
    assert found["state"] == "degraded"
    assert found["advice"].startswith(
        "b and c are down (connection refused). Start them, wait if they are loading, or check their network."
    )
    assert found["sentence"].startswith("1 of 3 servers")
    fleet.scheduler.fleet.instances["b"].far_s = fleet.scheduler.fleet.instances["c"].far_s = 0.4
    assert fleet.look()["advice"] == found["advice"]  # a host that answers so is reached
    fleet.scheduler.on_instance(Probed("b", ProbeResult.REFUSED, "it accepts no connection"), fleet.now)
    steps = {each["instance"]: each["advice"] for each in fleet.look()["causes"]}
    assert "Look at the network to b: a packet and its answer take 400 ms." in steps["b"]


def test_one_slow_is_degraded_and_named() -> None:
    fleet = Watched()
    fleet.arrive(9)
    slow = fleet.scheduler.fleet.instances["b"]
    slow.speed.factor, slow.speed.seen, slow.speed.slow = 3.0, True, True
    found = fleet.look()
    assert found["state"] == "degraded"
    says = "b takes 3.0 times as long as its profile says. "
    assert found["advice"] == says + "Look at its GPU, or profile it again."
    slow.far_s = 0.24
    network = "Look at the network to b: a packet and its answer take 240 ms."
    assert fleet.look()["advice"] == says + network


@pytest.mark.parametrize("slower", [1.0, 1.5, 4.0])
def test_a_slow_one_is_named_before_its_first_answer_ends(slower: float) -> None:
    """By its own count of tokens: four answers that are all still running."""
    fleet = Watched("a")
    [instance] = fleet.scheduler.instances
    for number in range(1, 5):
        lease = dispatched(fleet.scheduler.on_arrival(request(number, streamed=True), fleet.now))
        fleet.scheduler.on_first_token(lease, fleet.now)
    step_s = instance.occupancy.now_s
    for second in range(6):
        fleet.now += 1.0
        tokens = int(4 * (second + 1) / (slower * step_s))
        sample = EngineSample(4, 0, 0.0, generated=9 * tokens, answered=tokens)
        fleet.scheduler.on_scrape("a", sample, fleet.now)
        fleet.look()
    assert fleet.recent.pace("a") == pytest.approx(slower, rel=0.1)
    assert causes(fleet.look()) == ([("slow", "a")] if slower > 2.0 else [])
    fleet.now += 10.0
    assert causes(fleet.look()) == []  # it shows the pace of now no more
    fleet.now += 25.0
    assert causes(fleet.look()) == [("stale_report", "a")]


def test_one_that_fails_is_degraded_and_named() -> None:
    fleet = Watched()
    fleet.arrive(20)
    fleet.end(3, Outcome.UPSTREAM_ERROR, "a")
    assert fleet.look()["advice"].startswith("a failed 3 of its last 3 requests; the other servers did not")
    assert fleet.look()["state"] == "degraded"
    fleet.scheduler.fleet.instances["a"].far_s = 0.4
    assert fleet.look()["advice"].endswith("Look at the network to a: a packet and its answer take 400 ms.")


def test_none_left_is_down_and_says_why() -> None:
    fleet = Watched()
    for name in "abc":
        fleet.refuse(name)
    found = fleet.look()
    assert (found["state"], found["capacity_req_s"]) == ("down", 0.0)
    assert found["advice"] == (
        "a, b and c are down (connection refused). Start one, wait if one is loading, or check the network."
    )
    drained = Watched("a")
    drained.scheduler.on_instance(AdminStateSet("a", AdminState.DRAIN), 0.0)
    assert drained.look()["state"] == "down"
    assert "drained or in maintenance: set one ready" in drained.look()["advice"]


def causes(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the causes with their instances, in order."""
    return [(each["cause"], each["instance"]) for each in found["causes"]]


def test_a_drained_server_is_no_trouble_and_is_said() -> None:
    fleet = Watched()
    fleet.scheduler.on_instance(AdminStateSet("a", AdminState.DRAIN), 0.0)
    assert (fleet.look()["state"], causes(fleet.look())) == ("well", [("drained", "a")])
    assert fleet.look()["sentence"].startswith("2 of 3 servers")
    assert fleet.look()["advice"] == "a is drained. Set a ready when it may serve again."
    fleet.arrive(15)  # of 16 slots
    assert fleet.look()["state"] == "busy"
    assert fleet.look()["advice"].startswith("Little room is left (slots")
    assert fleet.look()["advice"].endswith(". a is drained. Set a ready when it may serve again.")


def test_of_servers_that_fill_it_is_not_said_that_they_are_full() -> None:
    fleet = Watched()
    for each in fleet.scheduler.instances:
        each.exploring = Exploration()
    fleet.arrive(24)
    found = fleet.look()
    assert fleet.scheduler.queue
    assert found["state"] == "busy"
    assert "gets few requests until its speed is known" in found["advice"]
    for each in fleet.scheduler.instances:  # slots are free, and something else than their number holds back
        each.exploring = None
    assert "Free servers lack KV cache" in fleet.look()["advice"]


def test_of_assumed_slots_it_is_said() -> None:
    fleet = Watched(slots=None)
    assert fleet.look()["advice"] == (
        "The slots of a, b and c are assumed: state their max_num_seqs in the fleet file."
    )


def test_of_an_assumed_speed_it_is_said_until_an_answer_or_a_gpu_tells_it() -> None:
    for known in ("", "gpu", "answer"):
        latency = DEFAULT_LATENCY if known == "gpu" else None
        capacity = Capacity(kv_cache_tokens=100_000, max_num_seqs=8)
        specs = [
            InstanceSpec(name, MODEL, latency=latency, capacity=capacity, gpu_alone=latency is not None)
            for name in "ab"
        ]
        fleet = Watched()
        fleet.scheduler = make_scheduler(specs, "hetlb")
        if known == "answer":
            for each in fleet.scheduler.instances:
                each.speed.seen = True
        advice = fleet.look()["advice"]
        assert ("The speed of a and b is assumed until an answer" in advice) is (not known), advice


def test_each_belief_says_where_it_is_from() -> None:
    fleet = Watched("a", slots=None)
    [instance] = fleet.scheduler.instances
    slots = believed(instance, 1.0, fleet.now)["max_num_seqs"]
    assert slots == {"value": 256, "source": "assumed", "age_s": None, "confidence": 0.0}
    for _ in range(2):  # it lets requests wait while its KV cache has room: it runs all it can
        fleet.scheduler.on_scrape("a", EngineSample(running=32, waiting=3, kv_usage=0.2), fleet.now)
    slots = believed(instance, 1.0, fleet.now + 2.0)["max_num_seqs"]
    assert (slots["value"], slots["source"], slots["age_s"]) == (32, "learnt", 2.0)
    assert slots_source(Watched("a").scheduler.instances[0]) is BeliefSource.MEASURED
    stated = make_scheduler([spec("a", capacity=Capacity(max_num_seqs=7), slots_stated=True)], "hetlb")
    assert slots_source(stated.instances[0]) is BeliefSource.STATED
    assert speed_source(stated.instances[0]) is BeliefSource.MEASURED
    for each in believed(instance, 1.0, fleet.now).values():
        assert {"value", "source", "age_s", "confidence"} <= each.keys()


def test_a_server_of_another_model_is_named() -> None:
    watched = Watched("ab")
    a = next(each for each in watched.scheduler.instances if each.name == "a")
    learn_models(a, ("other",), ())
    found = watched.look()
    assert (found["state"], found["advice"]) == (
        "degraded",
        f"a serves other, not {MODEL}. Correct the model's name, or start it with --served-model-name m.",
    )


def test_a_stalled_server_is_named() -> None:
    fleet = Watched()
    fleet.arrive(9)
    for _ in range(20):
        fleet.now += 0.5
        others = dict.fromkeys("bc", fleet.now)
        fleet.scheduler.on_sweep(others, fleet.now)
    found = fleet.look()
    assert (found["state"], causes(found)[0]) == ("degraded", ("stalled", "a"))
    assert "a has stalled: no token for" in found["advice"]
    assert "Look at the engine process of a and its GPU" in found["advice"]
    fleet.scheduler.fleet.instances["a"].far_s = 1.5
    assert "Look at the network to a: a packet and its answer take 1,500 ms." in fleet.look()["advice"]


def test_a_server_that_refuses_what_others_serve_is_named() -> None:
    fleet = Watched("ab")
    for each in fleet.scheduler.instances:
        each.evidence.answers.well = 5.0
    refuses = fleet.scheduler.instances[0]
    for _ in range(8):
        refuses.evidence.ended_badly(0, 0.0, "", "", fleet.now)
    fleet.scheduler.fleet.account().judge(refuses, fleet.now)
    assert (fleet.look()["state"], causes(fleet.look())) == ("degraded", [("fails", "a")])


def test_a_storm_of_clients_mistakes_is_said_and_is_no_load() -> None:
    fleet = Watched()
    fleet.arrive(12)
    fleet.end(12, Outcome.UPSTREAM_REFUSED)
    found = fleet.look()
    assert (found["state"], causes(found)) == ("busy", [("client_errors", "")])
    assert not any(each.evidence.answers.doubted for each in fleet.scheduler.instances)


@pytest.mark.parametrize(
    ("failing", "at", "others", "expected"),
    [
        (["p"], "abc", 20, ("busy", [("client_errors", "")])),
        ([f"p{n}" for n in range(40)], "a", 20, ("degraded", [("fails", "a")])),
        (["p"], "a", 20, ("degraded", [("fails", "a")])),  # it was nowhere else
        (["p", "q"], "abc", 20, ("degraded", [("fails", "a"), ("fails", "b"), ("fails", "c")])),
        (["p"], "abc", 0, ("degraded", [("fails", "a"), ("fails", "b"), ("fails", "c")])),
    ],
)
def test_failures_of_one_client_alone_say_nothing_of_the_servers(
    failing: list[str], at: str, others: int, expected: tuple[str, list[tuple[str, str]]]
) -> None:
    fleet = Watched()
    for each in fleet.scheduler.instances:
        for _ in range(others):
            fleet.recent.finished(ended(fleet.now, instance=each.name, client="good"))
        for client in failing if each.name in at else ():
            for _ in range(4):
                lost = ended(fleet.now, instance=each.name, client=client, outcome=Outcome.UPSTREAM_ERROR)
                fleet.recent.finished(lost)
                fleet.scheduler.fleet.account().clients.lost(client_of(lost.request), each.incarnation)
    found = fleet.look()
    assert (found["state"], sorted(causes(found))) == expected


def test_two_servers_that_fail_all_they_get_are_named_though_one_client_got_it_all() -> None:
    fleet = Watched()
    for name, client, outcome in (
        ("a", "p", Outcome.UPSTREAM_ERROR), ("b", "p", Outcome.UPSTREAM_ERROR), ("c", "good", Outcome.OK),
    ):  # fmt: skip
        for _ in range(20):
            one = ended(fleet.now, instance=name, client=client, outcome=outcome)
            fleet.recent.finished(one)
            if outcome is not Outcome.OK:
                incarnation = fleet.scheduler.fleet.instances[name].incarnation
                fleet.scheduler.fleet.account().clients.lost(client_of(one.request), incarnation)
    found = fleet.look()
    assert (found["state"], sorted(causes(found))) == ("degraded", [("fails", "a"), ("fails", "b")])


def test_failures_of_many_sessions_are_counted_in_bounded_memory() -> None:
    fleet = Watched()
    for number in range(1000):
        lost = ended(fleet.now, instance="a", client=f"c{number}", outcome=Outcome.UPSTREAM_ERROR)
        fleet.recent.finished(lost)
    share = fleet.recent.last(10.0, fleet.now).shares["a"]
    assert share.failed == 1000
    assert len(share.failures) < 20


def test_a_stale_report_and_a_refused_reload_are_said() -> None:
    fleet = Watched("a")
    fleet.scheduler.on_scrape("a", EngineSample(0, 0, 0.0), fleet.now)
    fleet.now += 16.0  # an idle engine is looked at each 15 s
    assert causes(fleet.look()) == []
    fleet.now += 16.0
    assert causes(fleet.look()) == [("stale_report", "a")]
    pool = pools(fleet.scheduler)
    found = status(fleet.scheduler, pool, fleet.recent, fleet.now, "fleet.yaml: models: expected a list")
    assert (found["state"], causes(found)[0][0]) == ("degraded", "reload_refused")
    assert "expected a list" in found["causes"][0]["sentence"]
    assert "The edited fleet file was rejected (" in found["advice"]


def test_one_tenant_with_most_of_the_queue_is_named() -> None:
    fleet = Watched("a")
    for number in range(1, 60):
        tenant = "x" if number < 50 else "y"
        fleet.scheduler.on_arrival(request(number, tenant=tenant), fleet.now)
    assert ("tenant_hog", "x") in causes(fleet.look())


@pytest.mark.parametrize("others", [0, 2])
def test_a_tenant_whose_requests_alone_wait_is_named_where_others_are_served(others: int) -> None:
    fleet = Watched("a")
    for number in range(1, 40):
        tenant = "y" if number <= others else "x"
        fleet.scheduler.on_arrival(request(number, tenant=tenant), fleet.now)
    assert (("tenant_hog", "x") in causes(fleet.look())) is (others > 0)


def test_a_long_wait_names_the_tenant_that_causes_it() -> None:
    fleet = Watched("a")
    for number in range(1, 60):
        tenant = "x" if number < 50 else "y"
        fleet.scheduler.on_arrival(request(number, tenant=tenant), fleet.now)
    fleet.now += 6.0
    found = fleet.look()
    assert causes(found)[0] == ("long_wait", "")
    assert "the oldest for 6 s, most of them of tenant x. More comes" in found["advice"]


def test_a_class_whose_targets_no_answer_met_is_named_and_background_may_wait() -> None:
    fleet = Watched("a")
    never, night = ServiceClass("never", e2e_s=1e-3), ServiceClass("night", background=True)
    for number in range(1, 12):
        [command] = fleet.scheduler.on_arrival(request(number, service=never), fleet.now)
        assert isinstance(command, Dispatch)
        fleet.now += 1.0
        fleet.scheduler.on_lease_ended(command.lease, Outcome.OK, fleet.now)
    assert ("hopeless_target", "") in causes(fleet.look())
    assert "never" in fleet.look()["causes"][0]["sentence"]
    fleet.now += 61.0
    for number in range(20, 600):
        fleet.scheduler.on_arrival(request(number, service=night), fleet.now)
    fleet.now += 20.0
    assert len(fleet.scheduler.queue) > 0
    assert not any(cause in ("hopeless_target", "long_wait") for cause, _ in causes(fleet.look()))


@example([(44, 40), *[(30, 20)] * 8, *[(21, 20)] * 12])
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=5, max_size=40))
def test_it_never_gets_milder_while_the_oldest_wait_grows(seconds: list[tuple[int, int]]) -> None:
    fleet, worst, waits = Watched(), 0, 0.0
    order = ["well", "busy", "degraded", "down"]
    for come, end in seconds:
        fleet.arrive(come)
        fleet.end(end)
        fleet.now += 1.0
        found = fleet.look()
        if found["oldest_wait_s"] >= waits > 0.0:
            assert order.index(found["state"]) >= worst
        worst, waits = order.index(found["state"]), found["oldest_wait_s"]


def test_twice_what_can_be_served_is_degraded_and_its_load_is_what_comes() -> None:
    fleet = Watched()
    for _ in range(60):
        fleet.arrive(12)
        fleet.end(6)
        fleet.now += 1.0
        found = fleet.look()
    assert (found["state"], found["oldest_wait_s"] > 5.0) == ("degraded", True)
    assert 1.2 < found["load"] < 4.0


def test_requests_that_get_no_answer_are_trouble_whatever_the_queue() -> None:
    fleet = Watched()
    fleet.arrive(9)
    fleet.end(9)
    assert causes(fleet.look()) == []
    for _ in range(3):
        fleet.recent.finished(ended(fleet.now, outcome=Outcome.REJECTED_FULL))
    found = fleet.look()
    assert (found["state"], causes(found)) == ("degraded", [("refused", "")])
    assert "25 % of requests are refused: the queue is full" in found["advice"]
    fleet.now += 10.0
    assert ("refused", "") not in causes(fleet.look()), "it clears within 10 s"


def test_a_server_that_flaps_is_named_until_it_stays() -> None:
    fleet = Watched()
    for _ in range(3):
        fleet.refuse("a")
        fleet.now += 12.0
        for _ in range(2):
            fleet.scheduler.on_instance(Probed("a", ProbeResult.OK), fleet.now)
        fleet.now += 2.0
    fleet.refuse("a")
    found = fleet.look()
    assert causes(found)[0] == ("flaps", "a")
    assert "a flaps: it was down 4 times in 42 s, now: " in found["advice"]
    assert "Start it, wait if it is loading, or check its network." in found["advice"]


def test_a_server_that_refuses_the_key_and_one_that_answers_wrong_are_named() -> None:
    fleet = Watched()
    asked = request(1, path="/v1/chat/completions")
    fleet.scheduler.fleet.account().kinds.refused(asked, "b", 401, fleet.now)
    assert causes(fleet.look()) == [("key_refused", "b")]
    one = fleet.scheduler.instances[0]
    for _ in range(4):
        one.evidence.ended_badly(0, 0.0, "", "", fleet.now)
    one.evidence.answers.odd_at = fleet.now
    fleet.scheduler.fleet.account().judge(one, fleet.now)
    found = fleet.look()
    assert causes(found) == [("key_refused", "b"), ("wrong_answers", "a")]
    sentences = [each["sentence"] for each in found["causes"]]
    assert "a answered 4 of its last 4 requests wrong; the other servers did not" in sentences
    assert found["advice"].endswith(
        "Also: a answered 4 of its last 4 requests wrong; the other servers did not."
    )


def test_a_server_without_a_page_of_metrics_is_named_once_it_answers() -> None:
    fleet = Watched()
    (a, *_) = fleet.scheduler.instances
    a.pageless = True
    assert causes(fleet.look()) == []
    a.evidence.ended_well(fleet.now)
    found = fleet.look()
    assert (causes(found), found["state"]) == ([("no_metrics", "a")], "well")
    fleet.scheduler.on_scrape("a", EngineSample(0, 0, 0.0), fleet.now)
    assert causes(fleet.look()) == []


def test_load_of_others_is_named_once_two_reports_say_it() -> None:
    fleet = Watched()
    for expected in ([], [("foreign_load", "a")]):
        fleet.scheduler.on_scrape("a", EngineSample(26, 19, 0.9), fleet.now)
        assert causes(fleet.look()) == expected
        fleet.now += 1.0
    fleet.scheduler.on_scrape("a", EngineSample(0, 0, 0.0), fleet.now)
    assert causes(fleet.look()) == []


@pytest.mark.parametrize("share", [0.015, 0.02, 0.05, 0.3, 1.0])
@pytest.mark.parametrize(
    "outcome", [Outcome.UPSTREAM_ERROR, Outcome.BROKEN_STREAM, Outcome.REJECTED_FULL, Outcome.EXPIRED_QUEUE]
)
def test_a_state_in_which_one_of_a_hundred_gets_no_answer_is_neither_well_nor_busy(
    share: float, outcome: Outcome
) -> None:
    """The same holds if a server fails requests and if none gets them."""
    fleet = Watched("a")
    for number in range(400):
        unanswered = int((number + 1) * share) > int(number * share)
        placed = outcome in (Outcome.UPSTREAM_ERROR, Outcome.BROKEN_STREAM) or not unanswered
        found = ended(fleet.now, placed=placed, instance="a", outcome=outcome if unanswered else Outcome.OK)
        fleet.recent.finished(found)
    state = fleet.look()["state"]
    assert state not in ("well", "busy"), fleet.look()["causes"]


def test_nothing_limits_a_load_of_0_percent() -> None:
    fleet = Watched()
    for requests in (12, 12, 1, 1, 1):
        fleet.arrive(requests)
        fleet.end(requests)
        fleet.now += 10.0
        found = fleet.look()
        assert ("limited by" in found["sentence"]) is ("load 0 %" not in found["sentence"])
    assert "load 0 % of about" in found["sentence"]


@pytest.mark.parametrize(
    ("beside", "answers", "lag_s", "named"),
    [
        (1.0, 10, 0.0, True),
        (1.0, 2, 0.0, False),  # the others have answered too little to compare with
        (3.0, 40, 0.0, False),  # all are slower: other traffic, or a busy machine
        (1.0, 40, 0.3, False),  # an answer takes 0.5 s, of which this process may have slept 0.3 s
        (1.0, 40, 0.02, True),
    ],
)
def test_one_that_slows_is_named_if_another_one_does_not(
    beside: float, answers: int, lag_s: float, named: bool
) -> None:
    fleet = Watched()
    a, b, c = fleet.scheduler.instances
    for number in range(60):
        fleet.now += 0.1
        for each in (a, b, c):
            if each is a or number < answers:
                each.speed.observe_prefill(0.2, 0.2, fleet.now)
    for _ in range(10):
        fleet.now += 0.1
        for each, slower in ((a, 3.0), (b, beside), (c, beside)):
            if each is a or answers >= 5:
                each.speed.observe_prefill(0.2, 0.2 * slower, fleet.now)
    assert ("slowed", "a") not in causes(fleet.look())
    assert a.speed.slowed_since is None, "a look at the status notes nothing"
    fleet.scheduler.on_sweep({}, fleet.now, lag_s=lag_s)
    assert ("slowed", "a") not in causes(fleet.look())  # it has only begun
    fleet.now += 1.0
    assert (("slowed", "a") in causes(fleet.look())) is named
    a.far_s = 0.05
    steps = [each["advice"] for each in fleet.look()["causes"] if each["cause"] == "slowed"]
    assert steps == ["Look at the network to a: a packet and its answer take 50 ms."] * named
    assert not {("slowed", "b"), ("slowed", "c")} & set(causes(fleet.look()))
    fleet.now += 60.0  # the others have not answered since
    a.speed.observe_prefill(0.2, 0.6, fleet.now)
    fleet.scheduler.on_sweep({}, fleet.now, lag_s=lag_s)
    assert (("slowed", "a") in causes(fleet.look())) is named
    a.speed.age(fleet.now + 60.0)  # work comes back for want of news: that is none
    assert (("slowed", "a") in causes(fleet.look())) is named
    for _ in range(2):
        fleet.scheduler.on_instance(SpeedTried("a", 16.0, 1e-3), fleet.now)
        assert (("slowed", "a") in causes(fleet.look())) is named
    fleet.scheduler.on_instance(SpeedTried("a", 16.0, 1e-3), fleet.now)  # answers of clients would do as well
    assert ("slowed", "a") not in causes(fleet.look())


def test_a_cause_is_logged_as_it_begins_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hetlb.status")
    fleet, log = Watched(), CauseLog()

    def events(*running: int) -> list[tuple[str, str, str]]:
        caplog.clear()
        for count in running:
            for name in "ab":
                fleet.scheduler.on_scrape(name, EngineSample(count, 0, 0.9), fleet.now)
            causes = lasting(fleet.scheduler, fleet.recent, fleet.now)
            assert [each.document() for each in causes] == fleet.look()["causes"]
            log.look(causes, fleet.now)
            fleet.now += 1.0
        fields = [each.__dict__ for each in caplog.records]
        return [(each["event"], each["message"], each["fields"].get("instance", "")) for each in fields]

    advice = "Send them through hetlb, too; meanwhile it gives a less."
    begun = ("cause", f"others use a: 26 of its 26 requests are not hetlb's. {advice}", "a")
    assert events(26, 26, 26) == [begun]  # b has it, too: one line for each cause
    fleet.now += 60.0
    assert events(0) == [("cause_over", "foreign_load is over", "")]
    assert events(26, 26) == [begun]
    assert events(0, 26, 26, 26) == [("cause_over", "foreign_load is over", "")]


def test_the_lag_of_this_process_is_forgotten() -> None:
    recent = Watched().recent
    recent.late(1.0)
    for _ in range(20):
        recent.late(0.0)
    assert 0.0 < recent.lag_s < 0.2
