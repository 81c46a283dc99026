"""Rules of the default policy beside its score: each looks at the rated instances of one decision."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetlb.balancer.core.occupancy import UNREAD_ITERATIONS
from hetlb.balancer.core.policies.sight import HELD, ROOM, UNREAD, SchedulingContext, Sight

# --- prompts that begin alike: one that would be read again waits for the full instance that holds it ---


def most_cached(sights: Sequence[Sight]) -> Sight | None:
    """Return the instance that holds most of the prompt, None if none holds any."""
    found, most = None, 0.0
    for each in sights:
        if each.cached > most:
            most, found = each.cached, each
    return found


def keep_together(ctx: SchedulingContext, sights: Sequence[Sight], there: Sight, weight: float) -> None:
    """Pass over instances with less of the prompt cached if waiting for a full one (`there`) costs less.

    Requests that have room now also wait until the next slot there is free, on average for half of that time.
    One second of waiting weighs `weight`.
    """
    mix, room = ctx.demand.mix, 1.0
    size, need = max(1.0, mix.size), max(1.0, mix.booked + mix.output / 2.0)
    for each in sights:
        if each.state == ROOM:
            left = 1.0 + (each.load.kv_cache_tokens - each.used_tokens) / need
            room += min(left, each.load.all_slots - each.seen.running)
    delay_s = size / there.cost.speed * min(room, 1.0 + ctx.waiting / size) / 2.0
    limit = there.score + weight * delay_s
    for each in sights:
        if each.state == ROOM and each.cached < there.cached and limit < each.score:
            each.limit, each.state = limit, HELD


# --- LoRA adapters that take each other's slots ---


def displaces(ctx: SchedulingContext, sights: Sequence[Sight]) -> bool:
    """Return True for a LoRA adapter if more of them have requests than some instance has slots."""
    if ctx.adapter_load_s <= 0.0:
        return False
    slots = [each.instance.adapters for each in sights if each.instance.adapters is not None]
    asked = {ctx.request.model}
    for each in slots:
        asked.update(each.count())
    return any(each.slots < len(asked) for each in slots)


# --- the end of a burst: no more requests come, so what waits is all that the instances will have to do ---


def end_burst(ctx: SchedulingContext, sights: Sequence[Sight], todo: float, hold: bool) -> None:
    """Set when the faster instances will be done with `todo`, and the unread tokens of all instances.

    `sights` are in the order of speed. The first one has a forecast. A request is not sent elsewhere for the
    end of all work if LoRA adapters take each other's slots: each load makes the end later.
    """
    hold = hold and not displaces(ctx, sights)
    unread, cached, long_s = 0.0, 0.0, sights[0].long_s
    for each in sights:
        unread += each.seen.unread
        if each.cached > cached:
            cached = each.cached
        if hold:
            each.done_s = long_s + todo / each.faster if each.faster > 0.0 else math.inf
    ctx.unread, ctx.most_cached = unread / float(len(sights)), cached
    if ctx.waiting:
        size = ctx.demand.mix.size
        ctx.burst = max(ctx.burst, 1.0 + ctx.waiting / (size if size > 1.0 else 1.0))


# --- prompts that no engine reads soon: they wait at the proxy, and shorter ones go before them ---


def leave_unread(ctx: SchedulingContext, sights: list[Sight], hold: bool) -> list[Sight]:
    """Return `sights`. With `hold`, take room from instances with many unread prompts while all have work.

    A prompt longer than `UNREAD_ITERATIONS` goes to an instance with no more unread tokens than its own. A
    prompt that is mostly cached goes to its cache. If LoRA adapters take each other's slots, requests go to
    their adapters: unread prompts there wait for slots of adapters, and are read soon after.
    """
    hold = hold and not displaces(ctx, sights)
    for each in sights:
        if not hold or (each.state == ROOM and each.seen.empty):
            return sights
    for each in sights:
        unread, most = each.seen.unread, UNREAD_ITERATIONS * each.load.budget
        if each.state == ROOM and unread + unread > most:
            new = ctx.prompts * (ctx.prompt - each.cached)
            if unread > new and unread > most - new and each.cached <= new:
                each.state = UNREAD
    return sights


def wait_beside(ctx: SchedulingContext, full: Sight, todo: float) -> tuple[float, float]:
    """Return the work before a request that waits for a full instance, and the arriving work per second.

    Every request that arrives before the queue of `todo` is empty waits for this one (the busy period of a
    fluid queue). If unread prompts keep the request from the instance, the score there contains the wait for
    these. Then only what waits at the proxy is added (`ordinary.py`: long prompts TTFT 1.04, E2E 1.02,
    elsewhere 1.00).
    """
    if full.state == UNREAD:
        return float(ctx.waiting), 0.0
    return todo, ctx.demand.rate.per_s(ctx.now) * ctx.demand.mix.size if ctx.goes_on else 0.0


# --- which of equals is faster ---


def precedes(each: Sight, found: Sight) -> bool:
    """Return True if an instance has a lower score than another, or the same and comes first."""
    if each.score != found.score:
        return each.score < found.score
    if each.instance.precedes(found.instance):
        return True
    return not found.instance.precedes(each.instance) and each.index < found.index
