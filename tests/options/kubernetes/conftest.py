"""API servers of Kubernetes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest_asyncio
from aiohttp import web


class ApiServer:
    """The part of a Kubernetes API server that a watch sees, as its documentation describes it.

    Objects have a `resourceVersion` that grows; a watch gets what came after its version, bookmarks, and 410
    where its version is older than `oldest`. `cut` ends all open watches without a word.
    """

    def __init__(self) -> None:
        self.version = 100
        self.oldest = 0
        self.objects: dict[str, dict[str, Any]] = {}
        self.history: list[tuple[int, str, dict[str, Any]]] = []
        self.changed = asyncio.Condition()
        self.lists = 0
        self.watches: list[str] = []
        self.tokens: list[str | None] = []
        self._open: set[asyncio.Task[Any]] = set()

    async def put(self, item: dict[str, Any]) -> None:
        name = item["metadata"]["name"]
        await self._happen("MODIFIED" if name in self.objects else "ADDED", item)
        self.objects[name] = item

    async def delete(self, name: str) -> None:
        await self._happen("DELETED", self.objects.pop(name))

    async def bookmark(self) -> None:
        await self._happen("BOOKMARK", {"metadata": {}})

    async def error(self, code: int) -> None:
        """Say in the stream that something failed."""
        await self._happen("ERROR", {"kind": "Status", "code": code, "message": "too old resource version"})

    async def _happen(self, kind: str, item: dict[str, Any]) -> None:
        self.version += 1
        if kind != "ERROR":
            item["metadata"]["resourceVersion"] = str(self.version)
        async with self.changed:
            self.history.append((self.version, kind, msgspec.json.decode(msgspec.json.encode(item))))
            self.changed.notify_all()

    def expire(self) -> None:
        """Forget what has happened: watches must begin with a list."""
        self.oldest = self.version + 1

    async def cut(self) -> None:
        """End the connections of all watches."""
        for task in list(self._open):
            task.cancel()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("authorization"))
        if request.query.get("watch") in ("1", "true"):
            return await self._watch(request)
        self.lists += 1
        first = int(request.query.get("continue", 0))
        names = sorted(name for name, item in self.objects.items() if _selected(request, item))
        page = names[first : first + 2]  # small pages: a client must ask for the rest
        more = str(first + 2) if first + 2 < len(names) else ""
        items = [self.objects[name] for name in page]
        return web.json_response(
            {"metadata": {"resourceVersion": str(self.version), "continue": more}, "items": items}
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        self.watches.append(request.query["resourceVersion"])
        if since < self.oldest:
            return web.json_response({"kind": "Status", "code": 410, "message": "expired"}, status=410)
        reply = web.StreamResponse(headers={"content-type": "application/json"})
        await reply.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            while True:
                if not any(version > since for version, _, _ in self.history):
                    async with self.changed:
                        await self.changed.wait()
                for version, kind, item in list(self.history):
                    if version > since and (kind in ("BOOKMARK", "ERROR") or _selected(request, item)):
                        line = msgspec.json.encode({"type": kind, "object": item}) + b"\n"
                        for at in range(0, len(line), 40):  # lines come in pieces
                            await reply.write(line[at : at + 40])
                        since = version
        finally:
            self._open.discard(task)
            if request.transport is not None:
                request.transport.abort()


def _selected(request: web.Request, item: dict[str, Any]) -> bool:
    """True if an object has the name and the labels that a list or watch is restricted to."""
    meta = item.get("metadata", {})
    field, _, name = request.query.get("fieldSelector", "").partition("=")
    assert field in ("", "metadata.name")
    labels = [each.split("=") for each in request.query.get("labelSelector", "").split(",") if each]
    here = meta.get("labels", {})
    # Labels of slices are not checked: the API server's own are not in these tests.
    known = [(key, value) for key, value in labels if not key.startswith("kubernetes.io/")]
    return (not field or meta.get("name") == name) and all(here.get(key) == value for key, value in known)


class Cluster:
    """Several kinds of objects, each at the path of its kind; a kind that is not there is 404."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = {kind: ApiServer() for kind in kinds}
        self.paths: set[str] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.add(request.path)
        kind = self.kinds.get(request.path.rpartition("/")[2])
        if kind is None:
            return web.json_response({"kind": "Status", "code": 404, "message": "not found"}, status=404)
        return await kind.handle(request)


@contextlib.asynccontextmanager
async def serving(handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """The URL of a server with this handler."""
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest_asyncio.fixture
async def api_server() -> AsyncIterator[tuple[ApiServer, str]]:
    server = ApiServer()
    async with serving(server.handle) as url:
        yield server, url
        await server.cut()
