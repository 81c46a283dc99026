"""KV cache of sequences whose layers do not all keep every token: the form, its unit, and what is booked."""

from __future__ import annotations

import math
import random

import pytest
from helpers import make_scheduler, request, spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.config.profile_file import kv_need
from hetlb.balancer.core.evidence.evidence import Evidence
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.kv_need import KvNeed
from hetlb.balancer.core.types import Capacity, Dispatch, InstanceSpec, Outcome
from hetlb.tools.sim.integrity import check_scheduler

#: Bytes that grow, windows, and a state: gpt-oss-120b, Gemma 3 27B, Qwen3.5 35B, Mistral 7B, Mamba 2.8B.
MODELS = (
    (36_864.0, [(128, 36_864.0)], 0.0),
    (81_920.0, [(1024, 425_984.0)], 0.0),
    (20_480.0, [], 6.6e7),
    (0.0, [(4096, 131_072.0)], 0.0),
    (0.0, [], 4e7),
)


def needed(index: int) -> KvNeed:
    found = kv_need(*MODELS[index])
    assert found is not None
    return found


@given(index=st.integers(0, 4), tokens=st.integers(1, 200_000))
def test_the_form_is_the_bytes_in_its_unit(index: int, tokens: int) -> None:
    grows, windows, state = MODELS[index]
    size = grows * tokens + sum(each * min(tokens, window) for window, each in windows) + state
    unit = grows or sum(each for _, each in windows) or state
    assert math.isclose(needed(index).tokens(tokens) * unit, size, rel_tol=1e-9)


@given(index=st.integers(0, 2), cache=st.integers(10_000, 1_000_000))
def test_the_longest_sequence_fills_the_cache(index: int, cache: int) -> None:
    need = needed(index)
    assert math.isclose(need.tokens(need.longest(cache)), cache, rel_tol=1e-6)


def test_what_is_known_of_nothing_or_of_every_token_needs_no_form() -> None:
    assert kv_need(131_072.0, [], 0.0) is None
    assert kv_need(0.0, [], 0.0) is None
    assert needed(3).longest(5000) == math.inf


def test_several_windows_are_one_for_sequences_that_fill_them() -> None:
    two = kv_need(10.0, [(100, 20.0), (1000, 30.0)], 0.0)
    assert two is not None
    assert two.beside(5000) == pytest.approx((100 * 20 + 1000 * 30) / 10)


def test_a_cache_that_vllm_tells_is_in_sequences_of_its_longest() -> None:
    # vLLM: two groups share 2,000 blocks of 16 tokens; a sequence of 4,096 tokens has 256 and 137.
    oss = needed(0)
    told = int(2000 / (256 + (127 + 2048) // 16 + 2) * 4096)
    assert oss.scaled(told, 4096, 2048) == pytest.approx(32_000, rel=0.005)
    assert oss.scaled(told, None, 2048) == told
    state = needed(4)  # each sequence one state: 50 of them
    assert state.scaled(50 * 8192, 8192, 2048) == 50
    assert state.tokens(7000) == 1


def test_an_instance_counts_in_tokens_that_grow() -> None:
    capacity = Capacity(kv_cache_tokens=10_000, kv_tokens_per_request=10_000, kv_need=needed(1))
    instance = Instance(InstanceSpec("a", "m", capacity=capacity), 0, Evidence(random.Random(0), 0.0), 0.0)
    assert instance.kv_cache_tokens == 10_000
    assert instance.capacity.needed(2000) == pytest.approx(2000 + 5.2 * 1024)
    assert instance.longest_request_tokens == int(10_000 - 5.2 * 1024)
    instance.learn_capacity(Capacity(max_model_len=4096))
    assert instance.kv_cache_tokens == pytest.approx(10_000 * (1 + 5.2 * 3072 / 4096), abs=1)


@pytest.mark.parametrize(
    ("need", "prompt", "running"),
    [(None, 100, 64), (needed(1), 1000, 3), (KvNeed(1.0, 0.0, 0.0, 1800.0), 100, 10)],
)
def test_no_more_requests_go_to_an_instance_than_their_layers_let_it_hold(
    need: KvNeed | None, prompt: int, running: int
) -> None:
    """The others wait at the proxy, though the tokens of all of them are few; all is given back."""
    stated = Capacity(kv_cache_tokens=20_000, kv_tokens_per_request=20_000, max_num_seqs=64, kv_need=need)
    scheduler = make_scheduler([spec("a", capacity=stated)], "hetlb")
    commands = [scheduler.on_arrival(request(i, prompt=prompt), 0.0) for i in range(80)]
    leases = [each.lease for made in commands for each in made if isinstance(each, Dispatch)]
    assert len(leases) == running
    [instance] = scheduler.instances
    assert instance.kv_utilization <= 1.0
    assert instance.kv_tokens == sum(each.kv_tokens for each in leases)
    for lease in leases:
        scheduler.on_lease_ended(lease, Outcome.OK, 1.0)
    check_scheduler(scheduler)
