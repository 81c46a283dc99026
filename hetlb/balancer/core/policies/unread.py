"""Prompts that no engine reads soon: they wait at the proxy, and shorter ones go before them."""

from __future__ import annotations

from typing import Final

from hetlb.balancer.core.policies.sight import ROOM, UNREAD, SchedulingContext, Sight

#: Iterations of unread prompts that an engine has ahead (`ordinary.py`: 8 equal at once TTFT 1.67 x with 4,
#: 1.42 x with 16; other overload 1.17, 1.13 x; the worst agents 0.67, 0.94 x).
_ITERATIONS: Final = 16.0


def leave_unread(ctx: SchedulingContext, sights: list[Sight], hold: bool) -> list[Sight]:
    """Return the sights. With `hold` one with many prompts to read takes no more, while each has work.

    A prompt longer than what they may have ahead goes where no more than its own length is unread. One that
    is mostly cached goes to its cache.
    """
    for each in sights:
        if not hold or (each.state == ROOM and each.seen.empty):
            return sights
    for each in sights:
        unread, most = each.seen.unread, _ITERATIONS * each.load.budget
        if each.state == ROOM and unread + unread > most:
            new = ctx.prompts * (ctx.prompt - each.cached)
            if unread > new and unread > most - new and each.cached <= new:
                each.state = UNREAD
    return sights
