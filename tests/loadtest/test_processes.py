"""Helper processes say where they listen or why they did not start, and are gone when the context is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

import hetlb.tools.demo
from hetlb.errors import HetlbError
from hetlb.tools.loadtest.processes import helper_processes

PROFILE = Path(hetlb.tools.demo.__file__).parent / "fast.yaml"
ENGINE = ("engine", "--profile", str(PROFILE), "--port", "0", "--served-model-name", "m")


async def test_a_process_is_ready_at_its_address_and_gone_afterwards() -> None:
    async with aiohttp.ClientSession() as session:
        with helper_processes() as helpers:
            engine = helpers.start("the engine", *ENGINE)
            await engine.ready()
            helpers.check()
            (url,) = engine.urls
            async with session.get(f"{url}/health") as reply:
                assert reply.status == 200
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"{url}/health")


PARENT = """
import asyncio, sys
from hetlb.tools.loadtest.processes import Helpers
from pathlib import Path

async def main():
    engine = Helpers(Path(sys.argv[1])).start("the engine", *sys.argv[2:])
    await engine.ready()
    print(engine._process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux ends the children of a process that was killed"
)
async def test_a_process_ends_with_its_parent_however_that_ended(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path), *ENGINE, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    engine = os.pidfd_open(int(await parent.stdout.readline()))
    try:
        ended = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(engine, lambda: ended.done() or ended.set_result(None))
        parent.send_signal(signal.SIGKILL)
        await parent.wait()
        await ended
    finally:
        asyncio.get_running_loop().remove_reader(engine)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(engine, signal.SIGKILL)
        os.close(engine)


async def test_a_process_that_ended_is_noticed() -> None:
    with helper_processes() as helpers:
        engine = helpers.start("the engine", *ENGINE)
        await engine.ready()
        engine.kill()
        with pytest.raises(HetlbError, match=r"the engine ended with status -9: it said nothing"):
            helpers.check()


async def test_a_process_that_does_not_start_says_why(tmp_path: Path) -> None:
    with helper_processes() as helpers:
        engine = helpers.start("the engine", "engine", "--profile", str(tmp_path / "none.yaml"))
        with pytest.raises(HetlbError, match=r"the engine did not start: hetlb engine: .*: no such file"):
            await engine.ready()
