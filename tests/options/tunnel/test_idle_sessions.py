"""Sessions that owe no tokens beside plain requests: whoever asks is answered, by all instances alike."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

from helpers import turns_until
from options.tunnel.test_realtime import TEXT, Talker, session, talking
from proxy.frames import frame
from proxy.services import Running
from proxy.upstreams import Visit, plain

#: An idle vLLM's page: its counters stand.
STANDING = (
    b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
    b"vllm:generation_tokens_total 5\nvllm:prompt_tokens_total 5\n"
)
#: Seconds of silence after which an engine that owed a token would have stalled, and a sweep more.
SILENT_S = 3.5


class Standing(Talker):
    """An engine whose counters of tokens never move."""

    async def _route(self, visit: Visit) -> None:
        if visit.head.startswith(b"GET /metrics"):
            visit.send(plain(STANDING))
        else:
            await super()._route(visit)


async def silence(running: Running, chats: bool, engines: list[Standing]) -> None:
    """Let time pass in which no token is owed; `chats`: sessions say something meanwhile."""
    loop = asyncio.get_running_loop()
    until, told = loop.time() + SILENT_S, 0.0

    def over() -> bool:
        nonlocal told
        if chats and loop.time() - told > 0.1:
            told = loop.time()
            for engine in engines:
                for visit in engine.asked:
                    if not visit.left.is_set() and visit.head.startswith(b"GET /v1/realtime"):
                        visit.send(frame(TEXT, b"{}"))
        return loop.time() > until

    await turns_until(over)
    assert [each.evidence.why(loop.time()) for each in running.scheduler.instances] == ["", ""]


async def beside_sessions(
    tmp_path: Path, sessions: int, requests: int, clients: int, *, chats: bool
) -> Counter[str]:
    """Ask beside sessions. Return the answers by instance; all are 200."""
    async with Standing() as one, Standing() as other:
        engines = [one, other]
        async with talking(tmp_path, *engines, policy={"name": "hetlb"}) as running:
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(sessions):
                    client = await stack.enter_async_context(session(running))
                    await client.recv()
                await silence(running, chats, engines)
                answered: Counter[str] = Counter()

                async def ask(count: int) -> None:
                    for _ in range(count):
                        reply = await running.ask()
                        assert reply.status == 200, reply.message
                        answered[reply.headers["x-hetlb-instance"]] += 1

                await asyncio.gather(*(ask(requests // clients) for _ in range(clients)))
                assert sum(each.in_flight for each in running.scheduler.instances) == sessions
                assert sum(each.sequences for each in running.scheduler.instances) == 0
                for engine in engines:
                    for visit in engine.asked:
                        visit.left.set()
            assert not running.service.totals.instances["i0"].stalls
            assert not running.service.totals.instances["i1"].stalls
    return answered


async def test_one_idle_session_takes_no_work_from_its_instance(tmp_path: Path) -> None:
    answered = await beside_sessions(tmp_path, 1, 1000, 10, chats=False)
    assert min(answered["i0"], answered["i1"]) >= 300, answered


async def test_one_chatting_session_takes_no_work_from_its_instance(tmp_path: Path) -> None:
    answered = await beside_sessions(tmp_path, 1, 1000, 10, chats=True)
    assert min(answered["i0"], answered["i1"]) >= 300, answered


async def test_ten_slow_clients_beside_thirty_idle_sessions_are_answered(tmp_path: Path) -> None:
    answered = await beside_sessions(tmp_path, 30, 100, 10, chats=False)
    assert answered.total() == 100


async def test_a_full_engine_takes_a_session_and_no_request_waits_behind_one(tmp_path: Path) -> None:
    """A session needs no slot and takes none."""
    async with Standing() as engine:
        async with talking(tmp_path, engine, policy={"name": "hetlb"}) as running:
            instance = running.instance("i0")
            instance.max_num_seqs = 1
            instance.changed()
            engine.hold()
            asking = asyncio.create_task(running.ask())
            await engine.asked_for()
            waiting = asyncio.create_task(running.ask())
            await turns_until(lambda: len(running.scheduler.queue) == 1)
            talks = asyncio.create_task(session(running).__aenter__())
            await engine.asked_for(2)
            assert instance.in_flight == 2
            assert instance.sequences == 1
            engine.released.set()
            client = await talks
            assert (await asking).status == (await waiting).status == 200
            for visit in engine.asked:
                visit.left.set()
            await client.wait_closed()
