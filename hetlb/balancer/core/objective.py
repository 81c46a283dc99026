"""Objectives: the targets of the requests of a service class, in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.pickle_by_fields import PickleByFields


@mypyc_attr(acyclic=True)
class _Targets(PickleByFields):
    """Base with `stated`, True if there is a target. It is derived from the other fields."""

    __slots__ = ("stated",)

    stated: bool

    def _state(self, nearest_s: float) -> None:
        object.__setattr__(self, "stated", nearest_s < math.inf)


@mypyc_attr(acyclic=True)
@dataclass(frozen=True, slots=True)
class ServiceClass(_Targets):
    """Objective of one class of requests of a model.

    Targets: `ttft_s` until the first token, `tpot_s` for each further one, `e2e_s` until the whole answer;
    infinite if none is stated. `attainment` is the share of requests that is to meet all of them.
    `background` requests take only what the other classes leave over. `first_token_weight`: a second until
    the first token weighs this many of the rest, None for the default. `refuse_hopeless`: a request that can
    no longer meet its targets is refused.
    """

    name: str = ""
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2e_s: float = math.inf
    attainment: float = 0.95
    background: bool = False
    first_token_weight: float | None = None
    refuse_hopeless: bool = False

    def __post_init__(self) -> None:
        self._state(min(self.ttft_s, self.tpot_s, self.e2e_s))

    def met(self, ttft_s: float, e2e_s: float, output_tokens: int) -> bool:
        """Return True if an answer met every target; TPOT is (E2E - TTFT) / (tokens - 1)."""
        if ttft_s > self.ttft_s or e2e_s > self.e2e_s:
            return False
        return output_tokens < 2 or (e2e_s - ttft_s) / (output_tokens - 1) <= self.tpot_s


#: The class of requests of a model without classes.
UNSTATED: Final = ServiceClass()
