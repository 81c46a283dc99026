"""Connections to bootstrap servers are counted, swept and closed like those to engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from proxy.memory import End, Loop

from hetlb.config.fleet_tables import ProxyTable
from hetlb.proxy.access import EngineAccess
from hetlb.proxy.ends import End as LeaseEnd
from hetlb.proxy.engine_pools import EnginePools
from hetlb.proxy.http.http1 import ResponseHead
from hetlb.proxy.side_call import SideCall

PORT = 8998
IDLE_S = 10.0
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Bootstrap(End):
    """A bootstrap server that answers every request."""

    def on_data(self, data: bytes) -> None:
        super().on_data(data)
        self.send(ANSWER)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    loop.listeners[PORT] = Bootstrap
    yield loop
    loop.close()


def asked(loop: Loop, pools: EnginePools) -> None:
    """Ask the bootstrap server of `p` once, and have its answer."""
    answers: list[bytes] = []

    def done(head: ResponseHead, body: bytes) -> None:
        answers.append(body)

    def failed(end: LeaseEnd | None, detail: str) -> None:
        raise AssertionError(detail)

    def lines(own_headers: bytes, passthrough: bool) -> bytes:
        return b"GET /query HTTP/1.1\r\n" + own_headers

    pool = pools.bootstrap("p")
    assert pool is not None
    SideCall(pool, b"GET", lines, b"", done, failed).send()
    loop.rest()
    assert answers == [b"{}"]


def test_a_connection_to_a_bootstrap_server_is_counted_and_swept(loop: Loop) -> None:
    access = {"p": EngineAccess(kv_bootstrap=f"http://127.0.0.1:{PORT}")}
    pools = EnginePools(loop, ProxyTable(upstream_idle_s=IDLE_S), access, lambda then: False)
    asked(loop, pools)
    assert pools.open_connections == 1
    pools.sweep(loop.time() + IDLE_S / 2)
    assert pools.open_connections == 1
    pools.sweep(loop.time() + 2 * IDLE_S)
    loop.rest()
    assert pools.open_connections == 0


def test_an_instance_that_left_takes_the_way_to_its_bootstrap_server_along(loop: Loop) -> None:
    access = {"p": EngineAccess(kv_bootstrap=f"http://127.0.0.1:{PORT}")}
    pools = EnginePools(loop, ProxyTable(upstream_idle_s=IDLE_S), access, lambda then: False)
    asked(loop, pools)
    before = pools.bootstrap("p")
    gone = access.pop("p")
    pools.drop_unused(set())
    assert pools.open_connections == 1  # it may be in use, and ends by itself
    pools.sweep(loop.time() + 2 * IDLE_S)
    pools.drop_unused(set())
    access["p"] = gone
    assert pools.bootstrap("p") is not before
