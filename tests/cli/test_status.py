"""`hetlb status` against a running proxy: the line, the document, the exit status."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import HANG_S, asked_until, free_port
from proxy.services import Engine, document, serving


async def status(url: str, *flags: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hetlb", "status", "--admin", url, *flags,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


async def test_the_exit_status_follows_the_state(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two, serving(tmp_path, document(one, two)) as running:
        code, line, _ = await status(f"http://127.0.0.1:{running.service.admin.address[1]}")
        assert (code, line[:6], line.count("\n")) == (0, "well: ", 1)
        await two.__aexit__()

        async def ails() -> bool:
            return bool((await running.admin("GET", "/v1/status")).json["state"] != "well")

        await asked_until(ails)
        code, said, _ = await status(f"http://127.0.0.1:{running.service.admin.address[1]}", "--json")
        found = json.loads(said)
        assert (code, found["state"]) == (1, "degraded")
        assert {"load", "capacity_req_s", "limited_by", "headroom_req_s", "advice"} <= found.keys()
        await running.admin("PUT", "/v1/fleet/instances/i0/state", {"state": "drain"})
        assert (await status(f"http://127.0.0.1:{running.service.admin.address[1]}"))[0] == 2


async def test_no_proxy_is_exit_2_and_one_line() -> None:
    code, out, errors = await status(f"http://127.0.0.1:{free_port()}")
    assert (code, out, errors.count("\n")) == (2, "", 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_no_proxy_and_a_full_disk_are_one_line_too() -> None:
    command = f"{sys.executable} -m hetlb status --json --admin http://127.0.0.1:{free_port()} > /dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Connection refused" in done.stderr
