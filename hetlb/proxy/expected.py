"""How long the latency model says that an answer will take, noted when a request is placed.

Promise: one figure in seconds per dispatch, from what was known then; it decides nothing and is there to be
compared with what came.
"""

from __future__ import annotations

from hetlb.core.instance import Instance
from hetlb.core.types import Lease


def expected_s(instance: Instance, lease: Lease) -> float:
    """Seconds from dispatch to the end of the answer, the lease being booked on `instance` already.

    The prompts that wait there are read first, its own among them; then it decodes its predicted length
    beside as many sequences as the instance runs now. Nothing that comes later is foreseen.
    """
    k, request = instance.latency, lease.request
    sequences = request.sequences
    read_s = k.k1 * instance.pending_prompt_tokens + k.k2 * sequences + k.k3 * request.prompt_tokens + k.k4
    batch = min(instance.sequences, instance.max_num_seqs)
    return read_s + k.decode_s(batch, request.prompt_tokens, lease.predicted_output)
