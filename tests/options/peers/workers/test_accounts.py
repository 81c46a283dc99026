"""`hetlb serve --workers 2`: workers do with engines that refuse or hang what one process does."""

from __future__ import annotations

import asyncio
from pathlib import Path

from helpers import HANG_S
from options.peers.workers.processes import PROMPT, Serve
from proxy.services import METRICS, Engine, document
from proxy.upstreams import DONE, LAST, SSE_HEAD, TOKEN, Visit, chunk, plain

PROFILE = """
version: 1
name: small
engine: {kv_cache_tokens: 100000, max_num_seqs: 64, block_size: 16}
prefill: {k1: 1.1e-4, k2: 1.0e-3, k3: 0.0, k4: 1.0e-2}
decode: {k5: 5.0e-8, k6: 6.0e-5, k7: 0.0, k8: 1.3e-2}
"""


class Working(Engine):
    """An engine that works on a stream for `scrapes` reads of its metrics between two of its tokens."""

    scrapes = 60

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.done = asyncio.Event()

    async def _route(self, visit: Visit) -> None:
        path = visit.head.split()[1]
        if path == b"/metrics":
            self.reads += bool(self.asked)
            if self.reads > self.scrapes:
                self.done.set()
            visit.send(plain(METRICS + b"vllm:generation_tokens_total %d\n" % self.reads))
        elif path == b"/v1/completions":
            self.asked.append(visit)
            visit.send(SSE_HEAD + chunk(TOKEN))
            await self.done.wait()
            visit.send(chunk(TOKEN + DONE) + LAST)
        else:
            await super()._route(visit)


async def test_requests_without_a_byte_leave_an_engine_that_hangs(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(PROFILE)
    async with Engine() as hung, Engine() as well:
        fleet = document(hung, well)
        for instance in fleet["models"][0]["instances"]:
            instance["profile"] = "small.yaml"
        proxy = await serve(fleet)
        hung.hold()
        replies = await asyncio.gather(*[proxy.ask() for _ in range(8)])
        assert hung.asked
        assert {reply.status for reply in replies} == {200}
        await proxy.said("i0 has stalled")
        hung.released.set()


class Frozen(Engine):
    """An engine that sends one token of a stream, then nothing until it is released."""

    async def _route(self, visit: Visit) -> None:
        if visit.head.split()[1] != b"/v1/completions":
            await super()._route(visit)
            return
        visit.send(SSE_HEAD + chunk(TOKEN))
        await self.released.wait()
        visit.send(chunk(TOKEN + DONE) + LAST)


async def test_an_engine_whose_streams_stand_still_is_named(serve: Serve, tmp_path: Path) -> None:
    """A whole answer says nothing before its end: of a stream the others must know it is one."""
    (tmp_path / "small.yaml").write_text(PROFILE)
    async with Frozen() as frozen:
        frozen.hold()
        fleet = document(frozen)
        fleet["models"][0]["instances"][0]["profile"] = "small.yaml"
        proxy = await serve(fleet)
        asking = asyncio.create_task(proxy.ask(**PROMPT, stream=True))
        await proxy.said("i0 has stalled")
        frozen.released.set()
        assert (await asking).body.endswith(DONE)


async def test_a_refusal_that_others_would_not_give_counts(serve: Serve) -> None:
    async with Engine(plain(b"{}", b"404 Not Found")) as refuses, Engine() as well:
        proxy = await serve(document(refuses, well))
        statuses = [(await proxy.ask()).status for _ in range(20)]
        assert statuses.count(404) <= 6  # each worker finds it out
        assert len(refuses.asked) < 16


async def test_no_clock_ends_what_an_engine_works_on(serve: Serve) -> None:
    async with Working() as engine:
        proxy = await serve(document(engine, proxy={"idle_timeout_s": 1, "first_byte_timeout_s": 1}))
        reply = await proxy.ask(**PROMPT, stream=True)
        assert reply.body.endswith(DONE)


class Shared(Engine):
    """An engine with requests that hetlb did not send; `reads` counts reads of its metrics."""

    others = reads = 0

    async def _route(self, visit: Visit) -> None:
        if visit.head.split()[1] == b"/metrics":
            visit.send(plain(METRICS.replace(b"running 0", b"running %d" % self.others)))
            async with self.arrived:
                self.reads += 1
                self.arrived.notify_all()
        else:
            await super()._route(visit)


async def test_one_of_the_workers_logs_a_cause(serve: Serve) -> None:
    async with Shared() as engine:
        proxy = await serve(document(engine))
        engine.others = 30
        await proxy.said("others use i0")
        seen = engine.reads
        async with asyncio.timeout(HANG_S), engine.arrived:  # each worker samples its state meanwhile
            await engine.arrived.wait_for(lambda: engine.reads > seen + 120)
        engine.others = 0
        await proxy.said("foreign_load is over")
        assert sum("others use i0" in line for line in proxy.errors) == 1, proxy.errors
