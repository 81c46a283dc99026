"""Tenants that a request may name without proving it: a limited number at once, all others share one."""

from __future__ import annotations

from typing import Final

#: The Gateway API's header of a fair share.
FAIRNESS: Final = "x-gateway-inference-fairness-id"
#: Maximum number of names at once.
MAX_NAMES: Final = 256
#: Seconds without a request after which a name makes room for another.
_IDLE_S: Final = 60.0
#: Tenant of requests with names that found no room.
OTHERS: Final = b"others"


class TenantNames:
    """Names in use, the longest unused first."""

    def __init__(self) -> None:
        self._field = FAIRNESS.encode()
        self._seen: dict[bytes, float] = {}

    def configure(self, header: str) -> None:
        """Read names from this header from now on."""
        self._field = header.lower().encode()

    def __len__(self) -> int:
        return len(self._seen)

    def confine(self, fields: dict[bytes, bytes], now: float) -> None:
        """Count a request that names one tenant too many as of the tenant `OTHERS`. `now` in seconds."""
        name = fields.get(self._field)
        if name is None:
            return
        seen = self._seen
        if seen.pop(name, None) is None and len(seen) >= MAX_NAMES:
            oldest = next(iter(seen))
            if now - seen[oldest] < _IDLE_S:
                fields[self._field] = OTHERS
                return
            del seen[oldest]
        seen[name] = now
