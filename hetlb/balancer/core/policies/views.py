"""Views for policies of other packages (entry points of the group `hetlb.policies`), and their base.

docs/policies.md has an example.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.pickle_by_fields import PickleByFields
from hetlb.balancer.core.policies.base import Policy
from hetlb.balancer.core.policies.sight import SchedulingContext, foreseen
from hetlb.balancer.core.types import Candidate
from hetlb.errors import HetlbError

#: Reason of an instance that a policy gave no terms for.
NO_TERMS = "no room by the policy"


@dataclass(frozen=True, slots=True)
class View(PickleByFields):
    """One instance as a policy may see it for one request.

    Tokens and sequences are summed over its data-parallel engines; times are in seconds.
    `own_sequences` of the request will run, prompts times `n`; `cached_tokens` of each prompt are believed to
    be in the prefix cache there; `pending_tokens` of prompts there are still to be computed. The last four
    are the forecast of the request there; `others_s` is added to the answers that run there.
    """

    prompt_tokens: int
    cached_tokens: int
    predicted_output: float
    own_sequences: int
    priority: int
    tenant: str | None
    service_class: str
    name: str
    weight: float
    in_flight: int
    sequences: int
    slots: int
    pending_tokens: int
    kv_tokens: float
    kv_cache_tokens: int
    first_token_s: float
    step_s: float
    end_s: float
    others_s: float


def view(ctx: SchedulingContext, instance: Instance) -> View:
    """Return the view of an instance for the request of a decision."""
    request, sight = ctx.request, foreseen(ctx, instance)
    return View(
        prompt_tokens=request.prompt_tokens,
        cached_tokens=int(sight.cached),
        predicted_output=ctx.predicted_output,
        own_sequences=request.sequences,
        priority=request.priority,
        tenant=request.tenant,
        service_class=request.service.name,
        name=instance.name,
        weight=instance.spec.weight,
        in_flight=instance.in_flight,
        sequences=instance.unfinished_sequences,
        slots=instance.max_num_seqs,
        pending_tokens=instance.pending_prompt_tokens,
        kv_tokens=sight.seen.expected_kv_tokens(ctx.now),
        kv_cache_tokens=instance.kv_cache_tokens,
        first_token_s=sight.first_token_s,
        step_s=sight.step_s,
        end_s=sight.end_s,
        others_s=sight.others_s,
    )


@mypyc_attr(allow_interpreted_subclasses=True)
class ViewPolicy(Policy):
    """Base of policies of other packages: the least sum of terms wins, the first in file order of equals.

    `weights` holds the weights other than 1, by term. With `holds_back` a request waits at the proxy while no
    instance has terms for it.
    """

    weights: ClassVar[Mapping[str, float]] = {}

    def terms(self, view: View) -> Mapping[str, float] | None:
        """Return the terms of the score by name; None if the request cannot go there now."""
        raise NotImplementedError

    def rate(self, ctx: SchedulingContext, instance: Instance) -> Candidate:
        """Return the candidate of an instance. Raises `HetlbError` if the policy's terms are no numbers."""
        try:
            found = self.terms(view(ctx, instance))
            if found is None:
                return Candidate(instance.name, math.inf, eligible=False, reason=NO_TERMS)
            terms = {str(name): float(value) for name, value in found.items()}
            weights = {name: float(self.weights.get(name, 1.0)) for name in terms}
            score = math.fsum([weights[name] * value for name, value in terms.items()])
            if math.isnan(score):
                raise ValueError(f"expected numbers, got {terms}")
        except Exception as error:
            raise HetlbError(
                f"policy {self.name}: terms of {instance.name}: {type(error).__name__}: {error}"
            ) from error
        return Candidate(instance.name, score, terms=terms, weights=weights)
