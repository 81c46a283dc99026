"""Instances in Kubernetes: pods by label, or the EndpointSlices of a service, listed once and then watched.

See "Efficient detection of changes" in Kubernetes' API concepts: a connection that ends is resumed from the
last version or bookmark, an expired version (410) begins with a list again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import aiohttp
import msgspec

from hetlb.config.discovery import GPU_LABELS, ClusterTable, KubernetesTable
from hetlb.config.urls import bracketed
from hetlb.errors import ConfigError
from hetlb.proxy.discovery.source import Found, Publish, SourceFailedError

#: Folder of a pod's own token, authority and namespace.
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
#: A watch is ended by the server after so long, and given up when nothing comes for a little longer.
WATCH_S: Final = 60
_CONNECT_S: Final = 5.0
_LIST_S: Final = 30.0
#: A connection that ended is made again after so long.
_AGAIN_S: Final = 0.2
#: Objects of one page of a list.
_PAGE: Final = 500
#: A longer line is no object.
_MOST_BYTES: Final = 16 << 20
#: A page of a list has no more bytes than this.
_MOST_PAGE_BYTES: Final = 64 << 20


class Metadata(msgspec.Struct, rename="camel"):
    """`metadata` of an object or a list."""

    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    deletion_timestamp: str | None = None
    continue_: str = msgspec.field(default="", name="continue")


class Item(msgspec.Struct, rename="camel"):
    """Part of an object: what is read of those that are watched here and in `inference_pool`."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: Spec | None = None
    status: PodStatus | None = None
    endpoints: list[Endpoint] | None = None
    ports: list[SlicePort] | None = None


class ContainerPort(msgspec.Struct, rename="camel"):
    container_port: int
    name: str = ""


class Container(msgspec.Struct):
    ports: list[ContainerPort] = []


class Selector(msgspec.Struct, rename="camel"):
    match_labels: dict[str, str] = {}


class TargetPort(msgspec.Struct):
    """A port of an InferencePool: with several, each is an engine of its own in every pod."""

    number: int


class PoolReference(msgspec.Struct):
    """The pool of an InferenceObjective."""

    name: str = ""


class Spec(msgspec.Struct, rename="camel"):
    """`spec` of a pod, an InferencePool or an InferenceObjective: what is read of each."""

    node_selector: dict[str, str] = {}
    containers: list[Container] = []
    selector: Selector | None = None
    target_ports: list[TargetPort] = []
    pool_ref: PoolReference | None = None
    priority: int | None = None


class Condition(msgspec.Struct):
    type: str
    status: str


class PodStatus(msgspec.Struct, rename="camel"):
    pod_ip: str = msgspec.field(default="", name="podIP")
    phase: str = ""
    conditions: list[Condition] = []


class PodTarget(msgspec.Struct):
    name: str = ""


class Conditions(msgspec.Struct):
    """Conditions of an endpoint; `ready` None counts as ready (EndpointSlice v1)."""

    ready: bool | None = None
    terminating: bool | None = None


class Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str] = []
    conditions: Conditions = msgspec.field(default_factory=Conditions)
    target_ref: PodTarget | None = None


class SlicePort(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class ItemList(msgspec.Struct):
    metadata: Metadata
    items: list[Item] | None = None


class WatchEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


class ResponseStatus(msgspec.Struct):
    code: int = 0
    message: str = ""


class ExpiredError(Exception):
    """The server does not know the version any more (410)."""


class ApiServer:
    """Address and credentials of the API server. The token is read anew for every request: it is rotated."""

    def __init__(self, table: ClusterTable, base: Path) -> None:
        """Raises `ConfigError` where the address is not known."""
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if table.api_server is None and not host:
            raise ConfigError(
                "discovery.kubernetes.api_server: expected a URL outside of a cluster, but the key is missing"
            )
        self.url = (table.api_server or f"https://{bracketed(host)}:{port}").rstrip("/")
        own = table.api_server is None
        self._token = self._path(table.token_file, base, ACCOUNT / "token" if own else None)
        self._ca = self._path(table.ca_file, base, ACCOUNT / "ca.crt" if own else None)
        self.namespace = table.namespace or self._own_namespace()

    @staticmethod
    def _path(name: str | None, base: Path, default: Path | None) -> Path | None:
        return default if name is None else base / name

    @staticmethod
    def _own_namespace() -> str:
        with contextlib.suppress(OSError):
            return (ACCOUNT / "namespace").read_text().strip() or "default"
        return "default"

    def tls(self) -> ssl.SSLContext | bool:
        """The authorities that may have signed its certificate. Raises `SourceFailedError`."""
        if self._ca is None:
            return True
        try:
            return ssl.create_default_context(cafile=self._ca)
        except OSError as error:
            raise SourceFailedError(f"{self._ca}: expected PEM certificates: {error.strerror}") from error

    def headers(self) -> dict[str, str]:
        """The token as a header. Raises `SourceFailedError`."""
        if self._token is None:
            return {}
        try:
            return {"authorization": f"Bearer {self._token.read_text().strip()}"}
        except OSError as error:
            raise SourceFailedError(f"{self._token}: expected a token: {error.strerror}") from error


class Watch:
    """Keeps the objects at a path, or the one of a `name`; `changed` gets all by name after each change."""

    def __init__(
        self,
        api: ApiServer,
        path: str,
        selector: str,
        changed: Callable[[Mapping[str, Item]], None],
        name: str = "",
    ) -> None:
        self._api = api
        self._path = path
        self._query = {"labelSelector": selector} if selector else {}
        if name:
            self._query["fieldSelector"] = f"metadata.name={name}"
        self._changed = changed
        self._items: dict[str, Item] = {}
        self._version = ""

    async def run(self) -> None:
        """Watch until cancelled. Raises `SourceFailedError` where a list fails."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=WATCH_S + 15)
        connector = aiohttp.TCPConnector(ssl=self._api.tls())
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            while True:
                try:
                    async with asyncio.timeout(_LIST_S):
                        await self._list(session)
                except aiohttp.ClientError as error:
                    raise SourceFailedError(f"{self._api.url}: {error}") from error
                self._changed(self._items)
                with contextlib.suppress(ExpiredError):
                    while True:
                        await self._resume(session)

    async def _resume(self, session: aiohttp.ClientSession) -> None:
        """One connection of the watch, until it ends. Raises `ExpiredError`."""
        try:
            async for lines in self._lines(session):
                try:
                    for line in lines:
                        self._take(msgspec.json.decode(line, type=WatchEvent))
                finally:
                    self._changed(self._items)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
            pass  # whatever broke: what was seen until then is known, and the version with it
        await asyncio.sleep(_AGAIN_S)

    async def _list(self, session: aiohttp.ClientSession) -> None:
        items: dict[str, Item] = {}
        page = ""
        while True:
            query = {**self._query, "limit": str(_PAGE), **({"continue": page} if page else {})}
            async with session.get(self._url(query), headers=self._api.headers()) as reply:
                body = await self._body(reply)
                if reply.status == 410 and page:  # the pages are too old: from the beginning
                    items, page = {}, ""
                    continue
                if reply.status != 200:
                    raise SourceFailedError(f"{self._path} answers {reply.status}: {_message(body)}")
            try:
                part = msgspec.json.decode(body, type=ItemList)
            except msgspec.DecodeError as error:
                raise SourceFailedError(f"{self._path}: expected a list of objects: {error}") from error
            items.update((each.metadata.name, each) for each in part.items or ())
            page = part.metadata.continue_
            if not page:
                self._items, self._version = items, part.metadata.resource_version
                return

    async def _lines(self, session: aiohttp.ClientSession) -> AsyncIterator[list[bytes]]:
        """The lines of one connection, those that came together at a time."""
        query = {
            **self._query,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(WATCH_S),
        }
        async with session.get(self._url(query), headers=self._api.headers()) as reply:
            if reply.status == 410:
                raise ExpiredError
            if reply.status != 200:
                raise SourceFailedError(
                    f"{self._path} answers {reply.status}: {_message(await self._body(reply))}"
                )
            rest = bytearray()
            async for piece in reply.content.iter_any():
                ended, newline, begun = piece.rpartition(b"\n")
                lines = bytes(rest + ended).split(b"\n") if newline else []
                if newline:
                    rest.clear()
                rest += begun
                if len(rest) > _MOST_BYTES:
                    raise SourceFailedError(f"{self._path}: a line has more than {_MOST_BYTES} bytes")
                if whole := [line for line in lines if line.strip()]:
                    yield whole

    async def _body(self, reply: aiohttp.ClientResponse) -> bytes:
        """A whole answer. Raises `SourceFailedError` where it is too long."""
        body = bytearray()
        async for piece in reply.content.iter_any():
            body += piece
            if len(body) > _MOST_PAGE_BYTES:
                raise SourceFailedError(f"{self._path}: an answer has more than {_MOST_PAGE_BYTES} bytes")
        return bytes(body)

    def _take(self, event: WatchEvent) -> None:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=ResponseStatus)
            if status.code == 410:
                raise ExpiredError
            raise SourceFailedError(f"{self._path}: {status.message or status.code}")
        item = msgspec.json.decode(event.object, type=Item)
        self._version = item.metadata.resource_version or self._version
        if event.type == "BOOKMARK":
            return
        if event.type == "DELETED":
            self._items.pop(item.metadata.name, None)
        else:
            self._items[item.metadata.name] = item

    def _url(self, query: Mapping[str, str]) -> str:
        return f"{self._api.url}{self._path}?{urlencode(query)}"


def _message(body: bytes) -> str:
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(body, type=ResponseStatus).message[:200]
    return "no reason given"


class ServersOf:
    """Servers of objects. Those of an object that is as before are the same: an answer costs what changed."""

    def __init__(self, make: Callable[[Item], list[Found]]) -> None:
        self._make = make
        self._known: dict[str, tuple[Item, list[Found]]] = {}

    def __call__(self, items: Mapping[str, Item]) -> list[Found]:
        known, self._known = self._known, {}
        for name, item in items.items():
            before = known.get(name)
            self._known[name] = before if before and before[0] is item else (item, self._make(item))
        # Two slices may hold one endpoint while it moves.
        servers = {each.name: each for _, found in self._known.values() for each in found}
        return list(servers.values())


class KubernetesSource:
    """The servers of one selector or service."""

    def __init__(self, table: KubernetesTable, base: Path) -> None:
        self._table = table
        self._api = ApiServer(table, base)
        namespace = self._api.namespace
        self.name = f"kubernetes {table.resource} {table.service or table.selector} in {namespace}"
        selector = table.selector
        if table.resource == "pods":
            self._path = f"/api/v1/namespaces/{namespace}/pods"
        else:
            self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
            if table.service:
                named = f"kubernetes.io/service-name={table.service}"
                selector = f"{selector},{named}" if selector else named
        self._selector = selector

    async def run(self, publish: Publish) -> None:
        servers = ServersOf(self._of_pod if self._table.resource == "pods" else self._of_slice)
        await Watch(self._api, self._path, self._selector, lambda items: publish(servers(items))).run()

    def _of_pod(self, item: Item) -> list[Found]:
        port, containers = self._table.port, (item.spec or Spec()).containers
        if isinstance(port, int):
            return servers_of(item, [port], self._table)
        named = [each.container_port for every in containers for each in every.ports if each.name == port]
        return servers_of(item, named[:1], self._table)

    def _of_slice(self, item: Item) -> list[Found]:
        servers: list[Found] = []
        port = self._slice_port(item)
        for endpoint in item.endpoints or ():
            conditions = endpoint.conditions
            if conditions.ready is False or conditions.terminating or not endpoint.addresses or not port:
                continue
            name = endpoint.target_ref.name if endpoint.target_ref is not None else ""
            servers.append(_found_at(self._table, name, endpoint.addresses[0], port, item.metadata.labels))
        return servers

    def _slice_port(self, item: Item) -> int | None:
        wanted = self._table.port
        for each in item.ports or ():
            if wanted in (each.port, each.name):
                return each.port
        return wanted if isinstance(wanted, int) else None


def servers_of(pod: Item, ports: list[int], table: KubernetesTable) -> list[Found]:
    """The server at each of these ports of a pod; none where it is not ready, or about to end."""
    status, own = pod.status or PodStatus(), pod.metadata.name
    says_so = any(each.type == "Ready" and each.status == "True" for each in status.conditions)
    if not status.pod_ip or not says_so or pod.metadata.deletion_timestamp is not None:
        return []
    # Its own labels, and those of its node that say what GPU it has.
    node = {} if pod.spec is None else pod.spec.node_selector
    labels = {name: value for name, value in node.items() if name in GPU_LABELS} | pod.metadata.labels
    # As the reference picker of InferencePools names them.
    names = [own] if len(ports) == 1 else [f"{own}-rank-{rank}" for rank in range(len(ports))]
    return [
        _found_at(table, name, status.pod_ip, port, labels) for name, port in zip(names, ports, strict=True)
    ]


def _found_at(table: KubernetesTable, name: str, address: str, port: int, labels: Mapping[str, str]) -> Found:
    where = f"{bracketed(address)}:{port}"
    model = labels.get(table.model_label, "") if table.model_label else ""
    return Found(
        name=name or where,
        url=f"{table.scheme}://{where}",
        model=model or table.model or "",
        labels=dict(labels),
    )
