"""Driver of a scheduler with a shared view: peers are told what is booked here, and theirs is booked too."""

from __future__ import annotations

from collections.abc import Callable

from hetlb.core.scheduler import Scheduler
from hetlb.core.shared_view import SharedView
from hetlb.core.types import Command, Dispatch, Lease, Outcome, Request
from hetlb.proxy.driver import Driver, DriverSetup
from hetlb.proxy.exchange import Exchange


class SharedDriver(Driver):
    """A driver with a view that is shared, once `share` was called."""

    def __init__(self, scheduler: Scheduler, setup: DriverSetup) -> None:
        super().__init__(scheduler, setup)
        #: Bookings of peers, None while this process is alone.
        self.view: SharedView | None = None
        #: Called when there is something to tell them.
        self.on_change: Callable[[], None] | None = None

    def share(self, view: SharedView, on_change: Callable[[], None]) -> None:
        """Book what peers book, and tell them; `on_change`: there is something to tell."""
        self.view = view
        self.on_change = on_change

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def decide(self, request: Request, now: float) -> list[Command]:
        view = self.view
        return self.scheduler.on_arrival(request, now) if view is None else view.on_arrival(request, now)

    def _dispatch(self, command: Dispatch) -> None:
        if self.view is not None:
            self.view.booked(command.lease, self.now())
            self._changed()
        super()._dispatch(command)

    def first_token(self, lease: Lease, now: float) -> None:
        if self.view is not None:
            self.view.begun(lease)
            self._changed()
        super().first_token(lease, now)

    def lease_ended(self, lease: Lease, outcome: Outcome, *, retry: bool, server_error: bool = False) -> None:
        if self.view is not None:
            self.view.ended(lease, outcome, server_error=server_error)
            self._changed()
        super().lease_ended(lease, outcome, retry=retry, server_error=server_error)

    def busy(self, exchange: Exchange, lease: Lease, retry_after_s: float) -> None:
        super().busy(exchange, lease, retry_after_s)
        if self.view is not None and lease.ended:  # another instance has the request
            self.view.ended(lease, Outcome.CLIENT_GONE)
            self._changed()
