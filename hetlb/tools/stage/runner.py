"""Interface between a worker and its device: batches, the rows that break them, other hardware's times."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from hetlb.tools.paths.stages import Curve
from hetlb.tools.stage.batching import StageLease, Work, segments
from hetlb.tools.stage.stage_messages import Sampling

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
