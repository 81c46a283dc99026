"""Prompts that begin alike: one that would be read again waits for the full instance that holds it."""

from __future__ import annotations

from collections.abc import Sequence

from hetlb.balancer.core.policies.sight import HELD, ROOM, SchedulingContext, Sight


def most_cached(sights: Sequence[Sight]) -> Sight | None:
    """Return the instance that holds most of the prompt, None if none holds any."""
    found, most = None, 0.0
    for each in sights:
        if each.cached > most:
            most, found = each.cached, each
    return found


def keep_together(ctx: SchedulingContext, sights: Sequence[Sight], there: Sight, weight: float) -> None:
    """Pass instances with less of the prompt cached over if the wait for a full one with more costs less.

    Until its next slot is free, requests with room now wait, too: half of the gap in the mean. A second of a
    wait weighs `weight`.
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
