"""Made-up instances of the renting problem: for the solver's speed, and markets to be served.

Throughputs come from a fluid roofline of the GPUs' peak figures with random factors (seeded): they have the
structure of real tables (which GPU suits which type, what more parallelism costs), not their values.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    """Return `models` models that share `gpus` GPUs, and a budget for this share of what all of them cost."""
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


#: Data sheets of more kinds: FLOP/s (dense, 16 bit), bytes/s, GiB of memory, price per hour.
SHEETS = {
    "H100": (989e12, 3350e9, 80, 2.99),
    "H200": (989e12, 4800e9, 141, 3.80),
    "A100": (312e12, 2039e9, 80, 1.75),
    "L40S": (362e12, 864e9, 48, 0.86),
    "A6000": (155e12, 768e9, 48, 0.49),
    "L4": (121e12, 300e9, 24, 0.43),
    "RTX-4090": (165e12, 1008e9, 24, 0.53),
    "V100": (125e12, 900e9, 32, 0.35),
    "H20": (148e12, 4000e9, 96, 1.60),
    "MI300X": (1307e12, 5300e9, 192, 2.99),
    "A40": (150e12, 696e9, 48, 0.45),
    "B200": (2250e12, 8000e9, 180, 4.99),
    "RTX-5090": (210e12, 1792e9, 32, 0.69),
    "A10G": (70e12, 600e9, 24, 0.60),
}
#: Types of requests: prompt and output tokens.
TYPES = {
    "extract": (2455, 18),
    "summarise": (2455, 253),
    "chat": (496, 253),
    "write": (496, 510),
    "think": (200, 2000),
    "classify": (700, 5),
    "digest": (8000, 200),
    "code": (1200, 120),
    "agent": (4000, 80),
    "story": (100, 1000),
}


def market(seed: int) -> dict[str, Any]:
    """Return a market of eight kinds of GPU and four types for an 8B model, one GPU a server."""
    rng = random.Random(seed)
    gpus, types = rng.sample(sorted(SHEETS), 8), rng.sample(sorted(TYPES), 4)
    if seed == 0:
        gpus = ["H100", "A100", "L40S", "A6000", "L4", "RTX-4090", "V100", "H20"]
        types = ["extract", "summarise", "chat", "write"]
    offers, price = [], 0.0
    for gpu in gpus:
        flops, bandwidth, memory, each = SHEETS[gpu]
        available = rng.choice((1, 2, 2, 3, 4))
        roofline = {"flops": flops, "bandwidth_bytes_per_s": bandwidth}
        offers.append(
            {
                "gpu": gpu, "price_per_hour": each, "available": available, "gpus_per_machine": 1,
                "memory_bytes": memory * 2**30, "reserved_bytes_per_gpu": 2_000_000_000, "roofline": roofline,
            }
        )  # fmt: skip
        price += available * each
    budget = round(rng.choice((0.6, 0.8, 1.0)) * price, 2)
    workloads = [
        {
            "name": name,
            "input_tokens": TYPES[name][0],
            "output_tokens": TYPES[name][1],
            "share": rng.choice((1, 2, 3, 5)),
        }
        for name in types
    ]
    model = {"name": "8b", "parameters": 8.03e9, "kv_bytes_per_token": 131072, "hidden_size": 4096}
    return {
        "version": 1,
        "budget_per_hour": budget,
        "models": [model],
        "offers": offers,
        "workloads": workloads,
    }


#: GPUs of today: FLOP/s (dense, 16 bit), bytes/s, GB of memory and kept free, price, bytes/s inside.
TODAY = {
    "H100": (989e12, 3.35e12, 85, 4, 2.50, 450e9),
    "H200": (989e12, 4.8e12, 151, 5, 3.50, 450e9),
    "B200": (2250e12, 8e12, 192, 6, 5.50, 900e9),
    "B300": (2250e12, 8e12, 288, 6, 7.00, 900e9),
    "MI355X": (2500e12, 8e12, 288, 6, 4.50, 450e9),
    "RTX-PRO-6000": (503e12, 1.6e12, 103, 4, 1.80, 50e9),
    "L40S": (362e12, 864e9, 51, 3, 0.90, 25e9),
}
#: Models of today, by the file of their configuration, and budgets per hour for them.
BUDGETS = {
    "nvidia--Kimi-K2.6-NVFP4": (40, 60),
    "openai--gpt-oss-120b": (10, 25),
    "Qwen--Qwen3-32B-FP8": (8, 20),
    "Qwen--Qwen3-30B-A3B": (5, 15),
}


def market_of_today(seed: int, models: Path) -> dict[str, Any]:
    """Return a market of two to four kinds of GPU and two types for a model of today."""
    rng = random.Random(seed)
    name = rng.choice(sorted(BUDGETS))
    gpus = rng.sample(sorted(TODAY), rng.choice((2, 3, 3, 4)))
    offers = []
    for gpu in gpus:
        flops, bandwidth, memory, reserved, price, _ = TODAY[gpu]
        offers.append(
            {
                "gpu": gpu, "price_per_hour": round(price * rng.uniform(0.85, 1.15), 2),
                "available": rng.choice((4, 8, 8, 16)), "memory_bytes": memory * 1e9,
                "reserved_bytes_per_gpu": int(reserved * 1e9),
                "roofline": {"flops": flops, "bandwidth_bytes_per_s": bandwidth},
            }
        )  # fmt: skip
    types = rng.sample(sorted(TYPES), 2)
    return {
        "version": 1,
        "budget_per_hour": rng.choice(BUDGETS[name]),
        "models": [{"name": name, "config": str(models / f"{name}.json")}],
        "offers": offers,
        "links": {"inside": {gpu: TODAY[gpu][-1] for gpu in gpus} | {"default": 50e9}, "between": 50e9},
        "workloads": [
            {"name": kind, "input_tokens": TYPES[kind][0], "output_tokens": TYPES[kind][1], "share": share}
            for kind, share in zip(types, rng.choice(((1, 1), (3, 2), (4, 1))), strict=True)
        ],
    }
