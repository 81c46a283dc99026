"""Tables of the record: medians over the rounds with half their range, for docs and README."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from document import number_text, replace_sections, table
from fleets import FLEETS, VLLM, Fleet
from peers import ROOT
from simulated import POLICIES, simulated
from traffic import EMBEDDINGS, TRAFFIC, Traffic

PAGE, README = ROOT / "bench/head_to_head/RESULTS.md", ROOT / "README.md"
#: Figure, heading, factor, digits, and whether more is better.
FIGURES = {
    "mean_ttft_ms": ("mean TTFT (ms)", 1.0, 0, False),
    "p99_ttft_ms": ("p99 TTFT (ms)", 1.0, 0, False),
    "mean_e2el_ms": ("mean E2E (s)", 1e-3, 2, False),
    "p99_e2el_ms": ("p99 E2E (s)", 1e-3, 2, False),
    "slo_attainment": ("within the SLO (%)", 100.0, 0, True),
    "time_to_99_percent_s": ("time to 99 % (s)", 1.0, 1, False),
}
_STEADY = ("mean_ttft_ms", "mean_e2el_ms", "p99_e2el_ms", "slo_attainment")
#: An embedding has no first token.
_WHOLE = ("mean_e2el_ms", "p99_e2el_ms", "slo_attainment")
_AT_ONCE = ("time_to_99_percent_s", "mean_ttft_ms", "mean_e2el_ms")
TITLES = {
    "hetlb": "**hetlb**, true profiles",
    "hetlb-first": "**hetlb**, `first_token_s: 100, finish_s: 0`",
    "hetlb-wrong": "**hetlb**, profiles 30 % wrong",
    "hetlb-none": "**hetlb**, no profiles",
    "hetlb-lmetric": "lmetric (policy of hetlb)",
    "smg-cache": "SMG, cache_aware",
    "smg-least": "SMG, least_load",
    "smg-p2c": "SMG, power_of_two",
    "dynamo": "Dynamo's selector",
    "lodestar": "in the manner of Lodestar",
    "vllm-router": "vllm-router, cache_aware",
    "vllm-router-p2c": "vllm-router, power_of_two",
    "sglang-router": "sglang-router, cache_aware",
    "envoy": "Envoy, LEAST_REQUEST",
    "haproxy": "HAProxy, leastconn",
    "nginx": "nginx, least_conn",
    "litellm": "LiteLLM, least-busy",
    "fast-alone": "the fastest engine alone, no router",
}
#: hetlb's own, as users run it.
#: Rows of the README's table; the page has all.
README_ROUTERS = ("hetlb", "hetlb-none", "sglang-router", "vllm-router-p2c", "envoy")
OWN = ("hetlb", "hetlb-first", "hetlb-wrong", "hetlb-none")
#: Have no version but this checkout's.
_UNVERSIONED = (*OWN, "hetlb-lmetric", "lodestar")
#: A figure this much worse than another router's is a loss.
CLOSE = 0.03


class Record:
    """The runs, by fleet, traffic and router."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
        for run in document["runs"]:
            self._runs.setdefault((run["fleet"], run["traffic"], run["router"]), []).append(run)
        known = [*TITLES, *(key[2] for key in self._runs)]
        self.routers = [name for name in dict.fromkeys(known) if any(key[2] == name for key in self._runs)]
        every = (*FLEETS.values(), VLLM)
        self.fleets = [each for each in every if any(key[0] == each.name for key in self._runs)]
        self.most_cpu = float(document["about"].get("most_cpu", math.inf))

    def loads(self, fleet: Fleet) -> list[Traffic]:
        """The loads of a fleet."""
        return [
            each for each in TRAFFIC.values() if any(k[:2] == (fleet.name, each.name) for k in self._runs)
        ]

    def runs(self, fleet: Fleet, traffic: Traffic, router: str) -> list[dict[str, Any]]:
        """Every round of one case."""
        return self._runs.get((fleet.name, traffic.name, router), [])

    def median(self, fleet: Fleet, traffic: Traffic, router: str, figure: str) -> float | None:
        """The median over the rounds."""
        found = [run[figure] for run in self.runs(fleet, traffic, router) if run[figure] is not None]
        return statistics.median(found) if found else None

    def notes(self, fleet: Fleet, traffic: Traffic, router: str) -> str:
        """Marks of doubt: failed requests, a router or client that was the limit."""
        runs = self.runs(fleet, traffic, router)
        failed = sum(run["failed"] for run in runs)
        busy = any(run["cores"]["router"] > self.most_cpu for run in runs)
        kinds = sorted(
            {reason.partition(":")[0] for run in runs for reason in run["client"]} - {"late", "lag"}
        )
        said = [*([f"{failed} failed"] if failed else []), *(["its CPU"] if busy else []), *kinds]
        return f" ({', '.join(said)})" if said else ""

    def best_other(self, fleet: Fleet, traffic: Traffic, figure: str) -> tuple[str, float] | None:
        """The best router but hetlb, and its median."""
        more = FIGURES[figure][3]
        medians = {
            name: median
            for name in self.routers
            if name not in (*OWN, "fast-alone")
            and (median := self.median(fleet, traffic, name, figure)) is not None
        }
        return (max if more else min)(medians.items(), key=lambda each: each[1]) if medians else None


def _shown(traffic: Traffic) -> Sequence[str]:
    if traffic.kind == EMBEDDINGS:
        return _WHOLE
    return _AT_ONCE if traffic.load is None else _STEADY


def show(document: dict[str, Any]) -> str:
    """A table for each fleet: a row for each router, a column for each load."""
    record, parts = Record(document), []
    for fleet in record.fleets:
        loads = record.loads(fleet)
        headings = ["", *(_heading(each) for each in loads)]
        rows = [
            [TITLES.get(name, name), *(_cell(record, fleet, each, name) for each in loads)]
            for name in record.routers
            if any(record.runs(fleet, each, name) for each in loads)
        ]
        parts += [f"### {fleet.title[0].upper()}{fleet.title[1:]}\n", table(headings, rows) + "\n"]
    return "\n".join(parts)


def _heading(traffic: Traffic) -> str:
    return f"{traffic.title.partition(':')[0]}: {' / '.join(FIGURES[each][0] for each in _shown(traffic))}"


def _cell(record: Record, fleet: Fleet, traffic: Traffic, name: str) -> str:
    if not record.runs(fleet, traffic, name):
        return "-"
    texts = []
    for figure in _shown(traffic):
        _, factor, digits, _ = FIGURES[figure]
        median = record.median(fleet, traffic, name, figure)
        values = [run[figure] for run in record.runs(fleet, traffic, name) if run[figure] is not None]
        spread = (max(values) - min(values)) / 2 if len(values) > 1 else 0.0
        text = number_text(None if median is None else median * factor, digits)
        texts.append(f"{text} ±{spread * factor:,.{digits}f}" if len(values) > 1 else text)
    return " / ".join(texts) + record.notes(fleet, traffic, name)


def behind(document: dict[str, Any]) -> str:
    """Cases in which hetlb with or without profiles is behind the best other router, the worst first."""
    found: dict[tuple[str, str, str, str], dict[str, float]] = {}
    for own, fleet, traffic, figure, ratio, other in _ratios(Record(document)):
        if ratio < 1.0 - CLOSE:
            case = (f"`{fleet.name}`", traffic.title.partition(":")[0], FIGURES[figure][0], other)
            found.setdefault(case, {})[own] = 1.0 / ratio
    if not found:
        return f"Nowhere by more than {CLOSE:.0%}.\n"
    worst = sorted(found, key=lambda case: -max(found[case].values()))
    return table(["fleet", "load", "figure", "best other", *_SET], _by_own(worst, found)) + "\n"


def means(document: dict[str, Any]) -> str:
    """Geometric means over the fleets of the best other router's figure over hetlb's, by load."""
    logs: dict[tuple[str, str], dict[str, list[float]]] = {}
    for own, fleet, traffic, figure, ratio, _ in _ratios(Record(document)):
        if not fleet.real:
            case = (traffic.title.partition(":")[0], FIGURES[figure][0])
            logs.setdefault(case, {}).setdefault(own, []).append(math.log(ratio))
    found = {
        case: {own: math.exp(statistics.fmean(x)) for own, x in each.items()} for case, each in logs.items()
    }
    return table(["load", "figure", *_SET], _by_own(list(found), found)) + "\n"


#: Headings of columns for each of `OWN`.
_SET = [TITLES[own].partition(", ")[2] for own in OWN]


def _by_own(cases: Sequence[tuple[str, ...]], found: Mapping[Any, Mapping[str, float]]) -> list[list[str]]:
    """A row for each case, with a ratio for each of `OWN` that has one."""
    return [
        [*case, *(f"{found[case][own]:.2f}" if own in found[case] else "" for own in OWN)] for case in cases
    ]


def _ratios(record: Record) -> Iterator[tuple[str, Fleet, Traffic, str, float, str]]:
    """Own router, fleet, load, figure, how many times better than the best other, and that one's title."""
    for fleet in record.fleets:
        for traffic in record.loads(fleet):
            steady = _WHOLE if traffic.kind == EMBEDDINGS else (*FIGURES,)
            for figure in _AT_ONCE if traffic.load is None else steady:
                best = record.best_other(fleet, traffic, figure)
                for own in OWN:
                    median = record.median(fleet, traffic, own, figure)
                    if best and median and best[1]:
                        ratio = median / best[1] if FIGURES[figure][3] else best[1] / median
                        yield own, fleet, traffic, figure, ratio, TITLES.get(best[0], best[0])


def simulation(document: dict[str, Any]) -> str:
    """Simulated figures over measured ones, round by round: medians, with least and most."""
    record, rows = Record(document), []
    figures = ("mean_ttft_ms", "p99_ttft_ms", "mean_e2el_ms", "p99_e2el_ms")
    for fleet in record.fleets:
        for router in POLICIES if not fleet.real else ():
            rounds = sorted({run["round"] for run in document["runs"] if run["fleet"] == fleet.name})
            said = {number: simulated(fleet, router, number) for number in rounds}
            for traffic in record.loads(fleet):
                runs = record.runs(fleet, traffic, router)
                if not runs or traffic.load is None or traffic.waves is not None or traffic.kind:
                    continue
                cells = []
                for figure in figures:
                    ratios = [said[run["round"]][traffic.name][figure] / run[figure] for run in runs]
                    ends = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
                    cells.append(f"{statistics.median(ratios):.2f}{ends}")
                rows.append([f"`{fleet.name}`", f"`{POLICIES[router]}`", traffic.title, *cells])
    return (
        table(["fleet", "policy", "load", *(FIGURES[each][0].partition(" (")[0] for each in figures)], rows)
        + "\n"
    )


def summary(document: dict[str, Any]) -> str:
    """Return the table of the README: three kinds of engines, hetlb and routers that most readers know."""
    record = Record(document)
    columns = [
        (FLEETS["kinds"], load, figure)
        for load, figure in (
            ("80", "mean_ttft_ms"), ("80", "mean_e2el_ms"), ("system", "mean_ttft_ms"),
            ("system", "mean_e2el_ms"), ("embed", "mean_e2el_ms"), ("once", "time_to_99_percent_s"),
        )
    ]  # fmt: skip
    headings = [
        "", "80 % load: mean TTFT (ms)", "mean E2E (s)", "one system prompt for all: mean TTFT (ms)",
        "mean E2E (s)", "embeddings: mean E2E (s)", "all at once: time to 99 % (s)",
    ]  # fmt: skip
    rows = []
    for name in (each for each in record.routers if each in README_ROUTERS):
        medians = [
            (record.median(fleet, TRAFFIC[load], name, figure), figure) for fleet, load, figure in columns
        ]
        cells = [number_text(None if m is None else m * FIGURES[f][1], FIGURES[f][2]) for m, f in medians]
        rows.append([TITLES.get(name, name), *cells])
    caption = (
        "The same requests, of ShareGPT's lengths, through each router in front of three emulated engines "
        "with the step times of an H100, an A100 and an L40S ([method, fleets, where hetlb is behind]"
        "(bench/head_to_head/RESULTS.md)):"
    )
    return f"{caption}\n\n{table(headings, rows)}\n"


def setup(document: dict[str, Any]) -> str:
    """Command, machine, versions, and how full the machine was."""
    about, runs = document["about"], document["runs"]
    versions = ", ".join(
        f"{name} {facts['version']}" for name, facts in about["proxies"].items() if name not in _UNVERSIONED
    )
    busy = sorted(run["cores"]["router"] for run in runs if run["router"] != "litellm")
    lag = statistics.median(run["client_lag_ms"] for run in runs)
    return (
        f"```\nmake bench-head-to-head\n```\n\n{about['date']}, {about['machine']}; hetlb at "
        f"{about['commit']}. {about['jobs']} jobs ran side by side. Of a core routers used "
        f"{statistics.median(busy):.2f} in the median, {busy[-1]:.2f} at most (LiteLLM aside); the client's "
        f"loop was {lag:.0f} ms late at p99 (median run). {versions}.\n"
    )


def write_pages(document: dict[str, Any]) -> None:
    """Renew bench/head_to_head/RESULTS.md and the section of the README."""
    sections = {"setup": setup, "behind": behind, "means": means, "tables": show, "simulated": simulation}
    replace_sections(PAGE, {name: make(document) for name, make in sections.items()})
    replace_sections(README, {"head-to-head": summary(document)})
