"""A vLLM engine with pipeline parallelism, stage by stage: throughput of one whose requests all wait.

Nothing is composed here: every batch takes its own time on every stage, stages work on different batches at
the same time, and as many batches are in flight as there are stages. Where one of them holds a prompt and the
others only decode, these wait for it: the bubbles that no composed profile shows.

The rules of scheduling are vLLM's (`tests/sim/plain_engine.py` states them for one stage). A sequence is in
one batch in flight at a time, so it decodes in the batch that its prompt ended in, once a turn; parts of one
prompt may be in several. Where blocks are missing, the latest admitted of the batch is preempted. The
scheduler works on one batch at a time, `host_s` each.

Of a batch that decodes, only what changes is touched, as in `engine`: sequences are kept by the turn at which
they finish, and counted by the turns at which they need a block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetlb.core.latency import LatencyModel
from hetlb.sim.alone import radical_inverse
from hetlb.sim.engine_limits import EngineLimits


@dataclass(frozen=True, slots=True)
class EngineStage:
    """GPUs that hold a share of the layers; `latency` is of the whole model on them.

    `link_token_s` and `link_batch_s` are of the link to the next stage, per token and per batch.
    """

    latency: LatencyModel
    share: float
    link_token_s: float = 0.0
    link_batch_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Request:
    """A sequence; `computed` tokens of `tokens` (prompt and, after a preemption, what it had generated)."""

    tokens: int
    output: int
    computed: int = 0
    offset: int = 0
    last_turn: int = 0


@dataclass(slots=True)
class _Lane:
    """One of the batches in flight, with the sequences that decode in it."""

    demand: list[int]
    turn: int = 0
    decoding: list[_Request] = field(default_factory=list)  # in order of admission
    cached: int = 0
    finish: dict[int, list[_Request]] = field(default_factory=dict)
    ending: list[_Request] = field(default_factory=list)  # prompts that end in the batch in flight
    ends_s: float = 0.0
    busy: bool = False


class StagedEngine:
    """One engine; `run` serves requests that all wait at the start. `limits` are of a single batch."""

    def __init__(self, stages: Sequence[EngineStage], limits: EngineLimits) -> None:
        self._stages = stages
        self._limits = limits
        self._free_s = [0.0] * (len(stages) + 1)  # of every stage, and of the scheduler
        self._blocks = limits.kv_blocks
        self._admitted = 0
        self._partial: _Request | None = None
        self._waiting: deque[_Request] = deque()
        self._lanes = [_Lane([0] * limits.block_size) for _ in stages]

    def run(self, rows: Sequence[tuple[int, int]], batch: int) -> float:
        """Requests/s from when `batch` of the rows have ended to when nothing waits any more.

        The first `batch` are met at any point of their answers, as in `alone.full_part`; where nothing waits
        by then, the rate is that of the whole run.
        """
        for number, (prompt, output) in enumerate(rows):
            left = max(1, round(output * radical_inverse(number + 1))) if number < batch else max(1, output)
            self._waiting.append(_Request(prompt, left))
        now, finished = 0.0, 0
        begun: tuple[float, int] | None = None
        last = (0.0, 0)
        lanes = deque(self._lanes)
        idle = 0
        while idle < len(lanes):
            lane = lanes[0]
            lanes.rotate(-1)
            if lane.busy:
                now = max(now, lane.ends_s)
                finished += self._end(lane)
            if self._waiting:
                last = (now, len(rows) - len(self._waiting))
                if begun is None and finished >= batch:
                    begun = last
            lane.busy = self._begin(lane, now)
            idle = 0 if lane.busy else idle + 1
        if begun is None or last[0] <= begun[0]:
            return len(rows) / now if now > 0.0 else 0.0
        return (last[1] - begun[1]) / (last[0] - begun[0])

    def _begin(self, lane: _Lane, now: float) -> bool:
        """Schedule a batch and send it through the stages; False where there is nothing to do."""
        lane.turn += 1
        self._make_room(lane)
        prefills = self._prefills(lane)
        decodes = len(lane.decoding)
        if not prefills and not decodes:
            return False
        lane.cached += decodes
        tokens = sum(n for _, n in prefills)
        load = (
            float(tokens),
            float(len(prefills)),
            float(max((n for _, n in prefills), default=0)),
            float(decodes),
            float(lane.cached),
            float(sum(n * (2 * computed - n) for computed, n in prefills)),
        )
        at, free, host_s = now, self._free_s, 0.0
        for s, stage in enumerate(self._stages):
            latency = stage.latency
            own_s = latency.host_of_s(len(prefills) + decodes)
            host_s = max(host_s, own_s)
            busy_s = stage.share * (latency.iteration_s(*load) - own_s)
            at = free[s] = max(at, free[s]) + busy_s
            at += stage.link_batch_s + stage.link_token_s * (tokens + decodes)
        lane.ends_s = free[-1] = max(at, free[-1]) + host_s
        return True

    def _make_room(self, lane: _Lane) -> None:
        """Blocks for the tokens that decode this turn; the latest admitted lose theirs where some lack."""
        size = self._limits.block_size
        while (need := lane.demand[(lane.turn - 1) % size]) > self._blocks:
            victim = lane.decoding.pop()
            tokens = lane.turn - 1 - victim.offset
            lane.demand[victim.offset % size] -= 1
            lane.cached -= tokens
            last = victim.last_turn
            lane.finish[last].remove(victim)
            self._blocks += self._blocks_of(tokens)
            self._admitted -= 1
            left = last - lane.turn + 1
            self._waiting.appendleft(_Request(tokens + 1, left))
        self._blocks -= need

    def _prefills(self, lane: _Lane) -> list[tuple[int, int]]:
        """Parts of prompts for this batch: (tokens computed with it, tokens of the part)."""
        limits = self._limits
        budget = limits.max_num_batched_tokens - len(lane.decoding)
        parts: list[tuple[int, int]] = []
        while budget > 0:
            request = self._partial
            if request is None:
                if not self._waiting or self._admitted >= limits.max_num_seqs:
                    break
                if self._blocks_of(self._waiting[0].tokens) > self._blocks:
                    break
                request = self._waiting.popleft()
                self._admitted += 1
                self._blocks -= self._blocks_of(request.tokens)
            new = min(request.tokens - request.computed, budget)
            request.computed += new
            budget -= new
            parts.append((request.computed, new))
            self._partial = request if request.computed < request.tokens else None
            if self._partial is None:
                lane.ending.append(request)
        return parts

    def _end(self, lane: _Lane) -> int:
        """Tokens of a batch are out; how many sequences finished."""
        size, turn = self._limits.block_size, lane.turn
        ended = 0
        for request in lane.finish.pop(turn, ()):
            lane.decoding.remove(request)
            tokens = turn - request.offset
            lane.demand[request.offset % size] -= 1
            lane.cached -= tokens
            self._blocks += self._blocks_of(tokens)
            ended += 1
        for request in lane.ending:
            if request.output <= 1:
                self._blocks += self._blocks_of(request.tokens)
                ended += 1
                continue
            # At the end of turn t it has `t - offset` tokens in the cache, and needs a block when that is
            # one more than a whole number of them.
            request.offset = turn - request.tokens
            request.last_turn = turn + request.output - 1
            lane.demand[request.offset % size] += 1
            lane.cached += request.tokens
            lane.decoding.append(request)
            lane.finish.setdefault(request.last_turn, []).append(request)
        lane.ending.clear()
        self._admitted -= ended
        return ended

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_size)
