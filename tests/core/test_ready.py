"""Filter of instances: requests that each may get, and the reasons of instances that may not."""

from __future__ import annotations

import math
from typing import Any

import pytest
from helpers import make_scheduler, request, spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.facts import AdminStateSet, EngineSample, Probed, ProbeResult
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.ready import ReadyInstances, least_tokens, with_excluded
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import AdminState, Candidate, Connector, Health, InstanceSpec, KvLink, Role

LINK = KvLink(Connector.NIXL)


def fleet(*specs: InstanceSpec, health: Health = Health.UP) -> tuple[Scheduler, ReadyInstances]:
    scheduler = make_scheduler(specs, "hetlb", health=health)
    return scheduler, ready(scheduler)


def ready(scheduler: Scheduler, now: float = 0.0) -> ReadyInstances:
    return ReadyInstances(scheduler.instances, now)


def names(instances: list[Instance]) -> str:
    return "".join(each.name for each in instances)


def choices(
    filtered: ReadyInstances,
    *,
    tried: list[str] | None = None,
    now: float = 0.0,
    holds_back: bool = True,
    **more: Any,
) -> tuple[str, dict[str, str], list[tuple[int, str]] | None]:
    found = filtered.choices(request(1, **more), tried, now, holds_back=holds_back)
    return names(found.instances), found.excluded, found.restraints


def set_health(scheduler: Scheduler, name: str, *results: ProbeResult) -> None:
    for result in results:
        scheduler.on_instance(Probed(name, result), 0.0)


# --- which are there ---


def test_of_each_that_takes_nothing_the_reason_is_told() -> None:
    scheduler, all_there = fleet(*(spec(name) for name in "abcde"))
    assert (names(all_there.able), all_there.everyone.excluded) == ("abcde", {})
    scheduler.on_instance(AdminStateSet("a", AdminState.DRAIN), 0.0)
    scheduler.on_instance(AdminStateSet("b", AdminState.MAINT), 0.0)
    set_health(scheduler, "c", ProbeResult.REFUSED)
    scheduler.on_scrape("d", EngineSample(0, 0, 0.0, asleep=True), 0.0)
    some = ready(scheduler)
    assert (names(some.able), names(list(some.instances))) == ("e", "abcde")
    assert some.everyone.excluded == {
        "a": "draining",
        "b": "in maintenance",
        "c": "ejected: it accepts no connection",
        "d": "asleep",
    }
    assert choices(some) == ("e", some.everyone.excluded, None)
    assert choices(some, subset=("a",)) == ("", {
        "a": "draining",
        **dict.fromkeys("bcde", "not in the subset of the gateway"),
    }, None)  # fmt: skip


def test_suspects_take_requests_where_none_is_up() -> None:
    scheduler, none_up = fleet(*(spec(name) for name in "abc"), health=Health.SUSPECT)
    assert (names(none_up.able), none_up.everyone.excluded) == ("abc", {})
    set_health(scheduler, "b", ProbeResult.OK)
    one_up = ready(scheduler)
    assert names(one_up.able) == "b"
    assert one_up.everyone.excluded == dict.fromkeys("ac", "suspect: not probed yet")
    assert choices(one_up, tried=["b"]) == ("ac", {"b": "tried before"}, None)
    assert choices(one_up, tried=[]) == ("b", one_up.everyone.excluded, None)


def test_the_rest_of_an_answer_goes_where_token_ids_are_taken() -> None:
    scheduler, some = fleet(*(spec(name) for name in "abc"))
    assert choices(some, generated=1) == ("abc", {}, None)
    for name, engine in zip("abc", ("vllm", "vllm", "llama.cpp"), strict=True):
        scheduler.on_scrape(name, EngineSample(0, 0, 0.0, engine=engine), 0.0)
    others = {"c": "it takes no token ids"}
    assert choices(some, generated=1) == ("ab", others, None)
    assert choices(some, generated=1, tried=["a", "b"]) == (
        "",
        {**dict.fromkeys("ab", "tried before"), **others},
        None,
    )
    assert choices(some) == ("abc", {}, None)
    set_health(scheduler, "a", ProbeResult.REFUSED)
    set_health(scheduler, "b", ProbeResult.REFUSED)
    assert choices(ready(scheduler), generated=1)[0] == "c"


def test_a_subset_and_earlier_instances_are_heeded() -> None:
    _, filtered = fleet(*(spec(name) for name in "abcd"))
    assert choices(filtered, subset=("b", "c"), tried=["c"]) == (
        "b",
        {
            "a": "not in the subset of the gateway",
            "c": "tried before",
            "d": "not in the subset of the gateway",
        },
        None,
    )
    assert choices(filtered, subset=("b",), tried=["b"])[0] == ""
    assert choices(filtered, subset=("b",))[0] == "b"


# --- lengths ---


def test_an_instance_is_of_the_class_of_its_length() -> None:
    scheduler, filtered = fleet(
        spec("a", kv=1000), spec("b", kv=3000), spec("c", kv=1000), spec("d", kv=2000)
    )
    assert (filtered.limits, filtered.longest_prompt) == ((1000, 2000, 3000), 3000)
    assert filtered.longest_tokens == 1000
    assert [filtered.class_of(each) for each in scheduler.instances] == [0, 2, 0, 1]
    for tokens, fit in ((1, 0), (950, 0), (951, 1), (1950, 1), (1951, 2), (2950, 2), (9000, 2)):
        assert filtered.fit_of(request(1, prompt=tokens, max_tokens=50)) == fit
    assert choices(filtered, prompt=950) == ("abcd", {}, None)
    small = "too small for prompt and max_tokens"
    assert choices(filtered, prompt=951) == ("bd", {"a": small, "c": small}, None)
    assert choices(filtered, prompt=1951) == ("b", dict.fromkeys("acd", small), None)
    # It fits none: the largest has the last word.
    assert choices(filtered, prompt=9000) == ("b", dict.fromkeys("acd", small), None)
    assert choices(filtered, prompt=9000, tried=["b"])[0] == "d"


def test_of_equal_lengths_all_are_one_class() -> None:
    scheduler, filtered = fleet(spec("a", kv=1000), spec("b", kv=1000))
    assert [filtered.class_of(each) for each in scheduler.instances] == [0, 0]
    assert filtered.fit_of(request(1, prompt=5000)) == 0


def test_an_unknown_length_is_no_limit() -> None:
    _, filtered = fleet(spec("a", kv=None), spec("b", kv=1000))
    assert (filtered.limits, filtered.longest_prompt) == ((1000, math.inf), math.inf)
    assert choices(filtered, prompt=10**6)[0] == "a"
    _, empty = fleet(InstanceSpec("x", ""))
    nothing = ReadyInstances([], 0.0)
    assert (nothing.able, nothing.limits, nothing.longest_prompt) == ([], (), math.inf)
    assert nothing.longest_tokens == math.inf
    assert empty.longest_tokens == math.inf


def test_a_suspect_that_is_large_enough_is_better_than_one_that_is_not() -> None:
    scheduler, _ = fleet(spec("a", kv=1000), spec("b", kv=3000), spec("c", kv=3000), health=Health.SUSPECT)
    set_health(scheduler, "a", ProbeResult.OK)
    assert choices(ready(scheduler), prompt=2000) == (
        "bc",
        {"a": "too small for prompt and max_tokens"},
        None,
    )
    set_health(scheduler, "c", ProbeResult.OK)
    assert choices(ready(scheduler), prompt=2000) == (
        "c",
        {"a": "too small for prompt and max_tokens", "b": "suspect: not probed yet"},
        None,
    )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 60))
def test_the_class_of_a_request_is_the_first_that_takes_it(lengths: list[int], tokens: int) -> None:
    scheduler, filtered = fleet(*(spec(f"i{n}", kv=length) for n, length in enumerate(lengths)))
    fit = filtered.fit_of(request(1, prompt=tokens, max_tokens=0))
    for instance, length in zip(scheduler.instances, lengths, strict=True):
        assert (filtered.class_of(instance) >= fit) == (length >= tokens or length == max(lengths))


def test_one_token_of_output_is_the_least() -> None:
    assert least_tokens(request(1, prompt=10, longest=30)) == 31
    assert least_tokens(request(1, prompt=10, longest=0)) == 11
    assert least_tokens(request(1, prompt=10, generates=False)) == 10


# --- restraints ---


def busy(scheduler: Scheduler, name: str, until: float) -> None:
    each = next(each for each in scheduler.instances if each.name == name)
    each.evidence.asked(until, 0.0)


def test_the_most_available_are_left_where_the_policy_does_not_hold_back() -> None:
    scheduler, free = fleet(*(spec(name) for name in "abc"))
    assert not free.throttled
    busy(scheduler, "a", 5.0)
    restrained = ready(scheduler, 1.0)
    assert (restrained.throttled, restrained.longest_tokens) == (True, -1.0)
    why = "it asked to come again in 2 s"
    assert choices(restrained, now=1.0) == ("abc", {}, {"a": why})
    assert choices(restrained, now=1.0, holds_back=False) == (
        "bc",
        {"a": why},
        {},
    )
    assert restrained.everyone.excluded == {}, "what is shared is not changed"
    assert choices(restrained, now=1.0, subset=("a",), holds_back=False)[0] == "a"
    assert choices(restrained, now=1.0, subset=("b",)) == (
        "b",
        dict.fromkeys("ac", "not in the subset of the gateway"),
        None,
    )
    assert choices(restrained, now=5.0) == ("abc", {}, None)


def in_doubt(scheduler: Scheduler, name: str) -> None:
    """Have three answers of an instance fail, and none of the others."""
    each = next(each for each in scheduler.instances if each.name == name)
    for _ in range(3):
        each.evidence.ended_badly(0, 0.0, "", "", 0.0)
    scheduler.fleet.account().judge(each, 0.0)


def test_doubt_is_heeded_unless_all_are_in_doubt() -> None:
    scheduler, _ = fleet(spec("a"), spec("b"))
    in_doubt(scheduler, "a")
    why = "on trial: 3 of its last 3 answers failed, more than elsewhere"
    assert choices(ready(scheduler), now=0.5, holds_back=False) == ("b", {"a": why}, {})
    trial = {"b": "a gets a trial"}
    assert choices(ready(scheduler), now=1.0, holds_back=False) == ("a", trial, {})
    scheduler.instances[1].evidence.answers.doubted = True
    scheduler.instances[1].evidence.trial = 1
    scheduler.instances[0].evidence.trial = 2
    assert choices(ready(scheduler), now=1.0, holds_back=False) == ("ab", {}, {})


# --- roles ---


def linked(name: str, role: Role, **more: Any) -> InstanceSpec:
    return spec(name, role=role, kv_transfer=more.pop("link", LINK), **more)


@pytest.mark.parametrize(
    ("roles", "whole"),
    [
        ("p d", "d"),
        ("p d b", "b"),
        ("p p", "pp"),
        ("d d", "dd"),
        ("b b", "bb"),
        ("p b", "b"),
        ("d b", "b"),
        ("b", "b"),
    ],
)
def test_whole_requests_go_to_instances_without_a_role_or_else_to_decode_instances(
    roles: str, whole: str
) -> None:
    of = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
    kinds = roles.split()
    scheduler, filtered = fleet(*(linked(f"{kind}{n}", of[kind]) for n, kind in enumerate(kinds)))
    assert "".join(each.name[0] for each in filtered.able) == whole
    kept = {each.name: f"its role is {each.spec.role}" for each in scheduler.instances}
    for each in filtered.able:
        del kept[each.name]
    assert filtered.roles == filtered.everyone.excluded == kept


def test_a_role_counts_for_nothing_where_no_other_is_left() -> None:
    _, filtered = fleet(linked("p", Role.PREFILL), linked("d", Role.DECODE))
    assert choices(filtered, tried=["d"]) == ("p", {"d": "tried before"}, None)
    assert choices(filtered, subset=("p",)) == ("p", {"d": "not in the subset of the gateway"}, None)
    assert choices(filtered, tried=[]) == ("d", {"p": "its role is prefill"}, None)
    assert choices(filtered, subset=("p",)) == ("p", {"d": "not in the subset of the gateway"}, None)


def test_of_suspects_that_decode_and_readers_that_are_up_the_suspects_take_whole_requests() -> None:
    scheduler, _ = fleet(linked("p", Role.PREFILL), linked("d", Role.DECODE), health=Health.SUSPECT)
    set_health(scheduler, "p", ProbeResult.OK)
    filtered = ready(scheduler)
    assert names(filtered.able) == "d"


# --- all of them, for people ---


def test_instances_left_out_are_shown_in_their_places() -> None:
    scheduler, _ = fleet(*(spec(name) for name in "abc"))
    scored = [Candidate("a", 1.0), Candidate("c", 2.0)]
    shown = with_excluded(scored, scheduler.instances, {"b": "draining"})
    assert [(each.instance, each.score, each.eligible, each.reason) for each in shown] == [
        ("a", 1.0, True, scored[0].reason),
        ("b", math.inf, False, "draining"),
        ("c", 2.0, True, scored[1].reason),
    ]
