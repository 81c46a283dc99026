"""Views for policies of other packages (entry points of the group `hetlb.policies`), and their base.

docs/policies.md has an example.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from mypy_extensions import mypyc_attr

from hetlb.core.forecast import Forecast
from hetlb.core.instance import Instance
from hetlb.core.policies.base import Policy, SchedulingContext, cached_at, forecast
from hetlb.core.types import Candidate
from hetlb.errors import HetlbError

#: Reason of an instance for which a policy gave no terms.
NO_TERMS = "no room by the policy"


class View:
    """One instance as a policy may see it for one request. Nothing can be changed through it.

    Tokens and sequences are those of all its data-parallel engines together; times are in seconds.
    """

    __slots__ = ("_ctx", "_forecast", "_instance")

    def __init__(self, ctx: SchedulingContext, instance: Instance) -> None:
        self._ctx = ctx
        self._instance = instance
        self._forecast: Forecast | None = None

    def _foreseen(self) -> Forecast:
        if self._forecast is None:
            self._forecast = forecast(self._ctx, self._instance)
        return self._forecast

    # --- the request ---

    @property
    def prompt_tokens(self) -> int:
        """Mean tokens of each of its prompts."""
        return self._ctx.request.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens of each prompt that the instance's prefix cache is believed to hold."""
        return cached_at(self._ctx, self._instance)

    @property
    def predicted_output(self) -> float:
        """Predicted tokens of each of its answers."""
        return self._ctx.predicted_output

    @property
    def own_sequences(self) -> int:
        """Sequences that it will run: prompts times `n`."""
        return self._ctx.request.sequences

    @property
    def priority(self) -> int:
        """Its priority as vLLM's: the lower value goes first."""
        return self._ctx.request.priority

    @property
    def tenant(self) -> str | None:
        """Name of its tenant."""
        return self._ctx.request.tenant

    @property
    def service_class(self) -> str:
        """Name of its service class, "" without one."""
        return self._ctx.request.service.name

    # --- the instance ---

    @property
    def name(self) -> str:
        """Name of the instance."""
        return self._instance.name

    @property
    def weight(self) -> float:
        """Weight of the instance in the fleet file."""
        return self._instance.spec.weight

    @property
    def in_flight(self) -> int:
        """Requests there."""
        return self._instance.in_flight

    @property
    def sequences(self) -> int:
        """Sequences there."""
        return self._instance.unfinished_sequences

    @property
    def slots(self) -> int:
        """Sequences that it runs at once (`max_num_seqs`)."""
        return self._instance.max_num_seqs

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens there that are still to be computed."""
        return self._instance.pending_prompt_tokens

    @property
    def kv_tokens(self) -> float:
        """Tokens of its KV cache expected in use."""
        return self._instance.occupancy.expected_kv_tokens(self._ctx.now)

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that its KV cache holds."""
        return self._instance.kv_cache_tokens

    # --- forecast of the request there ---

    @property
    def first_token_s(self) -> float:
        """Time until the first token."""
        return self._foreseen().first_token_s

    @property
    def step_s(self) -> float:
        """Time per further token."""
        return self._foreseen().step_s

    @property
    def end_s(self) -> float:
        """Time until the whole answer."""
        return self._foreseen().end_s

    @property
    def others_s(self) -> float:
        """Time that it adds to the answers that run there, all together."""
        return self._foreseen().others_s


@mypyc_attr(allow_interpreted_subclasses=True)
class ViewPolicy(Policy):
    """Base of policies of other packages: the least sum of terms wins, the first in file order of equals.

    `weights` are those of terms that do not count once. With `holds_back` a request waits at the proxy while
    no instance has terms for it.
    """

    weights: ClassVar[Mapping[str, float]] = {}

    def terms(self, view: View) -> Mapping[str, float] | None:
        """Terms of the score by name; None if the request cannot go there now."""
        raise NotImplementedError

    def score(self, ctx: SchedulingContext, instances: Sequence[Instance]) -> list[Candidate]:
        """One candidate per instance. Raises `HetlbError` naming the policy if its terms are no numbers."""
        return [self._candidate(View(ctx, each)) for each in instances]

    def _candidate(self, view: View) -> Candidate:
        try:
            found = self.terms(view)
            if found is None:
                return Candidate(view.name, math.inf, eligible=False, reason=NO_TERMS)
            terms = {str(name): float(value) for name, value in found.items()}
            weights = {name: float(self.weights.get(name, 1.0)) for name in terms}
            score = math.fsum([weights[name] * value for name, value in terms.items()])
            if math.isnan(score):
                raise ValueError(f"expected numbers, got {terms}")
        except Exception as error:
            raise HetlbError(
                f"policy {self.name}: terms of {view.name}: {type(error).__name__}: {error}"
            ) from error
        return Candidate(view.name, score, terms=terms, weights=weights)
