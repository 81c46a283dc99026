"""Engines that die for everyone take no answer with them; a request that kills engines is stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from helpers import turns_until
from options.resume.test_resume import Answer, ask, body, proxied
from options.resume.test_resume_bounds import event
from proxy.test_proxying import Start
from proxy.upstreams import DONE, LAST, SSE_HEAD, Upstream, Visit, chunk

from hetlb.balancer.core.facts import Probed, ProbeResult
from hetlb.balancer.core.types import Lease
from hetlb.balancer.core.types import Request as CoreRequest
from hetlb.options.resume.resumed import Deaths

#: Tokens of every answer, and ids of its prompt.
LENGTH, PROMPT = 300, 2
POISON = "poison"


class Mortal(Upstream):
    """An engine that streams tokens, dies with all its streams, and is started again at the same port."""

    def __init__(self, fleet: Mortals) -> None:
        super().__init__(self.serve)
        self._fleet = fleet
        self.deaths = 0

    async def serve(self, visit: Visit) -> None:
        if visit.head.startswith(b"GET"):
            visit.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        asked = json.loads(visit.body)
        prompt, poison = asked["prompt"], False
        done = 0
        if isinstance(prompt, str):
            poison = prompt == POISON
            first = {"prompt_token_ids": [9 if poison else 1, 2]}
        else:
            poison, done, first = prompt[0] == 9, len(prompt) - PROMPT, {}
        visit.send(SSE_HEAD)
        for number in range(done, LENGTH):
            last = number == LENGTH - 1
            visit.send(chunk(event("t", [5], "stop" if last else None, **first)))
            first = {}
            self._fleet.said += 1
            if poison and number - done == self._fleet.kills_after:
                self.die()
                return
            await asyncio.sleep(0)  # a token in each turn of the loop
        visit.send(chunk(DONE) + LAST)

    def die(self) -> None:
        self.deaths += 1
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        for visit in self.visits:
            visit.reset()
        self._fleet.dead.add(self)

    async def revive(self) -> None:
        port = int(self.url.rpartition(":")[2])
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)


class Mortals:
    """A fleet of such engines, whose tokens come in steps."""

    def __init__(self, kills_after: int = LENGTH) -> None:
        self.kills_after = kills_after
        self.engines: list[Mortal] = []
        self.dead: set[Mortal] = set()
        self.said = self.due = 0

    @asynccontextmanager
    async def running(self, start: Start, engines: int) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            self.engines = [await stack.enter_async_context(Mortal(self)) for _ in range(engines)]  # type: ignore[misc]
            self.proxy = await proxied(start, *[each.url for each in self.engines], policy="hetlb")
            yield self.proxy

    async def bring_back(self) -> None:
        """Start the dead engines again, and let their probes be answered."""
        for engine in list(self.dead):
            self.dead.discard(engine)
            await engine.revive()
            for _ in range(2):
                name = f"i{self.engines.index(engine)}"
                self.proxy.scheduling.change(Probed(name, ProbeResult.OK))

    def holds(self, engine: Mortal) -> bool:
        """Return True while an engine has leases."""
        name = f"i{self.engines.index(engine)}"
        return any(each.leases for each in self.proxy.scheduler.instances if each.name == name)

    async def until_over(self, got: list[asyncio.Task[Answer]], kill_every: int = 0) -> None:
        """Kill the engines in turns, one each `kill_every` tokens, until every answer is over."""
        self.due = kill_every or 1 << 60
        victim = 0

        def over() -> bool:
            return all(each.done() for each in got)

        while not over():
            await turns_until(lambda: bool(self.dead) or over() or self.said >= self.due)
            if self.said >= self.due and not self.dead:
                self.engines[victim % len(self.engines)].die()
                victim, self.due = victim + 1, self.said + kill_every
            if self.dead:  # what they ran has gone elsewhere before they are back
                await turns_until(lambda: not any(self.holds(each) for each in self.dead))
                await self.bring_back()


@pytest.mark.parametrize("engines", [2, 3])
async def test_engines_killed_in_turns_lose_no_answer(start: Start, engines: int) -> None:
    """Each engine dies several times in the life of a stream."""
    mortals, streams = Mortals(), 45
    async with mortals.running(start, engines) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        asked = body("completions", True, max_tokens=2 * LENGTH)
        got = [asyncio.create_task(ask(url, "completions", asked)) for _ in range(streams)]
        await mortals.until_over(got, kill_every=80 * streams)
        await proxy.settled()
        assert sum(each.deaths for each in mortals.engines) >= 3
    assert sum(proxy.driver.totals.resumptions.values()) >= streams
    # Three engines may happen to die in one stream before answers of others clear it: one in some ten runs.
    lost = [record.not_resumed for record in proxy.exchanges if record.outcome != "ok"]
    assert len(lost) <= 1, lost
    whole = [len(each.result().text) for each in got if not each.result().failed]
    assert set(whole) == {LENGTH}
    assert len(whole) >= streams - 1


@pytest.mark.parametrize("kills_after", [1, 40])
@pytest.mark.parametrize("engines", [2, 3])
async def test_a_request_that_kills_engines_beside_others_is_stopped(
    start: Start, engines: int, kills_after: int
) -> None:
    mortals, streams = Mortals(kills_after), 30
    async with mortals.running(start, engines) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        asked = body("completions", True, max_tokens=2 * LENGTH)
        got = [asyncio.create_task(ask(url, "completions", asked)) for _ in range(streams)]
        await turns_until(lambda: mortals.said > 100 * streams)
        poison = asyncio.create_task(ask(url, "completions", {**asked, "prompt": POISON}))
        await mortals.until_over([*got, poison])
        await proxy.settled()
    assert poison.result().failed
    assert sum(each.deaths for each in mortals.engines) <= 5
    assert sum(each.result().failed for each in got) <= streams // 3


# --- the evidence alone ---


def loss(deaths: Deaths, number: int, instance: str, tokens: int, now: float) -> Any:
    lease = Lease(
        number, CoreRequest(number, "m", 1), instance, 1, work_ns=0, kv_tokens=0, kv_prompt_tokens=0,
        promised_tokens=0, prompt_tokens=0, unread_tokens=0, predicted_output=1.0, dispatched_at=now - 1.0,
    )  # fmt: skip
    found = deaths.lost(lease, tokens, now)
    found.dead = True
    return found


def losses(deaths: Deaths, numbers: Any, instance: str, now: float, tokens: Callable[[int], int]) -> Any:
    found = [loss(deaths, n, instance, tokens(n), now) for n in numbers]
    return found[0]


def test_an_answer_alone_in_two_deaths_is_their_cause() -> None:
    deaths = Deaths()
    own = [loss(deaths, 1, "a", 500, 0.0)]
    assert not deaths.suspect(1, own, 0.0)
    own.append(loss(deaths, 1, "b", 500, 10.0))
    assert deaths.suspect(1, own, 10.0)


@pytest.mark.parametrize("shared", [20, 100])
def test_deaths_that_many_share_after_many_tokens_are_the_engines(shared: int) -> None:
    deaths, own = Deaths(), []
    for number, instance in enumerate("abc"):
        own.append(losses(deaths, range(1, 1 + shared), instance, 15.0 * number, lambda _: 200))
        assert not deaths.suspect(1, own, 15.0 * number)


def test_a_cause_is_found_though_all_others_follow_it() -> None:
    """Two engines: whatever dies with it comes along to the only other one."""
    deaths, own, died = Deaths(), [], 0
    while not own or not deaths.suspect(1, own, float(died)):
        died += 1
        assert died < 8
        own.append(losses(deaths, range(1, 51), "ab"[died % 2], float(died), lambda _: 5))
    assert 2 < died <= 4


def test_deaths_that_others_survived_clear_an_answer() -> None:
    deaths = Deaths()
    for number, instance in enumerate("abc"):
        other = losses(deaths, range(100, 110), instance, float(number), lambda _: 5)
        other.well = 5  # the other half is still on its way
    own = [loss(deaths, 1, "d", 5, 10.0), loss(deaths, 1, "e", 5, 11.0)]
    assert not deaths.suspect(1, own, 11.0)
    assert deaths.suspect(1, own, 80.0)
    # Its own deaths clear nothing, however many of their other answers end well.
    own = [losses(deaths, (2, 50, 51), name, 100.0 + at, lambda _: 5) for at, name in enumerate("fgh")]
    for each in own:
        each.well = 2
    assert deaths.suspect(2, own, 103.0)
