"""Clients that never come again: what is kept of them, and what a request costs, has a bound."""

from __future__ import annotations

import gc
import json
import time
from collections import deque
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest
from fuzz import costs
from proxy.memory import End, Proxy

from hetlb.balancer.core import fair_shares, predictor
from hetlb.balancer.core.evidence import clients as of_clients
from hetlb.balancer.core.evidence import kinds
from hetlb.balancer.telemetry import counters
from hetlb.build import compiled

pytestmark = pytest.mark.skipif(compiled(), reason="constants of compiled modules cannot be replaced")
ANSWER = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":700,'
    b'"completion_tokens":5,"total_tokens":705}}'
)
HEAD = b"HTTP/1.1 %d OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
ASK = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nx-tenant: t%d\r\nx-session-id: s%d\r\n"
    b"x-request-id: r%d\r\ncontent-length: %d\r\n\r\n%b"
)
#: Clients before the first look; more come than any bound that is set here.
CLIENTS = 160
#: Clients at once.
AT_ONCE = 4


class Engine(End):
    """It answers each request, one in ten with an error unless all are `well`."""

    def __init__(self, well: bool) -> None:
        super().__init__()
        self._asked, self._well = 0, well

    def on_data(self, data: bytes) -> None:
        self.got += data
        while (end := self.got.find(b"\r\n\r\n") + 4) > 3:
            length = int(bytes(self.got[:end]).lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            if len(self.got) < end + length:
                return
            del self.got[: end + length]
            self._asked += 1
            self.send(HEAD % (200 if self._well or self._asked % 10 else 400, len(ANSWER), ANSWER))


class Clients:
    """A proxy, and clients of which none comes again."""

    def __init__(self, well: bool = True) -> None:
        engines = [partial(Engine, well)] * 3
        self.proxy = Proxy(*engines, policy="hetlb", tenant_header="x-tenant")
        self._number = 0

    def ask(self, count: int) -> None:
        """Let that many clients ask, a few at once."""
        loop = self.proxy.loop
        for _ in range(count // AT_ONCE):
            ends = [self._client() for _ in range(AT_ONCE)]
            loop.rest()
            loop.turn(0.01)
            for end in ends:
                assert end.got.startswith(b"HTTP/1.1 "), end.got
                end.leave()
            loop.rest()
            self.proxy.ended.clear()

    def _client(self) -> End:
        self._number += 1
        number, end = self._number, self.proxy.client()
        messages = [{"role": "user", "content": f"{number} " + "word " * 300}]
        body = json.dumps({"model": "m", "messages": messages, "max_tokens": 1000 + number}).encode()
        end.send(ASK % (number, number, number, len(body), body))
        return end

    def kept(self) -> int:
        """Return the number of entries in all that the proxy reaches."""
        proxy, seen, found = self.proxy, set[int](), 0
        open_: list[Any] = [proxy.scheduler, proxy.driver, proxy.scheduling, proxy.server]
        while open_:
            each = open_.pop()
            if id(each) in seen or isinstance(
                each, (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
            ):
                continue
            seen.add(id(each))
            if isinstance(each, (dict, list, deque, set)):
                found += len(each)
            open_ += gc.get_referents(each)
        return found


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Clients:
    """Clients of a proxy with small bounds: they are reached soon."""
    monkeypatch.setattr(predictor, "MOST_TENANTS", 64)
    monkeypatch.setattr(counters, "MAX_ACCOUNTS", 64)
    monkeypatch.setattr(counters, "_BATCH_VALUES", 64)
    monkeypatch.setattr(fair_shares, "_IDLE_TENANTS", 64)
    monkeypatch.setattr(of_clients, "_MOST_CLIENTS", 64)
    monkeypatch.setattr(kinds, "_MOST_KINDS", 64)
    monkeypatch.setattr(kinds, "_MOST_ASKERS", 64)
    found = Clients(well=False)
    found.proxy.scheduler.fleet.prefixes.most_unused = 64
    return found


def test_what_is_kept_of_clients_has_a_bound(clients: Clients) -> None:
    """The most of several looks: a table of heads is emptied when it is full."""

    def most() -> int:
        looks = []
        for _ in range(8):
            clients.ask(CLIENTS)
            looks.append(clients.kept())
        return max(looks)

    assert most() + CLIENTS > most()


def test_a_request_costs_the_same_after_many_clients() -> None:
    """It was seventeen times as much after 18,000 tenants."""
    clients = Clients()
    clients.ask(CLIENTS)

    def cost_s() -> float:
        began = time.thread_time()
        clients.ask(CLIENTS)
        return time.thread_time() - began

    first = min(cost_s() for _ in range(3))
    clients.ask(24 * CLIENTS)
    assert costs.least(lambda _: cost_s() / first, 2.0) < 2.0
