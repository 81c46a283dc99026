"""The listener: client connections, what is answered here, and what goes to an engine.

Promise: requests of one connection are answered in order, one at a time; a client that leaves is noticed
in every phase; nothing is routed before its head passed the gate, and nothing dispatched before its whole
body passed the reader.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
from typing import Any, Protocol, cast

import msgspec

import hetlb
from hetlb.config import ProxyTable
from hetlb.core.types import Request
from hetlb.proxy import replies
from hetlb.proxy.body import Call, Kind, inject_usage, read_json, read_multipart
from hetlb.proxy.driver import Driver
from hetlb.proxy.exchange import Exchange, Phase
from hetlb.proxy.http1 import ChunkedDecoder, GateError, RequestHead, head_end, parse_request_head

#: Bytes of a next request that may wait behind the one being answered.
_MAX_PIPELINED = 64 << 10
_SWEEP_S = 0.5
#: How long a refused client may still send before its connection is dropped.
_LINGER_S = 2.0
_LABEL = re.compile(rb"[!-~]{1,128}")
#: A local tokenizer is asked for prompts up to this size: it takes about a millisecond for it.
_MAX_TOKENIZED_BYTES = 64 << 10
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
_RESPONSE_PATH = re.compile(r"/v1/responses/([A-Za-z0-9_.-]{1,128})(/cancel)?")


class FleetView(Protocol):
    """What the listener answers by itself."""

    def models(self) -> list[dict[str, Any]]: ...
    def routable(self) -> bool: ...


class ProxyServer:
    """The main listener."""

    def __init__(self, driver: Driver, view: FleetView) -> None:
        self.driver = driver
        self.view = view
        self.table: ProxyTable = driver.table
        self.connections: set[ClientConnection] = set()
        self.stopping = False
        #: Engines take our request ids for their own, and another proxy may count from 1 too.
        self.label_prefix = f"hetlb-{secrets.token_hex(4)}"
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Accept connections; returns the address in use. Raises `OSError` if it cannot be bound."""
        loop = self.driver.loop
        self._server = await loop.create_server(
            lambda: ClientConnection(self), host, port, backlog=2048, reuse_address=True
        )
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep)
        name = self._server.sockets[0].getsockname()
        return name[0], name[1]

    def stop_accepting(self) -> None:
        """Close the listener; open connections end with the answer they are at."""
        self.stopping = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close_if_idle()

    async def close(self) -> None:
        """Drop whatever connection is left."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self.connections):
            connection.abort()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def kind(self, path: str) -> Kind | None:
        """What is at a path, None for nothing."""
        kind = ENDPOINTS.get(path)
        if kind is None and path in self.table.extra_paths:
            kind = Kind.PLAIN
        return kind

    def knows(self, path: str) -> bool:
        """Whether something that takes a body is at a path."""
        return self.kind(path) is not None or _RESPONSE_PATH.fullmatch(path) is not None

    def _sweep(self) -> None:
        self._sweeper = self.driver.loop.call_later(_SWEEP_S, self._sweep)
        now = self.driver.now()
        for connection in list(self.connections):
            connection.sweep(now)


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        "_body", "_body_left", "_buffer", "_closing", "_decoder", "_exchange", "_head", "_paused",
        "_reading_paused", "_server", "_since", "_stalled_since", "_transport",
    )  # fmt: skip

    def __init__(self, server: ProxyServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._head: RequestHead | None = None
        self._body: list[bytes] = []
        self._body_left = 0
        self._decoder: ChunkedDecoder | None = None
        self._exchange: Exchange | None = None
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
        self._since = self._server.driver.now()
        self._server.connections.add(self)

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
                self._since = self._server.driver.now()  # the head's time begins with its first byte
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
        self._server.connections.discard(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_gone()

    def pause_writing(self) -> None:
        self._paused = True
        self._stalled_since = self._server.driver.now()
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

    def write(self, data: bytes) -> None:
        """Send bytes of an answer."""
        if self._transport is not None:
            self._transport.write(data)

    def end(self, *, keep: bool) -> None:
        """The answer is out; `keep` says that the client can tell where it ended."""
        head, self._head, self._exchange = self._head, None, None
        if not keep or head is None or not head.keep_alive or self._server.stopping:
            self._close()
            return
        self._since = self._server.driver.now()
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
            if now - self._since > table.body_timeout_s:
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
        while self._buffer.startswith(b"\r\n"):
            self._buffer = self._buffer[2:]  # RFC 9112, 2.2: an empty line before a request is skipped
        if self._buffer and not 65 <= self._buffer[0] <= 90 and self._buffer != b"\r":
            raise GateError(400, "This is not the beginning of an HTTP request.")  # TLS, say
        end = head_end(self._buffer)
        if not end:
            return False
        raw, self._buffer = self._buffer[:end], self._buffer[end:]
        head = parse_request_head(bytes(raw))
        if any(n == b"content-encoding" and v.lower() != b"identity" for n, v in head.headers):
            raise GateError(415, "Encoded request bodies are not accepted.")
        limit = self._body_limit(head)
        if head.content_length is not None and head.content_length > limit:
            raise GateError(413, f"The request body is larger than {limit} bytes.")
        if head.expects is not None and head.expects != b"100-continue":
            raise GateError(417, "The only expectation understood is 100-continue.")
        if head.expects is not None and not self._server.knows(head.path):
            raise GateError(404, "Not Found")  # before the body is asked for
        self._head = head
        self._since = self._server.driver.now()
        self._body = []
        self._body_left = head.content_length or 0
        self._decoder = ChunkedDecoder() if head.chunked else None
        if (
            head.expects is not None
            and head.http11
            and (self._body_left or self._decoder)
            and not self._buffer
        ):
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _body_limit(self, head: RequestHead) -> int:
        content_type = head.header(b"content-type") or b""
        table = self._server.table
        if content_type.lower().startswith(b"multipart/"):
            return table.max_multipart_bytes
        return table.max_body_bytes

    def _read_body(self) -> bool:
        """Take the body out of the buffer; True when it is whole."""
        if self._decoder is not None:
            if not self._buffer:
                return False
            data, self._buffer = self._buffer, b""
            payload = self._decoder.feed(data)
            if payload:
                self._body.append(payload)
                self._body_left += len(payload)
                assert self._head is not None
                if self._body_left > self._body_limit(self._head):
                    raise GateError(413, "The request body is too large.")
            if not self._decoder.done:
                return False
            self._buffer = self._decoder.surplus
            return True
        if self._body_left:
            piece, self._buffer = self._buffer[: self._body_left], self._buffer[self._body_left :]
            if piece:
                self._body.append(piece)
                self._body_left -= len(piece)
        return not self._body_left

    # --- answering ---

    def _serve(self) -> None:
        head = self._head
        assert head is not None
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        server = self._server
        if server.stopping:
            raise GateError(503, "The proxy is shutting down.")
        kind = server.kind(head.path)
        if kind is None:
            pinned = _RESPONSE_PATH.fullmatch(head.path)
            if pinned is None:
                self._serve_own(head)
                return
            self._serve_pinned(head, pinned[1], bool(pinned[2]), body)
            return
        if head.method != b"POST" and kind is not Kind.PLAIN:
            self._method_not_allowed(b"POST")
            return
        content_type = head.header(b"content-type") or b""
        if content_type.lower().startswith(b"multipart/"):
            call = read_multipart(content_type, body)
        elif kind is Kind.PLAIN and not body:
            call = Call()
        else:
            call = read_json(kind, body)
        self._submit(head, kind, call, body, None)

    def _serve_pinned(self, head: RequestHead, response_id: str, cancel: bool, body: bytes) -> None:
        allowed = (b"POST",) if cancel else (b"GET", b"DELETE")
        if head.method not in allowed:
            self._method_not_allowed(b", ".join(allowed))
            return
        made_at = self._server.driver.made_at.get(response_id)
        if made_at is None:
            raise GateError(404, f"Response with id '{response_id}' not found.")
        self._submit(head, Kind.PINNED, Call(), body, made_at)

    def _submit(self, head: RequestHead, kind: Kind, call: Call, body: bytes, pinned: str | None) -> None:
        driver = self._server.driver
        model = call.model or self._only_model(pinned)
        body = inject_usage(kind, call, body)
        prompts, exact = call.prompts, call.prompt_tokens is not None
        if kind in (Kind.PLAIN, Kind.PINNED):
            total, prompts = 1, 1
        elif call.prompt_tokens is not None:
            total = call.prompt_tokens
        else:
            counter = driver.sizes.counter(model)
            if counter is not None and 0 < len(call.text) <= _MAX_TOKENIZED_BYTES:
                total = counter(call.text.decode("utf-8", "replace"))
            else:
                total = driver.sizes.estimate(model, call.text_bytes)
        each = max(1, -(-total // prompts))
        request_id = driver.next_id()
        label = head.header(b"x-request-id")
        if label is None or _LABEL.fullmatch(label) is None:
            text = f"{self._server.label_prefix}-{request_id:x}"
        else:
            text = label.decode("ascii")
        now = driver.now()
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
        )
        exchange = Exchange(driver, self, head, kind, call, request, body, text, now)
        self._exchange = exchange
        driver.submit(exchange)

    def _only_model(self, pinned: str | None) -> str:
        driver = self._server.driver
        if pinned is not None:
            for instance in driver.scheduler.instances:
                if instance.name == pinned:
                    return (instance.served or (instance.spec.model,))[0]
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
            own, methods = (200, {"object": "list", "data": view.models()}), (b"GET", b"HEAD")
        elif path.startswith("/v1/models/"):
            name = path[len("/v1/models/") :]
            entry = next((entry for entry in view.models() if entry.get("id") == name), None)
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
        answer = replies.SHUTTING_DOWN if error.status == 503 else replies.bad_request(error.status)
        totals, key = self._server.driver.totals, (answer.outcome, Phase.QUEUE.value)
        totals.requests[key] = totals.requests.get(key, 0) + 1
        # A body that was read whole leaves the connection in a known state.
        whole = self._decoder.done if self._decoder is not None else not self._body_left
        keep = self._head is not None and self._head.keep_alive and whole and error.status in (400, 404, 405)
        self.write(
            replies.response(
                error.status,
                replies.error_body(answer, error.message),
                headers=replies.refusal_headers(answer, 1.0 if error.status == 503 else None),
                close=not keep,
            )
        )
        self._body, self._body_left, self._decoder = [], 0, None
        if keep:
            self.end(keep=True)
        else:
            self._linger()

    def _linger(self) -> None:
        """Close our side only: bytes still on their way would otherwise reset what was just written."""
        self._closing = True
        self._head = None
        self._since = self._server.driver.now()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def _close(self) -> None:
        self._closing = True
        self._since = self._server.driver.now()
        if self._transport is not None:
            self._transport.close()
