"""Driver of the scheduler process: facts come from relays, commands go back to them.

Every open request is known with its relay and its lease. A relay that is gone takes its own along: its leases
end as if their clients had left. A message about a lease that is not its request's (the two sides spoke at
the same time) ends the request as its relay says, with an outcome that blames no instance.
"""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Final

from hetlb.core.scheduler import Scheduler
from hetlb.core.types import (
    Abort,
    AdminStateSet,
    Dispatch,
    InstanceChange,
    Lease,
    Outcome,
    PassOn,
    Reject,
    Request,
    RequestId,
)
from hetlb.proxy.driver import SWEEP_S
from hetlb.proxy.http.error_responses import Refusal
from hetlb.proxy.http.http1 import GateError
from hetlb.proxy.http.retry_after import DrainRate
from hetlb.proxy.limits import Limiter, Ticket
from hetlb.proxy.scheduler_driver import EMITS_S, SchedulerDriver
from hetlb.proxy.scheduling import (
    Responses,
    StallWatch,
    log_loop,
    only_model,
    retry_after_s,
    served_at,
    several_models,
)
from hetlb.proxy.telemetry.counters import Totals
from hetlb.workers import protocol
from hetlb.workers.protocol import (
    Arrival,
    Busy,
    CameBack,
    Cancelled,
    EndedMessage,
    FirstToken,
    FromRelay,
    Hello,
    Made,
    ModelsRead,
    Prepared,
    Report,
    Used,
)
from hetlb.workers.relay_channel import RelayChannel
from hetlb.workers.relay_driver import ID_BITS

#: Arrivals wait so long for the live leases of other relays when a scheduler process begins.
RESTORE_S: Final = 0.2


class RelayLink:
    """A relay's channel and last report. `life` is the prefix of its request ids."""

    def __init__(self, life: int, number: int) -> None:
        self.life = life
        self.number = number
        self.channel: RelayChannel[FromRelay] | None = None
        self.greeted = False
        self.report = Report(0)
        self.tokens: dict[int, int] = {}
        #: Answers that are waited for: reports and preparations, by number.
        self.asked: dict[int, asyncio.Future[str]] = {}

    def send(self, message: protocol.RelayMessage) -> None:
        """Send a message; dropped where the relay is gone."""
        if self.channel is not None:
            self.channel.send(message)

    def answered(self, number: int, answer: str) -> None:
        """Resolve the question with this number."""
        asked = self.asked.pop(number, None)
        if asked is not None and not asked.done():
            asked.set_result(answer)

    @property
    def totals(self) -> Totals | None:
        """Its counters as of the last report."""
        totals: Totals | None = pickle.loads(self.report.totals) if self.report.totals else None
        return totals


class _OpenRequest:
    """An open request: its relay and its lease, with the lease number known to the relay."""

    __slots__ = ("lease", "lease_number", "link", "named", "request", "ticket")

    def __init__(self, link: RelayLink, request: Request, named: bool, ticket: Ticket | None = None) -> None:
        self.link = link
        self.request = request
        #: True if it named its model.
        self.named = named
        self.lease: Lease | None = None
        self.lease_number = 0
        #: Reservation against the limits of its key, None without limits.
        self.ticket = ticket

    def used(self, message: Used, now: float) -> None:
        """Count tokens against the limits of its key."""
        if self.ticket is None:
            return
        if message.last:
            self.ticket.ended(message.prompt_tokens, message.output_tokens, now)
            self.ticket = None
        else:
            self.ticket.used(message.prompt_tokens, message.output_tokens, now)

    def settle(self, now: float) -> None:
        """Settle the reservation of a request that ended without a known answer."""
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            ticket.ended(_prompt_tokens(self.request), 0, now)


class RelayHost(SchedulerDriver):
    """The scheduler's driver over relays.

    `registered` has the instances that stand in no file and the addresses that they must have (None where the
    name resolves itself); its owner alone changes it. `on_view` is called when what relays answer may differ.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        loop: asyncio.AbstractEventLoop,
        registered: Mapping[str, str | None],
        on_view: Callable[[], None],
        on_report: Callable[[RelayLink, Report], None],
        on_loop: Callable[[str], None] = lambda instance: None,
        on_models: Callable[[str, bytes], None] = lambda instance, body: None,
    ) -> None:
        self.loop = loop
        self.now = loop.time
        self.schedule(scheduler)
        self._registered = registered
        self.links: list[RelayLink] = []
        self._on_view = on_view
        self._on_report = on_report
        self._on_loop = on_loop
        self._on_models = on_models
        self._open: dict[RequestId, _OpenRequest] = {}
        self._responses = Responses()
        self._totals = Totals()
        self._drain_rate = DrainRate(random.Random())
        self._streaming_at: dict[str, float] = {}
        #: Relays whose live leases are waited for, and the arrivals that wait for them.
        self._awaited: set[int] = set()
        self._early: list[tuple[RelayLink, Arrival]] = []
        #: Reloads of the fleet so far: a relay that serves another one is replaced.
        self.generation = 0
        self.stalls = StallWatch(loop)
        #: True if requests wait, as the relays know it.
        self._waiting = False
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        self._sweep_due = perf_counter() + SWEEP_S

    def close(self) -> None:
        """Stop the timers and close every channel."""
        self.stalls.close()
        self._stop_ticking()
        self._sweeper.cancel()
        for link in list(self.links):
            if link.channel is not None:
                link.channel.close()

    # --- relays ---

    def expect(self, lives: Iterable[int]) -> None:
        """Hold arrivals for a moment until these relays have told their live leases."""
        self._awaited.update(lives)
        if self._awaited:
            self.loop.call_later(RESTORE_S, self._restored)

    def connected(self, link: RelayLink) -> None:
        """A channel to a relay is open."""
        self.links.append(link)
        link.send(instances_message(self.scheduler, self._registered, self.now()))
        link.send(protocol.WaitingMessage(self._waiting))

    def disconnected(self, link: RelayLink) -> None:
        """A relay is gone: its requests end as if their clients had left."""
        if link not in self.links:
            return
        self.links.remove(link)
        link.channel = None
        for answer in link.asked.values():
            if not answer.done():
                answer.set_result("the relay is gone")
        self._awaited.discard(link.life)
        self._early = [early for early in self._early if early[0] is not link]
        for open_request in [each for each in self._open.values() if each.link is link]:
            self._end(open_request, Outcome.CLIENT_GONE, self.now())
        if not self._awaited:
            self._restored()

    def broadcast(self, message: protocol.RelayMessage) -> None:
        """Send a message to every relay."""
        for link in self.links:
            link.send(message)

    def tokens_so_far(self, lease: Lease) -> int:
        """Output tokens of a lease: all of them, or as of its relay's last report."""
        found = None if lease.ended else self._open.get(lease.request.id)
        if found is None or found.lease is not lease:
            return lease.output_tokens
        return found.link.tokens.get(found.lease_number, 0)

    # --- messages of relays ---

    def receive(self, link: RelayLink, messages: list[FromRelay]) -> None:
        """Handle a batch of messages."""
        now = self.now()
        for message in messages:
            if isinstance(message, Arrival):
                self._arrived(link, message, now)
            elif isinstance(message, FirstToken):
                self._begun(message, now)
            elif isinstance(message, EndedMessage):
                self._ended(message, now)
            elif isinstance(message, Cancelled):
                self._cancelled(message.request, now)
            elif isinstance(message, Busy):
                self._busy(message, now)
            elif isinstance(message, Made):
                self._responses.add(message.response, message.instance, message.owner)
            elif isinstance(message, Report):
                self._reported(link, message, now)
            elif isinstance(message, Hello):
                self._greeted(link, message, now)
            elif isinstance(message, CameBack):
                log_loop(message.instance)
                self._on_loop(message.instance)
            elif isinstance(message, ModelsRead):
                self._on_models(message.instance, message.body)
            elif isinstance(message, Used):
                if (found := self._open.get(message.request)) is not None:
                    found.used(message, now)
            elif isinstance(message, Prepared):
                link.answered(-message.number, message.error)
        self._tick_later()
        self._say_waiting()

    def _say_waiting(self) -> None:
        """Broadcast a change of whether requests wait."""
        waiting = len(self.scheduler.queue) > 0
        if waiting != self._waiting:
            self._waiting = waiting
            self.broadcast(protocol.WaitingMessage(waiting))

    def _greeted(self, link: RelayLink, hello: Hello, now: float) -> None:
        """A relay's first message: book its live leases again."""
        if hello.version != protocol.VERSION or hello.relay != link.life or link.greeted:
            raise protocol.RelayProtocolError(
                f"expected the hello of relay {link.life}, version {protocol.VERSION}, got {hello!r:.100}"
            )
        link.greeted = True
        if hello.generation != self.generation:
            link.send(protocol.Commit(self.generation))  # it was not prepared, and leaves
        for live in hello.leases:
            try:
                booked = live.lease.change()
            except ValueError as error:
                raise protocol.RelayProtocolError(str(error)) from error
            lease = self.scheduler.restore(booked, now)
            if lease is not None:
                limiter = self._limiter(live.owner)
                ticket = None if limiter is None else limiter.adopt(now)
                found = self._open[lease.request.id] = _OpenRequest(link, lease.request, True, ticket)
                found.lease, found.lease_number = lease, booked.number
        self._awaited.discard(link.life)
        if not self._awaited:
            self._restored()

    def _restored(self) -> None:
        """Place the arrivals that waited for live leases to be booked."""
        self._awaited.clear()
        early, self._early = self._early, []
        for link, arrival in early:
            self._arrived(link, arrival, self.now())

    def _arrived(self, link: RelayLink, arrival: Arrival, now: float) -> None:
        if self._awaited:
            self._early.append((link, arrival))
            return
        facts = arrival.request
        if facts.id >> ID_BITS != link.life or facts.id in self._open:
            raise protocol.RelayProtocolError(f"expected a new id of relay {link.life}, got {facts.id}")
        model, pinned = facts.model, None
        if arrival.response is not None:
            try:
                model, pinned = self._pin(arrival, arrival.response)
            except GateError as error:
                link.send(protocol.Refused(facts.id, error.status, error.message))
                return
        request = facts.request(model, pinned)
        try:
            ticket = admit(self._limiter(arrival.owner), request, now)
        except Refusal as refusal:
            link.send(
                protocol.Refused(
                    facts.id, refusal.status, refusal.message, refusal.retry_after_s, refusal.lines
                )
            )
            return
        self._open[request.id] = _OpenRequest(link, request, bool(facts.model), ticket)
        self._arrive(request, now)

    def _pin(self, arrival: Arrival, response: str) -> tuple[str, str | None]:
        """The model and the instance of a request about an earlier answer. Raises `GateError`."""
        scheduler, model = self.scheduler, arrival.request.model
        pinned = self._responses.find(response, arrival.owner, scheduler, strict=arrival.strict)
        if pinned is None:
            return model or only_model(scheduler) or several_models(), None
        served = served_at(scheduler, pinned)
        if arrival.strict or not model:
            return served[0], pinned
        # Of another model: it is not there, and the engine says so.
        return model, pinned if model in served else None

    def _lease_of(self, request_id: RequestId, lease_number: int) -> _OpenRequest | None:
        """A request that still has the lease of this number."""
        found = self._open.get(request_id)
        return None if found is None or found.lease_number != lease_number else found

    def _begun(self, message: FirstToken, now: float) -> None:
        found = self._lease_of(message.request, message.lease)
        lease = None if found is None else found.lease
        if lease is not None and (commands := self.scheduler.on_first_token(lease, now)):
            self.carry_out(commands)

    def _cancelled(self, request_id: RequestId, now: float) -> None:
        found = self._open.get(request_id)
        if found is not None:
            self._end(found, Outcome.CLIENT_GONE, now)
        else:  # it may wait for the live leases
            self._early = [each for each in self._early if each[1].request.id != request_id]

    def _ended(self, message: EndedMessage, now: float) -> None:
        found = self._open.get(message.request)
        if found is None:
            return  # on an instance that was gone before this process began
        lease = found.lease
        if lease is None or found.lease_number != message.lease:
            self._end(found, Outcome.CLIENT_GONE, now)
            return
        lease.output_tokens = message.output_tokens
        lease.reported_cached_tokens = message.cached_tokens
        generated = None
        if message.goes_on:
            generated = message.generated
            found.request = found.request.goes_on(generated)
        self._end(found, message.outcome, now, message.retry, generated)

    def _end(
        self,
        found: _OpenRequest,
        outcome: Outcome,
        now: float,
        retry: bool = False,
        generated: int | None = None,
    ) -> None:
        """A request, or with `retry` its lease, ended; `generated` as in `Scheduler.on_lease_ended`."""
        lease, found.lease = found.lease, None
        if not retry:
            del self._open[found.request.id]
            found.settle(now)
        if lease is None:
            self.carry_out(self.scheduler.on_cancelled(found.request.id, now))
            return
        if not retry:
            self._drain_rate.ended(now)
        commands = self._end_lease(lease, outcome, now, retry, generated)
        if not retry:
            self._totals.believed(lease)
        self.carry_out(commands)

    def _busy(self, message: Busy, now: float) -> None:
        found = self._lease_of(message.request, message.lease)
        if found is not None and found.lease is not None:
            self.carry_out(self.scheduler.on_busy(found.lease, message.retry_after_s, now))

    def _reported(self, link: RelayLink, report: Report, now: float) -> None:
        self._on_report(link, report)
        for name in report.streaming:
            self._streaming_at[name] = now
        for model, text_bytes, tokens in report.learnt:
            for other in self.links:
                if other is not link:
                    other.send(protocol.Learnt(model, text_bytes, tokens))
        if report.totals:
            link.report, link.tokens = report, dict(report.tokens)
        if report.number:
            link.answered(report.number, "")

    # --- facts about instances ---

    def _emits(self, name: str) -> bool:
        since = self._streaming_at.get(name)
        return since is not None and self.now() - since < EMITS_S

    def change(self, change: InstanceChange) -> None:
        super().change(change)
        if isinstance(change, AdminStateSet):
            self._instances_changed()

    def _instances_changed(self) -> None:
        self.broadcast(instances_message(self.scheduler, self._registered, self.now()))

    def _view_changed(self) -> None:
        self._on_view()

    # --- commands ---

    def _reject(self, command: Reject) -> None:
        found = self._open.pop(command.request_id)
        found.settle(self.now())
        again_s = retry_after_s(command, self._drain_rate, len(self.scheduler.queue), self.now())
        found.link.send(protocol.Rejected(command.request_id, command.reason, command.detail, again_s))

    def _pass_on(self, command: PassOn) -> None:
        self._open[command.request_id].link.send(protocol.PassOnMessage(command.request_id))

    def _abort(self, command: Abort) -> None:
        self._open[command.request_id].link.send(protocol.AbortMessage(command.request_id))

    def _dispatch(self, command: Dispatch) -> None:
        self._totals.decisions += 1
        self.decisions.add(command)
        lease, found = command.lease, self._open[command.request_id]
        found.lease, found.lease_number = lease, lease.id
        found.link.send(
            protocol.DispatchMessage(
                command.request_id,
                lease.id,
                lease.instance,
                lease.work_ns,
                lease.predicted_output,
                lease.forecast_end_s,
                "" if found.named else found.request.model,
                lease.expected_first_s,
                lease.beside,
                None if found.ticket is None else found.ticket.headers(lease.dispatched_at),
                self.scheduler.holder(lease).gives_ids,
            )
        )

    # --- time ---

    def _ticked(self) -> None:
        self._say_waiting()

    def _sweep(self) -> None:
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        clock = perf_counter()
        self._totals.lag.observe(max(0.0, clock - self._sweep_due))
        self._sweep_due = clock + SWEEP_S
        self._count_calls()
        names = {each.name for each in self.scheduler.instances}
        self._totals.keep(names)
        for name in self._streaming_at.keys() - names:
            del self._streaming_at[name]

    @property
    def totals(self) -> Totals:
        """Counters of this process: decisions, ejections, reloads, the scheduler's calls."""
        self._count_calls()
        return self._totals


def _prompt_tokens(request: Request) -> int:
    """Tokens of all prompts of a request, as known at its arrival."""
    return request.prompt_tokens * (request.sequences // max(1, request.samples))


def admit(limiter: Limiter | None, request: Request, now: float) -> Ticket | None:
    """Count a request against the limits of its key, if it has some. Raises `Refusal`."""
    if limiter is None:
        return None
    return limiter.admit(_prompt_tokens(request), (request.max_tokens or 0) * request.sequences, now)


def instances_message(
    scheduler: Scheduler, registered: Mapping[str, str | None], now: float
) -> protocol.Instances:
    """Make the message that names all instances."""
    return protocol.Instances(
        [
            protocol.InstanceAddress(
                each.name,
                each.incarnation,
                each.spec.url,
                each.spec.model,
                each.name in registered,
                registered.get(each.name),
                None if each.leaves_at is None else each.leaves_at - now,
            )
            for each in scheduler.instances
        ]
    )
