"""Instances in Kubernetes: pods by label, or the EndpointSlices of a service, listed once and then watched.

The client is lightkube, with its generic objects: a connection that ends is resumed from the last version. An
expired version (410) begins with a list again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import httpx2
import msgspec
from lightkube import ApiError, AsyncClient
from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import Cluster, Context, User
from lightkube.core.exceptions import ConfigError as KubernetesConfigError
from lightkube.generic_resource import GenericNamespacedResource, create_namespaced_resource
from lightkube.operators import Operator
from lightkube.types import OnErrorAction, OnErrorResult

from hetlb.balancer.config.fleet_tables import GPU_LABELS, ClusterTable, KubernetesTable
from hetlb.balancer.fleet.source import Found, Publish, SourceFailedError
from hetlb.errors import ConfigError
from hetlb.files import content, readable_name
from hetlb.inputs.urls import bracketed
from hetlb.turns import Share

#: Folder of a pod's own token, authority and namespace.
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
#: Seconds after which the server ends a watch, which is given up when nothing comes for a little longer.
WATCH_S: Final = 60
_CONNECT_S: Final = 5.0
_LIST_S: Final = 30.0
#: Seconds between two connections of a watch.
_AGAIN_S: Final = 0.2
#: Objects of one page of a list, read in one turn of the loop: some 15 KB each.
_PAGE_OBJECTS: Final = 100
#: Maximum bytes of a page of a list and of a line of a watch: etcd takes 1.5 MiB for an object.
MAX_PAGE_BYTES: Final = 32 << 20
MAX_LINE_BYTES: Final = 2 << 20
#: Maximum bytes of the read fields of all objects of a watch.
MAX_OBJECTS_BYTES: Final = 64 << 20
#: Connections of a watch that break one after the other before the source has failed.
_MOST_BROKEN_CONNECTIONS: Final = 5
#: Status of a version that the server does not know any more.
_EXPIRED_STATUS: Final = 410
#: Characters of a refusal's reason in the log.
_MOST_REASON: Final = 200
_REFUSED_STATUS: Final = 401


class Metadata(msgspec.Struct, rename="camel"):
    """`metadata` of an object or a list."""

    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    deletion_timestamp: str | None = None
    continue_: str = msgspec.field(default="", name="continue")


class Item(msgspec.Struct, rename="camel"):
    """Part of an object: the fields read here and in `inference_pool`."""

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
    """`spec` of a pod, an InferencePool or an InferenceObjective: the fields read here."""

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


class _Selector(Operator[str]):
    """A selector as the file states it."""

    def __init__(self, text: str) -> None:
        super().__init__("stated", "", text)

    def encode(self, key: str) -> str:
        """Return the selector; `key` is empty."""
        return self.value


class _Bounded(httpx2.AsyncByteStream):
    """Body of an answer with at most `most` bytes: of a page in all, of a watch in a line."""

    def __init__(self, body: httpx2.AsyncByteStream, most: int, *, lines: bool) -> None:
        self._body = body
        self._most = most
        self._lines = lines

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, share = 0, Share()
        async for data in self._body:
            end = data.rfind(b"\n") if self._lines else -1
            size = len(data) - end - 1 if end >= 0 else size + len(data)
            if size > self._most:
                what = "a line" if self._lines else "an answer"
                raise httpx2.StreamError(f"{what} has more than {self._most} bytes")
            yield data
            await share.spent()

    async def aclose(self) -> None:
        await self._body.aclose()


class _Transport(httpx2.AsyncHTTPTransport):
    """Connections that notice a silent server: a watch is asked to end before a read may time out.

    The size of a response is bounded. Compression is off, as a short compressed response could be a very long
    one.
    """

    def __init__(self, tls: ssl.SSLContext, token: Path | None) -> None:
        super().__init__(verify=tls)
        self._token = token
        self._bearer = ""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; a watch is made again no sooner than `_AGAIN_S` after the one before."""
        limits = request.extensions["timeout"]
        request.headers["accept-encoding"] = "identity"
        watches = limits["read"] is None
        if watches:
            limits["read"] = WATCH_S + 15.0
            await asyncio.sleep(_AGAIN_S)
        response = await self._send(request)
        if response.status_code == _REFUSED_STATUS and self._bearer:
            await response.aclose()
            self._bearer = ""
            response = await self._send(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise httpx2.StreamError("expected an answer that is not compressed")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Bounded(
            response.stream, MAX_LINE_BYTES if watches else MAX_PAGE_BYTES, lines=watches
        )
        return response

    async def _send(self, request: httpx2.Request) -> httpx2.Response:
        if self._token is not None and not self._bearer:
            data = await asyncio.to_thread(_read, self._token, "a token")
            if re.fullmatch(rb"[!-~]{1,65536}", data.strip()) is None:
                raise SourceFailedError(f"{self._token}: expected a token of visible ASCII")
            self._bearer = f"Bearer {data.strip().decode()}"
        if self._bearer:
            request.headers["Authorization"] = self._bearer
        return await super().handle_async_request(request)


class ApiServer:
    """Address and credentials of the API server. The token is rotated: after a refusal it is read again."""

    def __init__(self, table: ClusterTable, base: Path) -> None:
        """Find the address. Raises `ConfigError` if it is unknown."""
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
            return content(ACCOUNT / "namespace").decode().strip() or "default"
        return "default"

    async def client(self) -> AsyncClient:
        """Return a client of the server. Raises `SourceFailedError` for files that cannot be read."""
        tls = await asyncio.to_thread(self._credentials)
        config = SingleConfig(
            context_name="hetlb",
            context=Context(cluster="hetlb", namespace=self.namespace),
            cluster=Cluster(server=self.url),
            user=User(),
        )
        limits = httpx2.Timeout(_LIST_S, connect=_CONNECT_S)
        transport = _Transport(tls, self._token)
        return AsyncClient(config=config, timeout=limits, transport=transport, trust_env=False)

    def _credentials(self) -> ssl.SSLContext:
        """Return the TLS context of the server, once the token could be read too."""
        if self._token is not None:
            _read(self._token, "a token")
        if self._ca is None:
            return ssl.create_default_context()
        try:
            with readable_name(self._ca) as name:
                return ssl.create_default_context(cafile=name)
        except OSError as error:
            raise SourceFailedError(f"{self._ca}: expected PEM certificates: {error.strerror}") from error


def _read(path: Path, expected: str) -> bytes:
    try:
        return content(path)
    except OSError as error:
        raise SourceFailedError(f"{path}: expected {expected}: {error.strerror}") from error


def kind_of(group: str, version: str, kind: str) -> type[GenericNamespacedResource]:
    """Return the kind of objects that a list and a watch are of."""
    return create_namespaced_resource(group, version, kind, f"{kind.lower()}s")


PODS: Final = kind_of("", "v1", "Pod")
_SLICES: Final = kind_of("discovery.k8s.io", "v1", "EndpointSlice")


class _Objects:
    """Objects by name, of at most `MAX_OBJECTS_BYTES`."""

    def __init__(self) -> None:
        self.items: dict[str, Item] = {}
        #: Bytes of each as JSON, and of all.
        self._sizes: dict[str, int] = {}
        self._bytes = 0

    def put(self, item: Item) -> None:
        """Keep an object, in place of one of its name. Raises `SourceFailedError` if all are too large."""
        name = item.metadata.name
        self.drop(name)
        self.items[name] = item
        size = self._sizes[name] = len(msgspec.json.encode(item))
        self._bytes += size
        if self._bytes > MAX_OBJECTS_BYTES:
            raise SourceFailedError(f"expected objects of at most {MAX_OBJECTS_BYTES} bytes")

    def drop(self, name: str) -> None:
        self.items.pop(name, None)
        self._bytes -= self._sizes.pop(name, 0)


class Watch:
    """Keeps the objects of a kind, or the one of a `name`; `changed` gets all by name after each change."""

    def __init__(
        self,
        api: ApiServer,
        kind: type[GenericNamespacedResource],
        selector: str,
        changed: Callable[[Mapping[str, Item]], None],
        name: str = "",
    ) -> None:
        self._api = api
        self._kind = kind
        self._only: dict[str, Any] = {"labels": [("", _Selector(selector))]} if selector else {}
        if name:
            self._only["fields"] = {"metadata.name": name}
        self._changed = changed
        self._kept = _Objects()
        self._due: asyncio.Handle | None = None

    async def run(self) -> None:
        """Watch until cancelled. Raises `SourceFailedError` if the server does not answer as expected."""
        client = await self._api.client()
        try:
            while True:
                try:
                    version = await self._list(client)
                    self._publish()
                    await self._follow(client, version)
                except httpx2.HTTPStatusError as error:
                    if _answer(error)[0] != _EXPIRED_STATUS:
                        raise
        except httpx2.HTTPStatusError as error:
            status, reason = _answer(error)
            plural = self._kind._api_info.plural
            raise SourceFailedError(f"{plural} answers {status}: {reason[:_MOST_REASON]}") from error
        except (httpx2.HTTPError, httpx2.StreamError, TimeoutError, KubernetesConfigError) as error:
            raise SourceFailedError(f"{self._api.url}: {str(error) or type(error).__name__}") from error
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
            raise SourceFailedError(f"{self._kind._api_info.plural}: expected objects: {error}") from error
        finally:
            if self._due is not None:
                self._due.cancel()
            await client.close()

    async def _list(self, client: AsyncClient) -> str:
        """Take all objects; return their resource version."""
        kept = _Objects()
        async with asyncio.timeout(_LIST_S):
            listed = client.list(self._kind, chunk_size=_PAGE_OBJECTS, **self._only)
            async for each in listed:
                kept.put(msgspec.convert(dict(each), Item))
        self._kept = kept
        return listed.resourceVersion

    async def _follow(self, client: AsyncClient, version: str) -> None:
        """Take changes from a version on, over as many connections as it takes."""
        changes = client.watch(
            self._kind, server_timeout=WATCH_S, resource_version=version, on_error=_after, **self._only
        )
        async for what, each in changes:
            item = msgspec.convert(dict(each), Item)
            if what == "DELETED":
                self._kept.drop(item.metadata.name)
            elif what != "BOOKMARK":
                self._kept.put(item)
            if self._due is None:  # changes of one read together
                self._due = asyncio.get_running_loop().call_soon(self._publish)

    def _publish(self) -> None:
        self._due = None
        self._changed(self._kept.items)


def _answer(error: httpx2.HTTPStatusError) -> tuple[int, str]:
    """Return status and reason of a refusal, which may be no `Status` of Kubernetes."""
    if isinstance(error, ApiError):
        return error.status.code or 0, error.status.message or ""
    return error.response.status_code, error.response.reason_phrase


def _after(error: Exception, count: int) -> OnErrorResult:
    """Return the next state of a broken watch: another connection, unless the server refuses or is gone."""
    if isinstance(error, httpx2.HTTPStatusError) or count > _MOST_BROKEN_CONNECTIONS:
        return OnErrorResult(OnErrorAction.RAISE)
    return OnErrorResult(OnErrorAction.RETRY)


class ServersOf:
    """Servers of objects. An unchanged object keeps its servers: an answer costs what changed."""

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
        self._kind = PODS if table.resource == "pods" else _SLICES
        if table.resource != "pods" and table.service:
            named = f"kubernetes.io/service-name={table.service}"
            selector = f"{selector},{named}" if selector else named
        self._selector = selector

    async def run(self, publish: Publish) -> None:
        servers = ServersOf(self._of_pod if self._table.resource == "pods" else self._of_slice)
        await Watch(self._api, self._kind, self._selector, lambda items: publish(servers(items))).run()

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
    """Return the server at each of these ports of a pod; none if the pod is not ready or about to end."""
    status, own = pod.status or PodStatus(), pod.metadata.name
    says_so = any(each.type == "Ready" and each.status == "True" for each in status.conditions)
    if not status.pod_ip or not says_so or pod.metadata.deletion_timestamp is not None:
        return []
    # Its own labels, and its node's labels that name the GPU.
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
