"""Health by its edges: what is said, what is counted anew, and the moment at which a rule begins to hold."""

from __future__ import annotations

import random

import pytest

from hetlb.balancer.core.evidence.health import EJECTION_JITTER_SHARE, HealthState
from hetlb.balancer.core.evidence.table import EJECTION_S, FALL_PROBES, RISE_PROBES, Verdict, verdict
from hetlb.balancer.core.facts import ProbeResult
from hetlb.balancer.core.types import Health, Outcome

OK, FAILED, REFUSED = ProbeResult.OK, ProbeResult.FAILED, ProbeResult.REFUSED


class Fixed(random.Random):
    """A generator that always draws the same."""

    def __init__(self, drawn: float) -> None:
        super().__init__(0)
        self.drawn = drawn

    def random(self) -> float:
        return self.drawn


def tracker(state: Health = Health.UP, drawn: float = 0.5) -> HealthState:
    return HealthState(Fixed(drawn), state)


def eject(health: HealthState, now: float = 0.0) -> list[bool]:
    """Have as many probes fail as eject it."""
    return [health.on_probe(FAILED, now) for _ in range(FALL_PROBES)]


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
    assert health.on_absent(20.0)
    assert (health.state, health.reason) == (Health.EJECTED, "it accepts no connection")
    assert tracker().reason == ""


def test_an_answer_says_why_too() -> None:
    for whole in (False, True):
        health = tracker(Health.SUSPECT)
        assert health.on_answering(whole=whole)
        assert (health.state, health.reason) == (Health.UP, "answered a request")


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
    health.on_absent(4.0)
    assert (health.reason, health.ejected_until) == ("no route", 3.0)
    health.on_absent(4.0, "no address")
    assert health.reason == "no address"
    health.on_probe(FAILED, 5.0)
    assert health.reason == "no address"
    health.on_probe(FAILED, 6.0, detail="no answer in 2 s")  # the newest reason is the true one
    assert (health.state, health.reason) == (Health.EJECTED, "no answer in 2 s")


# --- ejection ---


@pytest.mark.parametrize("drawn", [0.0, 0.25, 0.5, 1.0])
def test_the_time_out_is_spread_by_chance(drawn: float) -> None:
    health = tracker(drawn=drawn)
    eject(health, 100.0)
    spread = 1.0 + EJECTION_JITTER_SHARE * (2.0 * drawn - 1.0)
    assert health.ejected_until == pytest.approx(100.0 + EJECTION_S * spread)


def test_the_way_back_begins_anew_with_every_miss() -> None:
    health = tracker()
    eject(health)
    later = health.ejected_until
    assert not health.on_probe(OK, later - 0.001)
    assert not health.on_probe(FAILED, later)
    assert not health.on_probe(OK, later)
    assert not health.on_absent(later)
    assert not health.on_probe(OK, later)
    assert health.on_probe(OK, later)


def test_probes_before_the_time_is_over_count_but_do_not_suffice() -> None:
    health = tracker()
    eject(health)
    for _ in range(RISE_PROBES + 1):
        assert not health.on_probe(OK, health.ejected_until - 0.001)
    assert health.on_probe(OK, health.ejected_until)


def test_what_was_counted_before_it_came_back_is_forgotten() -> None:
    """Missed probes of before do not count."""
    health = tracker()
    for _ in range(FALL_PROBES - 1):
        health.on_probe(FAILED, 0.0)
    assert not health.on_probe(OK, 0.0)
    assert [health.on_probe(FAILED, 0.0) for _ in range(FALL_PROBES)] == [False, False, True]
    for _ in range(RISE_PROBES):
        health.on_probe(OK, health.ejected_until)
    assert [health.on_probe(FAILED, 50.0) for _ in range(FALL_PROBES)] == [False, False, True]


def test_probes_from_before_it_was_ejected_are_not_of_the_way_back() -> None:
    health = tracker()
    for _ in range(RISE_PROBES):
        assert not health.on_probe(OK, 0.0)
    eject(health)
    assert not health.on_probe(OK, health.ejected_until)
    assert health.on_probe(OK, health.ejected_until)
    assert health.reason == "2 probes answered"


def test_an_instance_is_clean_when_no_success_could_make_it_better() -> None:
    """Up, and an answer ended well since its last trouble."""
    health = tracker()
    assert health.clean is True
    health.on_probe(FAILED, 1.0)
    assert health.clean is False
    health.on_answering(whole=True)
    assert health.clean is True
    eject(health, 100.0)
    assert health.clean is False
    for _ in range(RISE_PROBES):
        health.on_probe(OK, health.ejected_until)
    assert (health.state, health.clean) == (Health.UP, False)
    health.on_answering(whole=True)
    assert health.clean is True


def test_the_end_of_a_lease_is_evidence_of_one_kind() -> None:
    says = {outcome: verdict(outcome) for outcome in Outcome}
    assert says == dict.fromkeys(Outcome, Verdict.NOTHING) | {
        Outcome.OK: Verdict.WELL,
        Outcome.UPSTREAM_REFUSED: Verdict.REFUSED,
        Outcome.UPSTREAM_BUSY: Verdict.LOST,
        Outcome.UPSTREAM_ERROR: Verdict.LOST,
        Outcome.CONNECT_FAILED: Verdict.ABSENT,
        Outcome.NO_RESPONSE: Verdict.LOST,
        Outcome.BROKEN_STREAM: Verdict.LOST,
    }


def test_an_ejected_instance_is_not_clean_whatever_it_answers() -> None:
    health = tracker()
    health.on_absent(0.0)
    assert not health.on_answering(whole=True)
    assert (health.state, health.clean) == (Health.EJECTED, False)


def test_an_ejected_instance_is_not_ejected_again() -> None:
    health = tracker()
    eject(health)
    until = health.ejected_until
    assert eject(health) == [False] * FALL_PROBES
    assert health.ejected_until == until
