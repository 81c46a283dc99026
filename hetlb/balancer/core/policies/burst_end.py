"""The end of a burst: no more requests come, so what waits is all that the instances will have to do."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetlb.balancer.core.policies.sight import SchedulingContext, Sight


def end_burst(ctx: SchedulingContext, sights: Sequence[Sight], todo: float, hold: bool) -> None:
    """Set until when the faster instances are done with `todo`, and what waits on all to be read.

    `sights` are in the order of speed; the first one is foreseen.
    """
    unread, most_cached, long_s = 0.0, 0.0, sights[0].long_s
    for each in sights:
        unread += each.seen.unread
        if each.cached > most_cached:
            most_cached = each.cached
        if hold:
            each.done_s = long_s + todo / each.faster if each.faster > 0.0 else math.inf
    ctx.unread, ctx.most_cached = unread / float(len(sights)), most_cached
    if ctx.waiting:
        size = ctx.demand.mix.size
        ctx.burst = max(ctx.burst, 1.0 + ctx.waiting / (size if size > 1.0 else 1.0))
