"""Layers [first, end) of a Llama-type model in torch, over the paged KV cache of `stage.kv`.

The same arithmetic as transformers' Llama, Mistral, Qwen2 and Qwen3 (norms in float32, rotary
embedding by halves). A batch mixes prompts and single tokens of requests that enter and leave at different
layers. Shapes: T tokens, D decoding requests, S cached tokens, H heads, K key-value heads, E values per head.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from hetlb.errors import ConfigError
from hetlb.files import opened
from hetlb.tools.stage.batching import Work, segments
from hetlb.tools.stage.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ModelConfig,
    stage_tensors,
    tensor_files,
)
from hetlb.tools.stage.runner import CannotSample, Result, RowFailed, Sampled, choose

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _load(folder: Path, names: list[str], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path, wanted in tensor_files(folder, names):
        try:
            with (
                os.fdopen(opened(path), "rb") as held,
                safe_open(f"/proc/self/fd/{held.fileno()}", framework="pt", device="cpu") as file,
            ):
                for name in wanted:
                    tensors[name] = file.get_tensor(name).to(device=device, dtype=dtype)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{path}: expected a safetensors file with the model's tensors: {error}"
            ) from error
    return tensors


class _Layer:
    """Weights of one layer."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor], layer: int) -> None:
        def get(name: str) -> Tensor | None:
            return tensors.get(f"model.layers.{layer}.{name}")

        def joined(names: Sequence[str]) -> Tensor | None:
            parts = [part for name in names if (part := get(name)) is not None]
            return torch.cat(parts) if parts else None

        self.norm = get("input_layernorm.weight")
        self.qkv = joined([f"self_attn.{each}_proj.weight" for each in "qkv"])
        self.qkv_bias = joined([f"self_attn.{each}_proj.bias" for each in "qkv"])
        self.q_norm, self.k_norm = get("self_attn.q_norm.weight"), get("self_attn.k_norm.weight")
        self.out, self.out_bias = get("self_attn.o_proj.weight"), get("self_attn.o_proj.bias")
        self.mlp_norm = get("post_attention_layernorm.weight")
        self.gate_up = joined([f"mlp.{each}_proj.weight" for each in ("gate", "up")])
        self.gate_up_bias = joined([f"mlp.{each}_proj.bias" for each in ("gate", "up")])
        self.down, self.down_bias = get("mlp.down_proj.weight"), get("mlp.down_proj.bias")
        self.window = config.windows[layer]


@dataclass(slots=True)
class _Segment:
    """Positions and block tables of the works that pass the layers [first, end) together.

    Decodes come first. `slots` (layers, T); `tables` (layers, D, columns); `prompts` by work: its rows, its
    tables (layers, columns), its first position.
    """

    positions: Tensor
    slots: Tensor
    decodes: int
    tables: Tensor
    lengths: Tensor
    prompts: list[tuple[int, int, Tensor, int]]


class TorchRunner:
    """Weights and KV cache of a stage; runs batches."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        first: int,
        end: int,
        *,
        dtype: str,
        device: str,
        block_size: int,
    ) -> None:
        self._config = config
        self._first = first
        self._dtype, self._device = DTYPES[dtype], device
        self._block_size = block_size
        tensors = _load(folder, stage_tensors(config, first, end), self._dtype, device)
        self._layers = [_Layer(config, tensors, layer) for layer in range(first, end)]
        self._embedding = tensors.get(EMBEDDING)
        self._norm = tensors.get(FINAL_NORM)
        self._head = tensors.get(EMBEDDING if config.tied else HEAD)
        self._frequencies = torch.tensor(config.rope.frequencies(config.head_dim), device=device)
        self._keys = self._values = torch.empty(0)
        #: Bytes of one value, and of one activation.
        self.itemsize = int(self._dtype.itemsize)
        self.row_bytes = config.hidden * self.itemsize

    def allocate(self, blocks: int) -> None:
        """Make the KV cache. Raises `ConfigError` if memory is missing."""
        shape = (blocks * self._block_size, self._config.kv_heads, self._config.head_dim)
        try:
            self._keys = torch.zeros(shape, dtype=self._dtype, device=self._device)
            self._values = torch.zeros(shape, dtype=self._dtype, device=self._device)
        except RuntimeError as error:
            raise ConfigError(f"--kv-cache-memory-bytes: expected less, no memory for {shape}") from error

    def free_bytes(self, share: float) -> int:
        """Memory of the GPU left for the KV cache when `share` of all of it is used."""
        free, total = torch.cuda.mem_get_info(self._device)
        return max(0, int(free - (1.0 - share) * total))

    def run(self, works: Sequence[Work]) -> list[Result]:
        """Compute a batch; one result per work, in order."""
        ordered = sorted(works, key=lambda work: work.count > 1)
        with torch.inference_mode():
            hidden = {work: self._rows(work) for work in ordered}
            for first, end, inside in segments(ordered):
                x = torch.cat([hidden[work] for work in inside])
                x = self._pass_layers(x, self._segment(inside, first, end), first, end)
                hidden.update(zip(inside, x.split([work.count for work in inside]), strict=True))
            results = self._leave(ordered, hidden)
        return [results[work] for work in works]

    # --- in and out ---

    def _rows(self, work: Work) -> Tensor:
        """Return the rows of a work: embedded token ids, or activations of the stage before."""
        if work.lease.table.first > 0:
            rows = torch.frombuffer(bytearray(work.rows), dtype=self._dtype)
            return rows.view(work.count, self._config.hidden).to(self._device)
        assert self._embedding is not None
        ids = torch.frombuffer(bytearray(work.rows), dtype=torch.int32)
        if not 0 <= int(ids.min()) <= int(ids.max()) < len(self._embedding):  # a GPU would be lost to it
            raise ValueError(f"expected token ids below {len(self._embedding)}")
        return functional.embedding(ids.to(self._device), self._embedding)

    def _leave(self, works: Sequence[Work], hidden: dict[Work, Tensor]) -> dict[Work, Result]:
        results: dict[Work, Result] = dict.fromkeys(works, b"")
        for work in works:
            if work.lease.next_url is not None:
                results[work] = hidden[work].contiguous().cpu().view(torch.uint8).numpy().tobytes()
        if sampled := [work for work in works if work.samples]:
            assert self._norm is not None
            assert self._head is not None
            x = self._rms(torch.cat([hidden[work][-1:] for work in sampled]), self._norm)
            logits = functional.linear(x, self._head).float()
            largest, likely = logits.max(dim=-1)  # NaN if one of them is
            rows = zip(sampled, logits, likely.tolist(), largest.isfinite().tolist(), strict=True)
            for work, row, token, finite in rows:
                results[work] = self._sample(work, row, token, finite)
        return results

    def _sample(self, work: Work, logits: Tensor, likely: int, finite: bool) -> Result:
        lease = work.lease
        if lease.sampling.plain and finite:
            return Sampled(likely, None)
        position = work.position + work.count - 1
        try:
            return Sampled(*choose(logits.cpu().numpy(), lease.sampling, lease.output, position))
        except CannotSample as error:
            return RowFailed(str(error))

    # --- layers ---

    def _segment(self, works: Sequence[Work], first: int, end: int) -> _Segment:
        size = self._block_size
        positions = np.concatenate([np.arange(w.position, w.position + w.count) for w in works])
        slots = np.concatenate(
            [w.lease.table.slots(first, end, w.position, w.count, size) for w in works], axis=1
        )
        decodes = [w for w in works if w.count == 1]
        columns = max((w.position // size + 1 for w in decodes), default=0)
        tables = np.zeros((end - first, len(decodes), columns), dtype=np.int64)
        for i, work in enumerate(decodes):
            used = work.position // size + 1
            tables[:, i, :used] = work.lease.table.rows(first, end)[:, :used]
        prompts, row = [], len(decodes)
        for work in works[len(decodes) :]:
            used = (work.position + work.count - 1) // size + 1
            own = self._put(work.lease.table.rows(first, end)[:, :used].astype(np.int64))
            prompts.append((row, row + work.count, own, work.position))
            row += work.count
        return _Segment(
            positions=self._put(positions),
            slots=self._put(slots),
            decodes=len(decodes),
            tables=self._put(tables),
            lengths=self._put(np.array([w.position + 1 for w in decodes], dtype=np.int64)),
            prompts=prompts,
        )

    def _put(self, array: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._config.norm_eps)
        return weight * wide.to(x.dtype)

    def _pass_layers(self, x: Tensor, segment: _Segment, first: int, end: int) -> Tensor:
        angles = segment.positions[:, None].float() * self._frequencies
        cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
        for index in range(first, end):
            layer = self._layers[index - self._first]
            assert layer.norm is not None
            assert layer.mlp_norm is not None
            attended = self._attention(layer, self._rms(x, layer.norm), segment, index - first, cos, sin)
            x = x + functional.linear(attended, layer.out, layer.out_bias)
            gate, up = functional.linear(
                self._rms(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias
            ).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down, layer.down_bias)
        return x

    def _attention(
        self, layer: _Layer, x: Tensor, segment: _Segment, at: int, cos: Tensor, sin: Tensor
    ) -> Tensor:
        config = self._config
        heads, kv_heads, size = config.heads, config.kv_heads, config.head_dim
        qkv = functional.linear(x, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, size)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._rms(q, layer.q_norm), self._rms(k, layer.k_norm)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        slots = segment.slots[at]
        self._keys[slots], self._values[slots] = k, v
        parts = []
        if segment.decodes:
            parts.append(self._attend_tokens(layer, q[: segment.decodes], segment, at))
        for first, end, tables, position in segment.prompts:
            parts.append(self._attend_prompt(layer, q[first:end], tables[at], position))
        return torch.cat(parts).reshape(-1, heads * size)

    def _cached(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the blocks of a table (..., columns): (..., S, K, E)."""
        config, size = self._config, self._block_size
        shape = (-1, size, config.kv_heads, config.head_dim)
        wanted = (*table.shape[:-1], table.shape[-1] * size, config.kv_heads, config.head_dim)
        return self._keys.view(shape)[table].view(wanted), self._values.view(shape)[table].view(wanted)

    def _attend_tokens(self, layer: _Layer, q: Tensor, segment: _Segment, at: int) -> Tensor:
        """Return one token per request: the H / K heads that share keys are the query positions."""
        keys, values = self._cached(segment.tables[at])
        places = torch.arange(keys.shape[1], device=self._device)
        mask = places < segment.lengths[:, None]
        if layer.window is not None:
            mask &= places >= segment.lengths[:, None] - layer.window
        q = q.view(q.shape[0], self._config.kv_heads, -1, self._config.head_dim)
        found = functional.scaled_dot_product_attention(
            q, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask[:, None, None]
        )
        return found.reshape(q.shape[0], self._config.heads, self._config.head_dim)

    def _attend_prompt(self, layer: _Layer, q: Tensor, table: Tensor, position: int) -> Tensor:
        """Consecutive tokens of one request, the first at `position`."""
        count, kv_heads = q.shape[0], self._config.kv_heads
        keys, values = (cached[: position + count] for cached in self._cached(table))
        behind = torch.arange(position, position + count, device=self._device)[:, None] - torch.arange(
            position + count, device=self._device
        )
        mask = behind >= 0
        if layer.window is not None:
            mask &= behind < layer.window
        grouped = q.view(count, kv_heads, -1, self._config.head_dim).permute(1, 2, 0, 3)
        shape = (kv_heads, grouped.shape[1], position + count, self._config.head_dim)
        found = functional.scaled_dot_product_attention(
            grouped,
            keys.transpose(0, 1)[:, None].expand(shape),
            values.transpose(0, 1)[:, None].expand(shape),
            attn_mask=mask,
        )
        return found.permute(2, 0, 1, 3).reshape(count, self._config.heads, self._config.head_dim)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (T, heads, E): value i turns with value i + E / 2."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
