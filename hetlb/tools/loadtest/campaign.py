"""The runs of one command: every rate, every policy, every round; then the search for the highest rate.

All policies of a round meet the same plan, on an idle, running fleet. They are compared by differences
within a round; the interval of the mean is Student's t over the rounds (W. S. Gosset, "The probable error of
a mean", 1908). Every round starts with another policy, so that none is always first.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeVar

from hetlb.tools.loadtest.fleet_admin import FleetAdmin, fleet_admin
from hetlb.tools.loadtest.load_result import LoadResult, verdict_of
from hetlb.tools.loadtest.runs import LoadSpec, measure
from hetlb.tools.tables import LoadProgress, Screen
from hetlb.tools.workload.arrivals import Ramp, Rate
from hetlb.tools.workload.records import CONFIDENCE_LEVEL, student_margin

Policy = TypeVar("Policy", bound="str | None")
#: Figures compared: all that the contract names.
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


RESOLUTION = 0.05
MAX_PROBES = 20


@dataclass(slots=True)
class Campaign:
    """The runs of `spec` at `rates`. `admin_url` is needed for `policies`.

    `policies` (none: whatever is in force) are compared over `rounds`; `attainment` asks for the highest rate
    with this share of the requests within the limits of `spec`, starting from `rates`. `run` fills
    `measured`, and `comparison` and `search` as in the JSON document. Cancelled, it leaves in `measured` what
    has ended, also of the run it was in.
    """

    spec: LoadSpec
    rates: Sequence[Rate | Ramp]
    screen: Screen
    admin_url: str | None = None
    policies: Sequence[str] = ()
    rounds: int = 1
    attainment: float | None = None
    measured: list[LoadResult] = field(default_factory=list)
    comparison: list[dict[str, Any]] = field(default_factory=list)
    search: list[dict[str, Any]] = field(default_factory=list)
    _admin: FleetAdmin | None = None
    _instances: list[str] | None = None

    async def run(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            policies: Sequence[str | None] = self.policies or (None,)
            if self.admin_url is not None:
                self._admin = await stack.enter_async_context(fleet_admin(self.admin_url))
                self._instances = await self._admin.instances()
                policies = self.policies or (await self._admin.policy(),)
            for rate in self.rates:
                for number in range(1, self.rounds + 1):
                    for policy in turns(policies, number):
                        await self._measure(policy, rate, number)
            if len(self.policies) > 1:
                runs = [each.run for each in self.measured]
                self.comparison = comparisons(runs, self.policies)
            if self.attainment is not None:
                for policy in policies:
                    self.search.append(await self._search(policy, self.attainment))

    async def _measure(self, policy: str | None, rate: Rate | Ramp, number: int = 1) -> LoadResult:
        if self._admin is not None and policy is not None and policy in self.policies:
            await self._admin.set_policy(policy)
            await self._admin.idle()
        progress = LoadProgress()
        label = describe(policy, rate, number if self.rounds > 1 else None)
        async with self.screen.bar(label, progress, self.spec.load.count):
            measured = await measure(
                self.spec,
                rate,
                policy=policy,
                instances=self._instances,
                round_number=number,
                progress=progress,
                admin=self._admin,
            )
        if measured.records or measured.interrupted is None:
            self.measured.append(measured)
        if measured.interrupted is not None:
            raise asyncio.CancelledError
        run = measured.run
        speeds = f"{run['request_throughput']:,.2f} req/s, {run['output_throughput']:,.0f} output tokens/s"
        self.screen.say(f"{label}: {speeds}")
        for reason in run["client"]["reasons"]:
            self.screen.warn(f"{label}: SUSPECT: {reason}")
        return measured

    async def _search(self, policy: str | None, attainment: float) -> dict[str, Any]:
        """Return the highest rate of one policy; the rates measured before are where it starts."""
        search = RateSearch(attainment)
        for run in (each.run for each in self.measured):
            if run["policy"] == policy:
                search.add(run["request_rate"], run["slo_attainment"])
        while (next_rps := search.next_rate_rps()) is not None:
            measured = await self._measure(policy, next_rps)
            search.add(next_rps, measured.run["slo_attainment"])
        runs = (each.run for each in self.measured if each.run["policy"] == policy)
        return {
            "policy": policy,
            "slo_attainment": attainment,
            "verdict": verdict_of(runs),
            **search.document(),
        }


def describe(policy: str | None, rate: Rate | Ramp, number: int | None) -> str:
    if isinstance(rate, Ramp):
        load = f"{rate.start_rps:g} to {rate.end_rps:g} req/s"
    elif rate == "trace":
        load = "as recorded"
    else:
        load = "all at once" if math.isinf(rate) else f"{rate:.4g} req/s"
    words = [] if policy is None else [policy]
    words += [load] if number is None else [load, f"round {number}"]
    return ", ".join(words)


# --- comparison ----------------------------------------------------------------------------------------


def turns(policies: Sequence[Policy], round_number: int) -> list[Policy]:
    """Return the order of the policies in a round; rounds are counted from 1."""
    first = (round_number - 1) % len(policies)
    return [*policies[first:], *policies[:first]]


def comparisons(runs: Sequence[Mapping[str, Any]], policies: Sequence[str]) -> list[dict[str, Any]]:
    """Return comparisons of every other policy with the first one, at every rate."""
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
                    "confidence": CONFIDENCE_LEVEL,
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
    """Return the means of both, the mean of their paired differences, and its confidence interval.

    `relative` is the difference as a share of the baseline, null if that is 0.
    """
    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    base, difference = fmean(baseline), fmean(differences)
    margin = student_margin(differences) if len(differences) > 1 else None
    return {
        "mean": fmean(values),
        "baseline_mean": base,
        "difference": difference,
        "low": None if margin is None else difference - margin,
        "high": None if margin is None else difference + margin,
        "relative": difference / base if base else None,
    }


# --- search --------------------------------------------------------------------------------------------


class RateSearch:
    """Search of one policy for the highest request rate that meets a limit.

    Example: 4 requests/s meet it, so 8 are tried. If these miss it, the search goes on between both. At first
    a rate is doubled or halved. Then the interval between a met and a missed rate is bisected. A rate meets
    the limit if the mean share of its requests in time, over all its runs, is at least `attainment`. If a
    rate misses the limit, all higher rates count as missing it.
    """

    def __init__(self, attainment: float) -> None:
        self._attainment = attainment
        self._shares: dict[float, list[float]] = {}
        self._probes = 0

    def add(self, rate_rps: float, share: float) -> None:
        self._shares.setdefault(rate_rps, []).append(share)

    def document(self) -> dict[str, Any]:
        """Return the result and its probes, as in the JSON document."""
        return {
            "max_request_rate": self.highest_met_rps,
            "lowest_missed_rate": self.lowest_missed_rps,
            "probes": [
                {"request_rate": rate, "slo_attainment": fmean(shares)}
                for rate, shares in sorted(self._shares.items())
            ],
        }

    def _rates(self, *, met: bool) -> list[float]:
        return [rate for rate, each in self._shares.items() if (fmean(each) >= self._attainment) is met]

    @property
    def lowest_missed_rps(self) -> float | None:
        """The lowest rate that missed the limit, None if none did."""
        return min(self._rates(met=False), default=None)

    @property
    def highest_met_rps(self) -> float | None:
        """The highest rate that met the limit below the lowest that missed it, None if none did."""
        missed = self.lowest_missed_rps
        return max((r for r in self._rates(met=True) if missed is None or r < missed), default=None)

    def next_rate_rps(self) -> float | None:
        """Return the rate to measure next, None when the search is over. Needs a measured rate."""
        met, missed = self.highest_met_rps, self.lowest_missed_rps
        if self._probes == MAX_PROBES:
            return None
        if met is not None and missed is not None:
            if missed <= met * (1 + RESOLUTION):
                return None
            rate = math.sqrt(met * missed)
        elif met is not None:
            rate = 2 * met
        else:
            assert missed is not None, "expected a measured rate to start from"
            rate = missed / 2
        self._probes += 1
        return rate
