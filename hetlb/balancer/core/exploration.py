"""Slots of an instance without a profile, until first tokens have shown that it runs as many as it has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.types import Lease

if TYPE_CHECKING:
    from hetlb.balancer.core.instance import Instance

#: Sequences that an instance without a profile runs at once at first, and as many more for each first token.
#: The number doubles after each `_UNEXPLORED_S` without a first token. A burst that is placed before a speed
#: is known keeps the pace of the slowest instance (`ordinary.py`, at once, mean TTFT over the same with
#: profiles: 1.38, 1.14, 1.15, 1.14 with 2, 3, 4, 8; E2E 1.18, 1.11, 1.12, 1.20).
_UNEXPLORED_SEQUENCES: Final = 3
_UNEXPLORED_S: Final = 10.0
#: Multiple of its forecast after which a first answer may have waited for a slot.
_LATE_ANSWER: Final = 1.5


def tells_slots(instance: Instance) -> bool:
    """Return True if the engine of an instance reports its figures, or its slots are stated."""
    return instance.sample_at is not None or instance.capacity.max_num_seqs is not None


@mypyc_attr(acyclic=True)
class Exploration:
    """Sequences that the answers of an instance allow, as long as it is explored.

    What whole answers show of its slots (`SlotTimes.likely`) counts more than first tokens.
    """

    __slots__ = ("_first_tokens",)

    def __init__(self) -> None:
        self._first_tokens = 0

    def least_sequences(self, instance: Instance) -> int:
        """Return the sequences that it may run at once, however long it has been silent."""
        times = instance.slot_times
        likely = 0 if times is None else times.likely
        return likely or _UNEXPLORED_SEQUENCES * (1 + self._first_tokens)

    def sequences(self, instance: Instance, now: float) -> float:
        """Return the sequences that it may run at once."""
        least, waited_s, times = self.least_sequences(instance), 0.0, instance.slot_times
        if times is not None and times.likely:
            return least
        for oldest in instance.leases.values():  # the first of them is the oldest
            if oldest.request.sequences:
                waited_s = 0.0 if oldest.first_token_at is not None else now - oldest.dispatched_at
                break
        return max(least, _UNEXPLORED_SEQUENCES * math.exp2(min(16.0, max(0.0, waited_s) / _UNEXPLORED_S)))

    def going_on(self, instance: Instance, now: float) -> Exploration | None:
        """Return the exploration, None if it allows as many sequences as the instance runs at once."""
        return None if self.sequences(instance, now) >= instance.max_num_seqs else self

    def first_token(self, instance: Instance, lease: Lease, now: float) -> None:
        """Count the first token of a lease.

        Unless the engine tells its slots, a late first token does not count: its request may have waited.
        """
        told, times = tells_slots(instance), instance.slot_times
        expected_s = lease.forecast_first_s if lease.request.streamed else lease.forecast_end_s
        if not told and now - lease.dispatched_at > _LATE_ANSWER * expected_s:
            return
        if times is not None:  # more may run than whole answers showed: a stream tells sooner if it waits
            times.likely = 0
        if told:
            self._first_tokens += lease.request.sequences
        else:
            self.began(lease)

    def began(self, lease: Lease) -> None:
        """Count an answer that waited for no slot, by at most the sequences that ran as it was sent."""
        tokens = self._first_tokens + lease.request.sequences
        self._first_tokens = max(self._first_tokens, min(tokens, lease.ahead))
