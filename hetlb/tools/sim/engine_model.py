"""One vLLM V1 engine as a synchronous object: continuous batching, paged KV, chunked prefill, preemption.

No clock, no I/O, no randomness. `begin_iteration` decides what the next iteration computes and returns how
long it takes; `end_iteration` returns which sequences got a token and which finished. Arrivals may come at
any time and count from the next beginning on. Same calls, same results. `tests/sim/plain_engine.py` states
the rules of vLLM's scheduler in plain form; a property test holds this module equal to it.

Its parts: `decode_batch` (why an iteration of decodes touches no sequence), `kv_blocks`, `engine_sequence`
(LoRA: of the waiting, the first with an adapter that the batch can hold is next; each adapter loaded for an
iteration makes it `adapter_load_s` longer). A stretch of equal iterations is one object of four numbers
(`begin_run`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from hetlb.balancer.core.latency import LatencyModel
from hetlb.tools.sim.decode_batch import DecodeBatch
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.engine_sequence import EngineSequence, LoadedAdapters, SequenceState
from hetlb.tools.sim.iteration_times import (
    IterationEnd,
    IterationRule,
    IterationRun,
    Prefills,
    growth_s,
    iteration_s,
    uneven_s,
)
from hetlb.tools.sim.kv_blocks import KvBlocks, KvFetches

#: Members of an `Enum` are looked up by a function; these are read in every iteration.
_WAITING: Final = SequenceState.WAITING
_PREFILL: Final = SequenceState.PREFILL
_DECODE: Final = SequenceState.DECODE
_FINISHED: Final = SequenceState.FINISHED


class DelayedView:
    """Delayed view of an engine that schedules asynchronously (`EngineLimits.async_scheduling`).

    vLLM fixes the next batch when the running one starts. At the boundary before that batch,
    sequences that arrived while the previous batch ran are not seen. Slots and blocks of sequences that
    finished with it are still taken. Both are delayed by one iteration.
    """

    __slots__ = ("arriving", "leaving")

    def __init__(self) -> None:
        #: Sequences that arrived while iterations were in flight, with the step of their arrival.
        self.arriving: dict[EngineSequence, int] = {}
        #: Finished sequences, with their tokens in the cache.
        self.leaving: list[tuple[EngineSequence, int]] = []

    def see_arrivals(self, steps: int, waiting: OrderedDict[EngineSequence, None]) -> None:
        """Queue the arrivals from before the last of `steps` steps began."""
        for sequence, step in list(self.arriving.items()):
            if step < steps:
                del self.arriving[sequence]
                waiting[sequence] = None
            else:
                self.arriving[sequence] = 0

    def settle(self, kv: KvBlocks, waiting: OrderedDict[EngineSequence, None]) -> None:
        """Apply all arrivals and ends that are held back."""
        for sequence, tokens in self.leaving:
            kv.release(sequence, tokens)
        self.leaving.clear()
        waiting.update(dict.fromkeys(self.arriving))
        self.arriving.clear()

    def take_latest(self, decoding: dict[EngineSequence, None]) -> tuple[EngineSequence, int] | None:
        """Take the finished sequence that was admitted last; None if a decoding one was admitted later."""
        if not self.leaving:
            return None
        self.leaving.sort(key=lambda each: each[0].admission)
        last = self.leaving[-1][0]
        if decoding and last.admission <= next(reversed(decoding)).admission:
            return None
        return self.leaving.pop()


class EngineModel:
    """One engine: `submit` and `abort` sequences, `begin_*` and `end_iteration` in turn.

    A driver that steps: `begin_iteration`, wait that long, `end_iteration`, again until None. A driver in
    virtual time uses `begin_run` instead. If the engine must see an event inside the stretch, the driver
    `cut`s the stretch to the next iteration boundary: there vLLM would see the event.
    """

    def __init__(
        self,
        latency: LatencyModel,
        limits: EngineLimits,
        rule: IterationRule = IterationRule.TOKEN,
        *,
        prefix_cache: bool = False,
        adapter_load_s: float = 0.0,
    ) -> None:
        self.latency = latency
        self.limits = limits
        self.rule = rule
        self.adapter_load_s = adapter_load_s
        self.kv = KvBlocks(limits, shared=prefix_cache)
        self.adapters = LoadedAdapters(limits.max_loras)
        self.fetches = KvFetches()
        #: Counters since the start; counters of tokens include ended iterations only.
        self.preemptions = 0
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        self._waiting: OrderedDict[EngineSequence, None] = OrderedDict()
        self.decodes = DecodeBatch(self.kv.pool)
        self._delayed = DelayedView()
        self._partial: EngineSequence | None = None  # prefill unfinished: always the latest admitted
        self._completing: list[EngineSequence] = []  # prefills that end with the iteration in flight
        self._preempted: list[EngineSequence] = []  # by the iteration in flight
        #: The iterations begun and not ended; read-only for drivers.
        self.in_flight: IterationRun | None = None
        self._settled = True  # whether the view of the iteration in flight was not a delayed one
        self._short = False  # blocks were short in the batch being scheduled: nothing is admitted
        self._admissions = 0

    # --- state ---

    @property
    def waiting(self) -> int:
        """Number of sequences not admitted. Includes preempted ones and pending KV transfers."""
        fetches = self.fetches
        return len(self._waiting) + len(self._delayed.arriving) + len(fetches.running) + len(fetches.ready)

    @property
    def running(self) -> int:
        """Sequences admitted and not finished."""
        return len(self.decodes.sequences) + len(self._completing) + (self._partial is not None)

    @property
    def idle(self) -> bool:
        """True if there is nothing to do, but for KV transfers to wait for."""
        return not (
            self.decodes.sequences
            or self._waiting
            or self._completing
            or self._partial
            or self._delayed.arriving
            or self.fetches.ready
        )

    @property
    def _empty(self) -> bool:
        """True if the batch that was just scheduled computes nothing."""
        return not (self.decodes.sequences or self._completing or self._partial or self._preempted)

    def kv_used_blocks_at(self, elapsed_s: float) -> int:
        """Return the blocks in use `elapsed_s` seconds after the iterations in flight began (none: now)."""
        stretch, used = self.in_flight, self.kv.pool.used_blocks
        if stretch is None or stretch.steps == 1:
            return used
        begun = min(stretch.steps, stretch.steps_completed(elapsed_s) + 1)
        return used + self.decodes.blocks_needed(begun - 1)

    @property
    def admission_blocked(self) -> bool:
        """True if a sequence submitted now cannot start before the iterations in flight end.

        It waits behind a sequence that cannot be admitted until another finishes, or every slot is taken;
        then an arrival needs no `cut`.
        """
        # With adapters a sequence may be admitted before one that waits for a slot.
        waits = bool(self._waiting) and not self.adapters.used
        return waits or self.running >= self.limits.max_num_seqs

    def generated(self, sequence: EngineSequence) -> int:
        """Return the output tokens of `sequence` from ended iterations."""
        if sequence.state is _DECODE:
            return self.decodes.cached(sequence) - sequence.prompt_tokens + (self.in_flight is None)
        return sequence.generated

    # --- input ---

    def submit(self, sequence: EngineSequence, elapsed_s: float = 0.0) -> None:
        """Put a new sequence at the end of the queue. It fits `limits`: the caller refuses others.

        `elapsed_s`: seconds since the iterations in flight began. Asynchronous scheduling needs it.
        """
        assert sequence.state is SequenceState.NEW, f"expected a new sequence, got {sequence!r}"
        assert self.limits.fits(sequence.prompt_tokens, sequence.output_tokens), (
            f"expected at most {self.limits.max_sequence_tokens} tokens, got {sequence!r}"
        )
        sequence.state = _WAITING
        self.adapters.expect(sequence.adapter)
        self.kv.begin(sequence)
        stretch = self.in_flight
        if self.limits.async_scheduling and (stretch is not None or self.running or self._delayed.leaving):
            self._delayed.arriving[sequence] = 1 if stretch is None else stretch.steps_until(elapsed_s)
        else:
            self._waiting[sequence] = None

    def abort(self, sequence: EngineSequence) -> None:
        """Drop a sequence, submitted or not, and free its blocks at once; one that ended stays ended.

        An iteration in flight keeps its duration. A longer stretch must have been `cut` and ended.
        """
        state = sequence.state
        tokens = 0
        if state is SequenceState.FINISHED or state is SequenceState.ABORTED:
            return
        if sequence in self.fetches.ready or sequence in self.fetches.running:
            self.fetches.drop(sequence)
            tokens = sequence.prompt_tokens
        elif state is SequenceState.WAITING:
            del (self._delayed.arriving if sequence in self._delayed.arriving else self._waiting)[sequence]
        elif state is SequenceState.DECODE:
            assert self.in_flight is None or self.in_flight.steps == 1, (
                "expected an abort at an iteration boundary, got one inside a stretch"
            )
            sequence.generated = self.generated(sequence)
            tokens = self.decodes.remove(sequence)
        elif state is SequenceState.PREFILL:
            tokens = sequence.computed
            if sequence is self._partial:
                self._partial = None
            else:
                self._completing.remove(sequence)
        if state is SequenceState.DECODE or state is SequenceState.PREFILL:
            self.adapters.end(sequence.adapter, self.decodes.step)
        self.kv.release(sequence, tokens, computed=state is not SequenceState.FETCHING)
        sequence.state = SequenceState.ABORTED

    def complete_fetch(self, sequence: EngineSequence, *, loaded: bool = True) -> None:
        """Make a sequence ready for admission after its KV transfer ended.

        Not `loaded`: it failed, the whole prompt is computed (`kv_load_failure_policy: recompute`).
        A longer stretch in flight must be `cut` for it to be seen, as for an arrival.
        """
        del self.fetches.running[sequence]
        if loaded:
            sequence.state = _WAITING
            self.fetches.ready[sequence] = None
        else:
            self.kv.release(sequence, sequence.prompt_tokens, computed=False)
            self._requeue(sequence)

    def release_held(self, sequence: EngineSequence) -> None:
        """Free the KV cache of a finished sequence: it was fetched, or its lease has ended."""
        self.kv.release(sequence, self.fetches.held.pop(sequence))

    # --- iterations ---

    def begin_iteration(self) -> float | None:
        """Begin one iteration: its duration in seconds, or None if there is nothing to do."""
        stretch = self._begin()
        return None if stretch is None else stretch.first_s

    def begin_run(self) -> IterationRun | None:
        """Begin one iteration or, if only decodes run, as many as are alike; None if nothing is to do.

        Alike: no sequence finishes before the last one ends, none can be admitted, and every block needed is
        free. The result is the same as that many calls of `begin_iteration` and `end_iteration`.
        """
        stretch, decodes = self._begin(), self.decodes
        if stretch is None or self._completing or self._partial or self._preempted or not decodes.sequences:
            return stretch
        if not self._settled and self._waiting:
            return stretch  # sequences that the delayed view left out may be admitted next
        steps = decodes.steps_to_finish()
        if steps == 1:
            return stretch
        steps = 1 + decodes.affordable_steps(decodes.alike(steps - 1), self.kv.pool.free_blocks)
        first_s, increment_s = stretch.first_s, stretch.increment_s
        if first_s <= 0 or first_s + (steps - 1) * increment_s <= 0:
            return stretch  # constants that predict no time: step one by one, each is clamped
        self.in_flight = IterationRun(steps, first_s, increment_s, stretch.decodes)
        return self.in_flight

    def cut(self, elapsed_s: float, *, for_arrival: bool = False) -> IterationRun:
        """Shorten the stretch in flight: it ends with the iteration that runs `elapsed_s` after its start.

        `for_arrival`: include the iteration already fixed. The engine sees the arrival after it.
        """
        stretch = self.in_flight
        assert stretch is not None, "expected iterations in flight to cut"
        steps = stretch.steps_until(elapsed_s)
        if for_arrival and self.limits.async_scheduling:
            steps += 1
        if steps < stretch.steps:
            stretch = IterationRun(steps, stretch.first_s, stretch.increment_s, stretch.decodes)
            self.in_flight = stretch
        return stretch

    def end_iteration(self) -> IterationEnd:
        """End the iterations in flight: emit tokens, remove finished sequences and free their blocks."""
        stretch, decodes = self.in_flight, self.decodes
        assert stretch is not None, "expected iterations in flight to end"
        self.in_flight = None
        count = len(decodes.sequences)
        if count != stretch.decodes:  # the others were aborted in the meantime and got nothing
            stretch = IterationRun(stretch.steps, stretch.first_s, stretch.increment_s, count)
        if stretch.steps > 1:
            more = stretch.steps - 1
            self.kv.take(decodes.blocks_needed(more))
            self.kv.peak_blocks = max(self.kv.peak_blocks, self.kv.pool.used_blocks)
            decodes.advance(more)
        if self._delayed.arriving:
            self._delayed.see_arrivals(stretch.steps, self._waiting)
        self.generated_tokens += stretch.steps * count
        finished = decodes.take_finished()
        for sequence in finished:
            self._finish(sequence, decodes.cached(sequence))
        first: list[EngineSequence] = []
        resumed: list[EngineSequence] = []
        if self._completing:
            self._complete_prefills(first, resumed, finished)
        if self._delayed.leaving and self.idle:
            self._delayed.settle(self.kv, self._waiting)
        preempted, self._preempted = self._preempted, []
        return IterationEnd(stretch, first, resumed, finished, preempted)

    def _complete_prefills(
        self, first: list[EngineSequence], resumed: list[EngineSequence], finished: list[EngineSequence]
    ) -> None:
        """Give each prompt of this iteration its token: from now on it decodes, or it is finished."""
        for sequence in self._completing:
            output = sequence.output_tokens
            if output > 0:
                (resumed if sequence.generated else first).append(sequence)
                sequence.generated += 1
                self.generated_tokens += 1
            if sequence.generated == output:
                self._finish(sequence, sequence.computed)
                finished.append(sequence)
            else:
                sequence.state = _DECODE
                self.decodes.add(sequence, sequence.computed)
        self._completing.clear()

    def _finish(self, sequence: EngineSequence, tokens: int) -> None:
        """Free the slot of a finished sequence, and its blocks unless they are held.

        With asynchronous scheduling this happens with the next batch.
        """
        sequence.generated = sequence.output_tokens
        sequence.state = _FINISHED
        if sequence.adapter:
            self.adapters.end(sequence.adapter, self.decodes.step)
        if sequence.held:
            self.fetches.held[sequence] = tokens
            tokens = 0
        if self.limits.async_scheduling:
            self._delayed.leaving.append((sequence, tokens))
        else:
            self.kv.release(sequence, tokens)

    # --- scheduling ---

    def _begin(self) -> IterationRun | None:
        """Schedule the next batch; None if there is nothing that can run."""
        if self.idle:
            return None
        assert self.in_flight is None, "expected the iterations in flight to end first"
        delayed = self._delayed
        settled = self._settled = not (delayed.leaving or delayed.arriving)
        stretch = self._schedule()
        if not settled:
            delayed.settle(self.kv, self._waiting)
        if not (self.decodes.sequences or self._completing):
            if not settled and self._empty:
                self._settled = True  # nothing could be fixed in advance: vLLM schedules anew
                stretch = self._schedule()
            if self.fetches.ready and self._empty:
                stretch = self._schedule()  # blocks in its own prefix cache need no transfer
            if self._empty:
                return None  # transfers must end, or held blocks be released, before anything can run
        self.in_flight = stretch
        return stretch

    def _schedule(self) -> IterationRun:
        """Compose the next batch: decodes first, then prompts within the remaining limits."""
        decodes, latency = self.decodes, self.latency
        self._short = False
        kv, pool = self.kv, self.kv.pool
        if demand := decodes.demand[decodes.step % kv.size]:
            if demand > pool.total_blocks - pool.used_blocks:
                demand = self._make_room(demand)
            kv.take(demand)
        count = decodes.advance(1)
        tokens, increment_s = decodes.tokens, growth_s(latency, count)
        slots = self.limits.max_num_seqs - count - len(self._delayed.leaving)
        if self._partial is not None or ((self._waiting or self.fetches.ready) and slots > 0):
            batch = self._schedule_prefills(self.limits.max_num_batched_tokens - count)
            self.prefilled_tokens += batch.tokens + batch.joining
            seqs, tokens = count + batch.joining, tokens + batch.joining_tokens
            if batch.tokens:
                first_s = iteration_s(
                    latency,
                    self.rule,
                    batch.tokens,
                    batch.prompts,
                    batch.longest,
                    seqs,
                    tokens,
                    batch.attended,
                )
            else:
                longest = max(decodes.longest(), batch.joining_longest) if latency.split_kv is not None else 0
                first_s = latency.step_s(seqs, tokens) + uneven_s(latency, seqs, tokens, longest)
            if batch.loads:
                self.adapters.evict()
                first_s += batch.loads * self.adapter_load_s
        else:
            first_s = latency.step_s(count, tokens)
            if latency.split_kv is not None:
                longest = decodes.longest()
                more_s = uneven_s(latency, count, tokens, longest)
                first_s += more_s
                increment_s += uneven_s(latency, count, tokens + count, longest + 1) - more_s
        if pool.used_blocks > kv.peak_blocks:
            kv.peak_blocks = pool.used_blocks
        return IterationRun(1, first_s if first_s > 0 else 0.0, increment_s, count)

    def _make_room(self, demand: int) -> int:
        """Preempt the latest admitted sequences until the others have their blocks.

        Return the blocks that these need.
        """
        self._short = True
        decodes = self.decodes
        while demand > self.kv.pool.free_blocks:
            if self._partial is not None:
                victim, self._partial = self._partial, None
                tokens = victim.computed
            elif (left := self._delayed.take_latest(decodes.sequences)) is not None:
                self.kv.release(*left)  # its last token is on its way
                continue
            else:
                victim = next(reversed(decodes.sequences))
                demand -= decodes.needs(victim)
                victim.generated = self.generated(victim)
                tokens = decodes.remove(victim)
            self._preempt(victim, tokens, decodes.step)
        return demand

    def _preempt(self, victim: EngineSequence, tokens: int, step: int) -> None:
        """Free the `tokens` tokens of a sequence that ran until `step`, and requeue it."""
        self.kv.release(victim, tokens)
        self.adapters.end(victim.adapter, step)
        victim.preemptions += 1
        self.preemptions += 1
        self._preempted.append(victim)
        self._requeue(victim)

    def _requeue(self, sequence: EngineSequence) -> None:
        """Put a sequence without blocks at the front of the queue."""
        sequence.state = _WAITING
        sequence.computed = 0
        self._waiting[sequence] = None
        self._waiting.move_to_end(sequence, last=False)

    def _schedule_prefills(self, budget: int) -> Prefills:
        """Continue the unfinished prompt, then admit transferred, then waiting sequences."""
        batch = Prefills(budget)
        if self._partial is not None:
            self._continue(self._partial, batch)
        if not self._short:
            batch.slots = self.limits.max_num_seqs - self.running - len(self._delayed.leaving)
            if self.fetches.ready:
                self._admit_ready(batch)
            self._admit_waiting(batch)
        return batch

    def _continue(self, partial: EngineSequence, batch: Prefills) -> None:
        """Compute the next part of the unfinished prompt."""
        done = partial.computed
        need = partial.prompt_tokens + partial.generated - done
        part = min(need, batch.budget)
        if not self.kv.extend(done, done + part):
            # The latest admitted finds no block: it is itself the one to preempt.
            self._short = True
            self._partial = None
            self._preempt(partial, done, self.decodes.step - 1)
            return
        batch.add(part, done)
        partial.computed = done + part
        if part == need:
            self._partial = None
            self._complete(partial)

    def _admit_ready(self, batch: Prefills) -> None:
        """Admit sequences with a transferred KV cache."""
        ready = self.fetches.ready
        while ready and batch.budget > 0 and batch.slots > 0:
            head = next(iter(ready))
            del ready[head]
            whole = head.prompt_tokens
            # With all of the prompt transferred, its last token is computed again: it yields the first one.
            found = min(head.computed, whole - 1)
            part = min(whole - found, batch.budget)
            if found + part < whole:  # from now on blocks are taken as they are needed
                self.kv.trim(whole, found + part)
            self._admit(head, found + part, batch, last=found + part == whole)
            if found + 1 == whole:
                batch.join(whole)
            else:
                batch.add(part, found)

    def _admit_waiting(self, batch: Prefills) -> None:
        """Admit waiting sequences in their order, until one finds no room."""
        waiting, kv, adapters = self._waiting, self.kv, self.adapters
        while waiting and batch.budget > 0 and batch.slots > 0:
            head = next(iter(waiting)) if not adapters.used else adapters.first_admitted(waiting)
            if head is None:
                return
            whole = head.prompt_tokens + head.generated
            found = kv.find(head, whole)
            if found is None:
                return
            del waiting[head]
            part = whole - found
            if head.remote_tokens == 0 and part > batch.budget:
                part = batch.budget
            extended = kv.extend(found, found + part)
            assert extended, "expected blocks for a part of a prompt that fits as a whole"
            if head.remote_tokens:
                self.fetches.begin(head, found)
                continue
            self._admit(head, found + part, batch, last=found + part == whole)
            batch.add(part, found)

    def _admit(self, sequence: EngineSequence, computed: int, batch: Prefills, *, last: bool) -> None:
        """Put a sequence into the batch; `last`: this part completes its prompt."""
        sequence.state = _PREFILL
        batch.slots -= 1
        if sequence.adapter:
            batch.loads += self.adapters.begin(sequence.adapter, self.decodes.step)
        self._admissions = sequence.admission = self._admissions + 1
        sequence.computed = computed
        if last:
            self._complete(sequence)
        else:
            self._partial = sequence

    def _complete(self, sequence: EngineSequence) -> None:
        """Note that the last part of a prompt is in this iteration."""
        self._completing.append(sequence)
        self.kv.publish(sequence)

    def check_integrity(self) -> None:
        """Count everything again, sequence by sequence; assertion if a sum disagrees."""
        fetches, decoding = self.fetches, self.decodes.sequences
        prefills = [*self._completing, *([self._partial] if self._partial is not None else [])]
        transfers = [*fetches.running, *fetches.ready]
        tokens = {sequence: self.decodes.cached(sequence) for sequence in decoding}
        tokens |= {sequence: sequence.computed for sequence in prefills}
        tokens |= {sequence: sequence.prompt_tokens for sequence in transfers}
        self.kv.check_integrity({**tokens, **dict(self._delayed.leaving), **fetches.held})
        self.decodes.check_integrity()
        self.adapters.check_integrity([each.adapter for each in (*decoding, *prefills)])
        assert self.running <= self.limits.max_num_seqs, f"expected max_num_seqs, got {self.running} running"
        assert all(sequence.state is SequenceState.WAITING for sequence in (*self._waiting, *fetches.ready))
        assert all(sequence.state is SequenceState.FETCHING for sequence in fetches.running)
        assert all(sequence.state is SequenceState.DECODE for sequence in decoding)
        assert all(sequence.state is SequenceState.PREFILL for sequence in prefills)
