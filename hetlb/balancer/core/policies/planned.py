"""`planned`: the policy that divides the work as a plan of `hetlb rent` says."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.policies.base import Choice, PlannedType, Policy, PolicyParams
from hetlb.balancer.core.policies.candidates import FULL, PASSED_OVER
from hetlb.balancer.core.policies.hetlb import Hetlb
from hetlb.balancer.core.policies.sight import SchedulingContext
from hetlb.balancer.core.policies.worth import ALIKE_LOG_LENGTHS, log_ratio
from hetlb.balancer.core.types import Candidate

#: A reason of `planned`, and the requests of a type after which earlier ones count half.
NO_SHARE: Final = "no share of this type in the plan"
REMEMBERED: Final = 4096.0


class Planned(Hetlb):
    """`planned`: every type of request divided over the instances as a plan says.

    A request belongs to the types with the nearest prompt length. If one of these has answers as long as
    predicted, it is of that type; else it counts as a mean of them. It goes to an instance with room (by the
    rules of `hetlb`): the one that is furthest behind its planned share. If no instance with a share can be
    reached, or the plan lacks the model, `hetlb` decides.
    """

    name = "planned"

    def __init__(self, params: PolicyParams, rng: random.Random) -> None:
        super().__init__(params, rng)
        #: By type and instance: requests given, halved when they become many so that old ones fade.
        self._given: dict[PlannedType, dict[str, float]] = {}
        self._means: dict[tuple[PlannedType, ...], PlannedType] = {}
        self.worth = None  # it divides by shares

    def choose(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> Choice | None:
        planned = self._planned(ctx, instances)
        return Policy.choose(self, ctx, instances) if planned else super().choose(ctx, instances)

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        planned = self._planned(ctx, instances)
        if planned is None:
            return super().score(ctx, instances)
        given, shares = self._given.get(planned, {}), dict(planned.instances)
        return [
            replace(
                candidate,
                score=(given.get(candidate.instance, 0.0) + 1.0) / shares[candidate.instance],
                eligible=candidate.eligible or self._may_wait_there(candidate, instance),
            )
            if shares.get(candidate.instance, 0.0) > 0.0
            else replace(candidate, score=math.inf, eligible=False, reason=NO_SHARE)
            for candidate, instance in zip(super().score(ctx, instances), instances, strict=True)
        ]

    @staticmethod
    def _may_wait_there(candidate: Candidate, instance: Instance) -> bool:
        """Return True if an instance that `hetlb` would not take may have the request all the same.

        A plan has divided the work: it passes over none. Up to twice what fits an instance waits in its
        engine, so that requests for a full one do not hold up all behind them.
        """
        if candidate.reason.startswith(PASSED_OVER):
            return True
        return (
            candidate.reason.startswith(FULL)
            and instance.kv_tokens < 2 * instance.kv_cache_tokens
            and instance.sequences < 2 * instance.max_num_seqs
        )

    def committed(self, ctx: SchedulingContext, chosen: Instance, instances: Sequence[Instance]) -> None:
        planned = self._planned(ctx, instances)
        if planned is None:
            return
        given = self._given.setdefault(planned, {})
        given[chosen.name] = given.get(chosen.name, 0.0) + 1.0
        if sum(given.values()) > REMEMBERED:
            for name in given:
                given[name] /= 2.0

    def _planned(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> PlannedType | None:
        """Return the type of a request, None if none of the instances has a share of it."""
        planned = self._type_of(ctx)
        if planned is None:
            return None
        names = {instance.name for instance in instances}
        return planned if any(share > 0.0 and name in names for name, share in planned.instances) else None

    def _type_of(self, ctx: SchedulingContext) -> PlannedType | None:
        types = [each for each in self.params.types if each.instances and each.model == ctx.request.model]
        if not types:
            return None
        prompt = [log_ratio(ctx.request.prompt_tokens, each.input_tokens) for each in types]
        near = [
            each for each, off in zip(types, prompt, strict=True) if off <= min(prompt) + ALIKE_LOG_LENGTHS
        ]
        if len(near) == 1:
            return near[0]
        output = [log_ratio(ctx.predicted_output, each.output_tokens) for each in near]
        nearest = min(range(len(near)), key=lambda i: output[i])
        return near[nearest] if output[nearest] <= ALIKE_LOG_LENGTHS else self._mean(near)

    def _mean(self, types: Sequence[PlannedType]) -> PlannedType:
        """Return types that cannot be told apart as one."""
        key = tuple(types)
        known = self._means.get(key)
        if known is None:
            total = sum(each.share for each in types)
            shares: dict[str, float] = {}
            for each in types:
                for name, share in each.instances:
                    shares[name] = shares.get(name, 0.0) + share * each.share / total
            known = self._means[key] = replace(types[0], share=total, instances=tuple(shares.items()))
        return known
