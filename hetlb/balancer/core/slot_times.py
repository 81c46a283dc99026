"""Slots of an engine that shows nothing but whole answers: the number that explains how long each took.

An engine of `c` slots begins a request once fewer than `c` earlier ones are unfinished. So each number of
slots says when an answer began. By the right one the answers take the time of their tokens at any load; by
a larger one they take longer the more were sent, by a smaller one they end too soon, or even before they
began. The number with the least variance of that ratio is believed once others fit clearly worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core import learning
from hetlb.balancer.core.types import Lease

if TYPE_CHECKING:
    from hetlb.balancer.core.instance import Instance

#: Numbers of slots that are compared; the last stands for no limit that matters.
CANDIDATES: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256)
#: Number of answers that count, about; fewest for a conclusion.
_ANSWERS: Final = 64.0
_LEAST_ANSWERS: Final = 8.0
#: Standard deviation of the ratio's logarithm on any engine. Factor for "no limit" to be clearly worse.
_NOISE: Final = 0.1
_WORSE_FACTOR: Final = 1.25
#: Distance from the mean of an answer that ended before it could have begun.
_CONTRADICTION: Final = 3.0


@mypyc_attr(acyclic=True)
class _Sent:
    """A sent request. `ahead`: the number of earlier ones that are still unfinished."""

    __slots__ = ("ahead", "since")

    def __init__(self, ahead: int, now: float) -> None:
        self.ahead = ahead
        #: Time since which each number of earlier ones is not exceeded; the present number comes last.
        self.since: list[float] = [now]


@mypyc_attr(acyclic=True)
class _Fit:
    """Weighted mean and variance of the ratio's logarithm, under one assumed number of slots."""

    __slots__ = ("mean", "square", "weight")

    def __init__(self) -> None:
        self.weight = self.mean = self.square = 0.0

    def add(self, value: float) -> None:
        keep = 1.0 - 1.0 / _ANSWERS
        self.weight = self.weight * keep + 1.0
        off = value - self.mean
        self.mean += off / self.weight
        self.square = self.square * keep + off * (value - self.mean)

    @property
    def deviation(self) -> float:
        return math.sqrt(max(0.0, self.square / self.weight) + _NOISE * _NOISE)


@mypyc_attr(acyclic=True)
class SlotTimes:
    """Evidence about the slots of one instance."""

    __slots__ = ("_ended", "_fits", "_sent", "likely")

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}
        #: The request that ended last, and its id.
        self._ended: tuple[int, _Sent] | None = None
        self._fits = [_Fit() for _ in CANDIDATES]
        #: Number of slots that explains all answers so far clearly better than no limit, 0 without one, or
        #: since something else showed that more may run.
        self.likely = 0

    def begin(self, lease_id: int, now: float) -> None:
        """Note that a request was sent."""
        self._sent[lease_id] = _Sent(len(self._sent), now)

    def end(self, lease_id: int, now: float) -> None:
        """Note that a request ended: the later ones have one less ahead."""
        ended = self._sent.pop(lease_id, None)
        if ended is None:
            return
        self._ended = lease_id, ended
        for each in self._sent.values():
            if each.ahead > ended.ahead:
                each.ahead -= 1
                each.since.append(now)

    def answered(self, lease_id: int, expected_s: Callable[[float], float], now: float) -> int:
        """Take in a whole answer that ended just now. Return the slots that are believed, 0 for none.

        `expected_s` gives the time of its tokens in a batch by any model that is right about proportions.
        """
        if self._ended is None or self._ended[0] != lease_id:
            return 0
        sent, running = self._ended[1], len(self._sent) + 1
        at_most = expected_s(float(running))
        for slots, fit in zip(CANDIDATES, self._fits, strict=True):
            if sent.ahead >= slots:
                fit.add(fit.mean - _CONTRADICTION)
                continue
            at = len(sent.since) - (slots - sent.ahead)
            seconds = at_most if slots >= running else expected_s(float(slots))
            fit.add(math.log(max(1e-6, now - sent.since[max(0, at)]) / max(1e-6, seconds)))
        self.likely = self._likely()
        return self.likely if self._fits[-1].weight >= _LEAST_ANSWERS else 0

    def _likely(self) -> int:
        """Return the number of slots that explains the answers, 0 while several do."""
        most = self._fits[-1]
        best, slots = most, 0
        for each, fit in zip(CANDIDATES, self._fits, strict=True):
            if fit.deviation < best.deviation:
                best, slots = fit, each
        return slots if most.deviation > _WORSE_FACTOR * best.deviation else 0


def slot_times_of(leases: Iterable[Lease], new: Lease) -> SlotTimes:
    """Return the evidence of an instance with these leases, before a new one of them."""
    times = SlotTimes()
    for each in leases:
        if each is not new and each.request.sequences:
            times.begin(each.id, each.dispatched_at)
    return times


def learn_slots_whole(instance: Instance, lease: Lease, now: float) -> None:
    """Learn how many sequences it runs at once, without metrics, from a whole answer that ended well."""
    times, nominal = instance.slot_times, instance.nominal
    if times is None:
        return
    prompt, steps = float(lease.request.prompt_tokens), max(1.0, float(lease.output_tokens))
    read_s, context = nominal.prefill_s(prompt), prompt + steps / 2.0

    def expected_s(batch: float) -> float:
        return read_s + steps * nominal.step_s(batch, batch * context)

    slots = times.answered(lease.id, expected_s, now)
    if slots and slots != instance.max_num_seqs:
        learning.believe_slots(instance, slots, now)
    exploring = instance.exploring
    if exploring is not None:
        if not times.likely:
            exploring.began(lease)
        instance.exploring = exploring.going_on(instance, now)
