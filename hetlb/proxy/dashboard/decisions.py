"""Decisions as documents: what was asked, who was considered, who was chosen, and what came of it.

A summary costs no candidate; the candidates of a decision, with every term of its score, are made
only when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Reversible
from itertools import islice
from typing import Any, TypeAlias

from hetlb.core.types import Dispatch, Lease, pair_name

#: Output tokens of a lease, all of them or until now.
TokensSoFar: TypeAlias = Callable[[Lease], int]


def decision_summary(dispatch: Dispatch, tokens_so_far: TokensSoFar) -> dict[str, Any]:
    """A decision without its candidates. `lease` is its number, which a request that is retried has anew.

    Times in seconds on the proxy's clock. `output_tokens` are those of all sequences so far, or in all.
    """
    lease = dispatch.lease
    decode = lease.decode
    answering = lease if decode is None else decode
    return {
        "request_id": dispatch.request_id,
        "lease": lease.id,
        "policy": dispatch.reason,
        "model": lease.request.model,
        "prompt_tokens_per_sequence": lease.request.prompt_tokens,
        "sequences": lease.request.sequences,
        "predicted_output": answering.predicted_output,
        "dispatched_at_s": lease.dispatched_at,
        "output_tokens": tokens_so_far(answering),
        "ended": answering.ended,
        "chosen": lease.instance if decode is None else pair_name(lease.instance, decode.instance),
    }


def decision_document(dispatch: Dispatch, tokens_so_far: TokensSoFar) -> dict[str, Any]:
    """One entry of `GET /v1/decisions`: the summary and every candidate, in file order."""
    return {
        **decision_summary(dispatch, tokens_so_far),
        "candidates": [candidate.document() for candidate in dispatch.candidates],
    }


def newest(decisions: Reversible[Dispatch], count: int, tokens_so_far: TokensSoFar) -> list[dict[str, Any]]:
    """Summaries of the last decisions, the newest first."""
    return [decision_summary(dispatch, tokens_so_far) for dispatch in islice(reversed(decisions), count)]
