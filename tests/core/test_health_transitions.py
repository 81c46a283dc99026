"""Health by its edges: what is said, what is counted anew, and the moment at which a rule begins to hold."""

from __future__ import annotations

import random

import pytest

from hetlb.balancer.core.health import (
    EJECTION_JITTER_SHARE,
    EJECTION_S,
    FALL_ANSWERS,
    FALL_PROBES,
    RISE_PROBES,
    HealthTracker,
    Verdict,
    verdict,
)
from hetlb.balancer.core.types import Health, Outcome, ProbeResult

OK, FAILED, REFUSED = ProbeResult.OK, ProbeResult.FAILED, ProbeResult.REFUSED


class Fixed(random.Random):
    """A generator that always draws the same."""

    def __init__(self, drawn: float) -> None:
        super().__init__(0)
        self.drawn = drawn

    def random(self) -> float:
        return self.drawn


def tracker(state: Health = Health.UP, drawn: float = 0.5) -> HealthTracker:
    return HealthTracker(Fixed(drawn), state)


def failing(health: HealthTracker, count: int, now: float = 0.0) -> list[bool]:
    return [health.on_failure(now, may_eject=True) for _ in range(count)]


# --- what is said ---


def test_every_change_says_why() -> None:
    health = tracker(Health.SUSPECT)
    assert health.reason == "not probed yet"
    assert health.on_probe(OK, 0.0)
    assert health.reason == "probe answered"
    for _ in range(FALL_PROBES):
        health.on_probe(FAILED, 0.0)
    assert (health.state, health.reason) == (Health.EJECTED, "3 probes failed in a row")
    for _ in range(RISE_PROBES):
        health.on_probe(OK, health.ejected_until)
    assert (health.state, health.reason) == (Health.UP, "2 probes answered")
    assert health.on_refused(20.0)
    assert (health.state, health.reason) == (Health.EJECTED, "connection refused")
    assert tracker().reason == ""


def test_an_answer_says_why_too() -> None:
    for told in (HealthTracker.on_answering, HealthTracker.on_success):
        health = tracker(Health.SUSPECT)
        assert told(health)
        assert (health.state, health.reason) == (Health.UP, "answered a request")


def test_failures_say_how_many() -> None:
    health = tracker()
    assert failing(health, FALL_ANSWERS) == [False] * (FALL_ANSWERS - 1) + [True]
    assert health.reason == "5 answers failed in a row"
    assert health.ejected_for_failures


def test_the_only_one_becomes_suspect_and_says_so() -> None:
    health = tracker()
    changes = [health.on_probe(FAILED, 0.0, alone=True) for _ in range(FALL_PROBES)]
    assert changes == [False, False, True]
    assert (health.state, health.reason) == (Health.SUSPECT, "3 probes failed in a row")


def test_a_tracker_begins_with_nothing_against_its_instance() -> None:
    for state in (Health.UP, Health.SUSPECT):
        health = tracker(state)
        assert (health.state, health.ejected_until) == (state, 0.0)
        assert health.clean is (state is Health.UP)
        assert health.ejected_for_failures is False
    assert tracker().on_answering() is False


def test_a_probe_says_how_it_failed() -> None:
    suspect = tracker(Health.SUSPECT)
    suspect.on_probe(FAILED, 0.0)
    assert suspect.reason == "a probe failed"
    suspect.on_probe(FAILED, 0.0, detail="no answer in 2 s")
    assert suspect.reason == "no answer in 2 s"
    for alone, state in ((True, Health.SUSPECT), (False, Health.EJECTED)):
        health = tracker()
        for _ in range(FALL_PROBES):
            health.on_probe(FAILED, 0.0, alone=alone, detail="no answer in 2 s")
        assert (health.state, health.reason) == (state, "3 probes failed in a row: no answer in 2 s")
    health = tracker()
    health.on_probe(ProbeResult.REFUSED, 3.0, detail="no route")
    assert (health.state, health.reason, health.ejected_until) == (Health.EJECTED, "no route", 3.0)
    health.on_refused(4.0)
    assert (health.reason, health.ejected_until) == ("no route", 3.0)
    health.on_refused(4.0, "no address")
    assert health.reason == "no address"


# --- ejection ---


@pytest.mark.parametrize("drawn", [0.0, 0.25, 0.5, 1.0])
def test_the_time_out_is_spread_by_chance(drawn: float) -> None:
    health = tracker(drawn=drawn)
    failing(health, FALL_ANSWERS, 100.0)
    spread = 1.0 + EJECTION_JITTER_SHARE * (2.0 * drawn - 1.0)
    assert health.ejected_until == pytest.approx(100.0 + EJECTION_S * spread)


def test_the_way_back_begins_anew_with_every_miss() -> None:
    health = tracker()
    failing(health, FALL_ANSWERS)
    later = health.ejected_until
    assert not health.on_probe(OK, later - 0.001)
    assert not health.on_probe(FAILED, later)
    assert not health.on_probe(OK, later)
    assert not health.on_refused(later)
    assert not health.on_probe(OK, later)
    assert health.on_probe(OK, later)


def test_probes_before_the_time_is_over_count_but_do_not_suffice() -> None:
    health = tracker()
    failing(health, FALL_ANSWERS)
    for _ in range(RISE_PROBES + 1):
        assert not health.on_probe(OK, health.ejected_until - 0.001)
    assert health.on_probe(OK, health.ejected_until)


def test_what_was_counted_before_it_came_back_is_forgotten() -> None:
    """Neither missed probes nor failed answers of before count, in whatever state."""
    health = tracker()
    for _ in range(FALL_PROBES - 1):
        health.on_probe(FAILED, 0.0)
    assert not health.on_probe(OK, 0.0)
    assert [health.on_probe(FAILED, 0.0) for _ in range(FALL_PROBES)] == [False, False, True]
    for _ in range(RISE_PROBES):
        health.on_probe(OK, health.ejected_until)
    assert [health.on_probe(FAILED, 50.0) for _ in range(FALL_PROBES)] == [False, False, True]
    health = tracker()
    failing(health, FALL_ANSWERS - 1)
    assert health.on_refused(0.0)
    for _ in range(RISE_PROBES):
        health.on_probe(OK, 0.0)
    assert failing(health, FALL_ANSWERS)[:-1] == [False] * (FALL_ANSWERS - 1)


def test_a_refused_connection_means_another_process() -> None:
    """Not half-open: one failed answer does not eject it."""
    health = tracker()
    failing(health, FALL_ANSWERS)
    assert health.ejected_for_failures
    assert not health.on_refused(1.0)
    assert health.ejected_for_failures is False
    for _ in range(RISE_PROBES):
        health.on_probe(OK, health.ejected_until)
    assert health.state is Health.UP
    assert not health.on_failure(health.ejected_until, may_eject=True)


def test_half_open_until_an_answer_ends_well() -> None:
    health = tracker()
    failing(health, FALL_ANSWERS)
    for _ in range(RISE_PROBES):
        health.on_probe(OK, health.ejected_until)
    assert not health.on_answering()  # begun is not ended
    assert health.on_failure(health.ejected_until, may_eject=True)
    assert (health.state, health.reason) == (Health.EJECTED, "failed again after it came back")
    for _ in range(RISE_PROBES):
        health.on_probe(OK, health.ejected_until)
    assert not health.on_success()
    assert failing(health, FALL_ANSWERS, health.ejected_until) == [False] * (FALL_ANSWERS - 1) + [True]


def test_probes_from_before_it_was_ejected_are_not_of_the_way_back() -> None:
    health = tracker()
    for _ in range(RISE_PROBES):
        assert not health.on_probe(OK, 0.0)
    failing(health, FALL_ANSWERS)
    assert not health.on_probe(OK, health.ejected_until)
    assert health.on_probe(OK, health.ejected_until)
    assert health.reason == "2 probes answered"


def test_an_instance_is_clean_when_no_success_could_make_it_better() -> None:
    """Up, and an answer ended well since its last trouble."""
    health = tracker()
    health.on_failure(0.0, may_eject=True)
    assert health.clean is False
    health.on_success()
    assert health.clean is True
    health.on_probe(FAILED, 1.0)
    assert health.clean is False
    health.on_success()
    assert health.clean is True
    failing(health, FALL_ANSWERS, 100.0)
    assert health.clean is False
    for _ in range(RISE_PROBES):
        health.on_probe(OK, health.ejected_until)
    assert (health.state, health.clean) == (Health.UP, False)
    health.on_success()
    assert health.clean is True


def test_only_its_answers_make_an_ejection_one_for_failures() -> None:
    refused = tracker()
    refused.on_refused(0.0)
    assert refused.ejected_for_failures is False
    health = tracker()
    failing(health, FALL_ANSWERS)
    assert health.ejected_for_failures is True
    for _ in range(RISE_PROBES):
        health.on_probe(OK, health.ejected_until)
    assert health.ejected_for_failures is False
    health.on_success()
    for _ in range(FALL_PROBES):
        health.on_probe(FAILED, 20.0)
    assert (health.state, health.ejected_for_failures) == (Health.EJECTED, False)


def test_the_end_of_a_lease_is_evidence_of_one_kind() -> None:
    says = {outcome: verdict(outcome) for outcome in Outcome}
    assert says == dict.fromkeys(Outcome, Verdict.NOTHING) | {
        Outcome.OK: Verdict.WELL,
        Outcome.UPSTREAM_REFUSED: Verdict.LOST,
        Outcome.UPSTREAM_BUSY: Verdict.LOST,
        Outcome.UPSTREAM_ERROR: Verdict.LOST,
        Outcome.CONNECT_FAILED: Verdict.ABSENT,
        Outcome.NO_RESPONSE: Verdict.FAILED,
        Outcome.BROKEN_STREAM: Verdict.FAILED,
    }


def test_an_ejected_instance_is_not_clean_whatever_it_answers() -> None:
    health = tracker()
    health.on_refused(0.0)
    assert not health.on_success()
    assert (health.state, health.clean) == (Health.EJECTED, False)


def test_an_ejected_instance_is_not_ejected_again() -> None:
    health = tracker()
    failing(health, FALL_ANSWERS)
    until = health.ejected_until
    assert failing(health, FALL_ANSWERS) == [False] * FALL_ANSWERS
    assert health.ejected_until == until


def test_an_instance_that_may_not_be_ejected_stays() -> None:
    health = tracker()
    assert not any(health.on_failure(0.0, may_eject=False) for _ in range(3 * FALL_ANSWERS))
    assert health.state is Health.UP
    assert health.on_failure(0.0, may_eject=True)


def test_a_success_is_heeded_after_every_kind_of_trouble() -> None:
    """Who is known to be well is asked nothing; a missed probe or a failure ends that."""
    health = tracker()
    assert not health.on_success()
    health.on_probe(FAILED, 0.0)
    health.on_probe(FAILED, 0.0)
    assert not health.on_answering()
    assert [health.on_probe(FAILED, 0.0) for _ in range(FALL_PROBES)] == [False, False, True]
    health = tracker()
    failing(health, FALL_ANSWERS - 1)
    assert not health.on_success()
    assert failing(health, FALL_ANSWERS) == [False] * (FALL_ANSWERS - 1) + [True]
