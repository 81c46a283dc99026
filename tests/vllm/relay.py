"""A relay in front of a vLLM server, so that a test acts at a chosen moment of a hand-over.

The address stays while servers behind it come and go. `asked` and `answered` are called with what passes:
a request before it is sent on, and its answer before that is (of a stream: its first part).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import aiohttp
from aiohttp import web

_HOP_BY_HOP = ("connection", "content-length", "transfer-encoding", "host", "keep-alive")


class Dropped(Exception):
    """Raised in a hook: close the client's connection without an answer."""


@dataclass
class Visit:
    """One request for an answer on its way. `leg`: `prefill`, `decode`, `release` or `whole`.

    Hooks may change `body` and, of an answer that is no stream, `answer`.
    """

    leg: str
    body: dict[str, Any]
    answer: bytes = b""


Hook: TypeAlias = Callable[[Visit], Awaitable[None]]


async def _nothing(visit: Visit) -> None:
    pass


def leg_of(body: dict[str, Any]) -> str:
    """The part of a hand-over that a request is."""
    if body.get("max_tokens") == 1:
        return "prefill"
    if body.get("max_tokens", 0) > 1 << 20:
        return "release"
    return "decode" if "kv_transfer_params" in body else "whole"


class Relay:
    """One address; `target` is the server behind it."""

    def __init__(self) -> None:
        self.target = ""
        self.url = ""
        self.asked: Hook = _nothing
        self.answered: Hook = _nothing
        self._session: aiohttp.ClientSession

    @contextlib.contextmanager
    def hooks(self, *, asked: Hook = _nothing, answered: Hook = _nothing) -> Iterator[None]:
        """Call these for the length of the block."""
        self.asked, self.answered = asked, answered
        try:
            yield
        finally:
            self.asked = self.answered = _nothing

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Relay]:
        """Listen for the length of the block."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=connector, auto_decompress=False
        )
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._serve)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()
            await self._session.close()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._pass_on(request)
        except (Dropped, aiohttp.ClientError, ConnectionError):
            if request.transport is not None:
                request.transport.close()
            raise

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        visit: Visit | None = None
        if request.method == "POST":
            body = json.loads(data)
            visit = Visit(leg_of(body), body)
            await self.asked(visit)
            data = json.dumps(visit.body).encode()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        url = self.target + request.path_qs
        async with self._session.request(request.method, url, data=data or None, headers=headers) as upstream:
            kept = {
                name: value for name, value in upstream.headers.items() if name.lower() not in _HOP_BY_HOP
            }
            if "event-stream" not in upstream.headers.get("content-type", ""):
                answer = await upstream.read()
                if visit is not None:
                    visit.answer = answer
                    await self.answered(visit)
                    answer = visit.answer
                return web.Response(status=upstream.status, headers=kept, body=answer)
            response = web.StreamResponse(status=upstream.status, headers=kept)
            await response.prepare(request)
            first = True
            async for part in upstream.content.iter_any():
                if first and visit is not None:
                    await self.answered(visit)
                first = False
                await response.write(part)
            await response.write_eof()
            return response
