"""Instances that the default policy passes over: the walk over bounds against the rule in plain form."""

from __future__ import annotations

import math
import random

from helpers import MODEL, make_scheduler, request
from hypothesis import given
from hypothesis import strategies as st

from hetlb.core.demand import Demand, size_of
from hetlb.core.instance import Instance
from hetlb.core.latency import DecodeTable, LatencyModel, PnormPrefill, PrefillGrid
from hetlb.core.policies.base import PolicyParams, SchedulingContext
from hetlb.core.policies.least_delay import FULL, PASSED_OVER, Hetlb
from hetlb.core.types import Capacity, Dispatch, InstanceSpec

GRID = PrefillGrid((1, 4, 16), (128, 1024), ((-0.08, 0.06), (0.02, -0.05), (0.0, 0.04)))
BENT = LatencyModel(
    *(2e-5, 1e-3, 0.0, 1e-2, 3e-8, 5e-5, 2e-7, 8e-3),
    better_prefill=PnormPrefill(8e-3, 2.2e-5, 1e-10, 1.7, GRID),
    better_decode=DecodeTable(4e-8, 2e-8, (1, 8, 64), (7e-3, 8e-3, 1e-2)),
)
STRAIGHT = LatencyModel(5e-5, 5e-4, 0.0, 8e-3, 4e-8, 4e-5, 0.0, 9e-3)
FLEET = {
    "a": BENT,
    "b": BENT.scaled(1.6),
    "c": STRAIGHT,
    "d": STRAIGHT.scaled(4.0),
    "e": BENT,
    "f": BENT.scaled(9.0),
}
#: By the name of an instance, tokens of a prompt and of its answer, whether its first token has come.
RUNNING = st.tuples(st.sampled_from(list(FLEET)), st.integers(1, 9000), st.integers(1, 600), st.booleans())
#: Seconds since the one before, tokens of prompt and answer.
CAME = st.tuples(st.sampled_from((0.0, 0.0, 0.02, 0.3, 1.5)), st.integers(1, 4000), st.integers(1, 600))


class Plain:
    """Figures of an instance for one request of one sequence, straight from the latency model."""

    def __init__(self, ctx: SchedulingContext, instance: Instance) -> None:
        self.instance = instance
        load, mix = instance.load, ctx.demand.mix
        self.model, self.bound, self.batch, self.budget = (
            load.latency,
            load.latency_bound,
            load.batch,
            load.budget,
        )
        self.mix, self.prompt, self.long = mix, float(ctx.request.prompt_tokens), ctx.long_output
        self.context = (instance.prompt_tokens + instance.sequences * mix.output / 2.0) * load.context_share
        read_s = self.bound.first_token_s(
            self.prompt, 0.0, float(instance.pending_prompt_tokens), self.batch, self.context, self.budget
        )
        self.first_s = read_s + 0.5 * self.model.step_s(self.batch, self.context)
        output = ctx.predicted_output
        self.decode_s = output * self.model.step_s(
            self.batch + 1.0, self.context + self.prompt + output / 2.0
        )
        self.decode_s *= 1.0 + max(0.0, instance.sequences + 1.0 - load.slots) / load.slots

    def long_answer_s(self, thinning: float) -> float:
        """Seconds of one long answer, the batch thinning out over its last `thinning` tokens."""
        left = max(1.0, self.mix.residual)
        share = min(1.0, 2.0 * left / thinning * (1.0 - math.exp(-thinning / left)))
        own = self.prompt + self.long / 2.0
        thin_s = self.model.step_s(self.batch * share + 1.0, self.context * share + own)
        mix = self.mix
        delay_s = self.bound.read_delay_s(
            mix.prompt, mix.prompt - mix.read, self.batch, self.context, self.budget
        )
        full_s = self.model.step_s(self.batch + 1.0, self.context + own)
        full_s += self.batch / max(1.0, mix.output) * delay_s
        return self.first_s + thinning * thin_s + max(0.0, self.long - thinning) * full_s

    def all_s(self) -> float:
        """Seconds of all that it has and the request; a request whose prompt is read counts half."""
        instance, mix = self.instance, self.mix
        running = float(instance.sequences)
        unread = min(running, instance.pending_prompt_tokens / max(1.0, mix.read))
        return (1.0 + 0.5 * (running + unread)) * mix.size / mix.speed(instance)


def passed_over(ctx: SchedulingContext, instances: list[Instance], room: list[bool]) -> list[bool]:
    """The rule over all instances in turn, fastest first: nothing bounded, nothing left open."""
    demand, mix, now = ctx.demand, ctx.demand.mix, ctx.now
    costs = [mix.costs(each) for each in instances]
    passed = [False] * len(instances)
    ending = demand.ended(0.05 * sum(cost.speed for cost in costs), 16.0, now)
    if not ending and all(room):
        return passed
    plain = [Plain(ctx, instance) for instance in instances]
    order = sorted(range(len(instances)), key=lambda i: costs[i].batch_s)
    shortest_s = plain[order[0]].long_answer_s(ctx.long_output)
    todo = ctx.waiting + size_of(ctx.request, ctx.predicted_output)
    fresh = ctx.waiting == 0 and demand.newest_s == now
    soonest_s = least_decode_s = full_s = math.inf
    speed = 0.0
    for i in order:
        each = plain[i]
        if room[i]:
            kept = fresh and 1.5 * each.first_s < soonest_s < math.inf
            kept = kept and each.decode_s <= 2.5 * least_decode_s
            if speed > 0.0 and not kept:
                long_s = max(
                    each.long_answer_s(min(ctx.long_output, mix.long)),
                    each.all_s() - 0.5 * costs[order[0]].batch_s,
                )
                rate = speed - demand.rate(long_s, now)
                passed[i] = rate > 0.0 and todo / rate + shortest_s < long_s
                if not ending and each.first_s > 1.5 * (todo / speed + full_s):
                    passed[i] = True
            if not passed[i]:
                if not ending:
                    return passed
                soonest_s = min(soonest_s, each.first_s)
                least_decode_s = min(least_decode_s, each.decode_s)
        else:
            full_s = min(full_s, each.first_s)
        speed += costs[i].speed
    return passed


@given(
    running=st.lists(RUNNING, max_size=80),
    came=st.lists(CAME, min_size=1, max_size=60),
    pause_s=st.sampled_from((0.0, 0.0, 0.0, 2.0, 40.0)),
    waiting=st.sampled_from((0, 0, 400, 5_000, 60_000)),
    long=st.integers(1, 4000),
)
def test_bounds_pass_over_those_that_the_plain_rule_passes_over(
    running: list[tuple[str, int, int, bool]],
    came: list[tuple[float, int, int]],
    pause_s: float,
    waiting: int,
    long: int,
) -> None:
    limits = Capacity(kv_cache_tokens=200_000, max_num_seqs=12)
    fleet = [InstanceSpec(name, MODEL, latency=model, capacity=limits) for name, model in FLEET.items()]
    scheduler = make_scheduler(fleet, "least-requests")
    for number, (name, prompt, output, begun) in enumerate(running):
        asked = request(number, prompt=prompt, max_tokens=output, subset=(name,))
        for command in scheduler.on_arrival(asked, 0.0):
            if begun and isinstance(command, Dispatch):
                scheduler.on_first_token(command.lease, 0.0)
    demand, now = Demand(), 0.0
    for gap_s, prompt, output in came:
        now += gap_s
        demand.arrived(size_of(request(0, prompt=prompt), output), now)
        demand.mix.add(prompt, output, 4.0 * output, output)
    asked = request(-1, prompt=came[-1][1])
    ctx = SchedulingContext(
        asked, came[-1][2], long, waiting, demand, now + pause_s, None, residual=demand.mix.residual
    )
    instances = scheduler.instances
    policy = Hetlb(PolicyParams(), random.Random(0))
    chosen, _, made = policy.choose(ctx, instances)
    candidates = made()
    room = [not each.reason.startswith(FULL) for each in candidates]
    expected = passed_over(ctx, instances, room)
    assert [each.reason.startswith(PASSED_OVER) for each in candidates] == expected
    able = [(each.score, i) for i, each in enumerate(candidates) if each.eligible]
    assert chosen == (min(able)[1] if able else None)
