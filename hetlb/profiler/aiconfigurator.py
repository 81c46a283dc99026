"""Points without hardware from NVIDIA's aiconfigurator-core: tables of kernels measured on real GPUs.

The extra `aic` is needed only here. Its times leave the host out, so they are too good at small
batches and high degrees: `overhead_s` is added to every pass, `scale` multiplies the result.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from hetlb.errors import InputError, ProfileError
from hetlb.profiler.fit import DEFAULT_DECODE_GRID, DEFAULT_PREFILL_GRID, Phase, Point

_DISTRIBUTION = "aiconfigurator-core"
#: The KV cache is what vLLM would leave with its own default share of memory.
_MEMORY_SHARE = 0.9
_MAX_NUM_BATCHED_TOKENS, _MAX_NUM_SEQS = 8192, 256


@dataclass(frozen=True, slots=True)
class AicResult:
    """The default grid of one model, system and degree. `kv_cache_tokens` is None where it does not fit."""

    points: tuple[Point, ...]
    kv_cache_tokens: int | None
    kv_bytes_per_token: int | None
    memory_bytes: int | None
    version: str
    max_num_batched_tokens: int = _MAX_NUM_BATCHED_TOKENS
    max_num_seqs: int = _MAX_NUM_SEQS


def query(model: str, system: str, tp: int, *, overhead_s: float = 0.0, scale: float = 1.0) -> AicResult:
    """Ask for the default grid. Raises `InputError` or `ProfileError` where there is no answer."""
    try:
        engine = importlib.import_module("aiconfigurator_core.sdk.engine")
        memory = importlib.import_module("aiconfigurator_core.sdk.memory")
    except ImportError as error:
        raise InputError(
            "--from aiconfigurator: expected aiconfigurator-core to be installed (pip install 'hetlb[aic]')"
        ) from error
    with _quiet():
        try:
            handle = engine.EngineHandle.compile(model, system, "vllm", tp_size=tp)
            points = [
                *(
                    Point(Phase.PREFILL, b, n, handle.predict_prefill_latency(b, n) / 1e3)
                    for b, n in DEFAULT_PREFILL_GRID
                ),
                *(
                    Point(Phase.DECODE, b, n, handle.predict_decode_latency(b, n, osl=2) / 1e3)
                    for b, n in DEFAULT_DECODE_GRID
                ),
            ]
        except Exception as error:  # the library raises types of its own for names it does not know
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ProfileError(
                f"--from aiconfigurator: expected a model and system it knows at --tp {tp}, "
                f"got --model {model} --system {system}: {first}"
            ) from error
        cache = _kv_cache(memory, model, system, tp)
    return AicResult(
        tuple(Point(p.phase, p.batch, p.length, (p.seconds + overhead_s) * scale) for p in points),
        cache.get("total_kv_size_tokens"),
        None if "kv_size_per_token_bytes" not in cache else tp * int(cache["kv_size_per_token_bytes"]),
        cache.get("total_gpu_capacity_bytes"),
        version(_DISTRIBUTION),
    )


def _kv_cache(memory: Any, model: str, system: str, tp: int) -> dict[str, Any]:
    """KV cache by the library; empty where the model does not fit."""
    try:
        found: dict[str, Any] = memory.estimate_kv_cache(
            model,
            system,
            "vllm",
            "current",
            max_num_tokens=_MAX_NUM_BATCHED_TOKENS,
            max_batch_size=_MAX_NUM_SEQS,
            memory_fraction_kind="of_total",
            memory_fraction_value=_MEMORY_SHARE,
            tp_size=tp,
        )
    except ValueError:
        return {}
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The library logs every table that it takes from a neighbouring version."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
