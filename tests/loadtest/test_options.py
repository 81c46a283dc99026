"""Flags are read as they are documented; `tests/cli/test_bench.py` has the messages."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.cli import request_files as options
from hetlb.errors import InputError
from hetlb.tools.workload.arrivals import Ramp, Waves


def test_rates() -> None:
    assert options.read_rates("2, 4.5,inf,trace,2") == [2.0, 4.5, math.inf, "trace"]


def test_limits_are_given_in_milliseconds() -> None:
    assert options.read_goodput(["ttft:500", "tpot:50.5"]) == {"ttft": 0.5, "tpot": 0.0505}
    assert options.read_goodput([]) == {}


def test_lists() -> None:
    assert options.read_percentiles("99,50, 99.9,99") == [50.0, 99.0, 99.9]
    assert options.read_metrics("itl,ttft,itl") == ["itl", "ttft"]
    assert [options.read_entry(each) for each in ("a=b=c", "d=")] == [("a", "b=c"), ("d", "")]
    assert options.read_names("--compare", "rr,p2c", {"p2c": 1, "rr": 2}) == ["rr", "p2c"]


@pytest.mark.parametrize("text", ["rr,rr", "rr,", "best"])
def test_names_that_are_none_or_twice(text: str) -> None:
    with pytest.raises(InputError, match=r"^--compare: expected "):
        options.read_names("--compare", text, {"rr": 1})


def test_a_ramp_is_all_its_flags_or_none() -> None:
    assert options.read_ramp(None, None, None) is None
    assert options.read_ramp("linear", 1.0, 9.0) == Ramp("linear", 1.0, 9.0)
    for start, end in ((None, 9.0), (1.0, None)):
        with pytest.raises(InputError, match=r"--ramp-up-(start|end)-rps: expected"):
            options.read_ramp("linear", start, end)


@given(st.text())
def test_whatever_is_typed_is_read_or_refused_in_one_line(text: str) -> None:
    readers = (
        options.read_rates,
        options.read_percentiles,
        options.read_metrics,
        lambda text: options.read_goodput([text]),
        options.read_entry,
    )
    for reader in readers:
        with contextlib.suppress(InputError):
            reader(text)


@pytest.mark.parametrize("text", ["5", "5:", ":5", "0:5", "-1:5", "5:15:1", "nan:5", "inf:5", "a:b"])
def test_waves_are_two_times(text: str) -> None:
    with pytest.raises(InputError, match="--waves: expected seconds on and seconds off, as 5:15, got"):
        options.read_waves(text)


def test_waves() -> None:
    assert options.read_waves("5:15") == Waves(5.0, 15.0)
    assert options.read_waves("0.5:0") == Waves(0.5, 0.0)
