"""Line charts as inline SVG: all that the report of a load test draws.

Pure; the picture names its colours by class only (`line-0`, `line-1`, …), so that the page decides
them for light and dark; every line can be told from the others without colour too (dashes, and a title that
shows when it is pointed at); text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

#: Lines of a chart that have a colour of their own; further ones repeat the colours in other dashes.
COLOURS = 8
_DASHES = ("", "6 3", "2 3", "9 3 2 3")
_WIDTH, _HEIGHT = 420, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 42
_TICKS = 5
#: A line that tells the same story in a third of the bytes.
_MAX_POINTS = 400


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: its name and its points in the units of the axes, in order of x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a chart. A `log` axis leaves out what is not above 0."""

    label: str
    log: bool = False
    #: The axis goes at least from here to there.
    least: float | None = None
    most: float | None = None


class _Scale:
    """Values of one axis to pixels."""

    def __init__(
        self, axis: Axis, values: Iterable[float], start: float, end: float, *, whole_steps: bool
    ) -> None:
        usable = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)]
        usable += [bound for bound in (axis.least, axis.most) if bound is not None]
        low, high = min(usable, default=0.0), max(usable, default=1.0)
        self.log = axis.log and low > 0
        if low == high:
            low, high = (
                (low / 2, high * 2) if self.log else (low - 0.5 * abs(low or 1), high + 0.5 * abs(high or 1))
            )
        self.ticks = log_ticks(low, high) if self.log else linear_ticks(low, high)
        if whole_steps and not self.log and axis.most is None and self.ticks[-1] < high:
            high = self.ticks[-1] + self.ticks[1] - self.ticks[0]
            self.ticks.append(high)
        self._low, self._high, self._start, self._end = low, high, start, end

    def shows(self, value: float) -> bool:
        """True if the axis has a place for it."""
        return math.isfinite(value) and (value > 0 or not self.log)

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        if self.log:
            share = math.log(value / self._low) / math.log(self._high / self._low)
        else:
            share = (value - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)


def chart(lines: Sequence[Line], x: Axis, y: Axis, *, marks: bool = False, name: str = "") -> str:
    """One `<svg>`: the lines over a grid, with labelled axes. `marks` shows each point."""
    shown = [(index, line) for index, line in enumerate(lines) if line.points]
    points = [point for _, line in shown for point in line.points]
    across = _Scale(x, (point[0] for point in points), _LEFT, _WIDTH - _RIGHT, whole_steps=False)
    up = _Scale(y, (point[1] for point in points), _HEIGHT - _BOTTOM, _TOP, whole_steps=True)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(name or y.label)}">',
        *_grid(across, up, x, y),
    ]
    for index, line in shown:
        kept = [point for point in thinned(line.points) if across.shows(point[0]) and up.shows(point[1])]
        places = [(across(a), up(b)) for a, b in kept]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        dashes = _dashes(index)
        style = f"line-{index % COLOURS}"
        parts.append(f"<g><title>{escape(line.name)}</title>")
        parts.append(f'<polyline class="line {style}" points="{path}"{dashes}/>')
        if marks:
            parts += [f'<circle class="mark {style}" cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in places]
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def legend(names: Sequence[str]) -> str:
    """Legend of the lines, as a line of HTML; the order is that of the chart's lines."""
    entries = []
    for index, name in enumerate(names):
        dashes = _dashes(index)
        sample = f'<line class="line line-{index % COLOURS}" x1="0" y1="5" x2="24" y2="5"{dashes}/>'
        entries.append(f'<span><svg viewBox="0 0 24 10" class="sample">{sample}</svg> {escape(name)}</span>')
    return f'<p class="legend">{" ".join(entries)}</p>'


def _dashes(index: int) -> str:
    """The dashes of a line: four in turn, so that neighbours differ without colour too."""
    dash = _DASHES[(index + index // COLOURS) % len(_DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def linear_ticks(low: float, high: float) -> list[float]:
    """Round values from `low` to `high`, in some five steps of 1, 2 or 5 times a power of 10."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of 10 from `low` to `high`; where there are few, 2 and 5 times them as well."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if math.log10(high / low) > 3 else (1, 2, 5)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def tick_text(value: float) -> str:
    """A value beside an axis."""
    if value == 0:
        return "0"
    if abs(value) >= 1e4:
        return f"{value / 1e3:,.4g}k" if abs(value) < 1e6 else f"{value / 1e6:,.4g}M"
    return f"{value:.4g}"


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about `_MAX_POINTS` of the points, evenly chosen, with the first and the last."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    last = len(points) - 1
    chosen = sorted({round(i * last / (_MAX_POINTS - 1)) for i in range(_MAX_POINTS)})
    return [points[i] for i in chosen]


def _grid(across: _Scale, up: _Scale, x: Axis, y: Axis) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for value in across.ticks:
        at = f"{across(value):.1f}"
        parts.append(f'<line class="grid" x1="{at}" y1="{_TOP}" x2="{at}" y2="{bottom}"/>')
        parts.append(f'<text x="{at}" y="{bottom + 15}" text-anchor="middle">{tick_text(value)}</text>')
    for value in up.ticks:
        at = f"{up(value):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{at}" x2="{right}" y2="{at}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at}" dy="4" text-anchor="end">{tick_text(value)}</text>')
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x.label)}</text>'
    )
    upwards = f'text-anchor="middle" transform="rotate(-90 12 {middle})"'
    parts.append(f'<text x="12" y="{middle}" {upwards}>{escape(y.label)}</text>')
    return parts
