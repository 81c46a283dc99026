"""The figures as sentences and tables, and the page they stand on.

A table of the page is replaced whole, between its two markers, or the page stays as it is.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from measure import GOOD, OTHERS, SETTINGS

from hetlb.tools.plots import line_style, new_figure, plot_distribution, save_figure, tidy

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "bench/scheduling/RESULTS.md"
PICTURE = ROOT / "docs/img/scheduling.png"
#: Records of `grid.py` and `run.py --out`.
RESULT = ROOT / "bench/results/scheduling.json"
TRAFFIC = ROOT / "bench/results/scheduling-traffic.json"
MIXED = ROOT / "bench/results/scheduling-mixed.json"


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
    for name, (figure, weights) in SETTINGS.items():
        ratios = sorted(row[name]["ratio"] for row in rates)
        said.append(
            (
                f"moderate: {figure.replace('_', ' ').removesuffix(' ms')} at most 1.03 x the best other "
                f"in 44 of 48 with the weights {', '.join(f'`{n}: {w:g}`' for n, w in weights)}",
                f"{sum(r <= 1.03 for r in ratios)} of {len(ratios)}, worst {ratios[-1]:.2f}, "
                f"mean {statistics.geometric_mean(ratios):.2f} x",
            )
        )
    for times in GOOD:
        goods = [row[f"goodput_{times:g}x"] for row in rates]
        points = [100.0 * (good["hetlb"] - max(good[p] for p in OTHERS)) for good in goods]
        means = {p: statistics.mean(100.0 * good[p] for good in goods) for p in (*OTHERS, "hetlb")}
        best = max(OTHERS, key=lambda policy: means[policy])
        said.append(
            (
                f"moderate: requests within {times:g} x of alone: never 3 points below the best other, in "
                "the mean not below",
                f"{sum(p >= -3.0 for p in points)} of {len(points)}, worst {min(points):+.1f} points, mean "
                f"{means['hetlb']:.1f} % (best other policy {means[best]:.1f} %, `{best}`; chosen case by "
                f"case {means['hetlb'] - statistics.mean(points):.1f} %)",
            )
        )
    to_80 = [row["forecast"] for row in rates if row["rate"] <= 0.8]
    parts = []
    for name, figure in (("first token", "first_token"), ("whole answer", "end")):
        biases = [each[f"{figure}_bias"] for each in to_80]
        covered = [each[f"{figure}_coverage"] for each in to_80]
        parts.append(
            f"{name}: bias {sum(abs(b) <= 0.05 for b in biases)} of {len(to_80)} ({min(biases):+.1%} to "
            f"{max(biases):+.1%}), covered {sum(0.87 <= c <= 0.93 for c in covered)} ({min(covered):.1%} to "
            f"{max(covered):.1%})"
        )
    said.append(
        (
            "forecasts up to 80 %, of the newest 200 answers of each server when the last request came: bias "
            "within 5 %, 90 % bounds cover 87 to 93 %",
            "; ".join(parts),
        )
    )
    wrong = [row[way] for row in document["mishaps"] for way in ("wrong_up", "wrong_down")]
    kept = sum(share >= 0.95 for share in wrong)
    said.append(
        (
            "profiles wrong by 30 %: at least 0.95 of true ones",
            f"{kept} of {len(wrong)}; least {min(wrong):.3f}",
        )
    )
    return said


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; fractions have three digits."""
    lines = ["| " + " | ".join(headings) + " |", "| " + " | ".join(["---"] * len(headings)) + " |"]
    for row in rows:
        cells = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shares(rows: Sequence[dict[str, Any]], name: Callable[[dict[str, Any]], str]) -> Iterable[Sequence[str]]:
    """Shares of the bound, a line for each group of rows of the same name."""
    for group, found in _grouped(rows, name).items():
        means = {policy: statistics.mean(row[policy] for row in found) for policy in OTHERS}
        best = max(means, key=lambda policy: means[policy])
        own = [row["hetlb"] for row in found]
        yield (
            group,
            str(len(found)),
            f"{min(own):.3f}",
            f"**{statistics.mean(own):.3f}**",
            f"{statistics.mean(row['split'] for row in found):.2f}",
            f"{means[best]:.2f} `{best}`",
            f"{means['rr']:.2f}",
        )


def _grouped(
    rows: Iterable[dict[str, Any]], name: Callable[[dict[str, Any]], str]
) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return groups


def _ratios(rows: Iterable[dict[str, Any]], figure: str, *, more_is_better: bool = False) -> str:
    """Median and worst of the ratios of a figure; `rows` may be cases with their `ratios`."""
    found = sorted(row.get("ratios", row)[figure]["ratio"] for row in rows)
    return f"{statistics.median(found):.2f}, {found[0] if more_is_better else found[-1]:.2f}"


def _held_out_name(row: dict[str, Any]) -> str:
    return "held out: " + str(row["fleet"].partition(":")[0])


#: Groups of other traffic: heading, and the kinds of cases in it (the first part of a case's name).
_TRAFFIC = {
    "waves": ("waves",),
    "starts, restarts, steady traffic": ("start", "restart", "steady"),
    "bursts": ("assistant", "once"),
    "several sequences, long contexts": ("groups", "context", "long"),
    "equal servers": ("equal",),
    "a server slows down": ("slowed",),
}


def _traffic_name(case: dict[str, Any]) -> str:
    """Return the group of a case; shared prompts and tenants are apart by load, the former by fleet too."""
    kind, *rest = case["case"].split("/")
    load = "at once" if "once" in rest else "at a load"
    if kind == "shared":
        return f"shared prompts, {rest[1]}, {load}"
    if kind == "tenants":
        return f"heavy-tailed tenants, {load}"
    return next((name for name, kinds in _TRAFFIC.items() if kind in kinds), kind)


#: Figures of mishaps: heading, the least or the largest is the worst, and the figure of a row.
_MISHAPS: tuple[tuple[str, Callable[[Iterable[float]], float], Callable[[dict[str, Any]], float]], ...] = (
    ("slowed: throughput, of that without", min, lambda r: r["slowed_throughput"]),
    (
        "slowed: p99 E2E later, over that without correction",
        max,
        lambda r: r["slowed_p99_s"] / r["slowed_uncorrected_p99_s"],
    ),
    ("slowed: p99 E2E later, over `paper`'s", max, lambda r: r["slowed_p99_s"] / r["slowed_paper_p99_s"]),
    ("burst: p99 TTFT, over `paper`'s", max, lambda r: r["burst_p99_ttft"] / r["burst_paper_p99_ttft"]),
)


def _mishap_rows(
    rows: Sequence[dict[str, Any]], uncorrected: Sequence[dict[str, Any]]
) -> Iterable[Sequence[str]]:
    """Median and worst over the fleets, of each the mean over its traces."""
    without = {(row["fleet"], row["trace"]): row["p99_s"] for row in uncorrected}
    rows = [{**row, "slowed_uncorrected_p99_s": without[row["fleet"], row["trace"]]} for row in rows]
    fleets = {
        fleet: {
            key: statistics.mean(row[key] for row in found)
            for key in found[0]
            if key not in ("fleet", "trace")
        }
        for fleet, found in _grouped(rows, lambda row: str(row["fleet"])).items()
    }
    for heading, worst, figure in _MISHAPS:
        values = {fleet: figure(means) for fleet, means in fleets.items()}
        at = worst(values.values())
        where = next(fleet for fleet, value in values.items() if value == at)
        yield heading, f"{statistics.median(values.values()):.2f}", f"{at:.2f}", where


def mixed_rows(found: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Cells of the table of mixed classes."""
    return [
        (
            each["fleet"],
            f"{each['load']:.0%}",
            each["prompts"],
            f"{each['hetlb']['attainment']:.3f}",
            f"{best['attainment']:.3f} ({each['best_limit']})",
            f"{each['hetlb']['background_tok_s']:,.0f}",
            f"{each['hetlb']['background_tok_s'] / best['background_tok_s']:.2f}",
        )
        for each in found
        for best in [each["limits"][each["best_limit"]]]
    ]


def pages(document: dict[str, Any], traffic: dict[str, Any], mixed: dict[str, Any]) -> dict[str, str]:
    """The tables, by the name of their place on the page."""
    moderate = _grouped(document["moderate"], lambda row: f"{row['rate']:.0%}")
    kinds = _grouped(traffic["cases"], _traffic_name)
    return {
        "verdicts": table(("asked", "measured"), verdicts(document)),
        "at once": table(
            ("fleet", "cases", "`hetlb`: least", "mean", "`split`", "best other policy", "`rr`"),
            (
                *_shares(document["at_once"], lambda row: str(row["fleet"])),
                *_shares(document["held_out"], _held_out_name),
            ),
        ),
        "moderate": table(
            ("rate", "cases", "throughput", "p99 TTFT", "p99 E2E", "mean E2E"),
            (
                (
                    rate,
                    str(len(rows)),
                    _ratios(rows, "request_throughput", more_is_better=True),
                    *(_ratios(rows, figure) for figure in ("p99_ttft_ms", "p99_e2el_ms", "mean_e2el_ms")),
                )
                for rate, rows in moderate.items()
            ),
        ),
        "traffic": table(
            ("kind", "cases", "tokens/s", "mean TTFT", "p99 TTFT", "p99 E2E"),
            (
                (
                    kind,
                    str(len(cases)),
                    _ratios(cases, "total_token_throughput", more_is_better=True),
                    *(_ratios(cases, figure) for figure in ("mean_ttft_ms", "p99_ttft_ms", "p99_e2el_ms")),
                )
                for kind, cases in kinds.items()
            ),
        ),
        "mishaps": table(
            ("", "median", "worst", "there"), _mishap_rows(document["mishaps"], document["uncorrected"])
        ),
        "ablations": table(
            (
                "with", "mean", "least", "99 % done", "wrong profiles",
                "mean TTFT", "p99 TTFT", "mean E2E", "p99 E2E",
            ),
            (
                [
                    r["row"], r["mean_share"], r["min_share"], f"{r['time_to_99_percent']:.2f} x",
                    r["wrong_mean_share"],
                    *(f"{r[k]:.2f} x" for k in ("mean_ttft", "p99_ttft", "mean_e2el", "p99_e2el")),
                ]
                for r in document.get("ablations", [])
            ),
        ),
        "mixed": table(
            (
                "fleet", "load", "background prompts", "attainment", "best limit's", "background tok/s",
                "of best limit's",
            ),
            mixed_rows(mixed["rows"]),
        ),
    }  # fmt: skip


def draw(document: dict[str, Any]) -> None:
    """Draw the distribution over the cases: shares of the bound, and tails at moderate rates."""
    figure = new_figure(9.0, 3.6)
    left, right = figure.subplots(1, 2)
    rows = document["at_once"] + document["held_out"]
    for index, name in enumerate(("hetlb", "split", "paper", "least-kv", "rr")):
        plot_distribution(left, (row[name] for row in rows), label=name, **line_style(index))
    left.set_xlabel("tokens/s, all requests at once (share of the bound)")
    for index, (key, label) in enumerate((("p99_ttft_ms", "p99 TTFT"), ("p99_e2el_ms", "p99 E2E"))):
        plot_distribution(
            right, (row[key]["ratio"] for row in document["moderate"]), label=label, **line_style(index)
        )
    right.axvline(1.0, color="black", linewidth=0.7)
    right.set_xlabel("hetlb over the best other policy, at 50, 80 and 95 %")
    for axis in (left, right):
        axis.set_ylabel("share of the cases")
        axis.set_ylim(0, 1)
        axis.legend(frameon=False, fontsize=8)
        tidy(axis)
    save_figure(figure, PICTURE)


def write_page() -> None:
    """Write the recorded results to the page: each table between its markers, and the picture.

    Raises `SystemExit` where a marker is missing.
    """
    document, traffic, mixed = (json.loads(path.read_text()) for path in (RESULT, TRAFFIC, MIXED))
    text = PAGE.read_text()
    for name, block in pages(document, traffic, mixed).items():
        if name == "ablations" and name not in document:
            continue
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"{PAGE}: expected the markers {begin.strip()} and {end}")
        text = f"{before}{begin}{block}\n{closed}{after}"
    draw(document)
    PAGE.write_text(text)
