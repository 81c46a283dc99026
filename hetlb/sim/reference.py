"""Yardsticks for a simulated fleet: each engine alone, and a fixed division of the work.

Both use the same engine model as the runs they stand beside, with everything sent at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetlb.core.latency import IterationRule
from hetlb.core.predictor import Predictor
from hetlb.core.types import Request
from hetlb.sim.alone import run_alone
from hetlb.sim.fleet_engine import EngineSpec
from hetlb.workload.arrivals import PlannedRequest

#: Weight of a prompt token against one output token in `fixed_split`.
_PROMPT_WEIGHT = 0.15


def fixed_split(
    engines: Mapping[str, EngineSpec],
    plan: Sequence[PlannedRequest],
    rule: IterationRule,
    alone: Mapping[str, float],
    predictor: Predictor,
    *,
    model: str,
) -> float:
    """Throughput, tokens/s, of a division in proportion to `alone`, each engine running its part alone.

    In plan order, with w = 0.15 * input + predicted output tokens, each request goes to the instance
    j with the least (A_j + w) / alone_j; ties go to the first in `alone`.
    """
    assigned = dict.fromkeys(alone, 0.0)
    parts: dict[str, list[PlannedRequest]] = {name: [] for name in alone}
    for planned in plan:
        request = Request(
            id=planned.index,
            model=model,
            prompt_tokens=planned.prompt_tokens,
            generates=planned.generates,
            prompt_exact=True,
            tenant=planned.tenant,
        )
        output = predictor.predict(request) if planned.generates else 0.0
        work = planned.sequences * (_PROMPT_WEIGHT * planned.prompt_tokens + output)
        able = [name for name, speed in alone.items() if speed > 0 and engines[name].fits(planned)]
        if able:
            chosen = min(able, key=lambda name: (assigned[name] + work) / alone[name])
            assigned[chosen] += work
            parts[chosen].append(planned)
    runs = [run_alone(engines[name], part, rule) for name, part in parts.items() if part]
    longest = max((run.seconds for run in runs), default=0.0)
    return sum(run.tokens for run in runs) / longest if longest > 0 else 0.0
