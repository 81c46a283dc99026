"""A server that is slow: slower than its profile says, or than usual while others are not.

Its work has gone elsewhere, so time alone does not end the verdict. Good answers in a row do: answers to
clients, or to requests of hetlb's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from hetlb.balancer.core.evidence.table import FORGIVING_ANSWERS, MOST_FORGIVING_ANSWERS, RELAPSE_S
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.speed import SLOWED_FACTOR, SpeedTracker

#: Factor below which a slow server's newest answers are well: over its profile, and over its usual factor.
_WELL_FACTOR: Final = 1.3
_WELL_CHANGE: Final = 1.4
#: Fewest answers of a server for a comparison, and most seconds between the newest answers of two servers.
_LEAST_COMPARED: Final = 5
_COMPARED_S: Final = 3.0


def answered(speed: SpeedTracker, factor: float, now: float) -> bool:
    """Take in the factor of an answer of a slow server. Return True if its speed changed.

    Enough good answers in a row end the slowness.
    """
    most = _WELL_FACTOR if speed.slow else math.inf
    if speed.slowed_since is not None:
        most = min(most, _WELL_CHANGE * speed.usual)
    if now - speed.well_at >= RELAPSE_S:
        speed.enough = FORGIVING_ANSWERS
    speed.well = speed.well + 1 if factor < most else 0
    if speed.well < speed.enough or speed.newest >= most:
        return False
    speed.slow, speed.slowed_since, speed.well, speed.well_at = False, None, 0, now
    speed.enough = min(MOST_FORGIVING_ANSWERS, 2 * speed.enough)
    return speed.renew(now)


def own_share(speed: SpeedTracker, lag_s: float) -> float:
    """Return the share of its answers' time that may be this process's own lag, 0 to 1."""
    return min(1.0, lag_s / speed.newest_s) if speed.newest_s > 0.0 else 0.0


def compare(instance: Instance, among: Sequence[Instance], lag_s: float, now: float) -> None:
    """Note if an instance has become slower while another one of its model has not.

    The other one must have answered at about the same time: other traffic, or a machine without a free CPU,
    slows all instances.
    """
    speed = instance.speed
    slower = speed.lately / speed.usual * (1.0 - own_share(speed, lag_s))
    if slower < SLOWED_FACTOR or not speed.settled:
        return
    best = math.inf
    for each in among:
        other = each.speed
        answered = other.answers >= _LEAST_COMPARED and abs(other.seen_at - speed.seen_at) <= _COMPARED_S
        if answered and each is not instance and each.routable:
            best = min(best, other.shown / other.usual)
    if slower >= SLOWED_FACTOR * best:
        speed.slowed_since = now if speed.slowed_since is None else speed.slowed_since
    elif best < math.inf:
        speed.slowed_since = None


def learn_alone(instance: Instance, steps: float, seconds: float, now: float) -> bool:
    """Correct the speed by decode steps of one sequence alone. True if that changed the latency model."""
    instance.elapsed(now)
    speed = instance.speed
    changed = speed.answered(instance.nominal, speed.mark(), seconds, steps, now, instance.token_budget)
    if speed.in_doubt:
        changed = answered(speed, seconds / speed.last_expected_s, now) or changed
    if changed:
        instance.take_speed()
    return changed
