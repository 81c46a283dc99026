"""What is closed has ended: owners of tasks, while their peers are mute and the loop has lagged."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
import yaml
from helpers import HANG_S, free_port, turns_until

from hetlb import tasks
from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.fleet.service import Service
from hetlb.cli.serving_options import OPTIONS
from hetlb.options.peers import share
from hetlb.options.peers.offer import Offer
from hetlb.options.peers.redis_transport import RedisTransport
from hetlb.options.pick.pick_service import PickService

#: Seconds for which the loop stands: longer than any timeout of the tasks here.
LAG_S = 0.5
Close = Callable[[], Awaitable[None]]


class Mute:
    """A server that takes connections and says nothing."""

    def __init__(self) -> None:
        self.taken = 0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        def take() -> asyncio.Protocol:
            self.taken += 1
            return asyncio.Protocol()

        server = await asyncio.get_running_loop().create_server(take, "127.0.0.1", 0)
        yield server.sockets[0].getsockname()[1]
        server.close()


async def serving(port: int, folder: Path, first: str, picks: bool = False) -> Close:
    """Start a service whose engine, publisher of events, API server, name server and peers are mute.

    `first` is closed first. One with `wake` has no peers. `picks`: an endpoint picker, whose gateway is mute.
    """
    fleet: dict[str, Any] = {
        "version": 1,
        "listen": {"port": 0},
        "pick": {"port": free_port()},
        "admin": {"port": 0},
        "scrape": {"interval_s": 0.1, "timeout_s": 0.3},
        "watch": True,
        "discovery": {
            "poll_s": 0.1,
            "files": ["instances.d"],
            "kubernetes": {"api_server": f"http://127.0.0.1:{port}", "namespace": "n", "selector": "a=b"},
            "dns": [{"name": "a.test", "port": 80, "model": "m", "servers": [f"127.0.0.1:{port}"]}],
        },
        "shared": {"url": f"redis://127.0.0.1:{port}"} if first == "sharing" else None,
        "models": [
            {
                "name": "m",
                "instances": [
                    {
                        "url": f"http://127.0.0.1:{port}",
                        "kv_events": f"tcp://127.0.0.1:{port}",
                        "wake": None if picks or first == "sharing" else {"sleep_after_s": 0.01},
                    },
                ],
            }
        ],
    }
    (folder / "instances.d").mkdir()
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(fleet))
    service = (PickService if picks else Service)(load_fleet(path), OPTIONS)
    if not picks:
        service.offer = Offer(service)
    if first == "sharing":
        share(service)
    await service.start()
    gateway = None
    if picks:
        _, gateway = await asyncio.open_connection("127.0.0.1", fleet["pick"]["port"])

    async def close() -> None:
        await getattr(service, first).close()  # in the turn of the lag
        await service.close()
        if gateway is not None:
            gateway.close()

    return close


async def picking(port: int, folder: Path, first: str) -> Close:
    return await serving(port, folder, first, picks=True)


async def sharing(port: int, folder: Path, first: str) -> Close:
    """Start a carrier of messages whose Redis is mute."""
    transport = RedisTransport(f"redis://127.0.0.1:{port}", "g", 0.3)
    running = asyncio.create_task(transport.run(lambda: None, lambda message: None))

    async def close() -> None:
        await tasks.ended(running)
        await transport.close()

    return close


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.mark.parametrize(
    ("owner", "first"),
    [
        (serving, "watch"),
        (serving, "_sources"),
        (serving, "_kv_events"),
        (serving, "_sleep"),
        (serving, "sharing"),
        (serving, "offer"),
        (picking, "watch"),
        (picking, "_sources"),
        (picking, "sharing"),
        (picking, "server"),
        (sharing, ""),
    ],
)
@pytest.mark.parametrize("loop", LOOPS)
def test_no_task_is_left_after_a_lag_of_the_loop(
    tmp_path: Path, loop: str, owner: Callable[[int, Path, str], Coroutine[Any, Any, Close]], first: str
) -> None:
    async def run() -> set[str]:
        mute = Mute()
        async with mute.listening() as port:
            close = await owner(port, tmp_path, first)
            begun = mute.taken
            await turns_until(lambda: mute.taken != begun)  # a wait that has just begun ends during the lag
            time.sleep(LAG_S)  # noqa: ASYNC251
            async with asyncio.timeout(HANG_S):
                await close()
        return {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        assert runner.run(run()) == set()


async def test_a_task_that_takes_cancellations_for_timeouts_is_cancelled_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "_RETRY_S", 0.01)

    async def deaf(times: int) -> None:
        while times:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(HANG_S)
            times -= 1

    one, other = (asyncio.create_task(deaf(3)) for _ in range(2))
    await asyncio.sleep(0)
    await tasks.ended(one)
    assert one.done()
    tasks.end(other)
    await asyncio.wait_for(asyncio.shield(other), HANG_S)


async def test_a_task_that_goes_on_is_logged_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "_RETRY_S", 0.001)
    over = asyncio.Event()

    async def deaf() -> None:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()

    task = asyncio.create_task(deaf(), name="deaf")
    await asyncio.sleep(0)
    await tasks.ended(task)
    assert "deaf goes on" in caplog.text
    over.set()
    await task
