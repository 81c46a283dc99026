"""Real time: runs an engine model on the event loop's clock and hands out tokens at iteration ends.

No token is handed out before its iteration has ended, and an iteration begins exactly where the
one before ended, however late the loop comes: lateness does not add up. A request takes part in the
first iteration that begins after it arrived. An abort is at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many

from hetlb.sim.engine_model import EngineModel
from hetlb.sim.engine_sequence import EngineSequence, SequenceState

#: Seconds that the runner may catch up in one go before the loop gets to its sockets again.
_CATCH_UP_S = 0.005


class EmulatedSequence(EngineSequence):
    """A sequence with callbacks for its tokens. `finish_reason` is vLLM's term for how it will end."""

    __slots__ = ("finish_reason", "runner")

    def __init__(self, prompt_tokens: int, output_tokens: int, finish_reason: str = "stop") -> None:
        super().__init__(prompt_tokens, output_tokens)
        self.finish_reason = finish_reason
        #: The engine that has it, set where a server has several.
        self.runner: RealTimeEngine | None = None

    def token(self) -> None:
        """It got a token that is not its last."""

    def finish(self) -> None:
        """It got its last token, or, without output, its prompt has been read."""


class IterationTokens:
    """vLLM's histogram of tokens per iteration: prompts count where they end, silent ones not at all."""

    #: vLLM's own upper bounds.
    BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

    def __init__(self) -> None:
        self.counts = [0] * len(self.BOUNDS)
        self.count = 0
        self.total = 0

    def observe(self, tokens: int) -> None:
        """Record the tokens of one iteration."""
        if not tokens:
            return
        self.count += 1
        self.total += tokens
        place = bisect_left(self.BOUNDS, tokens)
        if place < len(self.BOUNDS):
            self.counts[place] += 1


class RealTimeEngine:
    """One engine in real time. Durations of the model are multiplied by `time_scale`."""

    def __init__(self, model: EngineModel, time_scale: float = 1.0, tokens_per_step: float = 1.0) -> None:
        self.model = model
        #: Tokens of a decode step with speculative decoding; the model's steps are of one token all the same.
        self.tokens_per_step = tokens_per_step
        #: Unix time, seconds.
        self.began_at = time.time()
        #: Prompt tokens whose prefill has ended, each prompt once.
        self.prompt_tokens = 0
        self.iteration_tokens = IterationTokens()
        #: Sequences that have ended, by vLLM's finished_reason.
        self.finished = {"stop": 0, "length": 0, "abort": 0}
        self._time_scale = time_scale
        #: Later than the beginning of the iteration in flight.
        self._arrivals: deque[tuple[float, Many[EmulatedSequence]]] = deque()
        self._pending = 0  # sequences in `_arrivals` that were not aborted
        self._handle: asyncio.Handle | None = None  # None: idle
        #: Told of a sequence whose KV cache is to be fetched.
        self.on_fetch: Callable[[EmulatedSequence], None] | None = None
        self._boundary = 0.0  # when the iteration in flight ends, on the monotonic clock
        self._idle: asyncio.Future[None] | None = None  # a caller waits for the engine to have no work

    @property
    def running(self) -> int:
        """Sequences admitted by the engine."""
        return self.model.running

    @property
    def waiting(self) -> int:
        """Sequences that have arrived and are not admitted."""
        return self.model.waiting + self._pending

    def submit(self, choices: Many[EmulatedSequence]) -> None:
        """These arrive now. The caller has refused what can never fit."""
        now = time.monotonic()
        self._arrivals.append((now, choices))
        self._pending += len(choices)
        if self._handle is None:
            self._begin(now)

    def abort(self, choices: Many[EmulatedSequence]) -> None:
        """Drop these, wherever they are; those that have ended stay as they are."""
        for choice in choices:
            state = choice.state
            if state is SequenceState.FINISHED or state is SequenceState.ABORTED:
                continue
            if state is SequenceState.NEW:
                self._pending -= 1
            self.model.abort(choice)
            self.finished["abort"] += 1
        self._tell_idle()

    def complete_fetch(self, choice: EmulatedSequence, *, loaded: bool) -> None:
        """End a KV fetch, successful (`loaded`) or failed."""
        self.model.complete_fetch(choice, loaded=loaded)
        self._wake_up()

    def release_held(self, choice: EmulatedSequence) -> None:
        """The KV cache of a prompt is no longer kept for another engine."""
        self.model.release_held(choice)
        self._wake_up()

    def _wake_up(self) -> None:
        """Something may be able to run that could not."""
        if self._handle is None:
            self._begin(time.monotonic())

    async def wait_idle(self) -> None:
        """Wait until no sequence runs or waits."""
        while self.running or self.waiting:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def _tell_idle(self) -> None:
        if self._idle is not None and not (self.running or self.waiting):
            self._idle.set_result(None)
            self._idle = None

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
        self.iteration_tokens.observe(self.prompt_tokens + model.generated_tokens - before)
        self._tell_idle()
