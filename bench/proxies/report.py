"""The figures as tables: medians over rounds, ratios within rounds, and what was wrong.

A table of bench/proxies/RESULTS.md is replaced whole, between its two markers, or the page stays as it is. A
figure that is missing has no run that counts: `void` says that there were runs and none did.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from document import number_text, replace_sections, table
from peers import ROOT
from scenarios import COALESCED_EVENTS, STREAMS

from hetlb.tools.plots import COLOURS, new_figure, save_figure, tidy

PAGE = ROOT / "bench/proxies/RESULTS.md"
PICTURE = ROOT / "docs" / "img" / "proxies.png"
Run = dict[str, Any]
#: The round and the repeat in it: what ran one right after the other.
Turn = tuple[int, int]
#: What is asked of hetlb: at most this many times the other's CPU, per plain request and per paced chunk.
ASKED = {"vllm-router": 0.95, "vllm-router-rr": 0.95, "envoy": 0.9, "nginx": 1.5}

#: Times and rates are not told of a run during which others used more than this share of the cores.
DISTURBED = 0.25


class Figures:
    """The recorded runs of one number of instances, looked up by proxy and scenario."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs: dict[tuple[str, str, Turn], Run] = {
            (run["proxy"], run["scenario"], (run["round"], run.get("repeat", 0))): run for run in runs
        }
        self.proxies = list(dict.fromkeys(proxy for proxy, _, _ in self._runs if proxy != "direct"))
        self.rounds = sorted({number for _, _, number in self._runs})

    def get(self, proxy: str, scenario: str, number: Turn, void: bool = False) -> Run | None:
        """That run, if it counts (or whatever it was, with `void`)."""
        found = self._runs.get((proxy, scenario, number))
        return found if found is not None and (void or "void" not in found) else None

    def cost_us(self, proxy: str, scenario: str, number: Turn) -> float | None:
        """CPU per plain request or per event, microseconds, in one round."""
        run = self.get(proxy, scenario, number)
        if run is None or "us" not in run:
            return None
        kind, _, streams = scenario.partition("@")
        if kind != "coalesced":
            return float(run["us"])
        plain = self.cost_us(proxy, f"plain@{streams}", number)
        return None if plain is None else (run["us"] - plain) / COALESCED_EVENTS

    def median(self, value: Callable[[Turn], float | None]) -> float | None:
        """The median over the rounds that have a value."""
        found = [got for number in self.rounds if (got := value(number)) is not None]
        return statistics.median(found) if found else None

    def ratio(self, proxy: str, other: str, scenario: str) -> float | None:
        """The median over the rounds of the ratio of two proxies' costs in the same round."""

        def one(number: Turn) -> float | None:
            ours, theirs = (self.cost_us(name, scenario, number) for name in (proxy, other))
            return None if ours is None or theirs is None or theirs <= 0 else ours / theirs

        return self.median(one)

    def added_ms(self, proxy: str, scenario: str, quantile: str, figure: str = "latency_ms") -> float | None:
        """Return a quantile less the same load's without a proxy in the same round, milliseconds."""

        def one(number: Turn) -> float | None:
            run = self.get(proxy, scenario, number)
            if scenario == "half":
                bare = self.get(proxy, "half-direct", number)
            else:
                # Without a proxy the generator is the bottleneck of a closed loop: no fault here.
                bare = self.get("direct", scenario, number, void=True)
            if run is None or bare is None or max(run["others"], bare["others"]) > DISTURBED:
                return None
            if quantile not in run[figure] or quantile not in bare[figure]:
                return None
            return float(run[figure][quantile] - bare[figure][quantile])

        return self.median(one)

    def reads_share(self, proxy: str, scenario: str) -> float | None:
        """Return separate reads per event over the reads without a proxy."""

        def one(number: Turn) -> float | None:
            run, bare = self.get(proxy, scenario, number), self.get("direct", scenario, number)
            if run is None or bare is None:
                return None
            return float(run["reads"] / run["events"] / (bare["reads"] / bare["events"]))

        return self.median(one)

    def of(self, proxy: str, scenario: str, name: str) -> float | None:
        """The median of a recorded number."""

        def one(number: Turn) -> float | None:
            run = self.get(proxy, scenario, number)
            return None if run is None else float(run[name])

        return self.median(one)

    def rate(self, proxy: str) -> float | None:
        """Plain requests a second with 32 connections."""

        def one(number: Turn) -> float | None:
            run = self.get(proxy, "plain@32", number)
            quiet = run is not None and run["others"] <= DISTURBED
            return float(run["answers"] / run["wall_s"]) if run is not None and quiet else None

        return self.median(one)

    def stream_kib(self, proxy: str) -> float | None:
        """Resident memory that each of 512 open streams adds, KiB."""

        def one(number: Turn) -> float | None:
            few, many = self.get(proxy, "plain@1", number), self.get(proxy, "paced20@512", number)
            return None if few is None or many is None else (many["rss"] - few["rss"]) / 511 / 1024

        return self.median(one)

    def answers(self, proxy: str) -> tuple[int, int]:
        """Return the number of checked answers, and of wrong ones."""
        runs = [run for (name, _, _), run in self._runs.items() if name == proxy]
        wrong = sum(sum(run["errors"].values()) for run in runs)
        return sum(run["answers"] for run in runs) + wrong, wrong

    def voids(self) -> dict[tuple[str, str], str]:
        """What had runs that do not count: how many, and why the first did not."""
        found: dict[tuple[str, str], list[str]] = {}
        for (proxy, scenario, _), run in self._runs.items():
            if proxy != "direct" and "void" in run:
                found.setdefault((proxy, scenario), []).append(run["void"])
        return {
            key: why[0] if len(why) == 1 else f"{len(why)} runs, the first as {why[0]}"
            for key, why in found.items()
        }


def tables(document: dict[str, Any]) -> str:
    """All tables, by number of instances."""
    parts = []
    for instances, figures in _by_instances(document).items():
        parts += [f"### {instances} instances", "", *_sections(figures)]
    return "\n".join(parts).rstrip() + "\n"


def _sections(figures: Figures) -> list[str]:
    wide = [f"@{streams}" for streams in STREAMS]
    costs = [f"plain{at}" for at in wide]
    chunks = [
        *(f"coalesced{at}" for at in wide),
        "paced5@1",
        "paced5@32",
        "paced20@1",
        "paced20@32",
        "paced20@512",
    ]

    def rows(cells: Callable[[str], list[str]]) -> list[list[str]]:
        return [[name, *cells(name)] for name in figures.proxies]

    def cost(name: str, scenario: str) -> str:
        return number_text(figures.median(lambda number: figures.cost_us(name, scenario, number)), 1)

    found = [
        "CPU per plain request and per event, us (median of the rounds, idle CPU taken off):",
        "",
        table(
            ["", *costs, *chunks],
            rows(lambda name: [cost(name, scenario) for scenario in [*costs, *chunks]]),
        ),
        "",
    ]
    if "hetlb" in figures.proxies and len(figures.proxies) > 1:
        found += [
            "hetlb's CPU against the other's in the same round (median of the ratios; below 1 is cheaper):",
            "",
            table(
                ["against", *costs, *chunks],
                (
                    [other, *(number_text(figures.ratio("hetlb", other, s), 2) for s in [*costs, *chunks])]
                    for other in figures.proxies
                    if other != "hetlb"
                ),
            ),
            "",
        ]
    found += [
        "Latency added to a plain request (ms, against the same load without a proxy), requests a second "
        "with 32 connections, CPU while idle, memory:",
        "",
        table(
            [
                "",
                "lone p50",
                "lone p99",
                "half load p50",
                "half load p99",
                "requests/s",
                "idle CPU",
                "idle RSS MiB",
                "KiB per stream",
            ],
            rows(
                lambda name: [
                    *(number_text(figures.added_ms(name, "plain@1", q), 3) for q in ("p50", "p99")),
                    *(number_text(figures.added_ms(name, "half", q), 3) for q in ("p50", "p99")),
                    number_text(figures.rate(name), 0),
                    _percent(figures.median(lambda n: _idle_share(figures, name, n))),
                    number_text(_scaled(figures.of(name, "plain@1", "idle_rss"), 1 << 20), 1),
                    number_text(figures.stream_kib(name), 1),
                ]
            ),
        ),
        "",
        "What clients saw: answers checked (status, every event, order, finish, `[DONE]`, framing), wrong "
        "ones, separate reads per event against no proxy, growth of the median gap between reads:",
        "",
        table(
            [
                "",
                "answers",
                "wrong",
                "reads paced5@32",
                "reads paced20@512",
                "gap paced5@32 ms",
                "gap paced20@32 ms",
            ],
            rows(
                lambda name: [
                    *map(str, figures.answers(name)),
                    number_text(figures.reads_share(name, "paced5@32"), 2),
                    number_text(figures.reads_share(name, "paced20@512"), 2),
                    number_text(figures.added_ms(name, "paced5@32", "p50", "gap_ms"), 3),
                    number_text(figures.added_ms(name, "paced20@32", "p50", "gap_ms"), 3),
                ]
            ),
        ),
        "",
    ]
    if voids := figures.voids():
        found += ["Void, and in no figure above:", ""]
        found += [f"- {proxy} {scenario}: {why}" for (proxy, scenario), why in voids.items()]
        found.append("")
    return found


def verdicts(document: dict[str, Any]) -> str:
    """Targets of hetlb and its figures, `a / b` for each number of instances."""
    figures = _by_instances(document)

    def each_of(figure: Callable[[Figures], float | None], digits: int) -> str:
        return " / ".join(number_text(figure(found), digits) for found in figures.values())

    rows = [
        [
            other,
            f"{most} x",
            each_of(lambda found, other=other: found.ratio("hetlb", other, "plain@32"), 2),  # type: ignore[misc]
            each_of(lambda found, other=other: found.ratio("hetlb", other, "paced5@32"), 2),  # type: ignore[misc]
        ]
        for other, most in ASKED.items()
    ]
    lone = each_of(lambda found: found.added_ms("hetlb", "plain@1", "p50"), 3)
    reads = each_of(lambda found: found.reads_share("hetlb", "paced5@32"), 2)
    gap = each_of(lambda found: found.added_ms("hetlb", "paced5@32", "p50", "gap_ms"), 3)
    return (
        table(["hetlb's CPU against", "at most", "plain request", "5 ms-paced chunk"], rows)
        + f"\n\nA lone request: {lone} ms added at p50 (at most 0.25). Separate reads of a "
        f"stream: {reads} x those without a proxy (at least 0.8). "
        f"Median gap at 32 streams: {gap} ms more (at most 1).\n"
    )


def summary(document: dict[str, Any]) -> str:
    """The figures that matter most, a line for each proxy; `a / b` for each number of instances."""
    figures = _by_instances(document)
    first = next(iter(figures.values()))

    def each_of(figure: Callable[[Figures], float | None], digits: int) -> str:
        return " / ".join(number_text(figure(found), digits) for found in figures.values())

    def cost(name: str, scenario: str) -> str:
        return each_of(lambda f: f.median(partial(f.cost_us, name, scenario)), 1)

    rows = [
        [
            name,
            *(cost(name, scenario) for scenario in ("plain@32", "paced5@32", "paced20@512")),
            each_of(lambda f, name=name: f.added_ms(name, "plain@1", "p50"), 3),  # type: ignore[misc]
            each_of(lambda f, name=name: f.rate(name), 0),  # type: ignore[misc]
            number_text(first.stream_kib(name), 1),
        ]
        for name in first.proxies
    ]
    heads = (
        "", "plain@32", "paced5@32", "paced20@512", "lone p50, ms", "requests/s", "KiB per stream",
    )  # fmt: skip
    checked = [found.answers(name) for found in figures.values() for name in found.proxies]
    answers, wrong = (sum(column) for column in zip(*checked, strict=True))
    void = sum(len(found.voids()) for found in figures.values())
    return (
        f"{table(heads, rows)}\n\n"
        f"{answers:,} answers checked, {wrong} wrong; {void} pairs of proxy and scenario had void runs (the "
        "client was the busy one, or the proxy fell behind a paced stream), which count nowhere.\n"
    )


def draw(document: dict[str, Any]) -> None:
    """Draw CPU per plain request and per paced chunk, a bar for each proxy."""
    found = next(iter(_by_instances(document).values()))
    drawn = new_figure(9.0, 3.4)
    for axis, scenario, label in zip(
        drawn.subplots(1, 2, sharey=True),
        ("plain@32", "paced5@32"),
        ("CPU per plain request (us)", "CPU per 5 ms-paced chunk (us)"),
        strict=True,
    ):
        values = {
            name: found.median(partial(found.cost_us, name, scenario)) for name in reversed(found.proxies)
        }
        shown = {name: value for name, value in values.items() if name != "litellm"}
        colours = [COLOURS[0] if name.startswith("hetlb") else COLOURS[-1] for name in shown]
        bars = axis.barh(list(shown), [value or 0.0 for value in shown.values()], color=colours)
        axis.bar_label(bars, [number_text(value, 1) for value in shown.values()], padding=3, fontsize=8)
        axis.set_xlabel(label)
        axis.margins(x=0.12)
        tidy(axis)
    save_figure(drawn, PICTURE)


def _by_instances(document: dict[str, Any]) -> dict[int, Figures]:
    counts = sorted({run["instances"] for run in document["runs"]})
    return {count: Figures(run for run in document["runs"] if run["instances"] == count) for count in counts}


def setup(document: dict[str, Any]) -> str:
    """The command, the machine, the versions; the record also holds how each proxy logs and chooses."""
    told = document["about"]
    versions = ", ".join(f"{name} {facts['version']}" for name, facts in told["proxies"].items())
    when = f"{told['date']}, {told['machine']}; hetlb at {told['commit']}."
    return f"```\n{told['command']}\n```\n\n{when}\n{versions}.\n"


def write_page(document: dict[str, Any]) -> None:
    """Renew the tables of bench/proxies/RESULTS.md and its picture."""
    draw(document)
    replace_sections(
        PAGE, {"setup": setup(document), "verdicts": verdicts(document), "tables": summary(document)}
    )


def _idle_share(figures: Figures, name: str, number: Turn) -> float | None:
    run = figures.get(name, "plain@1", number)
    return None if run is None else run["idle_ns"] / (run["wall_s"] * 1e9)


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value / by


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"
