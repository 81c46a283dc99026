"""Quantities with units, and quantities that lost theirs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.errors import ConfigError
from hetlb.tools.plan.common.quantities import read_bytes, read_memory, read_parameters


@pytest.mark.parametrize(
    ("written", "size"),
    [("48GiB", 48 << 30), ("80 GB", 80 * 10**9), (48305799168.0, 48305799168), ("48305799168", 48305799168),
     ("0.5TiB", 1 << 39), ("24576mib", 24 << 30)],
)  # fmt: skip
def test_memory(written: float | str, size: int) -> None:
    assert read_memory(written, "k") == size


@pytest.mark.parametrize(
    ("written", "count"), [("8.03B", 8.03e9), ("500M", 5e8), (7e9, 7e9), ("1.5e9", 1.5e9)]
)
def test_parameters(written: float | str, count: float) -> None:
    assert read_parameters(written, "k") == pytest.approx(count)


@pytest.mark.parametrize(
    "wrong", ["", "GiB", "48 GiBs", "-1GiB", "1_", "nan", "inf", 0.0, -5.0, float("nan")]
)
def test_what_is_no_quantity(wrong: float | str) -> None:
    with pytest.raises(ConfigError, match=r"^memory: expected"):
        read_memory(wrong, "memory")


def test_a_guess_for_a_forgotten_unit() -> None:
    with pytest.raises(ConfigError, match=r"k: expected bytes, got 80: did you mean 80GiB\?"):
        read_memory(80.0, "k")
    with pytest.raises(
        ConfigError, match=r"k: expected a number of parameters, got 70\.6: did you mean 70\.6B\?"
    ):
        read_parameters(70.6, "k")


@given(st.integers(1, 10**15), st.sampled_from(["", "B", "KiB", "GB"]))
def test_whole_numbers_are_exact(number: int, unit: str) -> None:
    factor = {"": 1, "B": 1, "KiB": 1024, "GB": 10**9}[unit]
    assert read_bytes(f"{number}{unit}", "k") == pytest.approx(number * factor, rel=1e-15)
