"""Real time: runs an engine model on the event loop's clock and hands out tokens at iteration ends.

An iteration begins at the exact end of the one before, even if the loop is late: lateness does not add up.
A request takes part in the first iteration that begins after it arrived.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many

from hetlb.tools.sim.engine_model import EngineModel
from hetlb.tools.sim.engine_sequence import EngineSequence, SequenceState

#: Seconds that the runner may catch up in one go before the loop gets to its sockets again.
_CATCH_UP_S = 0.005


class EmulatedSequence(EngineSequence):
    """A sequence with callbacks for its tokens. `finish_reason` is vLLM's term for how it will end."""

    __slots__ = ("finish_reason", "runner")

    def __init__(self, prompt_tokens: int, output_tokens: int, finish_reason: str = "stop") -> None:
        super().__init__(prompt_tokens, output_tokens)
        self.finish_reason = finish_reason
        #: Its engine, set if a server has several.
        self.runner: RealTimeEngine | None = None

    def token(self) -> None:
        """Note a token other than the last one."""

    def finish(self) -> None:
        """Note the last token; without output, the end of the prefill."""


class RealTimeEngine:
    """One engine in real time. Durations of the model are multiplied by `time_scale`."""

    def __init__(self, model: EngineModel, time_scale: float = 1.0, tokens_per_step: float = 1.0) -> None:
        self.model = model
        #: Tokens of a decode step with speculative decoding; the model's steps are of one token all the same.
        self.tokens_per_step = tokens_per_step
        #: Unix time, seconds.
        self.began_at = time.time()
        #: Prompt tokens with a finished prefill, each prompt once.
        self.prompt_tokens = 0
        #: Called with the tokens of an iteration if it had any. A prompt counts at the end of its prefill.
        self.on_iteration: Callable[[float], object] = lambda tokens: None
        #: Sequences that ended, by vLLM's finished_reason.
        self.finished = {"stop": 0, "length": 0, "abort": 0}
        self._time_scale = time_scale
        #: Later than the beginning of the iteration in flight.
        self._arrivals: deque[tuple[float, Many[EmulatedSequence]]] = deque()
        self._pending = 0  # sequences in `_arrivals` that were not aborted
        self._handle: asyncio.Handle | None = None  # None: idle
        #: Called with a sequence that needs a KV transfer.
        self.on_fetch: Callable[[EmulatedSequence], None] | None = None
        self._boundary = 0.0  # when the iteration in flight ends, on the monotonic clock

    @property
    def running(self) -> int:
        return self.model.running

    @property
    def waiting(self) -> int:
        return self.model.waiting + self._pending

    @property
    def drafts(self) -> int:
        """Decode steps of sequences, with speculative decoding."""
        return int(self.model.generated_tokens / self.tokens_per_step)

    def submit(self, choices: Many[EmulatedSequence]) -> None:
        """Take in requests that arrive now. The caller has refused what can never fit."""
        now = time.monotonic()
        self._arrivals.append((now, choices))
        self._pending += len(choices)
        if self._handle is None:
            self._begin(now)

    def abort(self, choices: Many[EmulatedSequence]) -> None:
        """Drop sequences, wherever they are; ended ones stay as they are."""
        for choice in choices:
            state = choice.state
            if state is SequenceState.FINISHED or state is SequenceState.ABORTED:
                continue
            if state is SequenceState.NEW:
                self._pending -= 1
            self.model.abort(choice)
            self.finished["abort"] += 1

    def complete_fetch(self, choice: EmulatedSequence, *, loaded: bool) -> None:
        """End a KV fetch, successful (`loaded`) or failed."""
        self.model.complete_fetch(choice, loaded=loaded)
        self._wake_up()

    def release_held(self, choice: EmulatedSequence) -> None:
        """Keep the KV cache of a prompt for another engine no longer."""
        self.model.release_held(choice)
        self._wake_up()

    def _wake_up(self) -> None:
        if self._handle is None:
            self._begin(time.monotonic())

    def close(self) -> None:
        """Stop; no further tokens are emitted."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _begin(self, at: float) -> bool:
        """Begin the next iteration at `at`, or when the next request arrived; False if there is none."""
        arrivals, model = self._arrivals, self.model
        while True:
            if model.idle and arrivals and arrivals[0][0] > at:
                at = arrivals[0][0]
            while arrivals and arrivals[0][0] <= at:
                for choice in arrivals.popleft()[1]:
                    if choice.state is SequenceState.NEW:
                        self._pending -= 1
                        model.submit(choice)
            duration_s = model.begin_iteration()
            if self.on_fetch is not None:
                for sequence in model.fetches.take_begun():
                    self.on_fetch(sequence)  # type: ignore[arg-type]
            if duration_s is not None:
                break
            if not arrivals:
                self._handle = None
                return False
            # All that had arrived by then has left, or waits for a KV cache: go on at the next arrival.
            at = max(at, arrivals[0][0])
        self._boundary = at + duration_s * self._time_scale
        if self._handle is None:
            self._schedule()
        return True

    def _schedule(self) -> None:
        # uvloop's timers count whole milliseconds of the same monotonic clock: rounding up is what
        # keeps a token from being early, and the boundary itself stays exact.
        self._handle = asyncio.get_running_loop().call_at(math.ceil(self._boundary * 1000) / 1000, self._wake)

    def _wake(self) -> None:
        until = self._boundary
        start = now = time.monotonic()
        while until <= now:
            self._end()
            if not self._begin(until):
                return
            until = self._boundary
            now = time.monotonic()
            if now - start > _CATCH_UP_S:
                self._handle = asyncio.get_running_loop().call_soon(self._wake)
                return
        self._schedule()

    def _end(self) -> None:
        model = self.model
        before = self.prompt_tokens + model.generated_tokens
        ended = model.end_iteration()
        for sequence in ended.first:
            self.prompt_tokens += sequence.prompt_tokens
        for choice in model.decodes.sequences:
            choice.token()  # type: ignore[attr-defined]
        for choice in ended.finished:
            if not choice.output_tokens:
                self.prompt_tokens += choice.prompt_tokens
            self.finished[choice.finish_reason] += 1  # type: ignore[attr-defined]
            choice.finish()  # type: ignore[attr-defined]
        if tokens := self.prompt_tokens + model.generated_tokens - before:
            self.on_iteration(tokens)


class EngineGroup:
    """Data-parallel engines of one server, as `vllm serve --data-parallel-size N` runs them.

    Each sequence goes to the engine with the least `4 * waiting + running`, the score of vLLM's own balancer
    (`DPLBAsyncMPClient`, 0.32); of equals to the next one in turn.
    """

    def __init__(self, runners: Many[RealTimeEngine]) -> None:
        self.runners = tuple(runners)
        self._next = 0

    @property
    def running(self) -> int:
        return sum(runner.running for runner in self.runners)

    @property
    def waiting(self) -> int:
        return sum(runner.waiting for runner in self.runners)

    @property
    def finished(self) -> dict[str, int]:
        """Sequences that ended, by vLLM's finished_reason: stop, length, abort."""
        each = [runner.finished for runner in self.runners]
        return {reason: sum(finished[reason] for finished in each) for reason in each[0]}

    def submit(self, choices: Many[EmulatedSequence], rank: int | None = None) -> None:
        """Run sequences at the engine of a rank, None: at the least loaded one."""
        if rank is not None:
            for choice in choices:
                choice.runner = self.runners[rank]
            self.runners[rank].submit(choices)
            return
        if len(self.runners) == 1:
            for choice in choices:
                choice.runner = self.runners[0]
            self.runners[0].submit(choices)
            return
        for choice in choices:
            choice.runner = self._least_loaded()
            choice.runner.submit((choice,))

    def abort(self, choices: Many[EmulatedSequence]) -> None:
        """Drop sequences; ended ones stay as they are."""
        for choice in choices:
            if choice.runner is not None:
                choice.runner.abort((choice,))

    def _least_loaded(self) -> RealTimeEngine:
        count = len(self.runners)
        turn = [self.runners[(self._next + i) % count] for i in range(count)]
        self._next = (self._next + 1) % count
        return min(turn, key=lambda runner: 4 * runner.waiting + runner.running)
