"""Tenants are walls: what one does with a name, an id or a table tells or takes nothing from another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import pytest
from proxy.memory import End, Proxy
from proxy.test_hostile import Engines

from hetlb.balancer.clients.api_keys import ClientKeys, Tenant
from hetlb.balancer.clients.prompt_keys import session_key, text_keys
from hetlb.balancer.http.openai_body import Call

KEYS = {name: f"key-of-{name}" for name in ("ann", "bob")}


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def proxy(engines: Engines) -> Iterator[Proxy]:
    made = Proxy(engines, Engines(), policy="hetlb")
    made.server.router.keys = ClientKeys(
        Tenant(name=name, sha256=hashlib.sha256(key.encode()).hexdigest()) for name, key in KEYS.items()
    )
    yield made
    made.close()


def ask(
    proxy: Proxy,
    who: str,
    path: str = "/v1/responses",
    body: bytes = b'{"model":"m","input":"x"}',
    *more: str,
    method: str = "POST",
) -> End:
    client = proxy.client()
    lines = [f"{method} {path} HTTP/1.1", "host: p", f"authorization: Bearer {KEYS[who]}", *more]
    client.send("\r\n".join(lines).encode() + b"\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    proxy.loop.rest()
    return client


def answer(engines: Engines, number: int, response_id: str) -> None:
    body = b'{"id":"%b","object":"response"}' % response_id.encode()
    engines.ends[number].send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


def test_a_client_cannot_name_its_answer(proxy: Proxy, engines: Engines) -> None:
    body = b'{"model":"m","input":"x","request_id":"resp_of_ann"}'
    client = ask(proxy, "bob", body=body)
    assert client.got.startswith(b"HTTP/1.1 400")
    assert b"request_id" in client.got
    assert not engines.ends
    assert ask(proxy, "bob", body=b'{"model":"m","input":"x","request_id":null}').got == b""


def test_no_tenant_can_take_the_id_that_anothers_request_has_at_the_engine(
    proxy: Proxy, engines: Engines
) -> None:
    def at_engine() -> set[bytes]:
        heads = [
            bytes(each.got) for end in proxy.loop.listeners.values() for each in getattr(end, "ends", [])
        ]
        return {head.partition(b"x-request-id: ")[2].split(b"\r\n")[0] for head in heads}

    first = ask(proxy, "ann", "/v1/completions", b'{"model":"m","prompt":"x"}')
    second = ask(proxy, "ann", "/v1/completions", b'{"model":"m","prompt":"x"}', "x-request-id: mine")
    guessed = [label.decode() for label in at_engine()]
    others = [
        ask(proxy, "bob", "/v1/completions", b'{"model":"m","prompt":"x"}', f"x-request-id: {label}")
        for label in guessed
    ]
    assert len(at_engine()) == 4
    for client in (first, second, *others):
        client.leave()
    proxy.loop.rest()


def test_prefixes_and_sessions_of_tenants_have_different_names() -> None:
    call = Call()
    call.text, call.prompt_tokens_total = b'"' + b"the same long prompt " * 500 + b'"', 1000

    def names(owner: str | None) -> set[str]:
        session = session_key(b"chat-1", owner, "m")
        assert session is not None
        return {session[0], *(name for name, _ in text_keys(call, "m", owner))}

    owners = [names(owner) for owner in ("ann", "bob", None)]
    assert len(owners[0]) > 2
    assert not owners[0] & owners[1]
    assert not owners[0] & owners[2]
    assert names("ann") == names("ann")


def test_where_a_prompt_goes_does_not_tell_that_another_tenant_has_sent_it(proxy: Proxy) -> None:
    body = b'{"model":"m","prompt":"%b"}' % (b"secret " * 1000)
    clients = [ask(proxy, who, "/v1/completions", body) for who in ("ann", "bob")]
    held = [exchange.record.request for exchange in proxy.driver.exchanges.values()]
    assert {request.tenant for request in held} == {"ann", "bob"}
    assert not {name for name, _ in held[0].prefix_keys} & {name for name, _ in held[1].prefix_keys}
    for client in clients:
        client.leave()
    proxy.loop.rest()


def test_a_claimed_share_lies_within_the_keys(proxy: Proxy) -> None:
    proxy.server.router._tenant_header = b"x-team"
    client = ask(proxy, "bob", "/v1/completions", b'{"model":"m","prompt":"x"}', "x-team: ann")
    (exchange,) = proxy.driver.exchanges.values()
    assert exchange.record.request.tenant == "bob/ann"
    client.leave()
    proxy.loop.rest()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *((f"/v1/{name}", b"404") for name in ("fleet", "status", "usage", "policy")),
        ("/metrics", b"404"),
        ("/v1/decisions", b"405"),  # vLLM has a path of this name, for POST alone
    ],
)
def test_what_is_known_of_all_tenants_is_not_on_their_listener(
    proxy: Proxy, path: str, status: bytes
) -> None:
    got = bytes(ask(proxy, "bob", path, b"", method="GET").got)
    assert got.startswith(b"HTTP/1.1 " + status)
    assert set(json.loads(got.partition(b"\r\n\r\n")[2])) == {"error"}


def test_a_retry_is_the_requests_own(proxy: Proxy, engines: Engines) -> None:
    same = b'{"model":"m","prompt":"x"}'
    one = ask(proxy, "ann", "/v1/completions", same, "x-request-id: same")
    two = ask(proxy, "bob", "/v1/completions", same, "x-request-id: same")
    numbers = [exchange.record.request.id for exchange in proxy.driver.exchanges.values()]
    assert len(set(numbers)) == 2
    one.leave()
    proxy.loop.rest()
    assert len(proxy.driver.exchanges) == 1
    two.leave()
    proxy.loop.rest()
