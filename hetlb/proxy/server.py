"""The listener: client connections, what is answered here, and what goes to an engine.

Promise: requests of one connection are answered in order, one at a time; a client that leaves is noticed
in every phase; nothing is routed before its head passed the gate, and nothing dispatched before its whole
body passed the reader. Where keys are needed, nothing but `/health` and `/ping` is answered without one.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import resource
import secrets
import socket
import ssl
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec

import hetlb
from hetlb.config import ProxyTable
from hetlb.core.types import Request
from hetlb.proxy import replies
from hetlb.proxy.access import Tenant
from hetlb.proxy.beginnings import beginnings_of
from hetlb.proxy.body import Call, Kind, inject_usage, read_json, read_multipart
from hetlb.proxy.driver import Driver
from hetlb.proxy.exchange import Exchange
from hetlb.proxy.http1 import (
    ChunkedDecoder,
    GateError,
    KnownHeads,
    RequestHead,
    head_end,
    parse_request_head,
)
from hetlb.proxy.tracing import Tracing

#: Bytes of a next request that may wait behind the one being answered.
_MAX_PIPELINED = 64 << 10
_SWEEP_S = 0.5
#: A body that has just begun may be as slow as it likes.
_BODY_GRACE_S = 5.0
#: How long a refused client may still send before its connection is dropped.
_LINGER_S = 2.0
_TENANT = re.compile(rb"[!-~]{1,64}")
_LABEL = re.compile(rb"[!-~]{1,128}")
#: What the kernel may hold of an answer for a client that does not read.
_SEND_BUFFER = 64 << 10

#: What goes to an engine, as vLLM 0.32 serves it. Which of them exist depends on the model.
ENDPOINTS: dict[str, Kind] = {
    "/v1/completions": Kind.COMPLETION,
    "/v1/completions/render": Kind.NO_OUTPUT,
    "/v1/chat/completions": Kind.CHAT,
    "/v1/chat/completions/batch": Kind.CHAT,
    "/v1/chat/completions/render": Kind.NO_OUTPUT,
    "/v1/responses": Kind.RESPONSES,
    "/v1/messages": Kind.MESSAGES,
    "/v1/messages/count_tokens": Kind.NO_OUTPUT,
    "/v1/embeddings": Kind.NO_OUTPUT,
    "/v1/score": Kind.NO_OUTPUT,
    "/score": Kind.NO_OUTPUT,
    "/v1/rerank": Kind.NO_OUTPUT,
    "/v2/rerank": Kind.NO_OUTPUT,
    "/rerank": Kind.NO_OUTPUT,
    "/pooling": Kind.NO_OUTPUT,
    "/classify": Kind.NO_OUTPUT,
    "/tokenize": Kind.PLAIN,
    "/detokenize": Kind.PLAIN,
    "/v1/audio/transcriptions": Kind.AUDIO,
    "/v1/audio/translations": Kind.AUDIO,
    "/v1/audio/speech": Kind.AUDIO,
    "/inference/v1/generate": Kind.COMPLETION,
    "/invocations": Kind.CHAT,
}
#: Balancers ask here, and have no key.
_OPEN_PATHS = frozenset({"/health", "/ping"})
_RESPONSE_PATH = re.compile(r"/v1/responses/([A-Za-z0-9_.-]{1,128})(/cancel)?")


class _Refusal(GateError):
    """A request that is not let in through no fault of its own: it may come again."""

    def __init__(self, answer: replies.Answer, message: str) -> None:
        super().__init__(answer.status, message)
        self.answer = answer


class FleetView(Protocol):
    """What the listener answers by itself."""

    def models(self) -> list[dict[str, Any]]: ...
    def routable(self) -> bool: ...


class ProxyServer:
    """The main listener."""

    def __init__(self, driver: Driver, view: FleetView) -> None:
        self.driver = driver
        self.view = view
        self.configure(driver.table)
        #: Oldest first (the values say nothing).
        self.connections: dict[ClientConnection, None] = {}
        self.stopping = False
        self.heads = KnownHeads(parse_request_head)
        #: Makes the ids of every request's spans, None without tracing.
        self.tracing: Tracing | None = None
        #: Bytes of bodies that have not come whole yet, over all connections.
        self.held_bytes = 0
        #: Who may send requests, by the SHA-256 of their keys; None lets everybody in.
        self.tenants: Mapping[bytes, Tenant] | None = None
        #: The certificate shown to clients that connect from now on; set before `start`, or None for no TLS.
        self.tls: ssl.SSLContext | None = None
        #: Engines take our request ids for their own, and another proxy may count from 1 too.
        self.label_prefix = f"hetlb-{secrets.token_hex(4)}"
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.TimerHandle | None = None

    def configure(self, table: ProxyTable) -> None:
        """Limits and names that hold from now on."""
        self.table = table
        self.session_header = table.session_header.lower().encode()
        self.tenant_header = None if table.tenant_header is None else table.tenant_header.lower().encode()

    async def start(self, host: str, port: int, sockets: Sequence[socket.socket] = ()) -> tuple[str, int]:
        """Accept connections; returns the address in use. Raises `OSError` if it cannot be bound.

        With `sockets`, which are bound already, on those.
        """
        loop = self.driver.loop
        tls: dict[str, Any] = {}
        if self.tls is not None:
            self.tls.sni_callback = self._choose_certificate
            tls = {
                "ssl": self.tls,
                "ssl_handshake_timeout": self.table.head_timeout_s,
                "ssl_shutdown_timeout": _LINGER_S,
            }
        addressed: dict[str, Any] = {"host": host, "port": port, "reuse_address": True}
        wheres: list[dict[str, Any]] = [{"sock": each} for each in sockets] or [addressed]
        for where in wheres:
            self._servers.append(
                await loop.create_server(lambda: ClientConnection(self), backlog=2048, **where, **tls)
            )
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep)
        name = self._servers[0].sockets[0].getsockname()
        return name[0], name[1]

    def stop_accepting(self) -> None:
        """Close the listener; open connections end with the answer they are at."""
        self.stopping = True
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.close_if_idle()

    async def close(self) -> None:
        """Drop whatever connection is left."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self.connections):
            connection.abort()
        for server in self._servers:
            server.close()
            await server.wait_closed()

    def kind(self, path: str) -> Kind | None:
        """What is at a path, None for nothing."""
        kind = ENDPOINTS.get(path)
        if kind is None and path in self.table.extra_paths:
            kind = Kind.PLAIN
        return kind

    def knows(self, path: str) -> bool:
        """Whether something that takes a body is at a path."""
        return self.kind(path) is not None or _RESPONSE_PATH.fullmatch(path) is not None

    def admit(self, connection: ClientConnection) -> bool:
        """Whether there is room for a new connection; where not, the oldest without a request makes it."""
        connections = self.connections
        limit = self.table.max_connections or _half_of_the_descriptors()
        full = len(connections) >= limit
        idle = next((each for each in connections if each.idle), None) if full else None
        connections[connection] = None
        if idle is not None:
            idle.abort()
        elif len(connections) > limit + max(8, limit // 8):
            connection.abort()  # so many are being told that there is no room that nobody more can be
        return not full or idle is not None

    def _choose_certificate(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        # Called for every handshake, so that a reload needs no other listener.
        assert self.tls is not None, "expected a listener with TLS"
        connection.context = self.tls

    def _sweep(self) -> None:
        self._sweeper = self.driver.loop.call_later(_SWEEP_S, self._sweep)
        now = self.driver.now()
        for connection in list(self.connections):
            connection.sweep(now)


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        "_body", "_body_left", "_buffer", "_closing", "_decoder", "_exchange", "_head", "_held", "_now",
        "_paused", "_reading_paused", "_server", "_since", "_stalled_since", "_tenant", "_transport",
    )  # fmt: skip

    def __init__(self, server: ProxyServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._head: RequestHead | None = None
        self._tenant: Tenant | None = None
        self._body: list[bytes] = []
        self._body_left = self._held = 0
        self._decoder: ChunkedDecoder | None = None
        self._exchange: Exchange | None = None
        self._now = server.driver.now
        self._closing = False
        self._paused = False
        self._reading_paused = False
        self._since = 0.0
        self._stalled_since = 0.0

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop has its own class
        self._transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        transport.set_write_buffer_limits(high=64 << 10)
        self._since = self._now()
        if not self._server.admit(self):
            self._refuse(_Refusal(replies.TOO_MANY_CONNECTIONS, "Too many connections are open."))

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._exchange is not None or self._paused:
            self._buffer += data
            self._bound_reading()
            return
        if self._buffer:
            self._buffer += data
        else:
            self._buffer = data
            if self._head is None:
                self._since = self._now()  # the head's time begins with its first byte
        self._advance()

    def eof_received(self) -> bool:
        if self._closing:
            return False  # what was written still goes out
        # A client that closes its sending side is gone (as HAProxy's abortonclose has it): whoever waits
        # for an answer keeps the connection open.
        self.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._closing = True
        self._server.connections.pop(self, None)
        self._release()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_gone()

    def pause_writing(self) -> None:
        self._paused = True
        self._stalled_since = self._now()
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self._paused = False
        if self._exchange is not None:
            self._exchange.resume()
            return
        self._bound_reading()
        if self._buffer:
            self._server.driver.loop.call_soon(self._advance)

    # --- the exchange's side ---

    @property
    def http11(self) -> bool:
        """Whether the client understands chunked answers."""
        return self._head is not None and self._head.http11

    @property
    def write(self) -> Callable[[bytes], None]:
        """Sends bytes of an answer."""
        return _nowhere if self._transport is None else self._transport.write

    def end(self, *, keep: bool) -> None:
        """The answer is out; `keep` says that the client can tell where it ended."""
        head, self._head, self._exchange = self._head, None, None
        if not keep or head is None or not head.keep_alive or self._server.stopping:
            self._close()
            return
        self._since = self._now()
        self._bound_reading()
        if self._buffer:
            # In a turn of its own: pipelined requests must not nest.
            self._server.driver.loop.call_soon(self._advance)

    def break_off(self) -> None:
        """End an answer that must not look complete: what was written goes out, then the connection ends."""
        self._exchange = None
        self._close()

    # --- from the server ---

    def _bound_reading(self) -> None:
        """Read on only while few requests wait behind the one being answered.

        A head is smaller than the bound and a body leaves the buffer as it comes, so more than that can
        only be requests whose turn has not come.
        """
        full = len(self._buffer) > _MAX_PIPELINED
        if full is self._reading_paused or self._closing or self._transport is None:
            return
        self._reading_paused = full
        if full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    @property
    def idle(self) -> bool:
        """Whether no request is read or answered here; the beginning of a head is none yet."""
        if self._exchange is not None or self._head is not None or self._closing:
            return False
        return self._transport is not None and not self._transport.get_write_buffer_size()

    def close_if_idle(self) -> None:
        """Close a connection that has no request."""
        if self._exchange is None and self._head is None and not self._buffer:
            self._close()

    def abort(self) -> None:
        """Drop the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def sweep(self, now: float) -> None:
        """End what has taken too long: heads, bodies, idle connections, clients that do not read."""
        table = self._server.table
        if self._paused and now - self._stalled_since > table.write_timeout_s:
            self.abort()
        elif self._exchange is not None:
            return
        elif self._closing:
            # A slow client may still be reading the end of its answer.
            unsent = self._transport is not None and self._transport.get_write_buffer_size() > 0
            if now - self._since > (table.write_timeout_s if unsent else _LINGER_S):
                self.abort()
        elif self._head is not None:
            took_s = now - self._since
            slow = took_s > _BODY_GRACE_S and self._held < took_s * table.min_body_bytes_per_s
            if slow or took_s > table.body_timeout_s:
                self._refuse(GateError(408, "The request body took too long."))
        elif self._buffer:
            if now - self._since > table.head_timeout_s:
                self._refuse(GateError(408, "The request head took too long."))
        elif now - self._since > table.keepalive_timeout_s:
            self._close()

    # --- reading requests ---

    def _advance(self) -> None:
        """Read on, up to one whole request."""
        # A client that does not read its answers gets no further ones: they would pile up here.
        if self._closing or self._paused or self._exchange is not None:
            return
        try:
            if (self._head is not None or self._read_head()) and self._read_body():
                self._serve()
        except GateError as error:
            self._refuse(error)
        self._bound_reading()

    def _read_head(self) -> bool:
        buffer, server = self._buffer, self._server
        while buffer.startswith(b"\r\n"):
            buffer = buffer[2:]  # RFC 9112, 2.2: an empty line before a request is skipped
        if buffer and not 65 <= buffer[0] <= 90 and buffer != b"\r":
            raise GateError(400, "This is not the beginning of an HTTP request.")  # TLS, say
        end = head_end(buffer)
        if not end:
            self._buffer = buffer
            return False
        self._buffer = buffer[end:]
        head, length = server.heads.find(buffer[:end])
        tenants = server.tenants
        self._tenant = None if tenants is None else _recognise(head, tenants)
        self._head = head
        self._since = self._now()
        self._body = []
        self._body_left = length or 0
        self._decoder = ChunkedDecoder() if head.chunked else None
        if length is not None and length > self._body_limit(head):
            raise GateError(413, f"The request body is larger than {self._body_limit(head)} bytes.")
        if head.expects is not None:
            self._expected(head)
        return True

    def _expected(self, head: RequestHead) -> None:
        """Somebody waits to be told to send the body."""
        if head.expects != b"100-continue":
            raise GateError(417, "The only expectation understood is 100-continue.")
        if not self._server.knows(head.path):
            raise GateError(404, "Not Found")  # before the body is asked for
        if head.http11 and (self._body_left or self._decoder) and not self._buffer:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _body_limit(self, head: RequestHead) -> int:
        table = self._server.table
        multipart = head.content_type.startswith(b"multipart/")
        return table.max_multipart_bytes if multipart else table.max_body_bytes

    def _read_body(self) -> bool:
        """Take the body out of the buffer; True when it is whole."""
        buffer, decoder = self._buffer, self._decoder
        if decoder is None:
            left = self._body_left
            if not left:
                return True
            if len(buffer) < left:
                self._take(buffer)
                self._body_left = left - len(buffer)
                self._buffer = b""
                return False
            self._body.append(buffer[:left])
            self._buffer = buffer[left:]
            self._body_left = 0
            return True
        if not buffer:
            return False
        self._buffer = b""
        payload = decoder.feed(buffer)
        if payload:
            self._take(payload)
            self._body_left += len(payload)
            assert self._head is not None
            if self._body_left > self._body_limit(self._head):
                raise GateError(413, "The request body is too large.")
        if not decoder.done:
            return False
        self._buffer = decoder.surplus
        return True

    def _take(self, piece: bytes) -> None:
        """Keep a piece of a body of which more is to come."""
        self._body.append(piece)
        self._held += len(piece)
        self._server.held_bytes += len(piece)
        if self._server.held_bytes > self._server.table.max_held_bytes:
            raise _Refusal(replies.TOO_MANY_BYTES, "Too many bytes of bodies are being read.")

    def _release(self) -> None:
        """What was kept of a body is whole, or of no use any more."""
        self._server.held_bytes -= self._held
        self._held = 0
        self._body = []

    # --- answering ---

    def _serve(self) -> None:
        head = self._head
        assert head is not None
        pieces, server = self._body, self._server
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._release()
        if server.stopping:
            raise _Refusal(replies.SHUTTING_DOWN, "The proxy is shutting down.")
        kind = server.kind(head.path)
        if kind is None:
            kept = _RESPONSE_PATH.fullmatch(head.path)
            if kept is None:
                self._serve_own(head)
                return
            self._serve_pinned(head, kept[1], bool(kept[2]), body)
            return
        if head.method != b"POST" and kind is not Kind.PLAIN:
            self._method_not_allowed(b"POST")
            return
        if head.content_type.startswith(b"multipart/"):
            call = read_multipart(head.fields[b"content-type"], body)
        elif kind is Kind.AUDIO and head.content_type.startswith(b"application/x-www-form-urlencoded"):
            raise GateError(415, "This form is expected as multipart/form-data.")
        elif kind is Kind.PLAIN and not body:
            call = Call()
        else:
            call = read_json(kind, body)
        pinned: str | None = None
        if call.continues is not None:
            pinned = self._place_of(call.continues, strict=False)
            if pinned is not None and call.model not in (None, *self._served(pinned)):
                pinned = None  # of another model: nobody has it there, and the engine says so
        self._submit(head, kind, call, body, pinned)

    def _serve_pinned(self, head: RequestHead, response_id: str, cancel: bool, body: bytes) -> None:
        allowed = (b"POST",) if cancel else (b"GET", b"DELETE")
        if head.method not in allowed:
            self._method_not_allowed(b", ".join(allowed))
            return
        self._submit(head, Kind.PINNED, Call(), body, self._place_of(response_id, strict=True))

    def _place_of(self, response_id: str, *, strict: bool) -> str | None:
        """The instance that keeps an answer, for whom it was made for. Raises `GateError` (404).

        Unless `strict`, None where it is not known and anybody may have made it: the engine decides.
        """
        driver = self._server.driver
        owner = None if self._tenant is None else self._tenant.name
        known = driver.kept_at(response_id, owner)
        if known is None and owner is None and not strict:
            return None
        if known is None or known[1] != owner or all(i.name != known[0] for i in driver.scheduler.instances):
            raise GateError(404, f"Response with id '{response_id[:128]}' not found.")
        return known[0]

    def _submit(self, head: RequestHead, kind: Kind, call: Call, body: bytes, pinned: str | None) -> None:
        driver = self._server.driver
        model = call.model or self._only_model(pinned)
        tenant = self._tenant
        if tenant is not None and kind is not Kind.PINNED and not tenant.may_use(model):
            raise GateError(403, f"This API key is not for the model `{model}`.")
        body = inject_usage(kind, call, body)
        prompts, exact = call.prompts, call.prompt_tokens is not None
        if not kind.prompted:
            total, prompts = 1, 1
        elif call.prompt_tokens is not None:
            total = call.prompt_tokens
        else:
            total = driver.sizes.tokens(model, call.text, call.text_bytes)
        each = total if prompts == 1 else max(1, -(-total // prompts))
        request_id = driver.next_id()
        label = head.fields.get(b"x-request-id")
        if label is None or _LABEL.fullmatch(label) is None:
            text = f"{self._server.label_prefix}-{request_id:x}"
        else:
            text = label.decode("ascii")
        now = driver.now()
        beginnings: tuple[tuple[str, int | None], ...] = ()
        if kind.generates and prompts == 1:
            session = head.fields.get(self._server.session_header)
            beginnings = beginnings_of(session, call.text, each)
        call.text = b""  # the size of the prompt is known: nobody needs it twice in memory
        owner = None if tenant is None else tenant.name
        request = Request(
            id=request_id,
            model=model,
            prompt_tokens=each,
            max_tokens=call.max_tokens,
            sequences=prompts * call.n,
            longest_prompt_tokens=call.longest_tokens or each,
            generates=kind.generates,
            body_bytes=len(body),
            prompt_exact=exact,
            pinned=pinned,
            beginnings=beginnings,
            priority=call.priority,
            tenant=owner if self._server.tenant_header is None else self._claimed(head, owner),
        )
        exchange = Exchange(driver, self, head, kind, call, request, body, text, now, owner)
        if self._server.tracing is not None:
            exchange.trace = self._server.tracing.begin(head.fields.get(b"traceparent"))
        self._exchange = exchange
        driver.submit(exchange)

    def _claimed(self, head: RequestHead, owner: str | None) -> str | None:
        """Whose share a request is of, where a header says it (of a key's owner, if there are keys)."""
        assert self._server.tenant_header is not None
        name = head.fields.get(self._server.tenant_header)
        if name is None or _TENANT.fullmatch(name) is None:
            return owner
        claimed = name.decode("ascii")
        return claimed if owner is None else f"{owner}/{claimed}"

    def _served(self, name: str) -> tuple[str, ...]:
        """What an instance answers to."""
        for instance in self._server.driver.scheduler.instances:
            if instance.name == name:
                return instance.served or (instance.spec.model,)
        return ()

    def _only_model(self, pinned: str | None) -> str:
        driver = self._server.driver
        if pinned is not None and (served := self._served(pinned)):
            return served[0]
        models = driver.scheduler.models
        if len({instance.spec.model for instance in driver.scheduler.instances}) == 1 and models:
            return models[0]
        raise GateError(400, "model: expected the name of a model, since several are served here.")

    def _serve_own(self, head: RequestHead) -> None:
        view, path = self._server.view, head.path
        if path in ("/health", "/ping"):
            ready = view.routable()
            own: tuple[int, object] = (200 if ready else 503, None)
            methods = (b"GET", b"HEAD", b"POST") if path == "/ping" else (b"GET", b"HEAD")
        elif path == "/version":
            own, methods = (200, {"version": hetlb.__version__}), (b"GET", b"HEAD")
        elif path == "/v1/models":
            own, methods = (200, {"object": "list", "data": self._models()}), (b"GET", b"HEAD")
        elif path.startswith("/v1/models/"):
            name = path[len("/v1/models/") :]
            entry = next((entry for entry in self._models() if entry.get("id") == name), None)
            if entry is None:
                raise GateError(404, f"The model `{name}` does not exist.")
            own, methods = (200, entry), (b"GET", b"HEAD")
        else:
            raise GateError(404, "Not Found")
        if head.method not in methods:
            self._method_not_allowed(b", ".join(methods))
            return
        status, document = own
        body = b"" if document is None else msgspec.json.encode(document)
        self._reply(
            replies.response(status, body, close=not head.keep_alive, head_only=head.method == b"HEAD")
        )

    def _models(self) -> list[dict[str, Any]]:
        """The models that this client may use."""
        models, tenant = self._server.view.models(), self._tenant
        return models if tenant is None else [entry for entry in models if tenant.may_use(entry["id"])]

    def _method_not_allowed(self, allowed: bytes) -> None:
        answer = replies.bad_request(405, "method_not_allowed")
        body = replies.error_body(answer, "Method Not Allowed")
        head = self._head
        assert head is not None
        self._reply(
            replies.response(
                405,
                body,
                headers=((b"allow", allowed),),
                close=not head.keep_alive,
                head_only=head.method == b"HEAD",
            )
        )

    def _reply(self, data: bytes) -> None:
        self.write(data)
        self.end(keep=True)

    def _refuse(self, error: GateError) -> None:
        """Answer what did not pass, and close: what follows on this connection cannot be trusted."""
        answer = error.answer if isinstance(error, _Refusal) else replies.bad_request(error.status)
        self._server.driver.refused(answer.outcome)
        # A body that was read whole leaves the connection in a known state.
        whole = self._decoder.done if self._decoder is not None else not self._body_left
        head = self._head
        keep = head is not None and head.keep_alive and whole and error.status in (400, 403, 404, 405)
        self.write(
            replies.response(
                error.status,
                replies.error_body(answer, error.message),
                headers=replies.refusal_headers(answer, 1.0 if answer.should_retry else None),
                close=not keep,
                head_only=head is not None and head.method == b"HEAD",
            )
        )
        self._release()
        self._body_left, self._decoder = 0, None
        if keep:
            self.end(keep=True)
        else:
            self._linger()

    def _linger(self) -> None:
        """Close our side only: bytes still on their way would otherwise reset what was just written."""
        self._closing = True
        self._head = None
        self._since = self._now()
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()  # TLS has no half-closed connections; its goodbye waits for the client's

    def _close(self) -> None:
        self._closing = True
        self._since = self._now()
        if self._transport is not None:
            self._transport.close()


def _nowhere(data: bytes) -> None:
    """The client is gone."""


def _half_of_the_descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft // 2)


def _recognise(head: RequestHead, tenants: Mapping[bytes, Tenant]) -> Tenant | None:
    """Whose key came with a request; nobody's is needed where balancers ask. Raises `GateError` (401)."""
    authorization = head.fields.get(b"authorization")
    if authorization is not None:
        scheme, _, key = authorization.partition(b" ")
        key = key.strip() if scheme.lower() == b"bearer" else b""
    else:
        key = head.fields.get(b"x-api-key") or b""  # as Anthropic's clients send it
    tenant = tenants.get(hashlib.sha256(key).digest()) if key else None
    if tenant is None and head.path not in _OPEN_PATHS:
        told = (
            "This API key is not known here." if key else "An API key is needed: Authorization: Bearer KEY."
        )
        raise GateError(401, told)
    return tenant
