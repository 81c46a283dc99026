"""Verdicts on KV transfers by the counters of decode engines."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers import spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.evidence.evidence import Evidence
from hetlb.balancer.core.instance import Instance
from hetlb.options.split.transfers import (
    FETCHED,
    LAG_S,
    MAX_MISSED_TRANSFERS,
    MAX_UNJUDGED_TRANSFERS,
    NOT_FETCHED,
    REST_S,
    UNJUDGED_S,
    FetchChecks,
)

LATER = 10.0 * LAG_S


def instance(number: int) -> Instance:
    return Instance(spec(f"i{number}"), number, Evidence(random.Random(0), 0.0), 0.0)


A, B, TARGET = instance(1), instance(2), instance(9)


class Engine:
    """A decode engine with its counters: what comes from a pair that fails it computes."""

    def __init__(self, checks: FetchChecks) -> None:
        self.checks = checks
        self.fetched = self.computed = 0
        self.now = 0.0
        self.scrape()

    def answer(self, source: Any, tokens: int, *, fetched: bool) -> None:
        self.checks.booked(source, TARGET, self.now)
        if fetched:
            self.fetched += tokens
        else:
            self.computed += tokens
        self.checks.answered(source, TARGET, tokens, self.now)

    def scrape(self, **coming: float) -> None:
        """Read its page; `coming`: tokens of transfers before their first token, by source."""
        self.now += LATER
        by_source = {int(name[1:]): tokens for name, tokens in coming.items()}
        self.checks.sampled(TARGET, self.fetched, self.computed, by_source, self.now, self.now)


@given(
    rounds=st.lists(
        st.lists(st.tuples(st.booleans(), st.integers(100, 4000)), max_size=6), min_size=8, max_size=20
    ),
    seed=st.booleans(),
)
def test_a_failing_pair_is_found_beside_one_that_works(
    rounds: list[list[tuple[bool, int]]], seed: bool
) -> None:
    checks = FetchChecks()
    engine = Engine(checks)
    engine.answer(A, 1000, fetched=True)
    engine.scrape()
    missed = 0
    for requests in rounds:
        for at_b, tokens in requests:
            if at_b and not checks.usable(B, TARGET, engine.now):
                continue
            missed += at_b
            engine.answer(B if at_b else A, tokens, fetched=not at_b)
        engine.scrape()
    engine.scrape()
    assert checks.usable(A, TARGET, engine.now)
    results = checks.take_results()
    assert results.get(NOT_FETCHED, 0) <= missed
    if missed:
        assert results.get(NOT_FETCHED, 0) > 0
    assert checks.take_results() == {}


#: Tokens of transfers before a page was asked for, and after it: of a pair that works, and of one that fails.
SETTLED = ((300, 314, 328, 384, 342, 370, 356), (321, 307, 335, 363, 391, 349, 405, 377))
LATE = ((426, 398, 440, 412, 461, 454), (419, 433, 447))


@pytest.mark.parametrize("counted", range(len(LATE[0]) + 1))
def test_a_page_beside_more_transfers_decides_nothing_that_both_pairs_explain(counted: int) -> None:
    """`counted` of the late ones stand on the page."""
    checks = FetchChecks()
    engine = Engine(checks)
    for source, tokens in ((A, SETTLED[0]), (B, SETTLED[1])):
        for each in tokens:
            engine.answer(source, each, fetched=source is A)
    engine.now += LATER
    asked_at = engine.now
    fetched, computed = engine.fetched + sum(LATE[0][:counted]), engine.computed
    for source, tokens in ((A, LATE[0]), (B, LATE[1])):
        for each in tokens:
            engine.answer(source, each, fetched=source is A)
    checks.sampled(TARGET, fetched, computed, {}, asked_at, engine.now)
    engine.scrape()
    assert checks.take_results() == {FETCHED: 13, NOT_FETCHED: 11}
    assert checks.usable(A, TARGET, engine.now)
    assert not checks.usable(B, TARGET, engine.now)


def test_a_pair_rests_and_is_tried_again() -> None:
    checks = FetchChecks()
    engine = Engine(checks)
    for _ in range(MAX_MISSED_TRANSFERS):
        engine.answer(A, 500, fetched=False)
    engine.scrape()
    assert checks.take_results() == {NOT_FETCHED: MAX_MISSED_TRANSFERS}
    assert not checks.usable(A, TARGET, engine.now)
    assert [each.names for each in checks.resting(engine.now)] == [("i1", "i9")]
    engine.now += REST_S
    assert checks.usable(A, TARGET, engine.now)
    engine.answer(A, 500, fetched=False)
    engine.scrape()
    assert not checks.usable(A, TARGET, engine.now + REST_S)  # twice as long
    engine.now += 2.0 * REST_S
    engine.answer(A, 500, fetched=True)
    engine.scrape()
    assert checks.usable(A, TARGET, engine.now)
    assert checks.take_results() == {NOT_FETCHED: 1, FETCHED: 1}


def test_an_answer_after_the_page_was_asked_for_waits_for_the_next_page() -> None:
    """A page that comes late says nothing about what happened meanwhile."""
    checks = FetchChecks()
    engine = Engine(checks)
    before = engine.now
    for source in (A, B):
        for _ in range(MAX_MISSED_TRANSFERS):
            engine.answer(source, 500, fetched=True)
    engine.now += LATER
    checks.sampled(TARGET, 500, 0, {}, before, engine.now)
    assert checks.take_results() == {}
    engine.scrape()
    assert checks.take_results() == {FETCHED: 2 * MAX_MISSED_TRANSFERS}


def test_a_pair_of_which_none_was_fetched_gets_few_requests_however_it_is_judged() -> None:
    checks = FetchChecks()
    engine = Engine(checks)
    given = 0
    while checks.usable(A, TARGET, engine.now):
        engine.answer(A, 500, fetched=False)
        given += 1
        if given == MAX_MISSED_TRANSFERS - 1:
            engine.scrape()
    assert given == MAX_UNJUDGED_TRANSFERS


def test_an_unjudged_pair_gets_few_requests() -> None:
    checks = FetchChecks()
    engine = Engine(checks)
    for _ in range(MAX_UNJUDGED_TRANSFERS):
        assert checks.usable(A, TARGET, engine.now)
        checks.booked(A, TARGET, engine.now)
    assert not checks.usable(A, TARGET, engine.now)
    assert checks.usable(A, TARGET, engine.now + 1.01 * UNJUDGED_S)


def test_an_engine_without_counters_is_not_judged() -> None:
    checks = FetchChecks()
    checks.sampled(TARGET, None, None, {}, 1.0, 1.0)
    for _ in range(2 * MAX_UNJUDGED_TRANSFERS):
        checks.booked(A, TARGET, 1.0)
        checks.answered(A, TARGET, 100.0, 1.0)
    assert not checks.checks(TARGET)
    assert checks.usable(A, TARGET, 1.0)
    assert checks.take_results() == {}


def test_prompts_that_the_engine_had_are_no_failure() -> None:
    checks = FetchChecks()
    engine = Engine(checks)
    for _ in range(2 * MAX_MISSED_TRANSFERS):
        checks.answered(A, TARGET, 100.0, engine.now)  # neither fetched nor computed: cached
    engine.scrape()
    assert checks.take_results() == {FETCHED: 2 * MAX_MISSED_TRANSFERS}


@pytest.mark.parametrize("gone", [True, False])
def test_what_is_counted_before_the_first_token_is_kept(gone: bool) -> None:
    """An answer that does not stream: its prompt was fetched at the scrape before it ends."""
    checks = FetchChecks()
    engine = Engine(checks)
    engine.fetched += 800
    engine.scrape(i1=800.0)
    checks.answered(A, TARGET, 800.0, engine.now)
    engine.computed += 5000  # of others
    if gone:
        checks.forget(TARGET.incarnation)
    else:
        engine.scrape()
    assert checks.take_results() == {FETCHED: 1}


def test_a_restarted_engine_begins_anew() -> None:
    checks = FetchChecks()
    engine = Engine(checks)
    engine.answer(A, 700, fetched=True)
    engine.scrape()
    engine.fetched = engine.computed = 0
    engine.answer(A, 300, fetched=False)
    engine.scrape()
    assert checks.take_results() == {FETCHED: 2}
    assert checks.usable(A, TARGET, engine.now)
