"""Status of the fleet in one line: how well it is, load against capacity, what limits it, what to do.

Load is what is taken of the scarcest thing that a model's instances have: slots, KV cache or computing time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final

from hetlb.core.demand import PROMPT_WEIGHT
from hetlb.core.instance import Instance
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import AdminState, Health
from hetlb.proxy.beliefs import BeliefSource, slots_source, speed_source
from hetlb.proxy.telemetry.recent import BIN_S, InstanceShare, Recent

#: Requests that ended within so many seconds count; a queue grows in the half of it.
WINDOW_S: Final = 30.0
#: So many times the size of `WINDOW_S` before, and more than a few: a queue grows.
GROWN: Final = 1.3
LEAST_QUEUE: Final = 8
#: From this load on a model is busy.
BUSY: Final = 0.8
#: An instance that takes so many times as long as its profile says is slow.
SLOW: Final = 1.5
#: A share of answers that fail by an engine's doing, and how many at least.
FAILING: Final = 0.05
LEAST_FAILED: Final = 3


class State(StrEnum):
    """State of a fleet or model, the better first."""

    WELL = "well"
    BUSY = "busy"
    DEGRADED = "degraded"
    DOWN = "down"


_ORDER: Final = tuple(State)


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Status of the instances of one model.

    `load` is a share, above 1 where requests wait; rates in requests/s, None while the speed is a guess.
    `sentence` says state, load, limit and headroom, `advice` what to do.
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

    def document(self) -> dict[str, Any]:
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        del found["instances"], found["able"]
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
        if self.capacity_req_s is not None:
            joint = " of" if self.load <= 1.0 else " with what waits, capacity"
            parts[0] += f"{joint} about {_rate(self.capacity_req_s)} requests/s"
        if self.able < self.instances:
            parts.insert(0, f"{self.able} of {self.instances} servers")
        if self.request_rate or self.load:
            parts.append(f"limited by {self.limited_by}")
        if self.headroom_req_s is not None:
            parts.append(f"room for {_rate(self.headroom_req_s)} more" if self.headroom_req_s else "no room")
        return ", ".join(parts)


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.2g}" if value < 9.95 else f"{value:.3g}"


def status(
    scheduler: Scheduler, pools: dict[str, list[Instance]], recent: Recent, now: float
) -> dict[str, Any]:
    """The body of `GET /v1/status`: the fleet as the worst of its models has it, and each model."""
    waiting = scheduler.queue.by_model()
    shares = recent.shares(WINDOW_S, now)
    found = [
        _of_model(scheduler, model, instances, waiting.get(model, 0), shares, recent, now)
        for model, instances in pools.items()
    ]
    none = ModelStatus("", State.DOWN, 0.0, 0.0, None, "", None, "The fleet has no server: add one.", 0, 0)
    worst = max(found, key=lambda each: (_ORDER.index(each.state), each.load), default=none)
    document = worst.document()
    if worst.state is State.DOWN and any(each.state is not State.DOWN for each in found):
        document["state"] = State.DEGRADED
    if len(found) > 1 and worst.state is not State.WELL:
        document["sentence"] = f"{worst.model}: {document['sentence']}"
    del document["model"]
    return {**document, "models": [each.document() for each in found]}


def _of_model(
    scheduler: Scheduler,
    model: str,
    instances: Sequence[Instance],
    waiting: int,
    shares: Mapping[str, InstanceShare],
    recent: Recent,
    now: float,
) -> ModelStatus:
    wanted = [each for each in instances if each.admin is AdminState.READY and not each.asleep]
    able = [each for each in wanted if each.routable and each.health.state is Health.UP]
    rate = sum(shares[each.name].ended for each in instances if each.name in shares) / WINDOW_S
    total = len(instances)
    if not able:
        return ModelStatus(
            model, State.DOWN, 0.0, rate, 0.0, "", 0.0, _why_down(model, instances, waiting), total, 0
        )
    capacity = _capacity(scheduler, model, able)
    load, limited_by = _load(able, waiting, rate, capacity)
    headroom = None if capacity is None else max(0.0, capacity * (1.0 - load))
    advice = _trouble(wanted, able, waiting, shares, _grows(recent, model, waiting, now))
    advice = advice or _failing_transfers(scheduler, able, now)
    if advice:
        state = State.DEGRADED
    elif load >= BUSY or waiting:
        state, advice = State.BUSY, _when_busy(waiting, limited_by)
    else:
        state, advice = State.WELL, _when_well(able, rate, load)
    return ModelStatus(model, state, load, rate, capacity, limited_by, headroom, advice, total, len(able))


def _grows(recent: Recent, model: str, waiting: int, now: float) -> bool:
    """True if the queue of a model has grown throughout: half a window ago, and since."""
    first, last = math.ceil((now - WINDOW_S / 2) / BIN_S), math.floor((now - WINDOW_S / 6) / BIN_S)
    shown = [recent.stretches[number] for number in range(first, last + 1) if number in recent.stretches]
    half = [each.levels[0].get(model, 0) for each in shown if each.levels is not None]
    grown = bool(half) and waiting >= GROWN * max(half) and half[-1] >= half[0]
    return grown and waiting >= LEAST_QUEUE


def _capacity(scheduler: Scheduler, model: str, able: Sequence[Instance]) -> float | None:
    """Requests/s that the instances serve of the mean request, None while a speed is a guess."""
    if any(speed_source(each) is BeliefSource.ASSUMED for each in able):
        return None
    demand = scheduler.placement.demands.get(model)
    if demand is None or not demand.mix.count:
        return None
    size = PROMPT_WEIGHT * demand.mix.prompt + demand.mix.output
    speeds = scheduler.placement.speeds(model, able)
    return sum(speeds.values()) / size if size > 0.0 else None


def _load(able: Sequence[Instance], waiting: int, rate: float, capacity: float | None) -> tuple[float, str]:
    """Share taken of the scarcest thing, and what that is: slots, KV cache, computing time, the queue."""
    slots = sum(each.max_num_seqs for each in able)
    running = sum(each.unfinished_sequences for each in able)
    by_slots = (running + waiting) / slots
    cache = sum(each.kv_cache_tokens for each in able)
    by_kv = sum((each.kv_tokens + each.kv_prompt_tokens) / 2 for each in able) / cache
    # Of what the model of speed says only as much as is below the rest of the evidence: it is no count.
    by_time = 0.0 if capacity is None or waiting else min(1.0, rate / capacity) if capacity else 0.0
    load = max(by_slots, by_kv, by_time)
    if waiting and waiting > running:
        return load, "the queue: all servers are full"
    if load == by_slots:
        fullest = max(able, key=lambda each: each.unfinished_sequences / each.max_num_seqs)
        return load, f"slots of {fullest.name}"
    if load == by_kv:
        fullest = max(able, key=lambda each: each.kv_tokens / each.kv_cache_tokens)
        return load, f"KV cache of {fullest.name}"
    busiest = max(able, key=lambda each: each.unfinished_sequences / each.max_num_seqs)
    return load, f"compute of {busiest.name}"


def _listed(names: Sequence[str]) -> str:
    if len(names) > 3:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _waiting(number: int) -> str:
    return "" if not number else " 1 request waits." if number == 1 else f" {number} requests wait."


def _why_down(model: str, instances: Sequence[Instance], waiting: int) -> str:
    held = [each.name for each in instances if each.admin is not AdminState.READY]
    wait = _waiting(waiting)
    if len(held) == len(instances):
        return f"Every server of {model or 'the fleet'} is drained or in maintenance: set one ready.{wait}"
    dead = [each for each in instances if each.admin is AdminState.READY]
    reason = f" ({dead[0].health.reason})" if dead[0].health.reason else ""
    verb, start = ("does", "it") if len(dead) == 1 else ("do", "one")
    return f"{_listed([each.name for each in dead])} {verb} not answer{reason}: start {start}.{wait}"


def _trouble(
    wanted: Sequence[Instance],
    able: Sequence[Instance],
    waiting: int,
    shares: Mapping[str, InstanceShare],
    grows: bool,
) -> str:
    """Advice where something is wrong, "" where nothing is."""
    dead = [each for each in wanted if each not in able]
    if dead:
        are = "is" if len(dead) == 1 else "are"
        reason = f" ({dead[0].health.reason})" if dead[0].health.reason else ""
        wait = _waiting(waiting)
        names = _listed([each.name for each in dead])
        return f"{names} {are} out{reason}: bring {'it' if len(dead) == 1 else 'them'} back.{wait}"
    for each in able:
        if each.spec.model and each.served is not None and each.spec.model not in each.models:
            serves = _listed(list(each.served)) or "nothing"
            return f"{each.name} serves {serves}, not {each.spec.model}: correct the name in the fleet file."
        share = shares.get(each.name)
        if share is not None and share.failed >= LEAST_FAILED and share.failed > FAILING * share.ended:
            percent = 100 * share.failed / share.ended
            return f"{percent:.0f} % of what {each.name} answers fails: its log says why."
    slow = [each for each in able if each.profiled and each.speed.seen and each.speed.factor >= SLOW]
    if slow:
        worst = max(slow, key=lambda each: each.speed.factor)
        return (
            f"{worst.name} takes {worst.speed.factor:.1f} times as long as its profile says: look at its GPU,"
            " or profile it again."
        )
    if grows:
        return f"More comes than can be served: add a server, or limit clients.{_waiting(waiting)}"
    return ""


def _failing_transfers(scheduler: Scheduler, able: Sequence[Instance], now: float) -> str:
    """Return advice where KV transfers between two of the instances fail, "" where none do."""
    names = {each.name for each in able}
    for record in scheduler.holds.transfers.failing(now):
        source, target = record.names
        if {source, target} <= names:
            return (
                f"KV caches of prompts read at {source} do not reach {target}, which reads them again: such "
                f"requests are no longer split. The log of {target} says why; both need the same layers (no "
                "pipelines) and cache type."
            )
    return ""


def _when_busy(waiting: int, limited_by: str) -> str:
    if waiting:
        return f"All servers are in full use:{_waiting(waiting)} Another server would shorten that."
    return f"Little room is left ({limited_by}): plan for another server."


def _when_well(able: Sequence[Instance], rate: float, load: float) -> str:
    guessed = [each.name for each in able if slots_source(each) is BeliefSource.ASSUMED]
    if guessed:
        it = "its" if len(guessed) == 1 else "their"
        return f"The slots of {_listed(guessed)} are assumed: state {it} max_num_seqs in the fleet file."
    return "Nothing to do." if rate or load else "No request came of late; nothing to do."
