"""Sections 5.2 and 5.3: the paper's scheduler, its baselines and `hetlb` on two unequal fleets.

As the text says: 4,000 requests drawn from the data set, the predictor draws from a normal distribution,
round robin and weighted round robin deal by chance (`random`); dealing strictly in turn (`rr`, `wrr`) stands
beside it. How slow a V100 is, and in 5.3 how long the answers are, is not known: both are swept. Every policy
meets the same requests at the same times; three seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from fleets import MEAN_OUTPUT, QWEN_14B, Layout, a800_14b, make_study, sample, sharegpt, v100
from report import IMAGES, table

from hetlb.tools.plots import new_figure, save_figure, tidy
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.sim.simulation_sweep import StudyCell, run_sweep

REQUESTS, SEEDS = 4000, (0, 1, 2)
#: Names of the tables: policy, whether it has the weights.
POLICIES = {
    "RR": ("random", False),
    "RR in turn": ("rr", False),
    "SI": ("single", False),
    "WRR": ("random", True),
    "WRR in turn": ("wrr", True),
    "MB": ("paper-memory", False),
    "OS": ("paper", False),
    "hetlb": ("hetlb", False),
}
#: Policies whose decisions rest on predicted lengths: they run with a warm learning predictor too.
PREDICTING = ("MB", "OS", "hetlb")
_COLOURS = {
    "RR": "#868e96",
    "SI": "#9c36b5",
    "WRR": "#e8a800",
    "MB": "#0b7285",
    "OS": "#d9480f",
    "hetlb": "#1f6feb",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One setting of what the paper does not say. `key` is what is swept, in words."""

    key: str
    slowness: float
    mean_output: float
    layouts: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Experiment:
    """A section of the paper: `reported` is a request rate and a gain over RR in percent."""

    section: str
    names: tuple[str, ...]
    weights: tuple[float, ...]
    rates: tuple[float, ...]
    reported: tuple[float, float]
    cases: tuple[Case, ...]


def _pair(slowness: float) -> Case:
    return Case(f"V100 x {slowness:g}", slowness, MEAN_OUTPUT, (v100(4, slowness), v100(1, slowness)))


def _five(slowness: float, mean_output: float) -> Case:
    layouts = (a800_14b(), *[v100(2, slowness, QWEN_14B)] * 4)
    return Case(f"V100 x {slowness:g}, answers of {mean_output:g}", slowness, mean_output, layouts)


def experiments() -> dict[str, Experiment]:
    """Both sections."""
    names = tuple(POLICIES)
    return {
        "5.2": Experiment(
            "5.2",
            names,
            (4.0, 1.0),
            (8.0, 16.0, 24.0, math.inf),
            (24.0, 122.5),
            tuple(_pair(slowness) for slowness in (1.0, 1.5, 1.8, 1.9, 2.0, 2.25)),
        ),
        "5.3": Experiment(
            "5.3",
            tuple(name for name in names if name != "SI"),
            (2.0, 1.0, 1.0, 1.0, 1.0),
            (8.0, 16.0, math.inf),
            (16.0, 33.6),
            tuple(
                _five(slowness, output)
                for output in (MEAN_OUTPUT, 400.0, 800.0)
                for slowness in (1.0, 1.5, 2.0)
            ),
        ),
    }


#: What the sweep over the unknowns runs: at the reported rate alone.
_SWEPT = (("RR", "normal"), ("OS", "normal"), ("OS", "empirical"), ("hetlb", "normal"))


def run(experiment: Experiment, jobs: int) -> dict[str, Any]:
    """Every case at the rate that the paper reports; the closest to its gain at every rate."""
    rate, gain = experiment.reported
    with ProcessPoolExecutor(jobs) as pool:

        def run_case(case: Case, rates: Sequence[float], names: Sequence[tuple[str, str]]) -> dict[str, Any]:
            keys = [(name, predictor, at) for at in rates for name, predictor in names]
            each = [(case, experiment, key, seed) for key in keys for seed in SEEDS]
            ran = list(pool.map(_run_one, each))
            runs = [ran[start : start + len(SEEDS)] for start in range(0, len(ran), len(SEEDS))]
            return {
                "key": case.key,
                "slowness": case.slowness,
                "mean_output": case.mean_output,
                "instances": [{"name": layout.name, "origin": layout.origin} for layout in case.layouts],
                "runs": [_figures(*key, found) for key, found in zip(keys, runs, strict=True)],
            }

        document: dict[str, Any] = {
            "section": experiment.section,
            "reported": {"request_rate": rate, "gain_over_rr_percent": gain},
            "requests": REQUESTS,
            "seeds": SEEDS,
            "cases": [run_case(case, (rate,), _SWEPT) for case in experiment.cases],
        }
        key = closest(document)["key"]
        found = next(case for case in experiment.cases if case.key == key)
        names = [(name, "normal") for name in experiment.names]
        names += [(name, "empirical") for name in PREDICTING]
        full = run_case(found, experiment.rates, names)
    study = make_study(found.layouts, sample(sharegpt(found.mean_output), REQUESTS, 0))
    bounds = run_sweep(study, [StudyCell("rr", experiment.rates[0], 0)])[0]
    full["bound_tok_s"] = bounds.bound["total_token_throughput"]
    full["steady_bound_tok_s"] = bounds.steady_bound["total_token_throughput"]
    return {**document, "closest": full}


def _run_one(asked: tuple[Case, Experiment, tuple[str, str, float], int]) -> dict[str, Any]:
    """The summary of one run."""
    case, experiment, (name, predictor, rate), seed = asked
    policy, weighted = POLICIES[name]
    rows = sample(sharegpt(case.mean_output), REQUESTS, seed)
    study = make_study(
        case.layouts, rows, weights=experiment.weights if weighted else (), predictor=predictor
    )
    setup = replace(study.setup, policy=policy, seed=seed)
    plan = study.load.plan(rate, seed)
    summary = FleetSimulation(setup, study.engines, plan, model=study.model, rule=study.rule).run().summary()
    assert summary["failed"] == 0, "a request failed"
    return summary


def _figures(name: str, predictor: str, rate: float, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "name": name,
        "predictor": predictor,
        "request_rate": f"{rate:g}",
        "tok_s": [each["total_token_throughput"] for each in runs],
        "steady_tok_s": [each["steady"]["total_token_throughput"] for each in runs],
        "drain_s": [each["steady"]["drain_s"] for each in runs],
        "p99_ttft_ms": [each["p99_ttft_ms"] for each in runs],
        "ends_s": [[i["last_finish_s"] for i in each["instances"]] for each in runs],
    }


# --- figures of results ---------------------------------------------------------------------------------


def run_of(case: Mapping[str, Any], name: str, rate: str, predictor: str = "normal") -> Mapping[str, Any]:
    """One entry of the results."""
    for each in case["runs"]:
        if (each["name"], each["request_rate"], each["predictor"]) == (name, rate, predictor):
            found: Mapping[str, Any] = each
            return found
    raise KeyError((name, rate, predictor))


def gains(
    case: Mapping[str, Any], name: str, rate: str, figure: str, predictor: str = "normal"
) -> list[float]:
    """Percent over RR by chance, one per seed."""
    mine, base = run_of(case, name, rate, predictor)[figure], run_of(case, "RR", rate)[figure]
    return [100.0 * (a / b - 1.0) for a, b in zip(mine, base, strict=True)]


def closest(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The case whose gain of OS is closest to what the paper reports: where the orderings are compared."""
    rate, gain = (document["reported"][key] for key in ("request_rate", "gain_over_rr_percent"))

    def distance(case: Mapping[str, Any]) -> float:
        return float(abs(median(gains(case, "OS", f"{rate:g}", "tok_s")) - gain))

    found: Mapping[str, Any] = min(document["cases"], key=distance)
    return found


def show(document: Mapping[str, Any]) -> str:
    """Picture and table, in Markdown; the lowest rate, at which all are level, is in the record alone."""
    section = document["section"]
    return f"![Section {section}](img/paper-{section}.png)\n\n{_show_case(document['closest'])}"


def _show_case(case: Mapping[str, Any]) -> str:
    rates = list(dict.fromkeys(each["request_rate"] for each in case["runs"]))[1:]
    rows = []
    for name in dict.fromkeys(each["name"] for each in case["runs"]):
        if name.endswith("in turn"):
            continue
        runs = [run_of(case, name, rate) for rate in rates]
        rows.append(
            [
                name,
                *(f"{median(each['tok_s']):,.0f} / {median(each['steady_tok_s']):,.0f}" for each in runs),
                " / ".join(f"{median(each['p99_ttft_ms']) / 1e3:.1f}" for each in runs[:-1]),
            ]
        )
    headings = ["tokens/s, whole / steady", *map(_at, rates), "p99 TTFT at the rates, s"]
    return (
        f"**{case['key']}**, medians of {len(SEEDS)} seeds. Each alone, summed: "
        f"{case['steady_bound_tok_s']:,.0f} tokens/s while full, {case['bound_tok_s']:,.0f} with the drain."
        f"\n\n{table(headings, rows)}"
    )


def _at(rate: str) -> str:
    return "all at once" if rate == "inf" else f"{rate} req/s"


# --- orderings ------------------------------------------------------------------------------------------


def orderings(document: Mapping[str, Any]) -> str:
    """Table of the paper's claims: how many seeds hold, and the median ratio; empty where not claimed."""
    case = document["closest"]
    rates = list(dict.fromkeys(each["request_rate"] for each in case["runs"]))
    claims: dict[str, dict[str, str]] = {}

    def claim(words: str, left: str, right: str, at: Sequence[str], factor: float = 1.0) -> None:
        for rate in at:
            first, second = run_of(case, left, rate)["tok_s"], run_of(case, right, rate)["tok_s"]
            held = sum(a > b * factor for a, b in zip(first, second, strict=True))
            ratio = median([a / b for a, b in zip(first, second, strict=True)])
            claims.setdefault(words, {})[rate] = f"{held} of {len(first)}, {ratio:.3f}"

    if "SI" in {each["name"] for each in case["runs"]}:
        claim("SI above RR", "SI", "RR", rates)
        for other in ("SI", "WRR"):
            claim(f"OS above {other}", "OS", other, ("8", "16"))
        claim("WRR above OS", "WRR", "OS", ("24", "inf"))
        claim("OS above MB", "OS", "MB", rates)
    claim("OS above RR", "OS", "RR", rates)
    claim("hetlb at least OS (ours)", "hetlb", "OS", rates, 0.9999)
    rows = [[words, *(found.get(rate, "") for rate in rates)] for words, found in claims.items()]
    return table(["the paper says", *map(_at, rates)], rows)


def draw(document: Mapping[str, Any]) -> None:
    """The sweep of what is not known beside the paper's figure, and the closest case against the rate."""
    case, reported = document["closest"], document["reported"]
    rate = f"{reported['request_rate']:g}"
    figure = new_figure(11, 3.4)
    left, right = figure.subplots(1, 2)
    outputs = list(dict.fromkeys(each["mean_output"] for each in document["cases"]))
    for style, output in zip(("-", "--", ":"), outputs, strict=False):
        cases = [each for each in document["cases"] if each["mean_output"] == output]
        for name in ("OS", "hetlb"):
            left.plot(
                [each["slowness"] for each in cases],
                [median(gains(each, name, rate, "tok_s")) for each in cases],
                style,
                marker="o",
                markersize=4,
                color=_COLOURS[name],
                label=name if len(outputs) == 1 else f"{name}, answers of {output:g}",
            )
    left.axhline(reported["gain_over_rr_percent"], color="#24292f", linestyle="-.", lw=1, label="the paper")
    left.set_xlabel("how many times slower than its data sheet's roofline a V100 is", fontsize=8)
    left.set_ylabel(f"gain over RR at {rate} requests/s, %", fontsize=8)
    rates = list(dict.fromkeys(each["request_rate"] for each in case["runs"]))
    for name in (name for name in _COLOURS if any(each["name"] == name for each in case["runs"])):
        values = [median(run_of(case, name, each)["tok_s"]) / 1e3 for each in rates]
        right.plot(range(len(rates)), values, marker="o", markersize=4, color=_COLOURS[name], label=name)
    full = case["steady_bound_tok_s"] / 1e3
    right.axhline(full, color="#24292f", linestyle="--", lw=1, label="each alone, while full")
    right.set_xticks(range(len(rates)), [each if each != "inf" else "at once" for each in rates])
    right.set_title(case["key"], fontsize=9, loc="left")
    right.set_xlabel("requests/s", fontsize=8)
    right.set_ylabel("thousand tokens/s, whole run", fontsize=8)
    for axis in (left, right):
        axis.set_ylim(bottom=0)
        tidy(axis)
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=7)
    save_figure(figure, IMAGES / f"paper-{document['section']}.png")
