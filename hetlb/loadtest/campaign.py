"""The runs of one command: every rate, every policy, every round; then the search for the highest rate.

All policies of a round meet the same plan, on a fleet that is idle and up; the policy that was in
force before is in force again afterwards, whatever ended the runs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hetlb.loadtest.compare import comparisons, turns
from hetlb.loadtest.fleet_admin import FleetAdmin, fleet_admin
from hetlb.loadtest.generator import LoadProgress
from hetlb.loadtest.rate_search import RateSearch
from hetlb.loadtest.runs import LoadSpec, MeasuredRun, measure
from hetlb.loadtest.screen import Screen
from hetlb.loadtest.verdict import verdict_of
from hetlb.workload.arrivals import Ramp, Rate


@dataclass(slots=True)
class CampaignResult:
    """Result of a campaign; `comparison` and `search` as in the JSON document."""

    measured: list[MeasuredRun] = field(default_factory=list)
    comparison: list[dict[str, Any]] = field(default_factory=list)
    search: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Campaign:
    """The runs of `spec` at `rates`. `admin_url` is needed for `policies`.

    `policies` (none: whatever is in force) are compared over `rounds`; `attainment` asks for the highest rate
    at which this share of the requests meets the limits of `spec`, starting from `rates`.
    """

    spec: LoadSpec
    rates: Sequence[Rate | Ramp]
    screen: Screen
    admin_url: str | None = None
    policies: Sequence[str] = ()
    rounds: int = 1
    attainment: float | None = None
    _admin: FleetAdmin | None = None
    _instances: list[str] | None = None
    _outcome: CampaignResult = field(default_factory=CampaignResult)

    async def run(self) -> CampaignResult:
        """Every run, in order."""
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
                runs = [each.run for each in self._outcome.measured]
                self._outcome.comparison = comparisons(runs, self.policies)
            if self.attainment is not None:
                for policy in policies:
                    self._outcome.search.append(await self._search(policy, self.attainment))
        return self._outcome

    async def _measure(self, policy: str | None, rate: Rate | Ramp, number: int = 1) -> MeasuredRun:
        if self._admin is not None and policy is not None and policy in self.policies:
            await self._admin.set_policy(policy)
            await self._admin.idle()
        progress = LoadProgress()
        label = describe(policy, rate, number if self.rounds > 1 else None)
        async with self.screen.bar(label, progress, self.spec.num_prompts):
            measured = await measure(
                self.spec,
                rate,
                policy=policy,
                instances=self._instances,
                round_number=number,
                progress=progress,
                admin=self._admin,
            )
        self._outcome.measured.append(measured)
        run = measured.run
        speeds = f"{run['request_throughput']:,.2f} req/s, {run['output_throughput']:,.0f} output tokens/s"
        self.screen.say(f"{label}: {speeds}")
        for reason in run["client"]["reasons"]:
            self.screen.warn(f"{label}: SUSPECT: {reason}")
        return measured

    async def _search(self, policy: str | None, attainment: float) -> dict[str, Any]:
        """The highest rate of one policy; the rates measured before are where it starts."""
        search = RateSearch(attainment)
        for run in (each.run for each in self._outcome.measured):
            if run["policy"] == policy:
                search.add(run["request_rate"], run["slo_attainment"])
        while (next_rps := search.next_rate_rps()) is not None:
            measured = await self._measure(policy, next_rps)
            search.add(next_rps, measured.run["slo_attainment"])
        runs = (each.run for each in self._outcome.measured if each.run["policy"] == policy)
        return {
            "policy": policy,
            "slo_attainment": attainment,
            "verdict": verdict_of(runs),
            **search.document(),
        }


def describe(policy: str | None, rate: Rate | Ramp, number: int | None) -> str:
    """A run in a few words."""
    if isinstance(rate, Ramp):
        load = f"{rate.start_rps:g} to {rate.end_rps:g} req/s"
    elif rate == "trace":
        load = "as recorded"
    else:
        load = "all at once" if math.isinf(rate) else f"{rate:.4g} req/s"
    words = [] if policy is None else [policy]
    words += [load] if number is None else [load, f"round {number}"]
    return ", ".join(words)
