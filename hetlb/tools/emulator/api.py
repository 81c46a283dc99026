"""The endpoints of an emulated vLLM 0.32 server.

Every request is answered, or its client has left: what the engine runs for it is aborted at once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeAlias

import msgspec
from aiohttp import web
from prometheus_client import Histogram
from prometheus_client.core import Metric

from hetlb.tools.emulator.counting import chat_text, token_ids
from hetlb.tools.emulator.generation import Generation, Reader
from hetlb.tools.emulator.kv_transfer import KvExchange
from hetlb.tools.emulator.real_time import EngineGroup, RealTimeEngine
from hetlb.tools.emulator.replies import VERSION, ChatReply, CompletionReply, EmbeddingReply, Reply
from hetlb.tools.openai.answers import model_list
from hetlb.tools.openai.requests import ApiError, application, bad, counter, gauge, page, read

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
#: vLLM's own upper bounds of its histogram of tokens per iteration.
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

_Of = Callable[[RealTimeEngine], float]
_GAUGES: dict[str, _Of] = {
    "num_requests_running": lambda it: it.running,
    "num_requests_waiting": lambda it: it.waiting,
    "kv_cache_usage_perc": lambda it: it.model.kv.pool.usage,
}
_COUNTERS: dict[str, _Of] = {
    "num_preemptions": lambda it: it.model.preemptions,
    "prompt_tokens": lambda it: it.prompt_tokens,
    "generation_tokens": lambda it: it.model.generated_tokens,
}
_PREFIX_CACHE: dict[str, _Of] = {
    "prefix_cache_queries": lambda it: it.prompt_tokens,
    "prefix_cache_hits": lambda it: it.model.kv.hit_tokens,
}
#: With speculative decoding. A draft is one decode step: a token of its own, and the accepted ones.
_DRAFTS: dict[str, _Of] = {
    "spec_decode_num_drafts": lambda it: it.drafts,
    "spec_decode_num_accepted_tokens": lambda it: it.model.generated_tokens - it.drafts,
}


class VllmMetrics:
    """The page of a server of these engines; `kv_cache_tokens` is the capacity of each by the profile."""

    def __init__(
        self,
        runners: Sequence[RealTimeEngine],
        model_name: str,
        kv_cache_tokens: int,
        kv: KvExchange | None = None,
        sleep: SleepMode | None = None,
    ) -> None:
        self._sleep = sleep
        self._engines = [
            ({"engine": str(n), "model_name": model_name}, runner) for n, runner in enumerate(runners)
        ]
        self._kv_cache_tokens = kv_cache_tokens
        self._kv = kv
        self._iteration_tokens = Histogram(
            "vllm:iteration_tokens_total",
            "Histogram of number of tokens per engine_step.",
            ("engine", "model_name"),
            buckets=_ITERATION_TOKENS,
            registry=None,
        )
        for labels, runner in self._engines:
            runner.on_iteration = self._iteration_tokens.labels(**labels).observe

    def text(self) -> bytes:
        """Return the page now."""
        return page(self._families())

    def _families(self) -> Iterator[Metric]:
        engines = self._engines
        first_labels, first = engines[0]
        caches, drafts = first.model.kv.shared, first.tokens_per_step > 1.0
        for name, of in _GAUGES.items():
            yield gauge(f"vllm:{name}", name, [(labels, of(runner)) for labels, runner in engines])
        for name, of in (_COUNTERS | (_PREFIX_CACHE if caches else {}) | (_DRAFTS if drafts else {})).items():
            yield counter(f"vllm:{name}", name, [(labels, of(runner)) for labels, runner in engines])
        waiting = [
            (labels | {"reason": reason}, runner.waiting if reason == "capacity" else 0)
            for labels, runner in engines
            for reason in ("capacity", "deferred")
        ]
        yield gauge("vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", waiting)
        ended = [
            (labels | {"finished_reason": reason}, count)
            for labels, runner in engines
            for reason, count in runner.finished.items()
        ]
        yield counter("vllm:request_success", "Ended requests by reason.", ended)
        if (kv := self._kv) is not None:
            expired, failed = [(first_labels, kv.expired)], [(first_labels, kv.failed)]
            yield counter("vllm:nixl_num_kv_expired_reqs", "Leases that ended unfetched.", expired)
            yield counter("vllm:nixl_num_failed_transfers", "Failed KV transfers.", failed)
            computed = sum(runner.prompt_tokens for _, runner in engines) - kv.fetched_tokens
            sources = {"local_compute": computed, "external_kv_transfer": kv.fetched_tokens}
            by_source = [(first_labels | {"source": source}, count) for source, count in sources.items()]
            yield counter("vllm:prompt_tokens_by_source", "Prompt tokens by source.", by_source)
        if self._sleep is not None:
            states = {"awake": not self._sleep.asleep, "weights_offloaded": self._sleep.asleep}
            slept = [
                (labels | {"sleep_state": name}, int(on))
                for labels, _ in engines
                for name, on in states.items()
            ]
            yield gauge("vllm:engine_sleep_state", "Engine sleep state.", slept)
        yield from self._iteration_tokens.collect()
        info = [
            (
                {
                    "block_size": str(runner.model.limits.block_size),
                    "cache_dtype": "auto",
                    "enable_prefix_caching": str(caches),
                    "engine": labels["engine"],
                    "kv_cache_size_tokens": str(self._kv_cache_tokens),
                    "num_gpu_blocks": str(runner.model.limits.kv_blocks),
                },
                1,
            )
            for labels, runner in engines
        ]
        yield gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", info)
        yield gauge("process_start_time_seconds", "Unix time of its start.", [({}, first.began_at)])


_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

_EVENTS = {"content-type": "text/event-stream; charset=utf-8"}


class Api:
    """Routes requests of one server to its engines."""

    def __init__(
        self,
        engines: EngineGroup,
        reader: Reader,
        kv_cache_tokens: int,
        kv: KvExchange | None = None,
        sleep: SleepMode | None = None,
    ) -> None:
        self._sleep = sleep
        self._kv = kv
        self._engines = engines
        self._reader = reader
        self._metrics = VllmMetrics(engines.runners, reader.served[0], kv_cache_tokens, kv, sleep)
        self._ids = random.Random()

    def app(self) -> web.Application:
        reader = self._reader
        posts: dict[str, _Handler] = {
            "/v1/completions": partial(self._generate, reader.completion, CompletionReply),
            "/v1/chat/completions": partial(self._generate, reader.chat, ChatReply),
            "/v1/embeddings": partial(self._generate, reader.embedding, EmbeddingReply),
            "/tokenize": _telling(self._tokenize),
            "/detokenize": _telling(self._detokenize),
            "/ping": _empty,
        }
        models = model_list(reader.served, "vllm", reader.served[0], int(time.time()), reader.max_model_len)
        gets: dict[str, _Handler] = {
            "/health": _empty,
            "/ping": _empty,
            "/version": _telling(lambda _: {"version": VERSION}),
            "/load": _telling(lambda _: {"server_load": 0}),  # not tracked
            "/metrics": self._page,
            "/v1/models": _telling(lambda _: models),
        }
        routes = [web.get(path, handler, allow_head=False) for path, handler in gets.items()]
        routes += [web.post(path, handler) for path, handler in posts.items()]
        if self._kv is not None:
            routes += self._kv.routes()
        if self._sleep is not None:
            routes += self._sleep.routes()
        app = application(routes, 0, _error_body)
        app.on_response_prepare.append(_as_uvicorn)
        return app

    # --- generating ---

    async def _generate(
        self, read: Callable[[bytes], Generation], kind: type[Reply], request: web.Request
    ) -> web.StreamResponse:
        body = await _body(request)
        if self._sleep is not None:
            self._sleep.check()
        try:
            generation = read(body)
        except ApiError:
            if self._kv is not None:
                self._kv.reject(body)
            raise
        rank = self._rank(request)
        # aiohttp reads header fields as UTF-8, and they may be none.
        sent = request.headers.get("x-request-id", "").encode("utf-8", "surrogateescape")
        request_id = sent.decode("latin-1") or f"{self._ids.getrandbits(64):016x}"
        reply = kind(generation, self._reader.max_model_len, request_id)
        if self._kv is not None and generation.generates:
            self._kv.prepare(reply, generation.fields.kv_transfer_params)
        try:
            response = await self._stream(request, reply) if generation.fields.stream else None
            self._engines.submit(reply.choices, rank)
            status, answer = await reply.ended
        finally:
            if not reply.done:  # the client has left
                self._engines.abort(reply.choices)
                if self._kv is not None:
                    self._kv.abandon(reply)
        if response is not None:
            return response
        return web.Response(body=answer, status=status, content_type="application/json")

    def _rank(self, request: web.Request) -> int | None:
        """Return the engine that a request chooses, None without one. Raises `ApiError`."""
        stated = request.headers.get("x-data-parallel-rank")
        if stated is None:
            return None
        if not (stated.isascii() and stated.isdigit()) or int(stated[:9]) >= len(self._engines.runners):
            raise bad(f"X-data-parallel-rank: expected one of {len(self._engines.runners)} engines")
        return int(stated)

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

    # --- telling ---

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"content-type": CONTENT_TYPE})

    def _tokenize(self, body: bytes) -> dict[str, Any]:
        asked = read(body, _Tokenize)
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
        return {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": None}

    def _detokenize(self, body: bytes) -> dict[str, Any]:
        asked = read(body, _Detokenize)
        self._reader.model(asked.model)
        # The ids of this emulator cannot be turned back into text; each stands for itself.
        return {"prompt": "".join(f" t{token}" for token in asked.tokens)}


class _Tokenize(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class _Detokenize(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[Any]


async def _empty(request: web.Request) -> web.Response:
    return web.Response()


def _telling(answer: Callable[[bytes], object]) -> _Handler:
    """Return a handler that answers with JSON; `answer` makes it of the body of a POST."""

    async def handler(request: web.Request) -> web.Response:
        found = answer(await _body(request) if request.method == "POST" else b"")
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")

    return handler


async def _body(request: web.Request) -> bytes:
    """Return the body of a request. Raises `ApiError` unless it is JSON by its content type."""
    if request.content_type != "application/json":
        raise bad("Expected the content type application/json.")
    try:
        return await request.read()
    except web.RequestPayloadError as error:
        raise bad("The body is not of its Content-Encoding.") from error


def _error_body(request: web.Request, error: ApiError) -> bytes:
    if request.match_info.http_exception is not None:  # no such path or method
        return msgspec.json.encode({"detail": HTTPStatus(error.status).phrase})
    return error.body()


async def _as_uvicorn(request: web.Request, response: web.StreamResponse) -> None:
    """Give a response the headers that vLLM's server gives it."""
    response.headers["server"] = "uvicorn"
    response.headers["vary"] = "Origin"
    if request.version < (1, 1):
        response.headers["connection"] = "close"
        response.force_close()
    if response.content_length == 0:
        response.headers.pop("content-type", None)


_LEVELS: Final = ("1", "2")
#: Parts of a level that `/wake_up?tags=` names.
_TAGS: Final = ("weights", "kv_cache")


class SleepMode:
    """Sleep of one server; to fall asleep and to wake up takes `wake_s` each.

    A server that sleeps refuses requests, and one with requests does not sleep: hetlb must see to both.
    """

    def __init__(self, engines: EngineGroup, wake_s: float) -> None:
        self._engines = engines
        self._wake_s = wake_s
        self._missing: set[str] = set()
        self._turn = asyncio.Lock()
        #: Times that it fell asleep and woke up.
        self.sleeps = self.wakes = 0

    @property
    def asleep(self) -> bool:
        """True if something that an answer needs is not in memory."""
        return bool(self._missing)

    def check(self) -> None:
        """Raise `ApiError` while it sleeps."""
        if self.asleep:
            raise ApiError(503, "The engine sleeps.")

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/sleep", self._sleep),
            web.post("/wake_up", self._wake_up),
            web.post("/collective_rpc", self._reload),
            web.get("/is_sleeping", self._tell),
        ]

    async def _sleep(self, request: web.Request) -> web.Response:
        level = request.query.get("level", "1")
        if level not in _LEVELS:
            raise bad(f"level: expected 1 or 2, got {level[:20]!r}")
        async with self._turn:
            if self._engines.running or self._engines.waiting:
                raise ApiError(500, "Requests run.")
            if not self.asleep:
                self._missing = {*_TAGS, *(["loaded"] if level == "2" else [])}
                self.sleeps += 1
                await asyncio.sleep(self._wake_s)
        return web.Response()

    async def _wake_up(self, request: web.Request) -> web.Response:
        tags = request.query.getall("tags", list(_TAGS))
        async with self._turn:
            if self.asleep:
                await asyncio.sleep(self._wake_s)
                self._missing -= set(tags)
                self.wakes += not self.asleep
        return web.Response()

    async def _reload(self, request: web.Request) -> web.Response:
        body = await request.read()
        if body != b'{"method":"reload_weights"}' or "weights" in self._missing:
            raise bad("expected reload_weights, with weights awake")
        self._missing.discard("loaded")
        return web.Response(body=b'{"results":[null]}', content_type="application/json")

    async def _tell(self, _: web.Request) -> web.Response:
        body = msgspec.json.encode({"is_sleeping": self.asleep})
        return web.Response(body=body, content_type="application/json")
