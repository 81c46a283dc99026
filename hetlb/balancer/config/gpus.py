"""GPUs by name: peak figures of their data sheets, and the shares of them that kernels reach.

`hetlb profile --gpus` prints the table. `gpu:` of the fleet file takes its ratios. Peaks are dense (no
sparsity), of one GPU. The shares were read off kernel tables of vLLM (`aiconfigurator-core` 0.12, NVIDIA,
Apache-2.0): Llama-3.1-8B, 70B and Qwen3-32B on one GPU, prompts of 2,048 to 131,072 tokens and decode steps;
H200 has the shares of H100, and GPUs without a table have usual shares.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Final

from hetlb.balancer.core.latency import DEFAULT_LATENCY, LatencyModel
from hetlb.errors import ConfigError

_TERA, _GIGA, _GIB = 1e12, 1e9, 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak FLOP/s by the format of weights (0: not supported, computed in bf16), bytes/s, bytes of memory.

    `all_reduce_bytes_s`: bus bandwidth that GPUs of a machine reach. `measured`: the shares are this GPU's.
    """

    name: str
    bf16_flops: float
    fp8_flops: float
    fp4_flops: float
    bandwidth_bytes_s: float
    memory_bytes: int
    all_reduce_bytes_s: float
    flops_share: float = 0.65
    attention_share: float = 0.55
    bandwidth_share: float = 0.7
    measured: bool = False

    @property
    def shares(self) -> tuple[float, float, float]:
        """Return the shares reached by products with weights, attention, and reads of memory."""
        return self.flops_share, self.attention_share, self.bandwidth_share

    def flops(self, form: str) -> float:
        """Return the peak FLOP/s of weights in a format; without it they are computed in the next wider."""
        if form == "fp4" and self.fp4_flops:
            return self.fp4_flops
        return self.fp8_flops if form in ("fp4", "fp8") and self.fp8_flops else self.bf16_flops


def wider(form: str) -> str:
    """Return the next wider format of weights."""
    return "fp8" if form == "fp4" else "bf16"


def _gpu(
    name: str,
    tera_flops: tuple[float, float, float],
    giga_bytes_s: float,
    gib: float,
    all_reduce: float,
    shares: tuple[float, float, float] | None = None,
) -> Gpu:
    bf16, fp8, fp4 = (each * _TERA for each in tera_flops)
    rest = (bf16, fp8, fp4, giga_bytes_s * _GIGA, round(gib * _GIB), all_reduce * _GIGA)
    return Gpu(name, *rest) if shares is None else Gpu(name, *rest, *shares, measured=True)


#: Data sheets: TFLOP/s in bf16 (fp16 before Ampere), fp8, fp4; GB/s; GiB; GB/s of an all-reduce.
GPUS: Final = {
    each.name: each
    for each in (
        _gpu("T4", (65, 0, 0), 320, 16, 5),
        _gpu("V100", (125, 0, 0), 900, 32, 60),
        _gpu("A10", (125, 0, 0), 600, 24, 8),
        _gpu("A10G", (70, 0, 0), 600, 24, 8),
        _gpu("A30", (165, 0, 0), 933, 24, 8),
        _gpu("A40", (150, 0, 0), 696, 48, 8),
        _gpu("A6000", (155, 0, 0), 768, 48, 8),
        _gpu("A100", (312, 0, 0), 2039, 80, 155, (0.912, 0.577, 0.707)),
        _gpu("A100-40GB", (312, 0, 0), 1555, 40, 155, (0.912, 0.577, 0.707)),
        _gpu("A800", (312, 0, 0), 2039, 80, 75, (0.912, 0.577, 0.707)),
        _gpu("L4", (121, 242, 0), 300, 24, 6),
        _gpu("L40", (181, 362, 0), 864, 48, 6),
        _gpu("L40S", (362, 733, 0), 864, 48, 3.5, (0.654, 0.489, 0.785)),
        _gpu("RTX-3090", (71, 0, 0), 936, 24, 6),
        _gpu("RTX-4090", (165, 330, 0), 1008, 24, 6),
        _gpu("RTX-5090", (209, 419, 1676), 1792, 32, 12),
        _gpu("RTX-6000-Ada", (364, 728, 0), 960, 48, 8),
        _gpu("RTX-PRO-6000", (500, 1000, 2000), 1597, 96, 25, (0.807, 0.611, 0.913)),
        _gpu("H20", (148, 296, 0), 4000, 96, 390),
        _gpu("H100", (989, 1979, 0), 3350, 80, 390, (0.783, 0.621, 0.814)),
        _gpu("H100-NVL", (835, 1671, 0), 3900, 94, 60, (0.783, 0.621, 0.814)),
        _gpu("H100-PCIe", (756, 1513, 0), 2000, 80, 20, (0.783, 0.621, 0.814)),
        _gpu("H800", (989, 1979, 0), 3350, 80, 130, (0.783, 0.621, 0.814)),
        _gpu("H200", (989, 1979, 0), 4800, 141, 390, (0.783, 0.621, 0.814)),
        _gpu("GH200", (989, 1979, 0), 4900, 96, 390, (0.783, 0.621, 0.814)),
        _gpu("B200", (2250, 4500, 9000), 7700, 180, 600, (0.68, 0.561, 0.774)),
        _gpu("GB200", (2450, 4900, 9800), 7700, 186, 600, (0.575, 0.422, 0.807)),
        _gpu("B300", (2250, 4500, 13500), 7700, 268, 600, (0.715, 0.672, 0.78)),
        _gpu("GB300", (2450, 4900, 15000), 7700, 279, 600, (0.774, 0.691, 0.786)),
        _gpu("MI300X", (1307, 2614, 0), 5300, 192, 150),
        _gpu("MI325X", (1307, 2614, 0), 6000, 256, 150),
        _gpu("MI355X", (2300, 4600, 9200), 8000, 288, 250),
        _gpu("M3-Ultra", (57, 0, 0), 819, 96, 1),
        _gpu("M4-Max", (36, 0, 0), 546, 48, 1),
    )
}
#: Names of drivers, clouds and tables, letters and digits alone, by the name here.
_ALIASES: Final = {"rtxpro6000": "RTX-PRO-6000", "rtxpro6000server": "RTX-PRO-6000"}
_NOISE: Final = re.compile(r"nvidia|amd|instinct|geforce|tesla|sxm\d?|hbm\d?e?|oam|\d{1,4}gi?b")
#: Characters of the longest name that is looked up.
_MOST_CHARACTERS: Final = 80


def _key(name: str) -> str:
    text = name[:_MOST_CHARACTERS].lower().replace("40gb", "fortygb")
    return "".join(each for each in _NOISE.sub("", text) if each.isascii() and each.isalnum())


_BY_KEY: Final = {_key(name): name for name in GPUS} | _ALIASES


def find_gpu(name: str) -> Gpu | None:
    """Return a GPU by a name such as `H100`, `NVIDIA H100 80GB HBM3` or `h100_sxm`, None if unknown."""
    found = _BY_KEY.get(_key(name))
    return None if found is None else GPUS[found]


def gpu_named(name: str, where: str) -> Gpu:
    """Return a GPU by name. Raises `ConfigError` with the nearest names."""
    found = find_gpu(name)
    if found is None:
        close = difflib.get_close_matches(name.upper(), GPUS, n=3, cutoff=0.4)
        meant = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"{where}: expected a GPU of `hetlb profile --gpus`, got {name!r}{meant}")
    return found


#: Of the model of `DEFAULT_LATENCY` (8B, bf16): FLOPs of a token, bytes of its weights, and bytes and number
#: of its all-reduces for a token. Seconds of the shortest all-reduce, and of the host for a step.
_TOKEN_FLOPS: Final = 16e9
_WEIGHT_BYTES: Final = 16e9
_EXCHANGED_BYTES: Final = 2 * 32 * 4096 * 2.0
_EXCHANGES: Final = 2 * 32
_EXCHANGE_S: Final = 1e-5
_HOST_S: Final = 2e-3


def _times(gpu: Gpu, count: int) -> tuple[float, float]:
    """Return the seconds of a prompt token and of a decode step of one sequence, on some GPUs."""
    shared = 2.0 * (count - 1) / count * _EXCHANGED_BYTES / gpu.all_reduce_bytes_s
    token_s = _TOKEN_FLOPS / (gpu.bf16_flops * gpu.flops_share * count) + shared
    step_s = _HOST_S + _WEIGHT_BYTES / (gpu.bandwidth_bytes_s * gpu.bandwidth_share * count)
    return token_s, step_s + (max(shared, _EXCHANGES * _EXCHANGE_S) if count > 1 else 0.0)


def latency_of(name: str, count: int) -> LatencyModel | None:
    """Return the default latency model at the ratios of some GPUs to an A100, None if the name is unknown.

    How large the model is, answers show: one factor for all servers of it.
    """
    gpu = find_gpu(name)
    if gpu is None:
        return None
    token_s, step_s = _times(gpu, count)
    usual_token_s, usual_step_s = _times(GPUS["A100"], 1)
    prefill, decode = token_s / usual_token_s, step_s / usual_step_s
    return DEFAULT_LATENCY.with_factors(prefill, 1.0, decode, 0.0, 0.0, 0.0)
