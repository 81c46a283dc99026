"""Clusters of the bench: HexGen-2's settings and appendix E, small ones, and ones of 64 and 320 GPUs.

Prices and GPU counts are the paper's (table 2). Its bandwidth matrices are pictures without figures: the
links here are ours. Peak figures are the makers' (dense bf16, no sparsity).
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from hetlb.tools.plan.common.plan_tables import Machine, Model, RooflineTable
from hetlb.tools.plan.disaggregation.split_cluster import Links, RequestLengths, Slo, SplitCluster

GIB = 1 << 30

#: GPU: (dense bf16 FLOP/s, memory bytes/s, memory bytes, bytes/s between two GPUs of a machine).
GPUS = {
    "H100": (989e12, 3.35e12, 80 * GIB, 300e9),
    "A100": (312e12, 2.04e12, 80 * GIB, 300e9),
    "L40": (181e12, 0.864e12, 48 * GIB, 25e9),
    "A6000": (155e12, 0.768e12, 48 * GIB, 25e9),
}
LLAMA_70B = Model(
    name="llama-2-70b",
    parameters=69e9,
    bytes_per_parameter=2.0,
    kv_bytes_per_token=2 * 80 * 8 * 128 * 2,
    layers=80,
    hidden_size=8192,
)
OPT_30B = Model(
    name="opt-30b",
    parameters=30e9,
    bytes_per_parameter=2.0,
    kv_bytes_per_token=2 * 48 * 7168 * 2,
    layers=48,
    hidden_size=7168,
)
LLAMA_8B = Model(
    name="llama-3-8b",
    parameters=8.03e9,
    bytes_per_parameter=2.0,
    kv_bytes_per_token=131072,
    layers=32,
    hidden_size=4096,
)
#: Mean prompt and output tokens of the first half of the Azure conversation trace, cut at 512 and 128.
WORKLOADS = {
    "HPLD": (1673, 60),
    "HPHD": (1488, 308),
    "LPHD": (268, 279),
    "LPLD": (256, 66),
    "online": (1237, 221),
}
#: GPUs per machine of the paper's settings (table 2): one machine per kind of GPU.
SETTINGS = {
    "homogeneous": {"H100": 8},
    "het1": {"H100": 2, "A100": 6, "L40": 8, "A6000": 4},
    "het2": {"H100": 3, "A100": 3, "L40": 6, "A6000": 6},
    "het3": {"A100": 6, "L40": 12, "A6000": 6},
    "het4": {"H100": 3, "A100": 9},
    "het5": {"A100": 4, "L40": 6, "A6000": 10},
}
#: Bytes/s between machines of the settings (ours): 40 Gbit/s within the cloud's zone.
BETWEEN_BYTES_PER_S = 5e9


def machine(name: str, gpu: str, gpus: int, site: str = "") -> Machine:
    """A machine by its GPUs' peak figures."""
    flops, bandwidth, memory, _ = GPUS[gpu]
    return Machine(
        name=name,
        gpu=gpu,
        gpus=gpus,
        memory_bytes=memory,
        reserved_bytes_per_gpu=2 * GIB,
        site=site,
        roofline=RooflineTable(flops=flops, bandwidth_bytes_per_s=bandwidth),
    )


def cluster(
    machines: list[Machine],
    model: Model,
    workload: tuple[int, int] | RequestLengths,
    *,
    between: float = BETWEEN_BYTES_PER_S,
    between_sites: float | None = None,
    slo: Slo | None = None,
) -> SplitCluster:
    """A cluster with links by tiers."""
    apart = between if between_sites is None else between_sites
    rates = tuple(
        tuple(
            GPUS[a.gpu][3] if i == j else between if a.site == b.site else apart
            for j, b in enumerate(machines)
        )
        for i, a in enumerate(machines)
    )
    found = workload if isinstance(workload, RequestLengths) else RequestLengths((workload,))
    return SplitCluster(Path("bench"), model, tuple(machines), Links(rates, 2e-4), found, slo or Slo())


def setting(name: str, workload: str, model: Model = LLAMA_70B) -> SplitCluster:
    """A setting of the paper. Kinds of more than 8 GPUs are several machines of up to 8."""
    machines = []
    for gpu, count in SETTINGS[name].items():
        for at, start in enumerate(range(0, count, 8)):
            machines.append(machine(f"{gpu.lower()}-{at}", gpu, min(8, count - start)))
    return cluster(machines, model, WORKLOADS[workload])


def appendix_e(workload: str = "LPHD") -> SplitCluster:
    """4 H100 and 4 A100, OPT-30B."""
    return cluster([machine("h100", "H100", 4), machine("a100", "A100", 4)], OPT_30B, WORKLOADS[workload])


def small(count: int = 24, seed: int = 0) -> list[SplitCluster]:
    """Clusters of 2 to 8 GPUs: kinds, machines, models, workloads and links at random."""
    rng = random.Random(seed)
    found = [appendix_e(name) for name in WORKLOADS]
    while len(found) < count + len(WORKLOADS):
        left = rng.randint(2, 8)
        machines: list[Machine] = []
        while left:
            gpus = rng.randint(1, left)
            machines.append(machine(f"m{len(machines)}", rng.choice(list(GPUS)), gpus))
            left -= gpus
        model = rng.choice((LLAMA_8B, OPT_30B, LLAMA_70B))
        made = cluster(
            machines,
            model,
            rng.choice(list(WORKLOADS.values())),
            between=rng.choice((0.1e9, 0.625e9, 5e9, 50e9)),
        )
        memory = sum(m.gpus * m.usable_bytes for m in machines)
        if memory > 1.15 * made.model.weight_bytes:
            found.append(made)
    # Three pairs of H100 and one of L40, as a user reported it.
    pairs = [machine("l40", "L40", 2), machine("h4", "H100", 4), machine("h2", "H100", 2)]
    return [*found, cluster(pairs, OPT_30B, (220, 60))]


def large(gpus: int, workload: str = "online", seed: int = 0) -> SplitCluster:
    """Machines of 8 GPUs, all kinds mixed over four sites; 1 Gbyte/s between the sites."""
    rng = random.Random(seed)
    machines = [
        machine(f"m{at}", rng.choice(list(GPUS)), 8, site=f"site-{at % 4}") for at in range(gpus // 8)
    ]
    return cluster(machines, LLAMA_70B, WORKLOADS[workload], between_sites=1e9)


def with_slo(of: SplitCluster, ttft_s: float, tpot_s: float) -> SplitCluster:
    """The cluster with limits on the mean latencies."""
    return replace(of, slo=Slo(ttft_s, tpot_s))
