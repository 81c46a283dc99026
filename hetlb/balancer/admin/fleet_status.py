"""Status of the fleet in one line: its state, arrivals against capacity, the limit, and advice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from hetlb.balancer.admin.beliefs import BeliefSource, slots_source, speed_source
from hetlb.balancer.admin.causes import (
    FAILING_S,
    ORDER,
    State,
    StateCause,
    in_order,
    listed,
    may_have_one,
    worst,
)
from hetlb.balancer.core.demand import PROMPT_WEIGHT
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.queue import Queued
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import AdminState, Health
from hetlb.balancer.telemetry.recent import BIN_S, InstanceShare, Recent

#: Seconds that ended requests count for.
WINDOW_S: Final = 30.0
#: Least load of a busy model.
BUSY_LOAD: Final = 0.8
#: Least ended requests whose rate is believed before they were counted for `ARRIVALS_S`.
_LEAST_ENDED: Final = 20
#: Seconds over which arrivals are counted, and the least.
ARRIVALS_S: Final = 10.0
LEAST_S: Final = 1.0
#: Outcomes that say nothing of a fleet.
_ANSWERED: Final = {"ok", "client_gone"}


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Status of the instances of one model.

    Rates are in requests/s, None while the speed is a guess.
    `load` is arrivals over capacity; before an arrival rate or a capacity is known, the share taken of the
    scarcest thing. `sentence` says load, limit and headroom, `advice` the trouble and the remedy. `canary`
    names the new version and its share.
    """

    model: str
    state: State
    load: float
    request_rate: float
    capacity_req_s: float | None
    limited_by: str
    headroom_req_s: float | None
    advice: str
    instances: int
    able: int
    causes: tuple[StateCause, ...] = ()
    canary: str = ""

    def document(self) -> dict[str, Any]:
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        del found["instances"], found["able"]
        found["causes"] = [each.document() for each in self.causes]
        figures = {name: round(value, 4) for name, value in found.items() if isinstance(value, float)}
        return {**found, **figures, "sentence": self.sentence}

    @property
    def sentence(self) -> str:
        """One line without the state and the advice."""
        if not self.instances:
            return "no servers"
        if self.state is State.DOWN:
            return f"none of {self.instances} servers takes requests"
        parts = [f"load {100 * self.load:.0f} %"]
        if not self.request_rate and not self.load:
            parts = ["idle"] if self.capacity_req_s is not None else ["idle", "capacity not known yet"]
        if self.capacity_req_s is not None and (self.request_rate or self.load):
            joint = " of" if self.load <= 1.0 else ", capacity"
            parts[0] += f"{joint} about {_rate(self.capacity_req_s)} requests/s"
        if self.able < self.instances:
            parts.insert(0, f"{self.able} of {self.instances} servers")
        if self.load >= 0.005:  # shown as 1 % or more
            parts.append(f"limited by {self.limited_by}")
        if self.headroom_req_s is not None:
            parts.append(f"room for {_rate(self.headroom_req_s)} more" if self.headroom_req_s else "no room")
        if self.canary:
            parts.append(f"canary {self.canary}")
        return ", ".join(parts)


def pools(scheduler: Scheduler) -> dict[str, list[Instance]]:
    """Return the instances by model, in the order of `GET /v1/fleet`."""
    found: dict[str, list[Instance]] = {}
    for instance in scheduler.instances:
        name = instance.spec.model or (instance.served or ("",))[0]
        found.setdefault(name, []).append(instance)
    return found


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.2g}" if value < 9.95 else f"{value:.3g}"


def status(
    scheduler: Scheduler,
    pools: dict[str, list[Instance]],
    recent: Recent,
    now: float,
    reload_refused: str = "",
    canaries: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Return the body of `GET /v1/status`: the fleet as the worst of its models has it, and each model.

    `reload_refused` is why the file was rejected when it was read last, "" if it was not. `canaries` say
    who gets which share, by model.
    """
    shares = recent.last(WINDOW_S, now).shares
    found = [
        replace(_of_model(scheduler, model, instances, shares, recent, now), canary=canaries.get(model, ""))
        for model, instances in pools.items()
    ]
    none = ModelStatus("", State.DOWN, 0.0, 0.0, None, "", None, "The fleet has no server: add one.", 0, 0)
    worst_of = max(found, key=lambda each: (ORDER.index(each.state), each.load), default=none)
    document = worst_of.document()
    if worst_of.state is State.DOWN and any(each.state is not State.DOWN for each in found):
        document["state"] = State.DEGRADED
    if len(found) > 1 and worst_of.state is not State.WELL:
        document["sentence"] = f"{worst_of.model}: {document['sentence']}"
    causes = list(dict.fromkeys(cause for each in found for cause in each.causes))
    own = _of_proxy(recent, now, reload_refused)
    causes += own
    if ORDER.index(document["state"]) < ORDER.index(worst(own)):
        from hetlb.balancer.admin.rare_causes import headline

        document["state"], document["advice"] = worst(own), headline(own, 0)
    oldest_at = scheduler.queue.oldest_at()
    document["oldest_wait_s"] = 0.0 if oldest_at is None else round(now - oldest_at, 3)
    document["causes"] = [each.document() for each in in_order(causes)]
    del document["model"]
    return {**document, "models": [each.document() for each in found]}


def lasting(scheduler: Scheduler, recent: Recent, now: float, reload_refused: str = "") -> list[StateCause]:
    """Return the causes of a fleet alone: what `status` has under `causes`."""
    found = _of_proxy(recent, now, reload_refused)
    for model, instances in pools(scheduler).items():
        able = _able(instances)
        if able:
            entries = _waiting(scheduler, model)
            found += _causes_of(scheduler, model, instances, able, entries, recent, now)
        elif not any(each.comes for each in instances):
            from hetlb.balancer.admin.rare_causes import all_down

            found.append(all_down(model, instances, 0))
    return in_order(list(dict.fromkeys(found)))


def _of_proxy(recent: Recent, now: float, reload_refused: str) -> list[StateCause]:
    if not reload_refused and not recent.own:
        return []
    from hetlb.balancer.admin.rare_causes import of_proxy

    return of_proxy(recent, now, reload_refused)


def _able(instances: Sequence[Instance]) -> list[Instance]:
    return [each for each in instances if each.routable and each.evidence.health.state is Health.UP]


def _waiting(scheduler: Scheduler, model: str) -> list[Queued]:
    """Return the requests that wait for a model, background ones left out."""
    return [
        entry
        for entry in scheduler.queue
        if entry.request.model == model and not entry.request.service.background
    ]


def _of_model(
    scheduler: Scheduler,
    model: str,
    instances: Sequence[Instance],
    shares: Mapping[str, InstanceShare],
    recent: Recent,
    now: float,
) -> ModelStatus:
    entries = _waiting(scheduler, model)
    waiting = len(entries)
    able = _able(instances)
    served = sum(shares[each.name].ended for each in instances if each.name in shares) / WINDOW_S
    rate = _arrival_rate(scheduler, recent, model, now)
    total = len(instances)
    coming = [each for each in instances if each.comes]
    if not able and coming:
        from hetlb.balancer.admin.rare_causes import why_asleep

        why, state = why_asleep(coming, waiting, now), State.BUSY if waiting else State.WELL
        return ModelStatus(model, state, 0.0, served, None, "", None, why, total, 0)
    if not able:
        from hetlb.balancer.admin.rare_causes import all_down

        down = all_down(model, instances, waiting)
        return ModelStatus(model, State.DOWN, 0.0, served, 0.0, "", 0.0, down.advice, total, 0, (down,))
    capacity = _capacity(scheduler, model, able)
    load, limited_by = _load(able, waiting, served, capacity)
    if capacity is not None and rate is not None:
        # While requests wait the capacity is the served rate, whatever the model of speed predicts.
        capacity = min(capacity, _served_when_full(able, recent, model, now)) if waiting else capacity
        load = rate / capacity if capacity > 0.0 else load
        load = max(load, 1.0) if waiting else load
    headroom = None if capacity is None else max(0.0, capacity * (1.0 - load))
    lacking = 0 if capacity is None else math.ceil(len(able) * (load - 1.0))
    causes = _causes_of(scheduler, model, instances, able, entries, recent, now, lacking)
    state = worst(causes)
    little = state is State.WELL and load >= BUSY_LOAD
    if causes:
        from hetlb.balancer.admin.rare_causes import headline

        advice = headline(causes, waiting)
        advice = f"Little room is left ({limited_by}). {advice}" if little else advice
    elif little:
        advice = f"Little room is left ({limited_by}): plan for another server."
    else:
        advice = _when_well(able, served, load)
    state = State.BUSY if little else state
    return ModelStatus(
        model, state, load, served, capacity, limited_by, headroom, advice, total, len(able), causes
    )


def _causes_of(
    scheduler: Scheduler,
    model: str,
    instances: Sequence[Instance],
    able: Sequence[Instance],
    entries: Sequence[Queued],
    recent: Recent,
    now: float,
    lacking: int = 0,
) -> tuple[StateCause, ...]:
    """Return what is wrong with a model, the worst first.

    `entries` wait, `able` instances take requests, about `lacking` more would suffice.
    """
    waiting = len(entries)
    oldest_s = max([now - entry.arrived_at for entry in entries], default=0.0)
    last = recent.last(FAILING_S, now)
    failing = {each.name: last.shares[each.name] for each in instances if each.name in last.shares}
    losses = scheduler.fleet.losses
    found: list[StateCause | None] = []
    if losses is not None and any(each.failures for each in failing.values()):
        from hetlb.balancer.admin.rare_causes import of_client

        found.append(of_client(list(failing.values()), losses.clients))
    paces = {each.name: recent.pace(each.name) for each in instances}
    odd = [each for each in instances if may_have_one(each, failing.get(each.name), paces[each.name], now)]
    if odd:
        from hetlb.balancer.admin.rare_causes import of_instance

        found += [
            of_instance(each, failing.get(each.name), paces[each.name], now, recent.lag_s) for each in odd
        ]
    held = [each.name for each in instances if each.admin is not AdminState.READY]
    if waiting:
        from hetlb.balancer.admin.rare_causes import of_tenants, of_wait

        running = {lease.request.tenant or "" for each in able for lease in each.leases.values()}
        hog = of_tenants(Counter(entry.request.tenant or "" for entry in entries), running)
        more = f"{lacking} servers like these" if lacking > 1 else "a server"
        found += [hog, of_wait(waiting, oldest_s, able, listed(held) if held else "", hog, more)]
    if any(each.speed.slowed_since is not None for each in able):
        from hetlb.balancer.admin.rare_causes import of_speeds

        found += of_speeds(able, now)
    if any(each.twin for each in instances):
        from hetlb.balancer.admin.rare_causes import of_processes

        found += of_processes(instances)
    if losses is not None and losses.kinds.by_key:
        from hetlb.balancer.admin.rare_causes import of_kinds

        kinds = losses.kinds.by_instance()
        known = {cause.instance for cause in found if cause is not None}
        found += [of_kinds(each, kinds[each.name]) for each in able if each.name in kinds.keys() - known]
    if last.outcomes.keys() - _ANSWERED:
        from hetlb.balancer.admin.rare_causes import UNPLACED_S, of_refusals, of_unplaced

        found += [of_unplaced(recent.last(UNPLACED_S, now).outcomes), of_refusals(recent, now)]
    demand = scheduler.placement.demands.get(model)
    if demand is not None and demand.protected:
        from hetlb.balancer.admin.rare_causes import of_targets

        found += of_targets(demand, now)
    splits = scheduler.placement.splits
    if splits is not None:
        from hetlb.balancer.admin.rare_causes import of_transfers

        found += of_transfers(splits.failing(now), able)
    return tuple(in_order([each for each in found if each is not None]))


def _arrival_rate(scheduler: Scheduler, recent: Recent, model: str, now: float) -> float | None:
    """Return the recent arrival rate of a model in requests/s, None if less than `LEAST_S` was seen."""
    demand = scheduler.placement.demands.get(model)
    first = math.floor((now - ARRIVALS_S) / BIN_S)
    for number in sorted(each for each in recent.stretches if each >= first):
        levels = recent.stretches[number].levels
        if levels is not None and demand is not None:
            since = now - levels[3]
            return (demand.arrivals - levels[2].get(model, 0)) / since if since >= LEAST_S else None
    return None


def _served_when_full(able: Sequence[Instance], recent: Recent, model: str, now: float) -> float:
    """Return the requests/s that full servers complete, infinity while few ended.

    Ended requests are counted over the seconds of the arrivals, from the last sample without a waiting
    request on: servers that had room show no more than what came. The running requests over the age of the
    oldest one count if that is more: a burst has ended none yet.
    """
    last, stretches = math.floor(now / BIN_S), recent.stretches
    first = max(min(stretches, default=last), last + 1 - math.ceil(ARRIVALS_S / BIN_S))
    levels = [(number, each.levels) for number, each in stretches.items() if each.levels is not None]
    first = max(first, 1 + max([number for number, each in levels if not each[0].get(model)], default=-1))
    full_s = now - first * BIN_S
    shares = recent.last((last + 1 - first) * BIN_S, now).shares
    ended = sum(shares[each.name].ended for each in able if each.name in shares)
    if full_s < BIN_S or (0 < ended < _LEAST_ENDED and full_s < ARRIVALS_S - 2.0 * BIN_S):
        return math.inf
    since = [lease.dispatched_at for each in able for lease in each.leases.values()]
    age_s = now - min(since, default=0.0)
    return max(ended / full_s, 1.0 / WINDOW_S, len(since) / age_s if age_s > 0.0 else math.inf)


def _capacity(scheduler: Scheduler, model: str, able: Sequence[Instance]) -> float | None:
    """Return the capacity of instances in mean requests/s, None while the speed of one is a guess."""
    if any(speed_source(each) in (BeliefSource.ASSUMED, BeliefSource.STATED) for each in able):
        return None
    demand = scheduler.placement.demands.get(model)
    if demand is None or not demand.mix.count:
        return None
    size = PROMPT_WEIGHT * demand.mix.prompt + demand.mix.output
    speeds = scheduler.placement.speeds(model, able)
    return sum(speeds.values()) / size if size > 0.0 else None


def _load(able: Sequence[Instance], waiting: int, rate: float, capacity: float | None) -> tuple[float, str]:
    """Return the taken share of the scarcest resource, and its name: slots, KV cache, time, the queue."""
    slots = sum(each.max_num_seqs for each in able)
    running = sum(each.unfinished_sequences for each in able)
    by_slots = (running + waiting) / slots
    cache = sum(each.kv_cache_tokens for each in able)
    by_kv = sum((each.kv_tokens + each.kv_prompt_tokens) / 2 for each in able) / cache
    # Of what the model of speed says only as much as is below the rest of the evidence: it is no count.
    by_time = 0.0 if capacity is None or waiting else min(1.0, rate / capacity) if capacity else 0.0
    load = max(by_slots, by_kv, by_time)
    if waiting and waiting > running:
        full = running >= slots or by_kv >= BUSY_LOAD
        return load, f"the queue: {'all servers are full' if full else 'no server is given more now'}"
    if load == by_slots:
        fullest = max(able, key=lambda each: each.unfinished_sequences / each.max_num_seqs)
        return load, f"slots of {fullest.name}"
    if load == by_kv:
        fullest = max(able, key=lambda each: each.kv_tokens / each.kv_cache_tokens)
        return load, f"KV cache of {fullest.name}"
    busiest = max(able, key=lambda each: each.unfinished_sequences / each.max_num_seqs)
    return load, f"compute of {busiest.name}"


def _when_well(able: Sequence[Instance], rate: float, load: float) -> str:
    guessed = [each.name for each in able if slots_source(each) is BeliefSource.ASSUMED]
    if guessed:
        it = "its" if len(guessed) == 1 else "their"
        return f"The slots of {listed(guessed)} are assumed: state {it} max_num_seqs in the fleet file."
    assumed = [each for each in able if speed_source(each) is BeliefSource.ASSUMED]
    unknown = [each.name for each in assumed if not each.spec.gpu]
    if unknown and len(able) > 1:
        it = "its" if len(unknown) == 1 else "their"
        return f"The speed of {listed(unknown)} is assumed until an answer: state {it} gpu in the file."
    return "Nothing to do." if rate or load else "No recent requests."
