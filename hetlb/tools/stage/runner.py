"""Interface between a worker and its device: batches, the rows that break them, and their times at start.

A batch costs, per layer, the time of its prompt tokens and the time of its decoding requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from hetlb.tools.paths.stages import Curve
from hetlb.tools.stage.batching import BlockTable, StageBlocks, StageLease, Work, segments
from hetlb.tools.stage.stage_messages import RouteHop, Sampling

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
