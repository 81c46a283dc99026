"""Forecast of a request on an instance: the one that scores, objectives, leases and metrics share.

It is a mean; how far truth lies from it, `forecast_errors` knows.
"""

from __future__ import annotations

import math
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.core.demand import Costs
from hetlb.core.forecast_errors import ForecastErrors
from hetlb.core.instance import EngineLoad, Instance, Occupancy
from hetlb.core.types import Request

#: Share of its time that an engine is taken to spend on prompts to come, at most.
_MOST_PREFILL: Final = 0.9
#: Of prompts that are to be computed, the share that a request finds done. Those that came while the running
#: iteration was the next one, two thirds, are half done in it; the others came since it began.
_HALF_DONE: Final = 1.0 / 3.0


@mypyc_attr(acyclic=True)
class Forecast:
    """Times of one request on one instance, in seconds; tokens and sequences are those of each engine.

    `first_token_s` until the first token, `step_s` per further one and `end_s` until the whole answer;
    `others_s` is what all sequences that run there lose together. `now_s` is a step without the request and
    `with_s` one with it, prompts to come aside. `cached` tokens of each of its `prompts` are in the prefix
    cache, `own` sequences join a batch with `context` tokens.
    """

    __slots__ = (
        "cached", "context", "end_s", "first_token_s", "load", "now_s", "others_s", "own", "prompts", "seen",
        "step_s", "with_s",
    )  # fmt: skip

    def __init__(
        self,
        instance: Instance,
        request: Request,
        output: float,
        cached: float,
        cost: Costs,
        prompts_per_s: float,
    ) -> None:
        """`output` tokens are predicted; `prompts_per_s`, each of which costs `cost`, come to each engine."""
        self.seen: Occupancy = instance.occupancy
        self.load: EngineLoad = self.seen.load
        seen, load, sequences = self.seen, self.load, float(request.sequences)
        batch, budget, latency = load.batch, load.budget, load.latency
        prompt = float(request.prompt_tokens)
        part = budget - batch if budget - batch >= 1.0 else 1.0
        self.cached = cached
        self.context = context = seen.context * load.context_share
        self.now_s = now_s = load.step_s + load.token_s * context if batch > 0.0 else 0.0
        own, prompts, mean_context = 1.0, 1.0, prompt + output / 2.0
        if sequences <= load.engines:
            with_s = load.next_step_s + load.next_token_s * (context + mean_context)
        else:
            own = prompts = load.own_batch(sequences)
            if request.samples > 1 and instance.caches_prefixes:
                # Samples of one prompt share its blocks.
                prompts = load.own_batch(float(-(-request.sequences // request.samples)))
            with_s = latency.step_s(batch + own, context + own * mean_context)
        self.own = own
        self.prompts = prompts
        self.with_s = with_s
        pending, joining_s = seen.pending, latency.joining_s(now_s, load.asynchronous)
        if pending > 0.0:
            pending -= _HALF_DONE * (pending if pending < part else part)
            joining_s -= _HALF_DONE * now_s  # two thirds of the time it is no decode step that is half done
        prefill_s = latency.first_token_s(prompt, cached, pending, batch, context, budget, prompts)
        self.first_token_s = first_s = joining_s + prefill_s
        delay_s = cost.delay_s + cost.delay_rise_s * (batch + own - 1.0)
        share = prompts_per_s * delay_s if delay_s > 0.0 else 0.0
        self.step_s = step_s = with_s / (1.0 - (share if share < _MOST_PREFILL else _MOST_PREFILL))
        self.end_s = first_s + (output - 1.0) * step_s if output > 1.0 else first_s
        self.others_s = 0.0
        if batch > 0.0:
            if pending > 0.0:
                prefill_s = latency.first_token_s(prompt, cached, 0.0, batch, context, budget, prompts)
            new = prompt - cached
            # In the iterations that compute its prompt each of the others makes a step, too.
            delay_s = prefill_s - math.ceil(prompts * (new if new > 1.0 else 1.0) / part) * now_s
            if delay_s < 0.0:
                delay_s = 0.0
            if with_s > now_s:
                delay_s += output * (with_s - now_s)
            self.others_s = sequences / own * batch * delay_s

    def document(self, errors: ForecastErrors) -> dict[str, float]:
        """The times by name, and those that nine of ten answers stay within by the `errors` so far."""
        return {
            "first_token_s": self.first_token_s,
            "step_s": self.step_s,
            "end_s": self.end_s,
            "first_token_s_90": self.first_token_s * errors.first_token.quantile(0.9),
            "end_s_90": self.end_s * errors.end.quantile(0.9),
        }

    def joining_s(self, output: float) -> float:
        """Part of `others_s` that longer steps cause for so many tokens of output, prompts aside."""
        more_s = self.with_s - self.now_s
        return self.load.batch * output * more_s if more_s > 0.0 and self.load.batch > 0.0 else 0.0
