"""The engine model against a published run of real vLLM on a GPU, request by request.

    python bench/real_run.py DIR [--layers 32 --kv-cache-tokens 41408 ...]

DIR holds requests.csv (a log that `hetlb simulate --against` reads) and the kernel tables of the same GPU and
model: operator_dense.csv (layer, tokens, time_us), operator_per_sequence.csv (layer, sequences, time_us) and
operator_attention.csv (prefill_chunk, kv_prefill, n_decode, kv_decode, time_us): times of one layer. A
profile is made of them on an ordinary grid and the run is replayed on it: once with the mixed steps of the
grid, once with assumed ones, and once with iteration times straight from the tables, which isolates the
scheduler. Exit status 1 if a bound is not met. Bounds are per request too, so that errors that cancel cannot
pass. Without a compiled build: what stands for a latency model here is none to it.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from hetlb.balancer.config.profile_file import HostTime
from hetlb.balancer.core.latency import LatencyModel
from hetlb.tools.profiler.fit import fit
from hetlb.tools.profiler.grid import Point, StepKind
from hetlb.tools.profiler.sources import ASSUMED_TILE_TOKENS, complete
from hetlb.tools.sim.against import MetricError, compare, errors, replay
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.workload.measured_logs import read_log

#: Once in a layer, and once in a pass.
_IN_LAYER = (
    *("layernorm", "qkv_proj", "rotary_emb", "o_proj", "layernorm"),
    *("gate_up_proj", "act_fn", "down_proj"),
)
_ONCE = ("embedding", "final_layernorm")
_PER_SEQUENCE = ("lm_head", "sampler")
PREFILL = tuple((b, n) for b in (1, 2, 4, 8, 16) for n in (32, 64, 128, 256, 512, 1024, 2048, 4096))
DECODE = tuple((b, n) for b in (1, 4, 16, 32, 64, 128) for n in (256, 4096))
MIXED = tuple((p, d, c) for p in (256, 1024) for d in (4, 32, 64) for c in (256, 1024))
#: Errors of the mean, and per request in the mean.
BOUNDS = {"mean": 0.015, "per_request": 0.025}
MIXED_BOUNDS = {"mean": 0.05, "p95": 0.10}


class Tables:
    """Iteration times composed of kernel times, seconds."""

    def __init__(self, folder: Path, layers: int) -> None:
        self._layers = layers
        dense: dict[str, dict[int, float]] = defaultdict(dict)
        for row in _rows(folder / "operator_dense.csv"):
            dense[row["layer"]][int(row["tokens"])] = float(row["time_us"]) * 1e-6
        self._tokens = sorted(dense[_IN_LAYER[0]])
        self._dense = {
            tokens: layers * sum(dense[name][tokens] for name in _IN_LAYER)
            + sum(dense[name][tokens] for name in _ONCE if name in dense)
            for tokens in self._tokens
        }
        per: dict[str, dict[int, float]] = defaultdict(dict)
        for row in _rows(folder / "operator_per_sequence.csv"):
            per[row["layer"]][int(row["sequences"])] = float(row["time_us"]) * 1e-6
        self._sequences = sorted(per[_PER_SEQUENCE[0]])
        self._per_sequence = [sum(per[name][n] for name in _PER_SEQUENCE) for n in self._sequences]
        names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        self.attention = {
            cast("tuple[int, int, int, int]", tuple(int(row[name]) for name in names)): layers
            * float(row["time_us"])
            * 1e-6
            for row in _rows(folder / "operator_attention.csv")
        }
        self._found: dict[tuple[float, float, float, float], float] = {}
        self._axes = [sorted({key[i] for key in self.attention} | {0}) for i in range(4)]

    def pass_s(self, tokens: int, sequences: int) -> float:
        """Everything but attention. Between two points of the tables the higher: kernels work on tiles."""
        i = bisect_left(self._tokens, tokens)
        if i == len(self._tokens):
            last = self._tokens[-1]
            dense_s = self._dense[last] * tokens / last
        else:
            dense_s = self._dense[self._tokens[i]]
        low, high, share = _cell(self._sequences, sequences)
        return dense_s + self._per_sequence[low] * (1 - share) + self._per_sequence[high] * share

    def attention_s(self, chunk: float, past: float, decodes: float, context: float) -> float:
        """Attention, linear between the points of the table."""
        if not chunk and not decodes:
            return 0.0
        key = (chunk, past, decodes, context)
        if key not in self._found:
            self._found[key] = self._interpolated(key)
        return self._found[key]

    def _interpolated(self, key: tuple[float, float, float, float]) -> float:
        values = self._known(*key)
        cells = [_cell(axis, value) for axis, value in zip(self._axes, values, strict=True)]
        total = 0.0
        for corner in product((0, 1), repeat=4):
            weight = 1.0
            for side, (_, _, share) in zip(corner, cells, strict=True):
                weight *= share if side else 1.0 - share
            if weight:
                at = [
                    axis[high if side else low]
                    for axis, (low, high, _), side in zip(self._axes, cells, corner, strict=True)
                ]
                total += weight * self._corner(*at)
        return total

    def _known(self, chunk: float, past: float, decodes: float, context: float) -> tuple[float, ...]:
        least = self._axes[0][1]
        if chunk:
            chunk = max(chunk, least)
        return (chunk, past if chunk else 0.0, decodes, context if decodes else 0.0)

    def _corner(self, chunk: int, past: int, decodes: int, context: int) -> float:
        known = self.attention.get((chunk, past, decodes, context))
        if known is not None:
            return known
        if not decodes or not context:
            return self.attention.get((chunk, past, 0, 0), 0.0) if chunk else 0.0
        # The tables end where the KV cache does: in proportion from the last context that they have.
        for shorter in reversed([each for each in self._axes[3] if 0 < each < context]):
            known = self.attention.get((chunk, past, decodes, shorter))
            if known is not None:
                return known * context / shorter
        raise SystemExit(f"the attention table lacks {chunk}, {past}, {decodes}, {context}")

    def step_s(self, batch: int, length: int) -> float:
        """A decode step."""
        return self.pass_s(batch, batch) + self.attention_s(0, 0, batch, length)

    def prefill_s(self, batch: int, length: int) -> float:
        """A pass over whole prompts; one kernel does the attention of all, so its start counts once."""
        start_s = self.attention_s(self._axes[0][1], 0, 0, 0)
        attention_s = start_s + batch * max(0.0, self.attention_s(length, 0, 0, 0) - start_s)
        return self.pass_s(batch * length, batch) + attention_s

    def mixed_s(self, chunk: int, decodes: int, context: int, past: int = 0) -> float:
        """A step with a part of a prompt in it."""
        return self.pass_s(chunk + decodes, decodes + 1) + self.attention_s(chunk, past, decodes, context)

    def points(self, budget: int) -> list[Point]:
        """The ordinary grid within a budget of tokens."""
        most = min(budget, self._tokens[-1])
        found = [Point(StepKind.PREFILL, b, n, self.prefill_s(b, n)) for b, n in PREFILL if b * n <= most]
        found += [Point(StepKind.DECODE, b, n, self.step_s(b, n)) for b, n in DECODE]
        return found + [Point(StepKind.MIXED, d, c, self.mixed_s(p, d, c), 1, p) for p, d, c in MIXED]


class Exact:
    """What the engine model asks of a latency model, from the tables."""

    def __init__(self, tables: Tables, host_s: float, request_s: float) -> None:
        self._tables = tables
        self._host_s = host_s
        self.request_s = request_s
        self.better_prefill = self.split_kv = self.launch = None
        self.better_decode = self

    def mixed_step_s(
        self,
        tokens: int,
        prompts: int,
        longest: int,
        batch: int,
        kv_tokens: int,
        attended: int = -1,
    ) -> float:
        """Seconds of an iteration; several prompts count as one of their tokens without a past."""
        past = max(0.0, (attended / tokens - tokens) / 2) if tokens else 0.0
        context = kv_tokens / batch if batch else 0.0
        pass_s = self._tables.pass_s(tokens + batch, prompts + batch)
        return self._host_s + pass_s + self._tables.attention_s(tokens, past, batch, context)

    def step_s(self, batch: int, kv_tokens: int) -> float:
        """Seconds of a decode step."""
        return self.mixed_step_s(0, 0, 0, batch, kv_tokens) if batch else 0.0

    def growth_s(self, batch: int) -> float:
        """Return the seconds that one more token for each sequence adds to a step."""
        if not batch:
            return 0.0
        more = self._tables.attention_s(0, 0, batch, 1024) - self._tables.attention_s(0, 0, batch, 512)
        return more / 512


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _cell(axis: Sequence[int], value: float) -> tuple[int, int, float]:
    """Neighbours in an axis and how far `value` lies between them; the last beyond it."""
    if value >= axis[-1]:
        return len(axis) - 1, len(axis) - 1, 0.0
    j = bisect_left(axis, value)
    if axis[j] == value:
        return j, j, 0.0
    return (j - 1, j, (value - axis[j - 1]) / (axis[j] - axis[j - 1])) if j else (0, 0, 0.0)


def mixed_errors(tables: Tables, latency: LatencyModel, limits: EngineLimits) -> dict[str, float]:
    """Errors over every mixed step of the tables that the engine could make."""
    off = []
    for chunk, past, decodes, context in tables.attention:
        if not chunk or not decodes or chunk + decodes > limits.max_num_batched_tokens:
            continue
        if chunk + past + decodes * context > limits.kv_cache_tokens:
            continue
        attended = chunk * (chunk + 2 * past)
        said = latency.mixed_step_s(chunk, 1, chunk, decodes, decodes * context, attended)
        off.append(said / tables.mixed_s(chunk, decodes, context, past) - 1.0)
    ordered = sorted(abs(each) for each in off)
    return {
        "bias": fmean(off),
        "mean": fmean(ordered),
        "p95": ordered[int(0.95 * len(ordered))],
        "steps": len(off),
    }


def main() -> int:
    """Compose, fit, replay, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-cache-tokens", type=int, default=41408)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--host-ms", type=float, default=0.0, help="host time of an iteration")
    parser.add_argument("--request-ms", type=float, default=0.0, help="what the server adds to a request")
    parser.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    tables = Tables(args.folder, args.layers)
    log = read_log(args.folder / "requests.csv")
    limits = EngineLimits(
        args.kv_cache_tokens,
        args.block_size,
        args.max_num_seqs,
        args.max_num_batched_tokens,
        async_scheduling=args.async_scheduling,
    )
    host_s, request_s = args.host_ms / 1e3, args.request_ms / 1e3
    points = tables.points(args.max_num_batched_tokens)
    host = HostTime(iteration_s=host_s, request_s=request_s)
    runs: dict[str, dict[str, MetricError]] = {}
    document: dict[str, Any] = {"mixed_steps": {}, "runs": {}}
    for name, used in (
        ("profile", points),
        ("assumed mixed steps", [p for p in points if p.phase is not StepKind.MIXED]),
    ):
        result, _ = complete(fit(used, usual_tile=ASSUMED_TILE_TOKENS), used, host)
        latency = replace(result.latency, host_s=host_s, request_s=request_s)
        document["mixed_steps"][name] = mixed_errors(tables, latency, limits)
        engine = EngineSpec(latency, limits)
        runs[name] = errors(log.requests, replay(log.requests, engine).requests)
        if name == "profile":
            document["verdict"] = compare(log, {"": engine}).verdict
    exact = EngineSpec(cast("LatencyModel", Exact(tables, host_s, request_s)), limits)
    runs["exact iterations"] = errors(log.requests, replay(log.requests, exact).requests)
    for name, found in runs.items():
        document["runs"][name] = {metric: asdict(error) for metric, error in found.items()}
        parts = [
            f"{metric} {100 * each.error:+.1f} % ({100 * each.per_request:.1f}; relative "
            f"{100 * each.relative:.1f}, median {100 * each.median:.1f}, p95 {100 * each.p95:.1f})"
            for metric, each in found.items()
        ]
        print(f"{name}: {'; '.join(parts)}")
    for name, mixed in document["mixed_steps"].items():
        print(f"mixed steps of the tables, {name}: " + ", ".join(f"{k} {v:.4g}" for k, v in mixed.items()))
    print(document["verdict"])
    if args.out is not None:
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    missed = [
        f"{metric} {kind}"
        for metric, each in runs["profile"].items()
        for kind, value in (("mean", abs(each.error)), ("per_request", each.per_request))
        if value > BOUNDS[kind]
    ]
    missed += [
        f"mixed steps {kind}"
        for kind, most in MIXED_BOUNDS.items()
        if document["mixed_steps"]["profile"][kind] > most
    ]
    for each in missed:
        print(f"NOT MET: {each}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
