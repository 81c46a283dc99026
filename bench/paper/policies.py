"""Sections 5.2 and 5.3: the paper's scheduler, its baselines and `hetlb` on two unequal fleets.

Shows: throughput at the paper's rates and with all requests at once, and when each instance is done; the
paper's gains over round robin beside ours.
Promises: every policy meets the same requests at the same times; medians of three seeds; policies that
predict lengths run with the paper's predictor (normal draws) and with a warm one (`empirical`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fleets import (
    AZURE,
    MOST_V100_TP1_RPS,
    MOST_V100_TP2_RPS,
    SHAREGPT,
    Layout,
    alone_rps,
    make_study,
    measured,
    slowed_v100,
    v100,
)
from report import IMAGES, table

from hetlb.plots import new_figure, save_figure
from hetlb.sim.sweep import Cell, run_sweep

PER_INSTANCE = 1500
SEEDS = (0, 1, 2)
PREDICTORS = ("normal", "empirical")
#: The paper's names, then ours.
NAMES = {
    "rr": "RR",
    "single": "SI",
    "wrr": "WRR",
    "paper-memory": "MB",
    "paper": "OS",
    "hetlb": "hetlb",
}
#: Policies whose decisions rest on predicted lengths.
PREDICTING = ("paper-memory", "paper", "hetlb")
_COLOURS = {
    "rr": "#868e96",
    "single": "#9c36b5",
    "wrr": "#e8a800",
    "paper-memory": "#0b7285",
    "paper": "#d9480f",
    "hetlb": "#1f6feb",
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """One fleet and its load. `alike` is what the rate at which the paper reports is to a fleet so fast."""

    name: str
    layouts: tuple[Layout, ...]
    weights: tuple[float, ...]
    trace: Path = SHAREGPT
    alike: float | None = None


@dataclass(frozen=True, slots=True)
class Experiment:
    """A section of the paper."""

    section: str
    policies: tuple[str, ...]
    rates: tuple[float, ...]
    #: (request rate, gain over round robin in percent) that the paper reports.
    reported: tuple[float, float]
    make_fleets: Callable[[], list[Fleet]]


def _tp1_beside_tp4() -> list[Fleet]:
    weights = (4.0, 1.0)
    slowed = (slowed_v100(4), slowed_v100(1))

    def alike(layout: Layout) -> float:
        return float(round(24 * alone_rps(layout) / MOST_V100_TP1_RPS))

    return [
        Fleet("V100", (v100(4), v100(1)), weights, alike=alike(v100(1))),
        Fleet("slowed V100", slowed, weights),
        Fleet("slowed V100, Azure lengths", slowed, weights, AZURE),
        Fleet(
            "A100",
            (measured("a100_sxm", 4), measured("a100_sxm", 1)),
            weights,
            alike=alike(measured("a100_sxm", 1)),
        ),
    ]


def _four_beside_one() -> list[Fleet]:
    a800, weights = measured("a100_sxm", 1), (2.0, 1.0, 1.0, 1.0, 1.0)

    def alike(layout: Layout, trace: Path = SHAREGPT) -> float:
        return float(round(16 * alone_rps(layout, trace) / MOST_V100_TP2_RPS))

    def fleet(name: str, one: Layout, four: Layout, trace: Path = SHAREGPT) -> Fleet:
        return Fleet(name, (one, four, four, four, four), weights, trace, alike(four, trace))

    return [
        fleet("4 x V100 TP 2 + A800", a800, v100(2)),
        fleet("4 x slowed V100 TP 2 + A800", a800, slowed_v100(2)),
        fleet("4 x slowed V100 TP 2 + A800, Azure lengths", a800, slowed_v100(2), AZURE),
        fleet("4 x L40S TP 2 + H100", measured("h100_sxm", 1), measured("l40s", 2)),
    ]


EXPERIMENTS = {
    "5.2": Experiment("5.2", tuple(NAMES), (8.0, 16.0, 24.0, math.inf), (24.0, 122.5), _tp1_beside_tp4),
    "5.3": Experiment(
        "5.3",
        ("rr", "wrr", "paper-memory", "paper", "hetlb"),
        (16.0, math.inf),
        (16.0, 33.6),
        _four_beside_one,
    ),
}


def run(experiment: Experiment, jobs: int) -> dict[str, Any]:
    """Every fleet, rate, policy and seed."""
    fleets = [_run_fleet(fleet, experiment, jobs) for fleet in experiment.make_fleets()]
    rate, gain = experiment.reported
    return {
        "section": experiment.section,
        "reported": {"request_rate": rate, "gain_over_rr_percent": gain},
        "requests_per_instance": PER_INSTANCE,
        "seeds": SEEDS,
        "fleets": fleets,
    }


def _run_fleet(fleet: Fleet, experiment: Experiment, jobs: int) -> dict[str, Any]:
    rates = sorted({*experiment.rates, *([] if fleet.alike is None else [fleet.alike])})
    runs: list[dict[str, Any]] = []
    bound = 0.0
    for predictor in PREDICTORS:
        study = make_study(
            fleet.layouts,
            trace=fleet.trace,
            weights=fleet.weights,
            predictor=predictor,
            count=PER_INSTANCE * len(fleet.layouts),
        )
        here = [
            policy for policy in experiment.policies if predictor == PREDICTORS[0] or policy in PREDICTING
        ]
        cells = [Cell(policy, rate, seed) for rate in rates for policy in here for seed in SEEDS]
        ran = run_sweep(study, cells, jobs=jobs)
        bound = ran[0].bound["total_token_throughput"]
        for start in range(0, len(ran), len(SEEDS)):
            alike = ran[start : start + len(SEEDS)]
            assert all(each.summary["failed"] == 0 for each in alike), "a request failed"
            instances = [each["name"] for each in alike[0].summary["instances"]]
            runs.append(
                {
                    "policy": alike[0].cell.policy,
                    "predictor": predictor,
                    "request_rate": _text(alike[0].cell.rate),
                    **{
                        key: median(each.summary[key] for each in alike)
                        for key in ("total_token_throughput", "request_throughput", "p99_ttft_ms", "duration")
                    },
                    "last_finish_s": {
                        name: median(each.summary["instances"][i]["last_finish_s"] for each in alike)
                        for i, name in enumerate(instances)
                    },
                }
            )
    return {
        "name": fleet.name,
        "trace": fleet.trace.name,
        "instances": [
            {"name": layout.name, "origin": layout.origin, "weight": weight}
            for layout, weight in zip(fleet.layouts, fleet.weights, strict=True)
        ],
        "bound_tok_s": bound,
        "rates": [_text(rate) for rate in rates],
        "alike": None if fleet.alike is None else _text(fleet.alike),
        "runs": runs,
    }


def _text(rate: float | str) -> str:
    return f"{float(rate):g}"


# --- shown ----------------------------------------------------------------------------------------------


def show(document: Mapping[str, Any]) -> str:
    """The tables, in Markdown."""
    section = document["section"]
    parts = [f"![Section {section}](img/paper-{section}.png)", _gains(document)]
    parts += [_show_fleet(fleet) for fleet in document["fleets"]]
    return "\n\n".join(parts)


def _gains(document: Mapping[str, Any]) -> str:
    """Gains over round robin, beside what the paper reports."""
    reported = document["reported"]
    rows = [
        [
            "the paper, measured",
            f"{reported['request_rate']:g}",
            f"+{reported['gain_over_rr_percent']} %",
            *[""] * 4,
        ]
    ]
    for fleet in document["fleets"]:
        for rate in fleet["rates"]:
            if rate not in (_text(reported["request_rate"]), fleet["alike"], "inf"):
                continue
            base = _run(fleet, "rr", rate, "normal")["total_token_throughput"]

            def gain(
                policy: str, predictor: str, fleet: Any = fleet, rate: str = rate, base: float = base
            ) -> str:
                reached = _run(fleet, policy, rate, predictor)["total_token_throughput"]
                return f"{100 * (reached / base - 1):+.1f} %"

            most = f"{100 * (fleet['bound_tok_s'] / base - 1):+.1f} %" if rate == "inf" else ""
            cells = [gain(policy, predictor) for policy in ("paper", "hetlb") for predictor in PREDICTORS]
            rows.append([fleet["name"], rate, *cells, most])
    headings = [
        "gain over RR",
        "req/s",
        "OS, normal",
        "OS, empirical",
        "hetlb, normal",
        "hetlb, empirical",
        "sum of each alone",
    ]
    return table(headings, rows)


def _show_fleet(fleet: Mapping[str, Any]) -> str:
    rates = fleet["rates"]
    names = list(dict.fromkeys(run["policy"] for run in fleet["runs"]))
    rows = []
    for policy in names:
        for predictor in PREDICTORS if policy in PREDICTING else PREDICTORS[:1]:
            runs = [_run(fleet, policy, rate, predictor) for rate in rates]
            suffix = f", {predictor}" if policy in PREDICTING else ""
            ends = list(runs[-1]["last_finish_s"].values())
            rows.append(
                [
                    NAMES[policy] + suffix,
                    *(f"{run['total_token_throughput']:,.0f}" for run in runs),
                    " / ".join(f"{end:.0f}" for end in ends),
                ]
            )
    headings = [
        "tokens/s at",
        *(f"{rate} req/s" if rate != "inf" else "all at once" for rate in rates),
        "ends at once, s",
    ]
    unlike = {each["name"]: each for each in fleet["instances"]}
    weights = ":".join(f"{each['weight']:g}" for each in fleet["instances"])
    origins = "; ".join(f"{name}: {each['origin']}" for name, each in unlike.items())
    return (
        f"**{fleet['name']}** (`{fleet['trace']}`; WRR {weights}; {origins}). Sum of each alone: "
        f"{fleet['bound_tok_s']:,.0f} tokens/s.\n\n{table(headings, rows)}"
    )


def _run(fleet: Mapping[str, Any], policy: str, rate: str, predictor: str) -> Mapping[str, Any]:
    for run in fleet["runs"]:
        if (run["policy"], run["request_rate"]) == (policy, rate) and run["predictor"] == predictor:
            found: Mapping[str, Any] = run
            return found
    raise KeyError((policy, rate, predictor))


def draw(document: Mapping[str, Any]) -> None:
    """For every fleet: throughput against the rate, and when each instance is done."""
    fleets = document["fleets"]
    figure = new_figure(11, 2.9 * len(fleets))
    parts = figure.subfigures(len(fleets), 1)
    for part, fleet in zip(parts, fleets, strict=True):
        names = list(dict.fromkeys(run["policy"] for run in fleet["runs"]))
        part.suptitle(fleet["name"], x=0.01, ha="left", fontsize=10, weight="bold")
        left, right = part.subplots(1, 2, width_ratios=(1, 1))
        places = range(len(fleet["rates"]))
        for policy in names:
            values = [
                _run(fleet, policy, rate, "normal")["total_token_throughput"] / 1e3 for rate in fleet["rates"]
            ]
            left.plot(
                places, values, marker="o", markersize=4, color=_COLOURS[policy], label=NAMES[policy], lw=1.4
            )
        bound = fleet["bound_tok_s"] / 1e3
        left.axhline(bound, color="#24292f", linestyle="--", lw=1, label="sum of each alone")
        left.set_xticks(places, [rate if rate != "inf" else "at once" for rate in fleet["rates"]])
        left.set_ylim(bottom=0)
        left.set_xlabel("requests/s", fontsize=8)
        left.set_ylabel("thousand tokens/s", fontsize=8)
        left.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
        _draw_ends(right, fleet, names)
        for axis in (left, right):
            axis.grid(alpha=0.3, linewidth=0.5)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
            axis.set_axisbelow(True)
    save_figure(figure, IMAGES / f"paper-{document['section']}.png")


def _draw_ends(axis: Any, fleet: Mapping[str, Any], names: Sequence[str]) -> None:
    """A group of bars for every policy: when each instance ends."""
    for place, policy in enumerate(names):
        ends = _run(fleet, policy, "inf", "normal")["last_finish_s"]
        width = 0.8 / len(ends)
        for index, end in enumerate(ends.values()):
            shade = 1.0 if index == 0 else 0.45
            axis.bar(
                place - 0.4 + (index + 0.5) * width, end, 0.9 * width, color=_COLOURS[policy], alpha=shade
            )
    axis.set_xticks(range(len(names)), [NAMES[policy] for policy in names])
    axis.set_ylabel("end of each instance, s", fontsize=8)
    first = fleet["instances"][0]["name"]
    axis.set_title(f"all at once; dark: {first}", fontsize=8, loc="left")
