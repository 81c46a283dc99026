"""Requests at work of which one raises: scenarios, engines, and doubles of the methods that raise."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import pytest
from helpers import HANG_S, turns_until
from proxy.conftest import Proxy
from proxy.test_proxying import Start
from proxy.upstreams import DONE, LAST, SSE_HEAD, STREAM, Upstream, Visit, chunk, plain

from hetlb.balancer.core.facts import AdminStateSet, EngineSample
from hetlb.balancer.core.types import AdminState
from hetlb.balancer.exchange import exchange
from hetlb.balancer.exchange.exchange_states import Phase

LABEL = "poison"
#: The way to the guard itself.
NOT_DOUBLED = {"fault", "__init__"}
#: An event of vLLM with token ids, and the first one with the prompt's too.
TEXT = b'"index":0,"text":"tok","logprobs":null,"finish_reason":null,"token_ids":[5]'
EVENT = b'data: {"id":"c","created":1,"model":"m","choices":[{%b}]}\n\n' % TEXT
FIRST = EVENT.replace(b'"token_ids"', b'"prompt_token_ids":[1,2],"token_ids"')

Scenario: TypeAlias = Callable[["Scene"], Awaitable[None]]


class Raised(Exception):
    """Error that a double raises."""


class Double:
    """Methods, of which one raises while the poisoned request is at work."""

    def __init__(self) -> None:
        self.called: set[tuple[type, str]] = set()
        self.raising: tuple[type, str] | None = None
        #: Number of times that it raises.
        self.left = 0
        self._inside: list[bool] = []

    def around(self, owner: type, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(of: Any, *args: Any, **more: Any) -> Any:
            at = getattr(of, "exchange", of)  # of an attempt
            entered = isinstance(at, exchange.Exchange)
            if entered:
                self._inside.append(at.record.label == LABEL)
            try:
                if self._inside and self._inside[-1]:
                    self.called.add((owner, name))
                    if self.raising == (owner, name) and self.left:
                        self.left -= 1
                        raise Raised(name)
                return method(of, *args, **more)
            finally:
                if entered:
                    self._inside.pop()

        return call


def doubled(monkeypatch: pytest.MonkeyPatch, parts: tuple[type, ...]) -> Double:
    """Put a double around each method of these classes."""
    made = Double()
    for owner in parts:
        for name, found in list(vars(owner).items()):
            if name in NOT_DOUBLED:
                continue
            if isinstance(found, property):
                assert found.fget is not None
                monkeypatch.setattr(owner, name, property(made.around(owner, name, found.fget)))
            elif callable(found):
                monkeypatch.setattr(owner, name, made.around(owner, name, found))
    return made


class Scene:
    """A proxy with two engines: the poisoned request, one that is served, and one whose engine is silent."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.poisoned = b""
        self.closing: list[asyncio.StreamWriter] = []

    async def ask(self, label: str, **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        body = {"model": "m", "prompt": "hi", "stream": True, "max_tokens": 9, "temperature": 0, **more}
        sent = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.proxy.port)
        self.closing.append(writer)
        head = "POST /v1/completions HTTP/1.1\r\nhost: h\r\nconnection: close\r\nx-request-id: {}\r\n"
        head += "content-type: application/json\r\ncontent-length: {}\r\n\r\n"
        writer.write(head.format(label, len(sent)).encode() + sent)
        return reader, writer

    def sweep(self) -> None:
        self.proxy.driver.swept(0.0)

    async def at_engine(self, label: str, phase: Phase = Phase.SENT) -> None:
        """Wait until a request has come to an engine, or has ended."""
        phases = phase, Phase.STREAMING
        await turns_until(lambda: self.ended(label) or (
            (each := self.found(label)) is not None and each.phase in phases
        ))  # fmt: skip

    def ended(self, label: str) -> bool:
        return any(each.label == label for each in self.proxy.exchanges)

    def found(self, label: str) -> exchange.Exchange | None:
        return next(
            (each for each in self.proxy.driver.exchanges.values() if each.record.label == label), None
        )


async def read_all(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(HANG_S):
        with contextlib.suppress(ConnectionError):
            return await reader.read()
    return b""


# --- what becomes of the poisoned request ---


async def whole(scene: Scene) -> None:
    """A stream, a sweep in the middle of it."""
    reader, _ = await scene.ask(LABEL)
    await scene.at_engine(LABEL)
    scene.sweep()
    scene.poisoned = await read_all(reader)


async def plainly(scene: Scene) -> None:
    """An answer without a stream."""
    reader, _ = await scene.ask(LABEL, stream=False)
    scene.poisoned = await read_all(reader)


async def waits(scene: Scene) -> None:
    """It waits for an instance with heartbeats, then is served."""
    for each in scene.proxy.scheduler.instances:
        scene.proxy.scheduling.change(AdminStateSet(each.name, AdminState.DRAIN))
    reader, _ = await scene.ask(LABEL)
    await turns_until(lambda: len(scene.proxy.scheduler.queue) or scene.ended(LABEL))
    scene.sweep()
    for each in scene.proxy.scheduler.instances:
        scene.proxy.scheduling.change(AdminStateSet(each.name, AdminState.READY))
    scene.poisoned = await read_all(reader)


async def leaves(scene: Scene) -> None:
    """Its client leaves in the middle."""
    reader, writer = await scene.ask(LABEL, user="begun")
    await scene.at_engine(LABEL, Phase.STREAMING)
    writer.transport.abort()
    await turns_until(lambda: scene.ended(LABEL))
    scene.poisoned = b"HTTP/1.1 "
    await read_all(reader)


async def leaves_the_queue(scene: Scene) -> None:
    """Its client leaves while it waits."""
    for each in scene.proxy.scheduler.instances:
        scene.proxy.scheduling.change(AdminStateSet(each.name, AdminState.DRAIN))
    _, writer = await scene.ask(LABEL)
    await turns_until(lambda: len(scene.proxy.scheduler.queue) or scene.ended(LABEL))
    writer.transport.abort()
    await turns_until(lambda: scene.ended(LABEL))
    for each in scene.proxy.scheduler.instances:
        scene.proxy.scheduling.change(AdminStateSet(each.name, AdminState.READY))
    scene.poisoned = b"HTTP/1.1 "


async def shuts_down(scene: Scene) -> None:
    """The process ends while it is at its engine."""
    reader, _ = await scene.ask(LABEL, user="begun")
    await scene.at_engine(LABEL, Phase.STREAMING)
    if (found := scene.found(LABEL)) is not None:
        others = {each.record.request.id: each for each in scene.proxy.driver.exchanges.values()}
        scene.proxy.driver.exchanges = {found.record.request.id: found}
        scene.proxy.driver.shut_down()
        del others[found.record.request.id]
        scene.proxy.driver.exchanges.update(others)
    scene.poisoned = await read_all(reader)


async def moves(scene: Scene) -> None:
    """Its instance is given notice while the answer runs."""
    reader, _ = await scene.ask(LABEL, user="begun")
    await scene.at_engine(LABEL, Phase.STREAMING)
    found = scene.found(LABEL)
    if found is not None and found.record.lease is not None:
        name = found.record.lease.instance
        scene.proxy.scheduling.change(AdminStateSet(name, AdminState.READY, deadline_s=0.0))
        scene.sweep()
        scene.proxy.scheduling.change(AdminStateSet(name, AdminState.READY))
    scene.poisoned = await read_all(reader)


SCENARIOS: tuple[Scenario, ...] = (whole, plainly, waits, leaves, leaves_the_queue, shuts_down)
#: Answers of the engine to the first visits of the poisoned request; then it is whole.
ENGINES: dict[str, tuple[bytes, ...]] = {
    "well": (),
    "drops": (b"",),
    "breaks": (SSE_HEAD + chunk(FIRST) + chunk(EVENT) + chunk(EVENT),),
    "busy": (plain(b"{}", b"503 Service Unavailable", b"retry-after: 1\r\n"),),
    "fails": (SSE_HEAD + chunk(FIRST) + chunk(b'data: {"error":{"message":"x","code":500}}\n\n') + LAST,),
}
RUNS = [(whole, engine) for engine in ENGINES if engine != "well"] + [(each, "well") for each in SCENARIOS]


def engine_script(broken: tuple[bytes, ...]) -> Callable[[Visit], Awaitable[None]]:
    seen = iter(broken)

    async def script(visit: Visit) -> None:
        if b"x-request-id: silent" in visit.head:
            await visit.until_left()
        elif b"x-request-id: poison" not in visit.head:
            visit.send(STREAM)
        elif b'"begun"' in visit.body and b'"prompt": "hi"' in visit.body:
            visit.send(SSE_HEAD + chunk(FIRST) + chunk(EVENT))
            await visit.until_left()
            visit.writer.close()
        elif (answer := next(seen, None)) is not None:
            visit.send(answer)
            visit.writer.close()
        elif b'"stream": true' in visit.body or b'"stream":true' in visit.body:
            visit.send(SSE_HEAD + chunk(FIRST) + chunk(EVENT) + chunk(DONE) + LAST)
        else:
            visit.send(plain())

    return script


@contextlib.contextmanager
def nothing_escapes() -> Iterator[None]:
    """Check that no error came to the event loop."""
    escaped: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: escaped.append(context))
    try:
        yield
    finally:
        loop.set_exception_handler(None)
    assert not escaped


async def run(start: Start, scenario: Scenario, engine: str, **table: Any) -> None:
    """One scenario, with its innocent requests, and the clocks afterwards."""
    script = engine_script(ENGINES[engine])
    async with Upstream(script) as one, Upstream(script) as two:
        proxy = await start(
            one.url, two.url, heartbeat_s=1e-9, first_byte_timeout_s=1e-3, idle_timeout_s=1e6, **table
        )
        for each in proxy.scheduler.instances:
            proxy.scheduling.sample(each.name, EngineSample(engine="vllm"))
        scene = Scene(proxy)
        proxy.driver.configure(proxy.driver.table)
        before, _ = await scene.ask("served-1")
        assert (await read_all(before)).endswith(DONE + b"\r\n" + LAST)
        silent, _ = await scene.ask("silent")
        await scene.at_engine("silent")
        with nothing_escapes():
            await scenario(scene)
            # The others, the clocks and the ledger.
            after, _ = await scene.ask("served-2")
            assert (await read_all(after)).endswith(DONE + b"\r\n" + LAST)
            loop = asyncio.get_running_loop()
            until = loop.time() + 0.002
            await turns_until(lambda: loop.time() > until)
            scene.sweep()
            assert b"first_byte_timeout" in await read_all(silent)
            await turns_until(lambda: not proxy.driver.exchanges)
            await proxy.settled()
            for writer in scene.closing:
                writer.close()
            # A connection on which an exchange failed carries no other.
            await turns_until(lambda: not any(pool.busy for pool in proxy.driver.pools.all()))


async def check(
    scenario: Scenario, engine: str, times: int, start: Start, double: Double,
    caplog: pytest.LogCaptureFixture, **table: Any,
) -> None:  # fmt: skip
    """Let each method that a scenario calls raise: its own request ends, no other notices."""
    await run(start, scenario, engine, **table)
    methods = sorted(double.called, key=lambda each: (each[0].__name__, each[1]))
    raised = 0
    for method in methods:
        caplog.clear()
        double.raising, double.left = method, times
        with caplog.at_level(logging.ERROR):
            await run(start, scenario, engine, **table)
        double.raising = None
        if double.left == times:
            continue  # a step that depends on what came first
        raised += 1
        told = [each for each in caplog.records if "ends alone" in each.getMessage()]
        assert told, method
        assert all("\n" not in each.getMessage() and not each.exc_info for each in told)
    assert raised > len(methods) / 2
