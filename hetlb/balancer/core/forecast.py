"""Forecast of a request on an instance: the one that scores, objectives, leases and metrics share.

It is a mean by the latency model; how far truth lies from it, and what corrects it, `forecast_errors` knows.
"""

from __future__ import annotations

import math
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.demand import Costs
from hetlb.balancer.core.forecast_errors import ForecastErrors
from hetlb.balancer.core.occupancy import EngineLoad, Occupancy
from hetlb.balancer.core.types import Request

#: Share of its time that an engine is taken to spend on prompts to come, at most.
_MOST_PREFILL: Final = 0.9


@mypyc_attr(acyclic=True)
class Forecast:
    """Times of one request on one instance, in seconds; tokens and sequences are those of each engine.

    `first_token_s` until the first token, `step_s` per further one and `end_s` until the whole answer;
    `others_s` is what all sequences that run there lose together. `with_s` is a step with the request,
    prompts to come aside; `reading_s` its prompts alone take beside what runs. `cached` tokens of each of its
    `prompts` are in the prefix cache, `own` sequences join the batch of an instance as it was `seen`.
    """

    __slots__ = (
        "cached",
        "end_s",
        "first_token_s",
        "load",
        "others_s",
        "own",
        "prompts",
        "reading_s",
        "seen",
        "step_s",
        "with_s",
    )  # fmt: skip

    def __init__(self, seen: Occupancy, cached: float) -> None:
        self.seen: Occupancy = seen
        self.load: EngineLoad = seen.load
        self.cached = cached

    def take(
        self, request: Request, output: float, cost: Costs, prompts_per_s: float, shares: bool = True
    ) -> None:
        """Forecast `output` tokens for a request while `prompts_per_s` come to each engine.

        With `shares` the samples of a prompt are computed once.
        """
        seen, cached = self.seen, self.cached
        load, sequences = seen.load, float(request.sequences)
        batch, budget, context, now_s = load.batch, load.budget, seen.context, seen.now_s
        prompt, latency, pending = float(request.prompt_tokens), load.latency, seen.unread
        own, prompts, mean_context = 1.0, 1.0, prompt + output / 2.0
        if sequences <= load.engines:
            with_s = load.next_step_s + load.next_token_s * (context + mean_context)
        else:
            own = prompts = load.own_batch(sequences)
            if request.samples > 1 and shares:
                prompts = load.own_batch(float(-(-request.sequences // request.samples)))
            with_s = latency.step_s(batch + own, context + own * mean_context)
        self.own = own
        self.prompts = prompts
        self.with_s = with_s
        prefill_s = latency.first_token_s(prompt, cached, pending, batch, context, budget, prompts)
        self.first_token_s = first_s = seen.joining_s + prefill_s
        delay_s = cost.delay_s + cost.delay_rise_s * (batch + own - 1.0)
        share = prompts_per_s * delay_s if delay_s > 0.0 else 0.0
        self.step_s = step_s = with_s / (1.0 - (share if share < _MOST_PREFILL else _MOST_PREFILL))
        self.end_s = first_s + (output - 1.0) * step_s if output > 1.0 else first_s
        if pending > 0.0:
            prefill_s = latency.first_token_s(prompt, cached, 0.0, batch, context, budget, prompts)
        self.reading_s = prefill_s
        self.others_s = 0.0
        if batch > 0.0:
            new = prompt - cached
            part = budget - batch if budget - batch >= 1.0 else 1.0
            # In the iterations that compute its prompt each of the others makes a step, too.
            delay_s = prefill_s - math.ceil(prompts * (new if new > 1.0 else 1.0) / part) * now_s
            if delay_s < 0.0:
                delay_s = 0.0
            if with_s > now_s:
                delay_s += output * (with_s - now_s)
            self.others_s = sequences / own * batch * delay_s

    def document(self, errors: ForecastErrors) -> dict[str, float]:
        """Return the times by name, corrected by the `errors` so far, and their 90 % bounds."""
        return {
            "first_token_s": self.first_token_s * errors.first_token.factor,
            "step_s": self.step_s * errors.step.factor,
            "end_s": self.end_s * errors.end.factor,
            "first_token_s_90": self.first_token_s * errors.first_token.quantile(0.9),
            "end_s_90": self.end_s * errors.end.quantile(0.9),
        }

    def joining_s(self, output: float) -> float:
        """Part of `others_s` that longer steps cause for so many tokens of output, prompts aside."""
        more_s = self.with_s - self.seen.now_s
        return self.load.batch * output * more_s if more_s > 0.0 and self.load.batch > 0.0 else 0.0
