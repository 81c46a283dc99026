"""Yardsticks for a simulated fleet: what perfect balance would give, and a fixed division of the work.

All use the same engine model as the runs they stand beside, with everything sent at once. A run of
one instance alone contains its drain, which is the longer part of it the fewer requests there are; its steady
part (`steady_requests`) does not depend on how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetlb.core.latency import IterationRule
from hetlb.core.predictor import Predictor
from hetlb.core.setup import SchedulerSetup
from hetlb.core.types import Request
from hetlb.sim.fleet import EngineSpec, FleetSimulation
from hetlb.workload.arrivals import PlannedRequest
from hetlb.workload.traces import Row

#: What one prompt token weighs against one output token in `split`.
_PROMPT_WEIGHT = 0.15
#: An instance alone is full for so many batches before its steady rate is taken; requests at most.
_STEADY_BATCHES = 24
_MOST_STEADY = 20_000


def at_once(plan: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """The same requests, in the same order, all due at the start."""
    return [replace(planned, scheduled_s=0.0) for planned in plan]


def run_alone(
    setup: SchedulerSetup,
    engines: Mapping[str, EngineSpec],
    plan: Sequence[PlannedRequest],
    name: str,
    *,
    model: str,
    rule: IterationRule,
    on_progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """One instance with what of the plan fits it: the summary of the run."""
    specs = tuple(spec for spec in setup.specs if spec.name == name)
    fitting = [planned for planned in plan if engines[name].fits(planned)]
    alone = replace(setup, specs=specs, policy="single")
    run = FleetSimulation(alone, engines, fitting, model=model, rule=rule, on_progress=on_progress)
    return run.run().summary()


def steady_requests(spec: EngineSpec, rows: Sequence[Row], count: int) -> int:
    """Requests after which an instance alone has been full for so long that more do not change its rate."""
    tokens = math.fsum(row.input_tokens + row.output_tokens / 2 for row in rows) / max(1, len(rows))
    batch = min(spec.limits.max_num_seqs, spec.limits.kv_cache_tokens / max(1.0, tokens))
    return max(count, min(_MOST_STEADY, math.ceil(_STEADY_BATCHES * batch)))


class References:
    """Stand-alone runs of every instance, made once and shared by `bound` and `split`.

    `alone_tok_s` are the figures of those runs where they have been made already (`run_alone` of the plan
    `at_once`: `total_token_throughput` by name, in the order of the set-up). With `contents` the engines have
    prefix caches.
    """

    def __init__(
        self,
        setup: SchedulerSetup,
        engines: Mapping[str, EngineSpec],
        plan: Sequence[PlannedRequest],
        *,
        model: str,
        rule: IterationRule,
        alone_tok_s: Mapping[str, float] | None = None,
    ) -> None:
        self._setup, self._engines, self._model, self._rule = setup, engines, model, rule
        self._plan = at_once(plan)
        self._alone_tok_s = alone_tok_s or {
            spec.name: self._run_alone(spec.name, self._plan)["total_token_throughput"]
            for spec in setup.specs
        }

    def bound(self) -> dict[str, float]:
        """The sum over instances of the throughput each reaches alone on all requests, tokens/s."""
        return {"total_token_throughput": sum(self._alone_tok_s.values())}

    def split(self, predictor: Predictor) -> dict[str, float]:
        """A fixed division in proportion to stand-alone throughput, each instance running its part alone.

        In plan order, with w = 0.15 * input + predicted output tokens, each request goes to the instance
        j with the least (A_j + w) / s_j; ties go to the first.
        """
        assigned = dict.fromkeys(self._alone_tok_s, 0.0)
        parts: dict[str, list[PlannedRequest]] = {name: [] for name in assigned}
        for planned in self._plan:
            request = Request(
                id=planned.index,
                model=self._model,
                prompt_tokens=planned.prompt_tokens,
                generates=planned.generates,
                prompt_exact=True,
                tenant=planned.tenant,
            )
            output = predictor.predict(request) if planned.generates else 0.0
            work = planned.sequences * (_PROMPT_WEIGHT * planned.prompt_tokens + output)
            able = [
                name
                for name, speed in self._alone_tok_s.items()
                if speed > 0 and self._engines[name].fits(planned)
            ]
            if not able:
                continue
            chosen = min(able, key=lambda name: (assigned[name] + work) / self._alone_tok_s[name])
            assigned[chosen] += work
            parts[chosen].append(planned)
        runs = [self._run_alone(name, part) for name, part in parts.items() if part]
        tokens = sum(run["total_input_tokens"] + run["total_output_tokens"] for run in runs)
        longest = max((run["duration"] for run in runs), default=0.0)
        return {"total_token_throughput": tokens / longest if longest > 0 else 0.0}

    def _run_alone(self, name: str, plan: Sequence[PlannedRequest]) -> dict[str, Any]:
        return run_alone(
            self._setup,
            self._engines,
            plan,
            name,
            model=self._model,
            rule=self._rule,
        )
