"""Decisions as documents: the request, the instances considered, the chosen one, and the outcome."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from hetlb.balancer.core.types import Dispatch, Lease, pair_name

#: Output tokens of a lease, all of them or until now.
TokensSoFar: TypeAlias = Callable[[Lease], int]


def decision_summary(dispatch: Dispatch, tokens_so_far: TokensSoFar) -> dict[str, Any]:
    """Return a decision without its candidates. `lease` is its number, new for every try.

    Times in seconds on the proxy's clock. `output_tokens` count all sequences so far, or in all.
    """
    lease = dispatch.lease
    decode = lease.decode
    answering = lease if decode is None else decode
    return {
        "request_id": dispatch.request_id,
        "x_request_id": dispatch.label or None,
        "lease": lease.id,
        "policy": dispatch.reason,
        "model": lease.request.model,
        "prompt_tokens_per_sequence": lease.request.prompt_tokens,
        "sequences": lease.request.sequences,
        "predicted_output": answering.predicted_output,
        "dispatched_at_s": lease.dispatched_at,
        "output_tokens": tokens_so_far(answering),
        "ended": answering.ended,
        "outcome": None if answering.outcome is None else answering.outcome.value,
        "took_s": None if answering.ended_at is None else answering.ended_at - lease.dispatched_at,
        "chosen": lease.instance if decode is None else pair_name(lease.instance, decode.instance),
    }


def decision_document(dispatch: Dispatch, tokens_so_far: TokensSoFar) -> dict[str, Any]:
    """Return one entry of `GET /v1/decisions`: the summary and every candidate, in file order."""
    return {
        **decision_summary(dispatch, tokens_so_far),
        "candidates": [candidate.document() for candidate in dispatch.candidates],
    }


@dataclass(frozen=True, slots=True)
class Wanted:
    """A filter of decisions. A field of "" or 0 matches all; `outcome` may be `running`."""

    request: str = ""
    instance: str = ""
    model: str = ""
    outcome: str = ""
    longer_s: float = 0.0

    def fits(self, dispatch: Dispatch, now: float) -> bool:
        lease = dispatch.lease
        if self.request and self.request not in (dispatch.label, str(dispatch.request_id)):
            # With several processes the scheduler knows numbers alone: an id that hetlb made ends in one.
            made = re.fullmatch("hetlb-[0-9a-f]{8}-([0-9a-f]{1,16})", self.request)
            if dispatch.label or made is None or int(made[1], 16) != dispatch.request_id:
                return False
        if self.instance and lease.instance != self.instance:
            return False
        if self.model and lease.request.model != self.model:
            return False
        outcome = "running" if lease.outcome is None else lease.outcome.value
        if self.outcome and outcome != self.outcome:
            return False
        end = now if lease.ended_at is None else lease.ended_at
        return end - lease.dispatched_at >= self.longer_s
