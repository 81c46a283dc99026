"""One vLLM server as a profiler sees it: its settings, its counters, and the times of tokens.

A stamp is taken when bytes are read, before they are parsed; tokens are counted by the server's own running
usage. Errors that a person can mend (address, key, model) are `InputError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.types import Capacity
from hetlb.balancer.engines.engine_metrics import EngineCounters, page_of, parse
from hetlb.balancer.engines.engine_mistakes import is_hetlb, no_answer_at
from hetlb.errors import HetlbError, InputError, reason_of
from hetlb.served_models import longest_context, read_model_list, read_version
from hetlb.tasks import ended
from hetlb.tools.openai.answers import AnswerError, AnswerEvent, EventReader

#: Ids of prompts: in the vocabulary of any model, past the low ids where special tokens live.
_TOKEN_IDS = range(1000, 2000)
_CONNECT_TIMEOUT_S = 5.0
_PAGE_TIMEOUT_S = 30.0
#: Seconds without a byte after which a server counts as hanging: longer than any one prefill of a grid.
_SILENCE_TIMEOUT_S = 120.0


class ServerFailed(HetlbError):
    """The server went away, hangs, or answers something else."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts that a server reports; None for the others. `prefix_cache`: it keeps prefixes."""

    model: str
    version: str | None
    capacity: Capacity
    counts: bool
    prefix_cache: bool


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Times of the tokens of one prompt: `(seconds, tokens so far)`, rising, on the monotonic clock."""

    stamps: tuple[tuple[float, int], ...]

    @property
    def first_s(self) -> float:
        return self.stamps[0][0]

    @property
    def last_s(self) -> float:
        return self.stamps[-1][0]

    def step_s(self, start_s: float, end_s: float) -> float | None:
        """Return the mean seconds per token between the first and last stamp in a span; None without two."""
        inside = [stamp for stamp in self.stamps if start_s <= stamp[0] <= end_s]
        if len(inside) < 2 or inside[-1][1] == inside[0][1]:
            return None
        return (inside[-1][0] - inside[0][0]) / (inside[-1][1] - inside[0][1])


def distinct_prompts(rng: random.Random, batch: int, length: int) -> list[list[int]]:
    """Return `batch` random prompts of `length` token ids; the first tokens differ between any two."""
    heads = rng.sample(_TOKEN_IDS, min(batch, len(_TOKEN_IDS)))
    prompts = []
    for number in range(batch):
        prompt = rng.choices(_TOKEN_IDS, k=length)
        prompt[0] = heads[number % len(heads)]
        prompts.append(prompt)
    return prompts


class CompletionStream:
    """A streamed completion of several prompts; `head_s` is when the server had read the request."""

    def __init__(self, response: aiohttp.ClientResponse, prompts: int, max_tokens: int) -> None:
        self.head_s = time.monotonic()
        self._response = response
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._begun = asyncio.Event()

    async def begun(self) -> None:
        """Wait until every prompt has a token, or the answer has ended; it must be read meanwhile."""
        await self._begun.wait()

    async def read(self) -> list[TokenTimes]:
        """Return all tokens, one entry per prompt. Raises `ServerFailed`."""
        pieces: list[tuple[float, bytes]] = []
        reader, missing = EventReader(), set(range(self._prompts))
        try:
            async with self._response:
                content = self._response.content
                while piece := await content.readany():
                    pieces.append((time.monotonic(), piece))
                    if missing:
                        missing -= {each.choices[0].index for each in _events(reader, piece) if each.choices}
                        if not missing:
                            self._begun.set()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerFailed(f"the server broke off an answer: {reason_of(error)}") from error
        finally:
            self._begun.set()
        return _token_times(pieces, self._prompts, self._max_tokens)

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[asyncio.Task[list[TokenTimes]]]:
        """Read during the block; leaving it aborts the server's unfinished requests."""
        task = asyncio.create_task(self.read())
        try:
            yield task
        finally:
            self._response.close()
            await ended(task)


class EngineClient:
    """A connection to one server. `async with`; `model` is chosen by `facts`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession  # since it was entered
        self.model = ""

    async def __aenter__(self) -> EngineClient:
        # A fresh connection per request: idle ones are closed by the server at times of its own.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
            headers=self._headers,
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def facts(self, model: str | None) -> ServerFacts:
        """Return the facts of the server. Raises `InputError` if it is no server of `model`."""
        status, body = await self._page("/v1/models")
        if status in (401, 403):
            raise InputError(
                f"--url: expected an API key that {self._url} accepts in OPENAI_API_KEY, got {status}"
            )
        entries = {entry["id"]: entry for entry in read_model_list(body)} if status == 200 else {}
        if not entries:
            raise InputError(
                f"--url: expected an OpenAI-compatible server, got {status} from {self._url}/v1/models"
            )
        self.model = next(iter(entries)) if model is None else model
        if self.model not in entries:
            raise InputError(f"--model: expected one of {', '.join(entries)}, got {self.model!r}")
        _, version = await self._page("/version")
        status, page = await self._page("/metrics")
        text = page.decode("utf-8", "replace") if status == 200 else ""
        found = parse(text).capacity
        if found.engines is not None and found.engines > 1:
            raise InputError(
                f"--url: expected a server of one engine, got {found.engines} data-parallel engines: a "
                f"profile is of one of them (--data-parallel-size 1), and hetlb serve counts with all"
            )
        return ServerFacts(
            self.model,
            read_version(version),
            Capacity(
                kv_cache_tokens=found.kv_cache_tokens,
                block_size=found.block_size,
                max_model_len=longest_context([entries[self.model]]),
            ),
            counts=page_of(text).counters().prompt_tokens is not None,
            prefix_cache=found.enable_prefix_caching is True,
        )

    async def sample(self) -> EngineSample:
        return parse((await self._page("/metrics"))[1].decode("utf-8", "replace"))

    async def counters(self) -> EngineCounters:
        return page_of((await self._page("/metrics"))[1].decode("utf-8", "replace")).counters()

    async def send(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> CompletionStream:
        """Ask for `max_tokens` tokens of every prompt, in one request; returns once its head has come."""
        body = msgspec.json.encode(
            {
                "model": self.model,
                "prompt": prompts,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        )
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_SILENCE_TIMEOUT_S
        )
        try:
            response = await self._session.post(
                f"{self._url}/v1/completions",
                data=io.BytesIO(body),  # aiohttp warns of large bodies as bytes
                headers={"content-type": "application/json"},
                timeout=timeout,
            )
            if response.status != 200:
                said = (await response.content.read(300)).decode("utf-8", "replace")
                raise ServerFailed(
                    f"expected an answer to {len(prompts)} prompts of {len(prompts[0])} tokens, "
                    f"got {response.status}: {' '.join(said.split())}"
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerFailed(f"the server took no request: {no_answer_at(error)}") from error
        return CompletionStream(response, len(prompts), max_tokens)

    async def complete(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[TokenTimes]:
        return await (await self.send(prompts, max_tokens)).read()

    async def _page(self, path: str) -> tuple[int, bytes]:
        try:
            async with self._session.get(
                self._url + path, timeout=aiohttp.ClientTimeout(total=_PAGE_TIMEOUT_S)
            ) as reply:
                if is_hetlb(reply.headers):
                    raise InputError("--url: expected one server, got a hetlb: a profile is of one server")
                return reply.status, await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ServerFailed(f"{self._url}{path}: no answer: {no_answer_at(error)}") from error


def _token_times(pieces: Sequence[tuple[float, bytes]], prompts: int, max_tokens: int) -> list[TokenTimes]:
    stamps: list[list[tuple[float, int]]] = [[] for _ in range(prompts)]
    events = [0] * prompts
    told, total = True, None
    reader = EventReader()
    for at, event in ((at, event) for at, piece in pieces for event in _events(reader, piece)):
        tokens = event.usage.completion_tokens if event.usage is not None else None
        if not event.choices:
            total = tokens
            continue
        index = event.choices[0].index
        if not 0 <= index < prompts:
            raise ServerFailed(f"expected choices 0 to {prompts - 1}, got {index}")
        events[index] += 1
        told = told and tokens is not None
        count = events[index] if tokens is None else tokens
        if count and (not stamps[index] or count > stamps[index][-1][1]):
            stamps[index].append((at, count))
    if not told and total != sum(events):
        raise ServerFailed(
            f"the server bundles tokens ({total} tokens in {sum(events)} events) and does not count them as "
            f"they come (continuous_usage_stats): their times are unknown"
        )
    for row in stamps:
        if not row or row[-1][1] != max_tokens:
            got = row[-1][1] if row else 0
            raise ServerFailed(f"expected {max_tokens} tokens of every prompt (ignore_eos), got {got} of one")
    return [TokenTimes(tuple(row)) for row in stamps]


def _events(reader: EventReader, piece: bytes) -> list[AnswerEvent]:
    try:
        return reader.feed(piece)
    except AnswerError as error:
        raise ServerFailed(f"the server reported an error: {error.kind}: {error.detail[:200]}") from error
