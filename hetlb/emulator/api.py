"""The endpoints of an emulated vLLM 0.32 server.

Every request is answered, or its client has left; what the engine runs for a client that left
is aborted at once. Paths vLLM does not have for a generative model are 404 (and `/v1/embeddings`, which
it has for an embedding model, is there for both kinds of request to be tried).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from hetlb.emulator import vllm_metrics
from hetlb.emulator.anthropic_answers import MessagesReply, error_body
from hetlb.emulator.counting import chat_text, token_ids
from hetlb.emulator.data_parallel import EngineGroup
from hetlb.emulator.generation import Generation, Reader
from hetlb.emulator.http import Connection, HttpMessage
from hetlb.emulator.kv_transfer import KvExchange
from hetlb.emulator.replies import (
    VERSION,
    ChatReply,
    CompletionReply,
    EmbeddingReply,
    Reply,
    ResponsesReply,
)
from hetlb.openai.requests import ApiError, bad, read

Handler: TypeAlias = Callable[[Connection, HttpMessage], None]

_encode = msgspec.json.encode


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
        self._version = _encode({"version": VERSION})
        self._routes: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._empty},
            "/ping": {"GET": self._empty, "POST": self._empty},
            "/version": {"GET": self._get_version},
            "/load": {"GET": self._load},
            "/metrics": {"GET": self._metrics},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/v1/completions": {"POST": self._generator(reader.completion, CompletionReply)},
            "/v1/chat/completions": {"POST": self._generator(reader.chat, ChatReply)},
            "/v1/responses": {"POST": self._generator(reader.response, ResponsesReply)},
            "/v1/messages": {"POST": self._generator(reader.message, MessagesReply)},
            "/v1/messages/count_tokens": {"POST": self._count_tokens},
            "/v1/embeddings": {"POST": self._generator(reader.embedding, EmbeddingReply)},
        }
        if kv is not None:
            self._routes["/kv_transfer/pull"] = {"POST": self._pull}
            self._routes["/kv_transfer/done"] = {"POST": self._done}
            self._routes["/query"] = {"GET": self._query}

    def handle(self, connection: Connection, message: HttpMessage) -> None:
        """Answer one request, now or as its tokens come."""
        methods = self._routes.get(message.path)
        if methods is None:
            connection.respond(404, b'{"detail":"Not Found"}')
        elif (handler := methods.get(message.method)) is None:
            allow = b"allow: %b\r\n" % ", ".join(methods).encode()
            connection.respond(405, b'{"detail":"Method Not Allowed"}', extra=allow)
        else:
            try:
                if message.method == "POST" and message.path != "/ping":
                    _check_type(message)
                handler(connection, message)
            except ApiError as error:
                anthropic = message.path.startswith("/v1/messages")
                connection.respond(error.status, error_body(error) if anthropic else error.body())

    # --- generating ---

    def _generator(self, read: Callable[[bytes], Generation], kind: type[Reply]) -> Handler:
        def handle(connection: Connection, message: HttpMessage) -> None:
            try:
                generation = read(message.body)
            except ApiError:
                if self._kv is not None:
                    self._kv.reject(message.body)
                raise
            request_id = generation.request_id if kind is ResponsesReply else message.request_id
            reply = kind(connection, generation, self._reader.max_model_len, request_id or self._new_id())
            if self._kv is not None and generation.generates:
                self._kv.prepare(reply, generation.kv_transfer_params)
            if generation.stream:
                connection.start_stream()
            connection.watch(lambda: self._leave(reply))
            self._engines.submit(reply.choices)

        return handle

    def _leave(self, reply: Reply) -> None:
        """The client of a reply has left."""
        self._engines.abort(reply.choices)
        if self._kv is not None:
            self._kv.abandon(reply)

    def _count_tokens(self, connection: Connection, message: HttpMessage) -> None:
        tokens = self._reader.message_tokens(message.body)
        body = {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}
        connection.respond(200, _encode(body))

    # --- between engines ---

    def _pull(self, connection: Connection, message: HttpMessage) -> None:
        asked = read(message.body, dict[str, Any])
        assert self._kv is not None

        def answer(done: asyncio.Task[str]) -> None:
            if not done.cancelled():
                connection.respond(200, _encode({"state": done.result()}))

        pulling = asyncio.get_running_loop().create_task(
            self._kv.pull(str(asked.get("engine_id")), str(asked.get("key")))
        )

        def gone() -> None:
            pulling.cancel()

        connection.watch(gone)
        pulling.add_done_callback(answer)

    def _done(self, connection: Connection, message: HttpMessage) -> None:
        assert self._kv is not None
        self._kv.done(str(read(message.body, dict[str, Any]).get("key")))
        connection.respond(200, b'{"state":"released"}')

    def _query(self, connection: Connection, message: HttpMessage) -> None:
        assert self._kv is not None
        connection.respond(200, _encode(self._kv.directory()))

    def _new_id(self) -> str:
        return f"{self._ids.getrandbits(64):016x}"

    # --- telling ---

    def _empty(self, connection: Connection, message: HttpMessage) -> None:
        connection.respond(200, b"", content_type=None)

    def _get_version(self, connection: Connection, message: HttpMessage) -> None:
        connection.respond(200, self._version)

    def _load(self, connection: Connection, message: HttpMessage) -> None:
        # As of a server without --enable-server-load-tracking.
        connection.respond(200, b'{"server_load":0}')

    def _metrics(self, connection: Connection, message: HttpMessage) -> None:
        page = vllm_metrics.render(
            self._engines.runners, self._reader.served[0], self._kv_cache_tokens, self._kv
        )
        connection.respond(200, page, content_type=vllm_metrics.CONTENT_TYPE)

    def _models(self, connection: Connection, message: HttpMessage) -> None:
        root = self._reader.served[0]
        data = [
            {
                "id": name,
                "object": "model",
                "created": self._started,
                "owned_by": "vllm",
                "root": root,
                "parent": None,
                "max_model_len": self._reader.max_model_len,
            }
            for name in self._reader.served
        ]
        connection.respond(200, _encode({"object": "list", "data": data}))

    def _tokenize(self, connection: Connection, message: HttpMessage) -> None:
        asked = read(message.body, _Tokenize)
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
        body = {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": None}
        connection.respond(200, _encode(body))

    def _detokenize(self, connection: Connection, message: HttpMessage) -> None:
        asked = read(message.body, _Detokenize)
        self._reader.model(asked.model)
        # The ids of this emulator cannot be turned back into text; each stands for itself.
        connection.respond(200, _encode({"prompt": "".join(f" t{token}" for token in asked.tokens)}))


class _Tokenize(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class _Detokenize(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[Any]


def _check_type(message: HttpMessage) -> None:
    if message.content_type.partition(";")[0].strip().lower() != "application/json":
        raise bad("Expected the content type application/json.")
