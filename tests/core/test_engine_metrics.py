"""vLLM's metrics page, as a real server sent it and as a broken one might."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.types import Capacity
from hetlb.balancer.engines.engine_metrics import parse

RECORDED = Path(__file__).parents[1] / "vllm" / "data"


def test_a_recorded_page_of_vllm_0_32() -> None:
    sample = parse((RECORDED / "metrics-busy.http").read_text())
    assert sample.missing == ()
    assert sample.invalid == ()
    assert sample.running == 64
    assert sample.waiting == 16
    assert sample.kv_usage is not None
    assert 0 < sample.kv_usage < 0.1
    assert sample.capacity.kv_cache_tokens == 262_144
    assert sample.capacity.block_size == 128
    assert sample.preemptions == 0


def page(**values: str) -> str:
    return "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in values.items())


def test_engines_of_one_server_are_summed() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{i}",model_name="m"}} {3 + i}\n'
        f'vllm:num_requests_waiting{{engine="{i}",model_name="m"}} 1\n'
        f'vllm:kv_cache_usage_perc{{engine="{i}",model_name="m"}} 0.{i + 2}\n'
        f'vllm:cache_config_info{{block_size="16",engine="{i}",num_gpu_blocks="{100 + i}"}} 1.0\n'
        for i in range(2)
    )
    sample = parse(text)
    assert sample.kv_usage == pytest.approx((0.2 * 1600 + 0.3 * 1616) / 3216)
    assert sample.kv_usage_max == 0.3
    assert sample == EngineSample(
        running=7,
        waiting=2,
        kv_usage=sample.kv_usage,
        kv_usage_max=0.3,
        capacity=Capacity(kv_cache_tokens=3216, block_size=16, kv_tokens_per_request=1600, engines=2),
        engine="vllm",
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 500), st.floats(0, 1), st.integers(1, 10**6)),
        min_size=1,
        max_size=16,
    ),
    st.randoms(),
)
def test_any_number_of_engines(engines: list[tuple[int, int, float, int]], order: random.Random) -> None:
    """Counts and KV tokens are sums, KV use is what the tokens in use are of all, in whatever order."""
    lines = [
        line
        for number, (running, waiting, usage, blocks) in enumerate(engines)
        for line in (
            f'vllm:num_requests_running{{engine="{number}",model_name="a,engine=9"}} {running}',
            f'vllm:num_requests_waiting{{engine="{number}",model_name="a,engine=9"}} {waiting}',
            f'vllm:kv_cache_usage_perc{{engine="{number}",model_name="a,engine=9"}} {usage!r}',
            f'vllm:cache_config_info{{block_size="16",engine="{number}",num_gpu_blocks="{blocks}"}} 1.0',
        )
    ]
    order.shuffle(lines)
    sample = parse("\n".join(lines))
    tokens = [16 * blocks for *_, blocks in engines]
    assert sample.running == sum(running for running, *_ in engines)
    assert sample.waiting == sum(waiting for _, waiting, *_ in engines)
    in_use = sum(usage * each for (_, _, usage, _), each in zip(engines, tokens, strict=True))
    assert sample.kv_usage == pytest.approx(in_use / sum(tokens))
    assert sample.kv_usage_max == max(usage for _, _, usage, _ in engines)
    assert sample.capacity == Capacity(
        kv_cache_tokens=sum(tokens), block_size=16, kv_tokens_per_request=min(tokens), engines=len(engines)
    )


def test_a_repeated_series_is_not_counted_twice() -> None:
    assert parse(page(num_requests_running="3") * 2).running == 3


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "1e400", "1e300", "abc", "1e13"])
def test_absurd_counts_are_discarded(value: str) -> None:
    sample = parse(page(num_requests_running=value))
    assert sample.running is None
    assert sample.invalid == ("vllm:num_requests_running",)


@pytest.mark.parametrize("value", ["NaN", "-0.1", "1.01", "Inf", "87"])
def test_absurd_fractions_are_discarded(value: str) -> None:
    assert parse(page(kv_cache_usage_perc=value)).kv_usage is None


def test_old_names_are_known() -> None:
    assert parse(page(gpu_cache_usage_perc="0.5")).kv_usage == 0.5


def test_missing_names_are_told() -> None:
    assert parse("<html>no metrics here</html>").missing == (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
    )


@pytest.mark.parametrize("labels", ['num_gpu_blocks="None",block_size="16"', 'kv_cache_size_tokens="-5"', ""])
def test_a_capacity_that_makes_no_sense_is_unknown(labels: str) -> None:
    sample = parse(f"vllm:cache_config_info{{{labels}}} 1.0\n")
    assert sample.capacity.kv_cache_tokens is None
    assert sample.invalid == ("vllm:cache_config_info",)


@given(st.text())
def test_nothing_breaks_it(text: str) -> None:
    parse(text)
    parse("vllm:cache_config_info{" + text)
    parse('vllm:num_requests_running{engine="0"} ' + text)
