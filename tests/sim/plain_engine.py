"""The rules of vLLM's scheduler and block pool, sequence by sequence and block by block.

The statement that `hetlb.tools.sim.engine_model` is held to by property tests: slow, nothing derived or
bucketed.
Written from vLLM 0.32, `v1/core/sched/scheduler.py`, `v1/core/block_pool.py` and `v1/engine/core.py`:

* Running sequences first, in order of admission: each decodes one token, an unfinished prompt takes what is
  left of the `max_num_batched_tokens` budget. Where a block is missing, the latest admitted is preempted: its
  blocks are freed, it goes to the front of the waiting queue, prompt and generated tokens are computed again.
* Then, unless a sequence was preempted in this batch, first come, first served, while `max_num_seqs`, the
  budget and the blocks allow. A sequence is admitted only if its whole prompt fits the free blocks
  (`scheduler_reserve_full_isl`); blocks are taken for the tokens of this batch only.
* The batch that completes a prefill yields a token. The last token of a sequence is never written to the
  cache: P prompt and O output tokens hold P + O - 1 tokens at most.
* Prefix caching: a full block is known by its content and all before it. A sequence finds as many blocks from
  its beginning on as are known without a gap, but never its last token. Blocks without a user wait in a
  queue; new ones are taken from its front and forget what they held. A sequence frees its blocks from its
  end on: full ones to the end of the queue, partly filled ones to its front.
* Asynchronous scheduling: batch k+1 is fixed when batch k starts. It sees the arrivals until then; sequences
  that finish with batch k are not in it, but hold their slot and blocks. If nothing can be fixed, the next
  batch is scheduled when batch k has ended.
* Disaggregated prefill (`_connector_finished`, `WAITING_FOR_REMOTE_KVS`): blocks of a finished prefill stay
  allocated until they were fetched. A sequence whose KV cache comes from another engine gets the blocks of
  its prompt when its turn in the queue comes, and then waits outside the batch for the transfer. When that
  has ended, it is admitted before all that wait; at least its last token is computed, which costs what a
  decode costs. Preempted, it is computed like any other.
* LoRA: a batch holds sequences of at most `max_loras` adapters; a waiting one of another adapter is passed
  over and keeps its place. An adapter in no slot is loaded before the batch, which takes that much longer, in
  place of the one that was in a batch longest ago (of several the first by name: vLLM's order is a set's).

Of two blocks with the same content only the first is found. Left out: speculative decoding, pipeline
parallelism, sliding windows, priorities, LoRA with transferred KV caches.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from hetlb.balancer.core.latency import LatencyModel
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.iteration_times import IterationRule, iteration_s, uneven_s


@dataclass(eq=False)
class PlainSequence:
    """One sequence. `content` names its tokens, prompt and output; by default they are like no other's.

    The KV cache of the first `remote` prompt tokens comes from another engine; `held` keeps the blocks when
    it has finished.
    """

    number: int
    prompt: int
    output: int
    content: list[Hashable] | None = None
    remote: int = 0
    held: bool = False
    adapter: str = ""
    generated: int = 0
    computed: int = 0
    #: Output tokens that batches in flight will yield.
    expected: int = 0
    decodes: bool = False
    blocks: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and of the answer so far, the next one included."""
        return self.prompt + self.generated + self.expected

    @property
    def done(self) -> bool:
        """True if no further batch is needed."""
        return self.computed >= self.prompt and self.generated + self.expected >= self.output

    def key(self, end: int) -> Hashable:
        """The content of the first `end` tokens."""
        if self.content is None:
            return self.number, end
        return tuple(self.content[:end])


@dataclass
class Scheduled:
    """A sequence in a batch, its tokens computed, whether it decodes, and whether it yields a token."""

    sequence: PlainSequence
    tokens: int
    decodes: bool
    completes: bool
    joins: bool = False  # computes the last token of a transferred prompt


@dataclass
class PlainBatch:
    """One batch: its sequences, and sequences preempted for it whose last token is not on its way."""

    scheduled: list[Scheduled]
    preempted: list[PlainSequence]
    duration_s: float
    used_blocks: int


@dataclass
class PlainOutcome:
    """Result of a batch: the numbers of the sequences that got a token, and of the finished ones."""

    tokens: list[int]
    finished: list[int]


class PlainEngine:
    """One engine. `begin` starts a batch, `end` ends it; arrivals and aborts come in between or during it."""

    def __init__(
        self,
        latency: LatencyModel,
        limits: EngineLimits,
        rule: IterationRule = IterationRule.TOKEN,
        adapter_load_s: float = 0.0,
    ) -> None:
        self.latency = latency
        self.adapter_load_s = adapter_load_s
        self.limits = limits
        self.rule = rule
        self.waiting: deque[PlainSequence] = deque()
        self.fetching: list[PlainSequence] = []
        self.ready: deque[PlainSequence] = deque()
        self.finished_held: list[PlainSequence] = []
        self.running: list[PlainSequence] = []
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(limits.kv_blocks))
        self.users = [0] * limits.kv_blocks
        self.held: dict[int, Hashable] = {}  # block -> content
        self.known: dict[Hashable, int] = {}  # content -> block
        self.batch: PlainBatch | None = None
        self.fixed: PlainBatch | None = None
        self.found_tokens = 0
        self.loaded: dict[str, int] = {}  # adapter -> the last batch that it was in
        self.batches = 0
        self.loads = 0

    @property
    def used(self) -> int:
        """Blocks in use."""
        return self.limits.kv_blocks - len(self.free)

    def submit(self, sequence: PlainSequence) -> None:
        """Put a sequence at the end of the queue."""
        self.waiting.append(sequence)

    def abort(self, number: int) -> None:
        """Drop a sequence and free its blocks."""
        self.waiting = deque(each for each in self.waiting if each.number != number)
        for sequence in [each for each in (*self.fetching, *self.ready) if each.number == number]:
            (self.fetching if sequence in self.fetching else self.ready).remove(sequence)
            self._free(sequence)
        for sequence in [each for each in self.running if each.number == number]:
            self.running.remove(sequence)
            self._free(sequence)
        for batch in (self.batch, self.fixed):
            if batch is not None:
                batch.scheduled = [each for each in batch.scheduled if each.sequence.number != number]

    def fetched(self, number: int) -> None:
        """The KV transfer of a sequence has ended."""
        sequence = next(each for each in self.fetching if each.number == number)
        self.fetching.remove(sequence)
        self.ready.append(sequence)

    def release(self, number: int) -> None:
        """The KV cache of a finished sequence was fetched."""
        sequence = next(each for each in self.finished_held if each.number == number)
        self.finished_held.remove(sequence)
        self._free(sequence)

    def begin(self) -> PlainBatch | None:
        """Start a batch; None if idle."""
        assert self.batch is None, "expected the batch before to have ended"
        batch, self.fixed = self.fixed, None
        if batch is None:
            batch = self._schedule()
        if batch is None:
            return None
        self.batch = batch
        if self.limits.async_scheduling:
            self.fixed = self._schedule()
        return batch

    def end(self) -> PlainOutcome:
        """End the batch that runs."""
        assert self.batch is not None, "expected a batch that runs"
        outcome = PlainOutcome([], [])
        for each in self.batch.scheduled:
            sequence = each.sequence
            if not each.completes:
                continue
            if sequence.output:
                sequence.expected -= 1
                sequence.generated += 1
                outcome.tokens.append(sequence.number)
            if sequence.generated >= sequence.output:
                outcome.finished.append(sequence.number)
                if sequence in self.running:
                    self.running.remove(sequence)
                    if sequence.held:
                        self.finished_held.append(sequence)
                    else:
                        self._free(sequence)
                else:  # preempted while its last token was on its way
                    self.waiting.remove(sequence)
        self.batch = None
        return outcome

    # --- scheduling ---

    def _schedule(self) -> PlainBatch | None:
        scheduled: list[Scheduled] = []
        preempted: list[PlainSequence] = []
        budget, room_made = self._continue(scheduled, preempted)
        if not room_made:
            self._admit(scheduled, budget)
        return self._batch(scheduled, preempted) if scheduled or preempted else None

    def _continue(self, scheduled: list[Scheduled], preempted: list[PlainSequence]) -> tuple[int, bool]:
        """Schedule what runs already; returns the tokens left, and whether blocks had to be taken back."""
        budget = self.limits.max_num_batched_tokens
        room_made = False
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            if sequence.done:
                index += 1  # it ends with the batch that runs
                continue
            new = min(sequence.tokens - sequence.computed, budget)
            while not (allocated := self._allocate(sequence, new)):
                victim = self.running.pop()
                room_made = True
                if not victim.done:
                    preempted.append(victim)
                self._free(victim)
                victim.computed = 0
                victim.decodes = False
                self.waiting.appendleft(victim)
                if victim is sequence:
                    break
            if not allocated:
                break
            scheduled.append(self._scheduled(sequence, new))
            budget -= new
            index += 1
        return budget, room_made

    def _admit(self, scheduled: list[Scheduled], budget: int) -> None:
        """Admit transferred, then waiting sequences."""
        while self.ready and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            sequence = self.ready.popleft()
            sequence.computed = min(sequence.computed, sequence.prompt - 1)
            new = min(sequence.tokens - sequence.computed, budget)
            kept = self._blocks_for(sequence.computed + new)
            for block in reversed(sequence.blocks[kept:]):  # taken again as they are needed
                self.users[block] = 0
                self.free[block] = None
                self.free.move_to_end(block, last=False)
            del sequence.blocks[kept:]
            self.running.append(sequence)
            scheduled.append(self._scheduled(sequence, new))
            scheduled[-1].joins = sequence.computed == sequence.prompt - 1
            budget -= new
        passed: list[PlainSequence] = []
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            adapters = {each.sequence.adapter for each in scheduled} - {""}
            if len(adapters | {sequence.adapter} - {""}) > self.limits.max_loras:
                passed.append(self.waiting.popleft())
                continue
            found = self._find(sequence)
            new = min(sequence.tokens - len(found) * self.limits.block_size, budget)
            if not self._fits(sequence, found):
                break
            self._use(sequence, found)
            if sequence.remote:
                self._fetch(sequence)
                continue
            allocated = self._allocate(sequence, new)
            assert allocated, "expected blocks for a part of a prompt that fits as a whole"
            self.waiting.popleft()
            self.running.append(sequence)
            scheduled.append(self._scheduled(sequence, new))
            budget -= new
        self.waiting.extendleft(reversed(passed))

    def _fetch(self, sequence: PlainSequence) -> None:
        """Allocate blocks for a KV transfer and wait for it."""
        self.waiting.popleft()
        remote, sequence.remote = max(sequence.remote, sequence.computed), 0
        allocated = self._allocate(sequence, sequence.prompt - sequence.computed)
        assert allocated, "expected blocks for a prompt that fits as a whole"
        sequence.computed = remote
        self.fetching.append(sequence)

    def _scheduled(self, sequence: PlainSequence, new: int) -> Scheduled:
        return Scheduled(sequence, new, sequence.decodes, sequence.computed + new == sequence.tokens)

    def _batch(self, scheduled: list[Scheduled], preempted: list[PlainSequence]) -> PlainBatch:
        """Its duration, and its sequences as they will be when it has run."""
        decodes = [each.sequence for each in scheduled if each.decodes or each.joins]
        prefills = [(each.sequence, each.tokens) for each in scheduled if not (each.decodes or each.joins)]
        duration_s = iteration_s(
            self.latency,
            self.rule,
            sum(new for _, new in prefills),
            len(prefills),
            max((new for _, new in prefills), default=0),
            len(decodes),
            sum(sequence.computed + 1 for sequence in decodes),
            sum(new * (new + 2 * sequence.computed) for sequence, new in prefills),
        )
        if decodes and not prefills:
            contexts = [sequence.computed + 1 for sequence in decodes]
            duration_s += uneven_s(self.latency, len(decodes), sum(contexts), max(contexts))
        duration_s += self._load({each.sequence.adapter for each in scheduled} - {""}) * self.adapter_load_s
        batch = PlainBatch(scheduled, preempted, duration_s, self.used)
        for each in scheduled:
            sequence = each.sequence
            sequence.computed += each.tokens
            if each.completes:
                sequence.decodes = True
                sequence.expected += 1 if sequence.output else 0
            self._publish(sequence)
        return batch

    def _load(self, adapters: set[str]) -> int:
        """Load the adapters of a batch into slots; returns how many were in none."""
        self.batches += 1
        new = len(adapters - self.loaded.keys())
        self.loads += new
        self.loaded.update(dict.fromkeys(adapters, self.batches))
        while len(self.loaded) > self.limits.max_loras:
            idle = [(used, name) for name, used in self.loaded.items() if name not in adapters]
            del self.loaded[min(idle)[1]]
        return new

    # --- blocks ---

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def _find(self, sequence: PlainSequence) -> list[int]:
        """The blocks that hold the beginning of a sequence."""
        size = self.limits.block_size
        found: list[int] = []
        if self.limits.enable_prefix_caching:
            for end in range(size, sequence.tokens, size):
                block = self.known.get(sequence.key(end))
                if block is None:
                    break
                found.append(block)
        return found

    def _fits(self, sequence: PlainSequence, found: list[int]) -> bool:
        """True if the whole sequence fits; blocks found that have no user are among the free ones."""
        unused = sum(not self.users[block] for block in found)
        return self._blocks_for(sequence.tokens) - len(found) + unused <= len(self.free)

    def _use(self, sequence: PlainSequence, found: list[int]) -> None:
        for block in found:
            if not self.users[block]:
                del self.free[block]
            self.users[block] += 1
        sequence.blocks = list(found)
        sequence.computed = len(found) * self.limits.block_size
        self.found_tokens += sequence.computed

    def _allocate(self, sequence: PlainSequence, new: int) -> bool:
        need = self._blocks_for(sequence.computed + new) - len(sequence.blocks)
        if need > len(self.free):
            return False
        for _ in range(need):
            block, _ = self.free.popitem(last=False)
            content = self.held.pop(block, None)
            if content is not None and self.known.get(content) == block:
                del self.known[content]
            self.users[block] = 1
            sequence.blocks.append(block)
        return True

    def _publish(self, sequence: PlainSequence) -> None:
        """Make full blocks available to other sequences."""
        for index in range(sequence.computed // self.limits.block_size):
            content = sequence.key((index + 1) * self.limits.block_size)
            self.held[sequence.blocks[index]] = content
            self.known.setdefault(content, sequence.blocks[index])

    def _free(self, sequence: PlainSequence) -> None:
        for block in reversed(sequence.blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free[block] = None
                if block not in self.held:
                    self.free.move_to_end(block, last=False)
        sequence.blocks = []
