"""Verdicts on KV transfers by the counters of decode engines."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers import spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.evidence import Evidence
from hetlb.balancer.core.instance import Instance
from hetlb.options.split.fetch_checks import (
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

    def scrape(self, coming: float = 0.0) -> None:
        self.now += LATER
        self.checks.sampled(TARGET, self.fetched, self.computed, coming, self.now)


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
    checks.sampled(TARGET, None, None, 0.0, 1.0)
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
    engine.scrape(coming=800.0)
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
