"""Layer times and limits of machines from latency profiles and memory, where none were measured.

A profile describes the whole model; a machine with some of its layers takes the layers' share of every time
and every byte. (A model that no machine holds cannot be measured on one: the profile then comes from fewer
layers, from `hetlb profile --from aiconfigurator`, or from a roofline.)
"""

from __future__ import annotations

from typing import Final

from hetlb.config.plan_tables import Machine, Model
from hetlb.core.paths.stages import BatchLimits, Curve, decode_curve
from hetlb.plan.placement.place_cluster import Holding, MachineKind
from hetlb.sim.engine_limits import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS

_PROMPT_POINTS: Final = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
_DECODE_POINTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def machine_kind(machine: Machine, model: Model, input_tokens: float, output_tokens: float) -> MachineKind:
    """Times and limits of one GPU by layers held, as far as memory goes. The rates are those of requests of
    these mean lengths in the batches that the KV cache holds. No holdings: not even one layer fits.
    """
    profile, layers = machine.profiles[1], model.layers
    latency, engine = profile.latency, profile.engine
    most_seqs = engine.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    most_tokens = engine.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS
    context = input_tokens + output_tokens / 2.0
    prompts = [(float(n), latency.prefill_s(n) / layers) for n in _PROMPT_POINTS]
    decodes = [(float(n), latency.step_s(n, n * context) / layers) for n in _DECODE_POINTS]
    prompt = Curve((0.0, *(x for x, _ in prompts)), (0.0, *(y for _, y in prompts)))
    holdings = []
    for held in range(1, layers + 1):
        left = machine.usable_bytes - model.weight_bytes * held / layers
        kv_token_layers = int(left / (model.kv_bytes_per_token / layers)) if left > 0.0 else 0
        seats = int(kv_token_layers // (held * (input_tokens + output_tokens)))
        if seats < 1:
            break
        batch = min(seats, most_seqs)
        step_s = latency.step_s(batch, batch * context) / layers
        request_s = latency.prefill_s(input_tokens) / layers + output_tokens * step_s / batch
        limits = BatchLimits(
            prompts=most_seqs,
            prompt_tokens=most_tokens,
            decodes=most_seqs,
            decode_context=kv_token_layers,
        )
        rate = (input_tokens + output_tokens) / (held * request_s)
        holdings.append(Holding(rate, kv_token_layers, limits))
    return MachineKind(machine.name, prompt, decode_curve([(0.0, 0.0), *decodes]), tuple(holdings))
