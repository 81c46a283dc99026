"""Yardsticks for a simulated fleet: what perfect balance would give, and a fixed division of the work.

Both use the same engine model as the runs they stand beside, with everything sent at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetlb.core.latency import IterationRule
from hetlb.core.predictor import Predictor
from hetlb.core.setup import SchedulerSetup
from hetlb.core.types import Request
from hetlb.sim.alone import run_alone
from hetlb.sim.fleet_engine import EngineSpec
from hetlb.workload.arrivals import PlannedRequest

#: Weight of a prompt token against one output token in `split`.
_PROMPT_WEIGHT = 0.15


def at_once(plan: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """The same requests, in the same order, all due at the start."""
    return [planned if planned.scheduled_s == 0.0 else replace(planned, scheduled_s=0.0) for planned in plan]


class References:
    """Stand-alone runs of every instance, made once and shared by `bound` and `split`.

    `alone_tok_s` are the figures of those runs where they have been made already (`run_alone` of the plan
    `at_once`: tokens/s by name, in the order of the set-up). With `contents` the engines have prefix caches.
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
        self._engines, self._model, self._rule = engines, model, rule
        self._plan = at_once(plan)
        self._alone_tok_s = alone_tok_s or {
            spec.name: run_alone(engines[spec.name], self._plan, rule).tokens_per_s for spec in setup.specs
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
        runs = [run_alone(self._engines[name], part, self._rule) for name, part in parts.items() if part]
        tokens = sum(run.tokens for run in runs)
        longest = max((run.seconds for run in runs), default=0.0)
        return {"total_token_throughput": tokens / longest if longest > 0 else 0.0}
