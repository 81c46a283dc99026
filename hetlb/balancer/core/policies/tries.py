"""Tries: an idle instance without a profile may get a request, as its answer will show its speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.policies.sight import ROOM, Sight

#: Largest score of an idle instance with assumed speed, as a multiple of the best one's, at which it is
#: tried. The score is computed as if it were as fast as the fastest instance.
_GUESS_FACTOR: Final = 2.0


def worth_a_try(
    fastest: float, untried: Sequence[Instance], look: Callable[[int], Sight], found: Sight
) -> Sight:
    """Return an idle instance of assumed speed if it may be about as good as the found one, else `found`.

    It is one of the `untried`, and may be as fast as the `fastest` known one. Its answer will show its speed.
    `look` returns the sight of an instance by its number.
    """
    if not untried:
        return found
    chosen, most = found, _GUESS_FACTOR * found.score
    for i, instance in enumerate(untried):
        if chosen is found or instance.booked < chosen.instance.booked:
            each = look(i)
            likely = each.score * min(1.0, fastest / instance.speed.factor)
            if each.state == ROOM and likely <= most:
                chosen = each
                if not instance.booked:
                    break
    return chosen


def tried_of(sights: Sequence[Sight], rate: Callable[[Sight], None], found: Sight) -> Sight:
    """Return one of the instances that is worth a try, else the found one."""
    fastest, untried = math.inf, []
    for each in sights:
        fastest = min(fastest, each.instance.shown_factor)
        if each.instance.untried and each.state == ROOM:
            untried.append(each)

    def look(i: int) -> Sight:
        rate(untried[i])
        return untried[i]

    return worth_a_try(fastest, [each.instance for each in untried], look, found)
