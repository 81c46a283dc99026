"""Metrics pages of engines, as a fuzzer and the tests of growth give them."""

from __future__ import annotations

import dataclasses
import math

from fuzz.costs import Make, Reader, many, pieces

from hetlb.balancer.engines import engine_history, engine_metrics, last_page


def in_pieces(data: bytes) -> None:
    """A metrics page as it comes from a socket."""
    page = engine_metrics.EnginePage()
    for piece in pieces(data, 1000):
        page.feed(piece)
    page.sample()


def with_history(data: bytes) -> None:
    """The first metrics page of an engine without a profile: its histograms are read, too."""
    page = engine_history.HistoryPage()
    for piece in pieces(data, 1000):
        page.feed(piece)
    page.sample()


def again(data: bytes) -> None:
    """A metrics page and the next one of the same engine."""
    last = last_page.LastPage()
    for page in (data, data + b" "):
        following = last_page.NextPage(last)
        for piece in pieces(page, 1000):
            following.feed(piece)
        following.sample()


def page(data: bytes) -> None:
    """A metrics page."""
    engine_metrics.parse(data.decode("utf-8", "replace"))


def metrics(data: bytes) -> None:
    """Metrics pages of engines."""
    text = data.decode("utf-8", "replace")
    sample = engine_metrics.parse(text)
    for number in (sample.running, sample.waiting):
        assert number is None or (isinstance(number, int) and number >= 0)
    assert sample.kv_usage is None or 0 <= sample.kv_usage <= 1
    capacity = sample.capacity
    for number in (capacity.kv_cache_tokens, capacity.block_size, capacity.kv_tokens_per_request):
        assert number is None or number > 0
    counters = engine_metrics.page_of(text).counters()
    for name in (each.name for each in dataclasses.fields(counters)):
        value = getattr(counters, name)
        assert value is None or (value >= 0 and math.isfinite(value))


NAME = b"vllm:num_requests_running"
STRING = NAME + b'{engine="'
TARGETS = {"metrics": metrics}
PREFIXES: tuple[tuple[Reader, bytes], ...] = ((page, b""),)
#: name -> (reader, input of a size, the smaller size).
GROWTH: dict[str, tuple[Reader, Make, int]] = {
    "a metrics page": (page, many(b'vllm:num_requests_running{engine="0"} 1.0\n'), 64 << 10),
    "a metrics page in pieces": (
        in_pieces, many(b'vllm:num_requests_running{engine="0"} 1.0\n'), 64 << 10,
    ),
    "groups of two metrics pages": (
        again,
        many(b"# TYPE vllm:num_requests_running gauge\n", b"\nprocess_start_time_seconds 1\n"),
        8 << 10,
    ),
    "values of two metrics pages": (
        again,
        many(b'vllm:num_requests_running{a="%d"} 1\n', b"\nprocess_start_time_seconds 1\n# TYPE b c\n"),
        16 << 10,
    ),
    "a first metrics page in pieces": (
        with_history, many(b'vllm:inter_token_latency_seconds_sum{engine="0"} 1.0\n'), 64 << 10,
    ),
    "short lines of a first metrics page": (with_history, many(b" a\n"), 64 << 10),
    "a metrics page without a line end": (in_pieces, many(b"vllm:"), 512 << 10),
    "a metrics page of other names": (page, many(b"vllm:num_requests_run 1\n"), 512 << 10),
    "comments of a metrics page": (page, many(b"# HELP vllm:num_requests_running x\n"), 256 << 10),
    "short lines of a metrics page": (in_pieces, many(b" a\n"), 64 << 10),
    "short lines of a metrics page that differ": (
        in_pieces, lambda size: b"".join(b"vllm:a%06d 1\n" % n for n in range(size // 14)), 512 << 10,
    ),
    "indented short lines of a metrics page": (in_pieces, many(b" vllm:kv_cache_usage_perc 1\n"), 64 << 10),
    **{
        f"{kind} in a line of a metrics page, {where}": (page, many(unit, before, after), 15 << 10)
        for kind, unit in {
            "blanks": b" ", "letters": b"a", "quotes": b'"', "backslashes": b"\\", "braces": b"{",
            "closing braces": b"}", "commas": b",", "labels": b'a="",', "escapes": b'\\"', "digits": b"7",
            "equals": b"a=", "number signs": b" #",
        }.items()
        for where, before, after in (
            ("behind a name", NAME, b"{"),
            ("as labels", NAME + b"{", b"} 3"),
            ("in a string", STRING, b'"} 3'),
            ("as a string without end", STRING, b""),
            ("as a value", NAME + b" ", b""),
            ("behind a value", NAME + b" 3 ", b""),
            ("as a quoted name", b'{"', b'"} 3'),
        )
    },
}  # fmt: skip
