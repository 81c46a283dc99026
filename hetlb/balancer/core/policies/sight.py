"""Sight: the knowledge of one decision about its request (`SchedulingContext`) and an instance (`Sight`).

Each figure is computed once for an instance, a request and a time. Filter, terms, hold and booking read it.
The forecast is a mean by the latency model; how far truth lies from it, `forecast_errors` knows.
"""

from __future__ import annotations

import math
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.demand import Costs, Demand
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.latency import delay_of_reading_s
from hetlb.balancer.core.occupancy import Occupancy
from hetlb.balancer.core.prefix_index import Held
from hetlb.balancer.core.types import Request

#: States of an instance: room, or the reason why not. From `KEPT_FREE` on a slower one may wait for it.
ROOM: Final = 0
HELD: Final = 1
RESTRAINED: Final = 2
KEPT_FREE: Final = 3
NO_SLOT: Final = 4
NO_MEMORY: Final = 5
UNREAD: Final = 6
#: Largest share of its time that an engine is taken to spend on prompts to come.
MOST_PREFILL_SHARE: Final = 0.9
#: Standard deviation of a running answer's tokens in the KV cache, as a share of a long answer's. Memory is
#: left free for one deviation of all that run (`front.py`: preemptions 408 -> 36; two: dominated 1 -> 4).
SPREAD_SHARE: Final = 0.25


@mypyc_attr(acyclic=True, free_list_len=1)
class SchedulingContext:
    """Context of one decision: the request, the time, and the state of demand.

    `waiting` is the size of the other requests in the queue for the same model. `held` is what prefix caches
    have of its prompt. `restraints` are the instances' of `Choices`, for policies that hold back; None if
    all are normal. Of the KV cache it takes `booked` tokens where nothing of its `prompts` is cached, its
    answers half-grown.
    """

    __slots__ = (
        "adapter_load_s", "answer_s", "booked", "burst", "demand", "goes_on", "half_output", "held",
        "least_output", "long_output", "mean_output", "mean_prefill", "most_cached", "now",
        "predicted_output", "prompt", "prompts", "request", "restraints", "shares", "unread", "waited_s",
        "waiting",
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
        #: True if others pay their part of a prefix that they use elsewhere, too (see `Held`).
        self.shares = False
        self.restraints: dict[str, str] | None = None
        #: Most tokens of its prompt that an instance holds, and mean prompt tokens that wait on an instance.
        self.most_cached = self.unread = 0.0
        #: Seconds to load the request's adapter, 0 without one.
        self.adapter_load_s = 0.0
        #: Seconds since the request came.
        self.waited_s = 0.0
        #: Tokens that a KV cache is to hold of each answer at least, while lengths are unknown.
        self.least_output = 0.0
        #: Requests that came at once, or the number that waits if that is larger.
        self.burst = float(demand.burst)
        #: Forecast seconds of its answer at the fastest instance; the last request's before a policy has set
        #: it.
        self.answer_s = demand.answer_s
        #: False once no more requests are expected.
        self.goes_on = True
        self.prompt = prompt = float(request.prompt_tokens)
        prompts = 1.0 if request.sequences <= 1 else float(-(-request.sequences // request.samples))
        self.prompts = prompts
        self.half_output = predicted_output / 2.0
        self.booked = prompts * prompt + request.sequences * self.half_output

    def cached_tokens(self, instance: Instance) -> int:
        """Return the tokens of the prompt in the prefix cache of an instance."""
        held = self.held
        if held is None or not instance.caches_prefixes:
            return 0
        return held.tokens.get(instance.tree.cache_id, 0)


@mypyc_attr(acyclic=True)
class Sight:
    """Room for the request on one instance as it was `seen`, the forecast, and terms of the score.

    Times are in seconds; tokens and sequences of the forecast are each engine's. `cached` tokens of each of
    the request's `prompts` are in the prefix cache. Its `own` sequences join the batch. `state`: room, or the
    reason why there is none. `used_tokens` of the KV cache are in use with the request, its answer
    half-grown.

    After `foresee`: `first_token_s` until the first token, `step_s` per further token, `end_s` until the
    whole answer. `own_s` is `end_s` without prompts to come; `long_s` is the same for a long answer.
    `others_s` is the total delay of the running requests, `slower_s` its part by longer steps. `with_s` is a
    step with the request, without prompts to come. `reading_s` is the time of its own prompts beside what
    runs. `prompts_per_s` mean prompts came to each engine lately.

    `done_s`: time until the faster instances are done with all that waits, infinite while requests come.
    `limit`: the score above which the instance is passed over. The other terms and the `score` are set once
    it is `rated`.
    """

    __slots__ = (
        "adapter_s", "cached", "coming_s", "cost", "done_s", "end_s", "faster", "finish_s", "first_token_s",
        "index", "instance", "later_s", "limit", "load", "long_s", "loss_s", "others_s", "own",
        "own_s", "prompts", "prompts_per_s", "rated", "reading_s", "score", "seen", "slower_s", "speed",
        "state", "step_s", "used_tokens", "with_s",
    )  # fmt: skip

    own: float
    prompts: float
    prompts_per_s: float
    reading_s: float
    first_token_s: float
    step_s: float
    end_s: float
    own_s: float
    long_s: float
    others_s: float
    slower_s: float
    score: float

    def __init__(
        self,
        ctx: SchedulingContext,
        instance: Instance,
        cost: Costs,
        index: int = 0,
        before: Occupancy | None = None,
    ) -> None:
        """See the room. `cost` has the costs of the mean request there.

        `before` is an earlier occupancy, at which the instance had room.
        """
        self.seen = seen = instance.seen(ctx.now) if before is None else before
        self.load = seen.load
        self.instance = instance
        self.cost = cost
        self.index = index
        self.rated = False
        #: Speed of all faster instances together; `speed` is its own, 0 if it is restrained.
        self.faster = 0.0
        self.limit = self.done_s = math.inf
        self.end_s = 0.0
        self.coming_s = self.loss_s = self.adapter_s = self.finish_s = self.later_s = 0.0
        self.cached = cached = 0.0 if ctx.held is None else float(ctx.cached_tokens(instance))
        need, booked = instance.kv_need, ctx.booked - ctx.prompts * cached
        if need is not None:
            booked = need.grows * booked + ctx.request.sequences * need.beside(ctx.prompt + ctx.half_output)
        used, running = seen.expected_kv_tokens(ctx.now) + booked, seen.running
        if seen.incoming > 0.0:
            # Answers that will have ended here before a prompt that is still elsewhere comes to decode.
            ending = seen.ending(seen.now_s * ctx.mean_output, ctx.now)
            used -= ending * (ctx.demand.mix.booked + ctx.mean_output / 2.0)
            running -= ending
        self.used_tokens = used
        self.state = ROOM if seen.empty or before is not None else self._room(ctx, running)
        self.speed, restraints = cost.speed, ctx.restraints
        if restraints is not None and instance.name in restraints:
            self.speed = 0.0
            if self.state == ROOM:
                self.state = RESTRAINED
        tokens = seen.context + (ctx.prompt + ctx.half_output)
        self.with_s = self.load.next_step_s + self.load.next_token_s * tokens
        if ctx.shares and ctx.held is not None and instance.caches_prefixes:
            paid = ctx.held.paid_tokens(instance.tree.cache_id)
            # Leases that end before it is read do not pay (`ordinary.py`, 70B, 16,384: TTFT 0.82 x).
            if paid * self.load.prompt_token_s <= ctx.answer_s + ctx.predicted_output * self.with_s:
                cached += paid
            self.cached = cached if cached < ctx.prompt - 1.0 else max(0.0, ctx.prompt - 1.0)

    def _room(self, ctx: SchedulingContext, running: float) -> int:
        """Return the state of an instance that is not empty: it needs a slot and KV cache."""
        seen, instance, load = self.seen, self.instance, self.load
        own = seen.running - instance.foreign
        exploring = instance.exploring
        few = exploring is not None and own >= exploring.sequences(instance, ctx.now)
        if few or running >= load.all_slots:
            return NO_SLOT
        sequences = seen.running + ctx.request.sequences
        grows = 1.0 if instance.kv_need is None else instance.kv_need.grows
        used = self.used_tokens + grows * SPREAD_SHARE * ctx.long_output * math.sqrt(sequences)
        if ctx.least_output > 0.0:
            used = max(used, sequences * (ctx.demand.mix.booked + grows * ctx.least_output))
        if used <= load.kv_cache_tokens:
            return ROOM
        # An assumed cache size does not make an engine without figures full: late first tokens show its
        # limit.
        told = seen.sample_at > -math.inf or instance.capacity.kv_cache_tokens is not None
        return NO_MEMORY if told else ROOM

    def foresee(self, ctx: SchedulingContext) -> None:
        """Forecast the request on the instance."""
        seen, load, cost, request, cached = self.seen, self.load, self.cost, ctx.request, self.cached
        sequences, output, prompt = float(request.sequences), ctx.predicted_output, ctx.prompt
        batch, budget, context, now_s = load.batch, load.budget, seen.context, seen.now_s
        latency, pending = load.latency, seen.behind
        own, prompts, with_s = 1.0, 1.0, self.with_s
        if sequences > load.engines:
            own = prompts = load.own_batch(sequences)
            if request.samples > 1 and self.instance.caches_prefixes:
                prompts = load.own_batch(ctx.prompts)
            tokens = context + own * (prompt + ctx.half_output)
            self.with_s = with_s = latency.step_s(batch + own, tokens)
        self.own = own
        self.prompts = prompts
        lately = seen.prefilling.per_s(ctx.now) / (load.engines * max(1.0, ctx.mean_prefill))
        self.prompts_per_s = lately
        prefill_s = latency.first_token_s(prompt, cached, pending, batch, context, budget, prompts)
        self.first_token_s = first_s = seen.joining_s + seen.left_s(ctx.now) + prefill_s
        delay_s = cost.delay_s + cost.delay_rise_s * (batch + own - 1.0)
        share = lately * delay_s if delay_s > 0.0 else 0.0
        self.step_s = step_s = with_s / (1.0 - (share if share < MOST_PREFILL_SHARE else MOST_PREFILL_SHARE))
        self.end_s = first_s + (output - 1.0) * step_s if output > 1.0 else first_s
        self.own_s = first_s + output * with_s
        long = ctx.long_output
        long_step_s = load.next_step_s + load.next_token_s * (context + prompt + long / 2.0)
        self.long_s = first_s + long * long_step_s
        if pending > 0.0:
            prefill_s = latency.first_token_s(prompt, cached, 0.0, batch, context, budget, prompts)
        self.reading_s = prefill_s
        self.others_s = self.slower_s = 0.0
        if batch > 0.0:
            new = prompt - cached
            new = prompts * (new if new > 1.0 else 1.0)
            delay_s = delay_of_reading_s(prefill_s, new, batch, now_s, budget)
            if with_s > now_s:
                delay_s += output * (with_s - now_s)
                self.slower_s = batch * output * (with_s - now_s)
            self.others_s = sequences / own * batch * delay_s


def foreseen(ctx: SchedulingContext, instance: Instance) -> Sight:
    """Return the sight of an instance, with its forecast."""
    found = Sight(ctx, instance, ctx.demand.mix.costs(instance))
    found.foresee(ctx)
    return found
