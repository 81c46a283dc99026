"""Charts in a browser: inside their frame, with readable axes, whatever the data."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard.browser import Look, launched

from hetlb.balancer.admin.dashboard.pages import asset

#: Imports between the modules: in one file they share a scope.
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./\w+\.js";\n', re.MULTILINE)
SCRIPT = """
window.lines = (lines, x, y, options) => {
  const names = lines.map((_, index) => [`n${index} <b>`, lineClass(index)]);
  const chart = new LineChart("title <i>", names, x, y, options);
  chart.update(lines);
  document.body.replaceChildren(chart.element);
  const numbers = (d) =>
    [...d.matchAll(/[ML](-?[\\d.]+) (-?[\\d.]+)/g)].map((m) => [Number(m[1]), Number(m[2])]);
  return {
    paths: [...chart.element.querySelectorAll("figure > svg path.line")]
      .map((path) => path.getAttribute("visibility") === "visible" ? numbers(path.getAttribute("d")) : []),
    ticks: [...chart.element.querySelectorAll("figure > svg text")].map((each) => each.textContent),
    classes: names.map(([, kind]) => kind),
    bold: chart.element.querySelectorAll("i").length,
  };
};
window.scaled = (axis, values) => scaleOf(axis, values, 0, 1).ticks;
window.written = (values) => values.map(plainNumber);
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    script = "".join(_IMPORT.sub("", text) for text in (asset("dom.js"), asset("charts.js"), SCRIPT))
    path: Path = tmp_path_factory.mktemp("charts") / "charts.html"
    path.write_text(
        f'<!doctype html><style>{asset("theme.css")}</style><body><script type="module">{script}</script>'
    )
    with launched() as browser:
        look = Look(browser, path.as_uri())
        yield look.page
        assert look.errors == []
        look.close()


def drawn(page: Any, lines: Any, x: Any, y: Any, **options: Any) -> Any:
    return page.evaluate(
        f"lines({json.dumps(lines)}, {json.dumps(x)}, {json.dumps(y)}, {json.dumps(options)})"
    )


def test_every_point_is_inside_the_frame(page: Any) -> None:
    rng = random.Random(1)
    values = [lambda: 0.0, lambda: 10 ** rng.uniform(-6, 9), lambda: float(rng.randrange(5))]
    for _ in range(150):
        value = rng.choice(values)
        lines = [
            sorted([value(), value()] for _ in range(rng.randrange(30))) for _ in range(rng.randrange(10))
        ]
        x, y = {"label": "x", "log": rng.random() < 0.5}, {"label": "y", "log": rng.random() < 0.5}
        if not y["log"]:
            y["least"] = 0
        found = drawn(page, lines, x, y, width=420, height=260, marks=True, labelled=True)
        for line, path in zip(lines, found["paths"], strict=True):
            shown = [p for p in line if not (x["log"] and p[0] <= 0) and not (y["log"] and p[1] <= 0)]
            assert len(path) == len(shown)
            assert all(0 <= across <= 420 and 0 <= up <= 260 for across, up in path), (line, path)
        assert found["bold"] == 0


def test_a_line_is_where_its_values_are(page: Any) -> None:
    [path] = drawn(page, [[[0, 0], [5, 50], [10, 100]]], {"least": 0}, {"least": 0})["paths"]
    (x0, y0), (x1, y1), (x2, y2) = path
    assert (x0 + x2) / 2 == pytest.approx(x1)
    assert (y0 + y2) / 2 == pytest.approx(y1)
    assert x0 < x2
    assert y0 > y2  # up is more


def test_a_gap_splits_a_line(page: Any) -> None:
    [path] = drawn(page, [[[0, 1], [1, None], [2, 3], [3, 2]]], {"least": 0}, {"least": 0})["paths"]
    assert len(path) == 3


def test_ticks_are_round_and_few(page: Any) -> None:
    rng = random.Random(2)
    for _ in range(200):
        low = rng.uniform(-1e6, 1e6)
        high = low + 10 ** rng.uniform(-3, 6)
        ticks = page.evaluate(f"scaled({{}}, [{low}, {high}])")
        assert 2 <= len(ticks) <= 7
        slack = 1e-6 * (abs(low) + abs(high))
        assert all(low - slack <= tick <= high + slack for tick in ticks)


def test_ticks_of_a_logarithmic_axis(page: Any) -> None:
    rng = random.Random(3)
    for _ in range(200):
        low = 10 ** rng.uniform(-6, 6)
        ticks = page.evaluate(f"scaled({{log: true}}, [{low}, {low * 10 ** rng.uniform(1, 9)}])")
        assert ticks == sorted(ticks)
        assert 1 <= len(ticks) <= 12
        for tick in ticks:
            mantissa = tick / 10 ** math.floor(math.log10(tick) + 1e-9)
            assert min(abs(mantissa - factor) for factor in (1, 2, 5)) < 1e-6


def test_a_narrow_logarithmic_axis_has_round_values(page: Any) -> None:
    assert page.evaluate("scaled({log: true}, [171, 246])") == [180, 200, 220, 240]


def test_neighbours_differ_without_colour_and_ten_lines_with_it(page: Any) -> None:
    classes = drawn(page, [[[0, 1]]] * 10, {}, {})["classes"]
    dashes = [each.split()[1] for each in classes]
    assert all(len(set(dashes[i : i + 4])) == 4 for i in range(5))
    assert len(set(classes)) == 10


def test_values_beside_an_axis(page: Any) -> None:
    assert page.evaluate("written([0, 0.25, 150, 20000, 3e6])") == ["0", "0.25", "150", "20k", "3M"]
