"""Every headline claim of the papers that hetlb follows, with its run and its figure: bench/CLAIMS.md.

    python bench/claims.py

The page is made from `bench/results`, into which the commands of its rows write. A row whose run is not there
says so; what was computed by hand from a run, or read from its output, stands here as text.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
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
    """Return throughput kept by the old plan, and by a new one, over the old."""
    found = [row for row in rows_of("rent-claims", "surge") if row["what"] == what]
    return "; ".join(
        f"{row['model'].upper()} {row['before']:.2f}, as it is "
        f"{row['after'] / row['before'] - 1:+.0%}, planned anew "
        f"{row['planned_anew'] / max(row['after'], 1e-9) - 1:+.0%} over that"
        for row in found
    )


def table_3() -> str:
    """Return requests/s planned at 15 dollars on trace 2 over the paper's figures for Helix."""
    large = [
        r["rate"] for r in rows_of("rent-tables", "cases") if r["case"][:3] == ["70b", "trace2_azure", 15.0]
    ]
    small = [row["throughput"] for row in rows_of("rent-claims", "thirty_b")]
    return "; ".join(
        f"{name} {span(found)} requests/s, {statistics.mean(found) / helix - 1:+.0%}"
        for name, found, helix in (("30B", small, 8.49), ("70B", large, 5.72))
    )


def kinds_per_dollar() -> str:
    """Return requests/s per dollar of the best kind of GPU over the worst, over all types of requests."""
    parts = []
    for key in ("8b", "70b"):
        rows = [row["per_dollar"] for row in rows_of("rent-claims", "observations") if row["model"] == key]
        found = [max(each.values()) / min(each.values()) for each in rows]
        best = Counter(max(each, key=lambda gpu: each[gpu]) for each in rows).most_common()
        listed = ", ".join(f"{gpu} for {count}" for gpu, count in best)
        parts.append(f"{key.upper()} {span(found)} x; the best is {listed} of {len(rows)} types")
    return "; ".join(parts)


def degrees_per_dollar() -> str:
    """Return the best TP degree for all over the worst."""
    parts = []
    for key in ("8b", "70b"):
        rows = [row["over"].values() for row in rows_of("rent-claims", "degrees") if row["case"][0] == key]
        found = [(1.0 + max(each)) / (1.0 + min(each)) for each in rows if each]
        parts.append(f"{key.upper()} up to {max(found):.2f} x, median {statistics.median(found):.2f} x")
    return "; ".join(parts)


def classes_rented() -> str:
    """Return the mean share of rented GPUs of the classes that the paper names."""
    rows = rows_of("rent-claims", "compositions")

    def share(key: str, name: str, **cases: Any) -> str:
        found = [
            row[name]
            for row in rows
            if row["case"][0] == key
            and cases.get("trace", row["case"][1]) == row["case"][1]
            and cases.get("budget", row["case"][2]) == row["case"][2]
        ]
        return f"{statistics.mean(found):.0%}"

    return (
        f"70B: {share('70b', 'data centre', budget=60.0)} data centre at 60 dollars, "
        f"{share('70b', 'data centre', budget=15.0)} at 15; "
        f"{share('70b', 'workstation', trace='trace3_wildgpt')} workstation on trace 3; "
        f"8B: {share('8b', 'consumer')} consumer"
    )


def money_of_models() -> str:
    """Return the 70B model's share of the money by budget."""
    rows = rows_of("rent-claims", "two_models")
    return ", ".join(
        f"{statistics.mean(shares):.0%} at {budget:g}"
        for budget in (60.0, 30.0)
        if (shares := [r["share_of_money"]["Llama-3.1-70B"] for r in rows if r["case"][1] == budget])
    )


def search_deviation() -> str:
    """Return by how much the rates of binary search and of the program differ at most."""
    rows = [row for row in rows_of("rent-solver", "cases") if "steps" in row]
    most = max(abs(row["binary_search_rate"] / row["rate"] - 1.0) for row in rows)
    return f"at most {most:.3%} ({len(rows)} cases)"


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


def compared(cluster: str, other: str) -> str:
    """Return throughput over another system, offline and online, and the change of latency online."""
    row = next((each for each in rows_of("place", "systems") if each["cluster"] == cluster), None)
    if row is None:
        raise LookupError(cluster)
    parts = []
    for name, words in (("helix", "Helix's placement"), ("hetlb", "ours")):
        if name not in row:
            continue
        own, base = row[name], row[other]
        rates = ", ".join(
            f"{own[load]['decode_tokens_per_s'] / base[load]['decode_tokens_per_s']:.2f} x"
            for load in ("offline", "own")
        )
        late = "; ".join(
            f"{load_words} prompt {own[load]['prompt_s'] / base[load]['prompt_s'] - 1:+.0%}, decode "
            f"{own[load]['decode_s'] / base[load]['decode_s'] - 1:+.0%}"
            for load, load_words in (("own", "online"), ("same", "same rate"))
        )
        parts.append(f"{words} {rates}; {late}")
    if served := PUBLISHED_PIPELINES.get(cluster) if other == "separate" else None:
        found = row[other]["offline"]["decode_tokens_per_s"]
        parts.append(f"The pipelines serve {found:.0f} tokens/s, in Helix's simulator {served:.0f}")
    return ". ".join(parts)


#: Output tokens/s of separate pipelines offline, by the notes beside Helix's code.
PUBLISHED_PIPELINES = {"single24": 124.3, "dist24": 61.9}


def depths() -> str:
    """Return the machines that a request passes, by cluster and system."""
    rows = {row["cluster"]: row for row in rows_of("place", "systems")}
    return "; ".join(
        f"`{name}`: Helix {rows[name]['helix']['depth']:.1f}, ours {rows[name]['hetlb']['depth']:.1f}, Swarm "
        f"{rows[name]['swarm']['depth']:.1f}"
        for name in ("single24", "dist24")
    )


def published_ratio(cluster: str, over: tuple[str, str], figure: str = "any_flow") -> float:
    """Return a figure of Helix's placement under its policy over another placement and policy."""
    rows = {
        (row["placement"], row["policy"]): row[figure]
        for row in rows_of("place", "published")
        if row["cluster"] == cluster
    }
    one, other = (
        statistics.median(each) if isinstance(each, list) else each
        for each in (rows["helix", "iwrr"], rows[over])
    )
    return float(one / other)


def placements() -> str:
    """Return Helix's placement over others, all under its path policy."""
    return "; ".join(
        f"{name} " + ", ".join(
            f"{published_ratio(cluster, (name.lower(), 'iwrr')):.2f} x (`{cluster}`)"
            for cluster in ("single24", "dist24")
        )
        for name in ("Petals", "Swarm")
    )  # fmt: skip


def congestion() -> str:
    """Return Swarm's mean prompt latency offline in three regions, and over Helix's."""
    rows = rows_of("place", "published")
    own = next(r for r in rows if (r["cluster"], r["policy"]) == ("dist24", "swarm"))
    ratio = 1.0 / published_ratio("dist24", ("swarm", "swarm"), "prompt_latency_s")
    return f"{own['prompt_latency_s']:.0f} s, {ratio:.1f} x Helix's"


def plans_over(system: str, names: Sequence[str]) -> str:
    """Return our simulated output over another system's placement, each under its own path policy."""
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
    """Return simulated output of plans that split on settings of one budget over plans on 8 H100."""
    parts = []
    for model in ("70b", "30b"):
        rows = [row for row in rows_of("split", "distserve") if row["model"] == model]
        ratios = {
            name: [row[name]["served"] / row["homogeneous"]["served"] for row in rows]
            for name in ("het1", "het2", "het3", "het4")
        }
        every = [each for found in ratios.values() for each in found]
        listed = ", ".join(f"{name} {statistics.mean(found):.2f}" for name, found in ratios.items())
        parts.append(f"{model.upper()} {statistics.mean(every):.2f} x ({span(every)}; {listed})")
    return "; ".join(parts)


def chunk_gains() -> str:
    """Return output with chunked prefill over that with prompts first."""
    rows = rows_of("split", "chunked")
    return ", ".join(f"{row['workload']} {row['chunked'] / row['whole'] - 1:+.0%}" for row in rows)


def four_h100() -> str:
    """Return plans that split over plans that do not, on four H100."""
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


def converged() -> str:
    """Return what 4 s of search find over what 20 and 60 s find."""
    return "; ".join(
        f"{span(row['short_over_long'] for row in rows_of('split', part))}" for part in ("twenty", "sixty")
    )


def equal_to_exhaustive() -> str:
    """Return in how many small clusters the search found the best plan."""
    rows = rows_of("split", "exhaustive")
    least = min(row["search_req_s"] / row["exhaustive_req_s"] for row in rows if row["exhaustive_req_s"])
    equal = sum(row["equal"] for row in rows)
    return f"{equal} of {len(rows)} clusters of up to 8 GPUs, at least {least:.2f} of the best of all plans"


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


def policies_over(section: str, name: str, other: str, rates: Sequence[str]) -> str:
    """Return one policy's tokens/s over another's, by request rate, in the case nearest to the paper."""
    path = BENCH / "results" / f"paper-{section}.json"
    case = json.loads(path.read_text())["closest"]
    runs = {(r["name"], r["request_rate"]): r["tok_s"] for r in case["runs"] if r["predictor"] == "normal"}
    ratios = {each: statistics.mean(runs[name, each]) / statistics.mean(runs[other, each]) for each in rates}
    return ", ".join(f"{'at once' if at == 'inf' else at}: {ratio:.2f} x" for at, ratio in ratios.items())


def end_gaps() -> str:
    """Return seconds between the ends of both instances, under round robin and the paper's scheduler."""
    case = json.loads((BENCH / "results" / "paper-5.2.json").read_text())["closest"]
    parts = []
    for name in ("RR", "OS"):
        ends = next(
            r["ends_s"]
            for r in case["runs"]
            if (r["name"], r["request_rate"], r["predictor"]) == (name, "24", "normal")
        )
        parts.append(f"{name} {statistics.mean(abs(a - b) for a, b in ends):.0f} s")
    return ", ".join(parts)


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
        command = self.command if self.command == "-" else f"`{self.command}`"
        return [self.claim, self.paper, here, command, self.why]


RENT, CLAIMS, PLACE, SPLIT = "rent/run.py", "rent/claims.py", "place/run.py --data D --only", "split/run.py"
_HELD = "each at 75 % of its own offline throughput, and all at 75 % of the least; means"
_THIRTY = "the A100's 30B times are scaled from its 70B times, and Helix's placement is not published"

COST = (
    Claim(
        "the worked example in three steps",
        "44.05, 35.24, 30.94 and 28.67 s",
        f"{RENT} toy",
        "the same; 28.43 s, exact, for the last",
        "the paper rounds a split to 15/85",
    ),
    Claim(
        "the right kind of GPU for a type of requests, per dollar (observation 1)",
        "up to 2.27 x",
        f"{CLAIMS} observations",
        kinds_per_dollar,
        "best kind over worst, with the best layout of each",
    ),
    Claim(
        "the right layout (observation 2)",
        "up to 2.61 x",
        f"{CLAIMS} degrees",
        degrees_per_dollar,
        "the best TP degree for all over the worst, at one budget",
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
        "as in the paper, where it gains: availability limits the plan, not the baseline; the gain narrows "
        "with the budget, for 8B throughout, for 70B from 15 dollars on",
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
        "what is rented",
        "70B: 51 % data centre at 60 dollars, workstation at 15, 93 % workstation on trace 3; 8B: "
        "53 % consumer",
        f"{CLAIMS} compositions",
        classes_rented,
        "shares of GPUs; for the reason of the rows above",
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
        "the best degree is a strong baseline; over each degree 8B 0.3, 19, 57, 131 %, 70B 54, 18, 11, 56 % "
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
        "over Helix, 15 dollars, trace 2 (table 3)",
        "30B 11.43 requests/s, +35 %; 70B 7.13, +25 %",
        f"{CLAIMS} thirty_b",
        table_3,
        "over the paper's figures for Helix, which was not run at these GPUs; 30B by rooflines, its KV cache "
        "is 5 times that of 70B (70B: `rent/run.py tables`)",
    ),
    Claim(
        "a surge of short answers, trace 2, 30 dollars",
        "-13 %, planned anew +25 %",
        f"{CLAIMS} surge",
        lambda: table_7("surge of short answers"),
        "how large the surge was is not said: here half of all requests turn into short answers, which "
        "are served faster",
    ),
    Claim(
        "4 H100 are lost",
        "-29 %, planned anew +10 %",
        f"{CLAIMS} surge",
        lambda: table_7("4 H100 lost"),
        "the plan here leans on H100 more",
    ),
    Claim(
        "two models, 80 and 20 % of the requests", "+23 %, up to +35 %", f"{CLAIMS} two_models", two_models
    ),
    Claim(
        "the larger model's share of resources",
        "70 % at 60 dollars, 77 % at 30",
        f"{CLAIMS} two_models",
        money_of_models,
        "share of the money",
    ),
    Claim(
        "search time",
        "binary search 4 times faster than the program",
        f"{RENT} solver",
        solver_times,
        "one linear program in place of a search",
    ),
    Claim("deviation of the faster search", "less than 1 %", f"{RENT} solver", search_deviation),
    Claim(
        "estimated throughputs (table 6)",
        "within 4 to 7 %",
        f"{RENT} estimator",
        "8 to 19 % high (H100, L40 with TP 2, one machine), 11 to 27 % low across "
        "machines, half for L40 with TP 4",
        "other kernels and links",
    ),
)

HELIX = (
    Claim(
        "42 machines of seven kinds, over separate pipelines (the headline: up to 3.3 x), offline and online",
        "2.91 x, 3.29 x; prompt latency -1 %, decode slightly higher",
        f"{PLACE} systems",
        lambda: compared("seven-kinds", "separate"),
        f"four kinds are scaled from Helix's tables of three; {_HELD}",
    ),
    Claim(
        "the same over separate pipelines and a mixed one (SP+)",
        "2.24 x, 2.54 x; prompt latency -7 %",
        f"{PLACE} systems",
        lambda: compared("seven-kinds", "separate and mixed"),
        "as above",
    ),
    Claim(
        "the same over Swarm",
        "1.37 x, 1.48 x; prompt latency -17 %",
        f"{PLACE} systems",
        lambda: compared("seven-kinds", "swarm"),
        "as above",
    ),
    Claim(
        "by time of search, 42 machines, over Swarm",
        "hours",
        f"{PLACE} limits",
        lambda: plans_over("swarm", ["seven-kinds"]),
        "the baseline under the better of `hetlb` and its own policy",
    ),
    Claim(
        "30B, three regions, over Swarm (the headline: up to -66 and -24 %)",
        "2.41 x, 2.33 x; prompt -66 %, decode -24 %",
        f"{PLACE} systems",
        lambda: compared("dist24-30b", "swarm"),
        f"{_THIRTY}; {_HELD}",
    ),
    Claim(
        "30B, three regions, over separate pipelines",
        "1.07 x, 1.10 x; prompt -14 %, decode +2 %",
        f"{PLACE} systems",
        lambda: compared("dist24-30b", "separate"),
        "the search starts from pipelines of one region and of the fewest machines, and found none as good",
    ),
    Claim(
        "30B, one region, over Swarm",
        "2.14 x, 2.07 x; prompt -32 %, decode -12 %",
        f"{PLACE} systems",
        lambda: compared("single24-30b", "swarm"),
        "as above",
    ),
    Claim(
        "30B, one region, over separate pipelines",
        "1.04 x, 1.14 x; prompt -2 %, decode +10 %",
        f"{PLACE} systems",
        lambda: compared("single24-30b", "separate"),
        "as above",
    ),
    Claim(
        "70B, one region, over Swarm",
        "1.94 x, 2.00 x; prompt -15 %, decode +16 %",
        f"{PLACE} systems",
        lambda: compared("single24", "swarm"),
        _HELD,
    ),
    Claim(
        "70B, one region, over separate pipelines",
        "1.86 x, 1.69 x; latency higher",
        f"{PLACE} systems",
        lambda: compared("single24", "separate"),
        "weights take more than half of a machine there, as Helix had to allow",
    ),
    Claim(
        "70B, three regions, over Swarm",
        "1.92 x, 1.97 x; prompt -21 %, decode -7 %",
        f"{PLACE} systems",
        lambda: compared("dist24", "swarm"),
        _HELD,
    ),
    Claim(
        "70B, three regions, over separate pipelines",
        "1.61 x, 1.79 x; latency higher",
        f"{PLACE} systems",
        lambda: compared("dist24", "separate"),
        "as in one region",
    ),
    Claim(
        "Swarm's congestion, three regions, offline",
        "prompts take 71 s, 7.5 x Helix's",
        f"{PLACE} published",
        congestion,
    ),
    Claim(
        "shorter pipelines over slow links",
        "28 % shorter than Swarm's, 19 % than in one region",
        f"{PLACE} systems",
        depths,
        "machines that a request passes",
    ),
    Claim(
        "placements, all under Helix's scheduler",
        "Petals 1.23 x, 1.49 x; Swarm 2.10 x, 2.38 x",
        f"{PLACE} published",
        placements,
    ),
    Claim(
        "interleaved round robin is the best path choice, offline",
        "over Swarm's, random, shortest queue: +30, +29 % in one region, +22, +15, +19 % in three",
        f"{PLACE} paths",
        path_choice,
        "the reverse, over `iwrr`: no request is turned away here, and links form "
        "convoys, which `hetlb` counts",
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
        "optimum of ten machines (`cluster10`)",
        "286.5874, found within 5 min, proven after more than an hour",
        f"{PLACE} flows",
        "the same, proven, 0.005 CPU s",
        "machines are counted by kind, not named",
    ),
    Claim("highest flow, `single24`", "1,289.6 in 10 min", f"{PLACE} plans", "2,045.6, proven, 0.02 CPU s"),
    Claim(
        "pruned links: a smaller program, a better placement",
        "-36 and -46 %; +16 and +2 %",
        f"{PLACE} published",
        lambda: (
            f"{published_ratio('dist24', ('helix_unpruned', 'iwrr')):.2f} x for Helix's placements with "
            "and without (`dist24`)"
        ),
        "hetlb solves no such program",
    ),
    Claim(
        "the search begun with simple placements",
        "43 and 8 % less time",
        "-",
        "not run",
        "hetlb's search has no other beginning, and no such program",
    ),
    Claim(
        "hundreds of machines",
        "none",
        f"{PLACE} large",
        lambda: f"{span((row['over_bound'] for row in rows_of('place', 'large')), '.3f')} of the bound",
        "the bound knows no links",
    ),
    Claim(
        "the first version (arXiv): throughput; prompt and decode latency",
        "2.7 x; 2.8 and 1.3 times lower",
        f"{PLACE} systems",
        "as the rows above",
        "the later paper has 3.3 x, -66 and -24 %",
    ),
)

HEXGEN = (
    Claim(
        "over DistServe at one budget (the headline)",
        "1.3 x, up to 2.0 x",
        f"{SPLIT} distserve",
        over_distserve,
        "against 8 H100, five workloads, simulated; both split every request, without pipelines under NIXL",
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
        "the same over DistServe",
        "0.98 to 1.32 x",
        "-",
        "not run",
        "one search plans for both here: it would be compared with itself",
    ),
    Claim(
        "the search finds the best plan", "equal to exhaustive", f"{SPLIT} exhaustive", equal_to_exhaustive
    ),
    Claim(
        "it converges",
        "in 90 to 120 s",
        f"{SPLIT} twenty sixty",
        converged,
        "after 4 CPU s, of what 20 and 60 s find",
    ),
    Claim(
        "large clusters",
        "320 GPUs in 48 min",
        f"{SPLIT} scale",
        large_splits,
        "a program over kinds of groups",
    ),
    Claim(
        "guided swaps over random ones (and a genetic search)",
        "1.8 x",
        "-",
        "not run",
        "there are no swaps here: beside the program they gained nothing, guided or not (PLANNING.md)",
    ),
    Claim("the estimate is near what is served", '"closely"', f"{SPLIT} simulated", near_what_is_served),
    Claim(
        "chunked prefill, OPT-30B on one H100",
        "+20 % (HPLD, LPLD), +5 % (HPHD, LPHD)",
        f"{SPLIT} chunked",
        chunk_gains,
        "roofline; chunks of 512 tokens against prompts first, as many sequences as the KV cache holds",
    ),
)

#: Rates of section 5.2, and the case of its rows.
_RATES, _CASE = ("8", "16", "24", "inf"), "`V100 x 1.9`, by requests/s"

BALANCER = (
    Claim(
        "its scheduler over round robin, TP 1 beside TP 4 (the headline)",
        "+122.5 %",
        "paper/run.py 5.2",
        lambda: over_round_robin("5.2"),
        "V100 x 1.9: 1.9 times slower than its roofline, which is free",
    ),
    Claim(
        "four TP 2 beside one A800 (the headline)",
        "+33.6 %",
        "paper/run.py 5.3",
        lambda: over_round_robin("5.3"),
        "the paper states no lengths",
    ),
    Claim(
        "the same at every rate",
        "higher",
        "paper/run.py 5.3",
        lambda: policies_over("5.3", "OS", "RR", ("8", "16", "inf")),
        "requests/s; `V100 x 1.5`, answers of 800",
    ),
    Claim(
        "the estimate orders TP degrees as measurement does",
        "always",
        "paper/run.py 5.1",
        "on three measured grids; on a roofline of the V100 TP 1 and 2 (within 6 %) change places",
    ),
    Claim(
        "round robin is the worst, below the first instance alone",
        "yes",
        "paper/run.py 5.2",
        lambda: f"first instance over round robin {policies_over('5.2', 'SI', 'RR', _RATES)}",
        _CASE,
    ),
    Claim(
        "weighted round robin is the best at 24 requests/s and all at once",
        "yes",
        "paper/run.py 5.2",
        lambda: f"over the paper's scheduler {policies_over('5.2', 'WRR', 'OS', _RATES)}",
        f"level; {_CASE}",
    ),
    Claim(
        "the paper's scheduler is the best of all at 8 and 16 requests/s",
        "yes",
        "paper/run.py 5.2",
        lambda: (
            f"over the first instance {policies_over('5.2', 'OS', 'SI', _RATES[:2])}; over WRR "
            f"{policies_over('5.2', 'OS', 'WRR', _RATES[:2])}"
        ),
        "no instance is full at those rates",
    ),
    Claim(
        "by memory alone it is slightly worse",
        "yes",
        "paper/run.py 5.2",
        lambda: f"the paper's scheduler over it {policies_over('5.2', 'OS', 'MB', _RATES)}",
        _CASE,
    ),
    Claim(
        "both instances end closer together",
        "yes",
        "paper/run.py 5.2",
        end_gaps,
        f"at 24 requests/s; {_CASE}",
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
        "`--data D`: Helix's clusters as tables, a folder each (`single24`, `dist24`, `cluster10`) with",
        "`nodes.csv`, `links.csv`, `layer_time.csv`, `by_layers.csv` and `model.json`; beside them",
        "`request_lengths.csv`.",
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
