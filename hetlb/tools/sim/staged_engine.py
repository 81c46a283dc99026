"""A vLLM engine with pipeline parallelism, stage by stage: its throughput while requests wait.

Nothing is composed here: every batch takes its own time on every stage. Stages work on different batches at
the same time, and as many batches are in flight as there are stages. If one of them holds a prompt and the
others only decode, the others wait for it. These are the bubbles that no composed profile shows.

The rules of scheduling are vLLM's (`tests/sim/plain_engine.py` states them for one stage). A sequence is in
one batch in flight at a time. So it decodes in the batch that its prompt ended in, once a turn. Parts of one
prompt may be in several batches. If blocks are missing, the latest admitted sequence of the batch is
preempted. The scheduler works on one batch at a time, for `host_s` each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hetlb.balancer.core.latency import LatencyModel
from hetlb.tools.sim.decode_batch import DecodeBatch
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.engine_sequence import EngineSequence


@dataclass(frozen=True, slots=True)
class EngineStage:
    """GPUs that hold a share of the layers; `latency` is of the whole model on them.

    `link_token_s` and `link_batch_s` are of the link to the next stage, per token and per batch.
    """

    latency: LatencyModel
    share: float
    link_token_s: float = 0.0
    link_batch_s: float = 0.0


@dataclass(slots=True)
class _Lane:
    """One of the batches in flight."""

    decodes: DecodeBatch
    ending: list[EngineSequence] = field(default_factory=list)  # prompts that end in the batch in flight
    ends_s: float = 0.0
    busy: bool = False


class StagedEngine:
    """One engine; `run` serves the sequences submitted. `limits` are of a single batch."""

    def __init__(self, stages: Sequence[EngineStage], limits: EngineLimits) -> None:
        self._stages = stages
        self._limits = limits
        self._free_s = [0.0] * (len(stages) + 1)  # of every stage, and of the scheduler
        self._pool = limits.pool()
        self._admitted = 0
        self._partial: EngineSequence | None = None
        self._waiting: deque[EngineSequence] = deque()
        self._lanes = [_Lane(DecodeBatch(self._pool)) for _ in stages]

    @property
    def waiting(self) -> int:
        """Sequences not admitted."""
        return len(self._waiting)

    def submit(self, sequence: EngineSequence) -> None:
        """Put a sequence at the end of the queue."""
        self._waiting.append(sequence)

    def run(self) -> Iterator[tuple[float, int]]:
        """Yield, at every look of the scheduler at a batch, the time and how many sequences finished."""
        now, idle = 0.0, 0
        lanes = deque(self._lanes)
        while idle < len(lanes):
            lane, finished = lanes[0], 0
            lanes.rotate(-1)
            if lane.busy:
                now = max(now, lane.ends_s)
                finished = self._end(lane)
            yield now, finished
            lane.busy = self._begin(lane, now)
            idle = 0 if lane.busy else idle + 1

    def _begin(self, lane: _Lane, now: float) -> bool:
        """Schedule a batch and send it through the stages; False if there is nothing to do."""
        self._make_room(lane.decodes)
        prefills = self._prefills(lane)
        decodes = lane.decodes.advance(1)
        if not prefills and not decodes:
            return False
        tokens = sum(n for _, n in prefills)
        load = (
            float(tokens),
            float(len(prefills)),
            float(max((n for _, n in prefills), default=0)),
            float(decodes),
            float(lane.decodes.tokens),
            float(sum(n * (2 * computed - n) for computed, n in prefills)),
        )
        at, free, host_s = now, self._free_s, 0.0
        for s, stage in enumerate(self._stages):
            latency = stage.latency
            own_s = latency.host_of_s(len(prefills) + decodes)
            host_s = max(host_s, own_s)
            busy_s = stage.share * (latency.mixed_step_s(*load) - own_s)
            at = free[s] = max(at, free[s]) + busy_s
            at += stage.link_batch_s + stage.link_token_s * (tokens + decodes)
        lane.ends_s = free[-1] = max(at, free[-1]) + host_s
        return True

    def _make_room(self, decodes: DecodeBatch) -> None:
        """Take blocks for the tokens of this turn; the latest admitted lose theirs if some lack."""
        while (need := decodes.blocks_needed(1)) > self._pool.free_blocks:
            victim = next(reversed(decodes.sequences))
            tokens = decodes.remove(victim)
            self._pool.release(tokens)
            self._admitted -= 1
            left = victim.prompt_tokens + victim.output_tokens - tokens - 1
            self._waiting.appendleft(EngineSequence(tokens + 1, left))
        self._pool.take(need)

    def _prefills(self, lane: _Lane) -> list[tuple[int, int]]:
        """Return the parts of prompts for this batch: (tokens computed with it, tokens of the part)."""
        budget = self._limits.max_num_batched_tokens - len(lane.decodes.sequences)
        parts: list[tuple[int, int]] = []
        while budget > 0:
            sequence = self._partial
            if sequence is None:
                if not self._waiting or self._admitted >= self._limits.max_num_seqs:
                    break
                if not self._pool.extend(0, self._waiting[0].prompt_tokens):
                    break
                sequence = self._waiting.popleft()
                self._admitted += 1
            new = min(sequence.prompt_tokens - sequence.computed, budget)
            sequence.computed += new
            budget -= new
            parts.append((sequence.computed, new))
            self._partial = sequence if sequence.computed < sequence.prompt_tokens else None
            if self._partial is None:
                lane.ending.append(sequence)
        return parts

    def _end(self, lane: _Lane) -> int:
        """End a batch; return the number of finished sequences."""
        decodes = lane.decodes
        finished = decodes.take_finished()
        for sequence in finished:
            self._pool.release(decodes.cached(sequence))
        ended = len(finished)
        for sequence in lane.ending:
            if sequence.output_tokens <= 1:
                self._pool.release(sequence.prompt_tokens)
                ended += 1
            else:
                decodes.add(sequence, sequence.prompt_tokens)
        lane.ending.clear()
        self._admitted -= ended
        return ended
