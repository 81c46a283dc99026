"""One request on its way through the proxy: from the client's whole request to its one terminal outcome.

The exchange keeps the client, the record and the phase. What is done for the request at an engine is an
`Attempt` (`attempt.py`), one for each lease; without an option it is a `Plain` one (`plain_attempt.py`).
`finish` is the only way out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hetlb.balancer.clients.client_response import HEARTBEATS, NOTHING, STARTED, ClientResponse, ClientSide
from hetlb.balancer.config.fleet_tables import ProxyTable
from hetlb.balancer.core.state_transition import Transition
from hetlb.balancer.core.types import Lease, Outcome, RejectReason, Request
from hetlb.balancer.engines.upstream import EngineConnection
from hetlb.balancer.exchange import ends
from hetlb.balancer.exchange import exchange_states as states
from hetlb.balancer.exchange.attempt import WAITING, Attempt
from hetlb.balancer.exchange.ends import End
from hetlb.balancer.exchange.engine_answer import EngineAnswer
from hetlb.balancer.exchange.exchange_states import Phase
from hetlb.balancer.http import error_responses
from hetlb.balancer.http.answer_form import PATHS
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.http.error_responses import Answer
from hetlb.balancer.http.http1 import RequestHead
from hetlb.balancer.http.openai_body import Call
from hetlb.balancer.telemetry.request_record import RequestRecord

if TYPE_CHECKING:
    from hetlb.balancer.exchange.driver import Driver

#: Kinds of which a stream is server-sent events, and may hold comments.
SSE_KINDS: Final = (Kind.CHAT, Kind.COMPLETION, Kind.RESPONSES, Kind.MESSAGES)
_QUEUED: Final = Phase.QUEUED
_SENT: Final = Phase.SENT
_STREAMING: Final = Phase.STREAMING
_DONE: Final = Phase.DONE


class Maker(ABC):
    """Maker of the attempts of requests, of one kind."""

    __slots__ = ()

    @abstractmethod
    def attempt(self, exchange: Exchange, lease: Lease, gives_ids: bool, max_model_len: int) -> Attempt:
        """Make the attempt of a lease.

        `gives_ids`: its engine takes and gives token ids, in requests of `max_model_len` tokens (0: unknown).
        """

    def close(self, record: RequestRecord) -> None:
        """Keep nothing more of the request, which has ended."""


class Exchange:
    """One request and its answer."""

    __slots__ = (
        "attempt", "call", "driver", "dropped", "maker", "now", "outgoing", "phase", "reconnected", "record",
        "response", "since",
    )  # fmt: skip

    def __init__(
        self,
        driver: Driver,
        client: ClientSide,
        outgoing: EngineRequest,
        kind: Kind,
        call: Call,
        request: Request,
        label: str,
        maker: Maker,
        tenant: str | None = None,
    ) -> None:
        head, now = outgoing.head, driver.now()
        tokens = call.prompt_tokens_total or 0
        self.record = RequestRecord(request, kind, head.method, head.path, label, tenant, now, tokens)
        self.response = ClientResponse(client, head, label, now, call.stream and kind in SSE_KINDS)
        self.driver = driver
        self.now = driver.now
        self.call = call
        self.outgoing = outgoing
        #: Makes the attempts of this request.
        self.maker = maker
        self.attempt: Attempt = WAITING
        self.phase = _QUEUED
        #: Since when this phase lasts, or when last something came.
        self.since = now
        #: Reason why the last engine that may have run it dropped its answer, "" without one.
        self.dropped = ""
        #: True if it was sent to this engine on a second connection, as the first one had been closed.
        self.reconnected = False

    # --- from the scheduler ---

    def dispatched(self, maker: Maker, lease: Lease, gives_ids: bool, max_model_len: int) -> None:
        """Go to the instance that the scheduler chose; its engine is described as for `Maker.attempt`."""
        if self.attempt.takes(lease):
            return
        self.record.lease = lease
        self.attempt = attempt = maker.attempt(self, lease, gives_ids, max_model_len)
        attempt.begin()

    def back_to_queue(self, transition: Transition[Phase]) -> None:
        """Wait for another lease, since nothing of an answer came of this one."""
        self.record.retries += 1
        self.queue_again(transition)

    def queue_again(self, transition: Transition[Phase]) -> None:
        """Wait for another lease."""
        self.attempt.leave()
        self.attempt = WAITING
        self.reconnected = False
        self.record.unplaced()
        if self.response.state is not STARTED:
            self.record.status = 0
        self.enter(transition, self.now())

    # --- from the client's connection ---

    def client_gone(self) -> None:
        """Stop the work for the client, which left."""
        if self.phase is not _DONE:
            self.finish(ends.LEFT, client_gone=True)

    def pause(self, paused: bool) -> None:
        """Stop reading the engine while the client is slow (`paused`), and suspend its idle timeout."""
        now, response = self.now(), self.response
        if paused:
            response.pause(now)
        elif response.read_on(now):
            self.since = now
        self.attempt.pause(paused)

    # --- from the clock ---

    def sweep(self, now: float, table: ProxyTable) -> None:
        """End waits beyond their limits, send heartbeats where due. Called about twice a second."""
        response, record = self.response, self.record
        if self.phase is _QUEUED and response.given_up_at(self.since, record.arrived_at) <= now:
            retry_after_s = self.driver.give_up(record.request.id)
            detail = "No instance became free in the time that the client waits."
            self.refuse(error_responses.REJECTIONS[RejectReason.QUEUE_EXPIRED], detail, retry_after_s)
        elif response.paused_since is None:  # `ClientConnection.sweep` ends a client that does not read
            self.attempt.sweep(now, table)
            heartbeat_s = table.heartbeat_s
            quiet = self.phase is not _STREAMING and self.phase is not _DONE
            if heartbeat_s and quiet and response.may_beat and now - response.beat_at >= heartbeat_s:
                response.beat(now)  # the first time this commits the answer

    # --- the end ---

    def shut_down(self) -> None:
        if self.response.state is STARTED:
            self.break_off(ends.STOPPED, "the proxy is shutting down")
        else:
            self.refuse(error_responses.SHUTTING_DOWN, "The proxy is shutting down.", 1.0, end=ends.STOPPED)

    def give_up(self) -> None:
        """End with an error event or 500: hetlb itself raised an error at this request."""
        self.refuse(error_responses.FAULT, "The proxy failed on this request.", end=ends.FAULT)

    def fault(self, error: Exception) -> None:
        """Hand an error that was raised at this request to the guard, which ends it."""
        self.driver.guard.ended(self, error)

    def refuse(
        self,
        answer: Answer,
        message: str,
        retry_after_s: float | None = None,
        lines: bytes = b"",
        *,
        end: End | None = None,
    ) -> None:
        """Answer in our own words, with these header lines. `end` is the lease's, if any."""
        response = self.response
        if response.state is STARTED:
            end = ends.BROKEN if end is None or end.outcome is Outcome.NO_RESPONSE else end
            self.break_off(end, message.removesuffix("."))
            return
        if response.state is HEARTBEATS:
            response.error_event(answer, message)
            self.finish(end, answer.outcome, broken=True)
            return
        if answer.should_retry and (self.dropped or self.phase is _SENT or self.phase is _STREAMING):
            answer = replace(answer, should_retry=False)
        self.record.status = answer.status
        response.refuse(answer, message, retry_after_s, lines)
        self.finish(end, answer.outcome)

    def end_silent(self) -> None:
        """End a request with no byte of an answer in time."""
        answer = error_responses.FIRST_BYTE_TIMEOUT
        self.refuse(answer, "The instance did not begin to answer in time.", end=ends.SILENT)

    def waits_on(self, hung_s: float | None, now: float) -> bool:
        """Return True if the wait may go on: the engine works, or the client's stated time is not over.

        `hung_s`: seconds for which the engine is known to stand still; None: it works; 0.0: not known.
        """
        given_up_at = self.response.given_up_at(self.since, self.record.arrived_at)
        return hung_s is None or (not hung_s and now < given_up_at < math.inf)

    def take_usage(self, answer: EngineAnswer) -> None:
        """Replace estimates by the exact counts of the engine, if it gave some."""
        record = self.record
        if answer.stream is None and record.path in PATHS:
            answer.has_usage(answer.tail)  # of a body in several reads
        completion, prompt, cached = answer.usage()
        sensible = record.counted(completion, prompt, cached)
        uncounted = completion is None and answer.stream is None and not answer.refuses
        if uncounted and record.ticket is not None and record.request.generates:
            from hetlb.balancer.http.answer_text import tokens_of_text

            text = self.driver.token_estimator.text_ratio(record.request.model)
            record.estimated_output_tokens = tokens_of_text(answer.tail, answer.length or 0, text)
        if sensible and prompt is not None and not record.request.prompt_exact and not record.resumed_tokens:
            call, estimator = self.call, self.driver.token_estimator
            estimator.learn(record.request.model, call.text_bytes, call.media, prompt)

    def break_off(self, end: End, detail: str) -> None:
        """End a response that has begun so that no client takes it for complete."""
        response = self.response
        if end is not ends.STOPPED and response.held_up:
            end = ends.HELD_UP
        if response.state is NOTHING:
            response.write(self.attempt.head())
        if last := self.attempt.cut():
            response.write(response.frame(last))
        if self.record.streamed or response.state is HEARTBEATS:
            response.error_event(error_responses.BROKEN_STREAM, f"The answer broke off: {detail}.")
        self.finish(end, broken=True)

    def finish(
        self,
        end: End | None,
        outcome: Outcome | None = None,
        *,
        broken: bool = False,
        client_gone: bool = False,
        now: float | None = None,
    ) -> None:
        """End the request, the one way out, at `now` if the caller knows the time.

        `end` is the lease's; `outcome` the request's without one.
        """
        record, response = self.record, self.response
        self.attempt.leave()
        self.attempt = WAITING  # no cycle is left
        record.ended_at = now = self.now() if now is None else now
        record.ended_in = self.phase
        self.enter(states.ENDED, now)
        if response.state is HEARTBEATS:
            record.status = 200
        record.end, record.outcome = end, outcome if end is None else end.outcome
        self.maker.close(record)
        self.driver.finished(self)
        if client_gone:
            return
        if broken:
            response.client.break_off()
        else:
            response.client.end(keep=not response.closes)

    def enter(self, transition: Transition[Phase], now: float) -> None:
        """Change the state by a row of `exchange_states.TRANSITIONS`."""
        self.phase = transition.take(self.phase)
        self.since = now


#: Methods of requests that may lack both a body and its length.
_BODILESS = frozenset({b"GET", b"HEAD", b"DELETE"})


class EngineRequest:
    """Request of one client for whichever engine gets it; `label` is its `x-request-id` there."""

    __slots__ = ("body", "head", "label")

    def __init__(self, head: RequestHead, body: bytes, label: str) -> None:
        self.head = head
        self.label = label.encode("ascii")
        self.body = body

    @property
    def features(self) -> tuple[str, ...]:
        """Features of its body that some engines refuse."""
        from hetlb.balancer.http.request_features import features_of

        return features_of(self.body)

    def send(self, connection: EngineConnection, lines: bytes, body: bytes) -> None:
        """Send it with these lines as its head, and this body."""
        if body or self.head.method not in _BODILESS:
            head = b"%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (lines, self.label, len(body))
        else:
            head = b"%bx-request-id: %b\r\n\r\n" % (lines, self.label)
        connection.send(head, body)
