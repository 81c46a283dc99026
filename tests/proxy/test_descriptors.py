"""More clients than there are descriptors: each is answered, which is logged and a cause by name."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import aiohttp
import yaml
from helpers import HANG_S, turns_until
from proxy.services import Engine, document
from proxy.test_proxying import post

CLIENTS = 120
#: Clients at once: more do not fit the queue of the listener, and the kernel lets them wait for a second.
WAVE = 8


async def status(port: int) -> int:
    """Return the status of one request on a connection of its own, 0 if there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(post())
        line = await reader.readline()
        return int(line.split()[1]) if line else 0
    except ConnectionError:
        return 0
    finally:
        writer.close()


async def test_each_client_without_a_descriptor_gets_503(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    async with Engine() as engine:
        path.write_text(yaml.safe_dump(document(engine)))
        serve = shlex.join([sys.executable, "-m", "hetlb", "serve", "--config", str(path)])
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", f"ulimit -n 100; exec {serve}",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        async with asyncio.timeout(HANG_S):
            ready = (await process.stdout.readline()).decode()
            port = int(re.findall(r":(\d+) ", ready)[0])
            engine.hold()
            asked: list[asyncio.Task[int]] = []

            def all_told() -> bool:
                return sum(map(asyncio.Task.done, asked)) + len(engine.asked) >= len(asked)

            while len(asked) < CLIENTS:
                asked += [asyncio.create_task(status(port)) for _ in range(WAVE)]
                await turns_until(all_told)
            engine.released.set()
            answers = Counter(await asyncio.gather(*asked))
            admin = int(re.findall(r"admin http://[^:]+:(\d+)", ready)[0])
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{admin}/v1/status") as reply:
                    found = await reply.json()
            process.terminate()
            _, log = await process.communicate()
    assert set(answers) == {200, 503}, answers
    assert found["state"] == "degraded"
    [cause] = [each for each in found["causes"] if each["cause"] == "clients_refused"]
    assert "ulimit -n" in cause["sentence"]
    assert answers[200] >= 20
    assert "event=too_many_connections" in log.decode()
