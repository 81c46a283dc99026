"""Limiters of clients' keys. Most fleets have none: `key_limits.py` is imported with the first one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hetlb.balancer.clients.api_keys import LimitsTable
    from hetlb.balancer.clients.key_limits import Limiter, Ticket


class KeyJournal(Protocol):
    """Receiver of the requests that limits of keys admit in this process, and of the tokens they used."""

    def admitted(self, ticket: Ticket) -> None: ...
    def used(self, ticket: Ticket, prompt_tokens: int, output_tokens: int, last: bool) -> None: ...


class Limiters:
    """Limiters of all keys, by name. Amounts used outlive a reload, and are forgotten with the process."""

    def __init__(self) -> None:
        self._all: dict[str, Limiter] = {}
        self._in_force: dict[str, Limiter] = {}
        #: Told of what is counted here, None while no other process asks.
        self.journal: KeyJournal | None = None

    def configure(self, limits: Mapping[str, LimitsTable]) -> None:
        """Take limits that hold from now on, by the name of the key."""
        if limits:
            from hetlb.balancer.clients.key_limits import Limiter
        for name, table in limits.items():
            self._all.setdefault(name, Limiter(table, name, self)).limits = table
        self._in_force = {name: self._all[name] for name in limits}

    def of(self, name: str) -> Limiter | None:
        return self._in_force.get(name)
