"""Belief about one instance: its limits and its ledger, its state, and the evidence about it."""

from __future__ import annotations

import math
from typing import Final

from hetlb.balancer.core.evidence.evidence import Evidence
from hetlb.balancer.core.evidence.table import LEAST_SILENCE_S, STANDS_S, UNKNOWN_SILENCE_S
from hetlb.balancer.core.forecast_errors import ForecastErrors
from hetlb.balancer.core.instance_ledger import (
    DEFAULT_MAX_LORAS,
    DEFAULT_MAX_NUM_SEQS,
    ChangeCounter,
    InstanceLedger,
)
from hetlb.balancer.core.latency import DEFAULT_LATENCY
from hetlb.balancer.core.occupancy import SIGNAL_STALE_S
from hetlb.balancer.core.prefix_index import PrefixIndex
from hetlb.balancer.core.speed import MOST_UNPROFILED_FACTOR, Mark, SpeedTracker
from hetlb.balancer.core.types import (
    AdminState,
    EngineHistory,
    EngineSample,
    Health,
    InstanceSpec,
    Lease,
    Request,
    SleepSet,
)

#: Seconds before an instance with a notice is gone, in which nothing runs there any more.
NOTICE_MARGIN_S: Final = 1.5
#: An engine that lets requests wait and uses less of its KV cache lacks slots, not memory.
_ROOM_SHARE: Final = 0.8
#: Multiple of its forecast beyond which a first token, a second later still, shows that others wait, too.
_LATE_FACTOR: Final = 2.0
#: Seconds after which, while requests take every slot that was learnt, one more is tried, then two
#: more, four more, ..., until the engine lets requests wait again. The first try waits twice as long after
#: each that was in vain, at most this.
_SLOTS_AGE_S: Final = 5.0
_MOST_SLOTS_AGE_S: Final = 600.0
#: Sequences, and a share of the own ones, that an engine may report more than hetlb sent.
_FOREIGN_SLACK: Final = 2
_FOREIGN_SLACK_SHARE: Final = 0.1
#: Iterations full of prompts after which what still waits lacks a slot.
_FULL_ITERATIONS: Final = 2.0
#: Decode steps of the shortest answer that says anything about speed.
_LEAST_STEPS: Final = 4.0
#: Largest ratio of the tokens that may have been read of prompts to the tokens of read prompts at which both
#: tell a speed.
_MOST_PARTLY_RATIO: Final = 1.25
#: Share of an answer's time after which a first byte came with the whole of it: not a stream.
_WHOLE_SHARE: Final = 0.99
#: Share of a stream's time that must have passed in decoding for it to tell how fast.
_DECODING_SHARE: Final = 0.2


class Instance(InstanceLedger):
    """One incarnation of one vLLM server."""

    __slots__ = (
        "_foreign_seen", "_slots_pause_s", "_waiting_seen", "admin", "asleep", "began", "errors",
        "evidence", "leads_back", "leaves_at", "pageless", "sample", "sample_mark", "served", "sleep",
        "sleep_at", "slots_learnt", "slots_learnt_at", "slots_step", "twin",
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
        prefixes = PrefixIndex() if prefixes is None else prefixes
        super().__init__(spec, incarnation, now, changes or ChangeCounter(), prefixes)
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
        #: Name of an instance that is the same process, "" for none.
        self.twin = ""
        #: True if its engine sleeps (vLLM's sleep mode).
        self.asleep = False
        #: Its last sleep or wake, and the time of that.
        self.sleep = SleepSet(spec.name, "")
        self.sleep_at = now
        self.errors = ForecastErrors()
        self.served: tuple[str, ...] | None = None
        self.sample: EngineSample | None = None
        #: Work until the last sample, where that has its own count of tokens, and it has a profile.
        self.sample_mark: Mark | None = None
        #: Sequences that its engine reported last beyond hetlb's own.
        self._foreign_seen = 0
        #: Sequences that ran in the last sample while others waited for a slot.
        self._waiting_seen = 0
        #: Time when its metrics showed how many sequences it runs at once.
        self.slots_learnt_at: float | None = None
        #: Slots that it was seen to have, 0 while unknown; `max_num_seqs` may be more, as a trial. The next
        #: growth, and the time without a trial.
        self.slots_learnt, self.slots_step = 0, 1
        self._slots_pause_s = _SLOTS_AGE_S

    def update(self, spec: InstanceSpec, now: float) -> None:
        """Take over another profile, capacity or weight. Its running requests teach nothing about speed."""
        self._elapsed(now)
        self.spec = spec
        self.profiled = spec.profiled
        self.explored = self.explored or spec.latency is not None
        self.nominal = self.latency = spec.latency or DEFAULT_LATENCY
        self.speed = SpeedTracker(self.profiled, now)
        self._occupancy = self.sample_mark = self.slot_times = None
        for lease in self.leases.values():
            lease.mark = lease.first_mark = None
        self.learn_capacity(spec.capacity)
        self._update()

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

    def learn_models(self, models: tuple[str, ...], adapters: tuple[str, ...]) -> None:
        """Take over the models that the engine lists. Running requests of adapters take slots now."""
        self.served = models
        self.adapters = None
        if not adapters:
            return
        from hetlb.balancer.core.adapters import AdapterSlots

        slots = AdapterSlots(frozenset(adapters), self.capacity.max_loras or DEFAULT_MAX_LORAS)
        self.adapters = slots
        for lease in self.leases.values():
            slots.begin(lease.request.model)

    def learn_sample(self, sample: EngineSample, now: float) -> None:
        """Take over a scrape, unless it lacks a figure of a fresh one before it.

        An engine that lets requests wait while its KV cache has room runs all it can, unless prompts take all
        tokens of its iterations. Two scrapes in a row that say the same are believed.
        """
        last, last_at = self.sample, self.sample_at
        if last is None and sample.running is None and sample.waiting is None and sample.kv_usage is None:
            # A page without figures is none, as its answers tell more. It still names its engine.
            self.learn_capacity(sample.capacity)
            self.engine = sample.engine or self.engine
            return
        if last is not None and last_at is not None and now - last_at <= SIGNAL_STALE_S:
            pairs = ((sample.running, last.running), (sample.waiting, last.waiting))
            if any(
                new is None and old is not None for new, old in (*pairs, (sample.kv_usage, last.kv_usage))
            ):
                self.learn_capacity(sample.capacity)
                return
        self._occupancy = None
        self.sample, self.slot_times = sample, None
        self.sample_at, self.pageless = now, False
        self.evidence.silence.read(sample.generated, now)
        more = (sample.running or 0) + (sample.waiting or 0) - self.sequences
        if self.sequences and more <= _FOREIGN_SLACK + _FOREIGN_SLACK_SHARE * self.sequences:
            more = 0  # the two counts are of different moments
        more = max(0, more)
        foreign, self._foreign_seen = min(more, self._foreign_seen), more
        if foreign != self.foreign:
            self._elapsed(now)
            self.foreign = foreign
        if self.profiled and sample.answered is not None:
            if now > self.speed.last:
                self._elapsed(now)
            self.sample_mark = self.speed.mark()
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

    def _learn_slots(self, sample: EngineSample, now: float) -> None:
        """Learn how many sequences it runs at once, unless it stands still."""
        if self.evidence.silence.silent_since is not None:
            self._waiting_seen = 0
            return
        running = sample.running or 0
        fullest = sample.kv_usage if sample.kv_usage_max is None else sample.kv_usage_max
        room = fullest is not None and fullest < _ROOM_SHARE
        full = running if sample.waiting and room and self._waits_for_slot(running, now) else 0
        if running > self.max_num_seqs or (full and full == self._waiting_seen):
            self._believe_slots(running, now)
        self._waiting_seen = full

    def learn_slots_late(self, lease: Lease, now: float) -> None:
        """Learn how many sequences it runs at once, without metrics, from a first token that came late."""
        if self.sample is not None or self.capacity.max_num_seqs is not None or not self.speed.seen:
            return
        late = now - lease.dispatched_at > _LATE_FACTOR * lease.forecast_first_s + 1.0
        if late and lease.ahead > self.most_begun and self.speed.stood_at < lease.dispatched_at:
            self._believe_slots(self.most_begun, now)

    def learn_slots_whole(self, lease: Lease, now: float) -> None:
        """Learn how many sequences it runs at once, without metrics, from a whole answer that ended well."""
        times, nominal = self.slot_times, self.nominal
        if times is None:
            return
        prompt, steps = float(lease.request.prompt_tokens), max(1.0, float(lease.output_tokens))
        read_s, context = nominal.prefill_s(prompt), prompt + steps / 2.0

        def expected_s(batch: float) -> float:
            return read_s + steps * nominal.step_s(batch, batch * context)

        slots = times.answered(lease.id, expected_s, now)
        if slots and slots != self.max_num_seqs:
            self._believe_slots(slots, now)

    def _believe_slots(self, slots: int, now: float) -> None:
        """Take over an observed number of slots. After a trial in vain the next one comes later."""
        in_vain = slots <= self.slots_learnt
        self._slots_pause_s = min(_MOST_SLOTS_AGE_S, 2.0 * self._slots_pause_s) if in_vain else _SLOTS_AGE_S
        self.slots_learnt, self.slots_learnt_at, self.slots_step = slots, now, 1
        self.max_num_seqs = slots
        self._update()

    def _age_slots(self, now: float) -> None:
        """Try more slots than were learnt, some time after that, while all of them are taken."""
        learnt_at = self.slots_learnt_at
        pause_s = self._slots_pause_s if self.slots_step == 1 else _SLOTS_AGE_S
        if learnt_at is None or now - learnt_at < pause_s or self.capacity.max_num_seqs is not None:
            return
        default = DEFAULT_MAX_NUM_SEQS * self.engines
        if self.max_num_seqs < default and self.unfinished_sequences >= self.max_num_seqs:
            self.slots_learnt = self.max_num_seqs  # they have lasted
            self.max_num_seqs = min(default, self.max_num_seqs + self.slots_step)
            self.slots_learnt_at, self.slots_step = now, 2 * self.slots_step
            self._update()

    def token(self, now: float) -> bool:
        """Note that a token came at `now`. Return True if that ends a stall.

        The time without a token is no evidence about the speed of the instance.
        """
        evidence = self.evidence
        since = evidence.silence.silent_since
        if since is not None:
            self._stood(since, now)
            evidence.silence.silent_since = None
        return evidence.token(now)

    def watch(self, token_at: float | None, now: float) -> bool:
        """Check by its newest token if the instance works. Return True if a stall began or ended.

        Called about twice a second.
        """
        evidence = self.evidence
        changed = token_at is not None and token_at > evidence.silence.token_at and self.token(token_at)
        counts = evidence.silence.counts(now)
        since, need_s, late_s = math.inf, 0.0, 0.0
        least_s = LEAST_SILENCE_S if self.profiled or self.speed.seen else UNKNOWN_SILENCE_S
        stands_s = least_s
        for lease in self.leases.values():
            if lease.incoming or not lease.own or not lease.request.sequences:
                continue
            if lease.first_token_at is None:
                if since == math.inf:
                    # Of a whole answer nothing is heard before its end, but by the engine's own counters.
                    shown = counts or lease.request.streamed
                    since = lease.dispatched_at
                    need_s = lease.forecast_first_s if shown else lease.forecast_end_s
                    late_s = max(0.0, now - since - _LATE_FACTOR * need_s - 1.0)
            elif lease.request.streamed:
                since, need_s = min(since, lease.first_token_at), self.occupancy.now_s
                stands_s = STANDS_S
                break
        begins = since < math.inf and self._begins_at(max(since, evidence.silence.token_at))
        stalls = evidence.silence.watch(since, need_s, late_s, stands_s, least_s, now, begins=begins)
        changed = evidence.watched(stalls, now) or changed
        if evidence.silence.silent_since is not None:
            self._stood(evidence.silence.silent_since, now)
        else:
            self.speed.age(now)
            self._age_slots(now)
        return changed

    def begins(self, request: Request) -> bool:
        """Return True if its process is not known to have answered such a request before."""
        features, begun = request.features, self.evidence.begun
        return features is not None and any(each not in begun for each in features)

    def _begins_at(self, silent_since: float) -> bool:
        """Return True if a request of a new kind came as it fell silent."""
        return any(
            lease.first_token_at is None
            and lease.dispatched_at <= silent_since + STANDS_S
            and self.begins(lease.request)
            for lease in self.leases.values()
        )

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
                    if not early or now - lease.dispatched_at <= _FULL_ITERATIONS * full_s:
                        return False
                    break
                left -= lease.request.sequences
                if lease.first_token_at is not None:
                    began_at = max(began_at, lease.first_token_at)
                elif lease.request.streamed or lease.decode is not None:
                    unread += lease.unread_tokens
        return unread + running < self.token_budget * self.engines

    def learn_history(self, told: EngineHistory, now: float) -> bool:
        """Take over the speed by the engine's means, if no answer showed one. True if it changed."""
        if self.profiled or self.speed.seen:
            return False
        model, batch, budget = self.nominal, told.batch, float(self.token_budget)
        tokens = batch * (told.prompt + told.output / 2.0)
        # As many prompts are read beside an answer as answers run.
        delay_s = batch * model.read_delay_s(told.prompt, 0.0, batch, tokens, budget)
        step_s, read_s = told.output * model.step_s(batch, tokens) + delay_s, 0.0
        if told.prefill_s is not None:
            read_s = model.first_token_s(told.prompt, 0.0, 0.0, batch, tokens, budget)
        answer_s, prefill_s = told.output * told.step_s, told.prefill_s or 0.0
        if not self.speed.told(read_s + step_s, prefill_s + answer_s, now):
            return False
        if prefill_s > 0.0 and read_s > 0.0:  # reading and decoding apart, beside the factor of both
            both, most = (prefill_s + answer_s) / (read_s + step_s), MOST_UNPROFILED_FACTOR
            reading, decoding = [
                max(1.0 / most, min(most, each))
                for each in (prefill_s / read_s / both, answer_s / step_s / both)
            ]
            self.nominal = model.with_factors(reading, 1.0, decoding, 0.0, 0.0, 0.0)
        self.explored = True
        self.take_speed()
        return True

    def learn_prefill(self, lease: Lease, now: float) -> bool:
        """Correct the speed by the first token of an answer. True if that changed the latency model."""
        if self.profiled:
            changed = self._confirm(now)
            if changed:
                self.take_speed()
            return changed
        if lease.ahead > self.most_begun:
            return False  # it may have waited for a slot
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
        """Compare the time to prefill the first prompts after an idle time with the profile.

        Each iteration computed as many prompts as were there. Return True if that changed the factor.
        """
        since, before_tokens = self.prompts_alone
        if since == math.inf or self.speed.stood_at >= since or self.adapters is not None:
            return False  # answers run beside them, it stood, or loads adapters
        budget = float(self.token_budget)
        done, pending = self.speed.prompt_tokens - before_tokens, self.pending_prompt_tokens
        read = min(float(done + pending), math.ceil(done / self.engines / budget) * budget * self.engines)
        if read > _MOST_PARTLY_RATIO * done:
            return False  # the last iteration may have begun before others came
        leases = self.in_flight - self.slotless
        prompts = max(1.0, read * leases / max(1.0, float(done + pending)))
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
        if first_at - lease.dispatched_at >= _WHOLE_SHARE * took_s:
            if lease.mark is None:
                return False
            mark, began_at = lease.mark, lease.dispatched_at
        elif now - first_at < _DECODING_SHARE * took_s:
            return False
        speed = self.speed
        seen_s = now - began_at - (speed.stood_s - mark.stood_s)
        changed = speed.answered(self.nominal, mark, seen_s, steps, now, self.token_budget)
        lease.expected_s, lease.seen_s, lease.mixed = speed.last_expected_s, seen_s, speed.last_mixed
        if changed:
            self.take_speed()
        return changed
