"""Learning from scrapes, answers and silence about an instance: its load, its speed, whether it works."""

from __future__ import annotations

import math
from typing import Final

from hetlb.balancer.core.evidence.table import LEAST_SILENCE_S, STANDS_S, UNKNOWN_SILENCE_S
from hetlb.balancer.core.facts import EngineHistory, EngineSample
from hetlb.balancer.core.instance import (
    DEFAULT_MAX_LORAS,
    DEFAULT_MAX_NUM_SEQS,
    FIRST_TRIAL_S,
    Instance,
)
from hetlb.balancer.core.latency import DEFAULT_LATENCY
from hetlb.balancer.core.occupancy import SIGNAL_STALE_S
from hetlb.balancer.core.speed import MOST_UNPROFILED_FACTOR, SpeedTracker
from hetlb.balancer.core.types import Capacity, InstanceSpec, Lease, Request

#: Sequences, and a share of the own ones, that an engine may report more than hetlb sent.
_FOREIGN_SLACK: Final = 2
_FOREIGN_SLACK_SHARE: Final = 0.1
#: Decode steps of the shortest answer that says anything about speed.
_LEAST_STEPS: Final = 4.0
#: Largest ratio of the tokens of prompts that may have been read to the tokens of prompts that surely were.
#: Above it, their times show no speed.
_MOST_PARTLY_RATIO: Final = 1.25
#: Least and most tokens of a prompt that shows the speed of reading (a token of a longer one takes longer:
#: it attends to more), and largest share of them that came behind it.
_LEAST_READ_TOKENS: Final = 256
_MOST_READ_TOKENS: Final = 8192
_MOST_LATE_SHARE: Final = 0.25
#: Share of an answer's time. If the first byte came later, the answer came as a whole and is no stream.
_WHOLE_SHARE: Final = 0.99
#: Least share of a stream's time spent in decoding, for the stream to show a speed.
_DECODING_SHARE: Final = 0.2
#: An engine that lets requests wait and uses less of its KV cache lacks slots, not memory.
_ROOM_SHARE: Final = 0.8
#: Multiple of its forecast beyond which a first token, a second later still, shows that others wait, too.
_LATE_FACTOR: Final = 2.0
#: Longest pause before a trial of more slots than were learnt, in seconds. While requests take all learnt
#: slots, one more is tried, then two, four, ..., until the engine lets requests wait again. Each trial in
#: vain doubles the pause.
_MOST_TRIAL_S: Final = 600.0
#: Iterations full of prompts. A request that waits longer than these take lacks a slot.
_FULL_ITERATIONS: Final = 2.0


def take_spec(instance: Instance, spec: InstanceSpec, now: float) -> None:
    """Take over another profile, capacity or weight. Its running requests teach nothing about speed."""
    instance.elapsed(now)
    instance.spec = spec
    instance.profiled = spec.profiled
    if spec.latency is not None:
        instance.exploring = None
    instance.nominal = instance.latency = spec.latency or DEFAULT_LATENCY
    instance.speed, instance.reading_factor = SpeedTracker(instance.profiled, now), 1.0
    instance.touched()
    instance.sample_mark = instance.slot_times = None
    for lease in instance.leases.values():
        lease.mark = lease.first_mark = None
    instance.learn_capacity(spec.capacity)
    instance.changed()


def learn_models(instance: Instance, models: tuple[str, ...], adapters: tuple[str, ...]) -> None:
    """Take over the models that the engine lists. Running requests of adapters take slots now."""
    instance.served = models
    instance.adapters = None
    if not adapters:
        return
    from hetlb.balancer.core.adapters import AdapterSlots

    slots = AdapterSlots(frozenset(adapters), instance.capacity.max_loras or DEFAULT_MAX_LORAS)
    instance.adapters = slots
    for lease in instance.leases.values():
        slots.begin(lease.request.model)


def learn_capacity(instance: Instance, newer: Capacity) -> bool:
    """Take over what an engine says of its capacity. Return False if that is no news."""
    if instance.capacity.updated(newer) is instance.capacity:
        return False
    instance.learn_capacity(newer)
    return True


def learn_sample(instance: Instance, sample: EngineSample, now: float) -> None:
    """Take over a scrape, unless it lacks a figure that a fresh earlier one has.

    An engine that lets requests wait although its KV cache has room runs as many sequences as it can, unless
    prompts take all tokens of its iterations. Two scrapes in a row must agree on that.
    """
    last, last_at = instance.sample, instance.sample_at
    if last is None and sample.running is None and sample.waiting is None and sample.kv_usage is None:
        # A page without figures does not count as one, since answers tell more. It still names the engine.
        learn_capacity(instance, sample.capacity)
        instance.engine = sample.engine or instance.engine
        return
    if last is not None and last_at is not None and now - last_at <= SIGNAL_STALE_S:
        pairs = ((sample.running, last.running), (sample.waiting, last.waiting))
        if any(new is None and old is not None for new, old in (*pairs, (sample.kv_usage, last.kv_usage))):
            learn_capacity(instance, sample.capacity)
            return
    instance.touched()
    instance.sample, instance.slot_times = sample, None
    instance.sample_at, instance.pageless = now, False
    instance.evidence.silence.read(sample.generated, now)
    more = (sample.running or 0) + (sample.waiting or 0) - instance.sequences
    if instance.sequences and more <= _FOREIGN_SLACK + _FOREIGN_SLACK_SHARE * instance.sequences:
        more = 0  # the two counts are of different moments
    more = max(0, more)
    foreign, instance.foreign_seen = min(more, instance.foreign_seen), more
    if foreign != instance.foreign:
        instance.elapsed(now)
        instance.foreign = foreign
    if instance.profiled and sample.answered is not None:
        if now > instance.speed.last:
            instance.elapsed(now)
        instance.sample_mark = instance.speed.mark()
    learn_capacity(instance, sample.capacity)
    instance.engine = sample.engine or instance.engine
    if instance.adapters is not None and sample.adapters is not None:
        instance.adapters.told(sample.adapters)
    if sample.kv_usage is not None:
        expected = (instance.kv_tokens + instance.kv_prompt_tokens) / 2.0
        instance.kv_excess_tokens = max(0.0, sample.kv_usage * instance.kv_cache_tokens - expected)
    if instance.groups and sample.running is not None and sample.waiting is not None:
        # A group that came since the last scrape may be on its way.
        arrived = sum(
            lease.request.sequences - 1
            for lease in instance.groups.values()
            if last_at is not None and lease.dispatched_at <= last_at
        )
        instance.take_finished(min(arrived, instance.sequences - sample.running - sample.waiting))
    if instance.capacity.max_num_seqs is not None:
        return
    _learn_slots(instance, sample, now)


def token_came(instance: Instance, now: float) -> bool:
    """Note that a token came at `now`. Return True if that ends a stall.

    The time without a token is no evidence about the speed of the instance.
    """
    evidence = instance.evidence
    since = evidence.silence.silent_since
    if since is not None:
        _stood(instance, since, now)
        evidence.silence.silent_since = None
    return evidence.token(now)


def watch(instance: Instance, token_at: float | None, now: float) -> bool:
    """Check by its newest token if the instance works. Return True if a stall began or ended.

    Called about twice a second.
    """
    evidence = instance.evidence
    troubled = evidence.troubled
    changed = token_at is not None and token_at > evidence.silence.token_at and token_came(instance, token_at)
    counts = evidence.silence.counts(now)
    since, need_s, late_s = math.inf, 0.0, 0.0
    least_s = LEAST_SILENCE_S if instance.profiled or instance.speed.seen else UNKNOWN_SILENCE_S
    stands_s = least_s
    for lease in instance.leases.values():
        if lease.incoming or not lease.own or not lease.request.sequences:
            continue
        if lease.first_token_at is None:
            if since == math.inf:
                # Only the engine's own counters show progress of a whole answer before its end.
                shown = counts or lease.request.streamed
                since = lease.dispatched_at
                need_s = lease.forecast_first_s if shown else lease.forecast_end_s
                late_s = max(0.0, now - since - _LATE_FACTOR * need_s - 1.0)
        elif lease.request.streamed:
            since, need_s = min(since, lease.first_token_at), instance.occupancy.now_s
            stands_s = STANDS_S
            break
    begins = since < math.inf and _began_something_new(instance, max(since, evidence.silence.token_at))
    stalls = evidence.silence.watch(since, need_s, late_s, stands_s, least_s, now, begins=begins)
    changed = evidence.watched(stalls, now) or changed
    if evidence.silence.silent_since is not None:
        _stood(instance, evidence.silence.silent_since, now)
    else:
        _try_more_slots(instance, now)
    if evidence.troubled is not troubled:
        instance.touched()
    return changed


def _stood(instance: Instance, since: float, now: float) -> None:
    """Record that an instance has stood still since `since`."""
    instance.elapsed(now)
    instance.steps.total -= instance.speed.stood(since, now) * instance.steps.per_s


def is_first_of_kind(instance: Instance, request: Request) -> bool:
    """Return True if its process is not known to have answered such a request before."""
    features, begun = request.features, instance.evidence.begun
    return features is not None and any(each not in begun for each in features)


def _began_something_new(instance: Instance, silent_since: float) -> bool:
    """Return True if a request of a new kind came as it fell silent."""
    return any(
        lease.first_token_at is None
        and lease.dispatched_at <= silent_since + STANDS_S
        and is_first_of_kind(instance, lease.request)
        for lease in instance.leases.values()
    )


def learn_history(instance: Instance, told: EngineHistory, now: float) -> bool:
    """Take the speed from the engine's own means if no answer has shown one. Return True if it changed."""
    if instance.profiled or instance.speed.seen:
        return False
    model, batch, budget = instance.nominal, told.batch, float(instance.token_budget)
    tokens = batch * (told.prompt + told.output / 2.0)
    # As many prompts are read beside an answer as answers run.
    delay_s = batch * model.read_delay_s(told.prompt, 0.0, batch, tokens, budget)
    step_s, read_s = told.output * model.step_s(batch, tokens) + delay_s, 0.0
    if told.prefill_s is not None:
        read_s = model.first_token_s(told.prompt, 0.0, 0.0, batch, tokens, budget)
    answer_s, prefill_s = told.output * told.step_s, told.prefill_s or 0.0
    if not instance.speed.told(read_s + step_s, prefill_s + answer_s, now):
        return False
    if prefill_s > 0.0 and read_s > 0.0:  # reading and decoding apart, beside the factor of both
        both, most = (prefill_s + answer_s) / (read_s + step_s), MOST_UNPROFILED_FACTOR
        reading, decoding = [
            max(1.0 / most, min(most, each)) for each in (prefill_s / read_s / both, answer_s / step_s / both)
        ]
        instance.nominal = model.with_factors(reading, 1.0, decoding, 0.0, 0.0, 0.0)
    instance.exploring = None
    instance.take_speed()
    return True


def learn_reading(instance: Instance, lease: Lease, now: float) -> None:
    """Correct the speed of reading by a first token. Called before the ledger knows of it.

    Its prompt was read alone: none was unread as it was sent, and few tokens came since. No part of it was
    in a cache, so that no part has gone since. It waited for no slot and, as far as is known, for no memory.
    A data sheet and an engine's history tell that speed better. No adapter had to be loaded for it.
    """
    unread, known = lease.unread_tokens, instance.sample_at is not None or instance.capacity.kv_cache_tokens
    if not _LEAST_READ_TOKENS <= unread <= _MOST_READ_TOKENS or unread < lease.prompt_tokens:
        return
    if instance.reading_since != lease.dispatched_at or instance.adapters is not None:
        return
    if instance.late_tokens > _MOST_LATE_SHARE * unread or instance.nominal is not DEFAULT_LATENCY:
        return
    if lease.ahead > (instance.steps.most + 1 if known else 1):
        return
    if lease.expected_first_s > 0.0 and now > lease.dispatched_at > instance.speed.stood_at:
        instance.elapsed(now)
        if instance.speed.read(lease.expected_first_s, now - lease.dispatched_at, now):
            instance.take_speed()


def learn_prefill(instance: Instance, lease: Lease, now: float) -> bool:
    """Correct the speed by the first token of an answer. Return True if that changed the latency model."""
    if instance.profiled:
        changed = _confirm(instance, now)
        if changed:
            instance.take_speed()
        return changed
    if lease.ahead > instance.steps.most:
        return False  # it may have waited for a slot
    seconds = now - lease.dispatched_at
    if instance.speed.stood_at >= lease.dispatched_at:
        if lease.mark is None:
            return False
        seconds -= instance.speed.stood_s - lease.mark.stood_s
    changed = instance.speed.observe_prefill(lease.expected_first_s, seconds, now)
    if changed:
        instance.take_speed()
    return changed


def _confirm(instance: Instance, now: float) -> bool:
    """Compare the time to prefill the first prompts after an idle time with the profile.

    Each iteration computed as many prompts as were there. Return True if that changed the factor.
    """
    since, before_tokens = instance.prompts_alone
    if since == math.inf or instance.speed.stood_at >= since or instance.adapters is not None:
        return False  # answers run beside them, it stood, or loads adapters
    budget = float(instance.token_budget)
    done, pending = instance.speed.prompt_tokens - before_tokens, instance.pending_prompt_tokens
    read = min(float(done + pending), math.ceil(done / instance.engines / budget) * budget * instance.engines)
    if read > _MOST_PARTLY_RATIO * done:
        return False  # the last iteration may have begun before others came
    leases = instance.in_flight - instance.slotless
    prompts = max(1.0, read * leases / max(1.0, float(done + pending)))
    mean, each = read / prompts, max(1.0, prompts / instance.engines)
    expected_s = instance.nominal.joining_s(0.0, instance.capacity.async_scheduling is True)
    expected_s += instance.nominal.first_token_s(mean, 0.0, 0.0, 0.0, 0.0, budget, each)
    return instance.speed.begin(expected_s, now - since, now)


def learn_speed(instance: Instance, lease: Lease, now: float) -> bool:
    """Correct the speed by one answer that ended well. Return True if that changed the latency model."""
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
    speed = instance.speed
    seen_s = now - began_at - (speed.stood_s - mark.stood_s)
    changed = speed.answered(instance.nominal, mark, seen_s, steps, now, instance.token_budget)
    lease.expected_s, lease.seen_s, lease.mixed = speed.last_expected_s, seen_s, speed.last_mixed
    if speed.in_doubt:
        from hetlb.balancer.core.evidence.slowness import answered

        changed = answered(speed, seen_s / speed.last_expected_s, now) or changed
    if changed:
        instance.take_speed()
    return changed


# --- slots ---


def _learn_slots(instance: Instance, sample: EngineSample, now: float) -> None:
    """Learn how many sequences it runs at once, unless it stands still."""
    if instance.evidence.silence.silent_since is not None:
        instance.waiting_seen = 0
        return
    running = sample.running or 0
    fullest = sample.kv_usage if sample.kv_usage_max is None else sample.kv_usage_max
    room = fullest is not None and fullest < _ROOM_SHARE
    full = running if sample.waiting and room and _waits_for_slot(instance, running, now) else 0
    if running > instance.max_num_seqs or (full and full == instance.waiting_seen):
        believe_slots(instance, running, now)
    instance.waiting_seen = full


def learn_slots_late(instance: Instance, lease: Lease, now: float) -> None:
    """Learn how many sequences it runs at once, without metrics, from a first token that came late."""
    if instance.sample is not None or instance.capacity.max_num_seqs is not None or not instance.speed.seen:
        return
    late = now - lease.dispatched_at > _LATE_FACTOR * lease.forecast_first_s + 1.0
    if late and lease.ahead > instance.steps.most and instance.speed.stood_at < lease.dispatched_at:
        believe_slots(instance, instance.steps.most, now)


def believe_slots(instance: Instance, slots: int, now: float) -> None:
    """Take over an observed number of slots. After a trial in vain the next one comes later."""
    in_vain = slots <= instance.slots_learnt
    instance.slots_pause_s = min(_MOST_TRIAL_S, 2.0 * instance.slots_pause_s) if in_vain else FIRST_TRIAL_S
    instance.slots_learnt, instance.slots_learnt_at, instance.slots_step = slots, now, 1
    instance.max_num_seqs = slots
    instance.changed()


def _try_more_slots(instance: Instance, now: float) -> None:
    """Try more slots than were learnt if all of these are taken and the pause is over."""
    learnt_at = instance.slots_learnt_at
    pause_s = instance.slots_pause_s if instance.slots_step == 1 else FIRST_TRIAL_S
    if learnt_at is None or now - learnt_at < pause_s or instance.capacity.max_num_seqs is not None:
        return
    default = DEFAULT_MAX_NUM_SEQS * instance.engines
    if instance.max_num_seqs < default and instance.unfinished_sequences >= instance.max_num_seqs:
        instance.slots_learnt = instance.max_num_seqs  # they have lasted
        instance.max_num_seqs = min(default, instance.max_num_seqs + instance.slots_step)
        instance.slots_learnt_at, instance.slots_step = now, 2 * instance.slots_step
        instance.changed()


def _waits_for_slot(instance: Instance, running: int, now: float) -> bool:
    """Return True if the first request behind the `running` oldest sequences lacks a slot.

    It may wait for another reason: it came in the last iterations, or prompts take all tokens of the
    iterations. While prompts are computed, a first token shows when an iteration began. Only prefill legs and
    streams show when their prompt has been computed.
    """
    unread, left, began_at = 0, running, -math.inf
    for lease in instance.leases.values():
        if not lease.incoming:
            if left <= 0:
                full_s = instance.load.prompt_token_s * instance.token_budget
                early = not unread or lease.dispatched_at < began_at
                if not early or now - lease.dispatched_at <= _FULL_ITERATIONS * full_s:
                    return False
                break
            left -= lease.request.sequences
            if lease.first_token_at is not None:
                began_at = max(began_at, lease.first_token_at)
            elif lease.request.streamed or lease.decode is not None:
                unread += lease.unread_tokens
    return unread + running < instance.token_budget * instance.engines
