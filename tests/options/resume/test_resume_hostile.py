"""Engines that send mutants of streams, break off in any way, and whose answers may go on: each ends once."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest
from fuzz.run_target import mutate
from fuzz.targets import seeds
from helpers import HANG_S
from options.resume.test_resume import proxied
from proxy.test_proxying import Start
from proxy.upstreams import LAST, SSE_HEAD, Upstream, Visit, chunk

from hetlb.balancer.core.facts import CapacityLearned
from hetlb.balancer.core.types import Capacity

#: Streams of one fleet, and fleets.
STREAMS, FLEETS = 8, 8
#: Seconds of silence after which an engine is lost, before its first byte too.
SILENCE_S = 0.05
HEAD = b"POST %b HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"


async def ask(port: int, body: bytes) -> bytes:
    """Return the whole answer to a body."""
    path = b"/v1/chat/completions" if b"messages" in body else b"/v1/completions"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD % (path, len(body), body))
    try:
        async with asyncio.timeout(HANG_S):
            return await reader.read()
    finally:
        writer.close()


class Hostile:
    """Engines that send `first` to the first request and `second` to later ones."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.first = self.second = b""
        self.visits = 0

    async def __call__(self, visit: Visit) -> None:
        if visit.head.startswith(b"GET"):
            visit.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        self.visits += 1
        data, at = self.first if self.visits == 1 else self.second, 0
        visit.send(SSE_HEAD)
        while at < len(data):
            size = self._rng.choice([1, 7, 50, 400, 5000])
            visit.send(chunk(data[at : at + size]))
            at += size
            if self._rng.random() < 0.3:
                await asyncio.sleep(0)
        await visit.writer.drain()
        how = self._rng.choice(["whole", "fin", "rst", "junk", "silence"])
        if how == "rst":
            visit.reset()
        elif how == "fin":
            visit.writer.close()
        elif how != "silence":
            visit.send(LAST if how == "whole" else b"zz\r\n")


@pytest.mark.parametrize("seed", [2, 3])
async def test_answers_of_hostile_engines_end(
    start: Start, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    rng = random.Random(seed)
    kept = [path.read_bytes() for path in seeds("continuation")]
    hostile = Hostile(rng)
    async with Upstream(hostile) as one, Upstream(hostile) as two, Upstream(hostile) as three:
        for _ in range(FLEETS):
            proxy = await proxied(
                start, one.url, two.url, three.url, idle_timeout_s=SILENCE_S, first_byte_timeout_s=SILENCE_S
            )
            for each in proxy.scheduler.instances:
                proxy.scheduling.change(CapacityLearned(each.name, Capacity(max_model_len=512)))
            for _ in range(STREAMS):
                body, _, streams = rng.choice(kept).partition(b"\n")
                hostile.first, _, hostile.second = streams.partition(b"\0")
                if rng.random() < 0.8:
                    hostile.first = mutate(rng, hostile.first, kept)
                if rng.random() < 0.8:
                    hostile.second = mutate(rng, hostile.second, kept)
                hostile.visits = 0
                raw = await ask(proxy.port, body)
                assert raw.startswith(b"HTTP/1.1 "), (body, hostile.first, hostile.second)
            await proxy.settled()
            assert len(proxy.exchanges) == STREAMS
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
