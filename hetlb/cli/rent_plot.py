"""The picture of `hetlb rent --budgets`: what each budget buys, beside the best of one kind of GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetlb.plots import new_figure, save_figure, tidy

_MIXED, _ONE_KIND, _ANY_NUMBER = "#1f6feb", "#57606a", "#a8b4c4"


def write_sweep(path: Path, points: Sequence[Mapping[str, Any]]) -> None:
    """Draw requests/s over cost per hour. Raises `InputError`."""
    figure = new_figure(7, 4.2)
    axis = figure.subplots()
    planned = [point for point in points if "throughput_req_s" in point]
    lines: list[tuple[str, str, str, list[tuple[float, float]]]] = [
        (
            "this plan",
            _MIXED,
            "o-",
            [(point["cost_per_hour"], point["throughput_req_s"]) for point in planned],
        ),
        ("one kind of GPU, as available", _ONE_KIND, "s--", _homogeneous(planned, any_number=False)),
        ("one kind of GPU, any number of them", _ANY_NUMBER, "^:", _homogeneous(planned, any_number=True)),
    ]
    for label, color, style, values in lines:
        if values:
            axis.plot(*zip(*values, strict=True), style, color=color, label=label, markersize=4)
    for point in planned:
        kinds: dict[str, int] = {}
        for each in point["instances"]:
            for gpu, count in each["gpus"].items():
                kinds[gpu] = kinds.get(gpu, 0) + count * each["count"]
        axis.annotate(
            " + ".join(f"{count} {gpu}" for gpu, count in kinds.items()),
            (point["cost_per_hour"], point["throughput_req_s"]),
            xytext=(4, -10),
            textcoords="offset points",
            fontsize=6,
            color="#24292f",
        )
    axis.set_xlabel("cost per hour")
    axis.set_ylabel("requests/s")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    tidy(axis)
    axis.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def _homogeneous(points: Sequence[Mapping[str, Any]], *, any_number: bool) -> list[tuple[float, float]]:
    return [
        (each["cost_per_hour"], each["throughput_req_s"])
        for point in points
        for name, each in point["baselines"].items()
        if name.startswith("homogeneous") and name.endswith("any number") == any_number
    ]
