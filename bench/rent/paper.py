"""The market of the paper (Jiang et al., ICML 2025): its GPUs, prices, availability, traces and budgets.

Where the throughputs come from: H100, A100 and L40 from measured tables of NVIDIA's aiconfigurator (its L40S
stands in for the L40: same memory and bandwidth, more FLOP/s); A6000, A40 and 4090 from rooflines of the data
sheets' dense figures, unmeasured. The order of workloads 2-9 is ambiguous in the paper: output-major here.
"""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hetlb.balancer.config.profile_file import EngineInfo, Hardware, ModelInfo, ProfileSource
from hetlb.balancer.config.profile_writer import profile_text
from hetlb.tools.profiler.fit import fit
from hetlb.tools.profiler.sources import make_profile, read_csv

SYSTEMS = {"H100": "h100_sxm", "A100": "a100_sxm", "L40": "l40s"}
MODELS: dict[str, dict[str, Any]] = {
    "8b": {
        "name": "Llama-3.1-8B",
        "parameters": 8.03e9,
        "kv_bytes_per_token": 131072,
        "layers": 32,
        "hidden_size": 4096,
    },
    "70b": {
        "name": "Llama-3.1-70B",
        "parameters": 70.55e9,
        "kv_bytes_per_token": 327680,
        "layers": 80,
        "hidden_size": 8192,
    },
    "30b": {
        "name": "Llama-1-30B",
        "parameters": 32.5e9,
        "kv_bytes_per_token": 1597440,
        "layers": 60,
        "hidden_size": 6656,
    },
}
#: Models of which no table is at hand: all their profiles are rooflines.
UNMEASURED = ("30b",)
#: What vLLM keeps of a GPU's memory beside weights and KV cache, from the KV capacities of the tables.
RESERVED_BYTES = 4_700_000_000
#: The paper states the H100's FLOP/s with sparsity.
DENSE = 0.5
#: The paper's classes of GPUs.
CLASSES = {
    "A100": "data centre", "H100": "data centre", "A6000": "workstation", "A40": "workstation",
    "L40": "workstation", "4090": "consumer",
}  # fmt: skip


def make_profiles(hw: Path, folder: Path) -> None:
    """Profiles of the measured tables under `folder`, once."""
    capacity = {
        (row["system"], row["model"], row["tp"]): row["kv_tokens"]
        for row in csv.DictReader((hw / "aic_kv_capacity.csv").open())
    }
    folder.mkdir(parents=True, exist_ok=True)
    for gpu, system in SYSTEMS.items():
        for key in sorted(MODELS.keys() - set(UNMEASURED)):
            model = MODELS[key]
            for tp in (1, 2, 4, 8):
                path = folder / f"{gpu}-{key}-tp{tp}.yaml"
                if path.exists():
                    continue
                chosen = read_csv(hw / "aic_vllm.csv", system=system, model=model["name"], tp=tp)
                tokens = capacity.get((system, model["name"], str(tp)))
                chosen = replace(
                    chosen,
                    source=ProfileSource(kind="csv", measured=True, name="aic_vllm.csv", system=system),
                    hardware=Hardware(gpu=system, gpus=tp),
                    model=ModelInfo(name=model["name"], kv_bytes_per_token=model["kv_bytes_per_token"]),
                    engine=EngineInfo(
                        version=chosen.engine.version,
                        tensor_parallel_size=tp,
                        kv_cache_tokens=int(tokens) if tokens else None,
                    ),
                )
                profile = make_profile(path.stem, chosen, fit(chosen.points))
                path.write_text(profile_text(profile))


def market(
    cost: dict[str, Any],
    profiles: Path,
    models: list[str],
    shares: dict[str, list[float]],
    available: dict[str, int | None],
    budget: float,
) -> dict[str, Any]:
    """MARKET.yaml of one case. `shares`: nine numbers a model."""
    lengths = cost["workload_types"]["candidates"]["output_major"]
    offers = []
    for gpu, figures in cost["gpus"].items():
        offer: dict[str, Any] = {
            "gpu": gpu,
            "price_per_hour": figures["price_per_h"],
            "gpus_per_machine": 8,
            "memory_bytes": 48305799168 if gpu == "L40" else int(figures["mem_gb"] * 2**30),
            "reserved_bytes_per_gpu": RESERVED_BYTES if figures["mem_gb"] > 24 else RESERVED_BYTES // 2,
        }
        if available.get(gpu) is not None:
            offer["available"] = available[gpu]
        if gpu in SYSTEMS and not set(models) & set(UNMEASURED):
            offer["profiles"] = {
                MODELS[key]["name"]: {tp: str(profiles / f"{gpu}-{key}-tp{tp}.yaml") for tp in (1, 2, 4, 8)}
                for key in models
            }
        else:
            offer["roofline"] = {
                "flops": figures["fp16_tflops"] * (DENSE if gpu == "H100" else 1.0) * 1e12,
                "bandwidth_bytes_per_s": figures["mem_bandwidth_gb_s"] * 1e9,
                "flops_efficiency": 0.55,
                "bandwidth_efficiency": 0.75,
            }
        offers.append(offer)
    links = cost["links"]
    return {
        "version": 1,
        "budget_per_hour": budget,
        "requests": 1000,
        "models": [MODELS[key] for key in models],
        "offers": offers,
        "links": {
            "inside": {
                "H100": links["nvlink_gb_s"] * 1e9,
                "A100": links["nvlink_gb_s"] * 1e9,
                "default": links["pcie_gb_s"] * 1e9,
            },
            "between": links["ethernet_gbit_s"] * 1e9 / 8,
        },
        "workloads": [
            {
                "name": f"{key}-w{index + 1}",
                "model": MODELS[key]["name"],
                "input_tokens": prompt,
                "output_tokens": output,
                "share": share,
            }
            for key in models
            for index, ((prompt, output), share) in enumerate(zip(lengths, shares[key], strict=True))
        ],
    }


def load_cost(shared: Path) -> dict[str, Any]:
    """The paper's tables. Raises `SystemExit` where they are not at hand."""
    path = shared / "data" / "plans" / "cost.json"
    if not path.is_file():
        raise SystemExit(f"{path}: expected the paper's tables, which are not part of the project")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def write_market(path: Path, document: dict[str, Any]) -> Path:
    """The market as a file."""
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path
