"""The OpenAI API in front of a coordinator, with vLLM's further fields: completions and chat.

A client that leaves ends its sequences at once. Every error has OpenAI's body. To a proxy a coordinator is an
engine like any other. Its file is read again when it changes or at SIGHUP: the workers that it names then are
used at once.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from aiohttp import web

import hetlb
from hetlb.app_listener import AppListener
from hetlb.balancer.core.types import RejectReason
from hetlb.errors import ConfigError, InputError
from hetlb.files import readable_name
from hetlb.output_files import opened_log
from hetlb.tasks import ended
from hetlb.tools.openai.answers import DONE, Envelope, event, model_list, usage
from hetlb.tools.openai.requests import (
    ApiError,
    ChatRequest,
    application,
    counter,
    gauge,
    page,
    unknown_model,
)
from hetlb.tools.stage.checkpoint import load_config
from hetlb.tools.stage.coordinator import Coordinator, Sequence
from hetlb.tools.stage.questions import QuestionReader, Questions
from hetlb.tools.stage.stage_channel import read_key
from hetlb.tools.stage.stage_messages import Token
from hetlb.tools.stage.stages_file import StageGroup
from hetlb.tools.stage.text import AnswerText, Piece, TextModel
from hetlb.watched_files import FileStates

_MOST_BODY_BYTES: Final = 64 << 20

_STATUS: Final[dict[RejectReason | None, int]] = {
    None: 400,
    RejectReason.TOO_LONG: 400,
    RejectReason.QUEUE_FULL: 429,
    RejectReason.NO_INSTANCE: 503,
}


_Queue = asyncio.Queue[tuple[int, Piece | ApiError]]


class _Answer:
    """One sequence of a request: takes tokens from the coordinator, gives pieces to the handler."""

    def __init__(self, index: int, text: AnswerText, queue: _Queue) -> None:
        self._index = index
        self._text = text
        self._queue = queue

    def token(self, token: Token) -> bool:
        piece = self._text.add(token)
        self._queue.put_nowait((self._index, piece))
        return piece.finish is None

    def failed(self, reason: RejectReason | None, message: str) -> None:
        self._queue.put_nowait((self._index, ApiError(_STATUS.get(reason, 502), message)))


class OpenAIServer:
    """HTTP in front of one coordinator."""

    def __init__(
        self,
        coordinator: Coordinator,
        text: TextModel,
        *,
        api_key: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """With an `api_key` requests below `/v1` need it."""
        self.coordinator = coordinator
        self._text = text
        self._model = coordinator.group.model
        self._reader = QuestionReader(text, coordinator.config.vocabulary)
        self._api_key = api_key
        self._listener = AppListener(tls, handler_cancellation=True, shutdown_timeout=0.1)
        self._prompt_tokens = self._generated_tokens = 0

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen. Raises `OSError`."""
        routes = [
            web.post("/v1/completions", self._completions),
            web.post("/v1/chat/completions", self._chat),
            web.get("/v1/models", self._models),
            web.get("/health", self._health),
            web.get("/version", self._version),
            web.get("/metrics", self._metrics),
        ]
        app = application(routes, _MOST_BODY_BYTES)
        app.middlewares.append(self._authorize)
        await self._listener.open(app, host, port)

    @web.middleware
    async def _authorize(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self._api_key and request.path.startswith("/v1/"):
            given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, f"Bearer {self._api_key}".encode()):
                raise ApiError(401, "Unauthorized")
        return await handler(request)

    @property
    def port(self) -> int:
        """The port, once it listens."""
        return self._listener.address[1]

    async def close(self) -> None:
        """Stop listening."""
        await self._listener.close()

    # --- small endpoints ---

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.coordinator.scheduler.passable else 503)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": f"hetlb-{hetlb.__version__}"})

    async def _models(self, request: web.Request) -> web.Response:
        root, longest = str(self.coordinator.group.folder), self.coordinator.max_model_len
        return web.json_response(model_list([self._model], "hetlb", root, int(time.time()), longest))

    async def _metrics(self, request: web.Request) -> web.Response:
        text = _metrics_page(self.coordinator, self._prompt_tokens, self._generated_tokens)
        return web.Response(body=text, content_type="text/plain", charset="utf-8")

    # --- answers ---

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        longest = self.coordinator.max_model_len
        return await self._answer(request, await self._reader.completion(await request.read(), longest))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        longest = self.coordinator.max_model_len
        return await self._answer(request, await self._reader.chat(await request.read(), longest))

    async def _answer(self, request: web.Request, questions: Questions) -> web.StreamResponse:
        fields = questions.fields
        if fields.model not in (None, self._model):
            raise unknown_model(fields.model)
        if not self.coordinator.scheduler.passable:
            raise ApiError(503, "The stages that are up do not hold all layers.")
        include_usage = fields.include_usage
        queue: _Queue = asyncio.Queue()
        sequences: list[Sequence] = []
        try:
            for index, each in enumerate(questions.asked):
                decode = self._text.stream(skip_special_tokens=fields.skip_special_tokens is not False)
                answer = _Answer(index, AnswerText(decode, each.ending), queue)
                limit = each.ending.max_tokens
                sequences.append(self.coordinator.submit(each.prompt, each.sampling, limit, answer))
            self._prompt_tokens += questions.prompt_tokens
            pieces = self._pieces(queue, len(sequences))
            call = _Call(questions, self._model, self._text)
            if fields.stream:
                return await _stream(request, call, pieces, include_usage)
            found: list[list[Piece]] = [[] for _ in sequences]
            async for index, piece in pieces:
                found[index].append(piece)
            return web.json_response(call.whole(found))
        finally:
            for sequence in sequences:
                self.coordinator.cancel(sequence)

    async def _pieces(self, queue: _Queue, count: int) -> AsyncIterator[tuple[int, Piece]]:
        """Pieces of all sequences until the last one ended. Raises `ApiError` if one failed."""
        while count:
            index, piece = await queue.get()
            if isinstance(piece, ApiError):
                raise piece
            self._generated_tokens += 1
            count -= piece.finish is not None
            yield index, piece


async def _stream(
    request: web.Request, call: _Call, pieces: AsyncIterator[tuple[int, Piece]], include_usage: bool
) -> web.StreamResponse:
    """Server-sent events. The head waits for the first token: until then a failure is a status."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    tokens = 0
    try:
        async for index, piece in pieces:
            if not tokens:
                await response.prepare(request)
            tokens += 1
            await response.write(call.events(index, piece))
    except ApiError as error:
        if not tokens:
            raise
        await response.write(b"data: %b\n\n" % error.body() + DONE)
        return response
    if include_usage:
        await response.write(event(call.envelope.chunk([], usage(call.prompt_tokens, tokens))))
    await response.write(DONE)
    return response


class _Call:
    """Writer of the answer to one request."""

    def __init__(self, questions: Questions, model: str, text: TextModel) -> None:
        self._questions = questions
        self._text = text
        self._chat = isinstance(questions.fields, ChatRequest)
        self.envelope = Envelope(uuid.uuid4().hex, model, chat=self._chat)
        self.prompt_tokens = questions.prompt_tokens
        #: Length of the text so far by sequence, for `text_offset`; begun sequences.
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()

    def whole(self, found: list[list[Piece]]) -> dict[str, Any]:
        """Return the body of a plain answer."""
        choices = []
        for index, pieces in enumerate(found):
            text = "".join(piece.text for piece in pieces)
            choice = self._choice(index, text, pieces, streamed=False)
            if self._questions.fields.return_token_ids:
                choice["prompt_token_ids"] = self._questions.asked[index].prompt
            choices.append(choice)
        return self.envelope.whole(choices, usage(self.prompt_tokens, sum(map(len, found))))

    def events(self, index: int, piece: Piece) -> bytes:
        """Return the events of one token."""
        role = b""
        if self._chat and index not in self._begun:
            self._begun.add(index)
            role = event(self.envelope.chunk([self.envelope.role(index)]))
        return role + event(self.envelope.chunk([self._choice(index, piece.text, [piece], streamed=True)]))

    def _choice(self, index: int, text: str, pieces: list[Piece], *, streamed: bool) -> dict[str, Any]:
        last, tokens = pieces[-1], [piece.token for piece in pieces]
        choice = self.envelope.choice(
            index,
            text,
            last.finish,
            streamed=streamed,
            stop_reason=last.stop_reason,
            logprobs=self._logprobs(index, tokens),
        )
        if self._questions.fields.return_token_ids:
            choice["token_ids"] = [token.token for token in tokens]
        return choice

    def _logprobs(self, index: int, tokens: list[Token]) -> dict[str, Any] | None:
        """Log probabilities as the endpoint writes them."""
        if self._questions.logprobs < 0:
            return None
        entries = [
            [(self._text.decode([token]), value) for token, value in each.logprobs or ()] for each in tokens
        ]
        if self._chat:
            content = [{**_entry(*own), "top_logprobs": [_entry(*e) for e in top]} for own, *top in entries]
            return {"content": content}
        at, offsets = self._offsets.get(index, 0), []
        for each in entries:
            offsets.append(at)
            at += len(each[0][0])
        self._offsets[index] = at
        return {
            "tokens": [each[0][0] for each in entries],
            "token_logprobs": [each[0][1] for each in entries],
            "top_logprobs": [dict(each) for each in entries],
            "text_offset": offsets,
        }


def _metrics_page(coordinator: Coordinator, prompt_tokens: int, generated_tokens: int) -> bytes:
    """Metrics with vLLM's names if they mean the same, else `hetlb_stage_*`."""
    scheduler, model = coordinator.scheduler, {"model_name": coordinator.group.model}
    usage = min(1.0, scheduler.kv_usage()) if scheduler.passable else 0.0
    lost = coordinator.preemptions
    families = [
        gauge("vllm:num_requests_running", "Sequences on a path.", [(model, scheduler.in_flight)]),
        gauge("vllm:num_requests_waiting", "Sequences without a path.", [(model, scheduler.waiting)]),
        gauge("vllm:kv_cache_usage_perc", "Booked share of the fullest layer's KV cache.", [(model, usage)]),
        counter("vllm:prompt_tokens", "Prompt tokens.", [(model, prompt_tokens)]),
        counter("vllm:generation_tokens", "Answer tokens.", [(model, generated_tokens)]),
        counter("vllm:num_preemptions", "Sequences that lost their KV.", [(model, lost)]),
        counter("hetlb_stage_replays", "Paths that broke.", [({}, coordinator.replays)]),
    ]
    if tokens := coordinator.kv_tokens:
        sizes = {"block_size": "1", "num_gpu_blocks": str(tokens), "kv_cache_size_tokens": str(tokens)}
        families.append(gauge("vllm:cache_config_info", "Tokens of the smallest layer.", [(sizes, 1)]))
    stages = [({"stage": each["name"]}, each) for each in coordinator.documents()]
    booked = [(label, each["kv_reserved_token_layers"]) for label, each in stages]
    return page(
        [
            *families,
            gauge(
                "hetlb_stage_up", "1 while it is used.", [(at, each["state"] == "up") for at, each in stages]
            ),
            gauge(
                "hetlb_stage_in_flight", "Paths through it.", [(at, each["in_flight"]) for at, each in stages]
            ),
            gauge("hetlb_stage_kv_reserved_token_layers", "Booked KV.", booked),
        ]
    )


def _entry(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


log = logging.getLogger("hetlb.stage")

#: Seconds that start-up waits for stages that hold all layers.
FIRST_LOOK_S: Final = 3.0
#: Seconds between two looks at the file.
_POLL_S: Final = 1.0


class Coordination:
    """A coordinator, its server and its file. `load` reads the file again."""

    def __init__(
        self,
        group: StageGroup,
        load: Callable[[Path], StageGroup],
        *,
        event_log: Path | None = None,
        api_key: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Read model, tokenizer and key. Raises `InputError`."""
        self._load = load
        self._log: Any = None if event_log is None else _opened(event_log)
        self.coordinator = Coordinator(
            group,
            load_config(group.folder),
            key=read_key(group.key_file),
            tls=_authorities(group),
            write_event=None if self._log is None else self._log.write,
        )
        self.server = OpenAIServer(self.coordinator, TextModel(group.folder), api_key=api_key, tls=tls)
        self._reading = asyncio.Lock()

    async def run(self, host: str, port: int, stop: asyncio.Event, ready: Callable[[int], None]) -> None:
        """Serve until `stop`; `ready` is given the port. Raises `OSError` if it cannot listen."""
        loop, hangup = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, hangup.set)
        tasks: list[asyncio.Task[None]] = []
        try:
            await self.coordinator.start()
            if not await self.coordinator.wait_passable(FIRST_LOOK_S):
                log.warning("the stages that are up do not hold all layers")
            await self.server.start(host, port)
            tasks += [asyncio.create_task(self._watch()), asyncio.create_task(self._follow(hangup))]
            ready(self.server.port)
            await stop.wait()
        finally:
            loop.remove_signal_handler(signal.SIGHUP)
            await ended(*tasks)
            await self.coordinator.close()
            await self.server.close()
            if self._log is not None:
                self._log.close()

    async def _watch(self) -> None:
        """Read the file again once it has changed and then stayed as it is between two looks."""
        path, states = [self.coordinator.group.path], FileStates()
        read = before = states.of(path)
        while True:
            await asyncio.sleep(_POLL_S)
            now = await asyncio.to_thread(states.of, path)
            if now == before != read:
                read = now
                await self.reload()
            before = now

    async def _follow(self, hangup: asyncio.Event) -> None:
        while True:
            await hangup.wait()
            hangup.clear()
            await self.reload()

    async def reload(self) -> None:
        """Read the file again. A wrong one is logged and changes nothing."""
        async with self._reading:
            before = self.coordinator.group
            try:
                group = await asyncio.to_thread(self._load, before.path)
            except InputError as error:
                log.error("not reloaded, the last good file stays: %s", error)
                return
            fixed = [
                key
                for key in ("model", "folder", "key_file", "ca_file", "scheduler", "high_water")
                if getattr(group.table, key) != getattr(before.table, key)
            ]
            if fixed:
                log.error("not reloaded: only a restart changes %s", ", ".join(fixed))
            elif group != before:
                await self.coordinator.reconfigure(group)
                log.info("reloaded: %d workers", len(group.workers))


def _opened(path: Path) -> Any:
    try:
        return open(opened_log(path), "w", encoding="utf-8", buffering=1)
    except OSError as error:
        raise InputError(f"--event-log: expected a place to write {path}: {error.strerror}") from error


def _authorities(group: StageGroup) -> ssl.SSLContext | None:
    """Return the TLS context of connections to workers, None without a `ca_file`."""
    if group.ca_file is None:
        return None
    try:
        with readable_name(group.ca_file) as name:
            return ssl.create_default_context(cafile=name)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{group.ca_file}: expected a PEM file: {error}") from error
