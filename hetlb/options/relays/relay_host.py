"""Driver of the scheduler process: facts come from relays, commands go back to them.

The leases of a relay that is gone end as if their clients had left. A message about a lease that is not its
request's (the two sides spoke at the same time) ends the request with an outcome that blames no instance.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Callable, Iterable
from typing import Final

from hetlb.balancer.clients.token_estimator import TokenEstimator
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Dispatch, Lease, Outcome, Reject, Request, RequestId
from hetlb.balancer.exchange.scheduler_driver import SchedulerDriver
from hetlb.balancer.exchange.scheduler_side import Carrier
from hetlb.balancer.http.error_responses import Refusal
from hetlb.balancer.http.http1 import GateError
from hetlb.balancer.telemetry.counters import Totals
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.balancer.telemetry.recent import Recent
from hetlb.balancer.telemetry.request_record import KeyTicket
from hetlb.options.lease_wire import WireBegun
from hetlb.options.message_channel import MessageChannel
from hetlb.options.relays import protocol
from hetlb.options.relays.merged_totals import add_recent, add_totals
from hetlb.options.relays.protocol import (
    Arrival,
    Ask,
    CameBack,
    Cancelled,
    FromRelay,
    Hello,
    Learnt,
    LeaseChange,
    ModelsRead,
    Moving,
    Refused,
    Report,
    Used,
)
from hetlb.options.relays.relay_driver import ID_BITS

logger = logging.getLogger("hetlb.proxy")

#: Seconds that relays wait for the live leases of the others when a scheduler process begins.
RESTORE_S: Final = 0.2
#: Seconds that relays may take to report.
_ANSWER_S: Final = 1.0


class RelayLink:
    """A relay's channel and last report. `life` is the prefix of its request ids."""

    def __init__(self, life: int, number: int) -> None:
        self.life = life
        self.number = number
        self.channel: MessageChannel[FromRelay] | None = None
        self.greeted = False
        self.report = Report(0)
        self.tokens: dict[int, int] = {}

    def send(self, message: protocol.RelayMessage) -> None:
        """Send a message; dropped where the relay is gone."""
        if self.channel is not None:
            self.channel.send(message)

    @property
    def totals(self) -> Totals | None:
        totals: Totals | None = pickle.loads(self.report.totals) if self.report.totals else None
        return totals


class _OpenRequest:
    """An open request: its relay and its lease, with the lease number known to the relay."""

    __slots__ = ("lease", "lease_number", "link", "named", "request", "ticket")

    def __init__(
        self, link: RelayLink, request: Request, named: bool, ticket: KeyTicket | None = None
    ) -> None:
        self.link = link
        self.request = request
        #: True if it named its model.
        self.named = named
        self.lease: Lease | None = None
        self.lease_number = 0
        #: Reservation against the limits of its key, None without limits.
        self.ticket = ticket

    def used(self, message: Used, now: float) -> None:
        if self.ticket is None:
            return
        if message.last:
            self.ticket.ended(message.prompt_tokens, message.output_tokens, now)
            self.ticket = None
        else:
            self.ticket.used(message.prompt_tokens, message.output_tokens, now)

    def settle(self, now: float) -> None:
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            ticket.ended(_prompt_tokens(self.request), 0, now)


class RelayHost(Carrier):
    """Relays' requests, for the scheduler of this process: `scheduling` drives it.

    `on_view` is called when what relays answer may differ (True: before the next dispatch).
    """

    def __init__(
        self, scheduler: Scheduler, loop: asyncio.AbstractEventLoop, on_view: Callable[[bool], None]
    ) -> None:
        super().__init__(loop)
        self.scheduler = scheduler
        self.scheduling = SchedulerDriver(scheduler, self)
        self.links: list[RelayLink] = []
        self._on_view = on_view
        self._open: dict[RequestId, _OpenRequest] = {}
        self._streaming_at: dict[str, float] = {}
        #: Relays whose live leases are waited for, and the others' messages meanwhile.
        self._awaited: set[int] = set()
        self._early: list[tuple[RelayLink, list[FromRelay]]] = []
        #: Called with an instance and its `/v1/models` after its engine closed connections.
        self.on_models: Callable[[str, bytes], None] | None = None
        #: The fleet that relays must serve.
        self.reload = protocol.Reload(0, b"")
        #: As the relays know it: True if requests wait; instances that work, and since when others do not.
        self._waiting = False
        self._work: tuple[list[str], dict[str, float]] = [], {}
        #: Token estimates that the relays learnt; each of them has its own, which begins with this one.
        self.token_estimator = TokenEstimator()
        #: Counters of ended relays, and their lost lines; recently ended requests of all relays.
        self._gone, self._gone_lost = Totals(), 0
        self.recent = Recent()
        #: Number of the last question for reports; set for a moment when one comes, or a relay has gone.
        self._asked = 0
        self._came = asyncio.Event()

    def close(self) -> None:
        super().close()
        self.scheduling.close()
        for link in list(self.links):
            if link.channel is not None:
                link.channel.close()

    # --- relays ---

    def expect(self, lives: Iterable[int]) -> None:
        """Wait, for a moment at most, for the live leases of these relays alone."""
        self._awaited.update(lives)
        if self._awaited:
            self.loop.call_later(RESTORE_S, self._restored)

    def connected(self, link: RelayLink) -> None:
        self.links.append(link)
        link.send(protocol.WaitingMessage(self._waiting))
        link.send(self._work_message(self.now()))
        for model, ratio in self.token_estimator.text.items():
            link.send(Learnt(model, round(ratio.above), round(ratio.below)))

    def disconnected(self, link: RelayLink) -> None:
        """End the requests of a relay that is gone as if their clients had left."""
        if link not in self.links:
            return
        self.links.remove(link)
        link.channel = None
        self._awaited.discard(link.life)
        self._early = [early for early in self._early if early[0] is not link]
        if (totals := link.totals) is not None:
            add_totals(self._gone, totals)
            self._gone_lost += link.report.lost_lines
        self._heard()
        for open_request in [each for each in self._open.values() if each.link is link]:
            self._end(open_request, Outcome.CLIENT_GONE, self.now())
        if not self._awaited:
            self._restored()

    def broadcast(self, message: protocol.RelayMessage) -> None:
        for link in self.links:
            link.send(message)

    def tokens_so_far(self, lease: Lease) -> int:
        """Return the output tokens of a lease: all of them, or as of its relay's last report."""
        found = None if lease.ended else self._open.get(lease.request.id)
        if found is None or found.lease is not lease:
            return lease.output_tokens
        return found.link.tokens.get(found.lease_number, 0)

    # --- messages of relays ---

    def receive(self, link: RelayLink, messages: list[FromRelay]) -> None:
        """Handle a batch of messages; it may wait for the live leases of other relays."""
        now = self.now()
        if not link.greeted and messages:
            first, messages = messages[0], messages[1:]
            self._greeted(link, first, now)
        if self._awaited:
            self._early.append((link, messages))
            return
        for message in messages:
            if isinstance(message, Arrival):
                self._arrived(link, message, now)
            elif isinstance(message, LeaseChange):
                self._changed(message, now)
            elif isinstance(message, Cancelled):
                if (found := self._open.get(message.request)) is not None:
                    self._end(found, Outcome.CLIENT_GONE, now)
            elif isinstance(message, Refused):
                found = self._open.get(message.request)
                if found is not None and found.lease is not None and found.lease_number == message.lease:
                    features = message.features
                    self.scheduling.refused(found.lease, message.status, message.retry_after_s, features, now)
            elif isinstance(message, Moving):
                found = self._open.get(message.request)
                if found is not None and found.lease is not None and found.lease_number == message.lease:
                    self.scheduling.move(found.lease, message.generated, now)
            elif isinstance(message, Report):
                self._reported(link, message, now)
            elif isinstance(message, CameBack):
                self.scheduling.came_back(message.instance)
            elif isinstance(message, ModelsRead):
                if self.on_models is not None:
                    self.on_models(message.instance, message.body)
            elif isinstance(message, Used) and (found := self._open.get(message.request)) is not None:
                found.used(message, now)
        self.scheduling.tick_later()
        self.ticked()

    def ticked(self) -> None:
        waiting = self.scheduling.waiting > 0
        if waiting != self._waiting:
            self._waiting = waiting
            self.broadcast(protocol.WaitingMessage(waiting))

    def _greeted(self, link: RelayLink, hello: FromRelay, now: float) -> None:
        """Book the live leases of a relay again, which its first message gives."""
        if not isinstance(hello, Hello) or hello.version != protocol.VERSION or hello.relay != link.life:
            raise protocol.RelayProtocolError(
                f"expected the hello of relay {link.life}, version {protocol.VERSION}, got {hello!r:.100}"
            )
        link.greeted = True
        if hello.generation != self.reload.generation:
            link.send(self.reload)
        for live in hello.leases:
            booked = live.lease.change(live.lease.request.request())
            lease = self.scheduler.restore(booked, now)
            if lease is not None:
                limiter = self.scheduling.limiter(live.owner)
                ticket = None if limiter is None else limiter.adopt(now)
                found = self._open[lease.request.id] = _OpenRequest(link, lease.request, True, ticket)
                found.lease, found.lease_number = lease, booked.number
        self._awaited.discard(link.life)
        if not self._awaited:
            self._restored()

    def _restored(self) -> None:
        """Take messages that came while live leases were waited for."""
        self._awaited.clear()
        early, self._early = self._early, []
        for link, messages in early:
            try:
                self.receive(link, messages)
            except protocol.RelayProtocolError as error:  # its own channel is closed, no other's
                text = "relay %d does not keep to the protocol: %s"
                tell(logger, Event.WORKER_FAILED, text, link.number, error)
                if link.channel is not None:
                    link.channel.close()

    def _arrived(self, link: RelayLink, arrival: Arrival, now: float) -> None:
        facts = arrival.request
        if facts.id >> ID_BITS != link.life or facts.id in self._open:
            raise protocol.RelayProtocolError(f"expected a new id of relay {link.life}, got {facts.id}")
        scheduling, request = self.scheduling, facts.request()
        try:
            ticket = scheduling.admit(request, arrival.owner, _prompt_tokens(request), now)
        except GateError as error:
            again_s, lines = (error.retry_after_s, error.lines) if isinstance(error, Refusal) else (None, b"")
            link.send(protocol.Rejected(facts.id, None, error.message, again_s, error.status, lines))
            return
        self._open[request.id] = _OpenRequest(link, request, bool(facts.model), ticket)
        scheduling.arrive(request, now)

    def _changed(self, message: LeaseChange, now: float) -> None:
        change, found = message.change, self._open.get(message.request)
        if found is None:
            return  # on an instance that was gone before this process began
        lease = found.lease if found.lease_number == change.number else None
        if isinstance(change, WireBegun):
            if lease is not None:
                self.scheduling.first_token(lease, now)
        elif lease is None:
            self._end(found, Outcome.CLIENT_GONE, now)
        else:
            lease.output_tokens = change.output_tokens
            lease.reported_cached_tokens = change.cached_tokens
            if message.generated is not None:
                found.request = found.request.goes_on(message.generated)
            self._end(found, change.outcome, now, message.retry, message.generated)

    def _end(
        self,
        found: _OpenRequest,
        outcome: Outcome,
        now: float,
        retry: bool = False,
        generated: int | None = None,
    ) -> None:
        """End a request, or with `retry` its lease; `generated` as in `Scheduler.on_lease_ended`."""
        lease, found.lease = found.lease, None
        if not retry:
            del self._open[found.request.id]
            found.settle(now)
        if lease is None:
            self.scheduling.cancelled(found.request.id, now)
            return
        if not retry:
            self.scheduling.drain_rate.ended(now)
            self.counted.believed(lease)
        self.scheduling.lease_ended(lease, outcome, now, retry=retry, generated=generated)

    # --- reports ---

    async def refresh(self) -> None:
        """Collect a report of every relay that answers in time."""
        self._asked = number = self._asked + 1
        asked = list(self.links)
        self.broadcast(Ask(number))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                while any(link.report.number < number for link in asked if link in self.links):
                    await self._came.wait()

    def _reported(self, link: RelayLink, report: Report, now: float) -> None:
        link.report, link.tokens = report, dict(report.tokens)
        for name in report.streaming:
            self._streaming_at[name] = now
        for model, text_bytes, tokens in report.learnt:
            self.token_estimator.learn(model, text_bytes, 0, tokens)
            for other in self.links:
                if other is not link:
                    other.send(Learnt(model, text_bytes, tokens))
        if report.recent:
            add_recent(self.recent, pickle.loads(report.recent))
        self._heard()

    def _heard(self) -> None:
        self._came.set()
        self._came.clear()

    @property
    def lost_lines(self) -> int:
        """Lines of the request log that relays could not write."""
        return self._gone_lost + sum([link.report.lost_lines for link in self.links])

    @property
    def totals(self) -> Totals:
        """Counters of all processes."""
        self.scheduling.count_calls()
        whole = Totals()
        for part in (self.counted, self._gone, *[link.totals for link in self.links]):
            if part is not None:
                add_totals(whole, part)
        whole.recent = self.recent
        return whole

    # --- facts about instances ---

    def tokens_at(self) -> dict[str, float]:
        return dict(self._streaming_at)

    def instances_changed(self) -> None:
        self._on_view(True)

    def view_changed(self) -> None:
        self._on_view(False)

    # --- commands ---

    def reject(self, command: Reject, retry_after_s: float | None) -> None:
        found = self._open.pop(command.request_id)
        found.settle(self.now())
        found.link.send(protocol.Rejected(command.request_id, command.reason, command.detail, retry_after_s))

    def pass_on(self, request_id: RequestId) -> None:
        self._open[request_id].link.send(protocol.PassOnMessage(request_id))

    def dispatch(self, command: Dispatch, instance: Instance, decode: Instance | None) -> None:
        lease, found = command.lease, self._open[command.request_id]
        found.lease, found.lease_number, found.request = lease, lease.id, lease.request
        found.link.send(
            protocol.DispatchMessage(
                command.request_id, lease.id, lease.instance, lease.work_ns, lease.predicted_output,
                lease.forecast_end_s, "" if found.named else found.request.model, lease.expected_first_s,
                lease.beside, None if found.ticket is None else found.ticket.headers(lease.dispatched_at),
                instance.gives_ids, instance.capacity.max_model_len or 0,
            )
        )  # fmt: skip

    def may_turn_away(self, lease: Lease) -> bool:
        found = self._open.get(lease.request.id)
        return found is not None and found.lease is lease

    # --- time ---

    def _tell_work(self, now: float) -> None:
        """Tell the relays which instances work and which stand still, where it changed."""
        breakers = [(each.name, each.breaker) for each in self.scheduler.instances]
        moving = [name for name, breaker in breakers if breaker.works(now)]
        stalled = {
            name: breaker.stalled_since for name, breaker in breakers if breaker.stalled_since is not None
        }
        if (moving, stalled) != self._work:
            self._work = moving, stalled
            self.broadcast(self._work_message(now))

    def _work_message(self, now: float) -> protocol.WorkMessage:
        moving, stalled = self._work
        return protocol.WorkMessage(moving, {name: now - since for name, since in stalled.items()})

    def swept(self, lag_s: float) -> None:
        self.scheduling.count_calls()
        now = self.now()
        self.scheduling.sweep(now)
        self._tell_work(now)
        names = {each.name for each in self.scheduler.instances}
        self.counted.keep(names)
        self._gone.keep(names)
        for name in self._streaming_at.keys() - names:
            del self._streaming_at[name]


def _prompt_tokens(request: Request) -> int:
    """Return the tokens of all prompts of a request, as known at its arrival."""
    return request.prompt_tokens * (request.sequences // max(1, request.samples))
