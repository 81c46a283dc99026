"""One HTTP request as Envoy's external processing shows it: messages in, answers out, no gRPC.

A stream is both sides of an `Exchange`: to it Envoy is the client and the engine. It reads the request like
the proxy does, holds its headers until an instance is chosen, and hands the answer's bytes to the exchange,
which counts tokens and ends the lease. Envoy's stream may end at any moment without a word: then the client
has left, or the answer was broken off, and the exchange ends.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from hetlb.config.fleet import PickTable
from hetlb.core.types import RejectReason
from hetlb.pick import messages
from hetlb.pick.driver import PickDriver
from hetlb.proxy import ends
from hetlb.proxy.access import EngineAccess, Tenant
from hetlb.proxy.exchange import Exchange
from hetlb.proxy.exchange_states import Phase
from hetlb.proxy.http import error_responses
from hetlb.proxy.http.error_responses import Refusal
from hetlb.proxy.http.http1 import GateError, RequestHead, ResponseHead
from hetlb.proxy.http.multipart import FormReader
from hetlb.proxy.router import Router
from hetlb.proxy.telemetry.events import Event, tell
from hetlb.proxy.upstream import Carried, Upstream

logger = logging.getLogger("hetlb.pick")

ENDPOINT: Final = "x-gateway-destination-endpoint"
SERVED: Final = "x-gateway-destination-endpoint-served"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
_SUBSET_SPACE: Final = "envoy.lb.subset_hint"
_LB_SPACE: Final = "envoy.lb"
OBJECTIVE: Final = b"x-gateway-inference-objective"
FAIRNESS: Final = "x-gateway-inference-fairness-id"
#: Larger pieces than this are not sent in full duplex mode (Envoy's recommendation).
_PIECE: Final = 64 << 10
#: A body of which nothing came in so many seconds has stopped.
_BODY_STOP_S: Final = 10
#: A gateway that does not reach an instance is named this often.
_STRAYED_S: Final = 60.0
#: Headers of an own answer that Envoy makes itself.
_FRAMING = frozenset({b"content-length", b"connection"})
#: Keys of clients: not for engines where they are checked here, or where the engine has its own.
_KEYS = ("authorization", "x-api-key", "api-key")
#: Envoy's `response.code_details` of answers that are its own, by how they begin.
_LOCAL_REPLIES: Final = (
    ("upstream_reset_before_response_started{remote_connection_failure", ends.NOT_ACCEPTED),
    ("upstream_reset_before_response_started{connection_timeout", ends.NOT_ACCEPTED),
    ("upstream_reset_before_response_started{overflow", ends.LOCAL),
    ("upstream_reset_before_response_started", ends.DROPPED),
    ("upstream_response_timeout", ends.SILENT),
    ("upstream_per_try_timeout", ends.SILENT),
    ("response_timeout", ends.SILENT),
    ("no_healthy_upstream", ends.NOT_ACCEPTED),
)


class PickerState:
    """Facts that all streams of a picker share. `addresses` are `ip:port` by instance."""

    def __init__(
        self,
        driver: PickDriver,
        router: Router,
        table: PickTable,
        access: Mapping[str, EngineAccess],
    ) -> None:
        self.driver = driver
        self.router = router
        self.table = table
        self.access = access
        self.addresses: dict[str, str] = {}
        self.names: dict[str, str] = {}
        #: Priorities by the names of objectives: those of the cluster, and above them those of the file.
        self.objectives: dict[str, int] = dict(table.objectives)
        self.stopping = False
        #: Streams that are open, and bytes of one message at most.
        self.streams: set[HttpStream] = set()
        self.largest = 0
        #: Bytes of requests that have not come whole yet.
        self.held_bytes = 0
        #: Time of the last line about a gateway that does not reach an instance.
        self._strayed_at: dict[str, float] = {}

    def set_addresses(self, addresses: Mapping[str, str]) -> None:
        """Instances are reached at these addresses from now on."""
        self._strayed_at.clear()
        self.addresses = dict(addresses)
        self.names = {address: name for name, address in addresses.items()}

    def strayed(self, instance: str, served: str) -> None:
        """A request for `instance` reached an address that the gateway was not told."""
        now = self.driver.now()
        if now - self._strayed_at.get(instance, -math.inf) < _STRAYED_S:
            return
        self._strayed_at[instance] = now
        address = self.addresses.get(instance, "-")
        message = "requests for %s reach %s: the gateway has no healthy endpoint %s"
        tell(logger, Event.GATEWAY_ELSEWHERE, message, instance, served, address, instance=instance)

    def set_objectives(self, priorities: Mapping[str, int]) -> None:
        """The cluster's objectives from now on; the file's go before them."""
        self.objectives = {**priorities, **self.table.objectives}


class HttpStream(Upstream):
    """A request on its way through Envoy. `send` takes the bytes of one answer to Envoy."""

    __slots__ = (
        "_body",
        "_chunks",
        "_committed",
        "_exchange",
        "_extended",
        "_feeding",
        "_form",
        "_head",
        "_original",
        "_out",
        "_request_mode",
        "_response_mode",
        "_response_seen",
        "_send",
        "_state",
        "_stopped_s",
        "_subset",
        "_swept_chunks",
        "_taken_s",
        "_tenant",
        "_told",
        "_trailers",
        "body_bytes",
        "complete",
        "ended",
        "reading",
    )  # fmt: skip

    def __init__(self, state: PickerState, send: Callable[[bytes], None]) -> None:
        self._state = state
        self._send = send
        self._request_mode = self._response_mode = messages.FULL_DUPLEX
        self._head: RequestHead | None = None
        self._tenant: Tenant | None = None
        self._form: FormReader | None = None
        self._subset: tuple[str, ...] | None = None
        self._body: list[bytes] = []
        #: Bytes of the body so far; True until the request is whole.
        self.body_bytes = 0
        self.reading = True
        #: Messages that the body came in, and what `sweep` knows of them.
        self._chunks = self._swept_chunks = -1
        self._taken_s = self._stopped_s = 0.0
        self._original = b""
        #: Addresses that Envoy was told, in order.
        self._told: list[str] = []
        self._trailers = False
        self._exchange: Exchange | None = None
        self._extended = self._response_seen = self._committed = self._feeding = False
        self._out = b""
        #: True once Envoy was given an answer in place of an engine's: it sends nothing more.
        self.ended = False
        #: True once the engine's answer was seen to its end: no message follows.
        self.complete = False

    # --- from Envoy ---

    def receive(self, message: Any) -> None:
        """Take one message."""
        kind = message.WhichOneof("request")
        if kind == "response_body":
            self._response_body(message.response_body)
        elif kind == "request_body":
            self._guarded(self._request_body, message.request_body)
        elif kind == "request_headers":
            self._guarded(self._request_headers, message)
        elif kind == "response_headers":
            self._response_headers(message)
        elif kind == "request_trailers":
            self._trailers = True
            self._guarded(self._serve, None)
        elif kind == "response_trailers":
            self._feed(b"", last=True)
            self._reply(messages.RESPONSE_TRAILERS_GO_ON)
            self.complete = True

    def closed(self) -> None:
        """Envoy's stream has ended, with or without a word."""
        exchange = self._exchange
        self.ended = True
        # No cycle is left: what was allocated goes now, not in a pause of the garbage collector.
        self._exchange, self._send = None, _unsent
        if exchange is None or exchange.phase is Phase.DONE:
            return
        if self._response_mode == messages.NONE and self._response_seen:
            exchange.answered_unseen()
        else:
            exchange.client_gone()

    def _guarded(self, take: Callable[[Any], None], message: Any) -> None:
        """Take a part of the request; what may not pass is answered."""
        if self.ended:
            return
        try:
            take(message)
        except GateError as error:
            self.refuse(error)

    def refuse(self, error: GateError) -> None:
        """Answer a request that may not pass."""
        answer = error.answer if isinstance(error, Refusal) else error_responses.bad_request(error.status)
        headers = error_responses.refusal_headers(answer, 1.0 if answer.should_retry else None)
        if isinstance(error, Refusal):
            headers += error_responses.header_pairs(error.lines)
        state = self._state
        if self._head is None:
            state.driver.refused(answer.outcome)
        else:
            now = state.driver.now()
            label = state.router.refused(self._head, self._tenant, answer, error.status, now)
            headers += ((b"x-request-id", label.encode("ascii")),)
        self._answer(error.status, headers, error_responses.error_body(answer, error.message))

    # --- the request ---

    def _request_headers(self, message: Any) -> None:
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        head = self._head = _request_head(message.request_headers.headers.headers)
        router = self._state.router
        if self._state.stopping:
            raise Refusal(error_responses.SHUTTING_DOWN, "The endpoint picker is shutting down.")
        self._tenant = router.authenticate(head)
        self._subset = _subset(message)
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
        self._form = router.form(head)
        self._chunks = 0
        if self._request_mode == messages.BUFFERED:
            self._reply(messages.REQUEST_HEADERS_GO_ON)

    def _request_body(self, part: Any) -> None:
        piece: bytes = part.body
        self.body_bytes += len(piece)
        self._chunks += 1
        table = self._state.driver.table
        limit = table.max_body_bytes if self._form is None else table.max_multipart_bytes
        if self._request_mode == messages.STREAMED:
            limit = min(limit, self._state.table.buffer_bytes)
        if self.body_bytes > limit:
            raise GateError(413, f"The request body is larger than {limit} bytes.")
        if piece:
            self._body.append(piece)
            if self._form is not None:
                self._form.feed(piece)
        if part.end_of_stream or self._request_mode == messages.BUFFERED:
            self._serve(None)

    def sweep(self, passed_s: float) -> None:
        """Answer a body that has stopped, and keep Envoy waiting for one that has not; each `passed_s`."""
        if not self.reading or self.ended or self._chunks < 0 or self._request_mode == messages.BUFFERED:
            return
        self._taken_s += passed_s
        moved = self._chunks != self._swept_chunks
        self._swept_chunks = self._chunks
        self._stopped_s = 0.0 if moved else self._stopped_s + passed_s
        table = self._state.driver.table
        if self._stopped_s > _BODY_STOP_S or self._taken_s > table.body_timeout_s:
            self.refuse(GateError(408, "The request body took too long."))
        elif moved and self._request_mode == messages.STREAMED:
            self._reply(messages.go_on_for(table.body_timeout_s))

    def _serve(self, _: object) -> None:
        """The request is whole. Raises `GateError`."""
        state, head = self._state, self._head
        assert head is not None, "expected headers before a body"
        self.reading = False
        pieces, self._body = self._body or [b""], []
        if self._form is None and len(pieces) > 1:
            pieces = [b"".join(pieces)]
        self._original = b"".join(pieces) if len(pieces) > 1 else pieces[0]
        taken = state.router.handle(self, head, pieces, self._tenant, self._form)
        self._form = None
        if isinstance(taken, bytes):
            self._answer_bytes(taken)
            return
        driver, request = state.driver, taken.request
        request.splittable = False  # a gateway sends a request to one instance
        sheddable = False
        objective = head.fields.get(OBJECTIVE)
        if objective is not None:
            priority = state.objectives.get(objective.decode("latin-1"), 0)
            request.priority -= priority  # in vLLM's priorities the lower value goes first
            sheddable = priority < 0
        if self._subset is not None:
            request.subset = tuple(state.names[each] for each in self._subset if each in state.names)
        self._exchange = taken
        driver.streams[request.id] = self
        if request.subset is not None and not driver.scheduler.fleet.any_routable(request):
            driver.exchanges[request.id] = taken
            taken.refused(
                error_responses.REJECTIONS[RejectReason.NO_INSTANCE],
                "No instance of the subset that the gateway names can take the request.",
            )
            return
        driver.submit(taken)
        if taken.phase is Phase.QUEUED:
            if sheddable:
                driver.shed(taken)
            elif not self._extended:
                self._extended = True
                self._reply(messages.go_on_for(driver.scheduler.queue.limits.timeout_s or 3600.0))

    # --- from the exchange, to which this is the engine's side ---

    def send(self, exchange: Carried, *, fresh: bool = False) -> None:
        """An instance was chosen: tell Envoy, with the next ones in order."""
        taken, state = self._exchange, self._state
        assert taken is not None, "expected a request that was submitted"
        assert taken.lease is not None, "expected a lease"
        name = taken.lease.instance
        taken.sent_by_gateway()
        wanted = [name, *state.driver.fallbacks(state.table.fallbacks)]
        self._told = [state.addresses[each] for each in wanted if each in state.addresses]
        endpoint = ",".join(self._told)
        if name not in state.addresses:
            taken.engine_failed(ends.LOCAL, "its address is not known")
            return
        response = messages.ProcessingResponse()
        buffered = self._request_mode == messages.BUFFERED
        common = response.request_body.response if buffered else response.request_headers.response
        mutation = common.header_mutation
        headers = [(ENDPOINT, endpoint.encode("ascii")), ("x-request-id", taken.label_for_engine)]
        access = state.access.get(name)
        authorization = None if access is None else access.authorization
        if authorization is not None or (state.router.tenants is not None and not _passes(access)):
            mutation.remove_headers.extend(_KEYS)
        if authorization is not None:
            headers.append(("authorization", authorization))
        body = self._original
        if self._response_mode != messages.NONE and taken.body_for_engine is not None:
            body = taken.body_for_engine
        if buffered and body != self._original:
            common.body_mutation.body = body
            headers.append(("content-length", b"%d" % len(body)))
        messages.set_headers(mutation, headers)
        metadata = response.dynamic_metadata.fields[_LB_SPACE].struct_value
        metadata.fields[ENDPOINT].string_value = endpoint
        self._reply(response.SerializeToString())
        if self._request_mode == messages.FULL_DUPLEX:
            self._send_body(body)
        elif self._request_mode == messages.STREAMED:
            self._release_body(body)
        if self._trailers:
            self._reply(messages.REQUEST_TRAILERS_GO_ON)
        self._original = b""

    def _send_body(self, body: bytes) -> None:
        """Give a request's body back to Envoy in full duplex mode."""
        last = not self._trailers
        for at in range(0, max(1, len(body)), _PIECE):
            piece = body[at : at + _PIECE]
            end = last and at + _PIECE >= len(body)
            self._reply(messages.streamed_body("request_body", piece, end=end))

    def _release_body(self, body: bytes) -> None:
        """Let go of the pieces that Envoy keeps; another body goes in the place of the last one."""
        if body == self._original:
            for _ in range(self._chunks):
                self._reply(messages.REQUEST_BODY_GO_ON)
            return
        for _ in range(self._chunks - 1):
            self._reply(messages.REQUEST_BODY_CLEAR)
        self._reply(messages.replaced_body("request_body", body))

    def cancel(self, exchange: Carried) -> None:
        """The exchange ends before Envoy was told of an instance: nothing to stop."""

    # --- the answer ---

    def _response_headers(self, message: Any) -> None:
        exchange = self._exchange
        self._response_seen = True
        if self.ended or exchange is None or exchange.phase is Phase.DONE or exchange.lease is None:
            self._reply(messages.RESPONSE_HEADERS_GO_ON)
            return
        head = _response_head(message.response_headers.headers.headers)
        state = self._state
        if served := _field(message.metadata_context.filter_metadata, _LB_SPACE, SERVED):
            name = state.names.get(served)
            if served not in self._told:
                state.strayed(exchange.lease.instance, served)
            if name is not None and name != exchange.lease.instance:
                state.driver.served_elsewhere(exchange, name)
        local = _local_reply(message, head)
        if local is not None:
            exchange.engine_failed(local, "the gateway reports " + _details(message))
        else:
            exchange.engine_head(head, None)
        if self._answered:
            return
        lease = exchange.lease
        response = messages.ProcessingResponse()
        mutation = response.response_headers.response.header_mutation
        added = [("x-request-id", exchange.label.encode("ascii"))]
        if lease is not None:
            added.append(("x-hetlb-instance", lease.instance.encode("ascii")))
        messages.set_headers(mutation, added)
        self._reply(response.SerializeToString())
        if message.response_headers.end_of_stream:
            self._feed(b"", last=True)
            self.complete = True
        elif self._response_mode == messages.NONE:
            self._feed(b"", last=False)
            exchange.since = math.inf  # nothing more of it is seen here

    def _response_body(self, part: Any) -> None:
        piece: bytes = part.body
        last: bool = part.end_of_stream
        out = self._feed(piece, last=last)
        if self._response_mode == messages.FULL_DUPLEX:
            self._reply(messages.streamed_body("response_body", out, end=last))
        elif out == piece:
            self._reply(messages.RESPONSE_BODY_GO_ON)
        else:
            self._reply(messages.replaced_body("response_body", out))
        if last:
            self.complete = True

    def _feed(self, piece: bytes, *, last: bool) -> bytes:
        """Give a part of the answer to the exchange; returns what the client gets of it."""
        exchange = self._exchange
        if exchange is None or exchange.phase is Phase.DONE or self.ended:
            return piece
        self._feeding = True
        self._out = b""
        if piece or not last:
            exchange.engine_body(piece)
        if last and not exchange.done:
            exchange.engine_end(b"")
        self._feeding = False
        out, self._out = self._out, b""
        return out

    # --- from the exchange, to which this is the client's side ---

    @property
    def http11(self) -> bool:
        """False: nothing is to be framed here."""
        return False

    def write(self, data: bytes) -> None:
        """Take what goes to the client: an answer of our own, or the engine's body behind a head."""
        if not self._committed:
            if data.startswith(b"HTTP/1.1 "):
                self._answer_bytes(data)
                return
            self._committed = True
            data = data.partition(b"\r\n\r\n")[2]
        self._out += data

    def upgraded(self, take: Callable[[bytes], None]) -> None:
        """Never called: a gateway's request is no handshake."""
        raise AssertionError("expected no WebSocket")

    def hold(self, held: bool) -> None:
        """Never called: a gateway's request is no handshake."""
        raise AssertionError("expected no WebSocket")

    def end(self, *, keep: bool) -> None:
        """The exchange is done."""

    def break_off(self) -> None:
        """The answer is broken off: Envoy resets it, unless what is being fed ends it."""
        if not self._feeding:
            self._answer(502, (), b"")

    # --- out ---

    @property
    def _answered(self) -> bool:
        """True once Envoy has an answer of our own (a property: calls in between may change it)."""
        return self.ended

    def _reply(self, data: bytes) -> None:
        if not self.ended:
            self._send(data)

    def _answer_bytes(self, response: bytes) -> None:
        """Answer with a response that was made for a connection."""
        head, _, body = response.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        fields = [tuple(line.split(b": ", 1)) for line in lines]
        self._answer(int(first.split(b" ", 2)[1]), fields, body)

    def _answer(self, status: int, headers: Any, body: bytes) -> None:
        """Have Envoy answer in place of an engine."""
        kept = [(name.decode("ascii"), value) for name, value in headers if name not in _FRAMING]
        if body and not any(name == "content-type" for name, _ in kept):
            kept.append(("content-type", b"application/json"))
        self._reply(messages.immediate(status, kept, body, "hetlb"))
        self.ended = True


def _unsent(_: bytes) -> None:
    """Nothing can be said on a stream that is closed."""


def _passes(access: EngineAccess | None) -> bool:
    return access is not None and access.passthrough


def _request_head(headers: Any) -> RequestHead:
    """A request's head as the router reads it."""
    head = RequestHead()
    head.http11 = False
    fields, lines = head.fields, head.headers
    for header in headers:
        key: str = header.key
        value: bytes = header.raw_value or header.value.encode("latin-1", "replace")
        if key == ":method":
            head.method = value
        elif key == ":path":
            path, _, head.query = value.partition(b"?")
            try:
                head.path = path.decode("ascii")
            except UnicodeDecodeError as error:
                raise GateError(400, "The path is not ASCII.") from error
        elif key == ":authority":
            fields.setdefault(b"host", value)
        elif not key.startswith(":"):
            name = key.encode("latin-1", "replace")
            lines.append((name, value))
            fields.setdefault(name, value)
    head.content_type = fields.get(b"content-type", b"").lower()
    return head


def _response_head(headers: Any) -> ResponseHead:
    """An answer's head as the exchange reads it."""
    head = ResponseHead()
    for header in headers:
        key: str = header.key
        value: bytes = header.raw_value or header.value.encode("latin-1", "replace")
        if key == ":status":
            head.status = int(value)
        else:
            head.fields.setdefault(key.encode("latin-1", "replace"), value)
    head.forwarded = b""  # Envoy sends the headers on
    return head


def _field(spaces: Any, space: str, key: str) -> str:
    """A text of a metadata space, "" where there is none."""
    if space not in spaces:
        return ""
    fields = spaces[space].fields
    return str(fields[key].string_value) if key in fields else ""


def _subset(message: Any) -> tuple[str, ...] | None:
    """The addresses that the gateway restricts a request to, None for all."""
    spaces = message.metadata_context.filter_metadata
    if _SUBSET_SPACE not in spaces or SUBSET not in spaces[_SUBSET_SPACE].fields:
        return None
    value = spaces[_SUBSET_SPACE].fields[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        return tuple(str(each.string_value) for each in value.list_value.values)
    return tuple(part.strip() for part in str(value.string_value).split(",") if part.strip())


def _details(message: Any) -> str:
    """Envoy's `response.code_details` attribute, "" where it is not sent."""
    for struct in message.attributes.values():
        if "response.code_details" in struct.fields:
            return str(struct.fields["response.code_details"].string_value)
    return ""


def _local_reply(message: Any, head: ResponseHead) -> ends.End | None:
    """End of the lease of an answer that is Envoy's own, None for an engine's answer."""
    if head.status < 500:
        return None
    details = _details(message)
    if details:
        for beginning, end in _LOCAL_REPLIES:
            if details.startswith(beginning):
                return end
        return None
    # Without the attribute: servers date their answers, and Envoy says how long one took that it asked.
    if head.fields.keys() & {b"date", b"server", b"x-envoy-upstream-service-time"}:
        return None
    return ends.DROPPED if head.fields.get(b"content-type") == b"text/plain" else None
