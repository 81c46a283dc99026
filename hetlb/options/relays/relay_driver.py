"""Driver of a relay: its exchanges are here, its scheduler in another process.

While there is no scheduler process, streams go on and arrivals wait, within the limits of the queue, for at
most `no_instance_timeout_s`; the next one hears of every live lease and of every request that waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Lease, Outcome, Reject, RejectReason, Request, RequestId
from hetlb.balancer.engines.engine_pools import Target
from hetlb.balancer.engines.upstream import Carried
from hetlb.balancer.exchange.driver import Driver
from hetlb.balancer.exchange.ends import End
from hetlb.balancer.exchange.exchange import Exchange
from hetlb.balancer.exchange.exchange_states import Phase
from hetlb.balancer.exchange.plain_attempt import Plain
from hetlb.balancer.exchange.scheduler_side import SchedulerSide
from hetlb.balancer.http import error_responses
from hetlb.balancer.telemetry.request_record import RequestRecord
from hetlb.options.lease_wire import RequestFacts, WireBegun, WireBooked, WireEnded, booked
from hetlb.options.message_channel import MessageChannel
from hetlb.options.relays.protocol import (
    Arrival,
    CameBack,
    Cancelled,
    DispatchMessage,
    FromScheduler,
    InstanceAddress,
    LeaseChange,
    LiveRequest,
    ModelsRead,
    Moving,
    PassOnMessage,
    Refused,
    Rejected,
    RelayMessage,
    Used,
    ViewMessage,
    WorkMessage,
)
from hetlb.served_models import read_model_list

#: Bits of a request's id below the number of its relay.
ID_BITS: Final = 32
#: Bytes of a refusal that are kept; more wait in its connection.
_MAX_KEPT_BYTES: Final = 64 << 10
#: Leases whose tokens so far are reported, for the dashboard's list.
_RECENT_LEASES: Final = 25


class RelayDriver(SchedulerSide):
    """The scheduler as a relay sees it: in another process, reached over a channel."""

    def __init__(self, limits: QueueLimits, driver: Driver) -> None:
        super().__init__()
        self._limits = limits
        self._driver = driver
        self._channel: MessageChannel[FromScheduler] | None = None
        self._alone_since = driver.now()
        self._targets: dict[str, Target] = {}
        #: Instances whose counters move, and the times since when others stand still, from the scheduler
        #: process.
        self._moving: frozenset[str] = frozenset()
        self._stalled: dict[str, float] = {}
        #: Incarnations of the instances as the scheduler process numbers them.
        self._incarnations: dict[str, int] = {}
        self._next_incarnation = 1
        #: The newest leases, for reports.
        self.recent: deque[Lease] = deque(maxlen=_RECENT_LEASES)
        #: Bytes and tokens of prompts since the last report, by model.
        self.learnt: dict[str, tuple[int, int]] = {}
        #: Models that engines served when connections to them were made again, by instance.
        self._read: dict[str, set[str]] = {}
        driver.pools.on_reconnect = self.reconnected
        #: Answers of engines that refused, by request, until the scheduler process has decided.
        self._kept: dict[RequestId, KeptAnswer] = {}
        #: True if requests wait somewhere: ends that free an instance are sent at once then.
        self.others_wait = False
        self._view = ViewMessage([], [], "", b"[]", False)
        self._served: frozenset[str] = frozenset()

    # --- the channel ---

    def live_leases(self) -> list[LiveRequest]:
        """Return the leases on instances still in the fleet, which another scheduler process books again."""
        now, live = self._driver.now(), []
        for exchange in self._driver.exchanges.values():
            lease = exchange.record.lease
            if lease is None or exchange.phase is Phase.QUEUED:
                continue
            target = self._targets.get(lease.instance)
            if target is None or target.incarnation != lease.incarnation:
                continue
            live.append(LiveRequest(WireBooked.of(booked(lease, now)), exchange.record.tenant))
        return live

    def connected(self, channel: MessageChannel[FromScheduler]) -> None:
        """Send waiting requests, oldest first, to a scheduler process that has the live leases."""
        self._channel = channel
        self._incarnations.clear()
        for exchange in self._queued():
            channel.send(arrival_of(exchange.record.request, exchange.record.tenant))

    def disconnected(self) -> None:
        self._channel = None
        self._moving, self._stalled = frozenset(), {}
        self._alone_since = self._driver.now()
        for request_id in list(self._kept):
            self._let_go(request_id)

    def _let_go(self, request_id: RequestId) -> None:
        kept = self._kept.pop(request_id, None)
        if kept is None:
            return
        try:
            kept.let_go()
        except Exception as error:
            kept.fault(error)

    def _send(self, message: RelayMessage) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def post(self, message: RelayMessage) -> None:
        """Send a message that nothing waits for, unless requests do."""
        if self.others_wait:
            self._send(message)
        elif self._channel is not None:
            self._channel.post(message)

    # --- the fleet ---

    def set_work(self, message: WorkMessage) -> None:
        """Take over which instances work, and since when others stand still."""
        now = self._driver.now()
        self._moving = frozenset(message.moving)
        self._stalled = {name: now - seconds for name, seconds in message.stalled.items()}

    def set_view(self, view: ViewMessage) -> None:
        """Set the view of the fleet that the scheduler process gives."""
        self._set_instances(view.instances)
        self._view, self._served = view, frozenset(view.names)

    @property
    def models(self) -> Collection[str]:
        return self._served

    @property
    def only_model(self) -> str:
        return self._view.only_model

    @property
    def block_tokens(self) -> int:
        return self._view.block_tokens

    @property
    def waiting(self) -> int:
        return len(self._queued())

    def available(self, model: str) -> bool:
        return model in self._served and model not in self._view.down

    def targets(self) -> Collection[Target]:
        return self._targets.values()

    def serves(self, lease: Lease) -> bool:
        names = self._read.get(lease.instance)
        return not names or lease.request.model in names

    def _set_instances(self, addresses: Iterable[InstanceAddress]) -> None:
        """Set all instances. Their incarnations are numbered here: they outlive a scheduler process."""
        targets: dict[str, Target] = {}
        incarnations: dict[str, int] = {}
        now = self._driver.now()
        for each in addresses:
            name, known = each.name, self._targets.get(each.name)
            incarnations[name] = each.incarnation
            if known is None or (known.url, self._incarnations.get(name, each.incarnation)) != (
                each.url,
                each.incarnation,
            ):
                number, self._next_incarnation = self._next_incarnation, self._next_incarnation + 1
            else:
                number = known.incarnation
            leaves_at = None if each.leaves_in_s is None else now + each.leaves_in_s
            targets[name] = Target(name, number, each.url, leaves_at)
        for name in self._read.keys() - targets.keys():
            del self._read[name]
        self._targets, self._incarnations = targets, incarnations
        self._driver.instances_changed()

    # --- facts ---

    def submit(self, record: RequestRecord) -> None:
        request = record.request
        if self._channel is None and not self._has_room():
            detail = "Too many requests are waiting for an instance."
            self._driver.reject(Reject(request.id, RejectReason.QUEUE_FULL, detail), 1.0)
            return
        self._send(arrival_of(request, record.tenant))

    def first_token(self, lease: Lease, now: float) -> None:
        lease.first_token_at = now
        self.post(LeaseChange(lease.request.id, WireBegun(lease.id)))

    def lease_ended(
        self, lease: Lease, outcome: Outcome, now: float, *, retry: bool, generated: int | None = None
    ) -> None:
        lease.ended = True
        request_id = lease.request.id
        self._kept.pop(request_id, None)
        ended = WireEnded(lease.id, outcome, lease.output_tokens, lease.reported_cached_tokens)
        message = LeaseChange(request_id, ended, retry, generated)
        if retry:
            self._send(message)
        else:
            self.post(message)

    def move(self, lease: Lease, generated: int, now: float) -> None:
        self._send(Moving(lease.request.id, lease.id, generated))

    def refused(
        self, lease: Lease, status: int, retry_after_s: float | None, features: Sequence[str], now: float
    ) -> None:
        request_id = lease.request.id
        attempt = self._driver.exchanges[request_id].attempt
        assert isinstance(attempt, Plain), "expected an attempt at an engine"
        if self._channel is None or (attempt.answer is not None and attempt.answer.stream is not None):
            return  # the client gets the engine's answer
        self._kept[request_id] = KeptAnswer(attempt)
        self._send(Refused(request_id, lease.id, status, retry_after_s, tuple(features)))

    def hung_s(self, lease: Lease, now: float) -> float | None:
        if lease.instance in self._moving:
            return None
        since = self._stalled.get(lease.instance)
        return 0.0 if since is None else now - since

    def cancelled(self, request_id: RequestId, now: float) -> None:
        self._send(Cancelled(request_id))

    def abandon(self, request_id: RequestId, now: float) -> None:
        self._send(Cancelled(request_id))

    def came_back(self, instance: str) -> None:
        self._send(CameBack(instance))

    def learn_prompt(self, model: str, text_bytes: int, tokens: int) -> None:
        known_bytes, known_tokens = self.learnt.get(model, (0, 0))
        self.learnt[model] = known_bytes + text_bytes, known_tokens + tokens

    def reconnected(self, instance: str, body: bytes) -> None:
        """Record the models that a reconnected engine serves now."""
        self._read[instance] = {entry["id"] for entry in read_model_list(body)}
        self._send(ModelsRead(instance, body))

    # --- commands ---

    def dispatch(self, command: DispatchMessage) -> None:
        """Dispatch a request, unless it has ended and the message crossed its end."""
        driver = self._driver
        exchange = driver.exchanges.get(command.request)
        if exchange is None:
            return
        record, held = exchange.record, self._kept.pop(command.request, None) is not None
        before = record.lease
        if before is not None and (
            held or (before.instance in self._stalled and driver.may_turn_away(before))
        ):
            before.ended = True
            driver.turned_away(before, Outcome.UPSTREAM_BUSY)
        if command.model:
            record.request = replace(record.request, model=command.model)
        target, now = self._targets[command.instance], driver.now()
        lease = Lease(
            command.lease,
            record.request,
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
            record.ticket = _RelayTicket(self, command.request, command.limit_lines)
        driver.open_pool(target.incarnation, target.name, target.url)
        lease.forecast_end_s, lease.expected_first_s = command.expected_s, command.expected_first_s
        lease.beside = command.mixed
        try:
            attempt = exchange.maker.attempt(exchange, lease, command.gives_ids, command.max_model_len)
            exchange.dispatched(attempt, lease)
        except Exception as error:
            driver.guard.ended(exchange, error)

    def answer(self, command: Rejected | PassOnMessage) -> None:
        exchange = self._driver.exchanges.get(command.request)
        if exchange is None:
            return
        if isinstance(command, Rejected):
            if command.reason is not None:
                kind = error_responses.REJECTIONS[command.reason]
            elif command.status == error_responses.RATE_LIMITED.status:
                kind = error_responses.RATE_LIMITED
            else:
                kind = error_responses.bad_request(command.status)
            try:
                exchange.refuse(kind, command.detail, command.retry_after_s, command.lines)
            except Exception as error:
                exchange.fault(error)
        else:
            self._let_go(command.request)

    # --- time ---

    def sweep(self, now: float) -> None:
        if self._channel is None and now - self._alone_since >= self._limits.no_instance_timeout_s:
            for exchange in self._queued():
                detail = "The scheduler is not there."
                self._driver.reject(Reject(exchange.record.request.id, RejectReason.NO_INSTANCE, detail), 1.0)

    def _has_room(self) -> bool:
        """Return True if the requests that wait without a scheduler process are within the queue's limits."""
        limits, waiting = self._limits, self._queued()
        if limits.max_requests is not None and len(waiting) > limits.max_requests:
            return False
        return (
            limits.max_bytes is None
            or sum(each.record.request.body_bytes for each in waiting) <= limits.max_bytes
        )

    def _queued(self) -> list[Exchange]:
        return [each for each in self._driver.exchanges.values() if each.phase is Phase.QUEUED]


class KeptAnswer(Carried):
    """Answer of an engine that refused a request, in place of its attempt until the client gets it."""

    __slots__ = ("_attempt", "_body", "_engine", "_failure", "_whole")

    def __init__(self, attempt: Plain) -> None:
        super().__init__(attempt.method)
        self._attempt = attempt
        self._body, self._whole = b"", False
        self._failure: tuple[End, str] | None = None
        self._engine = attempt.engine
        assert self._engine is not None, "expected an engine that answers"
        self._engine.carried = self

    def engine_body(self, payload: bytes) -> None:
        self._body += payload
        if len(self._body) > _MAX_KEPT_BYTES and self._engine is not None:
            self._engine.pause()

    def engine_end(self, payload: bytes) -> None:
        self._attempt.engine = self._engine = None
        self._body, self._whole = self._body + payload, True

    def engine_failed(self, end: End, detail: str) -> None:
        self._attempt.engine = self._engine = None
        self._failure = end, detail

    def fault(self, error: Exception) -> None:
        self._attempt.fault(error)

    def let_go(self) -> None:
        """Give the client the answer: no other instance gets its request."""
        attempt, engine, body = self._attempt, self._engine, self._body
        if engine is not None and engine.carried is self:
            engine.carried = attempt
        if self._whole:
            attempt.engine_end(body)
        elif body:
            attempt.engine_body(body)
        if self._failure is not None:
            end, detail = self._failure
            attempt.engine_failed(end, detail)
        elif attempt.engine is not None and attempt.response.held_since is None:
            attempt.engine.resume()


class _RelayTicket:
    """Ticket of a limiter in the scheduler process; `lines` are its header lines at the dispatch."""

    __slots__ = ("_driver", "_lines", "_request_id")

    def __init__(self, driver: RelayDriver, request_id: RequestId, lines: bytes) -> None:
        self._driver = driver
        self._request_id = request_id
        self._lines = lines

    def used(self, prompt_tokens: int, output_tokens: int, now: float) -> None:
        self._driver.post(Used(self._request_id, prompt_tokens, output_tokens, False))

    def ended(self, prompt_tokens: int, output_tokens: int, now: float) -> None:
        self._driver.post(Used(self._request_id, prompt_tokens, output_tokens, True))

    def headers(self, now: float) -> bytes:
        return self._lines


def arrival_of(request: Request, owner: str | None) -> Arrival:
    """Make the message of a request."""
    return Arrival(RequestFacts.of(request), owner)
