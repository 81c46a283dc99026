"""The processes of `hetlb serve --workers N`: how they begin, are replaced and end.

The supervisor starts them and carries no request.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from helpers import HANG_S, turns_until
from options.peers.workers.processes import Serve, alive, children, in_flight, name_of
from proxy.services import Engine, document
from proxy.upstreams import Upstream, holding


async def test_a_worker_that_dies_again_and_again_is_started_later_and_later(serve: Serve) -> None:
    async with Engine() as one:
        proxy = await serve(document(one), workers=2)
        first = proxy.workers[0]
        name, died = name_of(first), {first}
        os.kill(first, signal.SIGKILL)
        await proxy.said("at once")
        # Each of them as soon as it has its name: one that has lived for a while has died for the first time.
        while not any("deaths in a row" in line for line in proxy.errors):
            await turns_until(lambda: any(name_of(pid) == name for pid in {*proxy.workers} - died))
            (pid,) = [pid for pid in {*proxy.workers} - died if name_of(pid) == name]
            os.kill(pid, signal.SIGKILL)
            died.add(pid)
            deaths = len(died)
            await turns_until(
                lambda n=deaths: sum("was ended by signal 9" in line for line in proxy.errors) >= n
            )
        assert "another takes its place" in await proxy.said("deaths in a row")
        assert (await proxy.admin("/readyz")).status == 200


async def test_without_descriptors_for_another_worker_the_others_serve_on(serve: Serve) -> None:
    async with Engine() as one:
        proxy = await serve(document(one), workers=2)
        soft, hard = resource.prlimit(proxy.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(proxy.process.pid, resource.RLIMIT_NOFILE, (0, hard))
        os.kill(proxy.workers[0], signal.SIGKILL)
        assert "Too many open files" in await proxy.said("cannot be started")
        asked = [asyncio.create_task(proxy.ask()) for _ in range(30)]  # some of them wait for the one to come
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        resource.prlimit(proxy.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert {reply.status for reply in await asyncio.gather(*asked)} == {200}
        await proxy.both_serve()


async def test_workers_outlive_a_killed_supervisor_by_no_more_than_their_requests(serve: Serve) -> None:
    async with Engine() as one:
        proxy = await serve(document(one), workers=2)
        one.hold()
        asked = asyncio.create_task(proxy.ask())
        await one.asked_for()
        workers = proxy.workers
        proxy.process.kill()
        one.released.set()
        assert (await asked).status == 200
        await turns_until(lambda: not alive(workers))


@pytest.mark.parametrize("looking", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_workers_that_begin_do_not_outlive_their_supervisor(
    tmp_path: Path, looking: bool, number: signal.Signals
) -> None:
    path = tmp_path / "fleet.yaml"
    async with Upstream(holding()) as silent:
        path.write_text(yaml.safe_dump(document(silent)))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hetlb", "serve", "--config", str(path), "--workers", "2",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        async with asyncio.timeout(HANG_S):
            await turns_until(lambda: len(children(process.pid)) >= 2)
            workers = children(process.pid)
            if looking:  # they wait for the engine to be looked at, and it does not answer
                await silent.visit()
            process.send_signal(number)
            await process.wait()
            await turns_until(lambda: not alive(workers))


async def asked_and_held(serve: Serve, one: Engine, count: int) -> tuple[Any, list[asyncio.Task[Any]]]:
    """Serve by two workers; return them and requests that `one` has and does not answer."""
    proxy = await serve(document(one), workers=2)
    one.hold()
    asked = [asyncio.create_task(proxy.ask()) for _ in range(count)]
    await proxy.fleet_until(lambda fleet: in_flight(fleet) == count)
    return proxy, asked


async def test_what_is_open_ends_before_the_workers_do(serve: Serve) -> None:
    async with Engine() as one:
        proxy = await serve(document(one), workers=2)
        await proxy.both_serve()
        one.hold()
        asked = [asyncio.create_task(proxy.ask()) for _ in range(6)]
        await proxy.fleet_until(lambda fleet: in_flight(fleet) == 6)
        workers = proxy.workers
        proxy.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(HANG_S):
            while (await proxy.admin("/readyz")).status == 200:
                pass
        assert (await proxy.ask("/health", "GET")).status == 503
        one.released.set()
        assert {reply.status for reply in await asyncio.gather(*asked)} == {200}
        assert await asyncio.wait_for(proxy.process.wait(), HANG_S) == 0
        assert not alive(workers)
        assert await proxy.end() == 0


async def test_ctrl_c_ends_it_at_once_with_streams_open(serve: Serve) -> None:
    async with Engine() as one:
        proxy, asked = await asked_and_held(serve, one, 6)
        workers = proxy.workers
        assert await proxy.end(signal.SIGINT) == 0
        assert not alive(workers)
        for reply in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(reply, aiohttp.ClientError) or reply.status == 503


async def test_a_port_in_use_is_one_line(serve: Serve) -> None:
    async with Engine() as one:
        proxy = await serve(document(one), workers=2)
        port = int(proxy.url.rpartition(":")[2])
        for workers in ("1", "2"):
            other = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "hetlb", "serve", "--instance", one.url, "--port", str(port),
                "--admin-port", "0", "--workers", workers, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, errors = await asyncio.wait_for(other.communicate(), HANG_S)
            assert other.returncode == 1
            assert f"127.0.0.1:{port} cannot be listened on" in errors.decode().splitlines()[-1]
            assert "Traceback" not in errors.decode()
        assert (await proxy.ask()).status == 200


async def test_a_worker_that_is_asked_to_end_does_so_and_is_replaced(serve: Serve) -> None:
    async with Engine() as one:
        proxy, asked = await asked_and_held(serve, one, 10)
        os.kill(proxy.workers[0], signal.SIGTERM)
        one.released.set()
        assert {reply.status for reply in await asyncio.gather(*asked)} == {200}
        await proxy.said("ended with status 0; another takes its place")
        await proxy.both_serve()
