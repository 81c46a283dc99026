"""The time that the latency model expects for an answer, noted when a request is placed.

It decides nothing: it is compared with the time that came.
"""

from __future__ import annotations

from hetlb.core.instance import Instance
from hetlb.core.types import Lease


def expected_s(instance: Instance, lease: Lease) -> float:
    """Seconds from dispatch to the end of the answer, the lease being booked on `instance` already.

    Prompts that wait there are read first; then the predicted length is decoded beside the sequences that
    the instance runs now, each half-grown. Nothing that comes later is foreseen.
    """
    request, model = lease.request, instance.latency
    sequences = request.sequences
    others = instance.sequences - sequences
    kv_tokens = (instance.kv_tokens - lease.kv_tokens + instance.prompt_tokens - lease.prompt_tokens) / 2.0
    places = instance.max_num_seqs - sequences
    if others > places:
        kv_tokens *= max(0, places) / others
        others = max(0, places)
    pending = instance.pending_prompt_tokens - lease.prompt_tokens
    prompt = request.prompt_tokens
    first_s = model.first_token_s(prompt, 0.0, pending, others, kv_tokens, instance.token_budget, sequences)
    beside = others + sequences - 1
    kv_tokens += (sequences - 1) * prompt
    # The first token comes with the prefill.
    return first_s + model.answer_s(prompt, lease.predicted_output - 1.0, beside, kv_tokens)
