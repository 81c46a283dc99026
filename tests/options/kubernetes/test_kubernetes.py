"""The watch of pods and EndpointSlices, against a server that behaves as the API's documentation says.

No API server is at hand here: pages, resumed connections, bookmarks and expired versions follow "API
concepts", the objects core/v1 and discovery.k8s.io/v1.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from helpers import HANG_S, turns_until
from hypothesis import given
from hypothesis import strategies as st
from options.kubernetes.conftest import ApiServer
from options.kubernetes.conftest import serving as api_serving

from hetlb.balancer.config.fleet_tables import KubernetesTable
from hetlb.balancer.fleet.source import Found, Sources
from hetlb.options.kubernetes import kubernetes
from hetlb.options.kubernetes.kubernetes import Item, KubernetesSource

Given = tuple[ApiServer, str]


def pod(name: str, **more: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "metadata": {"name": name, "labels": {"app": "vllm", "model": "m"}},
        "spec": {"containers": [{"ports": [{"containerPort": 9000, "name": "http"}]}]},
        "status": {
            "podIP": f"10.0.0.{len(name)}",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    for key, value in more.items():
        document[key] = {**document[key], **value}
    return document


class Seen:
    """The last publication of a source."""

    def __init__(self) -> None:
        self.found: list[Found] = []
        self.times = 0

    def __call__(self, source: str, found: Any) -> None:
        self.found = list(found)
        self.times += 1

    @property
    def names(self) -> list[str]:
        return sorted(each.name for each in self.found)


@asynccontextmanager
async def watching(url: str, *, first_s: float = HANG_S, **table: Any) -> AsyncIterator[Seen]:
    """Watch pods; `first_s` is the longest wait for the first list."""
    seen = Seen()
    source = KubernetesSource(KubernetesTable(api_server=url, namespace="prod", **table), Path())
    sources = Sources([source], seen)
    await sources.start(first_s)
    yield seen
    await sources.close()


async def test_a_list_comes_in_pages_and_with_the_token(api_server: Given, tmp_path: Path) -> None:
    server, url = api_server
    for n in range(5):
        await server.put(pod(f"p{n}"))
    (tmp_path / "token").write_text("secret\n")
    async with watching(url, token_file=str(tmp_path / "token")) as seen:
        assert seen.names == ["p0", "p1", "p2", "p3", "p4"]
        assert server.lists == 3
        assert set(server.tokens) == {"Bearer secret"}


async def test_a_connection_that_ends_is_resumed_from_the_last_version(
    api_server: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "_AGAIN_S", 0.0)
    server, url = api_server
    await server.put(pod("a"))
    async with watching(url) as seen:
        await turns_until(lambda: len(server.watches) == 1)
        await server.put(pod("b"))
        await turns_until(lambda: seen.names == ["a", "b"])
        await server.bookmark()
        await server.put(pod("c"))
        await turns_until(lambda: seen.names == ["a", "b", "c"])
        await server.cut()
        await server.delete("a")  # while there is no watch
        await turns_until(lambda: seen.names == ["b", "c"])
        assert server.lists == 1  # nothing was asked for twice
        assert server.watches[-1] == "104"


@pytest.mark.parametrize("how", ["status", "event"])
async def test_an_expired_version_begins_with_a_list(
    api_server: Given, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(kubernetes, "_AGAIN_S", 0.0)
    server, url = api_server
    await server.put(pod("a"))
    async with watching(url) as seen:
        await turns_until(lambda: len(server.watches) == 1)
        if how == "event":
            await server.error(410)
        else:
            server.expire()
            await server.cut()
        await server.put(pod("b"))
        await turns_until(lambda: seen.names == ["a", "b"] and server.lists == 2)


async def test_pods_that_cannot_answer_are_no_instances(api_server: Given) -> None:
    server, url = api_server
    await server.put(pod("ready"))
    await server.put(pod("starting", status={"conditions": [{"type": "Ready", "status": "False"}]}))
    await server.put(pod("pending", status={"podIP": ""}))
    await server.put(pod("ending", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}))
    async with watching(url, model_label="model", port="http") as seen:
        assert [(each.name, each.url, each.model) for each in seen.found] == [
            ("ready", "http://10.0.0.5:9000", "m")
        ]
        await server.put(pod("starting"))
        await turns_until(lambda: seen.names == ["ready", "starting"])
        await server.put(pod("ready", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}))
        await turns_until(lambda: seen.names == ["starting"])


def slice_of(name: str, *endpoints: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"gpu": "L40S"}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000}],
        "endpoints": list(endpoints),
    }


def endpoint(address: str, name: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions, "targetRef": {"kind": "Pod", "name": name}}


async def test_the_slices_of_a_service(api_server: Given) -> None:
    server, url = api_server
    await server.put(
        slice_of("s-1", endpoint("10.0.0.1", "a", ready=True), endpoint("10.0.0.2", "b", ready=False))
    )
    await server.put(slice_of("s-2", endpoint("fd00::1", "c"), endpoint("10.0.0.1", "a", ready=True)))
    async with watching(url, resource="endpointslices", service="vllm", port="http") as seen:
        assert {each.name: each.url for each in seen.found} == {
            "a": "http://10.0.0.1:8000",
            "c": "http://[fd00::1]:8000",
        }
        assert seen.found[0].labels == {"gpu": "L40S"}
        await server.put(slice_of("s-1", endpoint("10.0.0.2", "b", ready=True, terminating=True)))
        await server.delete("s-2")
        await turns_until(lambda: seen.names == [])


async def test_a_server_that_refuses_is_asked_again_and_logged_once(
    api_server: Given, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetlb.balancer.fleet.source.BACKOFF_S", 0.0)
    server, url = api_server
    await server.put(pod("a"))
    right = server.handle

    seen = Seen()
    table = KubernetesTable(api_server=url, namespace="prod", token_file="/nonexistent/token")
    sources = Sources([KubernetesSource(table, Path())], seen)
    await sources.start(0.05)
    assert seen.times == 0
    await turns_until(lambda: len(caplog.records) > 0)
    await sources.close()
    assert [r.event for r in caplog.records] == ["discovery_failed"]  # type: ignore[attr-defined]
    assert "/nonexistent/token: expected a token: No such file" in caplog.text
    assert right is not None
    await asyncio.sleep(0)


class Endless:
    """An API server that never ends what it sends: a line of a watch, a list, an answer in few bytes."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        #: Connections that the client ended.
        self.broken = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        watches = "watch" in request.query
        if watches == (self.kind in ("line", "objects")):
            return await self._endless(request)
        if watches:
            await asyncio.sleep(HANG_S)
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": [pod("a")]})

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        headers = {"content-type": "application/json"}
        if self.kind == "gzip":
            headers["content-encoding"] = "gzip"
        reply = web.StreamResponse(headers=headers)
        await reply.prepare(request)
        begun = {
            "line": b'{"type":"ADDED","object":{"metadata":{"name":"',
            "list": b'{"items":[{"metadata":{"name":"',
        }
        try:
            await reply.write(begun.get(self.kind, b""))
            while self.kind in ("line", "list"):
                await reply.write(b"x" * 65_536)
            number = 0
            while self.kind == "objects":
                number += 1
                item = pod(f"{number}", metadata={"labels": {"app": "x" * 60_000}, "resourceVersion": "2"})
                await reply.write(msgspec.json.encode({"type": "ADDED", "object": item}) + b"\n")
            await reply.write(gzip.compress(bytes(1 << 20)))
        finally:
            self.broken += 1
        return reply


@pytest.mark.parametrize(
    ("kind", "limit", "text"),
    [
        ("line", "MAX_LINE_BYTES", "a line has more than 1000000 bytes"),
        ("list", "MAX_PAGE_BYTES", "an answer has more than 1000000 bytes"),
        ("objects", "MAX_OBJECTS_BYTES", "expected objects of at most 1000000 bytes"),
        ("gzip", "MAX_PAGE_BYTES", "expected an answer that is not compressed"),
    ],
)
async def test_what_never_ends_is_given_up_at_its_bound(
    kind: str, limit: str, text: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the bound the source has failed, with a line; its last list stays in force."""
    monkeypatch.setattr(kubernetes, limit, 1_000_000)
    server = Endless(kind)
    lists = kind in ("line", "objects")
    async with (
        api_serving(server.handle) as url, watching(url, first_s=HANG_S if lists else 0.0) as seen
    ):  # fmt: skip
        await turns_until(lambda: any(text in each.getMessage() for each in caplog.records))
        await turns_until(lambda: server.broken > 0)
        assert not lists or "a" in seen.names


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
        max_leaves=20,
    )
)
def test_no_object_is_too_odd(document: Any) -> None:
    """Whatever an object holds is read as an item or refused by the decoder, and nothing else."""
    try:
        item = msgspec.convert(document, Item)
    except (msgspec.ValidationError, TypeError):
        return
    source = KubernetesSource(KubernetesTable(api_server="http://127.0.0.1:1"), Path())
    assert isinstance(source._of_pod(item), list)
    assert isinstance(source._of_slice(item), list)
