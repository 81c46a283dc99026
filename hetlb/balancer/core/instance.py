"""Belief about one instance: its ledger, its limits, its speed, corrected by evidence.

The ledger holds integers only and is the sum over the live leases at every moment.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final, TypeAlias

from hetlb.balancer.core.account import LEAST_SILENCE_S, STANDS_S, UNKNOWN_SILENCE_S, Account
from hetlb.balancer.core.forecast_errors import ForecastErrors
from hetlb.balancer.core.health import HealthTracker
from hetlb.balancer.core.latency import DEFAULT_LATENCY, LatencyModel
from hetlb.balancer.core.occupancy import SIGNAL_STALE_S, EngineLoad, Occupancy
from hetlb.balancer.core.prefix_index import PrefixIndex, Tree
from hetlb.balancer.core.speed import SpeedTracker
from hetlb.balancer.core.throttle import Throttle
from hetlb.balancer.core.types import (
    AdminState,
    Capacity,
    EngineSample,
    Health,
    InstanceSpec,
    Lease,
    LeaseId,
    Request,
)
from hetlb.errors import ConfigError
from hetlb.extras import option

if TYPE_CHECKING:
    from hetlb.balancer.core.engine_adapters import EngineAdapters
    from hetlb.balancer.core.engine_blocks import EngineBlocks

#: KV capacity of an engine that has not told its own, in tokens.
DEFAULT_KV_CACHE_TOKENS: Final = 131_072
#: vLLM's own default of `max_num_seqs`, which no metric tells.
DEFAULT_MAX_NUM_SEQS: Final = 256
#: vLLM's own default of `max_loras`.
DEFAULT_MAX_LORAS: Final = 1
#: The tokens that an engine works on in one iteration where it has not told: vLLM's default.
DEFAULT_TOKEN_BUDGET: Final = 2048
#: Seconds before an instance with a notice is gone by which nothing runs there any more.
NOTICE_MARGIN_S: Final = 1.5
#: Below this KV use an engine that lets requests wait lacks places, not memory.
KV_ROOM: Final = 0.8
#: Loads of an instance are kept for fewer sequences than this.
_LOADS_KEPT: Final = 1024
#: Sequences that an instance without a profile runs at once at first, and as many more for each first token;
#: twice as many after each `_UNEXPLORED_S` without one. A burst that is bound before a speed is known
#: keeps the pace of the slowest instance.
_UNEXPLORED_SEQUENCES: Final = 2
_UNEXPLORED_S: Final = 10.0
#: A first token later than this many times its forecast and a second more shows that others wait, too.
_LATE: Final = 2.0
#: While requests take every slot that was learnt, this long after it was learnt one more is tried, then two
#: more, four more, ..., until the engine lets requests wait again.
_SLOTS_AGE_S: Final = 5.0
#: Iterations full of prompts after which what still waits lacks a slot.
_ITERATIONS: Final = 2.0
#: Shorter answers say nothing about speed.
_LEAST_STEPS: Final = 4.0
#: Tokens that may have been read of prompts, over those of prompts that were done, for both to tell a speed.
_PARTLY: Final = 1.25
#: No decode step is shorter, in seconds.
LEAST_STEP_S: Final = 1e-5
#: A first byte this late in an answer, as a share of its time, came with the whole of it: not a stream.
_WHOLE: Final = 0.99
#: Of a stream's time, what must have passed in decoding for it to tell how fast.
_DECODING: Final = 0.2


def tokens_of(request: Request) -> int:
    """Tokens of its longest sequence, with the output that the client may ask for."""
    output = 0 if not request.generates else (1 if request.max_tokens is None else request.max_tokens)
    return (request.longest_prompt_tokens or request.prompt_tokens) + output


def _read_by(lease: Lease) -> float:
    """Return the time at which the prompts of a whole answer are taken to have been read."""
    return lease.dispatched_at + lease.forecast_first_s


class ChangeCounter:
    """Number of changes to the parameters of a fleet's instances."""

    def __init__(self) -> None:
        self.count = 0


#: Latency model and tokens per iteration of one engine; slots and KV cache in tokens of all; engines.
Parameters: TypeAlias = tuple[LatencyModel, int, int, int, int]


class Instance:
    """One incarnation of one vLLM server."""

    __slots__ = (
        "_assumed_ns", "_assumed_tokens", "_begun_at", "_begun_sequences", "_begun_steps", "_begun_tokens",
        "_first_tokens", "_loads", "_occupancy", "_reading", "_steps", "_steps_per_s", "_waiting_seen",
        "account", "adapters", "admin", "asleep", "began", "blocks", "capacity", "changes", "engine",
        "engines", "errors", "explored", "finished_kv_tokens", "finished_sequences", "groups",
        "health", "held_tokens", "in_flight", "incarnation", "incoming", "kv_cache_tokens",
        "kv_excess_tokens", "kv_need", "kv_prompt_tokens", "kv_tokens", "latency", "leases", "leaves_at",
        "longest_request_tokens", "max_num_seqs", "name", "nominal", "parameters",
        "parameters_version", "pending_prompt_tokens", "profiled", "promised_tokens",
        "prompt_tokens", "removed", "sample", "sample_at", "sequences", "served", "slots_learnt_at",
        "slots_step", "spec", "speed", "stated_sequences", "throttle", "token_budget", "tree",
        "unread_sequences", "work_ns",
    )  # fmt: skip

    def __init__(
        self,
        spec: InstanceSpec,
        incarnation: int,
        health: HealthTracker,
        now: float,
        changes: ChangeCounter | None = None,
        prefixes: PrefixIndex | None = None,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.incarnation = incarnation
        self.health = health
        self.changes = changes or ChangeCounter()
        #: Its prefix cache; another tree as soon as the cache is gone.
        self.tree = Tree(PrefixIndex() if prefixes is None else prefixes, incarnation)
        #: Content of its cache by its own KV events, None where it publishes none.
        self.blocks: EngineBlocks | None = None
        #: Its LoRA adapters, None where it lists none.
        self.adapters: EngineAdapters | None = None
        self.account = Account(now)
        self.throttle = Throttle(self.account)
        self.admin = AdminState.READY
        #: Time at which it is gone, None without a notice.
        self.leaves_at: float | None = None
        self.removed = False
        #: Start of its process by its own clock (Unix time, s).
        self.began: float | None = None
        #: True if its engine sleeps (vLLM's sleep mode).
        self.asleep = False
        self.profiled = spec.latency is not None
        #: True once it may run as many sequences as it has slots; until then, first tokens so far.
        self.explored = self.profiled
        self._first_tokens = 0
        #: Since when it reads prompts alone, infinite while answers run, and prompt tokens read by then.
        self._begun_at, self._begun_tokens = now, 0
        #: As profiled or, without a profile, the default; and as corrected by what its answers showed.
        self.nominal: LatencyModel = spec.latency or DEFAULT_LATENCY
        self.latency = self.nominal
        #: Instances with equal ones are of one kind.
        self.parameters: Parameters = (self.latency, 0, 0, 0, 1)
        #: None after every change of the ledger or of the parameters.
        self._occupancy: Occupancy | None = None
        #: By the number of sequences, at the parameters of now.
        self._loads: list[EngineLoad | None] = []
        #: Number of changes of the parameters.
        self.parameters_version = 0
        self.speed = SpeedTracker(self.profiled, now)
        #: Decode steps of each engine so far, by the latency model; sequences that decode, and the steps at
        #: which each of them began, in all.
        self._steps = self._begun_steps = self._steps_per_s = 0.0
        self._begun_sequences = 0
        self.errors = ForecastErrors()
        self.capacity = Capacity()
        #: Kind of its engine, "" while unknown.
        self.engine = ""
        #: Data-parallel engines behind its URL: each has `1 / engines` of its sequences and KV cache.
        self.engines = 1
        #: Most tokens (prompt and output) of one sequence, None while unknown.
        self.longest_request_tokens: int | None = None
        #: Sequences that all its engines run at once, tokens its KV cache holds, and those that an iteration
        #: computes at most; defaults while unknown.
        self.max_num_seqs = DEFAULT_MAX_NUM_SEQS
        self.kv_cache_tokens = DEFAULT_KV_CACHE_TOKENS
        self.token_budget = DEFAULT_TOKEN_BUDGET
        self.learn_capacity(spec.capacity)
        self.served: tuple[str, ...] | None = None
        self.sample: EngineSample | None = None
        self.sample_at: float | None = None
        self.leases: dict[LeaseId, Lease] = {}
        #: Leases of decode legs that are booked and not dispatched yet.
        self.incoming: dict[LeaseId, Lease] = {}
        #: Tokens of prompts that it keeps until other instances have fetched them.
        self.held_tokens = 0
        self.work_ns = 0
        #: Parts of a nanosecond and of a token that `assume` adds.
        self._assumed_ns = self._assumed_tokens = 0.0
        #: Tokens of the KV cache that its leases will use (and its holds use), and of them those of prompts;
        #: shared ones once.
        self.kv_tokens = 0
        self.kv_prompt_tokens = 0
        #: Prompts and predicted answers of all sequences, prompts alone, and those still to be computed.
        self.promised_tokens = 0
        self.prompt_tokens = 0
        self.pending_prompt_tokens = 0
        #: Leases of whole answers, the oldest first: no byte shows when their prompts have been read.
        self._reading: deque[Lease] = deque()
        self.in_flight = 0
        self.sequences = 0
        #: Those of requests with targets.
        self.stated_sequences = 0
        #: Those of streams without a token yet.
        self.unread_sequences = 0
        #: Leases of requests of several sequences. Of these, sequences that have ended by the engine's own
        #: count though their requests have not, and what they held of the KV cache.
        self.groups: dict[LeaseId, Lease] = {}
        self.finished_sequences = 0
        self.finished_kv_tokens = 0.0
        #: Excess of the engine's own count of used KV tokens over what is expected from the leases.
        self.kv_excess_tokens = 0.0
        self._waiting_seen = 0
        #: Time at which its metrics showed how many sequences it runs at once.
        self.slots_learnt_at: float | None = None
        #: Next growth of the learnt slots.
        self.slots_step = 1

    # --- limits ---

    @property
    def gives_ids(self) -> bool:
        """True if its engine takes token ids for a prompt and gives those of an answer."""
        return self.engine == "vllm"

    @property
    def unfinished_sequences(self) -> int:
        """Sequences of its leases without those that have ended by the engine's own count."""
        return self.sequences - self.finished_sequences

    @property
    def grown_tokens(self) -> float:
        """Tokens of the answers that have begun, by the latency model: its steps since then."""
        return self._begun_sequences * self._steps - self._begun_steps

    def age(self, lease: Lease) -> float:
        """Return the tokens of each sequence of a lease so far."""
        begun = lease.begun_steps
        return 0.0 if begun is None else self._steps - begun

    @property
    def load(self) -> EngineLoad:
        """Load of each of its engines now."""
        running, loads = self.unfinished_sequences, self._loads
        load = loads[running] if running < len(loads) else None
        if load is None:
            load = EngineLoad(self, loads[running - 1] if 0 < running <= len(loads) else None)
            if running < _LOADS_KEPT:
                while len(loads) <= running:
                    loads.append(None)
                loads[running] = load
        return load

    @property
    def occupancy(self) -> Occupancy:
        """The ledger as scoring reads it."""
        occupancy = self._occupancy
        if occupancy is None:
            occupancy = self._occupancy = Occupancy(self)
        return occupancy

    def seen(self, now: float) -> Occupancy:
        """Return the ledger as scoring reads it at a time."""
        if self._reading and _read_by(self._reading[0]) <= now:
            self._elapsed(now)
        return self.occupancy

    @property
    def kv_utilization(self) -> float:
        """Promised fraction of the KV cache: the paper's u."""
        promised = self.promised_tokens if self.kv_need is None else self.kv_tokens
        return (promised + self._assumed_tokens) / self.kv_cache_tokens

    def needed(self, tokens: float) -> float:
        """Return the tokens of its KV cache that a sequence of `tokens` needs."""
        need = self.kv_need
        return tokens if need is None else need.tokens(tokens)

    @property
    def caches_prefixes(self) -> bool:
        """True if its engine keeps prompts for others: vLLM's default while it has not told."""
        return self.capacity.enable_prefix_caching is not False

    def learn_capacity(self, newer: Capacity) -> None:
        """Take over what the engine says it can hold; figures it does not know stay."""
        capacity = self.capacity = self.capacity.updated(newer)
        self.token_budget = capacity.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET
        self.kv_need = need = capacity.kv_need
        cache, single = capacity.kv_cache_tokens, capacity.kv_tokens_per_request
        longest = (capacity.max_model_len, single, cache)
        if need is not None:
            ahead = self.token_budget * (2 if capacity.async_scheduling else 1)
            cache, single = [
                None if each is None else need.scaled(each, capacity.max_model_len, ahead)
                for each in (cache, single)
            ]
            held = None if cache is None else need.longest(cache if single is None else single)
            longest = (capacity.max_model_len, None if held is None or held == math.inf else int(held), None)
        known = [limit for limit in longest if limit is not None]
        self.longest_request_tokens = min(known) if known else None
        if self.adapters is not None:
            self.adapters.slots = capacity.max_loras or DEFAULT_MAX_LORAS
        engines = capacity.engines or 1
        if capacity.max_num_seqs is not None:
            self.max_num_seqs = capacity.max_num_seqs * engines
        else:
            self.max_num_seqs = self.max_num_seqs * engines // self.engines
        self.engines = self.speed.engines = engines
        self.kv_cache_tokens = cache or DEFAULT_KV_CACHE_TOKENS * engines
        self._update_parameters()

    def update(self, spec: InstanceSpec, now: float) -> None:
        """Take over another profile, capacity or weight. What it is answering teaches nothing about speed."""
        self._elapsed(now)
        self.spec = spec
        self.profiled = spec.latency is not None
        self.explored = self.explored or self.profiled
        self.nominal = self.latency = spec.latency or DEFAULT_LATENCY
        self.speed = SpeedTracker(self.profiled, now)
        self._occupancy = None
        for lease in self.leases.values():
            lease.mark = lease.first_mark = None
        self.learn_capacity(spec.capacity)
        self._update_parameters()

    def _update_parameters(self) -> None:
        slots, cache = self.max_num_seqs, self.kv_cache_tokens
        parameters = (self.latency, self.token_budget, slots, cache, self.engines)
        if parameters != self.parameters:
            self.parameters = parameters
            self._loads.clear()
            self._occupancy = None
            self.parameters_version += 1
            self.changes.count += 1

    # --- state ---

    @property
    def routable(self) -> bool:
        """True if new work may go here at all."""
        if self.removed or self.asleep:
            return False
        return self.admin is AdminState.READY and self.health.state is not Health.EJECTED

    @property
    def models(self) -> tuple[str, ...]:
        """Names that it answers to: by its own list once known, else as configured."""
        if self.served is not None:
            return self.served
        return (self.spec.model,) if self.spec.model else ()

    def learn_models(self, models: tuple[str, ...], adapters: tuple[str, ...]) -> None:
        """Take over what it lists; requests of adapters that run are of its slots from then on."""
        self.served = models
        self.adapters = None
        if not adapters:
            return
        try:
            slots: EngineAdapters = option("adapters").hook(frozenset(adapters))
        except ConfigError:  # an installation without it: they are served, and their loads not counted
            return
        self.adapters = slots
        slots.slots = self.capacity.max_loras or DEFAULT_MAX_LORAS
        for lease in self.leases.values():
            slots.begin(lease.request.model)

    # --- ledger ---

    @property
    def work_s(self) -> float:
        """The paper's W_i: assigned and not yet completed work, in seconds."""
        return (self.work_ns + self._assumed_ns) / 1e9

    def acquire(self, lease: Lease) -> None:
        """Book a lease."""
        assert lease.work_ns >= 0, f"{lease!r} books negative work"
        assert lease.kv_tokens >= lease.kv_prompt_tokens >= 0, f"{lease!r} books negative KV tokens"
        now, speed = lease.dispatched_at, self.speed
        if now > speed.last:
            self._elapsed(now)
        self._occupancy = None
        if not self.unread_sequences and not speed.begun:
            self._begun_at = math.inf if self.leases else now
            self._begun_tokens = speed.prompt_tokens
        self.leases[lease.key] = lease
        self.work_ns += lease.work_ns
        self.kv_tokens += lease.kv_tokens
        self.kv_prompt_tokens += lease.kv_prompt_tokens
        shared = lease.shared
        if shared is not None:
            self.kv_tokens += shared.new_tokens
            self.kv_prompt_tokens += shared.new_tokens
        self.promised_tokens += lease.promised_tokens
        self.prompt_tokens += lease.prompt_tokens
        self.pending_prompt_tokens += lease.unread_tokens
        self.in_flight += 1
        self.sequences += lease.request.sequences
        if lease.request.service.stated:
            self.stated_sequences += lease.request.sequences
        if lease.request.streamed:
            self.unread_sequences += lease.request.sequences
        elif lease.request.generates:
            self._reading.append(lease)
        # Of a whole answer (not a stream) it is not known when it began: its speed shows only if at once.
        if not lease.incoming:
            if self.sequences - self.finished_sequences - len(self.incoming) <= self.max_num_seqs:
                lease.mark = speed.mark()
            if not lease.request.streamed:  # as `_count_from_now`, without a way back from `speed`
                lease.begun_steps = steps = self._steps
                self._begun_steps += lease.request.sequences * steps
                self._begun_sequences += lease.request.sequences
        if lease.request.sequences > 1:
            self.groups[lease.id] = lease
        tree = self.tree
        if tree.unused:
            tree.evict(self.kv_cache_tokens - self.kv_tokens)
        if self.adapters is not None:
            self.adapters.begin(lease.request.model)
        if self.blocks is not None and lease.request.blocks is not None:
            self.blocks.begin(lease.id, lease.request.model, lease.request.blocks)

    def begin(self, lease: Lease, now: float) -> None:
        """Note that the decode leg of a lease is dispatched."""
        if now > self.speed.last:
            self._elapsed(now)
        self._occupancy = None
        del self.incoming[lease.id]
        lease.incoming = False
        lease.dispatched_at = now
        if self.unfinished_sequences - len(self.incoming) <= self.max_num_seqs:
            lease.mark = self.speed.mark()
        if not lease.request.streamed:
            self._reading.append(lease)
            self._count_from_now(lease)

    def keep(self, tokens: int) -> None:
        """Keep so many more tokens of prompts for other instances; less if below 0."""
        self._occupancy = None
        self.held_tokens += tokens
        self.kv_tokens += tokens
        self.kv_prompt_tokens += tokens
        if tokens < 0:
            self.tree.evict(self.kv_cache_tokens - self.kv_tokens)

    def first_token(self, lease: Lease, now: float) -> None:
        """Note that the first byte of an answer came: its prompt has been read. Idempotent."""
        if lease.first_token_at is not None:
            return
        speed = self.speed
        if now > speed.last:
            self._elapsed(now)
        self._read(lease, now)
        if not self.explored:
            self._first_tokens += lease.request.sequences
            self.explored = self.explored_sequences(now) >= self.max_num_seqs
        lease.first_token_at = now
        lease.first_mark = speed.mark()
        if lease.begun_steps is None:
            self._count_from_now(lease)
        if lease.request.streamed:
            self.unread_sequences -= lease.request.sequences

    def _read(self, lease: Lease, now: float) -> None:
        """Note once that its prompts have been read."""
        if lease.unread_tokens:
            least_s = self.latency.step_s(1.0, 0.0)
            self.speed.prefilled(lease.request.sequences, lease.unread_tokens, now, least_s)
            self.pending_prompt_tokens -= lease.unread_tokens
            lease.unread_tokens = 0
        self._occupancy = None

    def _count_from_now(self, lease: Lease) -> None:
        """Count the steps of an answer from those of now: it begins."""
        lease.begun_steps = self._steps
        self._begun_steps += lease.request.sequences * self._steps
        self._begun_sequences += lease.request.sequences

    def release(self, lease: Lease, now: float) -> None:
        """Give back exactly what the lease booked, once."""
        assert not lease.ended, f"{lease!r} was released before"
        assert self.leases.get(lease.key) is lease, f"{lease!r} is not booked on {self.name}"
        del self.leases[lease.key]
        if now > self.speed.last:
            self._elapsed(now)
        if lease.incoming:
            del self.incoming[lease.id]
            lease.incoming = False
        lease.ended = True
        self.account.ended(lease.id)
        self._occupancy = None
        self.work_ns -= lease.work_ns
        self.kv_tokens -= lease.kv_tokens
        self.kv_prompt_tokens -= lease.kv_prompt_tokens
        self.promised_tokens -= lease.promised_tokens
        self.prompt_tokens -= lease.prompt_tokens
        if lease.first_token_at is None:
            self.pending_prompt_tokens -= lease.unread_tokens
            if lease.request.streamed:
                self.unread_sequences -= lease.request.sequences
        reading = self._reading
        while reading and (reading[0].ended or reading[0].first_token_at is not None):
            reading.popleft()
        self.in_flight -= 1
        self.sequences -= lease.request.sequences
        if lease.begun_steps is not None:
            self._begun_steps -= lease.request.sequences * lease.begun_steps
            self._begun_sequences -= lease.request.sequences
            if not self._begun_sequences:
                self._begun_steps = self._steps = 0.0
        if lease.request.service.stated:
            self.stated_sequences -= lease.request.sequences
        if lease.request.sequences > 1:
            del self.groups[lease.id]
            self._take_finished(self.finished_sequences)
        if lease.shared is not None:
            self._let_go(lease)
        if self.adapters is not None:
            self.adapters.end(lease.request.model)
        if self.blocks is not None:
            self.blocks.end(lease.id)
        negative = self.work_ns < 0 or self.promised_tokens < 0 or self.prompt_tokens < 0
        negative = negative or self.kv_prompt_tokens < 0 or self.kv_tokens < self.kv_prompt_tokens
        negative = negative or self.pending_prompt_tokens < 0 or self.in_flight < 0 or self.sequences < 0
        assert not negative, f"the ledger of {self.name} fell below zero when {lease!r} was released"

    def _let_go(self, lease: Lease) -> None:
        """End the use of shared prefixes; what was computed stays in the engine's cache for a while."""
        shared, request = lease.shared, lease.request
        assert shared is not None
        tree = self.tree if shared.node is None else shared.node.tree
        if lease.first_token_at is not None and tree is self.tree and not self.removed:
            if lease.reported_cached_tokens is not None:
                tree.correct(shared, lease.reported_cached_tokens)
            for key, tokens in request.prefix_keys:
                if tokens is None:
                    answer = lease.output_tokens // request.sequences
                    tree.remember(key, request.prompt_tokens + answer, shared.node)
        freed = tree.detach(shared.node)
        self.kv_tokens -= freed
        self.kv_prompt_tokens -= freed
        tree.evict(self.kv_cache_tokens - self.kv_tokens)

    def _elapsed(self, now: float) -> None:
        """Count the steps until now, and tell the speed tracker what decoded, with the tokens so far.

        Of whole answers it is not known when they begin: they count as decoding, and their prompts are read
        when their forecast says so. The prompts of streams without a token take their part of the iterations.
        """
        running, unread = self.unfinished_sequences, self.unread_sequences
        prompts = float(self.prompt_tokens)
        if self.incoming:  # booked and not there yet
            for lease in self.incoming.values():
                running -= lease.request.sequences
                unread -= lease.request.sequences if lease.request.streamed else 0
                prompts -= lease.prompt_tokens
        decoding = max(0, min(running - unread, self.max_num_seqs))
        tokens = 0.0
        if decoding:
            grown = self.grown_tokens / max(self._begun_sequences, decoding)
            tokens = decoding * (prompts / running + grown)
            load = self.load
            step_s = load.step_s + load.token_s * tokens / load.engines
            if unread > 0:
                pending, room = self.pending_prompt_tokens / load.engines, load.budget - load.batch
                step_s += load.prompt_token_s * (pending if pending < room else max(0.0, room))
            self._occupancy = None
            self._steps_per_s = 1.0 / max(step_s, LEAST_STEP_S)
            steps = max(0.0, now - self.speed.last) * self._steps_per_s
            self._steps += steps
            tokens += decoding * steps / 2.0
        self.speed.elapsed(decoding, tokens, now)
        reading = self._reading
        while reading and _read_by(reading[0]) <= now:
            lease = reading.popleft()
            if not lease.ended and not lease.incoming and lease.first_token_at is None:
                self._read(lease, now)

    def _stood(self, since: float, now: float) -> None:
        """Take over that it stood still since then."""
        self._elapsed(now)
        self._steps -= self.speed.stood(since, now) * self._steps_per_s

    def assume(self, *, work_s: float | None = None, kv_utilization: float | None = None) -> None:
        """Set a state without leases, for explanations only."""
        self._occupancy = None
        if work_s is not None:
            self.work_ns = int(work_s * 1e9)
            self._assumed_ns = work_s * 1e9 - self.work_ns
        if kv_utilization is not None:
            tokens = kv_utilization * self.kv_cache_tokens
            self.promised_tokens = int(tokens)
            self._assumed_tokens = tokens - self.promised_tokens
            self.kv_tokens = self.kv_prompt_tokens = self.prompt_tokens = self.promised_tokens

    # --- evidence ---

    def learn_sample(self, sample: EngineSample, now: float) -> None:
        """Take over what a scrape says, unless it lacks a figure of a fresh one before it.

        An engine that lets requests wait while its KV cache has room runs all it can, unless prompts take all
        tokens of its iterations. Two scrapes in a row that say the same are believed.
        """
        last, last_at = self.sample, self.sample_at
        if last is not None and last_at is not None and now - last_at <= SIGNAL_STALE_S:
            pairs = ((sample.running, last.running), (sample.waiting, last.waiting))
            if any(
                new is None and old is not None for new, old in (*pairs, (sample.kv_usage, last.kv_usage))
            ):
                self.learn_capacity(sample.capacity)
                return
        self._occupancy = None
        self.sample = sample
        self.sample_at = now
        self.account.read(sample.generated, now)
        if self.profiled and sample.answered is not None:
            self._count_tokens(sample.answered, now)
        self.learn_capacity(sample.capacity)
        self.engine = sample.engine or self.engine
        if self.adapters is not None and sample.adapters is not None:
            self.adapters.told(sample.adapters)
        if sample.kv_usage is not None:
            expected = (self.kv_tokens + self.kv_prompt_tokens) / 2.0
            self.kv_excess_tokens = max(0.0, sample.kv_usage * self.kv_cache_tokens - expected)
        if self.groups and sample.running is not None and sample.waiting is not None:
            # A group that came since the last scrape may be on its way.
            arrived = sum(
                lease.request.sequences - 1
                for lease in self.groups.values()
                if last_at is not None and lease.dispatched_at <= last_at
            )
            self._take_finished(min(arrived, self.sequences - sample.running - sample.waiting))
        if self.capacity.max_num_seqs is not None:
            return
        self._learn_slots(sample, now)

    def _count_tokens(self, answered: int, now: float) -> None:
        """Compare its own count of tokens with its profile; a plain answer hides when they begin."""
        if now > self.speed.last:
            self._elapsed(now)
        if all(lease.request.streamed for lease in self.leases.values()):
            self.speed.counted(self.nominal, answered, now, self.token_budget)
        else:
            self.speed.pace = 0.0

    def _learn_slots(self, sample: EngineSample, now: float) -> None:
        """Learn how many sequences it runs at once, unless it stands still."""
        if self.account.silent_since is not None:
            self._waiting_seen = 0
            return
        running = sample.running or 0
        fullest = sample.kv_usage if sample.kv_usage_max is None else sample.kv_usage_max
        room = fullest is not None and fullest < KV_ROOM
        full = running if sample.waiting and room and self._waits_for_slot(running, now) else 0
        if running > self.max_num_seqs or (full and full == self._waiting_seen):
            self.max_num_seqs, self.slots_learnt_at, self.slots_step = running, now, 1
            self._update_parameters()
        self._waiting_seen = full

    def _age_slots(self, now: float) -> None:
        """Try more slots than were learnt, some time after that, while all of them are taken."""
        learnt_at = self.slots_learnt_at
        if learnt_at is None or now - learnt_at < _SLOTS_AGE_S or self.capacity.max_num_seqs is not None:
            return
        default = DEFAULT_MAX_NUM_SEQS * self.engines
        if self.max_num_seqs < default and self.unfinished_sequences >= self.max_num_seqs:
            self.max_num_seqs = min(default, self.max_num_seqs + self.slots_step)
            self.slots_learnt_at, self.slots_step = now, 2 * self.slots_step
            self._update_parameters()

    def token(self, now: float) -> bool:
        """Take over that a token came then. True if that ends a stall.

        What passed without one until then is no evidence about its speed.
        """
        account = self.account
        since = account.silent_since
        if since is not None:
            self._stood(since, now)
            account.silent_since = None
        return account.token(now)

    def watch(self, token_at: float | None, now: float) -> bool:
        """Look whether it works, by its newest token. True if it has stalled now, or stalls no more.

        Called about twice a second.
        """
        account = self.account
        changed = token_at is not None and token_at > account.token_at and self.token(token_at)
        counts = account.counts(now)
        since, need_s, late_s = math.inf, 0.0, 0.0
        least_s = LEAST_SILENCE_S if self.profiled or self.speed.seen else UNKNOWN_SILENCE_S
        stands_s = least_s
        for lease in self.leases.values():
            if lease.incoming or not lease.own:
                continue
            if lease.first_token_at is None:
                if since == math.inf:
                    # Of a whole answer nothing is heard before its end, but by the engine's own counters.
                    shown = counts or lease.request.streamed
                    since = lease.dispatched_at
                    need_s = lease.forecast_first_s if shown else lease.forecast_end_s
                    late_s = max(0.0, now - since - _LATE * need_s - 1.0)
            elif lease.request.streamed:
                since, need_s = min(since, lease.first_token_at), self.occupancy.now_s
                stands_s = STANDS_S
                break
        changed = account.watch(since, need_s, late_s, stands_s, least_s, now) or changed
        if account.silent_since is not None:
            self._stood(account.silent_since, now)
        else:
            self.speed.age(now)
            self._age_slots(now)
        return changed

    def _waits_for_slot(self, running: int, now: float) -> bool:
        """Return True if what waits first behind the `running` oldest sequences lacks a slot.

        It may also have come in the last iterations, or lack tokens where prompts take all of an iteration;
        while prompts are computed, a first token shows when an iteration began. Only prefill legs and streams
        show when their prompt has been computed.
        """
        unread, left, began_at = 0, running, -math.inf
        for lease in self.leases.values():
            if not lease.incoming:
                if left <= 0:
                    full_s = self.load.prompt_token_s * self.token_budget
                    early = not unread or lease.dispatched_at < began_at
                    if not early or now - lease.dispatched_at <= _ITERATIONS * full_s:
                        return False
                    break
                left -= lease.request.sequences
                if lease.first_token_at is not None:
                    began_at = max(began_at, lease.first_token_at)
                elif lease.request.streamed or lease.decode is not None:
                    unread += lease.unread_tokens
        return unread + running < self.token_budget * self.engines

    def _take_finished(self, sequences: int) -> None:
        """Take over how many sequences of live requests have ended, at most all but one of each."""
        self._occupancy = None
        groups = self.groups.values()
        most = sum([lease.request.sequences - 1 for lease in groups])
        self.finished_sequences = finished = max(0, min(sequences, most))
        self.finished_kv_tokens = 0.0
        if finished:
            kv_tokens = sum([lease.kv_tokens + lease.kv_prompt_tokens for lease in groups]) / 2.0
            self.finished_kv_tokens = kv_tokens * finished / (most + len(groups))

    def explored_sequences(self, now: float) -> float:
        """Sequences that it may run at once until it is explored."""
        oldest = next(iter(self.leases.values()), None)
        waited_s = 0.0 if oldest is None or oldest.first_token_at is not None else now - oldest.dispatched_at
        by_time = math.exp2(min(16.0, max(0.0, waited_s) / _UNEXPLORED_S))
        return _UNEXPLORED_SEQUENCES * max(1.0 + self._first_tokens, by_time)

    def learn_prefill(self, lease: Lease, now: float) -> bool:
        """Correct the speed by the first token of an answer. True if that changed the latency model."""
        if self.profiled:
            changed = self._confirm(now)
            if changed:
                self.take_speed()
            return changed
        seconds = now - lease.dispatched_at
        if self.speed.stood_at >= lease.dispatched_at:
            if lease.mark is None:
                return False
            seconds -= self.speed.stood_s - lease.mark.stood_s
        changed = self.speed.observe_prefill(lease.expected_first_s, seconds, now)
        if changed:
            self.take_speed()
        return changed

    def _confirm(self, now: float) -> bool:
        """Compare the reading of the first prompts since it was idle with the profile.

        Each iteration read as many prompts as were there. True if that changed the factor.
        """
        since = self._begun_at
        if since == math.inf or self.speed.stood_at >= since or self.adapters is not None:
            return False  # answers run beside them, it stood, or loads adapters
        budget = float(self.token_budget)
        done, pending = self.speed.prompt_tokens - self._begun_tokens, self.pending_prompt_tokens
        read = min(float(done + pending), math.ceil(done / self.engines / budget) * budget * self.engines)
        if read > _PARTLY * done:
            return False  # the last iteration may have begun before others came
        prompts = max(1.0, read * self.in_flight / max(1.0, float(done + pending)))
        mean, each = read / prompts, max(1.0, prompts / self.engines)
        expected_s = self.nominal.joining_s(0.0, self.capacity.async_scheduling is True)
        expected_s += self.nominal.first_token_s(mean, 0.0, 0.0, 0.0, 0.0, budget, each)
        return self.speed.begin(expected_s, now - since, now)

    def learn_speed(self, lease: Lease, now: float) -> bool:
        """Correct the speed by one answer that ended well. True if that changed the latency model."""
        steps = lease.output_tokens / lease.request.sequences - 1.0
        first_at, mark = lease.first_token_at, lease.first_mark
        if first_at is None or mark is None or steps < _LEAST_STEPS:
            return False
        took_s, began_at = now - lease.dispatched_at, first_at
        if first_at - lease.dispatched_at >= _WHOLE * took_s:
            if lease.mark is None:
                return False
            mark, began_at = lease.mark, lease.dispatched_at
        elif now - first_at < _DECODING * took_s:
            return False
        speed = self.speed
        seen_s = now - began_at - (speed.stood_s - mark.stood_s)
        changed = speed.answered(self.nominal, mark, seen_s, steps, now, self.token_budget)
        lease.expected_s, lease.seen_s, lease.mixed = speed.last_expected_s, seen_s, speed.last_mixed
        if changed:
            self.take_speed()
        return changed

    def take_speed(self) -> None:
        """Scale the latency model by the factor of the speed tracker."""
        factor = self.speed.factor
        self.latency = self.nominal if factor == 1.0 else self.nominal.scaled(factor)
        self._update_parameters()
