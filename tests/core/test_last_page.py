"""Metrics pages of one engine, look after look: the places of the last one are read alone."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.engines.engine_metrics import parse
from hetlb.balancer.engines.last_page import MAX_HELD_BYTES, LastPage, NextPage

DATA = Path(__file__).parents[1] / "vllm" / "data"
IDLE, BUSY = (
    DATA.joinpath(f"metrics-{name}.http").read_bytes().partition(b"\r\n\r\n")[2] for name in ("idle", "busy")
)
STARTED = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {}\n"
#: Groups of a page: read ones of each kind, and others.
NAMES = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:generation_tokens_total", "vllm:lora_requests_info", "vllm:other", "python_gc", "vllm:num",
)  # fmt: skip
SERIES = st.dictionaries(
    st.sampled_from(['engine="0"', 'engine="1"', 'engine="0",priority="5"', 'a="\\n# TYPE x"', ""]),
    st.one_of(st.integers(0, 3).map(str), st.sampled_from(["0.5", "1e9", "123456.789", "NaN", "x"])),
    max_size=3,
)
GROUPS = st.dictionaries(st.sampled_from(NAMES), SERIES, min_size=1)


def text_of(groups: dict[str, dict[str, str]], began: object) -> bytes:
    page = "".join(
        f"# HELP {name} Help.\n# TYPE {name} gauge\n"
        + "".join(f"{name}{{{labels}}} {value}\n" for labels, value in series.items())
        for name, series in groups.items()
    )
    return (page + ("" if began is None else STARTED.format(began))).encode()


def read(last: LastPage, page: bytes, size: int = 1 << 20) -> object:
    following = NextPage(last)
    for at in range(0, len(page), size):
        following.feed(page[at : at + size])
    return following.sample()


def test_the_next_pages_of_a_server_are_read_at_their_places() -> None:
    last = LastPage()
    busy = BUSY.replace(b'cache_usage_perc{engine="0"', b'cache_usage_perc{engine="0",more="x"')
    for page in (IDLE, IDLE, BUSY, busy, IDLE):
        assert read(last, page, 4096) == parse(page.decode())
    assert last.whole == 1, "expected that only the first page was read whole"
    other = LastPage()
    assert read(other, BUSY) == parse(BUSY.decode())
    assert read(other, IDLE) == parse(IDLE.decode())
    assert other.whole == 1


def test_a_page_that_says_the_same_gives_the_same_sample() -> None:
    last = LastPage()
    assert read(last, IDLE) is read(
        last, IDLE.replace(b"python_gc_objects_collected", b"python_gc_objects_kept")
    )


def test_a_new_series_and_a_new_group_are_read() -> None:
    last = LastPage()
    read(last, IDLE)
    head = b"# TYPE vllm:num_requests_running gauge\n"
    assert head in IDLE
    more = IDLE.replace(head, head + b'vllm:num_requests_running{engine="7"} 5.0\n')
    assert read(last, more) == parse(more.decode())
    grown = more + b'# TYPE vllm:lora_requests_info gauge\nvllm:lora_requests_info{max_lora="3"} 1.0\n'
    assert read(last, grown) == parse(grown.decode())


def test_another_process_at_the_address_is_read_whole() -> None:
    last = LastPage()
    for began, name in ((1, "vllm:num"), (2, "vllm:num_requests_waiting")):
        page = text_of({"vllm:num_requests_running": {"": "1"}, name: {"": "2"}}, began)
        assert read(last, page) == parse(page.decode())
    assert last.whole == 2


def test_a_long_page_is_read_as_it_comes() -> None:
    last = LastPage()
    page = IDLE + b"vllm:other 1\n" * (MAX_HELD_BYTES // 12)
    assert read(last, page, 1 << 16) == parse(page.decode())
    assert last.whole == 0


@given(st.lists(GROUPS, min_size=1, max_size=5), st.sampled_from([None, 7]), st.integers(1, 4))
def test_pages_of_one_process_are_read_as_each_alone(
    pages: list[dict[str, dict[str, str]]], began: int | None, repeats: int
) -> None:
    """A process keeps the groups that it has once begun; their series come and go."""
    last, groups = LastPage(), dict[str, dict[str, str]]()
    for more in pages:
        groups = {**{name: {} for name in groups}, **more}
        page = text_of(groups, began)
        for _ in range(repeats):
            assert repr(read(last, page)) == repr(parse(page.decode()))


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=8))
def test_any_bytes_are_read_as_each_page_alone(pages: list[bytes]) -> None:
    last = LastPage()
    for page in pages:
        page = page.replace(b"#", b"\n# TYPE ")
        assert repr(read(last, page)) == repr(parse(page.decode("utf-8", "replace")))
