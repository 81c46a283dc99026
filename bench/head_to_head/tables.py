"""Tables of the record: medians over the rounds and their spread, for docs and README."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from document import number_text, replace_sections, table
from fleets import FLEETS, VLLM
from peers import ROOT
from traffic import TRAFFIC

PAGE, README = ROOT / "docs" / "head-to-head.md", ROOT / "README.md"
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
    """Every fleet and load."""
    record, parts = Record(document), []
    for fleet in record.fleets:
        parts.append(f"### {fleet.title[0].upper()}{fleet.title[1:]}\n")
        for traffic in TRAFFIC.values():
            rows = [row for name in record.routers if (row := _row(record, fleet.name, traffic.name, name))]
            if not rows:
                continue
            alone = record.alone(fleet.name, traffic.name)
            parts.append(
                f"**{traffic.title[0].upper()}{traffic.title[1:]}** "
                f"(engines alone, together: {alone:,.0f} tokens/s)\n"
            )
            shares = " / ".join(next(iter(_some(record, fleet.name, traffic.name)))["shares"])
            headings = [
                "",
                *(heading for _, heading, *_ in FIGURES),
                f"share of {shares}",
                "spread",
                "router's core",
            ]
            parts.append(table(headings, rows) + "\n")
            parts.append(_unfavourable(record, fleet.name, traffic.name) + "\n")
    return "\n".join(parts)


def _some(record: Record, fleet: str, traffic: str) -> Runs:
    return next(runs for name in record.routers if (runs := record.runs(fleet, traffic, name)))


def _row(record: Record, fleet: str, traffic: str, name: str) -> list[str] | None:
    runs = record.runs(fleet, traffic, name)
    if not runs:
        return None
    medians = [record.median(fleet, traffic, name, figure) for figure, *_ in FIGURES]
    cells = [
        number_text(None if median is None else median * factor, digits)
        for median, (_, _, factor, digits, _) in zip(medians, FIGURES, strict=True)
    ]
    engines = runs[0]["shares"]
    shares = [f"{100 * statistics.median(run['shares'][each] for run in runs):.0f}" for each in engines]
    spread = max(_spread([run[figure] for run in runs]) for figure, *_ in FIGURES)
    busy = f"{max(run['cores']['router'] for run in runs):.0%}"
    notes = _notes(runs)
    told = f"±{spread:.0%}" if len(runs) > 1 else "one round"
    return [TITLES.get(name, name) + notes, *cells, " / ".join(shares) + " %", told, busy]


def _notes(runs: Runs) -> str:
    """Marks of a doubtful row: failed requests, a wrong rate or length; lateness is in `setup`."""
    failed = sum(run["failed"] for run in runs)
    kinds = sorted({reason.partition(":")[0] for run in runs for reason in run["client"]} - {"late", "lag"})
    said = [*([f"{failed} failed"] if failed else []), *kinds]
    return f" ({', '.join(said)})" if said else ""


def _spread(values: Sequence[float]) -> float:
    """Half the range over the median."""
    middle = statistics.median(values)
    return (max(values) - min(values)) / 2 / middle if middle else 0.0


def _unfavourable(record: Record, fleet: str, traffic: str) -> str:
    """Figures in which another router is ahead of hetlb with profiles, beyond 2 %."""
    if not record.runs(fleet, traffic, "hetlb"):
        return ""
    behind = []
    for figure, heading, _, _, more in FIGURES:
        own = record.median(fleet, traffic, "hetlb", figure) or 0.0
        others = {
            name: median
            for name in record.routers
            if not name.startswith("hetlb")
            and (median := record.median(fleet, traffic, name, figure)) is not None
        }
        if not others:
            continue
        name = (max if more else min)(others, key=lambda each: others[each])
        ratio = own / others[name] if others[name] else 1.0
        if ratio < 0.98 if more else ratio > 1.02:
            behind.append(f"{heading.partition(' (')[0]} {ratio:.2f} x {TITLES.get(name, name)}")
    return f"hetlb is behind in {'; '.join(behind)}." if behind else "hetlb is behind in no figure."


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
        ("waves", "p99_e2el_ms", 1e-3, 2),
        ("shared", "p99_e2el_ms", 1e-3, 2),
    )
    headings = [
        "", "at once, tokens/s", "80 % load, mean TTFT (s)", "p99 E2E (s)", "waves, p99 E2E (s)",
        "shared prompts, p99 E2E (s)",
    ]  # fmt: skip
    rows = [
        [TITLES.get(name, name), *(cell(t, name, f, x, d) for t, f, x, d in columns)]
        for name in record.routers
    ]
    caption = (
        "The same requests through each router, two engines behind it, one three times as fast (`python "
        "bench/head_to_head/run.py`; how, four engines, more figures and what speaks against hetlb: "
        "[docs/head-to-head.md](docs/head-to-head.md)):"
    )
    return f"{caption}\n\n{table(headings, rows)}\n"


def setup(document: dict[str, Any]) -> str:
    """Command, machine, versions."""
    told = document["about"]
    rows = [[name, facts["version"], facts["log"]] for name, facts in told["proxies"].items()]
    busy = [sum(run["cores"].values()) for run in document["runs"]]
    lag = statistics.median(run["client_lag_ms"] for run in document["runs"])
    return (
        f"```\npython bench/head_to_head/run.py --page\n```\n\n{told['date']}, {told['machine']}; hetlb at "
        f"{told['commit']}. {told['lanes']} fleets ran side by side; engines, router and client of one used "
        f"{statistics.median(busy):.2f} cores in the median, {max(busy):.2f} at most; the client's loop was "
        f"{lag:.0f} ms late at p99 (median run).\n\n"
        + table(["router", "version", "log and policy"], rows)
        + "\n"
    )


def write_pages(document: dict[str, Any]) -> None:
    """Renew docs/head-to-head.md and the section of the README."""
    replace_sections(PAGE, {"setup": setup(document), "tables": show(document)})
    replace_sections(README, {"head-to-head": summary(document)})
