"""Slots of an instance without a profile, until first tokens have shown that it runs as many as it has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.types import Lease, LeaseId

#: Sequences that an instance without a profile runs at once at first, and as many more for each first token.
#: The number doubles after each `_UNEXPLORED_S` without a first token. A burst that is placed before a speed
#: is known keeps the pace of the slowest instance (`ordinary.py`, at once, mean TTFT over the same with
#: profiles: 1.38, 1.14, 1.15, 1.14 with 2, 3, 4, 8; E2E 1.18, 1.11, 1.12, 1.20).
_UNEXPLORED_SEQUENCES: Final = 3
_UNEXPLORED_S: Final = 10.0
#: Multiple of its forecast after which a first answer may have waited for a slot.
_LATE_ANSWER: Final = 1.5


@mypyc_attr(acyclic=True)
class Exploration:
    """Sequences that the answers of an instance allow, as long as it is explored."""

    __slots__ = ("_first_tokens", "likely")

    def __init__(self) -> None:
        self._first_tokens = 0
        #: Number of slots that explains the instance's whole answers clearly better than more slots would,
        #: else 0.
        self.likely = 0

    @property
    def least_sequences(self) -> int:
        """Return the sequences that it may run at once, however long it has been silent."""
        return self.likely or _UNEXPLORED_SEQUENCES * (1 + self._first_tokens)

    def sequences(self, leases: Mapping[LeaseId, Lease], now: float) -> float:
        """Return the sequences that it may run at once. `leases` are its leases, the oldest first."""
        least, waited_s = self.least_sequences, 0.0
        if self.likely:
            return least
        for oldest in leases.values():
            if oldest.request.sequences:
                waited_s = 0.0 if oldest.first_token_at is not None else now - oldest.dispatched_at
                break
        return max(least, _UNEXPLORED_SEQUENCES * math.exp2(min(16.0, max(0.0, waited_s) / _UNEXPLORED_S)))

    def first_token(self, lease: Lease, now: float, *, told: bool) -> None:
        """Count the first token of a lease. `told`: the engine reports its figures, or its slots are stated.

        Otherwise a late first token does not count, as its request may have waited for a slot.
        """
        if told:
            self._first_tokens += lease.request.sequences
            self.likely = 0
            return
        expected_s = lease.forecast_first_s if lease.request.streamed else lease.forecast_end_s
        if now - lease.dispatched_at <= _LATE_ANSWER * expected_s:
            self.likely = 0  # more may run than whole answers showed: a stream tells sooner if it waits
            self.began(lease)

    def began(self, lease: Lease) -> None:
        """Count an answer that waited for no slot, by at most the sequences that ran as it was sent."""
        tokens = self._first_tokens + lease.request.sequences
        self._first_tokens = max(self._first_tokens, min(tokens, lease.ahead))
