"""Every row of the transition table in `hetlb.balancer.core.evidence.table`."""

from __future__ import annotations

import random

import pytest

from hetlb.balancer.core.evidence.health import EJECTION_JITTER_SHARE, HealthState
from hetlb.balancer.core.evidence.table import (
    EJECTION_S,
    FALL_PROBES,
    FLAPPING_S,
    MOST_EJECTION_S,
    RISE_PROBES,
)
from hetlb.balancer.core.facts import ProbeResult
from hetlb.balancer.core.types import Health


def tracker(state: Health = Health.UP) -> HealthState:
    return HealthState(random.Random(0), state)


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
    assert health.on_answering(whole=True)
    assert health.state is Health.UP


def test_missed_probes_eject_after_three_in_a_row() -> None:
    health = tracker()
    assert [health.on_probe(ProbeResult.FAILED, 0.0) for _ in range(FALL_PROBES)] == [False, False, True]
    assert health.state is Health.EJECTED


def test_tokens_that_flow_outweigh_missed_probes() -> None:
    health = tracker()
    for _ in range(20):
        health.on_probe(ProbeResult.FAILED, 0.0)
        health.on_answering(whole=True)
    assert health.state is Health.UP


def test_the_way_back_takes_two_probes() -> None:
    health = tracker()
    health.on_probe(ProbeResult.REFUSED, 0.0)
    assert not health.on_probe(ProbeResult.OK, 1.0)
    assert not health.on_probe(ProbeResult.FAILED, 2.0)
    assert not health.on_probe(ProbeResult.OK, 3.0)
    assert health.on_probe(ProbeResult.OK, 4.0)
    assert health.state is Health.UP


def test_each_ejection_within_minutes_doubles_the_wait() -> None:
    health, now, waits = tracker(), 0.0, []
    for _ in range(9):
        health.on_probe(ProbeResult.REFUSED, now)
        waits.append(health.ejected_until - now)
        now = health.ejected_until + 1.0
        health.on_probe(ProbeResult.OK, now)
        assert health.on_probe(ProbeResult.OK, now)
    assert waits[0] == 0.0, "a process that restarts once is back at once"
    nominal = [EJECTION_S * 2.0**i for i in range(8)]
    for waited, expected in zip(waits[1:], nominal, strict=True):
        assert waited == pytest.approx(min(MOST_EJECTION_S, expected), rel=EJECTION_JITTER_SHARE)
    now += FLAPPING_S + 1.0
    health.on_probe(ProbeResult.REFUSED, now)
    assert health.ejected_until == now, "good minutes later it is forgotten"


def test_one_that_flaps_and_is_alone_waits_for_nothing() -> None:
    health = tracker()
    for now in (0.0, 10.0, 20.0):
        health.on_probe(ProbeResult.REFUSED, now)
        health.on_probe(ProbeResult.OK, now, alone=True)
        assert health.on_probe(ProbeResult.OK, now, alone=True)


def test_an_engine_that_says_it_loads_is_out_at_once_and_back_when_it_is_ready() -> None:
    for state in (Health.SUSPECT, Health.UP):
        health = HealthState(random.Random(1), state)
        assert health.unproven is (state is Health.SUSPECT)
        assert health.on_probe(ProbeResult.LOADING, 0.0, detail="loading: it lists no model")
        assert (health.state, health.reason) == (Health.EJECTED, "loading: it lists no model")
        assert health.unproven
        assert health.gone is (state is Health.UP)  # another process may be at its address
        assert not health.on_probe(ProbeResult.LOADING, 1.0, detail="loading: /health answers 503")
        assert health.reason == "loading: /health answers 503"
        assert [health.on_probe(ProbeResult.OK, 2.0) for _ in range(RISE_PROBES)] == [False, True]
