"""Fair shares of tenants: the one that was served least for its weight is next."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from mypy_extensions import mypyc_attr

#: Most tenants beyond which idle ones are forgotten, if they were served no more than others.
_KEPT_TENANTS: Final = 1024


@mypyc_attr(acyclic=True)
class _Tenant:
    """Tokens of a tenant's leases that have not ended, and tokens that it was served over its weight."""

    __slots__ = ("running", "served", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.running = 0
        self.served = 0.0


class TenantService:
    """Tokens that each tenant was served, over its weight: the one with the least is next.

    A virtual token counter (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024) that counts
    running work: a tenant that comes starts level with the least that another had beyond what runs for it,
    so that it gets as much as runs for others before they get more, and saves nothing up by not asking.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._known: dict[str | None, _Tenant] = {}
        self._floor = 0.0

    def _weight(self, tenant: str | None) -> float:
        """Return the stated share of a tenant, else 1."""
        return self._weights.get(tenant, 1.0) if self._weights and tenant is not None else 1.0

    def come(self, tenant: str | None, waiting: Collection[str | None]) -> _Tenant:
        """Return a tenant that asks; without running requests it starts level with the others that ask."""
        found = self._known.get(tenant)
        if found is not None and found.running > 0:
            return found
        known = self._known
        levels = [
            each.served - each.running / each.weight
            for name, each in known.items()
            if each.running > 0 or name in waiting
        ]
        self._floor = max(self._floor, min(levels, default=self._floor))
        if found is None:
            found = known[tenant] = _Tenant(self._weight(tenant))
        found.served = max(found.served, self._floor)
        if len(known) > _KEPT_TENANTS:
            self._known = {
                name: each
                for name, each in known.items()
                if each.served > self._floor or each.running > 0 or name in waiting or name == tenant
            }
        return found

    def booked(self, tenant: str | None, tokens: int, waiting: Collection[str | None]) -> None:
        """Note that a lease of a tenant began."""
        found = self._known.get(tenant)
        if found is None or (found.running <= 0 and tenant not in waiting):
            found = self.come(tenant, waiting)
        found.running += tokens
        found.served += tokens / found.weight

    def ended(self, tenant: str | None, tokens: int) -> None:
        """Note that a lease of a tenant ended."""
        found = self._known.get(tenant)
        if found is not None:
            found.running = max(0, found.running - tokens)

    def served(self, tenant: str | None) -> float:
        """Return the tokens that a tenant was served, over its weight."""
        found = self._known.get(tenant)
        return self._floor if found is None else found.served
