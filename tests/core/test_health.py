"""Every row of the transition table in `hetlb.balancer.core.health`."""

from __future__ import annotations

import random

import pytest

from hetlb.balancer.core.health import FALL_ANSWERS, FALL_PROBES, HealthTracker
from hetlb.balancer.core.types import Health, ProbeResult


def tracker(state: Health = Health.UP) -> HealthTracker:
    return HealthTracker(random.Random(0), state)


@pytest.mark.parametrize("state", [Health.UP, Health.SUSPECT])
def test_a_refused_connection_is_proof(state: Health) -> None:
    health = tracker(state)
    assert health.on_probe(ProbeResult.REFUSED, 0.0)
    assert health.state is Health.EJECTED
    assert not health.on_probe(ProbeResult.REFUSED, 1.0)


def test_a_suspect_is_up_after_one_probe_or_one_answer() -> None:
    health = tracker(Health.SUSPECT)
    assert health.on_probe(ProbeResult.OK, 0.0)
    assert health.state is Health.UP
    health = tracker(Health.SUSPECT)
    assert health.on_success()
    assert health.state is Health.UP


def test_missed_probes_eject_after_three_in_a_row() -> None:
    health = tracker()
    assert [health.on_probe(ProbeResult.FAILED, 0.0) for _ in range(FALL_PROBES)] == [False, False, True]
    assert health.state is Health.EJECTED


def test_tokens_that_flow_outweigh_missed_probes() -> None:
    health = tracker()
    for _ in range(20):
        health.on_probe(ProbeResult.FAILED, 0.0)
        health.on_success()
    assert health.state is Health.UP


def test_the_way_back_takes_two_probes() -> None:
    health = tracker()
    health.on_probe(ProbeResult.REFUSED, 0.0)
    assert not health.on_probe(ProbeResult.OK, 1.0)
    assert not health.on_probe(ProbeResult.FAILED, 2.0)
    assert not health.on_probe(ProbeResult.OK, 3.0)
    assert health.on_probe(ProbeResult.OK, 4.0)
    assert health.state is Health.UP


def test_failed_answers_eject_and_a_probe_alone_does_not_bring_back() -> None:
    health = tracker()
    assert [health.on_failure(0.0, may_eject=True) for _ in range(FALL_ANSWERS)][-1]
    assert health.state is Health.EJECTED
    for _ in range(10):
        assert not health.on_probe(ProbeResult.OK, 1.9)
    assert health.on_probe(ProbeResult.OK, 3.1)


def test_a_success_in_between_starts_the_count_anew() -> None:
    health = tracker()
    for i in range(20):
        now = i * 10.0  # fewer than what a share is taken of
        for _ in range(FALL_ANSWERS - 1):
            assert not health.on_failure(now, may_eject=True)
        health.on_success()
    assert health.state is Health.UP


def test_the_last_instance_is_not_ejected() -> None:
    health = tracker()
    for _ in range(50):
        assert not health.on_failure(0.0, may_eject=False)
    assert health.state is Health.UP


def test_an_ejection_is_as_short_as_the_first_one() -> None:
    health = tracker()
    now = 0.0
    for _ in range(20):
        for _ in range(FALL_ANSWERS):
            health.on_failure(now, may_eject=True)
        assert 2.0 <= health.ejected_until - now <= 3.0
        now = health.ejected_until
        for _ in range(2):
            health.on_probe(ProbeResult.OK, now)
        assert health.state is Health.UP
        health.on_success()
