"""The figures as sentences and tables, and the page they stand on.

A table of the page is replaced whole, between its two markers, or the page stays as it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from measure import OTHERS

PAGE = Path(__file__).resolve().parents[2] / "docs/evidence-simulation.md"


def verdicts(document: dict[str, Any]) -> list[tuple[str, str]]:
    """What is asked of `hetlb`, and what the figures say."""
    rows = document["at_once"] + document["held_out"]
    shares = [row["hetlb"] for row in rows if row["predictor"] == "oracle"]
    below_split = [row for row in rows if row["hetlb"] < row["split"]]
    beaten = [row for row in rows if row["hetlb"] < 0.99 * max(row[p] for p in OTHERS)]
    worst = min(row["hetlb"] / row["split"] for row in rows)
    rates = document["moderate"]
    slow = [row for row in rates if row["request_throughput"]["ratio"] < 0.99]
    said = [
        (
            "at once: at least `split` in every case",
            f"{len(rows) - len(below_split)} of {len(rows)}; worst {worst:.3f} x",
        ),
        (
            "at once, lengths known: 0.94 of `bound` in every case, 0.96 in the mean",
            f"least {min(shares):.3f}, mean {statistics.mean(shares):.3f}",
        ),
        (
            "at once: no case more than 1 % below the best other policy",
            f"{len(rows) - len(beaten)} of {len(rows)}",
        ),
        ("moderate: throughput within 1 % of the best", f"{len(rates) - len(slow)} of {len(rates)}"),
    ]
    for figure, name in (("p99_ttft_ms", "p99 TTFT"), ("p99_e2el_ms", "p99 E2E")):
        ratios = sorted(row[figure]["ratio"] for row in rates)
        good, bad = sum(r <= 1.03 for r in ratios), sum(r > 1.15 for r in ratios)
        mean = statistics.geometric_mean(ratios)
        said.append(
            (
                f"moderate: {name} at most 1.03 x the best other in 90 %, 1.15 x in the rest",
                f"{good} of {len(ratios)} within 1.03, {bad} above 1.15, worst {ratios[-1]:.2f}, "
                f"mean {mean:.2f} x",
            )
        )
    wrong = [min(row["wrong_up"], row["wrong_down"]) for row in document["mishaps"]]
    said.append(("profiles wrong by 30 %: at least 0.95 of true ones", f"least {min(wrong):.3f}"))
    return said


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; fractions have three digits."""
    lines = ["| " + " | ".join(headings) + " |", "| " + " | ".join(["---"] * len(headings)) + " |"]
    for row in rows:
        cells = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shares(rows: Iterable[dict[str, Any]]) -> str:
    names = ("split", *OTHERS)
    return table(
        ("fleet", "trace", "predictor", *names, "hetlb"),
        (
            [
                row["fleet"],
                row["trace"],
                row["predictor"],
                *(f"{row[name]:.2f}" for name in names),
                f"**{row['hetlb']:.3f}**",
            ]
            for row in rows
        ),
    )


def pages(document: dict[str, Any]) -> dict[str, str]:
    """The tables, by the name of their place on the page."""

    def tails(row: dict[str, Any], figure: str) -> str:
        cell = row[figure]
        return f"{cell['hetlb'] / 1e3:.2f} s, {cell['ratio']:.2f} x `{cell['by']}`"

    return {
        "verdicts": table(("asked", "measured"), verdicts(document)),
        "at once": _shares(document["at_once"]),
        "held out": _shares(document["held_out"]),
        "moderate": table(
            ("fleet", "trace", "rate", "throughput to best other", "p99 TTFT", "p99 E2E", "mean E2E"),
            (
                [
                    r["fleet"],
                    r["trace"],
                    f"{r['rate']:.0%}",
                    f"{r['request_throughput']['ratio']:.3f}",
                    *(tails(r, f) for f in ("p99_ttft_ms", "p99_e2el_ms", "mean_e2el_ms")),
                ]
                for r in document["moderate"]
            ),
        ),
        "mishaps": table(
            (
                "fleet",
                "trace",
                "believed 0.7 / 1.3",
                "believed 1.3 / 0.7",
                "slowed: throughput",
                "p99 E2E later (s)",
                "uncorrected",
                "`paper`",
                "burst: p99 TTFT (s)",
                "`paper`",
            ),
            (
                [
                    r["fleet"],
                    r["trace"],
                    r["wrong_up"],
                    r["wrong_down"],
                    r["slowed_throughput"],
                    *(
                        f"{r[k]:.1f}"
                        for k in (
                            "slowed_p99_s",
                            "slowed_uncorrected_p99_s",
                            "slowed_paper_p99_s",
                            "burst_p99_ttft",
                            "burst_paper_p99_ttft",
                        )
                    ),
                ]
                for r in document["mishaps"]
            ),
        ),
        "ablations": table(
            ("without", "mean", "least", "wrong profiles: mean", "least", "p99 TTFT", "p99 E2E", "mean E2E"),
            (
                [
                    r["without"],
                    r["mean_share"],
                    r["min_share"],
                    r["wrong_mean_share"],
                    r["wrong_min_share"],
                    *(f"{r[k]:.2f} x" for k in ("p99_ttft", "p99_e2el", "mean_e2el")),
                ]
                for r in document["ablations"]
            ),
        ),
        "decisions": table(
            ("instances", "load", "an arrival (us)", "the end of an answer (us)"),
            (
                [r["instances"], r["load"], f"{r['arrival_us']:.0f}", f"{r['end_us']:.0f}"]
                for r in document["decisions"]
            ),
        ),
    }


def write_page(document: dict[str, Any]) -> None:
    """Replace each table between its markers. Raises `SystemExit` where a marker is missing."""
    text = PAGE.read_text()
    for name, block in pages(document).items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"{PAGE}: expected the markers {begin.strip()} and {end}")
        text = f"{before}{begin}{block}\n{closed}{after}"
    PAGE.write_text(text)
