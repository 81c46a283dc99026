"""Charts are well-formed, stay inside their frame, and have readable axes, whatever the data."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from hetlb.loadtest.svg import Axis, Line, chart, legend, linear_ticks, log_ticks, thinned, tick_text

VALUES = st.just(0.0) | st.floats(1e-6, 1e9)
POINTS = st.lists(st.tuples(VALUES, VALUES), max_size=30).map(sorted)
WIDTH, HEIGHT = 420, 260


@given(st.lists(POINTS, max_size=10), st.booleans(), st.booleans(), st.booleans())
def test_every_point_is_inside_the_frame(
    lines: list[list[tuple[float, float]]], log_x: bool, log_y: bool, marks: bool
) -> None:
    made = chart(
        [Line(f"line {i} <&>", points) for i, points in enumerate(lines)],
        Axis("x <", log=log_x),
        Axis("y &", log=log_y, least=None if log_y else 0),
        marks=marks,
    )
    root = ElementTree.fromstring(made)
    for element in root.iter("polyline"):
        for pair in element.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT
    assert len(list(root.iter("polyline"))) == sum(bool(points) for points in lines)


def test_a_line_is_where_its_values_are() -> None:
    made = chart(
        [Line("a", [(0.0, 0.0), (5.0, 50.0), (10.0, 100.0)])], Axis("x", least=0), Axis("y", least=0)
    )
    line = ElementTree.fromstring(made).find(".//polyline")
    assert line is not None
    (x0, y0), (x1, y1), (x2, y2) = (
        tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()
    )
    assert (x0 + x2) / 2 == x1
    assert (y0 + y2) / 2 == y1
    assert x0 < x2
    assert y0 > y2  # up is more


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_and_few(low: float, span: float) -> None:
    high = low + span
    ticks = linear_ticks(low, high)
    assert 2 <= len(ticks) <= 7
    slack = 1e-6 * (abs(low) + abs(high))
    assert all(low - slack <= tick <= high + slack for tick in ticks)


@given(st.floats(1e-6, 1e6), st.floats(10.0, 1e9))
def test_ticks_of_a_logarithmic_axis(low: float, ratio: float) -> None:
    ticks = log_ticks(low, low * ratio)
    assert ticks == sorted(ticks)
    assert 1 <= len(ticks) <= 12
    for tick in ticks:
        mantissa = tick / 10 ** math.floor(math.log10(tick) + 1e-9)
        assert min(abs(mantissa - factor) for factor in (1, 2, 5)) < 1e-6


def test_long_lines_are_thinned_between_their_ends() -> None:
    points = [(float(i), float(i)) for i in range(10_000)]
    kept = thinned(points)
    assert len(kept) <= 400
    assert (kept[0], kept[-1]) == (points[0], points[-1])


def test_more_lines_than_colours_differ_in_their_dashes() -> None:
    made = legend([f"n{i}" for i in range(10)])
    assert made.count('class="line line-0"') == 2
    dashes = re.findall(r'class="line (line-\d)"[^>]*?(?:stroke-dasharray="([^"]*)")?/>', made)
    assert len(set(dashes)) == 10


def test_neighbours_differ_without_colour() -> None:
    dashes = re.findall(r'y2="5"(?: stroke-dasharray="([^"]*)")?/>', legend([f"n{i}" for i in range(10)]))
    assert len(dashes) == 10
    assert all(len(set(dashes[i : i + 4])) == 4 for i in range(5))


def test_values_beside_an_axis() -> None:
    assert [tick_text(value) for value in (0, 0.25, 150, 20_000, 3e6)] == ["0", "0.25", "150", "20k", "3M"]
