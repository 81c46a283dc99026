"""vLLM's sleep mode: `/sleep`, `/wake_up` and `/is_sleeping`, as a server in development mode has them."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from aiohttp import web

from hetlb.tools.emulator.real_time import EngineGroup
from hetlb.tools.openai.requests import ApiError, bad

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
