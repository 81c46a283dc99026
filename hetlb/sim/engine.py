"""One vLLM V1 engine as a synchronous object: continuous batching, paged KV, chunked prefill, preemption.

No clock, no I/O, no randomness. `begin_iteration` decides what the next iteration computes and returns how
long it takes; `end_iteration` returns which sequences got a token and which finished. Arrivals may come at
any time and count from the next beginning on. Same calls, same results. `hetlb.sim.plain_engine` states the
rules of vLLM's scheduler in plain form; a property test holds this module equal to it.

Cost: an iteration of decodes does not touch the sequences. Every decoding sequence gains one token per
iteration, so one step counter stands for all of them: a sequence keeps the difference between the
counter and its tokens in the cache (`_offset`), sequences are bucketed by the step at which they finish,
and counted by `_offset % block_size`, which gives the steps at which they need a block. A stretch of such
iterations is one object of four numbers (`begin_run`).

Asynchronous scheduling (`EngineLimits.async_scheduling`): vLLM fixes the next batch when the running one
starts. Seen from the boundary at which that batch begins, this is a delayed view: sequences that arrived
while the previous batch ran are not seen, and places and blocks of sequences that finished with it are
still taken. `_arriving` and `_leaving` hold both back for one iteration.

Own blocks (`EngineLimits.enable_prefix_caching` without a `PrefixCache`): nothing is shared, but a preempted
sequence finds its own blocks again unless they were evicted. Free blocks are a queue: full blocks go to its
end, partly filled ones to its front, and it is taken from the front. `_queued` counts the full blocks ever
put at its end, so it less the free blocks is the position of the first one, where no partly filled ones are
before it; `_head` is the largest such position seen. The position at which a sequence's blocks were put
decides how many of them are left.

Disaggregated prefill: a sequence with `held` keeps its blocks when it has finished, until `release_held` (the
KV that another engine has not fetched yet). One with `remote_tokens` takes blocks for its prompt, leaves the
queue and waits for the transfer; the driver takes it from `take_fetches` and calls `complete_fetch`. Then it
is admitted before all that wait and computes what was not transferred, at least its last token. That one
token costs what a decode costs.

LoRA (`Sequence.adapter`, `hetlb.sim.adapters`): of the waiting, the first whose adapter the batch can hold is
next; an iteration takes `adapter_load_s` longer for each adapter that is loaded for it.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, KeysView
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

from mypy_extensions import mypyc_attr

from hetlb.core.adapters import DEFAULT_SLOTS
from hetlb.core.latency import IterationRule
from hetlb.core.pickle_by_fields import PickleByFields
from hetlb.core.types import Capacity
from hetlb.sim.adapters import LoadedAdapters
from hetlb.sim.block_pool import BlockPool, blocks_for
from hetlb.sim.prefix import PrefixCache, PrefixContent, TokenSpan

#: vLLM's own defaults (`vllm serve` without the flags), for capacities that do not say.
DEFAULT_BLOCK_SIZE: Final = 16
DEFAULT_MAX_NUM_SEQS: Final = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS: Final = 2048


class IterationTimes(Protocol):
    """Times of an engine's iterations: those of a `LatencyModel`, or measured ones. Seconds."""

    def step_s(self, batch: float, kv_tokens: float) -> float:
        """One decode step."""

    def step_growth_s(self, batch: float) -> float:
        """Growth of a step when each of its sequences has one more token."""

    def iteration_s(
        self,
        prefill_tokens: float,
        prompts: float,
        longest: float,
        batch: float,
        kv_tokens: float,
        attended: float,
        rule: IterationRule,
    ) -> float:
        """An iteration with prompt tokens in it, as `LatencyModel.iteration_s` has it."""


@dataclass(frozen=True, slots=True)
class EngineLimits(PickleByFields):
    """Limits of one engine: tokens, blocks of `block_size` tokens, sequences; and two of its switches.

    `enable_prefix_caching` (on by default): freed blocks keep their content.
    `async_scheduling`: the next batch is fixed when the running one starts.
    `max_loras`: LoRA adapters of a batch.
    """

    kv_cache_tokens: int
    block_size: int = DEFAULT_BLOCK_SIZE
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    enable_prefix_caching: bool = True
    async_scheduling: bool = False
    max_loras: int = DEFAULT_SLOTS

    def __post_init__(self) -> None:
        for name in ("kv_cache_tokens", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_loras"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"engine.{name}: expected at least 1, got {value}")
        if self.kv_blocks < 1:
            raise ValueError(
                f"engine.kv_cache_tokens: expected at least one block of {self.block_size} tokens, "
                f"got {self.kv_cache_tokens}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            # vLLM refuses this too: every running request must be able to decode in every iteration.
            raise ValueError(
                f"engine.max_num_batched_tokens: expected at least engine.max_num_seqs "
                f"({self.max_num_seqs}), got {self.max_num_batched_tokens}"
            )

    @property
    def kv_blocks(self) -> int:
        """Whole blocks of the KV cache."""
        return self.kv_cache_tokens // self.block_size

    @property
    def max_sequence_tokens(self) -> int:
        """The most tokens (prompt + output) one sequence may have: its last token needs no slot."""
        return self.kv_blocks * self.block_size + 1

    @classmethod
    def from_capacity(cls, capacity: Capacity) -> EngineLimits:
        """Limits as a profile or an engine states them, vLLM's defaults for what they leave out.

        Raises `ValueError` naming the key where the KV capacity is missing or figures contradict.
        """
        if capacity.kv_cache_tokens is None:
            raise ValueError(
                "engine.kv_cache_tokens: expected the capacity in tokens, but the key is missing"
            )
        seqs, batched = capacity.max_num_seqs, capacity.max_num_batched_tokens
        if batched is None:
            batched = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, seqs or 0)
        if seqs is None:
            seqs = min(DEFAULT_MAX_NUM_SEQS, batched)
        return cls(
            kv_cache_tokens=capacity.kv_cache_tokens,
            block_size=capacity.block_size or DEFAULT_BLOCK_SIZE,
            max_num_seqs=seqs,
            max_num_batched_tokens=batched,
            enable_prefix_caching=capacity.enable_prefix_caching is not False,
            async_scheduling=capacity.async_scheduling is True,
            max_loras=capacity.max_loras or DEFAULT_SLOTS,
        )


class SequenceState(StrEnum):
    """State of a sequence. `PREFILL` and `DECODE` are what vLLM counts as running.

    `FETCHING`: blocks are allocated, the KV cache of its prompt comes from another engine.
    """

    NEW = "new"
    WAITING = "waiting"
    FETCHING = "fetching"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    ABORTED = "aborted"


#: Members of an `Enum` are looked up by a function; these are read in every iteration.
_WAITING: Final = SequenceState.WAITING
_PREFILL: Final = SequenceState.PREFILL
_DECODE: Final = SequenceState.DECODE
_FINISHED: Final = SequenceState.FINISHED


@mypyc_attr(allow_interpreted_subclasses=True)
class Sequence:
    """One sequence: a prompt and as many output tokens as it will have. `tag` is the driver's own.

    `output_tokens` is when the model would stop; 0 is a prompt that is only read (an embedding).
    `pieces` and `answer` name the contents for an engine with a prefix cache (`hetlb.sim.prefix`).
    The KV cache of the first `remote_tokens` prompt tokens comes from another engine. `held`: the blocks stay
    allocated when it has finished, until `EngineModel.release_held`. `adapter`: its LoRA adapter, or "".
    `state` and `preemptions` are read-only for drivers. Drivers may subclass it to hang data on it.
    """

    __slots__ = (
        "_admission",
        "_computed",
        "_content",
        "_generated",
        "_kept",
        "_kept_at",
        "_offset",
        "adapter",
        "answer",
        "cached_tokens",
        "fetch_tokens",
        "held",
        "output_tokens",
        "pieces",
        "preemptions",
        "prompt_tokens",
        "remote_tokens",
        "state",
        "tag",
    )

    def __init__(
        self,
        prompt_tokens: int,
        output_tokens: int,
        tag: Any = None,
        *,
        pieces: tuple[TokenSpan, ...] = (),
        answer: Hashable | None = None,
        remote_tokens: int = 0,
        held: bool = False,
        adapter: str = "",
    ) -> None:
        if prompt_tokens < 1:
            raise ValueError(f"prompt_tokens: expected at least 1, got {prompt_tokens}")
        if output_tokens < 0:
            raise ValueError(f"output_tokens: expected 0 or more, got {output_tokens}")
        if not 0 <= remote_tokens <= prompt_tokens:
            raise ValueError(f"remote_tokens: expected 0 to {prompt_tokens}, got {remote_tokens}")
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.tag = tag
        self.pieces = pieces
        self.answer = answer
        self.state = SequenceState.NEW
        self.preemptions = 0
        #: Tokens found in the prefix cache when it was first admitted, None without such a cache or before.
        self.cached_tokens: int | None = None
        #: Prompt tokens whose KV cache is still to be fetched; 0 once that is done or given up.
        self.remote_tokens = remote_tokens
        #: Tokens to transfer: those of `remote_tokens` that the engine's own prefix cache lacks.
        self.fetch_tokens = 0
        self.held = held
        self.adapter = adapter
        self._admission = 0  # its number among all admissions
        self._computed = 0  # tokens in the cache, while in PREFILL
        self._generated = 0  # output tokens, while not in DECODE
        self._offset = 0  # step counter minus tokens in the cache, while in DECODE
        self._kept = 0  # full blocks that were put into the queue of free blocks at the preemption
        self._kept_at = 0  # and where
        self._content: PrefixContent | None = None  # in an engine with a prefix cache

    def __repr__(self) -> str:
        return f"Sequence({self.prompt_tokens}+{self.output_tokens}, {self.state}, tag={self.tag!r})"


@mypyc_attr(acyclic=True)
class IterationRun:
    """`steps` iterations one after the other. Step j (from 0) takes `first_s + j * increment_s` seconds.

    `decodes` sequences get one token at the end of every step. A stretch of one step may hold prefill
    work too; a longer one never does. Never changed: a shorter one takes its place.
    """

    __slots__ = ("decodes", "first_s", "increment_s", "steps")

    def __init__(self, steps: int, first_s: float, increment_s: float, decodes: int) -> None:
        self.steps = steps
        self.first_s = first_s
        self.increment_s = increment_s
        self.decodes = decodes

    def __repr__(self) -> str:
        return f"IterationRun({self.steps}, {self.first_s}, {self.increment_s}, {self.decodes})"

    def elapsed_s(self, steps: int) -> float:
        """Seconds from the start to the end of the first `steps` steps."""
        return steps * self.first_s + self.increment_s * (steps * (steps - 1) / 2)

    @property
    def duration_s(self) -> float:
        """Seconds that the whole stretch takes."""
        return self.elapsed_s(self.steps)

    def boundaries_s(self, start_s: float) -> list[float]:
        """The time of every step's end, if the stretch began at `start_s`."""
        return [start_s + self.elapsed_s(step) for step in range(1, self.steps + 1)]

    def steps_until(self, elapsed_s: float) -> int:
        """The first step, counted from 1, that ends at `elapsed_s` or later; the last one if none does."""
        first, increment = self.first_s, self.increment_s
        if elapsed_s <= first or self.steps == 1:
            return 1
        # Root of elapsed_s(m) = elapsed_s, in the form that does not cancel for small increments.
        slope = first - increment / 2
        square = slope * slope + 2 * increment * elapsed_s
        if square < 0 or (denominator := slope + math.sqrt(square)) <= 0:
            return self.steps
        root = 2 * elapsed_s / denominator
        steps = self.steps if root >= self.steps else max(1, math.ceil(root))
        # The root is rounded, the boundaries are what `elapsed_s` says.
        while steps > 1 and self.elapsed_s(steps - 1) >= elapsed_s:
            steps -= 1
        while steps < self.steps and self.elapsed_s(steps) < elapsed_s:
            steps += 1
        return steps

    def steps_completed(self, elapsed_s: float) -> int:
        """Number of steps that have ended by `elapsed_s`."""
        steps = self.steps_until(elapsed_s)
        return steps if self.elapsed_s(steps) <= elapsed_s else steps - 1


class Ended:
    """Results of the iterations that just ended.

    In each of its steps `stretch.decodes` sequences got a token by decoding, and after the last one
    every sequence in `EngineModel.decoding` and every one in `finished` (with output) has got one.
    `first` got their very first token, `resumed` their next one after a preemption: both by the prefill
    that ended here, at the end. `finished` are complete. `preempted` lost their place when it began.
    """

    __slots__ = ("finished", "first", "preempted", "resumed", "stretch")

    def __init__(
        self,
        stretch: IterationRun,
        first: tuple[Sequence, ...],
        resumed: tuple[Sequence, ...],
        finished: tuple[Sequence, ...],
        preempted: tuple[Sequence, ...],
    ) -> None:
        self.stretch = stretch
        self.first = first
        self.resumed = resumed
        self.finished = finished
        self.preempted = preempted


class EngineModel:
    """One engine: `submit` and `abort` sequences, `begin_*` and `end_iteration` in turn.

    A driver that steps: `begin_iteration`, wait that long, `end_iteration`, again until None. A driver in
    virtual time uses `begin_run` instead and, where something happens inside the stretch that the
    engine must see, `cut`s it to the boundary at which the engine would see it.
    """

    __slots__ = (
        "_adapters",
        "_admissions",
        "_arriving",
        "_completing",
        "_decode_tokens",
        "_decoding",
        "_demand",
        "_fetches",
        "_fetching",
        "_finish",
        "_finish_steps",
        "_head",
        "_held",
        "_joining",
        "_joining_tokens",
        "_leaving",
        "_loads",
        "_partial",
        "_preempted",
        "_prefixes",
        "_queued",
        "_ready",
        "_room_made",
        "_settled",
        "_step",
        "_stretch",
        "_waiting",
        "adapter_load_s",
        "generated_tokens",
        "kv_peak_blocks",
        "latency",
        "limits",
        "pool",
        "preemptions",
        "prefilled_tokens",
        "prefix_hit_tokens",
        "rule",
    )

    def __init__(
        self,
        latency: IterationTimes,
        limits: EngineLimits,
        rule: IterationRule = IterationRule.TOKEN,
        *,
        prefix_cache: bool = False,
        adapter_load_s: float = 0.0,
    ) -> None:
        self.latency = latency
        self.adapter_load_s = adapter_load_s
        self.limits = limits
        self.rule = rule
        self.pool = BlockPool.of_tokens(limits.kv_cache_tokens, limits.block_size)
        self._prefixes = PrefixCache(self.pool) if prefix_cache else None
        #: None until a sequence has an adapter; those loaded for the batch being scheduled.
        self._adapters: LoadedAdapters | None = None
        self._loads = 0
        #: Counters since the start; `generated_tokens` and `prefilled_tokens` count ended iterations,
        #: `prefix_hit_tokens` what was found in the prefix cache.
        self.preemptions = 0
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        self.prefix_hit_tokens = 0
        #: The most blocks that were in use at once.
        self.kv_peak_blocks = 0
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()
        self._decoding: dict[Sequence, None] = {}  # in order of admission
        self._partial: Sequence | None = None  # prefill unfinished: always the latest admitted
        self._completing: list[Sequence] = []  # prefills that end with the iteration in flight
        self._preempted: tuple[Sequence, ...] = ()
        self._stretch: IterationRun | None = None  # in flight
        self._step = 0  # iterations begun (of a longer stretch in flight: the first)
        self._decode_tokens = 0  # tokens in the cache of all decoding sequences, the step begun included
        self._finish: dict[int, dict[Sequence, None]] = {}  # step -> who finishes at its end
        self._finish_steps: list[int] = []  # heap over the keys; entries of emptied buckets go stale
        #: With asynchronous scheduling: sequences that came while iterations were in flight, with the step of
        #: the stretch in which they came; and finished ones, with their tokens in the cache.
        self._arriving: dict[Sequence, int] = {}
        self._leaving: list[tuple[Sequence, int]] = []
        #: KV transfers: begun and not taken by the driver, all that run, complete and not admitted; finished
        #: sequences whose KV cache is held, with its tokens.
        self._fetches: list[Sequence] = []
        self._fetching: dict[Sequence, None] = {}
        self._ready: dict[Sequence, None] = {}
        self._held: dict[Sequence, int] = {}
        self._joining = 0  # of the batch being scheduled: transferred prompts that compute one token
        self._joining_tokens = 0  # and their tokens in the cache
        self._settled = True  # whether the view of the iteration in flight was not a delayed one
        self._queued = self.pool.total_blocks
        self._head = 0
        self._admissions = 0
        self._room_made = False
        self._demand = [0] * limits.block_size  # decoding sequences by `_offset % block_size`

    # --- what can be seen ---

    @property
    def waiting(self) -> int:
        """Sequences not admitted: the preempted and those whose KV cache is being fetched included."""
        return len(self._waiting) + len(self._arriving) + len(self._fetching) + len(self._ready)

    @property
    def caches_prefixes(self) -> bool:
        """True if a prompt finds the blocks of earlier prompts that begin alike."""
        return self._prefixes is not None

    @property
    def adapter_loads(self) -> int:
        """LoRA adapters loaded since the start."""
        return 0 if self._adapters is None else self._adapters.loads

    @property
    def running_adapters(self) -> tuple[str, ...] | None:
        """LoRA adapters of the running sequences, None if no sequence ever had one."""
        return None if self._adapters is None else self._adapters.running

    @property
    def running(self) -> int:
        """Sequences admitted and not finished."""
        return len(self._decoding) + len(self._completing) + (self._partial is not None)

    @property
    def idle(self) -> bool:
        """True if there is nothing to do, but for KV transfers to wait for."""
        return not (
            self._decoding
            or self._waiting
            or self._completing
            or self._partial
            or self._arriving
            or self._ready
        )

    @property
    def _busy(self) -> bool:
        """True if a batch runs or, with asynchronous scheduling, is fixed."""
        return bool(
            self._stretch is not None or self._decoding or self._completing or self._partial or self._leaving
        )

    @property
    def _empty(self) -> bool:
        """True if the batch that was just scheduled computes nothing."""
        return not (self._decoding or self._completing or self._partial or self._preempted)

    @property
    def in_flight(self) -> IterationRun | None:
        """The iterations begun and not ended."""
        return self._stretch

    @property
    def kv_used_blocks(self) -> int:
        """Blocks in use; of a stretch in flight, after its first step."""
        return self.pool.used_blocks

    @property
    def kv_total_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self.pool.total_blocks

    @property
    def kv_usage(self) -> float:
        """Fraction of the blocks in use, 0..1: vLLM's `kv_cache_usage_perc`."""
        return self.pool.usage

    def kv_used_blocks_at(self, elapsed_s: float) -> int:
        """Blocks in use `elapsed_s` seconds after the iterations in flight began; now, without any."""
        stretch = self._stretch
        if stretch is None or stretch.steps == 1:
            return self.pool.used_blocks
        begun = min(stretch.steps, stretch.steps_completed(elapsed_s) + 1)
        return self.pool.used_blocks + self._block_demand(self._step, begun - 1)

    @property
    def decoding(self) -> KeysView[Sequence]:
        """The sequences that decode, in order of admission (a live view)."""
        return self._decoding.keys()

    @property
    def admission_blocked(self) -> bool:
        """True if a sequence submitted now cannot start before the iterations in flight end.

        It waits behind a sequence that cannot be admitted until another finishes, or every place is taken;
        then an arrival needs no `cut`.
        """
        # With adapters a sequence may be admitted before one that waits for a slot.
        waits = bool(self._waiting) and self._adapters is None
        return waits or self.running >= self.limits.max_num_seqs

    def generated(self, sequence: Sequence) -> int:
        """Output tokens that `sequence` has got from iterations that ended."""
        if sequence.state is _DECODE:
            cached = self._step - sequence._offset
            return cached - sequence.prompt_tokens + (self._stretch is None)
        return sequence._generated

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """True if the whole KV cache is enough for such a sequence."""
        return prompt_tokens + max(output_tokens, 1) <= self.limits.max_sequence_tokens

    # --- what comes in ---

    def submit(self, sequence: Sequence, elapsed_s: float = 0.0) -> None:
        """Put a new sequence at the end of the queue. The caller has refused what never `fits`.

        `elapsed_s`: of the iterations in flight; asynchronous scheduling must know in which one it came.
        """
        assert sequence.state is SequenceState.NEW, f"expected a new sequence, got {sequence!r}"
        assert self.fits(sequence.prompt_tokens, sequence.output_tokens), (
            f"expected at most {self.limits.max_sequence_tokens} tokens, got {sequence!r}"
        )
        sequence.state = _WAITING
        if sequence.adapter and self._adapters is None:
            self._adapters = LoadedAdapters(self.limits.max_loras)
        if self._prefixes is not None:
            sequence._content = PrefixContent(sequence.prompt_tokens, sequence.pieces, sequence.answer)
        if self.limits.async_scheduling and self._busy:
            stretch = self._stretch
            self._arriving[sequence] = 1 if stretch is None else stretch.steps_until(elapsed_s)
        else:
            self._waiting[sequence] = None

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence, submitted or not, and free its blocks at once; one that has ended stays ended.

        An iteration in flight keeps its duration. A longer stretch must have been `cut` and ended.
        """
        state = sequence.state
        if state is SequenceState.WAITING:
            if sequence in self._arriving:
                del self._arriving[sequence]
            elif sequence in self._ready:
                del self._ready[sequence]
                self._release(sequence, sequence.prompt_tokens)
            else:
                del self._waiting[sequence]
        elif state is SequenceState.DECODE:
            assert self._stretch is None or self._stretch.steps == 1, (
                "expected an abort at an iteration boundary, got one inside a stretch"
            )
            sequence._generated = self.generated(sequence)
            del self._decoding[sequence]
            self._leave_decode(sequence)
            self._end_adapter(sequence, self._step)
        elif state is SequenceState.PREFILL:
            self._release(sequence, sequence._computed)
            self._end_adapter(sequence, self._step)
            if sequence is self._partial:
                self._partial = None
            else:
                self._completing.remove(sequence)
        elif state is SequenceState.FETCHING:
            del self._fetching[sequence]
            if sequence in self._fetches:
                self._fetches.remove(sequence)
            self._release(sequence, sequence.prompt_tokens)
        elif state is not SequenceState.NEW:
            return
        sequence.state = SequenceState.ABORTED

    # --- KV transfers ---

    def take_fetches(self) -> list[Sequence]:
        """Sequences whose transfer (of `fetch_tokens` tokens) began since the last call."""
        fetches, self._fetches = self._fetches, []
        return fetches

    def complete_fetch(self, sequence: Sequence, *, loaded: bool = True) -> None:
        """The transfer has ended: the sequence can be admitted.

        Not `loaded`: it failed, the whole prompt is computed (`kv_load_failure_policy: recompute`).
        A longer stretch in flight must be `cut` for it to be seen, as for an arrival.
        """
        del self._fetching[sequence]
        sequence.state = _WAITING
        if loaded:
            self._ready[sequence] = None
            return
        self._release(sequence, sequence.prompt_tokens)
        sequence._computed = 0
        self._waiting[sequence] = None
        self._waiting.move_to_end(sequence, last=False)

    def release_held(self, sequence: Sequence) -> None:
        """Free the KV cache of a finished sequence: it was fetched, or its lease has ended."""
        self._release(sequence, self._held.pop(sequence))

    @property
    def held_blocks(self) -> int:
        """Blocks of finished sequences that other engines have not fetched yet."""
        size = self.limits.block_size
        return sum(blocks_for(tokens, size) for tokens in self._held.values())

    # --- iterations ---

    def begin_iteration(self) -> float | None:
        """Begin one iteration: its duration in seconds, or None if there is nothing to do."""
        if self.idle:
            return None
        stretch = self._begin()
        return None if stretch is None else stretch.first_s

    def begin_run(self, until_s: float = math.inf) -> IterationRun | None:
        """Begin one iteration or, where only decodes run, as many as are alike; None if nothing is to do.

        Alike: no sequence finishes before the last one ends, none can be admitted, and every block needed is
        free. It ends with the first iteration that ends at or after `until_s` seconds from now. The
        result is the same as that many calls of `begin_iteration` and `end_iteration`.
        """
        if self.idle:
            return None
        stretch = self._begin()
        if stretch is None or self._completing or self._partial or self._preempted or not self._decoding:
            return stretch
        if not self._settled and self._waiting:
            return stretch  # what the delayed view left out may be admitted next
        steps = self._next_finish() - self._step + 1
        if steps == 1 or until_s <= stretch.first_s:
            return stretch
        steps = 1 + self._affordable_steps(steps - 1)
        first_s, increment_s, decodes = stretch.first_s, stretch.increment_s, stretch.decodes
        if first_s <= 0 or first_s + (steps - 1) * increment_s <= 0:
            return stretch  # constants that predict no time: step, where each is clamped
        stretch = IterationRun(steps, first_s, increment_s, decodes)
        if until_s < math.inf:
            stretch = IterationRun(stretch.steps_until(until_s), first_s, increment_s, decodes)
        self._stretch = stretch
        return stretch

    def cut(self, elapsed_s: float, *, for_arrival: bool = False) -> IterationRun:
        """Shorten the stretch in flight: it ends with the iteration that runs `elapsed_s` after its start.

        `for_arrival`: and with the one that is fixed already, after which a sequence that came then is seen.
        """
        stretch = self._stretch
        assert stretch is not None, "expected iterations in flight to cut"
        steps = stretch.steps_until(elapsed_s)
        if for_arrival and self.limits.async_scheduling:
            steps += 1
        if steps < stretch.steps:
            stretch = IterationRun(steps, stretch.first_s, stretch.increment_s, stretch.decodes)
            self._stretch = stretch
        return stretch

    def end_iteration(self) -> Ended:
        """End what was begun: tokens are out, finished sequences have left and freed their blocks."""
        stretch = self._stretch
        assert stretch is not None, "expected iterations in flight to end"
        self._stretch = None
        decoding = self._decoding
        decodes = len(decoding)
        if decodes != stretch.decodes:  # the others were aborted in the meantime and got nothing
            stretch = IterationRun(stretch.steps, stretch.first_s, stretch.increment_s, decodes)
        if stretch.steps > 1:
            more = stretch.steps - 1
            self.pool.take(self._block_demand(self._step, more))
            self._evict()
            self.kv_peak_blocks = max(self.kv_peak_blocks, self.pool.used_blocks)
            self._step += more
            self._decode_tokens += more * decodes
        if self._arriving:
            self._see_arrivals(stretch.steps)
        self.generated_tokens += stretch.steps * decodes
        finished: list[Sequence] = []
        leaving = self._finish.pop(self._step, None)
        if leaving is not None:
            self._finish_decodes(leaving)
            finished += leaving
        first: tuple[Sequence, ...] = ()
        resumed: tuple[Sequence, ...] = ()
        if self._completing:
            first, resumed = self._complete_prefills(finished)
        if self._leaving and self.idle:
            self._settle()
        preempted, self._preempted = self._preempted, ()
        return Ended(stretch, first, resumed, tuple(finished), preempted)

    def _finish_decodes(self, leaving: Iterable[Sequence]) -> None:
        """Take decoding sequences that have all their tokens out of the books."""
        decoding, demand, step, size = self._decoding, self._demand, self._step, self.limits.block_size
        prefixes, delayed = self._prefixes, self.limits.async_scheduling
        cached = blocks = whole = 0
        for sequence in leaving:
            del decoding[sequence]
            offset = sequence._offset
            tokens = step - offset
            cached += tokens
            demand[offset % size] -= 1
            if sequence.held:
                self._held[sequence], tokens = tokens, 0
            if delayed:
                self._leaving.append((sequence, tokens))
            elif prefixes is not None:
                self._release(sequence, tokens)
            else:
                blocks += -(-tokens // size)
                whole += tokens // size
            sequence._generated = sequence.output_tokens
            sequence.state = _FINISHED
            self._end_adapter(sequence, step)
        self._decode_tokens -= cached
        if blocks:
            self._give_back(blocks, whole)

    def _see_arrivals(self, steps: int) -> None:
        """Queue what came before the last of so many steps began: it was seen when the next was fixed."""
        for sequence, step in list(self._arriving.items()):
            if step < steps:
                del self._arriving[sequence]
                self._waiting[sequence] = None
            else:
                self._arriving[sequence] = 0

    def _settle(self) -> None:
        """See what the delayed view of asynchronous scheduling has held back."""
        leaving = self._leaving
        if leaving and self._prefixes is None:
            size = self.limits.block_size
            blocks = whole = 0
            for _, tokens in leaving:
                blocks += -(-tokens // size)
                whole += tokens // size
            self._give_back(blocks, whole)
        else:
            for sequence, tokens in leaving:
                self._release(sequence, tokens)
        leaving.clear()
        if self._arriving:
            self._waiting.update(dict.fromkeys(self._arriving))
            self._arriving.clear()

    def _begin(self) -> IterationRun | None:
        assert self._stretch is None, "expected the iterations in flight to end first"
        settled = self._settled = not (self._leaving or self._arriving)
        stretch = self._schedule()
        if not settled:
            self._settle()
        if not (self._decoding or self._completing):
            if not settled and self._empty:
                self._settled = True  # nothing could be fixed in advance: vLLM schedules anew
                stretch = self._schedule()
            if self._ready and self._empty:
                stretch = self._schedule()  # what its own prefix cache held whole needs no transfer
            if self._empty:
                return None  # transfers must end, or held blocks be released, before anything can run
        self._stretch = stretch
        return stretch

    def _schedule(self) -> IterationRun:
        decoding = self._decoding
        self._room_made = False
        self._loads = 0
        demand = self._demand[self._step % self.limits.block_size]
        if demand:
            if demand > self.pool.free_blocks:
                demand = self._make_room(demand)
            self.pool.take(demand)
            self._evict()
        self._step += 1
        decodes = len(decoding)
        self._decode_tokens += decodes
        tokens = prompts = longest = attended = self._joining = self._joining_tokens = 0
        places = self.limits.max_num_seqs - decodes - len(self._leaving)
        if self._partial is not None or ((self._waiting or self._ready) and places > 0):
            tokens, prompts, longest, attended = self._schedule_prefills(
                self.limits.max_num_batched_tokens - decodes
            )
            self.prefilled_tokens += tokens + self._joining
        if self.pool.used_blocks > self.kv_peak_blocks:
            self.kv_peak_blocks = self.pool.used_blocks
        latency = self.latency
        batch, cached = decodes + self._joining, self._decode_tokens + self._joining_tokens
        if tokens:
            first_s = latency.iteration_s(tokens, prompts, longest, batch, cached, attended, self.rule)
        else:
            first_s = latency.step_s(batch, cached)
        if self._loads and self._adapters is not None:
            self._adapters.evict()
            first_s += self._loads * self.adapter_load_s
        increment_s = latency.step_growth_s(decodes)
        return IterationRun(1, first_s if first_s > 0 else 0.0, increment_s, decodes)

    def _make_room(self, demand: int) -> int:
        """Preempt the latest until the decodes that stay have their blocks; returns what those need."""
        preempted: list[Sequence] = []
        self._room_made = True
        pool, size, residue = self.pool, self.limits.block_size, self._step % self.limits.block_size
        while demand > pool.free_blocks:
            if self._partial is not None:
                victim, self._partial = self._partial, None
                self._keep(victim, victim._computed)
                self._release(victim, victim._computed)
            elif self._leaving and self._last_leaves():
                self._release(*self._leaving.pop())  # its last token is on its way
                continue
            else:
                victim, _ = self._decoding.popitem()
                victim._generated = self.generated(victim)
                demand -= victim._offset % size == residue
                self._keep(victim, self._step - victim._offset)
                self._leave_decode(victim)
            self._preempt(victim, self._step)
            preempted.append(victim)
        self._preempted = tuple(preempted)
        return demand

    def _last_leaves(self) -> bool:
        """True if the latest admitted is one that has finished, and put it at the end of those."""
        self._leaving.sort(key=lambda each: each[0]._admission)
        last = self._leaving[-1][0]
        return not self._decoding or last._admission > next(reversed(self._decoding))._admission

    def _keep(self, victim: Sequence, tokens: int) -> None:
        """Note where in the queue of free blocks those of a victim go."""
        victim._kept, victim._kept_at = tokens // self.limits.block_size, self._queued

    def _find_own(self, sequence: Sequence, need: int) -> int:
        """Take out of the queue what is left of a preempted sequence's blocks; returns their tokens."""
        size = self.limits.block_size
        # The end of a sequence is put into the queue before its beginning, and evicted before it.
        self._note_head()
        left = sequence._kept_at + sequence._kept - self._head
        found = min(left, sequence._kept, (need - 1) // size)
        sequence._kept = 0
        if found <= 0:
            return 0
        self._queued -= found
        for other in self._waiting:
            if not other.preemptions:
                break
            if other._kept_at > sequence._kept_at:
                other._kept_at -= found
        self.prefix_hit_tokens += found * size
        return found * size

    def _preempt(self, victim: Sequence, step: int) -> None:
        """Send a sequence that ran until `step`, whose blocks are free already, to the front of the queue."""
        self._end_adapter(victim, step)
        victim.state = _WAITING
        victim.preemptions += 1
        victim._computed = 0
        self.preemptions += 1
        self._waiting[victim] = None
        self._waiting.move_to_end(victim, last=False)

    def _schedule_prefills(self, budget: int) -> tuple[int, int, int, int]:
        """Continue the unfinished prompt, then admit. Returns (tokens, prompts, longest part, attended).

        `attended` is as `LatencyModel.mixed_step_s` has it: a later part of a prompt attends to those before.
        """
        tokens = prompts = longest = attended = 0
        pool, size, prefixes = self.pool, self.limits.block_size, self._prefixes
        partial = self._partial
        if partial is not None:
            need = partial.prompt_tokens + partial._generated - partial._computed
            part = min(need, budget)
            if pool.extend(partial._computed, partial._computed + part):
                self._evict()
                attended = part * (part + 2 * partial._computed)
                partial._computed += part
                budget -= part
                tokens, prompts, longest = part, 1, part
                if part == need:
                    self._partial = None
                    self._scheduled_whole(partial)
            else:
                # The latest admitted finds no block: it is itself the one to preempt.
                self._partial = None
                self._keep(partial, partial._computed)
                self._release(partial, partial._computed)
                self._preempt(partial, self._step - 1)
                self._preempted = (*self._preempted, partial)
        if self._preempted or self._room_made:
            return tokens, prompts, longest, attended
        waiting, ready = self._waiting, self._ready
        places = self.limits.max_num_seqs - self.running - len(self._leaving)
        while ready and budget > 0 and places > 0:
            head = next(iter(ready))
            whole = head.prompt_tokens
            del ready[head]
            # With all of the prompt transferred, its last token is computed again: it yields the first one.
            found = min(head._computed, whole - 1)
            part = min(whole - found, budget)
            if found + part < whole:  # from now on blocks are taken as they are needed
                self._note_head()
                pool.release(whole)
                pool.reserve(found + part)
            self._admit(head, found + part, last=found + part == whole)
            budget -= part
            places -= 1
            if found + 1 == whole:
                self._joining += 1
                self._joining_tokens += whole
                continue
            tokens += part
            prompts += 1
            longest = max(longest, part)
            attended += part * (part + 2 * found)
        adapters = self._adapters
        while waiting and budget > 0 and places > 0:
            head = next(iter(waiting))
            if adapters is not None:
                admitted = self._first_admitted(adapters)
                if admitted is None:
                    break
                head = admitted
            if head.remote_tokens:
                if not self._begin_fetch(head):
                    break
                continue
            need = head.prompt_tokens + head._generated
            if prefixes is None:
                if -(-need // size) > pool.total_blocks - pool.used_blocks:
                    break
                found = self._find_own(head, need) if head._kept and self.limits.enable_prefix_caching else 0
                if found:
                    need -= found
                    pool.extend(0, found)
            else:
                kept = self._use_prefix(prefixes, head, need)
                if kept is None:
                    break
                found = kept
                need -= found
            part = need if need < budget else budget
            extended = pool.extend(found, found + part)
            assert extended, "expected blocks for a part of a prompt that fits as a whole"
            if prefixes is not None:
                prefixes.shrink()
            del waiting[head]
            self._admit(head, found + part, last=part == need)
            budget -= part
            places -= 1
            tokens += part
            prompts += 1
            if part > longest:
                longest = part
            attended += part * (part + 2 * found)
        return tokens, prompts, longest, attended

    def _first_admitted(self, adapters: LoadedAdapters) -> Sequence | None:
        """The first waiting sequence whose adapter the batch can hold."""
        for each in self._waiting:
            if adapters.admits(each.adapter):
                return each
        return None

    def _admit(self, sequence: Sequence, computed: int, *, last: bool) -> None:
        """Put a sequence into the batch; `last`: this part completes its prompt."""
        sequence.state = _PREFILL
        if self._adapters is not None:
            self._loads += self._adapters.begin(sequence.adapter, self._step)
        self._admissions = sequence._admission = self._admissions + 1
        sequence._computed = computed
        if last:
            self._scheduled_whole(sequence)
        else:
            self._partial = sequence

    def _end_adapter(self, sequence: Sequence, step: int) -> None:
        """A sequence that ran until `step` leaves the batch."""
        if self._adapters is not None:
            self._adapters.end(sequence.adapter, step)

    def _begin_fetch(self, sequence: Sequence) -> bool:
        """Allocate the blocks of a prompt whose KV cache comes from elsewhere; False if too few are free."""
        need, found = sequence.prompt_tokens, 0
        if self._prefixes is not None:
            kept = self._use_prefix(self._prefixes, sequence, need)
            if kept is None:
                return False
            found = kept
        elif blocks_for(need, self.limits.block_size) > self.pool.free_blocks:
            return False
        del self._waiting[sequence]
        remote, sequence.remote_tokens = max(found, sequence.remote_tokens), 0
        extended = self.pool.extend(found, need)
        assert extended, "expected blocks for a prompt that fits as a whole"
        self._evict()
        sequence._computed, sequence.fetch_tokens = remote, remote - found
        if remote == found:
            self._ready[sequence] = None  # all is here already: computed next time
            return True
        sequence.state = SequenceState.FETCHING
        self._fetching[sequence] = None
        self._fetches.append(sequence)
        return True

    def _use_prefix(self, prefixes: PrefixCache, sequence: Sequence, need: int) -> int | None:
        """Take what is kept of the beginning of a prompt: its tokens, or None if the rest finds no room."""
        content = sequence._content
        assert content is not None, "expected a sequence submitted to an engine with a prefix cache"
        nodes, found = prefixes.find(content, need)
        if prefixes.cost(nodes, found, need) > self.pool.free_blocks:
            return None
        prefixes.use(content, nodes, found)
        tokens = found * self.limits.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = tokens
        self.prefix_hit_tokens += tokens
        return tokens

    def _scheduled_whole(self, sequence: Sequence) -> None:
        """The last part of a prompt is in this iteration."""
        self._completing.append(sequence)
        if self._prefixes is not None and sequence._content is not None:
            self._prefixes.publish(sequence._content)

    def _release(self, sequence: Sequence, tokens: int) -> None:
        """Give back the blocks of a sequence that has `tokens` tokens in the cache."""
        if tokens == 0:
            return
        if self._prefixes is None:
            self._note_head()
            self.pool.release(tokens)
            self._queued += tokens // self.limits.block_size
        else:
            assert sequence._content is not None, "expected a sequence with a content"
            self._prefixes.release(sequence._content, tokens)

    def _give_back(self, blocks: int, whole: int) -> None:
        """Put blocks, `whole` of them full, into the queue of free ones."""
        self._note_head()
        self.pool.give_back(blocks)
        self._queued += whole

    def _note_head(self) -> None:
        """Note how far the queue of free blocks was used: before blocks are put into it, or looked for."""
        pool = self.pool
        head = self._queued - pool.total_blocks + pool.used_blocks
        if head > self._head:
            self._head = head

    def _evict(self) -> None:
        if self._prefixes is not None:
            self._prefixes.shrink()

    def _complete_prefills(
        self, finished: list[Sequence]
    ) -> tuple[tuple[Sequence, ...], tuple[Sequence, ...]]:
        """The prompts of this iteration are read: each yields a token and decodes from now on."""
        first: list[Sequence] = []
        resumed: list[Sequence] = []
        step = self._step
        for sequence in self._completing:
            output = sequence.output_tokens
            if output > 0:
                (resumed if sequence._generated else first).append(sequence)
                sequence._generated += 1
                self.generated_tokens += 1
            if sequence._generated == output:
                self._leave(sequence, sequence._computed)
                self._end_adapter(sequence, step)
                sequence.state = _FINISHED
                finished.append(sequence)
                continue
            cached = sequence._computed
            sequence._offset = offset = step - cached
            sequence.state = _DECODE
            self._decoding[sequence] = None
            self._decode_tokens += cached
            self._demand[offset % self.limits.block_size] += 1
            last = offset + sequence.prompt_tokens + output - 1
            bucket = self._finish.get(last)
            if bucket is None:
                self._finish[last] = {sequence: None}
                heapq.heappush(self._finish_steps, last)
            else:
                bucket[sequence] = None
        self._completing.clear()
        return tuple(first), tuple(resumed)

    def _leave_decode(self, sequence: Sequence) -> None:
        """Take a sequence that does not finish out of the books of the decoding ones."""
        last = sequence._offset + sequence.prompt_tokens + sequence.output_tokens - 1
        bucket = self._finish[last]
        del bucket[sequence]
        if not bucket:
            del self._finish[last]
        self._release(sequence, self._forget_decode(sequence))

    def _forget_decode(self, sequence: Sequence) -> int:
        """Take a sequence out of the sums over the decoding ones; returns its tokens in the cache."""
        cached = self._step - sequence._offset
        self._decode_tokens -= cached
        self._demand[sequence._offset % self.limits.block_size] -= 1
        return cached

    def _leave(self, sequence: Sequence, tokens: int) -> None:
        """Free the place and (unless held) the blocks of a finished sequence: now, or with the next batch."""
        if sequence.held:
            self._held[sequence] = tokens
            tokens = 0
        if self.limits.async_scheduling:
            self._leaving.append((sequence, tokens))
        else:
            self._release(sequence, tokens)

    # --- stretches ---

    def _next_finish(self) -> int:
        """The step at whose end the next decoding sequence finishes."""
        steps = self._finish_steps
        while steps[0] not in self._finish:
            heapq.heappop(steps)
        return steps[0]

    def _block_demand(self, step: int, steps: int) -> int:
        """Blocks that the decoding sequences need in the `steps` steps after `step`."""
        size = self.limits.block_size
        cycles, rest = divmod(steps, size)
        blocks = cycles * len(self._decoding)
        start = step % size
        end = start + rest
        if end <= size:
            return blocks + sum(self._demand[start:end])
        return blocks + sum(self._demand[start:]) + sum(self._demand[: end - size])

    def _affordable_steps(self, steps: int) -> int:
        """Number of the next `steps` steps that find every block they need free."""
        free = self.pool.free_blocks
        if self._block_demand(self._step, steps) <= free:
            return steps
        size = self.limits.block_size
        cycles, free = divmod(free, len(self._decoding))
        affordable = cycles * size
        start = self._step % size
        while (free := free - self._demand[(start + affordable) % size]) >= 0:
            affordable += 1
        return affordable

    # --- for tests ---

    def check_integrity(self) -> None:
        """Count everything again, sequence by sequence; assertion where a sum disagrees."""
        size = self.limits.block_size

        def held(tokens: int, sequence: Sequence) -> int:
            shared = sequence._content.shared_blocks if sequence._content is not None else 0
            return blocks_for(tokens, size) - shared

        cached = {sequence: self._step - sequence._offset for sequence in self._decoding}
        prefills = [*self._completing, *([self._partial] if self._partial is not None else [])]
        transfers = [*self._fetching, *self._ready]
        tokens = {
            **cached,
            **{sequence: sequence._computed for sequence in prefills},
            **{sequence: sequence.prompt_tokens for sequence in transfers},
            **dict(self._leaving),
            **self._held,
        }
        blocks = sum(held(count, sequence) for sequence, count in tokens.items())
        if self._prefixes is not None:
            contents = [sequence._content for sequence in tokens if sequence._content is not None]
            blocks += self._prefixes.check_integrity(contents)
        assert self.pool.used_blocks == blocks, f"expected {blocks} used blocks, got {self.pool.used_blocks}"
        assert self._decode_tokens == sum(cached.values()), "expected the sum of the cached tokens"
        assert self.running <= self.limits.max_num_seqs, f"expected max_num_seqs, got {self.running} running"
        if self._adapters is not None:
            self._adapters.check_integrity([each.adapter for each in (*self._decoding, *prefills)])
        demand = [0] * size
        for sequence in self._decoding:
            demand[sequence._offset % size] += 1
        assert demand == self._demand, "expected the block demand counted anew"
        bucketed = {sequence for bucket in self._finish.values() for sequence in bucket}
        assert bucketed == set(self._decoding), "expected every decoding sequence in one finish bucket"
        assert all(sequence.state is SequenceState.WAITING for sequence in (*self._waiting, *self._ready))
        assert all(sequence.state is SequenceState.FETCHING for sequence in self._fetching)
        assert all(sequence.state is SequenceState.DECODE for sequence in self._decoding)
        assert all(sequence.state is SequenceState.PREFILL for sequence in prefills)
