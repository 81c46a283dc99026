"""An engine's own means since its start: read from its page, and believed until its answers come."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from helpers import FAST, MODEL, dispatched, make_scheduler, request
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.core.facts import EngineHistory, EngineSample
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, InstanceSpec, Lease, Outcome
from hetlb.balancer.engines.engine_history import HistoryPage

VLLM = """\
vllm:num_requests_running{engine="0"} 2
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01"} 900
vllm:inter_token_latency_seconds_sum{engine="0"} 20.0
vllm:inter_token_latency_seconds_count{engine="0"} 1000
vllm:request_prefill_time_seconds_sum{engine="0"} 3.0
vllm:request_prefill_time_seconds_count{engine="0"} 10
vllm:iteration_tokens_total_count{engine="0"} 250
vllm:request_success_total{engine="0",finished_reason="stop"} 8
vllm:request_success_total{engine="0",finished_reason="length"} 2
vllm:prompt_tokens_total{engine="0"} 6000
vllm:prefix_cache_hits_total{engine="0"} 1000
vllm:generation_tokens_total{engine="0"} 1000
"""
SGLANG = """\
sglang:num_running_reqs 2
sglang:inter_token_latency_seconds_sum 20.0
sglang:inter_token_latency_seconds_count 1000
sglang:num_requests_total 10
sglang:prompt_tokens_total 6000
sglang:cached_tokens_total 1000
sglang:generation_tokens_total 1000
"""
MEANS = EngineHistory(prompt=500.0, prefill_s=0.3, output=100.0, step_s=0.02, batch=4.0)


def read(text: str, size: int = 1 << 20) -> EngineSample:
    page, data = HistoryPage(), text.encode()
    for at in range(0, len(data), size):
        page.feed(data[at : at + size])
    return page.sample()


@given(st.integers(1, 400))
def test_means_are_read_from_pieces_of_any_size(size: int) -> None:
    assert read(VLLM, size).history == MEANS
    assert read(VLLM, size).running == 2


def test_means_of_sglang_lack_the_time_of_prompts_and_the_batch() -> None:
    assert read(SGLANG).history == EngineHistory(500.0, None, 100.0, 0.02, 1.0)


def test_the_older_name_of_the_time_between_tokens_is_read() -> None:
    assert read(VLLM.replace("inter_token_latency", "time_per_output_token")).history == MEANS


def test_ranks_and_engines_that_repeat_a_figure_change_no_mean() -> None:
    assert read(VLLM + VLLM.replace('engine="0"', 'engine="1"')).history == MEANS


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("latency_seconds_count{engine=\"0\"} 1000", "latency_seconds_count{engine=\"0\"} 99"),
        ('"stop"} 8', '"stop"} 1'),
        ("latency_seconds_sum{engine=\"0\"} 20.0", "latency_seconds_sum{engine=\"0\"} NaN"),
        ("latency_seconds_sum{engine=\"0\"} 20.0", "latency_seconds_sum{engine=\"0\"} -20.0"),
        ("latency_seconds_sum{engine=\"0\"} 20.0", "latency_seconds_sum{engine=\"0\"} 1e300"),
        ("vllm:prompt_tokens_total", "vllm:prompt_tokens_other"),
    ],
)  # fmt: skip
def test_few_requests_and_absurd_figures_make_no_mean(old: str, new: str) -> None:
    assert old in VLLM
    assert read(VLLM.replace(old, new)).history is None


def test_ranks_with_absurd_sums_end_nothing() -> None:
    ranks = "".join(VLLM.replace('engine="0"', f'engine="{n}"').replace(" 20.0", " 1e308") for n in range(9))
    assert read(ranks).history is None


absurd = st.floats(1e-300, 1e7)


@given(absurd, st.none() | absurd, absurd, absurd, st.floats(1.0, 1e7))
def test_whatever_an_engine_says_of_its_past_is_a_speed(
    prompt: float, prefill_s: float | None, output: float, step_s: float, batch: float
) -> None:
    scheduler = make_scheduler([InstanceSpec("a", MODEL), InstanceSpec("b", MODEL)], "hetlb")
    history = EngineHistory(prompt, prefill_s, output, step_s, batch)
    scheduler.on_scrape("a", EngineSample(running=0, waiting=0, history=history), 0.0)
    quick = ServiceClass("quick", ttft_s=1.0, tpot_s=0.1)
    for i in range(4):
        dispatched(scheduler.on_arrival(request(i, prompt=500, service=quick), 0.1 * i))
    assert all(0.0 < each.latency.step_s(1.0, 1000.0) < math.inf for each in scheduler.instances)


def past(slower: float) -> EngineSample:
    """The past of an engine `slower` times as slow as `FAST`: answers of 100 tokens, alone."""
    engine = FAST.scaled(slower)
    prefill_s = engine.first_token_s(500.0, 0.0, 0.0, 0.0, 0.0, 2048.0)
    history = EngineHistory(500.0, prefill_s, 100.0, engine.step_s(1.0, 550.0), 1.0)
    return EngineSample(running=0, waiting=0, kv_usage=0.0, history=history)


def cold(*slower: float) -> Scheduler:
    capacity = Capacity(kv_cache_tokens=1_000_000, max_num_seqs=256)
    fleet = [InstanceSpec(f"e{i}", MODEL, capacity=capacity) for i in range(len(slower))]
    scheduler = make_scheduler(fleet, "hetlb")
    for i, each in enumerate(slower):
        scheduler.on_scrape(f"e{i}", past(each), 0.0)
    return scheduler


def test_the_first_burst_goes_where_the_engines_past_says_that_it_is_fast() -> None:
    scheduler = cold(8.0, 1.0, 8.0)
    placed = [scheduler.on_arrival(request(i, prompt=500), 0.0) for i in range(20)]
    assert [dispatched(each).instance for each in placed] == ["e1"] * 20


def test_an_engine_s_own_answers_take_the_place_of_its_past() -> None:
    scheduler = cold(8.0, 1.0)
    lease: Lease = dispatched(scheduler.on_arrival(request(1, prompt=500, streamed=True), 0.0))
    scheduler.on_first_token(lease, 5.0)
    lease.output_tokens = 50
    scheduler.on_lease_ended(lease, Outcome.OK, 100.0)
    assert scheduler.instances[1].speed.factor > scheduler.instances[0].speed.factor
    before = [each.speed.factor for each in scheduler.instances]
    scheduler.on_scrape("e1", past(1.0), 101.0)
    assert [each.speed.factor for each in scheduler.instances] == before


def test_a_profile_is_believed_whatever_the_past_says() -> None:
    scheduler = make_scheduler([InstanceSpec("a", MODEL, latency=FAST)], "hetlb")
    scheduler.on_scrape("a", past(3.0), 0.0)
    assert scheduler.instances[0].speed.factor == 1.0


def stated(folder: Path, instances: str) -> Scheduler:
    path = folder / "fleet.yaml"
    path.write_text(f"version: 1\nmodels: [{{name: m, instances: [{instances}]}}]\n")
    return make_scheduler(load_fleet(path).instances, "hetlb")


@pytest.mark.parametrize(
    ("slow", "fast"),
    [
        ("gpu: L40S", "gpu: H100"),
        ("gpu: NVIDIA-A100-SXM4-80GB", "gpu: h100_sxm"),
        ("gpu: H100", "gpu: H100, gpus: 4"),
        ("labels: {nvidia.com/gpu.product: NVIDIA-L4}", "labels: {nvidia.com/gpu.product: NVIDIA-B200}"),
    ],
)
def test_without_a_profile_the_gpus_say_which_server_is_fast(tmp_path: Path, slow: str, fast: str) -> None:
    scheduler = stated(tmp_path, f"{{url: 'http://a:1', {slow}}}, {{url: 'http://b:1', {fast}}}")
    leases = [dispatched(scheduler.on_arrival(request(i, prompt=500, model="m"), 0.0)) for i in range(3)]
    assert {lease.instance for lease in leases} == {"b:1"}


def test_an_answer_shows_for_all_servers_how_large_the_model_is(tmp_path: Path) -> None:
    scheduler = stated(tmp_path, "{url: 'http://a:1', gpu: L40S}, {url: 'http://b:1', gpu: H100}")
    a, b = scheduler.instances
    ratio = a.latency.step_s(1.0, 1000.0) / b.latency.step_s(1.0, 1000.0)
    lease = dispatched(scheduler.on_arrival(request(1, prompt=500, model="m", streamed=True), 0.0))
    scheduler.on_first_token(lease, 1.0)
    lease.output_tokens = 50
    scheduler.on_lease_ended(lease, Outcome.OK, 5.0)
    assert b.speed.factor > 2.0
    assert a.latency.step_s(1.0, 1000.0) / b.latency.step_s(1.0, 1000.0) == pytest.approx(ratio)


def test_a_name_of_no_known_gpu_is_a_label_alone(tmp_path: Path) -> None:
    scheduler = stated(tmp_path, "{url: 'http://a:1', gpu: pool-7}")
    assert scheduler.instances[0].spec.latency is None


@pytest.mark.parametrize("gpus", ["0", "-1", "2000", "H100"])
def test_a_wrong_number_of_gpus_is_refused(tmp_path: Path, gpus: str) -> None:
    with pytest.raises(Exception, match=r"models\[0\].instances\[0\].gpus: expected"):
        stated(tmp_path, f"{{url: 'http://a:1', gpu: H100, gpus: {gpus}}}")


def test_gpus_are_as_fast_beside_each_other_as_kernel_tables_say() -> None:
    """Steps of Llama-3.1-8B by aiconfigurator-core 0.12.0: H100 over A100 0.52, L40S 1.85."""
    from hetlb.balancer.config.gpus import latency_of

    a100, h100, l40s = (latency_of(name, 1) for name in ("A100", "H100", "L40S"))
    assert isinstance(a100, LatencyModel)
    assert isinstance(h100, LatencyModel)
    assert isinstance(l40s, LatencyModel)
    for each, known in ((h100, 0.52), (l40s, 1.85)):
        assert each.step_s(1.0, 1000.0) / a100.step_s(1.0, 1000.0) == pytest.approx(known, rel=0.2)
