"""A real vLLM server is killed under load and comes back: what clients lose, and when it has its share again.

Shows: `kill -9` of the fast one of two servers under 60 streams ends exactly the streams it was answering,
each with an error event and without `[DONE]`; every request that had not begun to be answered is answered by
the other one. Started again on the same port, where the tests after this one find it, it has the share it had
before once its slow start of 30 s is over. `make test-vllm` runs it; about two minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
import httpx
import pair as real
import pytest
from engines import Server
from pair import FAST, SLOW

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

STREAMS, LATE = 60, 40
#: Requests begun from then on, counted from its first answer to a probe of ours, tell its share.
RAMP_S = 30.0
#: Answers that tell a share, to some hundredths.
ANSWERS = 120
#: Of the share it had before, which moves with whatever else the machine has to do.
SHARE = 0.7


@pytest.fixture
def proxy(servers: list[Server], tmp_path: Path) -> Iterator[real.Proxy]:
    """hetlb in front of the pair, that no other test asks."""
    with real.proxy(servers, tmp_path / "hetlb") as running:
        yield running


@pytest.fixture(scope="session")
def successors() -> Iterator[contextlib.ExitStack]:
    """Servers that took the place of killed ones, for as long as others may ask them."""
    with contextlib.ExitStack() as stack:
        yield stack


@dataclass
class Stream:
    """What a client saw of one stream."""

    began_at: float
    status: int = 0
    instance: str = ""
    text: str = ""
    first_at: float | None = None
    ended_at: float = 0.0
    cut: bool = False

    @property
    def done(self) -> bool:
        return "data: [DONE]" in self.text

    @property
    def told(self) -> bool:
        """An error event came, as a whole event of its own."""
        return any(event.startswith('data: {"error"') for event in self.text.split("\n\n"))

    @property
    def whole(self) -> bool:
        return self.status == 200 and self.done and not self.cut and not self.told


async def stream(http: httpx.AsyncClient, url: str, number: int, tokens: int, into: list[Stream]) -> Stream:
    """Send one streamed completion of exactly `tokens` tokens, read to its end, however it ends."""
    seen = Stream(time.monotonic())
    into.append(seen)
    prompt = random.Random(f"faults {number}").choices(range(1000, 2000), k=24)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    try:
        async with http.stream("POST", f"{url}/v1/completions", json=body) as reply:
            seen.status = reply.status_code
            seen.instance = reply.headers.get("x-hetlb-instance", "")
            async for piece in reply.aiter_text():
                seen.first_at = seen.first_at or time.monotonic()
                seen.text += piece
    except httpx.RemoteProtocolError:
        seen.cut = True
    seen.ended_at = time.monotonic()
    return seen


@contextlib.asynccontextmanager
async def crowd(url: str, clients: int, tokens: int) -> AsyncIterator[list[Stream]]:
    """Yield the streams of `clients` that ask again and again until the block ends."""
    seen: list[Stream] = []

    async def client(number: int) -> None:
        for turn in range(10_000):
            await stream(http, url, (number + 1) * 10_000 + turn, tokens, seen)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600.0, limits=limits) as http:
        tasks = [asyncio.create_task(client(number)) for number in range(clients)]
        try:
            yield seen
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def share(seen: list[Stream], since: float) -> float:
    """The fast server's part of the streams begun since then, when enough of them are answered."""

    def answered() -> list[str]:
        return [each.instance for each in seen if each.first_at is not None and each.began_at >= since]

    async def missing() -> int:
        return max(0, ANSWERS - len(answered()))

    await real.until(missing, f"{ANSWERS} answers", 600)
    return answered().count(FAST) / len(answered())


async def passed(seconds: float) -> None:
    """Load goes on for so long."""
    await asyncio.sleep(seconds)


def idle_but_for_health(fleet: Any) -> list[str]:
    return [said for said in real.busy_figures(fleet) if " is " not in said]


async def test_killed_under_sixty_streams_and_back(
    proxy: real.Proxy,
    servers: list[Server],
    successors: contextlib.ExitStack,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    fast = next(server for server in servers if server.name == FAST)
    async with crowd(proxy.url, STREAMS, 24) as seen:
        await passed(4.0)
        before = await share(seen, time.monotonic())
    await proxy.idle()

    # --- killed ---
    streams: list[Stream] = []
    late: list[Stream] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600.0, limits=limits) as http:
        tasks = [
            asyncio.create_task(stream(http, proxy.url, number, 200, streams)) for number in range(STREAMS)
        ]

        async def not_streaming() -> bool:
            return sum(each.instance == FAST and each.first_at is not None for each in streams) < STREAMS // 2

        await real.until(not_streaming, f"half of the streams from {FAST}", 300)
        tasks += [
            asyncio.create_task(stream(http, proxy.url, 1000 + number, 16, late)) for number in range(LATE)
        ]

        async def not_there() -> bool:
            figures = await proxy.fleet()
            held = sum(each["in_flight"] for each in (await proxy.instances()).values())
            return held + int(figures["queue"]["requests"]) < STREAMS + LATE // 2

        await real.until(not_there, "late requests at the proxy", 60)
        killed_at = time.monotonic()
        fast.signal_group(signal.SIGKILL)
        await asyncio.gather(*tasks)

    all_answers = streams + late
    ended_by_it = [each for each in all_answers if each.instance == FAST and each.ended_at > killed_at]
    others = [each for each in all_answers if each not in ended_by_it]
    record_property("streaming from it when it was killed", len(ended_by_it))
    assert ended_by_it, "expected streams from it at that moment"
    for each in ended_by_it:
        assert each.first_at is not None
        assert each.first_at <= each.ended_at
        assert each.told, f"no error event: {each.text[-200:]!r}"
        assert not each.done
        assert each.cut, "it ended as if it were whole"
    lost = [each for each in others if not each.whole]
    assert not lost, (
        f"lost though not streaming from it: {[(e.status, e.instance, e.text[-200:]) for e in lost]}"
    )
    answered_after = [each for each in others if each.first_at is not None and each.first_at > killed_at]
    assert answered_after, "expected requests that had not begun"
    record_property("had not begun, answered by the other", len(answered_after))
    print(f"\n{len(ended_by_it)} streams ended with {FAST}, {len(answered_after)} begun later did not")
    assert {each.instance for each in answered_after} == {SLOW}
    instances = await proxy.instances()
    assert instances[FAST]["health"] == "ejected"

    async def still_held() -> list[str]:
        return idle_but_for_health(await proxy.fleet())

    await real.until(still_held, "fleet that holds nothing")

    # --- back ---
    start_again(fast, tmp_path, successors)
    async with crowd(proxy.url, STREAMS, 24) as seen:

        async def silent() -> bool:
            assert fast.process.poll() is None, fast.log_tail()
            return not await asyncio.to_thread(engines._healthy, fast)

        await real.until(silent, f"answer of {FAST}", real.READY_DEADLINE_S)
        await passed(RAMP_S)
        after = await share(seen, time.monotonic())
    record_property("share before", round(before, 3))
    record_property("share after", round(after, 3))
    print(f"\nshare of {FAST}: {before:.3f} before, {after:.3f} after {RAMP_S:.0f} s")
    assert after >= SHARE * before, f"{after:.3f} after {RAMP_S:.0f} s, {before:.3f} before"
    assert all(each.whole for each in seen if each.ended_at), "an answer was lost while it came back"
    await proxy.idle()


def start_again(server: Server, folder: Path, successors: contextlib.ExitStack) -> None:
    """Start the killed server again on its port, for the rest of the session."""
    core = sorted(engines.os.sched_getaffinity(0))[0]  # the fast one is the first of the pair
    again = successors.enter_context(
        engines._running(server.spec, real.MODELS, folder, server.port, core, engines.VENV_PYTHON)
    )
    server.process, server.log_path = again.process, again.log_path
