"""Hand-overs between real vLLM servers that go wrong: never a wrong text, one outcome each, nothing left.

One server reads prompts and two decode, with `kv_load_failure_policy` `fail` and `recompute`, each behind a
relay, so that a failure comes at a chosen moment. `HETLB_SPLIT_TIMES` is how often each is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pair as real
import pytest
import pytest_asyncio
import split_pair
from engines import Server, free_ports
from relay import Dropped, Hook, Relay, Visit
from split_pair import LEASE_S, READER, Address, Answer, body_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
]

TIMES = int(os.environ.get("HETLB_SPLIT_TIMES", "10"))
CONNECTORS = os.environ.get("HETLB_SPLIT_CONNECTORS", ",".join(split_pair.CONNECTORS)).split(",")
FAILS, RECOMPUTES = "fails", "recomputes"
ROLES = {READER: "prefill", FAILS: "decode", RECOMPUTES: "decode"}
#: KV blocks of 128 tokens: few enough that later prompts soon take blocks that were given up.
BLOCKS = 160


class Seat:
    """An address behind which a server can be killed and replaced."""

    def __init__(self, name: str, connector: str, folder: Path, bootstrap: int, core: int) -> None:
        self.name = name
        self.relay = Relay()
        self.server: Server
        self._arguments = name, connector, bootstrap, core
        self._folder = folder
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        """Put a new server there."""
        policy = RECOMPUTES.removesuffix("s") if self.name == RECOMPUTES else "fail"
        spec = split_pair.server_spec(*self._arguments, policy=policy, blocks=BLOCKS)
        (self.server,) = self._stack.enter_context(split_pair.started([spec], self._folder))
        self.relay.target = self.server.url

    def kill(self) -> None:
        """End the server at once."""
        self.server.signal_group(signal.SIGKILL)
        self.server.process.wait()

    def close(self) -> None:
        """End the server, if there is one."""
        self._stack.close()

    def restart(self) -> None:
        """A new server in place of the one that was killed."""
        self.close()
        self.start()


@dataclass(frozen=True)
class Servers:
    """The servers of one connector."""

    connector: str
    bootstrap: int
    seats: Sequence[Seat]


class Bed:
    """The servers, a proxy in front of them that knows of no failure yet, and a client."""

    def __init__(self, servers: Servers, proxy: real.Proxy, client: httpx.AsyncClient) -> None:
        self.connector = servers.connector
        self.seats = {seat.name: seat for seat in servers.seats}
        self.proxy = proxy
        self.client = client
        self._before: dict[str, int] = {}

    async def decode_at(self, name: str) -> None:
        """Let only one server decode."""
        for other in (FAILS, RECOMPUTES):
            state = "ready" if other == name else "drain"
            await self.proxy.admin_json("PUT", f"/v1/fleet/instances/{other}/state", {"state": state})
        self._before = await split_pair.handovers(self.proxy, self.client)

    async def results(self, count: int = TIMES) -> dict[str, int]:
        """Return the hand-overs since `decode_at` by result, once `count` of them are known."""
        found: dict[str, int] = {}

        async def missing() -> int:
            now = await split_pair.handovers(self.proxy, self.client)
            grown = {name: each - self._before.get(name, 0) for name, each in now.items()}
            found.clear()
            found.update({name: each for name, each in grown.items() if each})
            return max(0, count - sum(found.values()))

        await real.until(missing, f"{count} results", 30.0)
        return found

    async def quiet(self) -> None:
        """Nothing is left anywhere, within the lease and the time that ejected servers are left alone."""
        servers = [seat.server for seat in self.seats.values()]
        stepping = asyncio.create_task(self._keep_stepping())
        try:
            await split_pair.quiet(self.proxy, servers, LEASE_S + 60.0)
        finally:
            stepping.cancel()
            await asyncio.gather(stepping, return_exceptions=True)

    async def _keep_stepping(self) -> None:
        """Ask the prefill server for a token now and then.

        Without NIXL's progress thread it answers reads only while its engine steps, and reads of requests
        that were given up hold blocks of the decode server until then.
        """
        body = body_of(8, "a step", max_tokens=1)
        while True:
            with contextlib.suppress(httpx.HTTPError):
                await split_pair.text_alone(self.client, self.seats[READER].server, body)
            await asyncio.sleep(1.0)

    async def ask(self, body: dict[str, Any]) -> Answer:
        return await split_pair.ask(self.client, self.proxy.url, body)

    async def expected(self, bodies: Sequence[dict[str, Any]]) -> list[str]:
        """The texts of one server that computes the prompts itself."""
        server = self.seats[FAILS].server
        return [await split_pair.text_alone(self.client, server, body) for body in bodies]

    async def all_right(self, bodies: Sequence[dict[str, Any]], texts: Sequence[str]) -> list[Answer]:
        """Ask all at once; every answer is whole and right."""
        answers = await asyncio.gather(*(self.ask(body) for body in bodies))
        for answer, text in zip(answers, texts, strict=True):
            assert not answer.error
            assert answer.text == text
        return answers


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CONNECTORS)
async def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Servers]:
    connector = request.param
    split_pair.skip_without_libraries(connector)
    real.make_models()
    split_pair.kv_wheels()
    folder = tmp_path_factory.mktemp(connector)
    (bootstrap,) = free_ports(1)
    seats = [Seat(name, connector, folder, bootstrap, core) for core, name in enumerate(ROLES)]
    async with contextlib.AsyncExitStack() as stack:
        for seat in seats:
            stack.push_async_callback(asyncio.to_thread, seat.close)
            await stack.enter_async_context(seat.relay.running())
        await asyncio.gather(*(asyncio.to_thread(seat.start) for seat in seats))
        yield Servers(connector, bootstrap, seats)


@pytest_asyncio.fixture(loop_scope="module")
async def bed(servers: Servers, tmp_path: Path) -> AsyncIterator[Bed]:
    addresses = [Address(seat.name, seat.relay.url, ROLES[seat.name]) for seat in servers.seats]
    front = split_pair.split_proxy(addresses, servers.connector, servers.bootstrap, tmp_path)
    proxy = await asyncio.to_thread(front.__enter__)
    try:
        async with httpx.AsyncClient(timeout=240.0) as client:
            yield Bed(servers, proxy, client)
    finally:
        await asyncio.to_thread(front.__exit__, None, None, None)


def only(connector: str, *able: str) -> None:
    if connector not in able:
        pytest.skip(f"the protocol of {connector} has nothing of the kind")


def of_leg(leg: str, act: Hook) -> Hook:
    """A hook for one leg of hand-overs."""

    async def hook(visit: Visit) -> None:
        if visit.leg == leg:
            await act(visit)

    return hook


def together(count: int, act: Hook) -> Hook:
    """A hook that holds all of `count` back until the last has come, and then acts once."""
    arrived, acted = [0], asyncio.Event()

    async def hook(visit: Visit) -> None:
        arrived[0] += 1
        if arrived[0] == count:
            await act(visit)
            acted.set()
        await acted.wait()

    return hook


def tells(reached: asyncio.Event) -> Hook:
    """A hook that sets an event."""

    async def hook(visit: Visit) -> None:
        reached.set()

    return hook


def kills(seat: Seat) -> Hook:
    """A hook that ends a server, once."""

    async def hook(visit: Visit) -> None:
        if seat.server.process.poll() is None:
            await asyncio.to_thread(seat.kill)

    return hook


def bodies_of(seed: str, **more: Any) -> list[dict[str, Any]]:
    """As many requests as a failure is made, every other one streamed."""
    return [body_of(300 + 97 * i, f"{seed}{i}", stream=i % 2 == 0, **more) for i in range(TIMES)]


PHASES = {
    "read": (READER, "asked"),
    "handed over": (READER, "answered"),
    "fetched": (FAILS, "asked"),
    "answered": (FAILS, "answered"),
}


@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_leaves(bed: Bed, phase: str) -> None:
    name, moment = PHASES[phase]
    leg = "prefill" if name == READER else "decode"
    await bed.decode_at(FAILS)
    for number in range(TIMES):
        now = asyncio.Event()

        body = body_of(1500, f"{phase}{number}", max_tokens=200, stream=number % 2 == 0)
        with bed.seats[name].relay.hooks(**{moment: of_leg(leg, tells(now))}):
            asked = asyncio.create_task(bed.ask(body))
            reading = asyncio.create_task(now.wait())
            await asyncio.wait((asked, reading), return_when=asyncio.FIRST_COMPLETED)
            assert reading.done()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
    await bed.quiet()
    body = body_of(1000, f"after {phase}")
    await bed.all_right([body], await bed.expected([body]))


async def test_the_parameters_are_lost(bed: Bed) -> None:
    only(bed.connector, "nixl", "nixl-push")

    async def lose(visit: Visit) -> None:
        visit.answer = json.dumps({**json.loads(visit.answer), "kv_transfer_params": None}).encode()

    await bed.decode_at(FAILS)
    bodies = bodies_of("lost")
    texts = await bed.expected(bodies)
    with bed.seats[READER].relay.hooks(answered=of_leg("prefill", lose)):
        await bed.all_right(bodies, texts)
    assert await bed.results() == {"no_params": TIMES}
    await bed.quiet()


@pytest.mark.parametrize("policy", [FAILS, RECOMPUTES])
@pytest.mark.parametrize("source", ["dead", "restarted"])
async def test_a_transfer_fails(bed: Bed, policy: str, source: str) -> None:
    """The parameters name a server that is gone, or one that has restarted since."""
    only(bed.connector, "nixl")
    changed: dict[str, Any] = {"remote_engine_id": str(uuid.uuid4())}
    if source == "dead":
        changed["remote_port"] = free_ports(1)[0]

    async def break_it(visit: Visit) -> None:
        visit.body["kv_transfer_params"] |= changed

    await bed.decode_at(policy)
    bodies = bodies_of(f"{policy}{source}")
    texts = await bed.expected(bodies)
    with bed.seats[policy].relay.hooks(asked=of_leg("decode", break_it)):
        await bed.all_right(bodies, texts)
    results = await bed.results()
    assert results == {"decode_error" if policy == FAILS else "not_fetched": TIMES}
    await bed.quiet()


async def test_the_prefill_server_stands_still_between_the_legs(bed: Bed) -> None:
    only(bed.connector, "nixl", "nixl-push")
    reader = bed.seats[READER]
    await bed.decode_at(FAILS)
    bodies = bodies_of("still")
    texts = await bed.expected(bodies)

    async def stop(visit: Visit) -> None:
        reader.server.signal_group(signal.SIGSTOP)

    try:
        with reader.relay.hooks(answered=of_leg("prefill", together(TIMES, stop))):
            await bed.all_right(bodies, texts)
    finally:
        reader.server.signal_group(signal.SIGCONT)
    results = await bed.results()
    assert results == {"late": TIMES}
    await bed.quiet()
    await bed.all_right(bodies, texts)


async def test_the_decode_server_stands_still_beyond_the_lease(bed: Bed) -> None:
    """Meanwhile the blocks get other prompts; afterwards the prompts are asked for again."""
    only(bed.connector, "nixl", "nixl-push", "mooncake")
    reader, decoder = bed.seats[READER], bed.seats[FAILS]
    await bed.decode_at(FAILS)
    bodies = bodies_of("late")
    texts = await bed.expected(bodies)

    read = [0]

    async def count(visit: Visit) -> None:
        read[0] += 1

    async def unread() -> int:
        return TIMES - read[0]

    decoder.server.signal_group(signal.SIGSTOP)
    try:
        with reader.relay.hooks(answered=of_leg("prefill", count)):
            asked = asyncio.create_task(bed.all_right(bodies, texts))
            await real.until(unread, "prompts that were read", 30.0)
        await asyncio.sleep(LEASE_S + 1.0)  # the lease itself is what is waited for
        for other in range(BLOCKS * 128 // 3000 + 1):
            await split_pair.text_alone(bed.client, reader.server, body_of(3000, f"other{other}"))
    finally:
        decoder.server.signal_group(signal.SIGCONT)
    await asked
    assert await bed.results() == {"late": TIMES}
    await bed.quiet()
    await bed.all_right(bodies, texts)


async def test_the_decode_server_refuses(bed: Bed) -> None:
    only(bed.connector, "nixl", "nixl-push")
    await bed.decode_at(FAILS)
    bodies = bodies_of("refuses")
    texts = await bed.expected(bodies)

    async def refuse(visit: Visit) -> None:
        raise Dropped

    for body, text in zip(bodies, texts, strict=True):
        with bed.seats[FAILS].relay.hooks(asked=of_leg("decode", refuse)):
            await bed.all_right([body], [text])
        await bed.proxy.idle(60.0)  # a server that drops requests is ejected for a while
    # Once it has dropped one it takes part in no pair until it answers well.
    results = await bed.results(1)
    assert 1 <= results.pop("decode_failed") <= TIMES
    assert not results
    await bed.quiet()


async def test_servers_are_killed(bed: Bed) -> None:
    """A decode server, when it is asked or while it answers, and then the prefill server after its leg."""
    outcomes: list[dict[str, int]] = []
    for number in range(TIMES):
        victim, other = (FAILS, RECOMPUTES) if number % 2 else (RECOMPUTES, FAILS)
        reader, decoder = bed.seats[READER], bed.seats[victim]
        begun = number % 4 < 2
        bodies = [
            body_of(
                700, f"decoder{number}", stream=begun or number % 3 == 0, max_tokens=300 if begun else 10
            ),
            body_of(900, f"reader{number}", stream=number % 2 == 0),
            body_of(500, f"without{number}"),
        ]
        texts = await bed.expected(bodies)

        await bed.decode_at(victim)
        with decoder.relay.hooks(**{"answered" if begun else "asked": of_leg("decode", kills(decoder))}):
            answer = await bed.ask(bodies[0])
        if begun:  # the client has had a part of the text, and is told that it is no more than that
            assert answer.error
            assert texts[0].startswith(answer.text)
        else:
            assert (answer.text, answer.error) == (texts[0], "")

        await bed.decode_at(other)
        with reader.relay.hooks(answered=of_leg("prefill", kills(reader))):
            await bed.all_right(bodies[1:2], texts[1:2])
        outcomes.append(await bed.results(1))
        print(bed.connector, "killed", number + 1, "times:", outcomes[-1], flush=True)
        await bed.all_right(bodies[2:], texts[2:])
        await asyncio.gather(*(asyncio.to_thread(seat.restart) for seat in (reader, decoder)))
        await bed.quiet()
    if bed.connector == "nixl":
        assert outcomes == [{"decode_error": 1}, {"not_fetched": 1}] * (TIMES // 2)
    body = body_of(1000, "after all")
    await bed.all_right([body], await bed.expected([body]))
