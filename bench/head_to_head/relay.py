"""A relay that asks a selector where each request goes: NVIDIA Dynamo's, or one that learns as Lodestar does.

`relay.py SELECTOR PORT OTHER_PORT ENGINE_URL...`; the number of KV blocks is read from the engines' metrics.
`dynamo:PYTHON` starts `python -m dynamo.select_service` at the other port and asks it: prompts as token ids
(four bytes of text each), the prefill reported as complete at the first token, the reservation ended with
the answer. `lodestar` predicts the time to the first token at every engine by least squares, from what is in
flight there and the prompt, learns from each answer and takes the least (arXiv 2606.00946 has a neural
network in that place); one request in twenty goes anywhere, half of them at first.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import uvloop
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "proxies"))

import cpu

_TOKEN_BYTES = 4
_PATHS = ("/v1/completions", "/v1/chat/completions")


class Selector(Protocol):
    """Choice of a server for each request; told of its first token and of its end."""

    async def begin(self) -> None:
        """Learn of the engines."""

    async def choose(self, name: str, prompt: str) -> int:
        """The number of the engine for a request of this name."""

    async def first_token(self, name: str) -> None:
        """Its first token has come."""

    async def ended(self, name: str) -> None:
        """It is over."""


class Dynamo:
    """The selection service, by HTTP."""

    def __init__(self, python: str, port: int, engines: Sequence[str], http: ClientSession) -> None:
        self._url, self._engines, self._http = f"http://127.0.0.1:{port}", engines, http
        self._command = [python, "-m", "dynamo.select_service", "--port", str(port)]

    async def begin(self) -> None:
        command = cpu.measured(self._command, sorted(os.sched_getaffinity(0)))
        await asyncio.create_subprocess_exec(*command)
        while True:
            with contextlib.suppress(ClientError):
                async with self._http.get(f"{self._url}/health"):
                    break
            await asyncio.sleep(0.1)
        for number, engine in enumerate(self._engines):
            async with self._http.get(f"{engine}/metrics") as page:
                text = await page.text()
            blocks = int(text.partition('num_gpu_blocks="')[2].partition('"')[0] or 4096)
            await self._post(
                "/workers", worker_id=number, endpoint=engine, block_size=16, data_parallel_size=1,
                max_num_batched_tokens=8192, total_kv_blocks=blocks,
            )  # fmt: skip

    async def choose(self, name: str, prompt: str) -> int:
        data = prompt.encode()
        whole = data[: len(data) // _TOKEN_BYTES * _TOKEN_BYTES] or b"none"
        ids = [each & 0x7FFFFFFF for each in memoryview(whole).cast("I")]
        chosen = await self._post("/select_and_reserve", selection_id=name, token_ids=ids)
        return int(chosen["worker_id"])

    async def first_token(self, name: str) -> None:
        await self._post(f"/reservations/{name}/prefill_complete")

    async def ended(self, name: str) -> None:
        async with self._http.delete(f"{self._url}/reservations/{name}"):
            pass

    async def _post(self, path: str, **body: Any) -> Any:
        async with self._http.post(self._url + path, json=body) as reply:
            said = await reply.text()
            if reply.status >= 300:
                raise RuntimeError(f"{path}: {reply.status} {said}")
            return json.loads(said) if said else None


class Lodestar:
    """Recursive least squares for each engine: seconds to the first token from what is in flight there."""

    #: Answers older than about this many count 1/e.
    MEMORY = 200.0

    def __init__(self, engines: Sequence[str], seed: int = 0) -> None:
        size = 5
        self._weights = [np.zeros(size) for _ in engines]
        self._inverse = [np.eye(size) * 100.0 for _ in engines]
        self._in_flight = [0] * len(engines)
        self._waiting_tokens = [0] * len(engines)
        self._asked: dict[str, tuple[int, int, Any, float]] = {}
        self._rng, self._seen = random.Random(seed), 0

    async def begin(self) -> None:
        """Nothing to learn beforehand."""

    async def choose(self, name: str, prompt: str) -> int:
        tokens = len(prompt) // _TOKEN_BYTES
        features = [self._features(number, tokens) for number in range(len(self._weights))]
        if self._rng.random() < max(0.05, 0.5 * math.exp(-self._seen / 100.0)):
            chosen = self._rng.randrange(len(features))
        else:
            expected = [w @ x for w, x in zip(self._weights, features, strict=True)]
            chosen = int(np.argmin(expected))
        self._in_flight[chosen] += 1
        self._waiting_tokens[chosen] += tokens
        self._asked[name] = (chosen, tokens, features[chosen], time.monotonic())
        return chosen

    def _features(self, number: int, tokens: int) -> Any:
        batch, waiting = self._in_flight[number] / 32.0, self._waiting_tokens[number] / 4096.0
        return np.array([1.0, batch, batch * batch, waiting, tokens / 4096.0])

    async def first_token(self, name: str) -> None:
        chosen, tokens, x, began = self._asked[name]
        self._waiting_tokens[chosen] -= tokens
        keep = 1.0 - 1.0 / self.MEMORY
        inverse = self._inverse[chosen]
        gain = inverse @ x / (keep + x @ inverse @ x)
        error = time.monotonic() - began - self._weights[chosen] @ x
        self._weights[chosen] = self._weights[chosen] + gain * error
        self._inverse[chosen] = (inverse - np.outer(gain, x @ inverse)) / keep
        self._seen += 1

    async def ended(self, name: str) -> None:
        self._in_flight[self._asked.pop(name)[0]] -= 1


class Relay:
    """Passes requests on and answers back, chunk by chunk."""

    def __init__(self, selector: Selector, engines: Sequence[str], http: ClientSession) -> None:
        self._selector, self._engines, self._http = selector, engines, http
        self._names = itertools.count()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fields = json.loads(body)
        prompt = fields["prompt"] if "prompt" in fields else json.dumps(fields["messages"])
        name = f"request-{next(self._names)}"
        chosen = await self._selector.choose(name, prompt)
        first = False
        try:
            url = self._engines[chosen] + request.path
            async with self._http.post(url, data=body, headers={"content-type": "application/json"}) as reply:
                answer = web.StreamResponse(status=reply.status)
                answer.content_type = reply.content_type
                await answer.prepare(request)
                async for chunk in reply.content.iter_any():
                    if not first:
                        first = True
                        await self._selector.first_token(name)
                    await answer.write(chunk)
                await answer.write_eof()
                return answer
        finally:
            if not first:
                await self._selector.first_token(name)
            await self._selector.ended(name)


async def main() -> None:
    """Serve until killed."""
    kind, port, other_port, *engines = sys.argv[1:]
    connections = TCPConnector(limit=0, keepalive_timeout=2.0)
    async with ClientSession(connector=connections, timeout=ClientTimeout(total=None)) as http:
        _, _, python = kind.partition(":")
        selector: Selector = Dynamo(python, int(other_port), engines, http) if python else Lodestar(engines)
        await selector.begin()
        app = web.Application(client_max_size=1 << 26)
        relay = Relay(selector, engines, http)
        for path in _PATHS:
            app.router.add_post(path, relay.handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(port), backlog=8192).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
