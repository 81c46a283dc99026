"""The driver of one worker: its scheduler is one of several."""

from __future__ import annotations

from typing import Final

from hetlb.core.fellows import SharedScheduler
from hetlb.core.types import HealthChanged, Lease, Outcome
from hetlb.proxy.driver import Driver
from hetlb.workers.ledger import Row, owner_hash

#: Numbers of requests and leases of one life of a worker lie apart from all others'.
LIFE: Final = 1 << 32
#: Prompts that were read, and answers that ended, are told so much later, many at once.
TELL_S: Final = 0.001


class SharedDriver(Driver):
    """A driver whose scheduler is one of several."""

    row: Row
    _telling = False

    @property
    def shared(self) -> SharedScheduler:
        """The scheduler in its own type."""
        assert isinstance(self.scheduler, SharedScheduler)
        return self.scheduler

    def begin_life(self, life: int) -> None:
        """Count requests from another number on than any other worker."""
        self._next_id = life * LIFE + 1
        self.shared.begin_life(life * LIFE + 1)

    def woken(self) -> None:
        """Another worker made way."""
        self.carry_out(self.shared.on_wake(self.now()))

    def first_token(self, lease: Lease, now: float) -> None:
        """The answer of a lease began: the others hear of it by `TELL_S`, if not by its end."""
        super().first_token(lease, now)
        if not self._telling:
            self._tell_soon()

    def lease_ended(self, lease: Lease, outcome: Outcome, *, retry: bool, server_error: bool = False) -> None:
        """A lease ended: the others hear of it at once if anybody waits, else by `TELL_S`."""
        super().lease_ended(lease, outcome, retry=retry, server_error=server_error)
        if not self._telling:
            self._tell_soon()

    def _tell_soon(self) -> None:
        if self.shared.untold:
            self._telling = True
            self.loop.call_later(TELL_S, self._tell)

    def _tell(self) -> None:
        self._telling = False
        self.carry_out(self.shared.tell_rest(self.now()))

    def _health_changed(self, command: HealthChanged) -> None:
        """The supervisor counts and logs it, once."""

    def remember_response(self, response_id: str, instance: str, tenant: str | None) -> None:
        """An answer that can be asked for again was made here; its id may be another's already."""
        if self.kept_at(response_id, tenant) is not None:
            return
        super().remember_response(response_id, instance, tenant)
        cell = self.shared.cell_of(instance)
        if cell is not None:
            self.row.remember(response_id, cell, tenant)

    def kept_at(self, response_id: str, owner: str | None) -> tuple[str, str | None] | None:
        """Which instance keeps an answer, and whose it is, whichever worker made it."""
        known = super().kept_at(response_id, owner)
        if known is not None:
            return known
        found = self.row.kept_at(response_id)
        name = None if found is None else self.shared.name_at(found[0])
        if found is None or name is None:
            return None
        return name, owner if found[1] == owner_hash(owner) else ""
