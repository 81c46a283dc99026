"""Metrics pages of any engine: which series are summed, which repeat, and pages of any size."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from hetlb.balancer.engines.engine_metrics import _NAMES, MAX_LINE_BYTES, EnginePage, labels_of, parse

SHARED = Path(__file__).parents[3] / "shared" / "data" / "metrics"
EXPECTED = SHARED / "expected.json"


@pytest.mark.skipif(not EXPECTED.is_file(), reason=f"expected {EXPECTED}")
def test_pages_of_real_servers() -> None:
    expected = json.loads(EXPECTED.read_text())
    found = {}
    for name in expected:
        sample = parse((SHARED / f"{name}.prom").read_text())
        found[name] = {
            "running": sample.running, "waiting": sample.waiting,
            "kv_usage": None if sample.kv_usage is None else round(sample.kv_usage, 6),
            "kv_cache_tokens": sample.capacity.kv_cache_tokens,
        }  # fmt: skip
    assert found == expected


def sglang(name: str, value: float, tp: int = 0, dp: int = 0, priority: str | None = "") -> str:
    last = "" if priority is None else f',priority="{priority}"'
    labels = (
        f'model_name="q",engine_type="unified",tp_rank="{tp}",pp_rank="0",moe_ep_rank="{tp}",dp_rank="{dp}"'
    )
    return f"sglang:{name}{{{labels}{last}}} {value}\n"


def test_ranks_repeat_and_priorities_divide_what_an_engine_has() -> None:
    page = ""
    for dp in (0, 1):
        for tp in range(4):
            page += sglang("max_total_num_tokens", 60_000 + tp, tp, dp, None)
            page += sglang("token_usage", 0.1 * dp + 0.01 * tp, tp, dp, None)
            page += sglang("num_running_reqs", 3 + dp, tp, dp)
            page += sglang("num_running_reqs", 2, tp, dp, "0") + sglang(
                "num_running_reqs", 1 + dp, tp, dp, "5"
            )
            page += sglang("num_queue_reqs", 1, tp, dp, "0") + sglang("num_queue_reqs", 2, tp, dp, "5")
    sample = parse(page)
    assert (sample.engine, sample.running, sample.waiting) == ("sglang", 7, 6)
    assert (sample.capacity.kv_cache_tokens, sample.capacity.kv_tokens_per_request) == (120_000, 60_000)
    assert sample.capacity.engines == 2
    assert sample.kv_usage == pytest.approx((0.03 + 0.13) / 2)
    assert sample.kv_usage_max == pytest.approx(0.13)
    assert (sample.missing, sample.invalid) == ((), ())


@given(
    st.integers(1, 8), st.integers(1, 4), st.lists(st.integers(0, 50), min_size=1, max_size=4), st.randoms()
)
def test_the_number_of_ranks_changes_nothing(
    tps: int, dps: int, counts: list[int], order: random.Random
) -> None:
    lines = []
    for dp in range(dps):
        for tp in range(tps):
            lines.append(sglang("num_running_reqs", sum(counts), tp, dp))
            lines += [sglang("num_running_reqs", each, tp, dp, str(n)) for n, each in enumerate(counts)]
            lines.append(sglang("max_total_num_tokens", 1000, tp, dp, None))
    order.shuffle(lines)
    sample = parse("".join(lines))
    assert sample.running == sum(counts) * dps
    assert sample.capacity.kv_cache_tokens == 1000 * dps


TRITON = """
nv_inference_request_success{model="ensemble",version="1"} 12
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 4
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 6
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.4875
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 3042
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="tensorrt_llm",version="1"} 3197
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 6239
"""


def test_triton() -> None:
    sample = parse(TRITON)
    assert (sample.engine, sample.running, sample.waiting, sample.kv_usage) == ("triton", 4, 2, 0.4875)
    assert (sample.capacity.kv_cache_tokens, sample.capacity.block_size) == (6239 * 64, 64)
    told = TRITON + 'nv_trt_llm_request_metrics{request_type="waiting"} 3\n'
    assert parse(told).waiting == 3
    beside_vllm = parse(
        'nv_inference_count{model="m"} 1\nvllm:num_requests_running{model="m",version="1"} 2\n'
    )
    assert (beside_vllm.engine, beside_vllm.running) == ("vllm", 2)


HYBRID = (
    'vllm:cache_config_info{block_size="2096",engine="0",mamba_block_size="1000000",'
    'num_gpu_blocks="800"%s} 1\n'
)


def test_blocks_of_a_hybrid_model_are_no_capacity() -> None:
    assert parse(HYBRID % "").capacity.kv_cache_tokens is None
    assert parse(HYBRID % ',kv_cache_size_tokens="1663201"').capacity.kv_cache_tokens == 1_663_201
    plain = HYBRID.replace("1000000", "None") % ""
    assert parse(plain).capacity.kv_cache_tokens == 800 * 2096


def large(engines: int) -> bytes:
    """A page of many data-parallel engines, most of it histograms."""
    lines = []
    for n in range(engines):
        labels = f'engine="{n}",model_name="meta-llama/Llama-3.1-405B-Instruct"'
        bucket = f"vllm:e2e_request_latency_seconds_bucket{{{labels}"
        lines += [f'{bucket},le="{bound}.0"}} {bound}' for bound in range(600)]
        lines.append(f"vllm:num_requests_running{{{labels}}} {n}.0")
        lines.append(f"vllm:num_requests_waiting{{{labels}}} 1.0")
        lines.append(f"vllm:kv_cache_usage_perc{{{labels}}} 0.5")
        lines.append(f'vllm:cache_config_info{{block_size="16",engine="{n}",num_gpu_blocks="16384"}} 1.0')
    return ("\n".join(lines) + "\n").encode()


@pytest.mark.parametrize("size", [1 << 20, 65_536, 1000, 17])
def test_a_page_of_many_engines_in_pieces_of_any_size(size: int) -> None:
    data = large(32)
    assert len(data) > 1 << 20
    page = EnginePage()
    for at in range(0, len(data), size):
        page.feed(data[at : at + size])
    sample = page.sample()
    assert (sample.running, sample.waiting, sample.kv_usage) == (sum(range(32)), 32, 0.5)
    assert (sample.capacity.engines, sample.capacity.kv_cache_tokens) == (32, 32 * 16 * 16384)
    assert sample == parse(data.decode())


@pytest.mark.parametrize(
    "piece",
    [
        b"x" * 65_536, b"vllm:num_requests_running{a=\"", b"\n" * 65_536, b"vllm:other 1\n" * 5000,
        b'vllm:num_requests_running{engine="' + b"0" * 100 + b'"} 1\n',
    ],
)  # fmt: skip
def test_what_is_kept_of_a_page_is_bounded(piece: bytes) -> None:
    page = EnginePage()
    tracemalloc.start()
    try:
        for _ in range(30):
            page.feed(piece)
        page.sample()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_many_series_of_one_name_are_bounded() -> None:
    page = EnginePage()
    for n in range(20_000):
        page.feed(b'vllm:num_requests_running{engine="%d"} 1\n' % n)
    assert page.sample().running == 4096


PIECES = [
    b"vllm:num_requests_running", b"{", b'engine="1"', b"} ", b"2", b"\n", b" ", b"x" * 70_000,
    b"sglang:token_usage 0.5\n", b"\xff", b"\r",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES)), st.integers(1, 30))
def test_any_pieces_of_the_same_page_read_the_same(parts: list[bytes], size: int) -> None:
    data = b"".join(parts)
    whole, cut = EnginePage(), EnginePage()
    whole.feed(data)
    step = max(size, len(data) // 2000)
    for at in range(0, len(data), step):
        cut.feed(data[at : at + step])
    assert whole.sample() == cut.sample()


FIGURES = "{name}num_requests_running{labels} 3{rest}\n{name}num_requests_waiting{labels} 2{rest}\n"
KV = "{name}{usage}{labels} 0.25{rest}\n"


@pytest.mark.parametrize(
    "rest", ["", " 1700000000", " 1700000000.123", '  # {trace_id="a}b"} 0.5 1.7e9', "\r"]
)
@pytest.mark.parametrize(
    "labels", ["", "{}", '{model_name="a } b # {c=\\"d\\"}",engine="0",}', ' { engine = "0" }']
)
@pytest.mark.parametrize(
    ("engine", "name", "usage"),
    [
        ("vllm", "vllm:", "kv_cache_usage_perc"),
        ("vllm", "vllm_", "gpu_cache_usage_perc"),
        ("vllm", "ray_vllm_", "kv_cache_usage_perc"),
        ("vllm", "ray_vllm:", "kv_cache_usage_perc"),
        ("tensorrt-llm", "trtllm:", "kv_cache_utilization"),
        ("tensorrt-llm", "ray_trtllm_", "kv_cache_utilization"),
        ("lmdeploy", "lmdeploy_", "gpu_cache_usage_perc"),
        ("like-vllm", "aphrodite:", "gpu_cache_usage_perc"),
        ("like-vllm", "fastdeploy:", "gpu_cache_usage_perc"),
        ("like-vllm", "", "gpu_cache_usage_perc"),
    ],
)
def test_spellings_of_names_and_lines(engine: str, name: str, usage: str, labels: str, rest: str) -> None:
    page = (FIGURES + KV).format(name=name, usage=usage, labels=labels, rest=rest)
    sample = parse("# TYPE x gauge\n" + page + "# EOF\n")
    assert (sample.engine, sample.running, sample.waiting, sample.kv_usage) == (engine, 3, 2, 0.25)


def test_processes_of_one_rank_repeat_a_figure_and_lines_may_be_indented() -> None:
    line = '  sglang:num_running_reqs{{pid="{0}",tp_rank="{1}"}} 5\n'
    assert parse("".join(line.format(100 + n, n) for n in range(4))).running == 5


def test_a_value_right_behind_its_labels() -> None:
    page = 'vllm:num_requests_running{engine="0"}3\nvllm:num_requests_waiting{engine="0}4\n'
    sample = parse(page)
    assert (sample.running, sample.waiting) == (3, None)  # the second has no end of its label


def test_sglang_behind_an_exporter() -> None:
    for name in ("sglang_", "ray_sglang_", "ray_sglang:"):
        page = f"{name}num_running_reqs 3\n{name}num_queue_reqs 2\n{name}token_usage 0.25\n"
        sample = parse(page + f"{name}max_total_num_tokens 1000\n")
        assert (sample.engine, sample.running, sample.waiting, sample.kv_usage) == ("sglang", 3, 2, 0.25)
        assert sample.capacity.kv_cache_tokens == 1000


def test_a_name_in_quotes() -> None:
    page = '{"vllm:num_requests_running", engine="0"} 3\n{"vllm:num_requests_waiting"} 2\n'
    sample = parse(page)
    assert (sample.running, sample.waiting) == (3, 2)


def test_waiting_by_reason_is_summed_where_it_stands_alone() -> None:
    by_reason = (
        'vllm:num_requests_waiting_by_reason{engine="0",reason="waiting for capacity, {full}"} 5\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 2\n'
    )
    assert parse("vllm:num_requests_running 1\n" + by_reason).waiting == 7
    assert parse(by_reason + 'vllm:num_requests_waiting{engine="0"} 6\n').waiting == 6


def test_a_name_in_two_spellings_counts_once() -> None:
    page = (
        'vllm:num_requests_running{engine="0"} 3\nray_vllm_num_requests_running{engine="0",WorkerId="w"} 3\n'
    )
    assert parse(page).running == 3


def test_replicas_of_one_page_are_engines() -> None:
    page = ""
    for replica, usage in (("a", 0.2), ("b", 0.6)):
        labels = f'ReplicaId="{replica}",WorkerId="w{replica}",engine="0",model_name="m"'
        page += f"ray_vllm_num_requests_running{{{labels}}} 3\nray_vllm_num_requests_waiting{{{labels}}} 1\n"
        page += f'ray_vllm_cache_config_info{{{labels},block_size="16",num_gpu_blocks="100"}} 1\n'
        page += f"ray_vllm_kv_cache_usage_perc{{{labels}}} {usage}\n"
    sample = parse(page)
    assert (sample.running, sample.waiting, sample.kv_usage_max) == (6, 2, 0.6)
    assert sample.kv_usage == pytest.approx(0.4)
    assert (sample.capacity.engines, sample.capacity.kv_cache_tokens) == (2, 3200)


def blanks(least: int) -> st.SearchStrategy[str]:
    return st.text(" \t", min_size=least, max_size=2)


#: Values of labels as they are, of which a page has the escapes.
VALUES = st.text(st.sampled_from('ab"\\\n{}#,= é0'), max_size=6)
LABELS = st.dictionaries(st.sampled_from(["engine", "model_name", "le", "a_1", "_b"]), VALUES, max_size=4)
OTHER = [
    "vllm:num_requests_run",
    "vllm:num_requests_running_ago",
    "http_requests_total",
    "x",
    "up",
    "vllm:x:y",
]
NUMBERS = st.one_of(
    st.floats().map(repr), st.integers(-(10**20), 10**20).map(str),
    st.sampled_from(["NaN", "+Inf", "-Inf", "1e5", "1.5E-3", "+7", ".5", "5."]),
)  # fmt: skip


@st.composite
def lines_of_series(draw: st.DrawFn) -> tuple[object, str]:
    """Return a series and its line as the text format of Prometheus has it, with blanks and tabs."""
    name = draw(st.sampled_from(sorted(_NAMES) + OTHER))
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    values = draw(LABELS)
    pairs = [
        f'{draw(blanks(0))}{label}{draw(blanks(0))}={draw(blanks(0))}"{value.translate(escapes)}"'
        for label, value in values.items()
    ]
    labels = "{" + ",".join(pairs) + draw(st.sampled_from(["", ","]) if pairs else st.just("")) + "}"
    labels = (
        draw(st.sampled_from([labels, draw(blanks(0)) + labels]))
        if pairs
        else draw(st.sampled_from(["", "{}"]))
    )
    stamp = draw(st.one_of(st.just(""), st.integers(0, 2 * 10**12).map(lambda at: f" {at}")))
    line = f"{name}{labels}{draw(blanks(1))}{draw(NUMBERS)}{stamp}{draw(blanks(0))}"
    return (name, frozenset(values.items())), line


COMMENTS = [
    "# HELP vllm:num_requests_running a \\\\ b", "# vllm:num_requests_running 3", "# TYPE x gauge", "# EOF",
    "#", "",
]  # fmt: skip


@given(
    st.lists(
        st.one_of(lines_of_series(), st.sampled_from(COMMENTS).map(lambda line: (line, line))),
        max_size=12, unique_by=lambda each: each[0],
    ),
    st.integers(1, 60),
)  # fmt: skip
def test_the_parser_of_prometheus_reads_the_same(lines: list[tuple[object, str]], size: int) -> None:
    text = "".join(f"{line}\n" for _, line in lines)
    theirs = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in _NAMES:
                theirs[sample.name, tuple(sorted(sample.labels.items()))] = repr(float(sample.value))
    page = EnginePage()
    data = text.encode()
    for at in range(0, len(data), size):
        page.feed(data[at : at + size])
    page.sample()
    ours = {
        (name, tuple(sorted(labels_of(labels).items()))): repr(value)
        for name, values in page._page.series.items()
        for labels, value in values.items()
    }
    assert ours == theirs


RUNNING = b"vllm:num_requests_running"
NOT_READ = [
    RUNNING + b'{engine="0', RUNNING + b'{engine="0\\"} 3', RUNNING + b"{", RUNNING, RUNNING + b"} 3",
    RUNNING + b"{" + b"a" * 60_000 + b"}", RUNNING + b" " * 60_000 + b"{",
    RUNNING + b"{" + b'a="",' * 129 + b"} 3", RUNNING + b" " + b"3" * MAX_LINE_BYTES,
    b'{"' + RUNNING, b"\x1f\x8b\x08\x00" + RUNNING + b" 3", b"<p>" + RUNNING + b" 3",
    RUNNING + b"x" * (1 << 20) + b" 3",
]  # fmt: skip


@pytest.mark.parametrize("line", NOT_READ, ids=range(len(NOT_READ)))
@pytest.mark.parametrize("size", [1 << 21, 1000])
def test_a_line_that_is_none_is_lost_alone(line: bytes, size: int) -> None:
    data = b"vllm:num_requests_waiting 2\n" + line + b"\nvllm:kv_cache_usage_perc 0.5\n"
    page = EnginePage()
    for at in range(0, len(data), size):
        page.feed(data[at : at + size])
    sample = page.sample()
    assert (sample.running, sample.waiting, sample.kv_usage) == (None, 2, 0.5)


def test_labels_of_a_page_are_bounded() -> None:
    page = EnginePage()
    for n in range(100):
        page.feed(b'vllm:num_requests_running{engine="%d",a="%b"} 1\n' % (n, b"x" * 60_000))
    assert page.sample().running == 8


def test_blanks_in_labels_and_escapes() -> None:
    line = "vllm:num_requests_running{{{}}} 3\n"
    sample = parse(line.format(' engine = "1" , a="\\\\"') + line.format('engine="2",a="\\""'))
    assert (sample.running, sample.capacity.engines) == (6, 2)
    assert labels_of('a="\\\\n",b="\\n\\"",c = "d",') == {"a": "\\n", "b": '\n"', "c": "d"}
