"""The time that the latency model expects for an answer, noted when a request is placed.

It decides nothing: it is compared with the time that came.
"""

from __future__ import annotations

from hetlb.core.instance import Instance
from hetlb.core.types import Lease


def expected_s(instance: Instance, lease: Lease) -> tuple[float, float, bool]:
    """Seconds from dispatch to the end of the answer, the lease being booked on `instance` already.

    Also the seconds to its first token by the profile as it is (without the correction by the instance's
    speed), and whether prompts or decodes are beside it until then. Prompts that wait there are read first;
    then the predicted length is decoded beside the sequences that the instance runs now, each half-grown.
    Nothing that comes later is foreseen. Of several data-parallel engines each has an equal part of all this.
    """
    request, model = lease.request, instance.latency
    if lease.expected_first_s and lease.decode is None:  # a decode leg: the prompt was read elsewhere
        batch = max(0.0, instance.sequences / instance.engines - 1.0)
        tokens = (instance.promised_tokens + instance.prompt_tokens) / 2.0 / instance.engines
        answer_s = model.answer_s(request.prompt_tokens, lease.predicted_output - 1.0, batch, tokens)
        return lease.expected_first_s + answer_s, 0.0, True
    sequences = request.sequences
    others = instance.sequences - sequences
    promised = instance.promised_tokens - lease.promised_tokens
    kv_tokens = (promised + instance.prompt_tokens - lease.prompt_tokens) / 2.0
    slots = max(0, instance.max_num_seqs - sequences)
    if others > slots:
        kv_tokens *= slots / others
        others = slots
    pending = instance.pending_prompt_tokens - lease.unread_tokens
    prompt = request.prompt_tokens
    cached = 0 if lease.shared is None else lease.shared.held_tokens
    engines, own, budget = instance.engines, instance.own_batch(sequences), instance.token_budget
    batch, kv_tokens = others / engines, kv_tokens / engines
    first_s = model.first_token_s(prompt, cached, pending / engines, batch, kv_tokens, budget, own)
    # The first token comes with the prefill.
    total_s = first_s + model.answer_s(
        prompt, lease.predicted_output - 1.0, batch + own - 1, kv_tokens + (own - 1) * prompt
    )
    return total_s, first_s / instance.speed.factor, others + pending > 0
