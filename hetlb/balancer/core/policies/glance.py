"""Glance: the choice of `hetlb` in a large fleet with room everywhere, without a look at most instances.

Blocks whose lower bound is above the lowest score are left out. Of instances at rest that are alike one is
looked at. The choice is the same as if each was rated.
"""

from __future__ import annotations

import math
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.blocks import Block
from hetlb.balancer.core.demand import FleetCosts
from hetlb.balancer.core.policies.rules import precedes
from hetlb.balancer.core.policies.score_terms import Weights, set_score
from hetlb.balancer.core.policies.sight import RESTRAINED, ROOM, SPREAD_SHARE, SchedulingContext, Sight
from hetlb.balancer.core.policies.tries import worth_a_try

#: Share of a bound that is no error of rounding.
_SURE: Final = 1.0 - 1e-9
#: Most engines with prefixes of a prompt that are looked for.
_MOST_HELD: Final = 64


def may_glance(ctx: SchedulingContext) -> bool:
    """Return True if a request needs no rule that looks at all instances."""
    request, held = ctx.request, ctx.held
    return (
        request.sequences == 1
        and not request.service.stated
        and not request.service.background
        and not request.places.preferred
        and not ctx.demand.protected
        and ctx.adapter_load_s <= 0.0
        and ctx.demand.goes_on(ctx.now)
        and (held is None or len(held.tokens) <= _MOST_HELD)
    )


@mypyc_attr(acyclic=True)
class Glance:
    """One decision over blocks; `found` is the choice, None if all instances are to be looked at.

    `blocks` are as they were at the time.
    """

    __slots__ = ("_ctx", "_fleet", "_looked", "_shares", "_weights", "blocks", "found", "least", "unsure")

    def __init__(self, ctx: SchedulingContext, fleet: FleetCosts, weights: Weights) -> None:
        self._ctx, self._fleet, self._weights = ctx, fleet, weights
        self._shares = ctx.shares
        self._looked: list[Sight] = []
        assert fleet.blocks is not None
        self.blocks = fleet.blocks.at(ctx.now)
        self.found: Sight | None = None
        self.least, self.unsure = math.inf, False
        ctx.answer_s = self._look(0).own_s
        self._decide(fleet.blocks.number, fleet.blocks.by_cache)
        if self.unsure:
            self.found = None

    def _look(self, position: int) -> Sight:
        """Return an instance with its score."""
        ctx, fleet = self._ctx, self._fleet
        index = fleet.order[position]
        each = Sight(ctx, fleet.members[index], fleet.costs[index], index)
        each.foresee(ctx)
        set_score(ctx, each, self._weights)
        self._looked.append(each)
        return each

    def _consider(self, position: int) -> Sight:
        """Take an instance if it is better than the found one."""
        each = self._look(position)
        if each.state == ROOM:
            found = self.found
            if found is None or precedes(each, found):
                self.found, self.least = each, each.score
        elif each.state != RESTRAINED:
            self.unsure = True
        return each

    def _decide(self, number: dict[str, int], by_cache: dict[int, int]) -> None:
        """Consider each instance that may have the lowest score."""
        ctx = self._ctx
        restrained, held = ctx.restraints, ctx.held
        apart: set[int] = set()
        if restrained is not None:
            for name in restrained:
                apart.add(number[name])
        new = ctx.prompt
        if held is not None:
            for cache_id in held.tokens:
                apart.add(by_cache.get(cache_id, 0))
            if ctx.shares:
                new -= held.paid_tokens(0)
        new = new if new > 1.0 else 1.0
        room = ctx.booked
        for i, block in enumerate(self.blocks):
            tokens = room + SPREAD_SHARE * ctx.long_output * math.sqrt(block.running + 1.0)
            grown = (block.running + 1.0) * (ctx.demand.mix.booked + ctx.least_output)
            if block.crowded:
                self.unsure = True
            elif (
                not block.sure
                or tokens > block.free
                or (ctx.least_output > 0.0 and grown > block.least_cache)
                or i in apart
            ):
                for position in range(len(block.seen)):
                    self._consider(block.first + position)
            else:
                if block.others and self._bound(block, new) <= self.least:
                    self._consider_others(block, new)
                if block.resting:
                    self._consider_resting(block)
            if self.unsure:
                return

    def _bound(self, block: Block, new: float) -> float:
        """Return a lower bound of the scores of a block's instances that do not rest."""
        ctx, weights = self._ctx, self._weights
        tokens = ctx.prompt + ctx.half_output
        reading_s = block.unread_s + block.prompt_token_s * new
        first_s = block.joining_s + (reading_s if reading_s > block.pass_s else block.pass_s)
        step_s = weights[1] * (block.step_s + block.token_s * tokens)
        step_s += weights[2] * (block.more_s + block.more_token_s * tokens)
        return _SURE * ((weights[0] + weights[1]) * first_s + ctx.predicted_output * step_s)

    def _consider_others(self, block: Block, new: float) -> None:
        """Consider each instance of a block that its own bound allows."""
        ctx, weights = self._ctx, self._weights
        tokens = ctx.prompt + ctx.half_output
        for position in block.others:
            seen = block.seen[position]
            load = seen.load
            reading_s = load.prompt_token_s * (seen.behind + new)
            first_s = seen.joining_s + (reading_s if reading_s > load.pass_s else load.pass_s)
            with_s = load.next_step_s + load.next_token_s * (seen.context + tokens)
            step_s = weights[1] * with_s + weights[2] * load.batch * (with_s - seen.now_s)
            bound = (weights[0] + weights[1]) * first_s + ctx.predicted_output * step_s
            if _SURE * bound <= self.least:
                self._consider(block.first + position)

    def _consider_resting(self, block: Block) -> None:
        """Consider the instances at rest that may precede the others at rest."""
        lowest = math.inf
        for position in block.chosen:
            each = self._consider(block.first + position)
            lowest = each.score if each.score < lowest else lowest
        if self._ctx.now >= block.negligible_at and _SURE * lowest <= self.least:
            for position in block.resting:
                self._consider(block.first + position)

    def tried(self, found: Sight) -> Sight:
        """Return an instance that is worth a try, else the found one."""
        fastest, untried = math.inf, []
        for block in self.blocks:
            fastest = block.fastest if block.fastest < fastest else fastest
            if block.untried:
                untried += [block.first + position for position in block.untried]
        if not untried:
            return found
        fleet = self._fleet
        instances = [fleet.members[fleet.order[position]] for position in untried]
        return worth_a_try(fastest, instances, lambda i: self._look(untried[i]), found)

    def all(self) -> list[Sight]:
        """Return each instance with its score, in the order of speed, as it was at the time."""
        ctx, fleet = self._ctx, self._fleet
        looked = {each.index: each for each in self._looked}
        shares, ctx.shares = ctx.shares, self._shares
        found = []
        for block in self.blocks:
            for position, seen in enumerate(block.seen):
                index = fleet.order[block.first + position]
                each = looked.get(index)
                if each is None:
                    each = Sight(ctx, fleet.members[index], fleet.costs[index], index, seen)
                    each.foresee(ctx)
                    set_score(ctx, each, self._weights)
                found.append(each)
        ctx.shares = shares
        return found
