"""Sight: what one decision knows of its request (`SchedulingContext`) and of an instance for it (`Sight`).

Each figure is computed once for an instance, a request and a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.demand import Costs, Demand
from hetlb.balancer.core.forecast import Forecast
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.prefix_index import Held
from hetlb.balancer.core.types import Request

#: States of an instance: room, or the reason why not.
ROOM: Final = 0
NO_SLOT: Final = 1
NO_MEMORY: Final = 2
HELD: Final = 3
RESTRAINED: Final = 4
KEPT_FREE: Final = 5


@mypyc_attr(acyclic=True, free_list_len=1)
class SchedulingContext:
    """Context of one decision: the request, the time, and what else is asked for.

    `waiting` is the size of the other requests in the queue for the same model. `held` is what prefix caches
    have of its prompt. `availabilities` give for each instance that of `core.throttle`, and why, for policies
    that hold back; None where all are normal. Of the KV cache it takes `booked` tokens where nothing of its
    `prompts` is cached, its answers half-grown.
    """

    __slots__ = (
        "adapter_load_s", "availabilities", "booked", "demand", "goes_on", "half_output", "held",
        "long_output", "mean_output", "mean_prefill", "now", "predicted_output", "prompt", "prompts",
        "request", "waited_s", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        predicted_output: float,
        long_output: float,
        waiting: int,
        demand: Demand,
        now: float,
        held: Held | None,
        availabilities: Sequence[tuple[int, str]] | None = None,
    ) -> None:
        self.request = request
        self.predicted_output = predicted_output
        self.long_output = long_output
        self.waiting = waiting
        self.demand = demand
        #: Of the mean request when this was made: tokens of the prompt to compute, and of the answer.
        self.mean_prefill = demand.mix.prefill
        self.mean_output = demand.mix.output
        self.now = now
        self.held = held
        self.availabilities = availabilities
        #: Seconds to load the adapter that the request is for, 0 where it is for none.
        self.adapter_load_s = 0.0
        #: Seconds since the request came.
        self.waited_s = 0.0
        #: True unless it is known that no more requests come.
        self.goes_on = True
        self.prompt = prompt = float(request.prompt_tokens)
        prompts = 1.0 if request.sequences <= 1 else float(-(-request.sequences // request.samples))
        self.prompts = prompts
        self.half_output = predicted_output / 2.0
        self.booked = prompts * prompt + request.sequences * self.half_output

    def cached_tokens(self, instance: Instance) -> int:
        """Return the tokens of the prompt in the prefix cache of an instance."""
        held = self.held
        return (
            0 if held is None or not instance.caches_prefixes else held.tokens.get(instance.tree.cache_id, 0)
        )


@mypyc_attr(acyclic=True)
class Sight(Forecast):
    """Forecast of the request on one instance, the room there, and the terms of the score in seconds.

    With the request
    `used_tokens` of the KV cache are in use, its answer half-grown; `ending` mean answers will have ended
    when a prompt that is elsewhere still comes to decode. `prompts_per_s` mean prompts came to each engine
    lately. `done_s`: until the faster instances are done with all that waits, infinite while requests come.
    `limit`: the score above which it is passed over. The forecast
    is there after `foresee`, terms and score once it is `rated`.
    """

    __slots__ = (
        "adapter_s", "coming_s", "cost", "done_s", "ending", "finish_s", "foreseen", "index",
        "instance", "later_s", "limit", "loss_s", "own_s", "prompts_per_s", "rated", "score",
        "state", "used_tokens",
    )  # fmt: skip

    index: int
    state: int
    rated: bool
    foreseen: bool
    limit: float
    done_s: float
    ending: float
    used_tokens: float
    prompts_per_s: float
    score: float
    own_s: float
    loss_s: float
    adapter_s: float
    coming_s: float
    finish_s: float
    later_s: float

    def __init__(self, ctx: SchedulingContext, instance: Instance, cost: Costs) -> None:
        """See the room; `cost` is that of the mean request there."""
        seen = instance.occupancy
        cached = 0.0 if ctx.held is None else float(ctx.cached_tokens(instance))
        super().__init__(seen, cached)
        self.instance = instance
        self.cost = cost
        self.index, self.state = 0, ROOM
        self.foreseen = self.rated = False
        self.limit = self.done_s = math.inf
        need, booked = instance.kv_need, ctx.booked - ctx.prompts * cached
        if need is not None:
            booked = need.grows * booked + ctx.request.sequences * need.beside(ctx.prompt + ctx.half_output)
        used = seen.expected_kv_tokens(ctx.now) + booked
        self.ending = 0.0
        if seen.incoming > 0.0:
            self.ending = ending = seen.ending(seen.now_s * ctx.mean_output, ctx.now)
            used -= ending * (ctx.demand.mix.booked + ctx.mean_output / 2.0)
        self.used_tokens = used

    def foresee(self, ctx: SchedulingContext) -> None:
        """Forecast the request there, once."""
        if self.foreseen:
            return
        self.foreseen = True
        seen = self.seen
        lately = seen.prefilling.per_s(ctx.now) / (seen.load.engines * max(1.0, ctx.mean_prefill))
        self.prompts_per_s = lately
        self.take(ctx.request, ctx.predicted_output, self.cost, lately, self.instance.caches_prefixes)


def foreseen(ctx: SchedulingContext, instance: Instance) -> Sight:
    """Return the sight of an instance, with its forecast."""
    found = Sight(ctx, instance, ctx.demand.mix.costs(instance))
    found.foresee(ctx)
    return found
