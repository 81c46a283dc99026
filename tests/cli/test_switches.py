"""`hetlb drain`, `ready`, `maint`, `policy` against a running proxy: what they do, print and exit with."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import free_port
from proxy.services import Engine, document, serving

from hetlb.cli.main import main


async def hetlb(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hetlb", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


async def test_drain_waits_for_the_last_request_and_ready_brings_the_instance_back(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two, serving(tmp_path, document(one, two)) as running:
        admin = f"http://127.0.0.1:{running.service.admin.address[1]}"
        assert await hetlb("drain", "i0", "--admin", admin) == (0, "i0 is in drain, no request running\n", "")
        code, out, _ = await hetlb("drain", "i1", "--wait", "--admin", admin, "--json")
        found = json.loads(out)
        assert (code, found["state"], found["in_flight"], found["in_time"]) == (0, "drain", 0, True)
        assert (await running.ask()).status == 503
        assert await hetlb("ready", "i0", "--wait", "--admin", admin) == (0, "i0 is ready, health up\n", "")
        assert (await running.ask()).status == 200


async def test_a_wait_that_ends_too_early_is_exit_1(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        admin = f"http://127.0.0.1:{running.service.admin.address[1]}"
        engine.hold()
        asked = asyncio.ensure_future(running.ask())
        await engine.asked_for()
        code, out, _ = await hetlb("maint", "i0", "--wait", "--timeout", "0.3", "--admin", admin)
        assert (code, out) == (1, "i0 is in maint, 1 request running\n")
        engine.released.set()
        assert (await asked).status == 200


async def test_the_policy_is_printed_and_switched(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        admin = f"http://127.0.0.1:{running.service.admin.address[1]}"
        assert await hetlb("policy", "--admin", admin) == (0, "rr\n", "")
        assert await hetlb("policy", "paper", "--admin", admin) == (0, "paper\n", "")
        code, out, errors = await hetlb("policy", "round", "--admin", admin, "--json")
        assert (code, errors.count("\n")) == (2, 1)
        assert "name: expected one of" in json.loads(out)["error"]


async def test_an_instance_that_is_none_and_the_clients_port_are_one_line(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        admin = f"http://127.0.0.1:{running.service.admin.address[1]}"
        code, _, errors = await hetlb("drain", "../x", "--admin", admin)
        assert (code, errors) == (2, "hetlb drain: instance: expected one of i0, got '../x'\n")
        clients = f"http://127.0.0.1:{running.port}"
        code, _, errors = await hetlb("drain", "i0", "--admin", clients)
        assert (code, errors.count("\n")) == (2, 1)
        assert f"expected the admin address of a running proxy, got {clients!r}: status 404" in errors


@pytest.mark.parametrize("command", ["status", "top", "explain", "policy"])
def test_without_a_proxy_json_is_one_document(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert main([command, "--admin", url, "--json"]) == 2
    out, errors = capfd.readouterr()
    assert url in json.loads(out)["error"]
    assert errors.count("\n") == 1
