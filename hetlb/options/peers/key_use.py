"""Use of clients' keys among peers: what one lets in counts against the limits of the key at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from hetlb.balancer.clients.key_limits import Limiter, Ticket
from hetlb.options.peers.lease_wire import PeerChange, WireAdmitted, WireUsed

#: Maximum counted requests in flight of one peer.
_MOST_TICKETS: Final = 1 << 16


class KeyUse:
    """Use of keys with limits, at this process and its peers; `tell` is called once `take` has news."""

    def __init__(self, limiter: Callable[[str], Limiter | None], tell: Callable[[], object]) -> None:
        self._limiter = limiter
        self._tell = tell
        self._own: dict[int, Ticket] = {}
        self._number = 0
        self._unsent: list[PeerChange] = []
        self._of: dict[str, dict[int, Ticket]] = {}

    # --- of this process ---

    def admitted(self, ticket: Ticket) -> None:
        self._number += 1
        ticket.number = self._number
        self._own[ticket.number] = ticket
        self._add(WireAdmitted(ticket.number, ticket.limiter.name, ticket.reserved))

    def used(self, ticket: Ticket, prompt_tokens: int, output_tokens: int, last: bool) -> None:
        if last:
            self._own.pop(ticket.number, None)
        self._add(WireUsed(ticket.number, prompt_tokens, output_tokens, last))

    def _add(self, change: PeerChange) -> None:
        self._unsent.append(change)
        if len(self._unsent) == 1:
            self._tell()

    def take(self) -> list[PeerChange]:
        """Return the changes for peers since the last call."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def live(self) -> list[PeerChange]:
        """Return the requests in flight, for a new peer."""
        return [WireAdmitted(number, each.limiter.name, 0, False) for number, each in self._own.items()]

    # --- of peers ---

    def receive(self, peer: str, changes: Sequence[PeerChange], now: float) -> None:
        tickets = self._of.setdefault(peer, {})
        for each in changes:
            if isinstance(each, WireAdmitted):
                limiter = self._limiter(each.key)
                if limiter is not None and each.number not in tickets and len(tickets) < _MOST_TICKETS:
                    tickets[each.number] = limiter.adopt(each.reserved, each.fresh, now)
            elif isinstance(each, WireUsed) and (ticket := tickets.get(each.number)) is not None:
                if each.last:
                    del tickets[each.number]
                    ticket.ended(each.prompt_tokens, each.output_tokens, now)
                else:
                    ticket.used(each.prompt_tokens, each.output_tokens, now)

    def gone(self, peer: str, now: float) -> None:
        """End the requests of a peer: what it reserved stays reserved."""
        for ticket in self._of.pop(peer, {}).values():
            ticket.ended(ticket.reserved, 0, now)
