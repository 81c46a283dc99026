"""Tables of the record: medians over the rounds and their spread, for docs and README."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from document import number_text, replace_sections, table
from fleets import FLEETS, VLLM
from peers import ROOT
from traffic import TRAFFIC, Traffic

PAGE, README = ROOT / "docs" / "head-to-head.md", ROOT / "README.md"
#: Routers of the README's table: each product as it comes.
SHOWN = ("hetlb", "hetlb-no-profiles", "vllm-router", "sglang-router", "envoy", "haproxy", "nginx", "litellm")
#: Figure, heading, factor, digits, and whether more is better.
FIGURES = (
    ("total_token_throughput", "tokens/s", 1.0, 0, True),
    ("mean_ttft_ms", "mean TTFT (s)", 1e-3, 2, False),
    ("p99_ttft_ms", "p99 TTFT (s)", 1e-3, 2, False),
    ("p99_e2el_ms", "p99 E2E (s)", 1e-3, 2, False),
)
TITLES = {
    "hetlb": "**hetlb**, profiles measured",
    "hetlb-no-profiles": "**hetlb**, no profiles",
    "vllm-router": "vllm-router, cache_aware",
    "vllm-router-rr": "vllm-router, round_robin",
    "vllm-router-p2c": "vllm-router, power_of_two",
    "sglang-router": "sglang-router, cache_aware",
    "sglang-router-rr": "sglang-router, round_robin",
    "sglang-router-p2c": "sglang-router, power_of_two",
    "envoy": "Envoy, LEAST_REQUEST",
    "haproxy": "HAProxy, leastconn",
    "nginx": "nginx, least_conn",
    "litellm": "LiteLLM, least-busy",
}
Runs = Sequence[dict[str, Any]]


class Record:
    """The runs, by fleet, traffic and router."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
        for run in document["runs"]:
            self._runs.setdefault((run["fleet"], run["traffic"], run["router"]), []).append(run)
        self._alone = document["alone"]
        known = [*TITLES, *(run["router"] for run in document["runs"])]
        self.routers = [name for name in dict.fromkeys(known) if any(key[2] == name for key in self._runs)]
        self.fleets = [
            each for each in (*FLEETS.values(), VLLM) if any(key[0] == each.name for key in self._runs)
        ]

    def runs(self, fleet: str, traffic: str, router: str) -> Runs:
        """Every round of one case."""
        return self._runs.get((fleet, traffic, router), [])

    def rounds(self, fleet: str, traffic: str) -> int:
        """The most rounds that a router has of one load."""
        return max(len(self.runs(fleet, traffic, name)) for name in self.routers)

    def median(self, fleet: str, traffic: str, router: str, figure: str) -> float | None:
        """The median over the rounds."""
        runs = self.runs(fleet, traffic, router)
        return statistics.median(run[figure] for run in runs) if runs else None

    def alone(self, fleet: str, traffic: str) -> float:
        """Tokens per second of all engines, each alone."""
        by_round: dict[int, float] = {}
        for row in self._alone:
            if row["fleet"] == fleet and traffic in row["traffic"]:
                by_round[row["round"]] = by_round.get(row["round"], 0.0) + row["total_token_throughput"]
        return statistics.median(by_round.values()) if by_round else 0.0


def show(document: dict[str, Any]) -> str:
    """A table for each fleet: a row for each router, a column for each load."""
    record, parts = Record(document), []
    for fleet in record.fleets:
        loads = [each for each in TRAFFIC.values() if record.rounds(fleet.name, each.name)]
        headings = ["", *(_heading(each) for each in loads)]
        rows = [
            [TITLES.get(name, name), *(_cell(record, fleet.name, each, name) for each in loads)]
            for name in record.routers
            if any(record.runs(fleet.name, each.name, name) for each in loads)
        ]
        parts += [
            f"### {fleet.title[0].upper()}{fleet.title[1:]}\n",
            table(headings, rows) + "\n",
            _about(record, fleet.name, loads) + "\n",
        ]
    return "\n".join(parts)


def _shown(traffic: Traffic) -> Sequence[tuple[str, str, float, int, bool]]:
    """Figures of a load that have a place in the table: throughput where all is sent at once."""
    return (FIGURES[0] if traffic.load is None else FIGURES[1], FIGURES[3])


def _heading(traffic: Traffic) -> str:
    return f"{traffic.title.partition(':')[0]}: {', '.join(heading for _, heading, *_ in _shown(traffic))}"


def _cell(record: Record, fleet: str, traffic: Traffic, name: str) -> str:
    runs = record.runs(fleet, traffic.name, name)
    if not runs:
        return "-"
    medians = ((record.median(fleet, traffic.name, name, each[0]), each) for each in _shown(traffic))
    texts = (
        number_text(None if median is None else median * factor, digits)
        for median, (_, _, factor, digits, _) in medians
    )
    return " / ".join(texts) + _notes(runs)


def compared(document: dict[str, Any]) -> str:
    """A row for each fleet and load: hetlb beside the best of the others, each figure by itself.

    Half load is left out: nearly everything fits on the fast engine.
    """
    record = Record(document)
    rows, notes = [], []
    for fleet in record.fleets:
        loads = [each for each in TRAFFIC.values() if record.rounds(fleet.name, each.name)]
        rows += [[fleet.name, *_cells(record, fleet.name, each)] for each in loads if each.name != "half"]
        notes.append(f"- `{fleet.name}`: {fleet.title}. {_about(record, fleet.name, loads)}")
    headings = [
        "engines", "load", "hetlb", "no profiles", "best other",
        "p99 E2E (s): hetlb", "no profiles", "best other",
    ]  # fmt: skip
    return table(headings, rows) + "\n\n" + "\n".join(notes) + "\n"


def _cells(record: Record, fleet: str, traffic: Traffic) -> list[str]:
    shown = _shown(traffic)
    cells = [f"{traffic.title.partition(':')[0]}: {shown[0][1]}"]
    for figure, _, factor, digits, more in shown:
        medians = {name: record.median(fleet, traffic.name, name, figure) for name in record.routers}
        for name in ("hetlb", "hetlb-no-profiles", _best(medians, more)):
            median = medians.get(name)
            text = number_text(None if median is None else median * factor, digits)
            doubts = _notes(record.runs(fleet, traffic.name, name))
            cells.append(f"{text}{doubts}" if name.startswith("hetlb") else f"{text} {name}{doubts}")
    return cells


def _best(medians: dict[str, float | None], more: bool) -> str:
    """The best router but hetlb."""
    others = {name: median for name, median in medians.items() if median and not name.startswith("hetlb")}
    return (max if more else min)(others, key=lambda each: others[each]) if others else "-"


def _about(record: Record, fleet: str, loads: Sequence[Traffic]) -> str:
    """Sum of the engines alone, spread of the rounds, and where hetlb is behind."""
    alone: dict[str, str] = {}
    for each in loads:
        alone.setdefault(f"{record.alone(fleet, each.name):,.0f}", each.title.partition(":")[0])
    sums = ", ".join(f"{figure} ({load})" for figure, load in alone.items())
    spread = max(_spread(record, fleet, each.name) for each in loads)
    single = all(record.rounds(fleet, each.name) == 1 for each in loads)
    rounds = "one round" if single else f"spread of the rounds ±{spread:.0%} at most"
    return f"Engines alone, summed: {sums} tokens/s; {rounds}.{_unfavourable(record, fleet, loads)}"


def _notes(runs: Runs) -> str:
    """Marks of a doubtful row: failed requests, a wrong rate or length; lateness is in `setup`."""
    failed = sum(run["failed"] for run in runs)
    kinds = sorted({reason.partition(":")[0] for run in runs for reason in run["client"]} - {"late", "lag"})
    said = [*([f"{failed} failed"] if failed else []), *kinds]
    return f" ({', '.join(said)})" if said else ""


def _spread(record: Record, fleet: str, traffic: str) -> float:
    """Largest half range over the median, of all routers and figures."""
    return max(
        _half_range([run[figure] for run in record.runs(fleet, traffic, name)])
        for name in record.routers
        for figure, *_ in FIGURES
    )


def _half_range(values: Sequence[float]) -> float:
    middle = statistics.median(values) if values else 0.0
    return (max(values) - min(values)) / 2 / middle if middle else 0.0


def _unfavourable(record: Record, fleet: str, loads: Sequence[Traffic]) -> str:
    """Figures in which another router is ahead of hetlb with profiles, beyond 2 %."""
    found = [text for each in loads for text in _behind(record, fleet, each)]
    return f" hetlb is behind in {'; '.join(found)}." if found else ""


def _behind(record: Record, fleet: str, traffic: Traffic) -> list[str]:
    behind = []
    for figure, heading, _, _, more in FIGURES:
        medians = {name: record.median(fleet, traffic.name, name, figure) for name in record.routers}
        own = medians.get("hetlb")
        name = _best(medians, more)
        best = medians.get(name)
        if own is None or best is None:
            continue
        ratio = own / best
        if ratio < 0.98 if more else ratio > 1.02:
            behind.append(
                f"{heading.partition(' (')[0]} at {traffic.title.partition(':')[0]} "
                f"({ratio:.2f} x {TITLES.get(name, name)})"
            )
    return behind


def summary(document: dict[str, Any]) -> str:
    """The table of the README: the pair."""
    record, fleet = Record(document), "pair"

    def cell(traffic: str, router: str, figure: str, factor: float, digits: int) -> str:
        median = record.median(fleet, traffic, router, figure)
        return number_text(None if median is None else median * factor, digits)

    columns = (
        ("once", "total_token_throughput", 1.0, 0),
        ("80", "mean_ttft_ms", 1e-3, 2),
        ("80", "p99_e2el_ms", 1e-3, 2),
        ("shared", "p99_e2el_ms", 1e-3, 2),
    )
    headings = [
        "", "at once, tokens/s", "80 % load, mean TTFT (s)", "p99 E2E (s)", "shared prompts, p99 E2E (s)",
    ]  # fmt: skip
    rows = [
        [TITLES[name], *(cell(t, name, f, x, d) for t, f, x, d in columns)]
        for name in SHOWN
        if name in record.routers
    ]
    caption = (
        "The same requests through each router in front of two emulated engines, one three times as fast as "
        "the other ([method, other fleets, and what speaks against hetlb](docs/head-to-head.md)):"
    )
    return f"{caption}\n\n{table(headings, rows)}\n"


def setup(document: dict[str, Any]) -> str:
    """Command, machine, versions; how each router logs and chooses is in the record."""
    about = document["about"]
    versions = ", ".join(
        f"{name} {facts['version']}"
        for name, facts in about["proxies"].items()
        if name in SHOWN and name != "hetlb-no-profiles"
    )
    busy = [sum(run["cores"].values()) for run in document["runs"]]
    lag = statistics.median(run["client_lag_ms"] for run in document["runs"])
    return (
        f"```\npython bench/head_to_head/run.py --page\n```\n\n{about['date']}, {about['machine']}; hetlb at "
        f"{about['commit']}. {about['lanes']} fleets ran side by side; engines, router and client of one "
        f"used {statistics.median(busy):.2f} cores in the median, {max(busy):.2f} at most; the client's loop "
        f"was {lag:.0f} ms late at p99 (median run). {versions}.\n"
    )


def write_pages(document: dict[str, Any]) -> None:
    """Renew docs/head-to-head.md and the section of the README."""
    replace_sections(PAGE, {"setup": setup(document), "tables": compared(document)})
    replace_sections(README, {"head-to-head": summary(document)})
