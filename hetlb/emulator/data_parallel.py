"""Data-parallel engines behind one server, as `vllm serve --data-parallel-size N` runs them.

Each sequence goes to the engine with the least `4 * waiting + running`, the score of vLLM's own balancer
(`DPLBAsyncMPClient`, 0.32); of equals to the next one in turn. vLLM's counts are up to 100 ms old, these are
exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetlb.emulator.real_time import EmulatedSequence, RealTimeEngine

#: A waiting sequence weighs as much as so many running ones.
_WAITING_WEIGHT = 4


class EngineGroup:
    """All engines of one server."""

    def __init__(self, runners: Sequence[RealTimeEngine]) -> None:
        self.runners = tuple(runners)
        self._next = 0

    @property
    def running(self) -> int:
        """Sequences that the engines work on."""
        return sum(runner.running for runner in self.runners)

    @property
    def waiting(self) -> int:
        """Sequences that wait for an engine."""
        return sum(runner.waiting for runner in self.runners)

    @property
    def finished(self) -> dict[str, int]:
        """Sequences that have ended, by vLLM's finished_reason: stop, length, abort."""
        each = [runner.finished for runner in self.runners]
        return {reason: sum(finished[reason] for finished in each) for reason in each[0]}

    def submit(self, choices: Sequence[EmulatedSequence]) -> None:
        """Give the sequences of one request to engines."""
        if len(self.runners) == 1:
            for choice in choices:
                choice.runner = self.runners[0]
            self.runners[0].submit(choices)
            return
        for choice in choices:
            choice.runner = self._least_loaded()
            choice.runner.submit((choice,))

    def abort(self, choices: Sequence[EmulatedSequence]) -> None:
        """Drop these sequences; those that have ended stay as they are."""
        for choice in choices:
            if choice.runner is not None:
                choice.runner.abort((choice,))

    async def wait_idle(self) -> None:
        """Wait until no sequence runs or waits: all were answered, or aborted since their clients left."""
        while self.running or self.waiting:
            for runner in self.runners:
                await runner.wait_idle()

    def _least_loaded(self) -> RealTimeEngine:
        count = len(self.runners)
        turn = [self.runners[(self._next + i) % count] for i in range(count)]
        self._next = (self._next + 1) % count
        return min(turn, key=lambda runner: _WAITING_WEIGHT * runner.waiting + runner.running)
