"""Servers that show no metrics: Ollama, LM Studio, MLX and llama.cpp, as their doors answer, behind hetlb."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from helpers import turns_until
from proxy.services import document, serving
from proxy.upstreams import Upstream, Visit, plain

from hetlb.balancer.core.types import Health

NOT_FOUND = plain(b"404 page not found", b"404 Not Found")
LIST = plain(b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"library"}]}')
OK = plain(b'{"status":"ok"}')
LOADING = plain(
    b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}', b"503 Service Unavailable"
)
NO_METRICS = plain(
    b'{"error":{"code":501,"message":"This server does not support metrics endpoint."}}',
    b"501 Not Implemented",
)
UNEXPECTED = plain(b'{"error":"Unexpected endpoint or method. (GET /health)"}')
#: Answers of each at its paths, and at all others.
OLLAMA = {
    "/": plain(b"Ollama is running"),
    "/v1/models": LIST,
    "/api/version": plain(b'{"version":"0.13.1"}'),
    "/api/tags": plain(b'{"models":[{"name":"m","model":"m","size":1}]}'),
    "/api/ps": plain(b'{"models":[]}'),
    "": NOT_FOUND,
}
LM_STUDIO = {"/v1/models": LIST, "": UNEXPECTED}
LLAMA_CPP = {"/health": OK, "/v1/models": LIST, "/metrics": NO_METRICS, "": NOT_FOUND}
MLX = {"/health": OK, "/v1/models": LIST, "": NOT_FOUND}
OLD_MLX = {"/v1/models": LIST, "": plain(b"Not Found", b"404 Not Found")}


class Server(Upstream):
    """A server with these doors, which answers chats."""

    def __init__(self, doors: dict[str, bytes]) -> None:
        super().__init__(self._route)
        self.doors = doors
        self.asked: list[str] = []

    async def _route(self, visit: Visit) -> None:
        method, path = visit.head.decode().split()[:2]
        self.asked.append(path)
        visit.send(plain() if method == "POST" else self.doors.get(path, self.doors[""]))


def status_of(url: str) -> int:
    """Status of a POST."""
    try:
        with urllib.request.urlopen(url, b'{"model":"m"}') as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    ("doors", "version"),
    [(OLLAMA, "0.13.1"), (LM_STUDIO, None), (LLAMA_CPP, None), (MLX, None), (OLD_MLX, None)],
    ids=["ollama", "lm-studio", "llama.cpp", "mlx", "old-mlx"],
)
async def test_it_is_up_and_answers(doors: dict[str, bytes], version: str | None, tmp_path: Path) -> None:
    async with Server(doors) as server:
        async with serving(tmp_path, document(server, scrape={"interval_s": 0.05})) as running:
            instance = running.scheduler.instances[0]
            assert instance.evidence.health.state is Health.UP
            assert instance.served == ("m",)
            assert running.service.watch.versions.get(instance.name) == version
            assert (await running.ask()).status == 200
            asked = len(server.asked)
            await turns_until(lambda: len(server.asked) > asked + 2)
            assert instance.evidence.health.state is Health.UP
            assert instance.sample is None, "a page without figures counts as one"
            reply = await asyncio.to_thread(status_of, f"http://127.0.0.1:{running.port}/api/chat")
            assert reply == 404  # Ollama's own protocol is not passed on


async def test_a_llama_cpp_that_loads_its_model_gets_no_request(tmp_path: Path) -> None:
    doors = dict.fromkeys(("/health", "/metrics", ""), LOADING) | {"/v1/models": LIST}  # listed meanwhile
    async with Server(doors) as server:
        async with serving(tmp_path, document(server, scrape={"interval_s": 0.05})) as running:
            waits = asyncio.create_task(running.ask())
            await turns_until(lambda: len(running.scheduler.queue) == 1)
            server.doors = LLAMA_CPP
            assert (await waits).status == 200
