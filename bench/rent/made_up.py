"""Made-up instances of the renting problem, for the solver's speed alone.

Throughputs come from a fluid roofline of the GPUs' peak figures with random factors (seeded): they have the
structure of real tables (which GPU suits which type, what more parallelism costs), not their values.
"""

from __future__ import annotations

import random
from dataclasses import replace

from hetlb.tools.plan.rent_program import Configuration, Problem
from hetlb.tools.plan.workloads import RequestType

#: GPU: (FLOP/s, bytes/s, bytes of memory, price per hour, GPUs of a machine, share of TP that is not lost).
GPUS = {
    "A6000": (91e12, 960e9, 48e9, 0.83, 8, 0.80),
    "A40": (150e12, 696e9, 48e9, 0.55, 8, 0.80),
    "L40": (181e12, 864e9, 48e9, 0.83, 8, 0.80),
    "A100": (312e12, 1555e9, 80e9, 1.75, 8, 0.93),
    "H100": (989e12, 3350e9, 80e9, 2.99, 8, 0.93),
    "4090": (83e12, 1008e9, 24e9, 0.53, 8, 0.75),
}
LENGTHS = [(i, o) for o in (18, 253, 510) for i in (2455, 824, 496)]
SHARES = ((33, 7, 8, 7, 27, 6, 6, 3, 3), (22, 5, 5, 21, 5, 5, 19, 6, 12), (4, 1, 4, 3, 20, 27, 1, 25, 15))


def fluid_rate(gpu: str, tp: int, pp: int, parameters: float, prompt: int, output: int) -> float:
    """Requests/s of one instance in a fluid model: compute for prompts, memory read for decode steps."""
    flops, bandwidth, memory, _, _, kept = GPUS[gpu]
    lost: float = kept ** (tp.bit_length() - 1) * 0.95 ** (pp - 1)
    kv_bytes: float = 40.0 * (parameters / 1e9) ** 0.6 * 1024
    room = 0.9 * memory * tp * pp - 2.0 * parameters
    context = prompt + output / 2
    batch = min(256.0 * pp, room / (kv_bytes * context))
    if batch < 1:
        return 0.0
    speed = tp * pp * lost
    prefill = 2.0 * parameters * prompt / (0.6 * flops * speed)
    step = (2.0 * parameters * pp + kv_bytes * context * batch) / (0.75 * bandwidth * speed) + 0.002 * pp
    return 1.0 / (prefill + output * step / batch)


def configurations(
    model: str, parameters: float, rng: random.Random, names: list[str]
) -> list[Configuration]:
    """All TP x PP of one kind of GPU that hold the model."""
    found = []
    for gpu, (_, _, _, _, machine, _) in GPUS.items():
        luck = rng.uniform(0.8, 1.2)
        for tp in (1, 2, 4, 8):
            for pp in (1, 2, 3, 4):
                if tp * pp > 16 or tp > machine:
                    continue
                rates = {
                    name: fluid_rate(gpu, tp, pp, parameters, i, o) * luck * rng.uniform(0.95, 1.05)
                    for name, (i, o) in zip(names, LENGTHS, strict=True)
                }
                if all(rate > 0 for rate in rates.values()):
                    found.append(Configuration(f"{model}-{gpu}-{tp}x{pp}", model, {gpu: tp * pp}, rates))
    return found


def problem(models: int, gpus: int, seed: int = 0, budget_share: float = 0.7) -> Problem:
    """So many models that share so many GPUs, and a budget for this share of what all of them cost."""
    rng = random.Random(seed)
    weights = {gpu: rng.uniform(0.5, 1.5) for gpu in GPUS}
    available = {gpu: round(gpus * weight / sum(weights.values())) for gpu, weight in weights.items()}
    demand = [rng.uniform(0.2, 1.0) for _ in range(models)]
    workloads: list[RequestType] = []
    found: list[Configuration] = []
    for index in range(models):
        model = f"m{index}"
        parameters = rng.choice((7e9, 8e9, 13e9, 32e9, 34e9, 70e9))
        shares = rng.choice(SHARES)
        names = [f"{model}-w{w + 1}" for w in range(9)]
        # The larger a model, the fewer ask for it: the GPUs spread over all of them.
        weight = demand[index] / parameters
        workloads += [
            RequestType(name, model, weight * share / 100, ((i, o),))
            for name, share, (i, o) in zip(names, shares, LENGTHS, strict=True)
        ]
        found += configurations(model, parameters, rng, names)
    total = sum(workload.share for workload in workloads)
    scaled = [replace(w, share=w.share / total) for w in workloads]
    prices = {gpu: figures[3] for gpu, figures in GPUS.items()}
    price = sum(count * prices[gpu] for gpu, count in available.items())
    return Problem(tuple(scaled), tuple(found), available, prices, budget_share * price)
