"""One instance: its limits and state, in integers the sum over its live leases, and derived figures."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final

from hetlb.balancer.core.decode_steps import DecodeSteps
from hetlb.balancer.core.evidence.evidence import Evidence
from hetlb.balancer.core.exploration import Exploration, tells_slots
from hetlb.balancer.core.facts import EngineSample, SleepSet
from hetlb.balancer.core.forecast_errors import ForecastErrors
from hetlb.balancer.core.latency import DEFAULT_LATENCY, LatencyModel
from hetlb.balancer.core.occupancy import (
    MOST_TOUCHED,
    SIGNAL_STALE_S,
    ChangeCounter,
    EngineKind,
    EngineLoad,
    Occupancy,
)
from hetlb.balancer.core.prefix_index import PrefixIndex, Tree
from hetlb.balancer.core.speed import Mark, SpeedTracker
from hetlb.balancer.core.types import AdminState, Capacity, Health, InstanceSpec, Lease, LeaseId

if TYPE_CHECKING:
    from hetlb.balancer.core.adapters import AdapterSlots
    from hetlb.balancer.core.block_index import BlockIndex
    from hetlb.balancer.core.ranks import Ranks
    from hetlb.balancer.core.slot_times import SlotTimes

#: Seconds before an instance with a notice is gone, in which nothing runs there any more.
NOTICE_MARGIN_S: Final = 1.5
#: Seconds between learning a number of slots and the first trial of more.
FIRST_TRIAL_S: Final = 5.0
#: Limits of an engine that has not told its own: KV cache in tokens, and vLLM's defaults of `max_num_seqs`
#: (which no metric tells), `max_loras` and `max_num_batched_tokens`.
DEFAULT_KV_CACHE_TOKENS: Final = 131_072
DEFAULT_MAX_NUM_SEQS: Final = 256
DEFAULT_MAX_LORAS: Final = 1
DEFAULT_TOKEN_BUDGET: Final = 2048
#: Most sequences with kept loads of an instance.
_KEPT_LOADS: Final = 1024
#: Shortest decode step in seconds.
LEAST_STEP_S: Final = 1e-5


class Instance:
    """One incarnation of one vLLM server: limits, speed and state, and sums over its leases.

    Limits are configured, reported by its engine, or learnt (`learning.py`).
    """

    __slots__ = (
        "_reading", "adapters", "admin", "answered_tokens", "asleep", "began", "blocks", "booked", "capacity",
        "changes", "engine", "engines", "errors", "evidence", "exploring", "far_s", "finished_kv_tokens",
        "finished_sequences", "foreign", "foreign_seen", "groups", "held_tokens", "in_flight", "incarnation",
        "incoming", "kind", "kv_cache_tokens", "kv_excess_tokens", "kv_need", "kv_prompt_tokens", "kv_tokens",
        "last_occupancy", "late_tokens", "latency", "leads_back", "leases", "leaves_at",
        "longest_request_tokens", "max_num_seqs", "name", "nominal", "pageless", "pending_prompt_tokens",
        "profiled", "promised_tokens", "prompt_tokens", "prompts_alone", "ranks", "reading_factor",
        "reading_since", "refused_at", "removed", "sample", "sample_at", "sample_mark", "sequences",
        "served", "sleep", "sleep_at", "slot_times", "slotless", "slots_learnt", "slots_learnt_at",
        "slots_pause_s", "slots_step", "spec", "speed", "stated_sequences", "steps", "token_budget", "tree",
        "twin", "unhealthy", "unread_sequences", "waiting_seen", "work_ns",
    )  # fmt: skip

    def __init__(
        self,
        spec: InstanceSpec,
        incarnation: int,
        evidence: Evidence,
        now: float,
        changes: ChangeCounter | None = None,
        prefixes: PrefixIndex | None = None,
    ) -> None:
        #: Its engines as places, None if it is one place.
        self.ranks: Ranks | None = None
        #: None once it was `touched`.
        self.last_occupancy: Occupancy | None = None
        self.spec = spec
        self.name = spec.name
        self.changes = changes or ChangeCounter()
        self.profiled = spec.profiled
        #: Latency model: of the profile, of the data sheet of its GPU, or the default. The same corrected by
        #: its answers.
        self.nominal: LatencyModel = spec.latency or DEFAULT_LATENCY
        self.latency = self.nominal
        self.speed = SpeedTracker(self.profiled, now)
        #: Factor in force for the model's times of reading.
        self.reading_factor = 1.0
        self.kind = EngineKind((self.latency, 0, 0, 0, 1, False))
        self.capacity = Capacity()
        #: Kind of its engine, "" while unknown. Data-parallel engines behind its URL: each has `1 / engines`
        #: of its sequences and KV cache.
        self.engine, self.engines = "", 1
        #: Its LoRA adapters, None if it lists none.
        self.adapters: AdapterSlots | None = None
        #: Most tokens (prompt and output) of one sequence, None while unknown.
        self.longest_request_tokens: int | None = None
        #: Sequences that all its engines run at once, tokens its KV cache holds, and tokens that an iteration
        #: computes at most; defaults while unknown.
        self.max_num_seqs = DEFAULT_MAX_NUM_SEQS
        self.kv_cache_tokens = DEFAULT_KV_CACHE_TOKENS
        self.token_budget = DEFAULT_TOKEN_BUDGET
        self.incarnation = incarnation
        #: Its prefix cache; another tree as soon as the cache is gone.
        self.tree = Tree(PrefixIndex() if prefixes is None else prefixes, incarnation)
        #: Content of its cache by its own KV events, None if it publishes none.
        self.blocks: BlockIndex | None = None
        self.removed = False
        #: Evidence about its slots from whole answers. None while there was none, or if something else shows
        #: the slots.
        self.slot_times: SlotTimes | None = None
        self.leases: dict[LeaseId, Lease] = {}
        #: Leases of decode legs, booked and not dispatched yet.
        self.incoming: dict[LeaseId, Lease] = {}
        #: Leases; leases without a sequence; sequences; booked work.
        self.in_flight = self.slotless = self.sequences = self.work_ns = 0
        #: Tokens of the KV cache that its leases and holds will use, and the part of prompts; shared tokens
        #: count once. `held_tokens` of prompts are kept until other instances have fetched them.
        self.kv_tokens = self.kv_prompt_tokens = self.held_tokens = 0
        #: Prompts and predicted answers of all sequences, prompts alone, and prompt tokens yet to be
        #: computed.
        self.promised_tokens = self.prompt_tokens = self.pending_prompt_tokens = 0
        #: Time since which its engine computes unread prompts, as far as its answers show. Tokens of prompts
        #: that came later and wait for these.
        self.reading_since, self.late_tokens = now, 0
        #: Sequences of requests with targets, and of streams without a token yet.
        self.stated_sequences = self.unread_sequences = 0
        #: Leases of whole answers, the oldest first: no byte shows when their prompts have been read.
        self._reading: deque[Lease] = deque()
        #: Leases of requests with several sequences. Their sequences that have ended by the engine's own
        #: count while the request has not, and the tokens of these in the KV cache.
        self.groups: dict[LeaseId, Lease] = {}
        self.finished_sequences, self.finished_kv_tokens = 0, 0.0
        #: Sequences that its engine reports and hetlb did not send: at least as many in each of the last two
        #: samples; in the last one.
        self.foreign = self.foreign_seen = 0
        #: Excess of the engine's own count of used KV tokens, at its last sample, over what was expected.
        self.kv_excess_tokens = 0.0
        self.sample_at: float | None = None
        self.steps = DecodeSteps()
        #: Leases so far, and tokens of all answers that have ended.
        self.booked = self.answered_tokens = 0
        #: None once it may run as many sequences as it has slots.
        self.exploring = Exploration() if spec.latency is None else None
        #: Time since which it only reads prompts, infinite while answers run. Prompt tokens read by then.
        self.prompts_alone = now, 0
        self.evidence = evidence
        self.admin = AdminState.READY
        #: True if a request to it came back: it is this proxy.
        self.leads_back = False
        #: Time when it is gone, None without a notice.
        self.leaves_at: float | None = None
        #: Start of its process by its own clock (Unix time, s).
        self.began: float | None = None
        #: True if it has no page of metrics.
        self.pageless = False
        #: Reason why its last probes failed while it is up, "" if they did not.
        self.unhealthy = ""
        #: Seconds of a round trip to it if that takes far longer than before, else 0.0. Time of its last 4xx.
        self.far_s, self.refused_at = 0.0, -math.inf
        #: Name of an instance that is the same process, "" for none.
        self.twin = ""
        #: True if its engine sleeps (vLLM's sleep mode). Its last sleep or wake, and the time of that.
        self.asleep = False
        self.sleep, self.sleep_at = SleepSet(spec.name, ""), now
        self.errors = ForecastErrors()
        self.served: tuple[str, ...] | None = None
        self.sample: EngineSample | None = None
        #: Work up to the last sample, if the instance has a profile and the sample its own count of tokens.
        self.sample_mark: Mark | None = None
        #: Sequences that ran in the last sample while others waited for a slot.
        self.waiting_seen = 0
        #: Time when its metrics showed how many sequences it runs at once.
        self.slots_learnt_at: float | None = None
        #: Slots that it was seen to have, 0 while unknown; a trial may set `max_num_seqs` higher. Next growth
        #: of the trial, and seconds before it.
        self.slots_learnt, self.slots_step = 0, 1
        self.slots_pause_s = FIRST_TRIAL_S
        self.learn_capacity(spec.capacity)

    @property
    def why_not(self) -> str:
        """Reason why it can take no request now, "" if it can."""
        if self.admin is not AdminState.READY:
            return "draining" if self.admin is AdminState.DRAIN else "in maintenance"
        if self.sleep.reason:
            return self.sleep.reason
        if self.evidence.health.state is Health.EJECTED:
            return f"ejected: {self.evidence.health.reason}"
        return "asleep" if self.asleep else ""

    @property
    def routable(self) -> bool:
        """True if new work may go here at all."""
        return not self.removed and not self.why_not

    @property
    def comes(self) -> bool:
        """True if it sleeps and is woken for requests."""
        return self.sleep.comes and self.admin is AdminState.READY and not self.removed

    @property
    def models(self) -> tuple[str, ...]:
        """Names that it answers to: by its own list once known, else as configured."""
        if self.served is not None:
            return self.served
        return (self.spec.model,) if self.spec.model else ()

    @property
    def caches_prefixes(self) -> bool:
        """True if its engine keeps prompts for others: vLLM's default while it has not told."""
        return self.capacity.enable_prefix_caching is not False

    def learn_capacity(self, newer: Capacity) -> None:
        """Take over the engine's report of its capacity; figures it does not know stay."""
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
            self.max_num_seqs, self.slot_times = capacity.max_num_seqs * engines, None
        else:
            self.max_num_seqs = self.max_num_seqs * engines // self.engines
        self.engines = self.speed.engines = engines
        self.kv_cache_tokens = cache or DEFAULT_KV_CACHE_TOKENS * engines
        self.touched()
        self.changed()
        count = self.engines if capacity.rank_header and self.spec.kv_transfer is None else 1
        if count < 2:
            self.ranks = None
        elif self.ranks is None or len(self.ranks.each) != count:
            from hetlb.balancer.core.ranks import Ranks

            self.ranks = Ranks(count)

    def take_speed(self) -> None:
        """Scale the latency model by the factor of the speed tracker."""
        factor, self.reading_factor = self.speed.factor, self.speed.reading
        self.latency = self.speed.apart(self.nominal if factor == 1.0 else self.nominal.scaled(factor))
        self.touched()
        self.changed()

    def changed(self) -> None:
        """Take over parameters that were set."""
        slots, cache = self.max_num_seqs, self.kv_cache_tokens
        asynchronous = self.capacity.async_scheduling is True
        parameters = (self.latency, self.token_budget, slots, cache, self.engines, asynchronous)
        if parameters != self.kind.parameters:
            self.kind = self.changes.kind(parameters)
            self.changes.count += 1
            self.touched()

    def touched(self) -> None:
        """Note that a figure changed that scoring reads."""
        if self.last_occupancy is None:
            return
        self.last_occupancy = None
        touched = self.changes.touched
        if touched is not None:
            if len(touched) >= MOST_TOUCHED:
                touched.clear()
                self.changes.epoch += 1
            touched.append(self)

    @property
    def unfinished_sequences(self) -> int:
        """Sequences of its leases without the ones that have ended by the engine's own count."""
        return self.sequences - self.finished_sequences

    @property
    def load(self) -> EngineLoad:
        """Load of each of its engines now."""
        running, loads = self.sequences - self.finished_sequences + self.foreign, self.kind.loads
        load = loads[running] if running < len(loads) else None
        if load is None:
            load = EngineLoad(self, loads[running - 1] if 0 < running <= len(loads) else None)
            if running < _KEPT_LOADS:
                while len(loads) <= running:
                    loads.append(None)
                loads[running] = load
        return load

    @property
    def occupancy(self) -> Occupancy:
        """The ledger as scoring reads it."""
        occupancy = self.last_occupancy
        if occupancy is None:
            occupancy = self.last_occupancy = Occupancy(self)
        return occupancy

    def seen(self, now: float) -> Occupancy:
        """Return the ledger as scoring reads it at a time."""
        sample_at = self.sample_at
        if self.foreign and sample_at is not None and now - sample_at > SIGNAL_STALE_S:
            self.elapsed(now)
            self.foreign = 0
            self.touched()
        if self._reading and self._reading[0].read_by <= now:
            self.elapsed(now)
        return self.occupancy

    @property
    def changes_at(self) -> float:
        """Time when `seen` changes although nothing was touched, infinite if never."""
        at = self._reading[0].read_by if self._reading else math.inf
        if self.foreign and self.sample_at is not None:
            at = min(at, self.sample_at + SIGNAL_STALE_S)
        return at

    @property
    def surely_has_slot(self) -> bool:
        """True if it surely has a free slot, even by the least number of sequences that it may run."""
        own = self.sequences - self.finished_sequences
        few = self.exploring is not None and own >= self.exploring.least_sequences(self)
        return not few and own + self.foreign < self.max_num_seqs

    def precedes(self, other: Instance) -> bool:
        """Return True if it showed more speed than another with an equal score, or has had fewer requests.

        Speeds shown without a profile are averaged if they are near each other.
        """
        if self.speed.seen and other.speed.seen and self.speed.shown != other.speed.shown:
            return self.speed.shown < other.speed.shown
        return self.booked < other.booked

    @property
    def untried(self) -> bool:
        """True if it is idle, and neither a profile nor an answer has shown its speed."""
        return self.spec.latency is None and not self.speed.seen and not self.in_flight

    @property
    def shown_factor(self) -> float:
        """Factor on the times of its model that answers showed without a profile, infinite if none did."""
        return self.speed.shown if self.spec.latency is None and self.speed.seen else math.inf

    @property
    def kv_utilization(self) -> float:
        """Promised fraction of the KV cache: the paper's u."""
        promised = self.promised_tokens if self.kv_need is None else self.kv_tokens
        return promised / self.kv_cache_tokens

    @property
    def work_s(self) -> float:
        """The paper's W_i: assigned and not yet completed work, in seconds."""
        return self.work_ns / 1e9

    def acquire(self, lease: Lease) -> None:
        """Book a lease."""
        assert lease.work_ns >= 0, f"{lease!r} books negative work"
        assert lease.kv_tokens >= lease.kv_prompt_tokens >= 0, f"{lease!r} books negative KV tokens"
        now, speed = lease.dispatched_at, self.speed
        self.touched()
        if now > speed.last:
            self.elapsed(now)
        if self.pending_prompt_tokens:
            if self.unread_sequences + len(self._reading) >= self.engines:  # no engine reads nothing
                self.late_tokens += lease.unread_tokens
        else:
            self.reading_since, self.late_tokens = now, 0
        if not self.unread_sequences and not speed.begun:
            self.prompts_alone = math.inf if self.sequences else now, speed.prompt_tokens
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
        self.booked += 1
        self.slotless += not lease.request.sequences
        self.sequences += lease.request.sequences
        if lease.request.service.stated:
            self.stated_sequences += lease.request.sequences
        if lease.request.streamed:
            self.unread_sequences += lease.request.sequences
        elif lease.request.generates:
            self._reading.append(lease)
        lease.ahead = self.sequences - self.finished_sequences
        # Of a whole answer (not a stream) it is not known when it began: its speed shows only if at once.
        if not lease.incoming:
            if self.sequences - self.finished_sequences - len(self.incoming) <= self.max_num_seqs:
                lease.mark = speed.mark()
            if not lease.request.streamed:
                self.steps.begin(lease)
                if not self.profiled and self.slot_times is None and not tells_slots(self):
                    from hetlb.balancer.core.slot_times import slot_times_of

                    self.slot_times = slot_times_of(self.leases.values(), lease)
        if lease.request.sequences > 1:
            self.groups[lease.id] = lease
        tree = self.tree
        if tree.unused:
            tree.evict(self.kv_cache_tokens - self.kv_tokens)
        if self.slot_times is not None and lease.request.sequences:
            self.slot_times.begin(lease.id, now)
        if self.adapters is not None:
            self.adapters.begin(lease.request.model)
        if self.blocks is not None and lease.request.blocks is not None:
            self.blocks.begin(lease.id, lease.request.model, lease.request.blocks)
        if self.ranks is not None:
            self.ranks.book(lease, self)

    def begin(self, lease: Lease, now: float) -> None:
        """Note that the decode leg of a lease is dispatched."""
        if now > self.speed.last:
            self.elapsed(now)
        self.touched()
        del self.incoming[lease.id]
        lease.incoming = False
        lease.dispatched_at = now
        if self.unfinished_sequences - len(self.incoming) <= self.max_num_seqs:
            lease.mark = self.speed.mark()
        if not lease.request.streamed:
            self._reading.append(lease)
            self.steps.begin(lease)

    def keep(self, tokens: int) -> None:
        """Keep `tokens` more tokens of prompts for other instances; less if below 0."""
        self.touched()
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
            self.elapsed(now)
        self._read(lease, now)
        whole = self.slot_times is not None and lease.request.generates and not lease.request.streamed
        if self.exploring is not None and not whole:  # the end of a whole answer tells if it waited
            self.exploring.first_token(self, lease, now)
            self.exploring = self.exploring.going_on(self, now)
        lease.first_token_at = now
        lease.first_mark = speed.mark()
        if lease.begun_steps is None:
            self.steps.begin(lease)
        if self.steps.sequences > self.steps.most:
            self.steps.most = self.steps.sequences
        if lease.request.streamed:
            self.unread_sequences -= lease.request.sequences

    def _read(self, lease: Lease, now: float) -> None:
        """Note, once for a lease, that its prompts have been read."""
        if lease.unread_tokens:
            least_s = self.latency.step_s(1.0, 0.0)
            self.speed.prefilled(lease.request.sequences, lease.unread_tokens, now, least_s)
            self.pending_prompt_tokens -= lease.unread_tokens
            lease.unread_tokens = 0
            self.reading_since, self.late_tokens = now, 0  # an iteration has ended
        if self.ranks is not None:
            self.ranks.begun(lease)
        self.touched()

    def release(self, lease: Lease, now: float) -> None:
        """Give back exactly a lease's bookings, once."""
        assert not lease.ended, f"{lease!r} was released before"
        assert self.leases.get(lease.key) is lease, f"{lease!r} is not booked on {self.name}"
        del self.leases[lease.key]
        if now > self.speed.last:
            self.elapsed(now)
        if lease.incoming:
            del self.incoming[lease.id]
            lease.incoming = False
        lease.ended = True
        self.touched()
        self.answered_tokens += lease.output_tokens
        self.work_ns -= lease.work_ns
        self.kv_tokens -= lease.kv_tokens
        self.kv_prompt_tokens -= lease.kv_prompt_tokens
        self.promised_tokens -= lease.promised_tokens
        self.prompt_tokens -= lease.prompt_tokens
        if lease.first_token_at is None:
            self.pending_prompt_tokens -= lease.unread_tokens
            self.late_tokens = min(self.late_tokens, self.pending_prompt_tokens)
            if lease.request.streamed:
                self.unread_sequences -= lease.request.sequences
        reading = self._reading
        while reading and (reading[0].ended or reading[0].first_token_at is not None):
            reading.popleft()
        if self.slot_times is not None:
            self.slot_times.end(lease.id, now)
        self.in_flight -= 1
        self.slotless -= not lease.request.sequences
        self.sequences -= lease.request.sequences
        self.steps.end(lease)
        if lease.request.service.stated:
            self.stated_sequences -= lease.request.sequences
        if lease.request.sequences > 1:
            del self.groups[lease.id]
            self.take_finished(self.finished_sequences)
        if lease.shared is not None:
            self._let_go(lease)
        if self.adapters is not None:
            self.adapters.end(lease.request.model)
        if self.blocks is not None:
            self.blocks.end(lease.id)
        if self.ranks is not None:
            self.ranks.release(lease, self)
        negative = self.work_ns < 0 or self.promised_tokens < 0 or self.prompt_tokens < 0
        negative = negative or self.kv_prompt_tokens < 0 or self.kv_tokens < self.kv_prompt_tokens
        negative = negative or self.pending_prompt_tokens < 0 or self.in_flight < 0 or self.sequences < 0
        assert not negative, f"the ledger of {self.name} fell below zero when {lease!r} was released"

    def _let_go(self, lease: Lease) -> None:
        """End the use of shared prefixes; computed blocks stay in the engine's cache for a while."""
        shared, request = lease.shared, lease.request
        assert shared is not None
        tree = self.tree if shared.node is None else shared.node.tree
        if lease.first_token_at is not None and tree is self.tree and not self.removed:
            answer, reported = lease.output_tokens // max(1, request.sequences), lease.reported_cached_tokens
            if self.ranks is not None:  # one engine's report says nothing of the other engines' caches
                reported, tree.share = None, self.ranks.cache_share
            tree.answered(shared, request.prefix_keys, request.prompt_tokens, answer, reported)
        freed = tree.detach(shared.node)
        self.kv_tokens -= freed
        self.kv_prompt_tokens -= freed
        tree.evict(self.kv_cache_tokens - self.kv_tokens)

    def elapsed(self, now: float) -> None:
        """Count the steps until now, and give the speed tracker the decoding sequences and their tokens.

        It is not known when a whole answer begins. It counts as decoding, and its prompt as read when its
        forecast says so. The prompts of streams without a token take their part of the iterations.
        """
        running, unread = self.sequences - self.finished_sequences, self.unread_sequences
        prompts = float(self.prompt_tokens)
        if self.incoming:  # booked and not there yet
            for lease in self.incoming.values():
                running -= lease.request.sequences
                unread -= lease.request.sequences if lease.request.streamed else 0
                prompts -= lease.prompt_tokens
        decoding = running - unread
        if decoding > self.max_num_seqs:
            decoding = self.max_num_seqs
        foreign, tokens = self.foreign, 0.0
        if decoding > 0:
            progress = self.steps
            begun = progress.sequences
            grown = progress.grown_tokens / (begun if begun > decoding else decoding)
            tokens = decoding * (prompts / running + grown)
            if foreign:
                tokens += self.kv_excess_tokens
            load = self.load
            step_s = load.step_s + load.token_s * tokens / load.engines
            if unread > 0:
                pending, room = self.pending_prompt_tokens / load.engines, load.budget - load.batch
                step_s += load.prompt_token_s * (pending if pending < room else max(0.0, room))
            self.touched()
            progress.per_s = 1.0 / (step_s if step_s > LEAST_STEP_S else LEAST_STEP_S)
            since_s = now - self.speed.last
            steps = since_s * progress.per_s if since_s > 0.0 else 0.0
            progress.total += steps
            tokens += decoding * steps / 2.0
        else:
            decoding = 0
        self.speed.elapsed(decoding + foreign, tokens, now)
        reading = self._reading
        while reading and reading[0].read_by <= now:
            lease = reading.popleft()
            if not lease.ended and not lease.incoming and lease.first_token_at is None:
                self._read(lease, now)

    def take_finished(self, sequences: int) -> None:
        """Set how many sequences of live requests have ended. At least one of each request stays."""
        self.touched()
        groups = self.groups.values()
        most = sum([lease.request.sequences - 1 for lease in groups])
        self.finished_sequences = finished = max(0, min(sequences, most))
        self.finished_kv_tokens = 0.0
        if finished:
            kv_tokens = sum([lease.kv_tokens + lease.kv_prompt_tokens for lease in groups]) / 2.0
            self.finished_kv_tokens = kv_tokens * finished / (most + len(groups))
