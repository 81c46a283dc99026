"""Instances without a profile: which of equals is faster, and which is tried once before its speed shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from hetlb.balancer.core.policies.sight import ROOM, Sight

#: Largest score of an idle instance with assumed speed to be tried, in scores of the best one, if it were as
#: fast as the fastest one.
_GUESS_FACTOR: Final = 2.0


def precedes(each: Sight, found: Sight) -> bool:
    """Return True if an instance has a lower score than another, or the same and showed more speed.

    Speeds that were shown without a profile are averaged if they are near. Of equal ones the instance with
    the fewest requests is first, then the first of the file.
    """
    if each.score != found.score:
        return each.score < found.score
    one, other = each.instance, found.instance
    if one.speed.seen and other.speed.seen and one.speed.shown != other.speed.shown:
        return one.speed.shown < other.speed.shown
    if one.booked != other.booked:
        return one.booked < other.booked
    return each.index < found.index


def worth_a_try(sights: Sequence[Sight], rate: Callable[[Sight], None], found: Sight) -> Sight:
    """Return an idle instance of assumed speed if it may be about as good as the found one, else that.

    It may be as fast as the fastest one that is known. Its answer will show its speed.
    """
    fastest, guessed = math.inf, []
    for each in sights:
        instance = each.instance
        if instance.spec.latency is not None:
            continue
        if instance.speed.seen:
            fastest = instance.speed.shown if instance.speed.shown < fastest else fastest
        elif not instance.in_flight and each.state == ROOM:
            guessed.append(each)
    if not guessed:
        return found
    chosen, most = found, _GUESS_FACTOR * found.score
    for each in guessed:
        rate(each)
        if each.score * min(1.0, fastest / each.instance.speed.factor) <= most and (
            chosen is found or each.instance.booked < chosen.instance.booked
        ):
            chosen = each
    return chosen
