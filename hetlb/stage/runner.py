"""Interface between a worker and what computes, and a runner that takes the time of other hardware."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeAlias

from hetlb.core.paths.stages import Curve
from hetlb.stage.batching import Work


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token, and (token, log probability) where they are asked for."""

    token: int
    logprobs: list[tuple[int, float]] | None = None


#: Activations for the next stage, or a token; empty for a chunk of a prompt on the last stage.
Result: TypeAlias = bytes | Sampled


class Runner(Protocol):
    """Computes batches."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one activation."""

    def run(self, works: Sequence[Work]) -> list[Result]:
        """One result per work, in order. Called from one thread at a time."""


class PacedRunner:
    """A runner whose batches take at least the time of another kind of machine: rehearses a cluster."""

    def __init__(self, runner: Runner, prompt: Curve, decode: Curve) -> None:
        """`prompt` and `decode`: seconds of one layer by tokens and by requests."""
        self._runner = runner
        self._prompt, self._decode = prompt, decode

    @property
    def row_bytes(self) -> int:
        """Bytes of one activation."""
        return self._runner.row_bytes

    def run(self, works: Sequence[Work]) -> list[Result]:
        """As the runner inside, and then the rest of the time."""
        until = time.monotonic() + self._seconds(works)
        results = self._runner.run(works)
        time.sleep(max(0.0, until - time.monotonic()))
        return results

    def _seconds(self, works: Sequence[Work]) -> float:
        bounds = sorted({bound for work in works for bound in (work.lease.first, work.lease.end)})
        total = 0.0
        for first, end in pairwise(bounds):
            inside = [work for work in works if work.lease.first <= first < work.lease.end]
            decodes = sum(work.count == 1 for work in inside)
            prompts = sum(work.count for work in inside if work.count > 1)
            total += (end - first) * (
                self._seconds_of(self._prompt, prompts) + self._seconds_of(self._decode, decodes)
            )
        return total

    @staticmethod
    def _seconds_of(curve: Curve, count: int) -> float:
        return curve(count) if count else 0.0
