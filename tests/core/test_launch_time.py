"""Passes that prefill: launching and computing overlap, and beyond the CUDA graphs launching takes longer."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.config.profile_file import LaunchOfKernels, Profile, with_latency
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.step_times import LaunchTime

LAUNCH = LaunchTime(512, 0.01, 0.04)
PLAIN = LatencyModel(2e-5, 0.0, 0.0, 5e-3, 1e-8, 1e-5, 0.0, 5e-3)
LAUNCHED = replace(PLAIN, launch=LAUNCH)
seconds = st.floats(0.0, 1.0)


@given(computing_s=seconds, graph_s=seconds, eager_s=seconds, tokens=st.floats(0.0, 4096.0))
def test_a_pass_takes_the_longer_of_both_and_at_most_their_sum(
    computing_s: float, graph_s: float, eager_s: float, tokens: float
) -> None:
    launching_s = graph_s if tokens <= 512 else eager_s
    found = LaunchTime(512, graph_s, eager_s).pass_s(computing_s, tokens)
    assert max(launching_s, computing_s) <= found + 1e-12
    assert found <= launching_s + computing_s + 1e-12


def test_launching_counts_in_passes_that_prefill_alone() -> None:
    assert LAUNCHED.step_s(64, 64_000) == PLAIN.step_s(64, 64_000)
    within, beyond = (LAUNCHED.mixed_step_s(tokens, 1, tokens, 64, 64_000) for tokens in (440, 500))
    assert within < 0.03
    assert beyond > 0.04
    assert LAUNCHED.prefill_s(300) > PLAIN.prefill_s(300)
    # Much computing hides launching.
    assert LAUNCHED.prefill_s(50_000) == pytest.approx(PLAIN.prefill_s(50_000), rel=0.01)


def test_a_scaled_model_scales_its_launches_and_a_profile_keeps_them() -> None:
    twice = LAUNCHED.scaled(2.0)
    assert twice.prefill_s(600) == pytest.approx(2.0 * LAUNCHED.prefill_s(600))
    plain = {
        "version": 2, "name": "p",
        "prefill": {"k1": 2e-5, "k2": 0.0, "k3": 0.0, "k4": 5e-3},
        "decode": {"k5": 1e-8, "k6": 1e-5, "k7": 0.0, "k8": 5e-3},
    }  # fmt: skip
    kept = with_latency(msgspec.convert(plain, Profile), LAUNCHED)
    assert kept.launch == LaunchOfKernels(graph_tokens=512, graph_s=0.01, eager_s=0.04)
    assert kept.latency.launch == LAUNCH
