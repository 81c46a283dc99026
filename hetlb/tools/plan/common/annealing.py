"""Simulated annealing, which all local searches of planners share."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TypeVar

_State = TypeVar("_State")
_Change = TypeVar("_Change")


def anneal(
    start: _State,
    score: float,
    change: Callable[[_State], _Change | None],
    evaluate: Callable[[_Change, float], tuple[_State, float]],
    *,
    done: Callable[[], float],
    scale: float,
    heat: tuple[float, float],
    rng: random.Random,
    accepted: Callable[[_State], object] = lambda state: None,
) -> _State:
    """Walk from `start` until `done`, the part of the walk that is over, is 1; returns the best state met.

    `change` draws a neighbour (None: it does not fit), `evaluate` gives its state and score, which need not
    be exact where it is below the threshold given; `accepted` sees every step. Temperatures are `scale` times
    `heat`, first to last.
    """
    state = best = start
    most = score
    while (part := done()) < 1.0:
        candidate = change(state)
        if candidate is None:
            continue
        temperature = scale * heat[0] * (heat[1] / heat[0]) ** part
        threshold = score + temperature * math.log(max(rng.random(), 1e-12))
        found, value = evaluate(candidate, threshold)
        if value >= threshold:
            state, score = found, value
            if value > most:
                best, most = found, value
            accepted(found)
    return best
