"""KV transfer between emulated servers, as vLLM's connectors show it to a router.

`nixl`: an answer to `do_remote_decode` holds the parameters of the fetch, and the blocks stay for `lease_s`.
`nixl-push`: the engine with the blocks writes them to the request of the same id. `mooncake`: the fetch
may come first and waits for the prompt; `/query` is the bootstrap server.
A fetch after the lease gives wrong text with status 200, as with vLLM (` x0 x1 ...`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import aiohttp
from aiohttp import web

from hetlb.tasks import ended
from hetlb.tools.emulator.real_time import EmulatedSequence
from hetlb.tools.emulator.replies import Reply, ReplyChoice
from hetlb.tools.openai.requests import ApiError, read
from hetlb.tools.sim.engine_sequence import SequenceState

#: Seconds until an engine that does not answer counts as dead, as in NIXL's handshake.
CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class KvSettings:
    """Connector of a server. `policy` is vLLM's `kv_load_failure_policy`.

    `layers`: number of layers in the KV cache of its engine. Engines of different numbers (a stage of
    a pipeline, the whole model) refuse each other at the handshake.
    """

    connector: Literal["nixl", "nixl-push", "mooncake"]
    lease_s: float = 30.0
    bandwidth_bytes_per_s: float = 5e9
    policy: Literal["fail", "recompute"] = "fail"
    layers: int = 32


class _Held(NamedTuple):
    """A prompt kept for another server, until the timer ends its lease."""

    choice: ReplyChoice
    timer: asyncio.TimerHandle


def _has_source(params: dict[str, Any]) -> bool:
    """Return whether the parameters request a fetch and name its source; without one vLLM fetches nothing."""
    addressed = "remote_bootstrap_addr" in params or {"remote_host", "remote_port"} <= params.keys()
    return addressed and bool(params.get("do_remote_prefill"))


def _waits(choice: EmulatedSequence) -> bool:
    return choice.state is SequenceState.FETCHING


@dataclass(eq=False)
class KvExchange:
    """Transfers of one server: blocks kept for others, and fetches from them.

    `address` is its own, once it listens. Counters are vLLM's.
    """

    settings: KvSettings
    bytes_per_token: float
    address: Callable[[], tuple[str, int]]
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        self.engine_id = secrets.token_hex(16)
        self.expired = self.failed = self.fetched_tokens = 0
        #: Fetches that other servers have asked for.
        self.asked = 0
        #: Cleared, it answers no other server, as a stopped process does.
        self.answering = asyncio.Event()
        self.answering.set()
        self._held: dict[str, _Held] = {}
        #: Keys with an expired lease, and fetches that came before the prefill of their prompt.
        self._gone: set[str] = set()
        self._early: dict[str, list[asyncio.Future[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None

    @property
    def held(self) -> int:
        return len(self._held)

    async def close(self) -> None:
        for held in self._held.values():
            held.timer.cancel()
        await ended(*self._tasks)
        if self._session is not None:
            await self._session.close()

    # --- requests ---

    def prepare(self, reply: Reply, params: dict[str, Any] | None) -> None:
        """Apply a request's KV parameters to its only sequence."""
        choice = reply.choices[0]
        if params is None or len(reply.choices) != 1:
            return
        elif params.get("do_remote_decode"):
            choice.held = True
            reply.on_finished = lambda reply: self._offer(reply, params)
        elif _has_source(params):
            choice.remote_tokens = choice.prompt_tokens
            reply.kv_source = params

    # --- blocks kept for others ---

    def _offer(self, reply: Reply, params: dict[str, Any]) -> dict[str, Any] | None:
        """Hold a prefilled prompt; returns the `kv_transfer_params` of the answer."""
        mooncake = self.settings.connector == "mooncake"
        key = str(params.get("transfer_id")) if mooncake else reply.id
        choice = reply.choices[0]
        timer = asyncio.get_running_loop().call_later(self.settings.lease_s, self._expire, key)
        self._held[key] = _Held(choice, timer)
        for waiting in self._early.pop(key, ()):
            if not waiting.done():
                waiting.set_result(None)
        if mooncake:
            return None
        host, port = self.address()
        tokens = choice.prompt_tokens
        return {
            "do_remote_prefill": True, "do_remote_decode": False,
            "remote_block_ids": [list(range(-(-tokens // 16)))], "remote_engine_id": self.engine_id,
            "remote_request_id": key, "remote_host": host, "remote_port": port, "tp_size": 1, "dcp_size": 1,
            "pp_size": 1, "remote_num_tokens": tokens, "remote_blocks_expiry_time": None,
            "transfer_mode": "push" if self.settings.connector == "nixl-push" else "pull",
            "remote_prefill_cached_tokens": 0,
        }  # fmt: skip

    def _expire(self, key: str) -> None:
        self.expired += 1
        self._gone.add(key)
        self._let_go(key)

    def _let_go(self, key: str) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            held.timer.cancel()
            runner = held.choice.runner
            assert runner is not None, "expected the engine of a sequence that has run"
            runner.release_held(held.choice)

    def routes(self) -> list[web.RouteDef]:
        """Return the paths for other servers; `/query` is the bootstrap server's."""

        async def pull(request: web.Request) -> web.Response:
            asked = await request.json()
            if asked.get("layers", self.settings.layers) != self.settings.layers:
                return web.json_response({"state": "other layers"})
            return web.json_response({"state": await self._pulled(asked["engine_id"], asked["key"])})

        async def done(request: web.Request) -> web.Response:
            self._let_go((await request.json())["key"])
            return web.json_response({"state": "released"})

        async def query(request: web.Request) -> web.Response:
            worker = {"engine_id": self.engine_id, "worker_addr": {"0": {"0": "emulated"}}}
            return web.json_response({"0": worker})

        return [
            web.post("/kv_transfer/pull", pull),
            web.post("/kv_transfer/done", done),
            web.get("/query", query, allow_head=False),
        ]

    async def _pulled(self, engine_id: str, key: str) -> str:
        """Answer a fetch: `ready`, `expired` (the blocks hold other data by now), or `unknown`."""
        self.asked += 1
        await self.answering.wait()
        if engine_id != self.engine_id:
            return "unknown"
        if key in self._gone:
            return "expired"
        if key not in self._held:
            if self.settings.connector != "mooncake":
                return "unknown"
            early: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._early.setdefault(key, []).append(early)
            await early
        return "ready"

    # --- fetches ---

    def fetch(self, choice: EmulatedSequence) -> None:
        """Take over a sequence that has its blocks, and waits for its KV cache from another server."""
        assert isinstance(choice, ReplyChoice)
        self._start(self._fetch(choice))

    def abandon(self, reply: Reply) -> None:
        """Note that a request that would have fetched is refused, or its client has left."""
        if reply.kv_source is not None and not reply.kv_done:
            reply.kv_done = True
            if self.settings.connector == "nixl-push":
                return
            self._start(self._tell_done(reply.kv_source))

    def reject(self, body: bytes) -> None:
        """Release the blocks that a refused request would have fetched."""
        with contextlib.suppress(ApiError):
            params = read(body, dict[str, Any]).get("kv_transfer_params")
            if self.settings.connector != "nixl-push" and isinstance(params, dict) and _has_source(params):
                self._start(self._tell_done(params))

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch(self, choice: ReplyChoice) -> None:
        reply, runner = choice.reply, choice.runner
        assert runner is not None, "expected the engine of a sequence that waits for its KV cache"
        state = "ready"
        if reply.kv_source is not None:
            pushed = self.settings.connector == "nixl-push"
            if pushed and reply.kv_source.get("remote_request_id") != reply.id:
                return  # the engine with the blocks finds no request for them
            try:
                state = (await self._ask("pull", reply.kv_source)).get("state", "unknown")
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
                state = "unreachable"
        if not _waits(choice):
            return  # aborted meanwhile
        if state in ("ready", "expired"):
            seconds = choice.fetch_tokens * self.bytes_per_token / self.settings.bandwidth_bytes_per_s
            await asyncio.sleep(seconds * self.time_scale)
            if not _waits(choice):
                return
            self.fetched_tokens += choice.fetch_tokens
            if state == "expired":
                reply.word = "x"
            reply.kv_done = True
            runner.complete_fetch(choice, loaded=True)
            if state == "ready" and reply.kv_source is not None:
                await self._tell_done(reply.kv_source)
            return
        self.failed += 1
        reply.kv_done = True
        if self.settings.policy == "recompute":
            runner.complete_fetch(choice, loaded=False)
        else:
            runner.abort((choice,))
            reply.fail("KV load failed")

    async def _tell_done(self, source: dict[str, Any]) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            await self._ask("done", source)

    async def _ask(self, what: str, source: dict[str, Any]) -> dict[str, Any]:
        """Ask the server with the blocks one question. Raises if it does not answer."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        base = source.get("remote_bootstrap_addr")
        if base is None:
            base = f"http://{source['remote_host']}:{source['remote_port']}"
        key = source.get("transfer_id") or source.get("remote_request_id")
        body = {
            "engine_id": source.get("remote_engine_id"),
            "key": str(key),
            "layers": self.settings.layers,
        }
        async with self._session.post(f"{base}/kv_transfer/{what}", json=body) as answer:
            found: dict[str, Any] = await answer.json()
            return found
