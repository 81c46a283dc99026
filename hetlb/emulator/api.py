"""The endpoints of an emulated vLLM 0.32 server.

Every request is answered, or its client has left; what the engine runs for a client that left
is aborted at once. Paths vLLM does not have for a generative model are 404 (and `/v1/embeddings`, which
it has for an embedding model, is there for both kinds of request to be tried).
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, TypeAlias

import msgspec
from aiohttp import web

from hetlb.emulator import vllm_metrics
from hetlb.emulator.anthropic_answers import MessagesReply, anthropic_error
from hetlb.emulator.counting import chat_text, token_ids
from hetlb.emulator.data_parallel import EngineGroup
from hetlb.emulator.generation import Generation, Reader
from hetlb.emulator.kv_transfer import KvExchange
from hetlb.emulator.replies import (
    VERSION,
    ChatReply,
    CompletionReply,
    EmbeddingReply,
    Reply,
    ResponsesReply,
)
from hetlb.openai.answers import model_list
from hetlb.openai.application import application
from hetlb.openai.requests import ApiError, bad, read

_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

_EVENTS = {"content-type": "text/event-stream; charset=utf-8"}


class Api:
    """Routes requests of one server to its engines."""

    def __init__(
        self, engines: EngineGroup, reader: Reader, kv_cache_tokens: int, kv: KvExchange | None = None
    ) -> None:
        self._kv = kv
        self._engines = engines
        self._reader = reader
        self._kv_cache_tokens = kv_cache_tokens
        self._ids = random.Random()
        self._started = int(time.time())

    def app(self) -> web.Application:
        """The application to listen with."""
        reader = self._reader
        posts: dict[str, _Handler] = {
            "/v1/completions": partial(self._generate, reader.completion, CompletionReply),
            "/v1/chat/completions": partial(self._generate, reader.chat, ChatReply),
            "/v1/responses": partial(self._generate, reader.response, ResponsesReply),
            "/v1/messages": partial(self._generate, reader.message, MessagesReply),
            "/v1/embeddings": partial(self._generate, reader.embedding, EmbeddingReply),
            "/v1/messages/count_tokens": self._count_tokens,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/ping": self._empty,
        }
        gets: dict[str, _Handler] = {
            "/health": self._empty,
            "/ping": self._empty,
            "/version": self._version,
            "/load": self._load,
            "/metrics": self._metrics,
            "/v1/models": self._models,
        }
        if self._kv is not None:
            posts |= {"/kv_transfer/pull": self._pull, "/kv_transfer/done": self._done}
            gets["/query"] = self._query
        routes = [web.get(path, handler, allow_head=False) for path, handler in gets.items()]
        routes += [web.post(path, handler) for path, handler in posts.items()]
        app = application(routes, 0, _error_body)
        app.on_response_prepare.append(_as_uvicorn)
        return app

    # --- generating ---

    async def _generate(
        self, read: Callable[[bytes], Generation], kind: type[Reply], request: web.Request
    ) -> web.StreamResponse:
        """Run what a body asks for, and answer as its tokens come."""
        body = await _body(request)
        try:
            generation = read(body)
        except ApiError:
            if self._kv is not None:
                self._kv.reject(body)
            raise
        named = generation.request_id
        if kind is not ResponsesReply:  # aiohttp reads header fields as UTF-8, and they may be none
            sent = request.headers.get("x-request-id", "")
            named = sent.encode("utf-8", "surrogateescape").decode("latin-1")
        request_id = named or f"{self._ids.getrandbits(64):016x}"
        reply = kind(generation, self._reader.max_model_len, request_id)
        if self._kv is not None and generation.generates:
            self._kv.prepare(reply, generation.kv_transfer_params)
        try:
            response = await self._stream(request, reply) if generation.stream else None
            self._engines.submit(reply.choices)
            status, answer = await reply.ended
        finally:
            if not reply.done:  # the client has left
                self._engines.abort(reply.choices)
                if self._kv is not None:
                    self._kv.abandon(reply)
        if response is not None:
            return response
        return web.Response(body=answer, status=status, content_type="application/json")

    async def _stream(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        """Begin a stream of events: each is written to the socket when it comes, and nothing waits for it."""
        response = web.StreamResponse(headers=_EVENTS)
        chunked = request.version >= (1, 1)
        if chunked:
            response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        assert transport is not None, "expected a connection: its end cancels the handler"

        def send(data: bytes) -> None:
            if not transport.is_closing():  # else the handler is about to be cancelled
                transport.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)

        reply.send = send
        return response

    async def _count_tokens(self, request: web.Request) -> web.Response:
        tokens = self._reader.message_tokens(await _body(request))
        return _json({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})

    # --- between engines ---

    async def _pull(self, request: web.Request) -> web.Response:
        asked = read(await _body(request), dict[str, Any])
        assert self._kv is not None, "expected a connector with its paths"
        return _json({"state": await self._kv.pull(str(asked.get("engine_id")), str(asked.get("key")))})

    async def _done(self, request: web.Request) -> web.Response:
        assert self._kv is not None, "expected a connector with its paths"
        self._kv.done(str(read(await _body(request), dict[str, Any]).get("key")))
        return _json({"state": "released"})

    async def _query(self, request: web.Request) -> web.Response:
        assert self._kv is not None, "expected a connector with its paths"
        return _json(self._kv.directory())

    # --- telling ---

    async def _empty(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": VERSION})

    async def _load(self, request: web.Request) -> web.Response:
        return _json({"server_load": 0})  # as of a server without --enable-server-load-tracking

    async def _metrics(self, request: web.Request) -> web.Response:
        page = vllm_metrics.render(
            self._engines.runners, self._reader.served[0], self._kv_cache_tokens, self._kv
        )
        return web.Response(body=page, headers={"content-type": vllm_metrics.CONTENT_TYPE})

    async def _models(self, request: web.Request) -> web.Response:
        reader = self._reader
        served, longest = reader.served, reader.max_model_len
        return _json(model_list(served, "vllm", served[0], self._started, longest))

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = read(await _body(request), _Tokenize)
        if asked.prompt is not None:
            tokens = token_ids(asked.prompt)
        elif asked.messages is not None:
            text, count = chat_text(asked.messages)
            ids = token_ids(text)
            tokens = [ids[number % len(ids)] for number in range(count)]
        else:
            raise bad("Expected a prompt or messages.", "prompt")
        self._reader.model(asked.model)
        longest = self._reader.max_model_len
        return _json({"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": None})

    async def _detokenize(self, request: web.Request) -> web.Response:
        asked = read(await _body(request), _Detokenize)
        self._reader.model(asked.model)
        # The ids of this emulator cannot be turned back into text; each stands for itself.
        return _json({"prompt": "".join(f" t{token}" for token in asked.tokens)})


class _Tokenize(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class _Detokenize(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[Any]


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


async def _body(request: web.Request) -> bytes:
    """The body of a request. Raises `ApiError` unless it is JSON by its content type."""
    if request.content_type != "application/json":
        raise bad("Expected the content type application/json.")
    try:
        return await request.read()
    except web.RequestPayloadError as error:
        raise bad("The body is not of its Content-Encoding.") from error


def _error_body(request: web.Request, error: ApiError) -> bytes:
    if request.match_info.http_exception is not None:  # no such path or method
        return msgspec.json.encode({"detail": HTTPStatus(error.status).phrase})
    return anthropic_error(error) if request.path.startswith("/v1/messages") else error.body()


async def _as_uvicorn(request: web.Request, response: web.StreamResponse) -> None:
    """Give a response the headers that vLLM's server gives it."""
    response.headers["server"] = "uvicorn"
    response.headers["vary"] = "Origin"
    if request.version < (1, 1):
        response.headers["connection"] = "close"
        response.force_close()
    if response.content_length == 0:
        response.headers.pop("content-type", None)
