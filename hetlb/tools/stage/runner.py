"""Interface between a worker and its device: batches, the rows that break them, and their times at start.

A batch costs, per layer, the time of its prompt tokens and the time of its decoding requests.

The next token is chosen from the logits of one position, with vLLM's parameters in vLLM's order: allowed
tokens, bias, ban of stop tokens (`min_tokens`), penalties, temperature, min_p, top_k, top_p. Log
probabilities come from the raw logits. A choice depends on logits, parameters and position alone (one Philox
stream per seed and position), so a replayed request goes on as it would have. Logits that are not finite, and
parameters that leave no token, are `CannotSample`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hetlb.tools.paths.stages import Curve
from hetlb.tools.stage.batching import BlockTable, StageBlocks, StageLease, Work, segments
from hetlb.tools.stage.stage_messages import LEAST_LOGPROB, RouteHop, Sampling

log = logging.getLogger("hetlb.stage")


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token, with (token, log probability) pairs if requested."""

    token: int
    logprobs: list[tuple[int, float]] | None = None


@dataclass(frozen=True, slots=True)
class RowFailed:
    """A request that fails in any batch."""

    reason: str


#: Activations for the next stage, or a token; empty for a chunk of a prompt on the last stage.
Result: TypeAlias = bytes | Sampled | RowFailed


class DeviceFault(Exception):
    """The device is unusable; not caused by a request."""


class Runner(Protocol):
    """Computes batches. An exception fails a batch as a whole. `row_bytes`: bytes of one activation."""

    row_bytes: int

    def run(self, works: Sequence[Work]) -> list[Result]:
        """Return one result per work, in order. Called from one thread at a time."""


def run_apart(runner: Runner, works: Sequence[Work]) -> list[Result]:
    """Run a batch; if it fails, its halves, down to the requests that fail alone. Raises `DeviceFault`.

    Running a part of a batch again changes nothing: it writes the same KV, and no token has left yet.
    """
    try:
        return runner.run(works)
    except Exception as error:  # whatever a library raises: out of memory, bad input, a fault of the device
        log.warning("a batch of %d requests failed: %s", len(works), error)
        if len(works) > 1:
            half = len(works) // 2
            return run_apart(runner, works[:half]) + run_apart(runner, works[half:])
        _check_device(runner, works[0].lease)
        return [RowFailed(str(error))]


def _check_device(runner: Runner, failed: StageLease) -> None:
    """Run one good token in the blocks of a request that failed. Raises `DeviceFault`."""
    lease = StageLease(failed.id, failed.route, failed.hop, Sampling(1), failed.table)
    size = 4 if lease.hop == 0 else runner.row_bytes
    try:
        runner.run([Work(lease, 0, 1, True, memoryview(bytes(size)))])
    except Exception as error:
        raise DeviceFault(str(error)) from error


class PacedRunner:
    """A runner as slow as another kind of machine, or slower: rehearses a cluster."""

    def __init__(self, runner: Runner, prompt: Curve, decode: Curve) -> None:
        """`prompt` and `decode`: seconds of one layer by tokens and by requests."""
        self._runner = runner
        self._prompt, self._decode = prompt, decode
        self.row_bytes = runner.row_bytes

    def run(self, works: Sequence[Work]) -> list[Result]:
        """Run as the runner inside does, then wait out the rest of the time."""
        until = time.monotonic() + self._seconds(works)
        results = self._runner.run(works)
        time.sleep(max(0.0, until - time.monotonic()))
        return results

    def _seconds(self, works: Sequence[Work]) -> float:
        total = 0.0
        for first, end, inside in segments(works):
            decodes = sum(work.count == 1 for work in inside)
            prompts = sum(work.count for work in inside if work.count > 1)
            counts = ((self._prompt, prompts), (self._decode, decodes))
            total += (end - first) * sum(curve(count) for curve, count in counts if count)
        return total


#: Cached tokens of a request in a measured decode.
CONTEXT_TOKENS: Final = 128
_REPEATS: Final = 3
#: A batch of at least this duration, in seconds, is the largest one measured.
_LONGEST_S: Final = 2.0

Points = list[tuple[float, float]]


def measure(
    runner: Runner,
    pool: StageBlocks,
    first: int,
    end: int,
    *,
    layers: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_positions: int,
) -> tuple[Points, Points]:
    """Return times of prompts by tokens and of decodes by requests. The pool is as before afterwards."""
    most = min(max_num_batched_tokens, max_positions, pool.token_layers // (end - first))
    context = min(CONTEXT_TOKENS, max_positions - 1)
    rest = () if end == layers else (RouteHop("", end, layers),)
    route = (RouteHop("", first, end), *rest)
    prompts = _curve(runner, pool, route, [(n, 1, n, 0) for n in _steps(16, most, 4)])
    seats = min(max_num_seqs, pool.token_layers // ((context + pool.block_size) * (end - first)))
    decodes = _curve(runner, pool, route, [(n, n, 1, context) for n in _steps(1, max(1, seats), 2)])
    if len(decodes) == 1:
        decodes.append((2.0, decodes[0][1]))
    return [(0.0, 0.0), *prompts], [(0.0, 0.0), *decodes]


def _steps(least: int, most: int, factor: int) -> list[int]:
    """Return `least`, `least` * factor, ... and `most`."""
    steps = []
    size = least
    while size < most:
        steps.append(size)
        size *= factor
    return [*steps, most]


def _curve(
    runner: Runner, pool: StageBlocks, route: tuple[RouteHop, ...], sizes: list[tuple[int, int, int, int]]
) -> Points:
    """Points (x, seconds of one layer) for batches (x, requests, tokens each, cached tokens each).

    The requests are made up, and their route begins here.
    """
    first, end = route[0].first, route[0].end
    row = 4 if first == 0 else runner.row_bytes
    points: Points = []
    for x, requests, tokens, cached in sizes:
        leases = []
        for number in range(requests):
            table = BlockTable(first, end)
            assert pool.reserve(table, cached + tokens)
            leases.append(StageLease(number, route, 0, Sampling(1), table, computed=cached))
        works = [Work(lease, cached, tokens, True, memoryview(bytes(row * tokens))) for lease in leases]
        seconds = _batch_s(runner, works)
        for lease in leases:
            pool.release(lease.table)
        points.append((float(x), seconds / (end - first)))
        if seconds > _LONGEST_S:
            break
    return points


def _batch_s(runner: Runner, works: list[Work]) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        runner.run(works)
        times.append(time.perf_counter() - began)
        if times[-1] > _LONGEST_S:
            break
    return min(times)  # other work on the machine only adds


Logits = npt.NDArray[np.float32]
Scores = npt.NDArray[np.float64]


class CannotSample(Exception):
    """There is no next token for these logits and parameters."""


def choose(
    logits: Logits, sampling: Sampling, output: Sequence[int], position: int
) -> tuple[int, list[tuple[int, float]] | None]:
    """Return the token, and (token, log probability) of it and the most likely ones if they are asked for.

    `logits` has shape (vocabulary,) and is not changed; `output` holds the tokens of the answer so far,
    without the tokens behind `sampling.history`; `position` is the last token's. Raises
    `CannotSample`.
    """
    if not np.isfinite(logits.max()):  # NaN if one of them is
        raise CannotSample("the model's output is not finite")
    scores = logits.astype(np.float64)
    if not sampling.plain:
        _adjust(scores, sampling, output, position)
    likely = int(np.argmax(scores))
    if scores[likely] == -np.inf:
        raise CannotSample("its parameters allow no token")
    token = likely if sampling.greedy else _draw(scores - scores[likely], sampling, position)
    return token, _log_probabilities(logits, token, sampling.logprobs)


def _ids(packed: bytes, vocabulary: int) -> npt.NDArray[np.int32]:
    """Return the token ids of a message. Raises `CannotSample`."""
    if len(packed) % 4:
        raise CannotSample("expected whole token ids")
    ids = np.frombuffer(packed, dtype="<i4")
    if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary):
        raise CannotSample(f"expected token ids below {vocabulary}")
    return ids


def _adjust(scores: Scores, sampling: Sampling, output: Sequence[int], position: int) -> None:
    """Apply allowed tokens, bias, ban and penalties in place."""
    size = len(scores)
    if sampling.allowed:
        refused = np.ones(size, dtype=bool)
        refused[_ids(sampling.allowed, size)] = False
        scores[refused] = -np.inf
    biased, biases = _ids(sampling.bias_tokens, size), np.frombuffer(sampling.bias_values, dtype="<f4")
    if len(biases) != len(biased) or not np.isfinite(biases).all():
        raise CannotSample("expected a finite bias for each token")
    scores[biased] += biases
    if position + 1 - sampling.prompt_tokens < sampling.min_tokens:
        scores[_ids(sampling.stop, size)] = -np.inf
    if not sampling.penalises:
        return
    history = _ids(sampling.history, size)
    prompt = history[: sampling.prompt_tokens]
    answer = np.concatenate((history[sampling.prompt_tokens :], np.array(output, dtype=np.int32)))
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate((prompt, answer)))
        old = scores[seen]
        scores[seen] = np.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    tokens, counts = np.unique(answer, return_counts=True)
    scores[tokens] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def _draw(scores: Scores, sampling: Sampling, position: int) -> int:
    """Return a token from softmax(scores / temperature), cut by min_p, top_k and top_p."""
    scores = scores / sampling.temperature
    kept = np.arange(len(scores))
    if sampling.min_p > 0.0:
        kept = kept[scores >= np.log(sampling.min_p)]
    if 0 < sampling.top_k < len(kept):
        kept = kept[np.argpartition(-scores[kept], sampling.top_k - 1)[: sampling.top_k]]
    chances = np.exp(scores[kept])
    chances /= chances.sum()
    if sampling.top_p < 1.0:
        order = np.argsort(-chances, kind="stable")
        before = np.cumsum(chances[order]) - chances[order]
        inside = order[before < sampling.top_p]
        kept, chances = kept[inside], chances[inside]
    # The same numbers for the same token whatever was cut: order by token.
    order = np.argsort(kept)
    kept, chances = kept[order], chances[order]
    rng = np.random.Generator(np.random.Philox(key=sampling.seed, counter=position))
    at = np.searchsorted(np.cumsum(chances), rng.random() * chances.sum(), side="right")
    return int(kept[min(int(at), len(kept) - 1)])


def _log_probabilities(logits: Logits, token: int, count: int) -> list[tuple[int, float]] | None:
    if count < 0:
        return None
    shifted = logits.astype(np.float64) - float(logits.max())
    total = float(np.log(np.exp(shifted).sum()))
    likely = np.argsort(-shifted, kind="stable")[:count].tolist()
    return [(each, max(LEAST_LOGPROB, float(shifted[each]) - total)) for each in (token, *likely)]
