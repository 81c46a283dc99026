"""One HTTP request as Envoy's external processing shows it: messages in, answers out, no gRPC.

A stream is both sides of an `Exchange`: to it Envoy is the client and the engine. It reads the request like
the proxy does, holds its headers until an instance is chosen, and hands the answer's bytes to the exchange,
which counts tokens and ends the lease. Envoy's stream may end at any moment without a word: then the client
has left, or the answer was broken off, and the exchange ends.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from hetlb.balancer.clients.access import EngineAccess
from hetlb.balancer.clients.api_keys import Tenant
from hetlb.balancer.clients.router import Router
from hetlb.balancer.config.fleet_tables import PickTable
from hetlb.balancer.core.state_transition import Transition
from hetlb.balancer.core.types import RejectReason
from hetlb.balancer.engines.upstream import Carried, Upstream
from hetlb.balancer.exchange import ends
from hetlb.balancer.exchange.exchange import Exchange
from hetlb.balancer.exchange.exchange_states import WRITTEN, Phase
from hetlb.balancer.http import error_responses
from hetlb.balancer.http.error_responses import TOO_MANY_BYTES, Refusal
from hetlb.balancer.http.http1 import GateError, RequestHead
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.options.pick import envoy_fields, messages
from hetlb.options.pick import stream_states as rows
from hetlb.options.pick.envoy_fields import TenantNames
from hetlb.options.pick.pick_driver import PickDriver
from hetlb.options.pick.stream_states import StreamState

logger = logging.getLogger("hetlb.pick")

OBJECTIVE: Final = b"x-gateway-inference-objective"
#: Maximum bytes of a piece in full duplex mode (Envoy's recommendation).
_MAX_PIECE_BYTES: Final = 64 << 10
#: Seconds without a byte after which a body has stopped.
_BODY_STOP_S: Final = 10
#: Seconds between two lines about an error of ours, or a gateway that does not reach an instance.
_LOG_S: Final = 60.0
#: Headers of an own answer that Envoy makes itself.
_FRAMING = frozenset({b"content-length", b"connection"})
#: Keys of clients. Engines do not get them if they are checked here, or if the engine has its own.
_KEYS = ("authorization", "x-api-key", "api-key")


class PickerState:
    """Facts that all streams of a picker share. `addresses` are `ip:port` by instance."""

    def __init__(
        self, driver: PickDriver, router: Router, table: PickTable, access: Mapping[str, EngineAccess]
    ) -> None:
        self.driver = driver
        self.router = router
        self.table = table
        self.access = access
        self.addresses: dict[str, str] = {}
        self.names: dict[str, str] = {}
        #: Priorities by the names of objectives: the cluster's, and above them the file's.
        self.objectives: dict[str, int] = dict(table.objectives)
        self.stopping = False
        #: Open streams.
        self.streams: set[HttpStream] = set()
        #: Bytes of incomplete requests.
        self.held_bytes = 0
        #: Tenants that the gateway's header may name.
        self.tenants = TenantNames()
        #: Time of the last line about a gateway that does not reach an instance; "": about an error of ours.
        self._told_at: dict[str, float] = {}

    def set_addresses(self, addresses: Mapping[str, str]) -> None:
        """Take the new addresses of the instances."""
        self._told_at = {name: at for name, at in self._told_at.items() if not name}
        self.addresses = dict(addresses)
        self.names = {address: name for name, address in addresses.items()}

    def set_address(self, name: str, address: str) -> None:
        """Set the address of an instance."""
        self.names.pop(self.addresses.get(name, ""), None)
        self.addresses[name] = address
        self.names[address] = name

    def strayed(self, instance: str, served: str) -> None:
        """Note that a request for `instance` reached an address that the gateway did not get."""
        if not self._may_tell(instance):
            return
        address = self.addresses.get(instance, "-")
        message = "requests for %s reach %s: the gateway has no healthy endpoint %s"
        tell(logger, Event.GATEWAY_ELSEWHERE, message, instance, served, address, instance=instance)

    def failed(self, error: Exception) -> None:
        """Log an error of ours that ended a call, with its traceback."""
        if self._may_tell(""):
            tell(logger, Event.REQUEST_FAILED, "a request of a gateway failed", exc_info=error)

    def _may_tell(self, about: str) -> bool:
        """Return True at most once in `_LOG_S`."""
        now = self.driver.now()
        if now - self._told_at.get(about, -math.inf) < _LOG_S:
            return False
        self._told_at[about] = now
        return True

    def set_objectives(self, priorities: Mapping[str, int]) -> None:
        """Set the cluster's objectives; the file's go before them."""
        self.objectives = {**priorities, **self.table.objectives}


class HttpStream(Upstream):
    """A request on its way through Envoy. `send` takes the bytes of one answer to Envoy."""

    def __init__(self, shared: PickerState, send: Callable[[bytes], None]) -> None:
        self._shared = shared
        self._send = send
        self.state = StreamState.OPENED
        self._request_mode = self._response_mode = messages.FULL_DUPLEX
        self._head: RequestHead | None = None
        self._tenant: Tenant | None = None
        self._subset: tuple[str, ...] | None = None
        self._body: list[bytes] = []
        #: Bytes of the body so far.
        self.body_bytes = 0
        #: Messages of the body, and the state of `sweep`.
        self._chunks = self._swept_chunks = -1
        self._taken_s = self._stopped_s = 0.0
        self._original = b""
        #: Answer to the trailers that ended the body, if any did.
        self._trailers = b""
        #: Addresses that Envoy was told, in order.
        self._told: list[str] = []
        self._exchange: Exchange | None = None
        #: Bytes for the client while a part of the answer is fed to the exchange, None else.
        self._out: bytes | None = None

    @property
    def over(self) -> bool:
        """True once no message of the gateway changes anything."""
        return self.state in _OVER

    def _enter(self, transition: Transition[StreamState]) -> None:
        """Take a row of `stream_states.TRANSITIONS`."""
        assert self.state in transition.before, f"{self.state}: {transition.event}"
        if self.state is StreamState.READING:
            self._shared.held_bytes -= self.body_bytes
            self._body = []
        self.state = transition.after

    # --- from Envoy ---

    def receive(self, message: Any) -> None:
        """Take one message. Raises `MalformedMessage`."""
        kind = message.WhichOneof("request")
        state = self.state
        if kind == "response_body":
            self._response_body(message.response_body)
        elif kind == "request_body":
            if state is StreamState.READING:
                self._guarded(self._request_body, message.request_body)
        elif kind == "request_headers":
            if state is StreamState.OPENED:
                self._guarded(self._request_headers, message)
        elif kind == "response_headers":
            self._response_headers(message)
        elif kind == "request_trailers":
            self._request_trailers()
        elif kind == "response_trailers":
            self._response_trailers()
        if state is StreamState.OPENED and self._head is None and not self.over:
            raise envoy_fields.MalformedMessage("expected the request's headers first")

    def closed(self) -> None:
        """Envoy's stream has ended, with or without a word."""
        seen = self.state in _ANSWER
        exchange = self._exchange
        if self.state is not StreamState.CLOSED:
            self._enter(rows.CLOSING)
        # No cycle is left: what was allocated goes now, not in a pause of the garbage collector.
        self._exchange, self._send, self._body = None, _unsent, []
        if exchange is None or exchange.phase is Phase.DONE:
            return
        if seen and self._response_mode == messages.NONE:
            exchange.finish(ends.UNSEEN)
        else:
            exchange.client_gone()

    def _guarded(self, take: Callable[[Any], None], message: Any) -> None:
        """Take a part of the request; a refused one is answered."""
        try:
            take(message)
        except GateError as error:
            self.refuse(error)

    def refuse(self, error: GateError) -> None:
        """Answer a request that may not pass."""
        answer, retry_after_s, lines = error_responses.refused_for(error)
        shared = self._shared
        if self._head is None:
            shared.driver.refused(answer.outcome, answer.status)
        else:
            now = shared.driver.now()
            label = shared.router.refused(self._head, self._tenant, answer, now, self.address)
            lines += b"x-request-id: %b\r\n" % label.encode("ascii")
        self._answer(error_responses.refusal(answer, error.message, retry_after_s, lines))

    # --- the request ---

    def _request_headers(self, message: Any) -> None:
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        head = self._head = envoy_fields.request_head(message.request_headers.headers.headers)
        self._enter(rows.HEADERS)
        shared = self._shared
        if shared.stopping:
            raise Refusal(error_responses.SHUTTING_DOWN, "The endpoint picker is shutting down.")
        self._tenant = shared.router.authenticate(head)
        shared.tenants.confine(head.fields, shared.driver.now())
        self._subset = envoy_fields.subset(message)
        if message.request_headers.end_of_stream:
            self._request_mode = messages.NONE
            self._serve(None)
            return
        if self._request_mode not in (messages.BUFFERED, messages.FULL_DUPLEX) and not (
            self._request_mode == messages.STREAMED
            and message.protocol_config.send_body_without_waiting_for_header_response
        ):
            raise GateError(
                500,
                "request_body_mode: expected FULL_DUPLEX_STREAMED, BUFFERED, or STREAMED beside"
                " send_body_without_waiting_for_header_response, in Envoy's configuration.",
            )
        self._chunks = 0
        if self._request_mode == messages.BUFFERED:
            self._reply(messages.REQUEST_HEADERS_GO_ON)

    def _request_body(self, part: Any) -> None:
        piece: bytes = part.body
        shared = self._shared
        self.body_bytes += len(piece)
        shared.held_bytes += len(piece)
        self._chunks += 1
        table = shared.driver.table
        limit = table.max_body_bytes
        if self._request_mode == messages.STREAMED:
            limit = min(limit, shared.table.buffer_bytes)
        if self.body_bytes > limit:
            raise GateError(413, f"The request body is larger than {limit} bytes.")
        if shared.held_bytes > table.max_held_bytes:
            raise Refusal(TOO_MANY_BYTES, "Too many bytes of bodies are being read.")
        if piece:
            self._body.append(piece)
        if part.end_of_stream or self._request_mode == messages.BUFFERED:
            self._serve(None)

    def _request_trailers(self) -> None:
        """Take in trailers, which end the body; Envoy waits for an answer to them."""
        if self.state in (StreamState.READING, StreamState.WAITING):
            self._trailers = messages.REQUEST_TRAILERS_GO_ON
            if self.state is StreamState.READING:
                self._guarded(self._serve, None)
        elif not self.over:
            self._reply(messages.REQUEST_TRAILERS_GO_ON)

    def sweep(self, passed_s: float) -> None:
        """Refuse a stopped body, and extend Envoy's timeout for a moving one. `passed_s`: since the last."""
        if self.state is not StreamState.READING or self._request_mode == messages.BUFFERED:
            return
        self._taken_s += passed_s
        moved = self._chunks != self._swept_chunks
        self._swept_chunks = self._chunks
        self._stopped_s = 0.0 if moved else self._stopped_s + passed_s
        table = self._shared.driver.table
        if self._stopped_s > _BODY_STOP_S or self._taken_s > table.body_timeout_s:
            self.refuse(GateError(408, "The request body took too long."))
        elif moved and self._request_mode == messages.STREAMED:
            self._reply(messages.go_on_for(table.body_timeout_s))

    def _serve(self, _: object) -> None:
        """Serve a whole request. Raises `GateError`."""
        shared, head = self._shared, self._head
        assert head is not None, "expected headers before a body"
        self._original = body = b"".join(self._body)
        self._enter(rows.WHOLE)
        taken = shared.router.handle(self, head, body, self._tenant)
        if isinstance(taken, bytes):
            self._answer(taken)
            return
        driver, request = shared.driver, taken.record.request
        sheddable, band, subset = False, 0, request.places.subset
        objective = head.fields.get(OBJECTIVE)
        if objective is not None:
            more = shared.objectives.get(objective.decode("latin-1"), 0)
            band = -more  # the lower value goes first
            sheddable = more < 0
        if self._subset is not None:
            subset = tuple(shared.names[each] for each in self._subset if each in shared.names)
        # A gateway sends a request to one instance.
        request = taken.record.request = replace(
            request, splittable=False, band=band, places=replace(request.places, subset=subset)
        )
        self._exchange = taken
        driver.streams[request.id] = self
        ready = None if subset is None else driver.scheduler.fleet.ready.get(request.model)
        if ready is not None and not any(
            each.routable and each.name in (subset or ()) for each in ready.instances
        ):
            driver.exchanges[request.id] = taken
            taken.refuse(
                error_responses.REJECTIONS[RejectReason.NO_INSTANCE],
                "No instance of the subset that the gateway names can take the request.",
            )
            return
        driver.submit(taken)
        if taken.phase is Phase.QUEUED:
            if sheddable:
                driver.shed(taken)
            else:
                self._reply(messages.go_on_for(driver.scheduler.queue.limits.timeout_s or 3600.0))

    # --- calls from the exchange; this is its engine side ---

    def send(self, carried: Carried, *, fresh: bool = False) -> None:
        """Tell Envoy of the chosen instance, with the next ones in order."""
        taken, shared = self._exchange, self._shared
        assert taken is not None, "expected a request that was submitted"
        assert taken.record.lease is not None, "expected a lease"
        name = taken.record.lease.instance
        taken.enter(WRITTEN, taken.since)
        wanted = [name, *shared.driver.fallbacks(shared.table.fallbacks)]
        self._told = [shared.addresses[each] for each in wanted if each in shared.addresses]
        endpoint = ",".join(self._told)
        if name not in shared.addresses:
            carried.engine_failed(ends.LOCAL, "its address is not known")
            return
        self._enter(rows.TOLD)
        response = messages.ProcessingResponse()
        buffered = self._request_mode == messages.BUFFERED
        common = response.request_body.response if buffered else response.request_headers.response
        mutation = common.header_mutation
        headers = [(envoy_fields.ENDPOINT, endpoint.encode("ascii")), ("x-request-id", taken.outgoing.label)]
        access = shared.access.get(name)
        authorization = None if access is None else access.authorization
        if authorization is not None or (shared.router.keys is not None and not _passes(access)):
            mutation.remove_headers.extend(_KEYS)
        if authorization is not None:
            headers.append(("authorization", authorization))
        body = self._original
        if self._response_mode != messages.NONE and taken.outgoing.body is not None:
            body = taken.outgoing.body
        if buffered and body != self._original:
            common.body_mutation.body = body
            headers.append(("content-length", b"%d" % len(body)))
        messages.set_headers(mutation, headers)
        metadata = response.dynamic_metadata.fields[envoy_fields.LB_SPACE].struct_value
        metadata.fields[envoy_fields.ENDPOINT].string_value = endpoint
        self._reply(response.SerializeToString())
        if self._request_mode == messages.FULL_DUPLEX:
            self._send_body(body)
        elif self._request_mode == messages.STREAMED:
            self._release_body(body)
        if self._trailers:
            self._reply(self._trailers)
        self._original = b""

    def _send_body(self, body: bytes) -> None:
        """Give a request's body back to Envoy in full duplex mode."""
        last = not self._trailers
        for at in range(0, max(1, len(body)), _MAX_PIECE_BYTES):
            piece = body[at : at + _MAX_PIECE_BYTES]
            end = last and at + _MAX_PIECE_BYTES >= len(body)
            self._reply(messages.streamed_body("request_body", piece, end=end))

    def _release_body(self, body: bytes) -> None:
        """Release the pieces that Envoy keeps; another body goes in the place of the last one."""
        if body == self._original:
            for _ in range(self._chunks):
                self._reply(messages.REQUEST_BODY_GO_ON)
            return
        for _ in range(self._chunks - 1):
            self._reply(messages.REQUEST_BODY_CLEAR)
        self._reply(messages.replaced_body("request_body", body))

    def cancel(self, carried: Carried) -> None:
        """Do nothing: the request ends before Envoy was told of an instance."""

    # --- the answer ---

    def _response_headers(self, message: Any) -> None:
        exchange = self._exchange
        if self.over:
            return
        if self.state not in rows.RESPONSE.before or exchange is None or exchange.phase is Phase.DONE:
            if self.state in rows.RESPONSE.before:
                self._enter(rows.RESPONSE)
            self._reply(messages.RESPONSE_HEADERS_GO_ON)
            return
        head = envoy_fields.response_head(message.response_headers.headers.headers)
        self._enter(rows.RESPONSE)
        record, attempt = exchange.record, exchange.attempt
        if record.lease is None:  # the gateway has answered what waits here for an instance
            exchange.client_gone()
            self._reply(messages.RESPONSE_HEADERS_GO_ON)
            return
        shared = self._shared
        if served := envoy_fields.served_by(message):
            name = shared.names.get(served)
            if served not in self._told:
                shared.strayed(record.lease.instance, served)
            if name is not None and name != record.lease.instance:
                shared.driver.served_elsewhere(exchange, name)
        details = envoy_fields.code_details(message)
        local = envoy_fields.local_reply(details, head)
        if local is not None:
            attempt.engine_failed(local, "the gateway reports " + details)
        else:
            attempt.engine_head(head, None)
        if self.state is StreamState.REFUSED:
            return
        lease = record.lease
        response = messages.ProcessingResponse()
        mutation = response.response_headers.response.header_mutation
        added = [("x-request-id", record.label.encode("ascii"))]
        if lease is not None:
            added.append(("x-hetlb-instance", lease.instance.encode("ascii")))
        messages.set_headers(mutation, added)
        self._reply(response.SerializeToString())
        if message.response_headers.end_of_stream:
            self._feed(b"", last=True)
        elif self._response_mode == messages.NONE:
            self._feed(b"", last=False)
            exchange.since = math.inf  # nothing more of it is seen here

    def _response_body(self, part: Any) -> None:
        if self.state not in rows.WHOLE_ANSWER.before:
            return
        piece: bytes = part.body
        last: bool = part.end_of_stream
        out = self._feed(piece, last=last)
        if self._response_mode == messages.FULL_DUPLEX:
            self._reply(messages.streamed_body("response_body", out, end=last))
        elif out == piece:
            self._reply(messages.RESPONSE_BODY_GO_ON)
        else:
            self._reply(messages.replaced_body("response_body", out))

    def _response_trailers(self) -> None:
        if self.state in rows.WHOLE_ANSWER.before:
            self._feed(b"", last=True)
            self._reply(messages.RESPONSE_TRAILERS_GO_ON)

    def _feed(self, piece: bytes, *, last: bool) -> bytes:
        """Give a part of the answer to the exchange; return the client's bytes of it."""
        exchange = self._exchange
        out = piece
        if exchange is not None and exchange.phase is not Phase.DONE:
            self._out = b""
            if piece or not last:
                exchange.attempt.engine_body(piece)
            if last and exchange.record.ended_at is None:
                exchange.attempt.engine_end(b"")
            out, self._out = self._out, None
        if last and self.state in rows.WHOLE_ANSWER.before:
            self._enter(rows.WHOLE_ANSWER)
        return out

    # --- calls from the exchange; this is its client side ---

    def write(self, data: bytes) -> None:
        """Take bytes for the client: an answer of our own, or the engine's body behind a head."""
        if self.state is not StreamState.ANSWERING:
            if data.startswith(b"HTTP/1.1 "):
                self._answer(data)
                return
            if self.state is not StreamState.HEAD_SEEN:
                return
            self._enter(rows.BODY)
            data = data.partition(b"\r\n\r\n")[2]
        if self._out is not None:
            self._out += data

    def hand_over(self, protocol: asyncio.Protocol) -> tuple[asyncio.Transport, bytes]:
        """Never called: a gateway's request is no handshake."""
        raise AssertionError("expected no WebSocket")

    def end(self, *, keep: bool) -> None:
        """End the stream: the exchange is done."""

    @property
    def address(self) -> str:
        """Address of the client: Envoy alone knows it, and says so in `x-forwarded-for`."""
        return "-"

    @property
    def cors(self) -> bytes:
        """No header lines: Envoy answers browsers."""
        return b""

    def break_off(self) -> None:
        """Break off the answer: Envoy resets it, unless what is being fed ends it."""
        if self._out is None:
            self._answer(error_responses.response(502, b""))

    def forsake(self, exchange: object) -> None:
        """End the stream if its exchange is still at work: it has failed without an answer."""
        if self._exchange is exchange and not self.over:
            self._answer(error_responses.response(500, b""))

    # --- out ---

    def _reply(self, data: bytes) -> None:
        if self.state is not StreamState.REFUSED:
            self._send(data)

    def _answer(self, response: bytes) -> None:
        """Answer through Envoy in place of an engine, with a response that was made for a connection."""
        head, _, body = response.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        fields = [line.partition(b": ") for line in lines]
        kept = [(name.decode("ascii"), value) for name, _, value in fields if name not in _FRAMING]
        if self.state in rows.OWN_ANSWER.before:
            self._reply(messages.immediate(int(first.split(b" ", 2)[1]), kept, body, "hetlb"))
            self._enter(rows.OWN_ANSWER)


#: States with an answer under way or over; states with nothing more to do.
_ANSWER: Final = (StreamState.HEAD_SEEN, StreamState.ANSWERING, StreamState.PASSED)
_OVER: Final = (StreamState.PASSED, StreamState.REFUSED, StreamState.CLOSED)


def _unsent(_: bytes) -> None:
    """Do nothing: a closed stream takes no more."""


def _passes(access: EngineAccess | None) -> bool:
    return access is not None and access.passthrough
