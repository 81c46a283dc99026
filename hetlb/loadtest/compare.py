"""Policies side by side: paired differences over rounds of the same load, and how sure they are.

A difference is taken within a round only, between two runs that sent the same plan; its interval is
Student's t over the rounds (W. S. Gosset, "The probable error of a mean", 1908), and null where one round
says nothing about the next. Every round starts with another policy, so that none is always first.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hetlb.loadtest.verdict import verdict_of
from hetlb.workload.records import CONFIDENCE, student_margin

Policy = TypeVar("Policy", bound="str | None")
#: Figures that are compared: all that the contract names.
FIGURES = (
    "total_token_throughput",
    "output_throughput",
    "request_goodput",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "mean_itl_ms",
    "mean_e2el_ms",
    "p99_e2el_ms",
)


def turns(policies: Sequence[Policy], round_number: int) -> list[Policy]:
    """The order of a round, counted from 1."""
    first = (round_number - 1) % len(policies)
    return [*policies[first:], *policies[:first]]


def comparisons(runs: Sequence[Mapping[str, Any]], policies: Sequence[str]) -> list[dict[str, Any]]:
    """Every policy but the first against the first, at every rate."""
    baseline = policies[0]
    found = []
    for rate in dict.fromkeys(run["request_rate"] for run in runs):
        at_rate = [run for run in runs if run["request_rate"] == rate]
        by_policy = {
            policy: {run["round"]: run for run in at_rate if run["policy"] == policy} for policy in policies
        }
        for policy in policies[1:]:
            rounds = sorted(by_policy[policy].keys() & by_policy[baseline].keys())
            if not rounds:
                continue
            compared = [by_policy[each][number] for each in (policy, baseline) for number in rounds]
            found.append(
                {
                    "request_rate": rate,
                    "policy": policy,
                    "baseline": baseline,
                    "rounds": len(rounds),
                    "confidence": CONFIDENCE,
                    "verdict": verdict_of(compared),
                    "figures": {
                        figure: paired(
                            [by_policy[policy][number][figure] for number in rounds],
                            [by_policy[baseline][number][figure] for number in rounds],
                        )
                        for figure in FIGURES
                    },
                }
            )
    return found


def paired(values: Sequence[float], baseline: Sequence[float]) -> dict[str, float | None]:
    """Mean of both, mean of their differences pair by pair, and its confidence interval `low` to `high`.

    `relative` is the difference as a share of the baseline, null where that is 0.
    """
    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    base, difference = statistics.fmean(baseline), statistics.fmean(differences)
    margin = student_margin(differences) if len(differences) > 1 else None
    return {
        "mean": statistics.fmean(values),
        "baseline_mean": base,
        "difference": difference,
        "low": None if margin is None else difference - margin,
        "high": None if margin is None else difference + margin,
        "relative": difference / base if base else None,
    }
