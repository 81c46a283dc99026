"""The time that the latency model expects for an answer, noted when a request is placed.

It decides nothing: it is compared with the time that came.
"""

from __future__ import annotations

from hetlb.core.instance import Instance
from hetlb.core.types import Lease


def expected_s(instance: Instance, lease: Lease) -> float:
    """Seconds from dispatch to the end of the answer, the lease being booked on `instance` already.

    Prompts that wait there are read first; then the predicted length is decoded beside the sequences that
    the instance runs now, each half-grown. Nothing that comes later is foreseen. Of several data-parallel
    engines each has an equal part of all this.
    """
    request, model = lease.request, instance.latency
    sequences = request.sequences
    others = instance.sequences - sequences
    kv_tokens = (instance.kv_tokens - lease.kv_tokens + instance.prompt_tokens - lease.prompt_tokens) / 2.0
    places = max(0, instance.max_num_seqs - sequences)
    if others > places:
        kv_tokens *= places / others
        others = places
    pending = instance.pending_prompt_tokens - lease.prompt_tokens
    prompt = request.prompt_tokens
    engines, own = instance.engines, instance.own_batch(sequences)
    batch, kv_tokens = others / engines, kv_tokens / engines
    first_s = model.first_token_s(
        prompt, 0.0, pending / engines, batch, kv_tokens, instance.token_budget, own
    )
    beside = batch + own - 1
    kv_tokens += (own - 1) * prompt
    # The first token comes with the prefill.
    return first_s + model.answer_s(prompt, lease.predicted_output - 1.0, beside, kv_tokens)
