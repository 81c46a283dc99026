"""Driver of a relay: its exchanges are here, its scheduler in another process.

Facts go up the channel and commands come down; between them an exchange waits as it does in the queue. While
there is no scheduler process, streams go on and arrivals wait, within the limits of the queue, for at most
`no_instance_timeout_s`; the next one hears of every live lease and of every request that waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Protocol

from hetlb.core.journal import booked
from hetlb.core.queue import QueueLimits
from hetlb.core.types import Lease, Outcome, Reject, RejectReason, Request, RequestId
from hetlb.proxy.driver import DriverSetup, ExchangeDriver
from hetlb.proxy.ends import End
from hetlb.proxy.engine_pools import Target
from hetlb.proxy.exchange import Exchange
from hetlb.proxy.exchange_states import TURNED_AWAY, Phase
from hetlb.proxy.http import error_responses
from hetlb.proxy.http.endpoints import Kind
from hetlb.proxy.http.openai_body import Call
from hetlb.proxy.lease_wire import RequestFacts, WireBooked
from hetlb.proxy.limits import Ticket
from hetlb.proxy.scheduling import several_models
from hetlb.proxy.scrape import read_model_list
from hetlb.workers.held_answer import HeldAnswer
from hetlb.workers.protocol import (
    AbortMessage,
    Arrival,
    Busy,
    CameBack,
    Cancelled,
    DispatchMessage,
    EndedMessage,
    FirstToken,
    InstanceAddress,
    LiveRequest,
    Made,
    ModelsRead,
    PassOnMessage,
    Refused,
    Rejected,
    RelayMessage,
    Used,
)

#: Bits of a request's id below the number of its relay.
ID_BITS: Final = 32
#: Leases of which the tokens so far are reported: what the dashboard lists.
_RECENT: Final = 25
_PINNED: Final = Kind.PINNED


class Sender(Protocol):
    """The channel, as a driver sees it."""

    def send(self, message: RelayMessage) -> None: ...
    def post(self, message: RelayMessage) -> None: ...


class RelayDriver(ExchangeDriver):
    """Driver whose scheduler is in another process, reached over `sender`."""

    def __init__(self, relay: int, limits: QueueLimits, setup: DriverSetup) -> None:
        super().__init__(setup)
        self._next_id = (relay << ID_BITS) + 1
        self._limits = limits
        self._sender: Sender | None = None
        self._alone_since = self.now()
        self._targets: dict[str, Target] = {}
        self._incarnations: dict[str, int] = {}
        self._leaving: dict[str, float] = {}
        self._next_incarnation = 1
        self._held: dict[RequestId, HeldAnswer] = {}
        #: The newest leases, for reports.
        self.recent: deque[Lease] = deque(maxlen=_RECENT)
        #: Bytes and tokens of prompts since the last report, by model.
        self.learnt: dict[str, tuple[int, int]] = {}
        #: Models that engines served when connections to them were made again, by instance.
        self._read: dict[str, set[str]] = {}
        self.pools.on_reconnect = self.reconnected
        #: True if requests wait somewhere: what frees an instance is said at once then.
        self.others_wait = False
        #: Names that some instance answers to, and the one where there is one.
        self.served: frozenset[str] = frozenset()
        self.only_model = ""
        #: Those of them of which no instance takes requests.
        self.down: frozenset[str] = frozenset()
        #: Tokens of a block of engines that publish KV events, as the scheduler process says.
        self.engine_block_tokens = 0

    # --- the channel ---

    def live_leases(self) -> list[LiveRequest]:
        """Leases that another scheduler process books again: those on instances still in the fleet."""
        now, live = self.now(), []
        for exchange in self.exchanges.values():
            lease = exchange.lease
            if lease is None or exchange.phase is Phase.QUEUED:
                continue
            target = self._targets.get(lease.instance)
            if target is None or target.incarnation != lease.incarnation:
                continue
            live.append(LiveRequest(WireBooked.of(booked(lease, now)), exchange.tenant))
        return live

    def connected(self, sender: Sender) -> None:
        """Send waiting requests, oldest first, to a scheduler process that has the live leases."""
        self._sender = sender
        self._incarnations.clear()
        for exchange in _queued(self.exchanges):
            sender.send(_arrival(exchange))

    def disconnected(self) -> None:
        """There is no scheduler process for now."""
        self._sender = None
        self._alone_since = self.now()
        for held in list(self._held.values()):
            held.pass_on()

    def _send(self, message: RelayMessage) -> None:
        if self._sender is not None:
            self._sender.send(message)

    def post(self, message: RelayMessage) -> None:
        """Send a message that nothing waits for, unless requests do."""
        if self.others_wait:
            self._send(message)
        elif self._sender is not None:
            self._sender.post(message)

    # --- facts ---

    @property
    def block_tokens(self) -> int:
        return self.engine_block_tokens

    @property
    def models(self) -> Collection[str]:
        return self.served

    @property
    def waiting(self) -> int:
        return len(_queued(self.exchanges))

    def available(self, model: str) -> bool:
        return model in self.served and model not in self.down

    def submit(self, exchange: Exchange) -> None:
        self.exchanges[exchange.request.id] = exchange
        if self._sender is None and not has_room(
            self._limits, [each.request for each in _queued(self.exchanges)]
        ):
            detail = "Too many requests are waiting for an instance."
            self.turn_down(exchange, Reject(exchange.request.id, RejectReason.QUEUE_FULL, detail, 1.0))
            return
        self._send(_arrival(exchange))

    def first_token(self, lease: Lease, now: float) -> None:
        lease.first_token_at = now
        self.post(FirstToken(lease.request.id, lease.id))

    def lease_ended(self, lease: Lease, outcome: Outcome, *, retry: bool) -> None:
        lease.ended = True
        self._held.pop(lease.request.id, None)
        if retry:
            self._totals.tried_again(lease.instance, outcome)
        ended = EndedMessage(
            lease.request.id,
            lease.id,
            outcome,
            lease.output_tokens,
            retry,
            lease.reported_cached_tokens,
        )
        if retry:
            self._send(ended)
        else:
            self.post(ended)

    def _go_on(self, rest: Request, lease: Lease, end: End) -> None:
        lease.ended = True
        self._held.pop(rest.id, None)
        self._send(
            EndedMessage(
                rest.id,
                lease.id,
                end.told,
                lease.output_tokens,
                True,
                goes_on=True,
                generated=rest.generated,
            )
        )

    def busy(self, lease: Lease, retry_after_s: float) -> None:
        if self._sender is not None:  # else the client gets what the engine said
            request_id = lease.request.id
            self._held[request_id] = HeldAnswer(self.exchanges[request_id], self._held)
            self._send(Busy(request_id, lease.id, retry_after_s))

    def cancelled(self, request_id: RequestId, now: float) -> None:
        self._send(Cancelled(request_id))

    def retry_after_s(self, reject: Reject) -> float | None:
        return reject.retry_after_s  # the scheduler process has looked at the whole queue

    def learn_prompt(self, model: str, call: Call, tokens: int) -> None:
        super().learn_prompt(model, call, tokens)
        if not call.images:  # what their sizes mean each relay learns by itself
            known_bytes, known_tokens = self.learnt.get(model, (0, 0))
            self.learnt[model] = known_bytes + call.text_bytes, known_tokens + tokens

    # --- answers that can be asked for again: the scheduler process knows where they are ---

    def remember_response(self, response_id: str, instance: str, tenant: str | None) -> None:
        self._send(Made(response_id, instance, tenant))

    def pin(self, response_id: str, tenant: str | None, *, strict: bool) -> str | None:
        return response_id

    def pinned_serves(self, pinned: str, model: str) -> bool:
        return True

    def model_at(self, pinned: str | None) -> str:
        return self.only_model or ("" if pinned is not None else several_models())

    # --- engines that turned out to be others ---

    def came_back(self, instance: str) -> None:
        self._send(CameBack(instance))

    def reconnected(self, instance: str, body: bytes) -> None:
        """Record the models that a reconnected engine serves now."""
        self._read[instance] = {entry["id"] for entry in read_model_list(body)}
        self._send(ModelsRead(instance, body))

    def serves(self, lease: Lease) -> bool:
        names = self._read.get(lease.instance)
        return not names or lease.request.model in names

    # --- instances ---

    def targets(self) -> Iterable[Target]:
        return self._targets.values()

    def instances(self, addresses: Iterable[InstanceAddress]) -> None:
        """These are all instances. Their incarnations are numbered here: they outlive a scheduler process."""
        targets: dict[str, Target] = {}
        incarnations: dict[str, int] = {}
        leaving: dict[str, float] = {}
        for each in addresses:
            name, known = each.name, self._targets.get(each.name)
            same = self._incarnations.get(name, each.incarnation) == each.incarnation
            if known is None or known.url != each.url or not same:
                known = Target(name, self._next_incarnation, each.url)
                self._next_incarnation += 1
            targets[name] = known
            incarnations[name] = each.incarnation
            if each.leaves_in_s is not None:
                leaving[name] = self.now() + each.leaves_in_s
        for name in self._read.keys() - targets.keys():
            del self._read[name]
        self._targets, self._incarnations, self._leaving = targets, incarnations, leaving
        self.drop_unused_pools()

    @property
    def leaving(self) -> dict[str, float]:
        return self._leaving

    # --- commands ---

    def dispatch(self, command: DispatchMessage) -> None:
        """Dispatch a request, unless it has ended and the message crossed its end."""
        exchange = self.exchanges.get(command.request)
        if exchange is None:
            return
        if self._held.pop(command.request, None) is not None:
            assert exchange.lease is not None
            self._totals.tried_again(exchange.lease.instance, Outcome.UPSTREAM_BUSY)
            exchange.lease.ended = True
            exchange.back_to_queue(TURNED_AWAY)
        if command.model:
            exchange.request.model = command.model
        target, now = self._targets[command.instance], self.now()
        lease = Lease(
            command.lease,
            exchange.request,
            target.name,
            target.incarnation,
            # The tokens that it books are known to the scheduler process alone.
            work_ns=command.work_ns,
            kv_tokens=0,
            kv_prompt_tokens=0,
            promised_tokens=0,
            prompt_tokens=0,
            unread_tokens=0,
            predicted_output=command.predicted_output,
            dispatched_at=now,
        )
        self.recent.append(lease)
        if command.limit_lines is not None:
            exchange.ticket = _RelayTicket(self, command.request, command.limit_lines)
        self.open_pool(target.incarnation, target.name, target.url)
        exchange.dispatched(
            lease, now, command.expected_s, command.expected_first_s, command.mixed, command.gives_ids
        )

    def answer(self, command: Rejected | Refused | PassOnMessage | AbortMessage) -> None:
        """Apply the scheduler process's answer to a request, unless it has ended."""
        exchange = self.exchanges.get(command.request)
        if exchange is None:
            return
        if isinstance(command, Rejected):
            reject = Reject(command.request, command.reason, command.detail, command.retry_after_s)
            self.turn_down(exchange, reject)
        elif isinstance(command, Refused):
            limited = command.status == error_responses.RATE_LIMITED.status
            kind = error_responses.RATE_LIMITED if limited else error_responses.bad_request(command.status)
            exchange.refuse(kind, command.message, command.retry_after_s, command.lines)
        elif isinstance(command, AbortMessage):
            exchange.client_gone()
        elif (held := self._held.get(command.request)) is not None:
            held.pass_on()

    # --- time ---

    def _sweep(self) -> None:
        super()._sweep()
        waited_s = self.now() - self._alone_since if self._sender is None else -math.inf
        if waited_s >= self._limits.no_instance_timeout_s:
            for exchange in _queued(self.exchanges):
                detail = "The scheduler is not there."
                self.turn_down(exchange, Reject(exchange.request.id, RejectReason.NO_INSTANCE, detail, 1.0))


class _RelayTicket(Ticket):
    """Ticket of a limiter in the scheduler process; `lines` are its header lines at the dispatch."""

    __slots__ = ("_driver", "_lines", "_request_id")

    def __init__(self, driver: RelayDriver, request_id: RequestId, lines: bytes) -> None:
        super().__init__(None, None, 0)
        self._driver = driver
        self._request_id = request_id
        self._lines = lines

    def used(self, prompt_tokens: int, output_tokens: int, now: float) -> None:
        self._driver.post(Used(self._request_id, prompt_tokens, output_tokens, False))

    def ended(self, prompt_tokens: int, output_tokens: int, now: float) -> None:
        self._driver.post(Used(self._request_id, prompt_tokens, output_tokens, True))

    def headers(self, now: float) -> bytes:
        return self._lines


def arrival_of(request: Request, owner: str | None, *, strict: bool) -> Arrival:
    """Make the message of a request. In a relay `pinned` is the id of an earlier answer, not an instance."""
    return Arrival(RequestFacts.of(request), request.pinned, owner, strict)


def _arrival(exchange: Exchange) -> Arrival:
    return arrival_of(exchange.request, exchange.tenant, strict=exchange.kind is _PINNED)


def _queued(exchanges: dict[RequestId, Exchange]) -> list[Exchange]:
    return [each for each in exchanges.values() if each.phase is Phase.QUEUED]


def has_room(limits: QueueLimits, waiting: Sequence[Request]) -> bool:
    """Return whether what waits without a scheduler process is within the queue's limits."""
    if limits.max_requests is not None and len(waiting) > limits.max_requests:
        return False
    return limits.max_bytes is None or sum(each.body_bytes for each in waiting) <= limits.max_bytes
