"""Points without hardware from NVIDIA's aiconfigurator-core: tables of kernels measured on real GPUs.

The extra `aic` is needed only here. Its times leave the host out.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from hetlb.balancer.config.engine_defaults import batch_limits
from hetlb.balancer.config.profile_file import EngineInfo, Hardware, ModelInfo, ProfileSource
from hetlb.errors import ConfigError, ProfileError
from hetlb.tools.models.model_facts import ModelFacts, read_facts
from hetlb.tools.models.model_file import model_info
from hetlb.tools.profiler.grid import Point, StepKind
from hetlb.tools.profiler.sources import Measurements, assumed_launch

_DISTRIBUTION = "aiconfigurator-core"
#: Asking costs nothing here: more points than a live sweep takes.
_PREFILL = tuple((b, n) for b in (1, 2, 4, 8, 16) for n in (128, 256, 512, 1024, 2048, 4096))
_DECODE = tuple((b, n) for b in (1, 2, 4, 8, 16, 32, 64, 96, 128) for n in (256, 1024, 4096))
#: Corners, which some tables lack. Without them large batches and long contexts are extrapolated: up to 50 %
#: off, a prompt of 128k tokens up to four times.
_LONG_PREFILL = (32768, 131072)
_LARGE_DECODE = (
    *((256, 256), (256, 2048), (512, 256), (512, 1024)),
    *((1, 32768), (1, 131072), (4, 32768), (16, 16384)),
)
#: The KV cache is what vLLM would leave with its own default share of memory.
_MEMORY_SHARE = 0.9
#: Tokens of a pass of a long prompt.
_PASS_TOKENS = 8192
#: Bytes/s below which an all-reduce shows a machine's wiring more than its GPUs.
_SLOW_ALL_REDUCE_BYTES_S = 8e9
#: SMs of GPUs with decode kernels of vLLM that split all contexts over equally many blocks.
_SMS_SPLIT_KV = {"b200_sxm": 148, "b300_sxm": 148, "gb200": 152, "gb300": 152}


#: Most characters of an error of the library that are shown.
_MOST_WORDS = 200


@dataclass(frozen=True, slots=True)
class Layout:
    """GPUs of one server: `tp` of a data-parallel rank, `dp` ranks; experts whole on a GPU each, or split.

    Experts lie on all `tp * dp` GPUs: as vLLM has it, `--enable-expert-parallel` gives each GPU whole
    experts, otherwise each GPU has its share of every expert.
    """

    tp: int
    dp: int = 1
    expert_parallel: bool = False

    @property
    def arguments(self) -> dict[str, int]:
        """The layout in the words of the library. A dense model ignores the sizes for experts."""
        gpus = self.tp * self.dp
        experts = (1, gpus) if self.expert_parallel else (gpus, 1)
        return {
            "tp_size": self.tp,
            "attention_dp_size": self.dp,
            "moe_tp_size": experts[0],
            "moe_ep_size": experts[1],
        }


def query(
    model: str,
    system: str,
    layout: Layout,
    *,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
) -> Measurements:
    """Return the points of the default grid for one data-parallel rank, while all ranks are equally busy.

    Limits of a batch that are not given are vLLM's on this GPU. `engine.kv_cache_tokens` is None if the model
    does not fit. Raises `ProfileError` if the library has no answer.
    """
    from aiconfigurator_core.sdk import (  # type: ignore[import-not-found, unused-ignore]
        engine,
        memory,
        perf_database,
        utils,
    )

    usual_tokens, usual_seqs = batch_limits(system, None)
    batched = max_num_batched_tokens or max(usual_tokens, max_num_seqs or 0)
    seqs = max_num_seqs or min(usual_seqs, batched)
    with _quiet():
        try:
            handle = engine.EngineHandle.compile(model, system, "vllm", **layout.arguments)
            points = _points(handle)
            vllm_version = perf_database.resolve_query_version(system, "vllm", "current")
            config = utils.get_model_config_from_model_path(model)
            all_reduce_bytes_s = _all_reduce_bytes_s(handle, int(config["hidden_size"]), layout.tp)
        except Exception as error:  # the library raises types of its own for names it does not know
            raise _no_tables(model, system, layout, error) from error
        cache, unknown = _kv_cache(memory, model, system, layout, batched, seqs)
    facts, reason = _facts(model, config.get("raw_config", {}))
    return Measurements(
        points=tuple(points),
        source=_source(system),
        engine=EngineInfo(
            version=str(vllm_version) if vllm_version else None,
            tensor_parallel_size=layout.tp,
            data_parallel_size=layout.dp if layout.dp > 1 else None,
            enable_expert_parallel=True if layout.expert_parallel else None,
            kv_cache_tokens=None if facts is None else _kv_tokens(facts, cache, layout),
            max_num_seqs=seqs,
            max_num_batched_tokens=batched,
        ),
        hardware=Hardware(
            gpu=system,
            gpus=layout.tp * layout.dp,
            memory_bytes=cache.get("total_gpu_capacity_bytes"),
            all_reduce_bytes_s=all_reduce_bytes_s,
        ),
        model=ModelInfo(name=model) if facts is None else model_info(facts),
        split_blocks=None if facts is None else _split_blocks(system, facts, config, layout.tp),
        launch=None if facts is None else assumed_launch(facts, layout.tp * layout.dp),
        assumed=(*_assumed(layout, all_reduce_bytes_s), *reason, *unknown),
    )


def _source(system: str) -> ProfileSource:
    return ProfileSource(
        kind="aiconfigurator",
        name=f"aiconfigurator-core {version(_DISTRIBUTION)}",
        system=system,
        licence="Apache-2.0",
        attribution="NVIDIA",
        note="kernel tables measured on the GPU, composed; they hold no host time",
    )


def _no_tables(model: str, system: str, layout: Layout, error: Exception) -> ProfileError:
    """Return the error of a model, system and layout without tables."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ProfileError(
        f"--from aiconfigurator: expected a model, system and layout it has tables for, got "
        f"--model {model} --system {system} --tp {layout.tp}, engine.data_parallel_size {layout.dp}"
        f"{', engine.enable_expert_parallel' if layout.expert_parallel else ''}: {first}"
    )


def _assumed(layout: Layout, all_reduce_bytes_s: float | None) -> Iterator[str]:
    if layout.dp > 1:
        yield f"data parallel: all {layout.dp} ranks alike busy; a step of one waits for the slowest"
    if all_reduce_bytes_s is not None and all_reduce_bytes_s < _SLOW_ALL_REDUCE_BYTES_S:
        yield (
            f"all-reduce: {all_reduce_bytes_s / 1e9:.1f} GB/s, of one badly wired machine, not of the "
            "GPU (PCIe 4.0 x16 gives about 20 GB/s); nccl-tests measures yours"
        )


def _facts(model: str, raw: Mapping[str, Any]) -> tuple[ModelFacts | None, tuple[str, ...]]:
    """Return the facts of the model's configuration, or why its cache cannot be computed."""
    added = ("quant_algo", "quant_dynamic", "kv_cache_quant_algo", "hf_quant_config")  # by the library
    own = {key: value for key, value in raw.items() if key not in added}
    own["quantization_config"] = raw.get("hf_quant_config") or own.get("quantization_config")
    try:
        return read_facts(own, model), ()
    except ConfigError as caught:
        return None, (f"no KV cache: {caught}",)


def _kv_tokens(facts: ModelFacts, cache: Mapping[str, Any], layout: Layout) -> int | None:
    """Return the tokens of a rank's cache: the memory that the library's weights leave, over our own bytes.

    The library assumes FP8 weights for an FP8 cache, and windows for caches of all tokens.
    """
    if not cache or not facts.cached_token_bytes:
        return None
    experts = facts.expert_bytes / (layout.tp * layout.dp)
    weights = (facts.weight_bytes - facts.expert_bytes) / layout.tp + experts
    room = cache["total_kv_size_bytes"] + cache["memory_breakdown"]["weights_bytes"] - weights
    tokens = int(room * layout.tp / (facts.cached_token_bytes * facts.replication(layout.tp)))
    return tokens if tokens > 0 else None


def _split_blocks(system: str, facts: ModelFacts, config: dict[str, Any], tp: int) -> float | None:
    """Return the SMs per KV head of a GPU.

    None for other kernels, for latent attention, which has no such heads, and for one head a GPU: there steps
    do not wait for the longest context (33 % too long at TP 8; TP 2 and 4 fit).
    """
    heads = int(config["n_kv"]) // tp
    if system not in _SMS_SPLIT_KV or heads < 2 or not {"latent", "compressed"}.isdisjoint(facts.kinds):
        return None
    return _SMS_SPLIT_KV[system] / heads


def _points(handle: Any) -> list[Point]:
    """Return the default grid, and the corners beyond it covered by the tables."""

    def decode(batch: int, length: int) -> Point:
        seconds = handle.predict_decode_latency(batch, length, osl=2) / 1e3
        return Point(StepKind.DECODE, batch, length, seconds)

    found = [Point(StepKind.PREFILL, b, n, handle.predict_prefill_latency(b, n) / 1e3) for b, n in _PREFILL]
    found += [decode(b, n) for b, n in _DECODE]
    for length in _LONG_PREFILL:
        with contextlib.suppress(Exception):
            found.append(_long_prefill(handle, length))
    for batch, length in _LARGE_DECODE:
        with contextlib.suppress(Exception):
            found.append(decode(batch, length))
    return found


def _long_prefill(handle: Any, length: int) -> Point:
    """Return a prompt in passes, as an engine reads it."""
    step = _PASS_TOKENS
    starts = range(0, length, step)
    total_ms = sum(handle.predict_prefill_latency(1, start + step, prefix=start) for start in starts)
    return Point(StepKind.PREFILL, 1, length, total_ms / 1e3, passes=len(starts))


def _all_reduce_bytes_s(handle: Any, hidden: int, tp: int) -> float | None:
    """Return the bus bandwidth of the all-reduce of 4,096 tokens' embedding; None if there is none."""
    tokens = 4096
    context, _ = handle.run_static_per_op(batch_size=1, isl=tokens, osl=2, mode="static")
    ms = next((each[1] for each in context if each[0] == "context_embedding_ar"), 0.0)
    return 2.0 * hidden * tokens * 2.0 * (tp - 1) / tp / (ms / 1e3) if tp > 1 and ms > 0.0 else None


def _kv_cache(
    memory: Any, model: str, system: str, layout: Layout, batched: int, seqs: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the KV cache of a rank by the library. If it computes none, return {} and its messages."""
    try:
        found: dict[str, Any] = memory.estimate_kv_cache(
            model,
            system,
            "vllm",
            "current",
            max_num_tokens=batched,
            max_batch_size=seqs,
            memory_fraction_kind="of_total",
            memory_fraction_value=_MEMORY_SHARE,
            **layout.arguments,
        )
    except Exception as error:  # of a model that does not fit, and of a model that it does not know
        words = str(error).splitlines() or [type(error).__name__]
        return {}, (f"no KV cache: {words[0][:_MOST_WORDS]}",)
    return found, ()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library, which logs every table it takes from a neighbouring version."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
