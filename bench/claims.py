"""Every headline claim of the papers that hetlb follows, with its run and its figure: bench/CLAIMS.md.

    python bench/claims.py

The page is made from `bench/results`, into which the commands of its rows write. A row whose run is not there
says so; what was computed by hand from a run, or read from its output, stands here as text.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
PAGE = BENCH / "CLAIMS.md"
Rows = list[dict[str, Any]]


def rows_of(name: str, part: str) -> Rows:
    """Return the rows of a part of a result. Raises `LookupError` where it was not run."""
    path = BENCH / "results" / f"{name}.json"
    document = json.loads(path.read_text()) if path.is_file() else {}
    rows: Rows = document[part]
    return rows


def span(values: Iterable[float], form: str = ".2f") -> str:
    """Return the least and the most of some figures."""
    found = sorted(values)
    low, high = f"{found[0]:{form}}", f"{found[-1]:{form}}"
    return low if low == high else f"{low} to {high}"


def mean_and_most(values: Sequence[float]) -> str:
    """Return the mean and the highest of some gains."""
    return f"{statistics.mean(values):+.0%}, up to {max(values):+.0%}"


# --- the cost paper -------------------------------------------------------------------------------------


def by_model(rows: Rows, figure: Callable[[dict[str, Any]], float | None]) -> str:
    """Return mean and most of a gain for each model; the first part of a case is the model."""
    parts = []
    for key in ("8b", "70b"):
        values = [v for row in rows if row["case"][0] == key and (v := figure(row)) is not None]
        if values:
            parts.append(f"{key.upper()} {mean_and_most(values)} ({len(values)} cases)")
    return "; ".join(parts)


def gain_over(name: str) -> str:
    """Return the plan's gain over a baseline of the tables."""

    def figure(row: dict[str, Any]) -> float | None:
        found = row["gains"].get(name)
        return None if found is None else float(found[0])

    return by_model(rows_of("rent-tables", "cases"), figure)


def gain_by_budget() -> str:
    """Return the mean gain over one kind of GPU in any number, by budget."""
    rows = rows_of("rent-claims", "budgets")
    parts = []
    for key in ("8b", "70b"):
        figures = []
        for budget in sorted({row["case"][2] for row in rows}):
            own = [row["any number"] for row in rows if row["case"][0] == key and row["case"][2] == budget]
            known = [each for each in own if each is not None]
            if known:
                figures.append(f"{budget:g}: {statistics.mean(known):+.0%}")
        parts.append(f"{key.upper()} {', '.join(figures)}")
    return "; ".join(parts)


def latency_of_plans() -> str:
    """Return the change of latency against one kind of GPU: mean, and the 99th "
    "percentile where it was run."""
    rows = rows_of("rent-claims", "latency")
    parts = []
    for figure in ("mean", "p90", "p99"):
        values = [row[figure] for row in rows if figure in row]
        if values:
            parts.append(f"{figure} {statistics.mean(values):+.0%} (best case {min(values):+.0%})")
    return ", ".join(parts)


def table_7(what: str) -> str:
    """Return throughput kept by the old plan, and that of a new one, over the old."""
    found = [row for row in rows_of("rent-claims", "surge") if row["what"] == what]
    return "; ".join(
        f"{row['model'].upper()} {row['before']:.2f}, as it is "
        f"{row['after'] / row['before'] - 1:+.0%}, planned anew "
        f"{row['planned_anew'] / max(row['after'], 1e-9) - 1:+.0%} over that"
        for row in found
    )


def solver_times() -> str:
    """Return CPU seconds of the solver and of the paper's binary search."""
    rows = rows_of("rent-solver", "cases")
    own = [row["cpu_s"] for row in rows]
    search = [row["binary_search_cpu_s"] for row in rows if "binary_search_cpu_s" in row]
    return (
        f"median {statistics.median(own):.2f} s, worst {max(own):.2f}; the paper's search "
        f"{statistics.median(search):.2f} and {max(search):.2f}"
    )


def two_models() -> str:
    """Return the gains of plans for two models."""
    rows = rows_of("rent-claims", "two_models")
    return "; ".join(
        f"{words} {mean_and_most([row[figure] for row in rows if row[figure] is not None])}"
        for words, figure in (("as available", "available"), ("any number", "any number"))
    )


# --- Helix ----------------------------------------------------------------------------------------------


def published() -> str:
    """Return simulated over published throughput."""
    rows = rows_of("place", "published")
    ratios = [statistics.median(row["any_flow"]) / row["published"] for row in rows]
    near = sum(1.0 <= ratio <= 1.08 for ratio in ratios)
    return f"{span(ratios)} of {len(rows)} published figures, {near} within 1.00 to 1.08"


def helix_over_swarm() -> str:
    """Return simulated output of Helix's system over Swarm's, offline."""
    rows = rows_of("place", "published")
    parts = []
    for cluster in ("single24", "dist24"):
        own = {
            (row["placement"], row["policy"]): row["balanced"] for row in rows if row["cluster"] == cluster
        }
        parts.append(f"{own['helix', 'iwrr'] / own['swarm', 'swarm']:.2f} x (`{cluster}`)")
    return ", ".join(parts)


def latency_change(figure: str) -> str:
    """Return Helix's mean latency over Swarm's, online."""
    return ", ".join(
        f"{row['helix'][figure] / row['swarm'][figure] - 1:+.0%} (`{row['cluster']}`, {LOADS[row['load']]})"
        for row in rows_of("place", "online")
    )


LOADS = {"own": "each at 75 % of its own", "same": "all at 75 % of the least"}


def plans_over(system: str, names: Sequence[str]) -> str:
    """Return our simulated output over that of another system's placement, each under its own path policy."""
    parts = []
    for row in rows_of("place", "limits"):
        if row["cluster"] in names and system in row:
            most = max(row[system].values())
            parts.append(f"{row['ours'] / most:.2f} x in {row['seconds']:.0f} CPU s (`{row['cluster']}`)")
    return ", ".join(parts) or "not run"


def path_choice() -> str:
    """Return other policies over interleaved weighted round robin on Helix's placements, offline."""
    rows = [row for row in rows_of("place", "paths") if row["load"] == "offline"]
    parts = []
    for cluster in ("single24", "dist24"):
        own = {
            row["policy"]: row["decode_tokens_per_s"]
            for row in rows
            if row["cluster"] == cluster and row["weights"] == "balanced"
        }
        parts.append(
            ", ".join(f"`{policy}` {own[policy] / own['iwrr']:.2f} x" for policy in own if policy != "iwrr")
            + f" (`{cluster}`)"
        )
    return "; ".join(parts)


# --- HexGen-2 -------------------------------------------------------------------------------------------


def hexgen(setting: str, over: str, part: str = "mixed") -> str:
    """Return planned output of a setting over another one (`over`), or over itself without splitting."""
    rows = rows_of("split", "paper")
    own = {(row["workload"], row["setting"]): row["profiles"] for row in rows}
    ratios = []
    for (workload, name), figures in own.items():
        if name == setting:
            base = figures["colocated"] if over == "colocated" else own[workload, over]["mixed"]
            ratios.append(figures[part] / base)
    return f"{statistics.mean(ratios):.2f} x ({span(ratios)})"


def over_distserve() -> str:
    """Return simulated output of plans that split on `het1` over those on 8 H100."""
    rows = rows_of("split", "distserve")
    ratios = {row["workload"]: row["het1"]["served"] / row["distserve"]["served"] for row in rows}
    listed = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    return f"{statistics.mean(ratios.values()):.2f} x ({listed})"


def four_h100() -> str:
    """Return plans that split over those that do not, on four H100."""
    rows = rows_of("split", "four")
    return f"{span(row['split'] / row['whole'] for row in rows)} of not splitting"


def large_splits() -> str:
    """Return planned and simulated rates of large clusters."""
    parts = []
    for row in rows_of("split", "scale"):
        share = row["req_s"] / row["bound_req_s"]
        bound = f"{share:.2f} of the bound, " if share > 0.0 else ""
        parts.append(
            f"{row['gpus']} GPUs, {row['cpu_s']:.0f} CPU s: {row['req_s']:.1f} requests/s, {bound}"
            f"simulated {row['simulated_over_planned']:.2f} of it"
        )
    return "; ".join(parts)


def equal_to_exhaustive() -> str:
    """Return in how many small clusters the search found the best plan."""
    rows = rows_of("split", "exhaustive")
    return f"{sum(row['equal'] for row in rows)} of {len(rows)}"


def near_what_is_served() -> str:
    """Return simulated over planned."""
    return span(row["simulated_over_planned"] for row in rows_of("split", "simulated"))


def split_latency() -> str:
    """Return latency without splitting over that with it."""
    return (
        f"{span(row['whole_s'] / row['split_s'] for row in rows_of('split', 'latency'))} x lower in the mean"
    )


# --- the load balancer ----------------------------------------------------------------------------------


def over_round_robin(section: str, keys: Sequence[str] = ()) -> str:
    """Return the gain of the paper's scheduler over round robin by case."""
    parts = []
    for case in rows_of(f"paper-{section}", "cases"):
        own: dict[str, list[float]] = {}
        for run in case["runs"]:
            if run["request_rate"] in ("24", "16"):
                own.setdefault(run["name"], []).extend(run["tok_s"])
        if {"OS", "RR"} <= own.keys() and (not keys or case["key"] in keys):
            gain = statistics.mean(own["OS"]) / statistics.mean(own["RR"]) - 1.0
            parts.append(f"{case['key']}: {gain:+.0%}")
    return "; ".join(parts)


# --- the page -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A headline: what the paper says, the command of its run, what that gave, and why they differ."""

    claim: str
    paper: str
    command: str
    here: Callable[[], str] | str
    why: str = ""

    def cells(self) -> list[str]:
        """Return the row of the table."""
        try:
            here = self.here if isinstance(self.here, str) else self.here()
        except LookupError as missing:
            here = f"not run ({missing})"
        return [self.claim, self.paper, here, f"`{self.command}`", self.why]


RENT, CLAIMS, PLACE, SPLIT = "rent/run.py", "rent/claims.py", "place/run.py --data D --only", "split/run.py"

COST = (
    Claim(
        "the worked example", "28.67 s", f"{RENT} toy", "28.43 s, exact", "the paper rounds a split to 15/85"
    ),
    Claim(
        "throughput over one kind of GPU, any number of it",
        "+20 % (abstract), +25 % (5.2), up to +41 %",
        f"{RENT} tables",
        lambda: gain_over("homogeneous, any number"),
        "in our profiles one kind is nearly the best per dollar for all types; in the paper's measurements "
        "workstation GPUs are up to 2.27 times better for some",
    ),
    Claim(
        "the same, at most what is available",
        "not run",
        f"{RENT} tables",
        lambda: gain_over("homogeneous"),
        "where nothing is scarce, mixing gains 0.2 % (8B) and 6.5 % (70B) (`claims.py prices`)",
    ),
    Claim(
        "gain by budget, one kind in any number",
        "narrows from 30 to 15 % between 5 and 60 dollars",
        f"{CLAIMS} budgets",
        gain_by_budget,
        "availability limits the plan, not the baseline: the gain narrows with the "
        "budget for 8B, and for 70B from 15 dollars on",
    ),
    Claim(
        "latency, 99th percentile lowest of all",
        "-20 %, up to -54 %",
        f"{CLAIMS} latency",
        latency_of_plans,
        "the reverse: at 0.8 of the rate of the best one kind as many as available, "
        "the plan's slower GPUs take "
        "longer; at what load the paper measured is not said",
    ),
    Claim(
        "without the best composition",
        "-20 %, up to -27 %; HexGen on even shares -29 %, up to -35 %",
        f"{RENT} tables",
        lambda: f"the plan over it: {gain_over('uniform composition')}",
        "not every kind serves the larger model well",
    ),
    Claim(
        "one TP for all",
        "-33 %, up to -34 %",
        f"{RENT} tables",
        lambda: f"the plan over the best degree: {gain_over('one TP for all')}",
        "the best degree is a strong baseline; over each degree 8B 0.3, 23, 65, 142 %, 70B 57, 20, 11, 62 % "
        "(`claims.py degrees`)",
    ),
    Claim(
        "requests by round robin",
        "-29 %, up to -32 %",
        f"{RENT} tables",
        lambda: (
            f"the plan over division in proportion: {gain_over('in proportion over the plan')}; over round "
            f"robin: {gain_over('round robin over the plan')}"
        ),
        "the paper's round robin is between proportion and ours, which waits for the slowest instance",
    ),
    Claim(
        "over HexGen on the same GPUs",
        "+14 %, up to +18 %",
        f"{RENT} tables",
        lambda: gain_over("in proportion over the plan"),
        "HexGen's scheduler knows no types; not run itself, division in proportion stands for it",
    ),
    Claim(
        "a surge of short answers, trace 2, 30 dollars",
        "-13 %, planned anew +25 %",
        f"{CLAIMS} surge",
        lambda: table_7("surge of short answers"),
        "how large the surge was is not said: here half of all requests turn into short answers, which "
        "are served faster",
    ),
    Claim("4 H100 are lost", "-29 %, planned anew +10 %", f"{CLAIMS} surge", lambda: table_7("4 H100 lost")),
    Claim(
        "two models, 80 and 20 % of the requests", "+23 %, up to +35 %", f"{CLAIMS} two_models", two_models
    ),
    Claim(
        "search time",
        "binary search 4 times faster than the program",
        f"{RENT} solver",
        solver_times,
        "one linear program in place of a search",
    ),
    Claim(
        "estimated throughputs (table 6)",
        "within 4 to 7 %",
        f"{RENT} estimator",
        "8 to 19 % high (H100, L40 with TP 2, one machine), 11 to 27 % low across "
        "machines, half for L40 with TP 4",
        "other kernels and links",
    ),
    Claim(
        "over Helix, 15 dollars, trace 2",
        "+25 % (70B), +35 % (30B)",
        f"{RENT} tables",
        "7.62 requests/s planned, +33 % over the paper's figure for Helix (70B)",
        "Helix was not run at these GPUs",
    ),
)

HELIX = (
    Claim(
        "42 machines of seven kinds, over Swarm, offline and online",
        "1.37 x, 1.48 x",
        f"{PLACE} limits",
        lambda: plans_over("swarm", ["seven-kinds"]),
        "four kinds are scaled from Helix's tables of three; the baseline under the "
        "better of `hetlb` and its own policy",
    ),
    Claim(
        "the same over separate pipelines (the headline)",
        "2.91 x, 3.29 x",
        f"{PLACE} limits",
        lambda: plans_over("separate-pipelines", ["seven-kinds"]),
        "as above",
    ),
    Claim(
        "prompt latency, online",
        "-66 %",
        f"{PLACE} online",
        lambda: latency_change("prompt_s"),
        "over Swarm; the paper's loads differ by system",
    ),
    Claim(
        "decode latency, online", "-24 %", f"{PLACE} online", lambda: latency_change("decode_s"), "as above"
    ),
    Claim(
        "over Swarm, 70B, offline",
        "1.94 x (`single24`), 1.92 x (`dist24`)",
        f"{PLACE} published",
        helix_over_swarm,
    ),
    Claim(
        "better placements serve more than Helix's own",
        "-",
        f"{PLACE} limits",
        lambda: plans_over("helix", ["single24", "dist24"]),
        "under the better of `hetlb` and `iwrr`",
    ),
    Claim(
        "the simulator's error", "less than 5 %", f"{PLACE} published", published, "an independent simulator"
    ),
    Claim(
        "highest flow, `cluster10`",
        "286.5874, optimal, 3,803 s",
        f"{PLACE} flows",
        "the same, proven, 0.005 CPU s",
        "machines are counted by kind, not named",
    ),
    Claim("highest flow, `single24`", "1,289.6 in 10 min", f"{PLACE} plans", "2,045.6, proven, 0.02 CPU s"),
    Claim(
        "hundreds of machines",
        "none",
        f"{PLACE} large",
        lambda: f"{span((row['over_bound'] for row in rows_of('place', 'large')), '.3f')} of the bound",
        "the bound knows no links",
    ),
    Claim(
        "interleaved round robin is the best path choice, offline",
        "+30 % over Swarm's, +29 % over random",
        f"{PLACE} paths",
        path_choice,
        "the reverse, over `iwrr`: no request is turned away here, and links form "
        "convoys, which `hetlb` counts",
    ),
    Claim(
        "the first version (arXiv): throughput; prompt and decode latency",
        "2.7 x; 2.8 and 1.3 times lower",
        f"{PLACE} limits,online",
        "as the rows above",
        "the later paper has 3.3 x, -66 and -24 %",
    ),
)

HEXGEN = (
    Claim(
        "over DistServe at one budget",
        "1.3 x, up to 2.0 x",
        f"{SPLIT} distserve",
        over_distserve,
        "`het1` against 8 H100, simulated; both split every request, without pipelines under NIXL",
    ),
    Claim(
        "over 8 H100 with vLLM",
        "1.5 x, up to 2.1 x",
        f"{SPLIT} paper",
        lambda: hexgen("het1", "homogeneous"),
        "a saturated engine with chunked prefill loses nothing by doing both",
    ),
    Claim(
        "over HexGen (no splitting) on the same GPUs",
        "1.4 x, up to 1.5 x",
        f"{SPLIT} paper",
        lambda: hexgen("het1", "colocated"),
        "pipelines of both phases pay for bubbles",
    ),
    Claim(
        "70 % of the budget (`het5` against 8 H100)",
        "about equal, up to +30 %",
        f"{SPLIT} paper",
        lambda: hexgen("het5", "homogeneous"),
        "full engines gain nothing from splitting",
    ),
    Claim(
        "latency, `het1`",
        "1.5 x lower",
        f"{SPLIT} latency",
        split_latency,
        "at 75 % of what is served without splitting",
    ),
    Claim("OPT-30B on four H100 over HexGen", "1.32 to 1.42 x", f"{SPLIT} four", four_h100, "equal GPUs"),
    Claim(
        "the search finds the best plan", "equal to exhaustive", f"{SPLIT} exhaustive", equal_to_exhaustive
    ),
    Claim(
        "large clusters",
        "320 GPUs in 48 min",
        f"{SPLIT} scale",
        large_splits,
        "a program over kinds of groups",
    ),
    Claim(
        "guided swaps over random ones",
        "1.8 x",
        f"{SPLIT} swaps (no longer there)",
        lambda: f"{span(row['ratio'] for row in rows_of('split', 'swaps') if row['ratio'] is not None)} x",
        "random swaps are no part of the search any more; in most cases they found no plan",
    ),
    Claim("the estimate is near what is served", '"closely"', f"{SPLIT} simulated", near_what_is_served),
    Claim("chunked prefill, OPT-30B", "+5 to 20 %", "-", "not run", "our engines always divide prompts"),
)

BALANCER = (
    Claim(
        "its scheduler over round robin, TP 1 beside TP 4",
        "+122.5 %",
        "paper/run.py 5.2",
        lambda: over_round_robin("5.2"),
        "V100 x 1.9: 1.9 times slower than its roofline, which is free",
    ),
    Claim(
        "four TP 2 beside one A800",
        "+33.6 %",
        "paper/run.py 5.3",
        lambda: over_round_robin("5.3"),
        "the paper states no lengths",
    ),
    Claim(
        "the estimate orders TP degrees as measurement does",
        "always",
        "paper/run.py 5.1",
        "on three measured grids; on a roofline of the V100 TP 1 and 2 (within 6 %) change places",
    ),
    Claim(
        "best of all at 8 and 16 requests/s",
        "yes",
        "paper/run.py 5.2",
        "no: level with sending all to the first",
        "no instance is full at those rates",
    ),
)

PAPERS = (
    ("Demystifying Cost-Efficiency in LLM Serving over Heterogeneous GPUs (ICML 2025)", COST),
    ("Helix (ASPLOS 2025, and its first version)", HELIX),
    ("HexGen-2 (ICLR 2025)", HEXGEN),
    ("High-Throughput LLM Inference on Heterogeneous Clusters (arXiv 2504.15303)", BALANCER),
)


def page() -> str:
    """Return the page."""
    lines = [
        "# The papers' claims, and what hetlb measures",
        "",
        "Written by `python bench/claims.py` from `bench/results`. Commands are "
        "below `bench/`; all is simulated, no claim",
        "was checked on GPUs. What they rest on: [PLANNING.md](PLANNING.md), "
        "[paper/RESULTS.md](paper/RESULTS.md).",
    ]
    for title, claims in PAPERS:
        lines += [
            "",
            f"## {title}",
            "| claim | the paper | here | run | why they differ |",
            "|---|---|---|---|---|",
        ]
        lines += [f"| {' | '.join(claim.cells())} |" for claim in claims]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.parse_args().out.write_text(page())


if __name__ == "__main__":
    main()
