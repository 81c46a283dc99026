"""Five hundred requests, three in ten of which leave at a random moment: nothing is left of them anywhere."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from helpers import turns_until
from proxy.services import PatientService

from hetlb.balancer.config.fleet import fleet_from_urls
from hetlb.balancer.config.profile_file import load_profile
from hetlb.balancer.core.types import Outcome
from hetlb.balancer.exchange.exchange_states import Phase
from hetlb.balancer.telemetry.request_record import RequestRecord
from hetlb.cli.serving_options import OPTIONS
from hetlb.tools.emulator import EmulatedEngine
from hetlb.tools.sim.integrity import check_scheduler

DEMO = Path(__file__).parents[2] / "hetlb" / "tools" / "demo"
REQUESTS = 500
AT_ONCE = 200


async def ask(port: int, number: int, rng: random.Random) -> str:
    """One request; returns what became of it as the client sees it."""
    stream = rng.random() < 0.5
    body = json.dumps(
        {"model": "m", "prompt": [number % 900 + 1] * rng.randint(1, 60), "max_tokens": rng.randint(1, 40),
         "stream": stream}
    ).encode()  # fmt: skip
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\n"
        f"x-request-id: client-{number}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    request = head.encode() + body
    leaves = rng.random() < 0.3
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if leaves and rng.random() < 0.1:
            writer.write(request[: rng.randrange(len(request))])
            await writer.drain()
            return "left while sending"
        writer.write(request)
        if leaves:
            wanted = rng.choice((0, 1, rng.randrange(200, 4000)))
            if wanted:
                await reader.read(wanted)
            return "left"
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        if stream:
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        else:
            length = next(
                int(line.partition(b":")[2])
                for line in answer.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            )
            await reader.readexactly(length)
        return "answered"
    finally:
        writer.close()


def tasks() -> set[asyncio.Task[Any]]:
    """Return all tasks but the engines' connections, which hetlb keeps open."""
    return {task for task in asyncio.all_tasks() if "RequestHandler" not in str(task.get_coro())}


async def test_three_in_ten_leave_and_nothing_is_left_of_them() -> None:
    fast, slow = load_profile(DEMO / "fast.yaml"), load_profile(DEMO / "slow.yaml")
    rng = random.Random(11)
    outcomes: Counter[str] = Counter()
    phases: Counter[Phase] = Counter()
    async with (
        EmulatedEngine(fast, served_model_names=("m",), time_scale=0.05) as one,
        EmulatedEngine(slow, served_model_names=("m",), time_scale=0.05) as two,
    ):
        fleet = fleet_from_urls([one.url, two.url])
        fleet = fleet.with_tables(
            listen=msgspec.structs.replace(fleet.file.listen, port=0),
            admin=msgspec.structs.replace(fleet.file.admin, port=0),
            proxy=msgspec.structs.replace(fleet.file.proxy, request_log=False),
        )
        service = PatientService(fleet, OPTIONS)
        driver = service.driver
        ended: list[int] = []

        def on_ended(records: list[RequestRecord]) -> None:
            for record in records:
                ended.append(record.request.id)
                assert record.outcome is not None
                outcomes[record.outcome.value] += 1
                phases[record.ended_in] += 1

        driver.on_ended = on_ended
        try:
            await service.start()
            tasks_before = tasks()
            places = asyncio.Semaphore(AT_ONCE)

            async def one_by_one(number: int) -> str:
                async with places:
                    return await ask(service.address[1], number, random.Random(rng.random()))

            seen = Counter(await asyncio.gather(*(one_by_one(number) for number in range(REQUESTS))))
            engines = (one, two)
            await turns_until(lambda: not driver.exchanges)
            await turns_until(lambda: not any(each.running or each.waiting for each in engines))
            await turns_until(lambda: not service.server.connections)
            driver.settle()
            accepted = REQUESTS - seen["left while sending"]
            assert seen["answered"] > 300
            assert seen["left"] > 100
            # Exactly one outcome each; the clients that stayed all got their answer.
            assert len(ended) == len(set(ended)) == accepted
            assert sum(outcomes.values()) == accepted
            assert outcomes[Outcome.OK.value] >= seen["answered"]
            assert set(outcomes) == {Outcome.OK.value, Outcome.CLIENT_GONE.value}
            assert Phase.STREAMING in phases
            # Nothing is left: not in the ledger, not at the engines, no task.
            check_scheduler(service.scheduler)
            assert service.scheduler.in_flight == 0
            assert len(service.scheduler.queue) == service.scheduler.queue.bytes == 0
            for instance in service.scheduler.instances:
                assert (instance.in_flight, instance.work_ns, instance.kv_tokens) == (0, 0, 0)
            for pool in driver.pools.all():
                assert not pool.busy
            assert one.model.kv.pool.used_blocks == two.model.kv.pool.used_blocks == 0
            await turns_until(lambda: tasks() <= tasks_before)
            await service.stop(1.0)
            await turns_until(lambda: not any(each.connections for each in engines))
        finally:
            await service.close()
