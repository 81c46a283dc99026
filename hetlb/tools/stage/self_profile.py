"""Measurement of a stage by itself at start: seconds of one layer by tokens of a batch.

A batch costs, per layer, the time of its prompt tokens and the time of its decoding requests.
"""

from __future__ import annotations

import time
from typing import Final

from hetlb.tools.stage.batching import BlockTable, StageBlocks, StageLease, Work
from hetlb.tools.stage.runner import Runner
from hetlb.tools.stage.stage_messages import RouteHop, Sampling

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
