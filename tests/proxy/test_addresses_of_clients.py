"""A list of addresses under `listen`: each is served, by one process, by workers, and after a replacement."""

from __future__ import annotations

import asyncio
import re
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from helpers import HANG_S, free_port
from proxy.services import Engine, document
from proxy.test_tls import Authority

from hetlb.balancer.config.fleet import load_fleet
from hetlb.cli.main import main


@asynccontextmanager
async def served(path: Path, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run `hetlb serve`; give its process and the line that says where it is ready."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hetlb", "serve", "--config", str(path), *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(HANG_S):
            line = (await process.stdout.readline()).decode()
            yield process, line
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


def written(folder: Path, engine: Engine, addresses: Any) -> Path:
    fleet = {**document(engine), "listen": addresses}
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(fleet))
    return path


async def asked(url: str, context: ssl.SSLContext) -> int:
    body = {"model": "m", "prompt": "x"}
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
        session.post(f"{url}/v1/completions", json=body, ssl=context) as reply,
    ):
        await reply.read()
        return reply.status


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_each_address_is_served_with_its_own_certificate(tmp_path: Path, workers: str) -> None:
    authority, plain, secret = Authority(tmp_path), free_port(), free_port()
    addresses = [
        {"host": "127.0.0.1", "port": plain},
        {"host": "localhost", "port": secret, "tls": authority.write("proxy")},
    ]
    context = authority.client()
    async with Engine() as engine:
        path = written(tmp_path, engine, addresses)
        async with served(path, "--workers", workers) as (old, line):
            urls = re.findall(r"https?://[^ ,)]+", line)[:2]
            assert urls[0] == f"http://127.0.0.1:{plain}"
            assert urls[1].startswith("https://")
            urls[1] = f"https://127.0.0.1:{secret}"
            for url in urls * 4:
                assert await asked(url, context) == 200
            async with served(path, "--replace", "--workers", workers) as (_, again):
                assert " ready on " in again
                assert await old.wait() == 0
                for url in urls * 4:
                    assert await asked(url, context) == 200


async def test_a_list_of_families_and_of_two_ports(tmp_path: Path) -> None:
    first, second = free_port(), free_port()
    addresses = [{"host": "::", "port": first}, {"host": "127.0.0.1", "port": second}]
    async with Engine() as engine, served(written(tmp_path, engine, addresses)) as (_, line):
        assert f"http://[::]:{first}, http://127.0.0.1:{second} (admin" in line
        context = ssl.create_default_context()
        for url in (f"http://127.0.0.1:{first}", f"http://[::1]:{first}", f"http://127.0.0.1:{second}"):
            assert await asked(url, context) == 200


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_an_address_that_is_taken_is_named(tmp_path: Path, workers: str) -> None:
    async with Engine() as engine:
        taken = int(engine.url.rpartition(":")[2])
        path = written(tmp_path, engine, [{"port": free_port()}, {"port": taken}])
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hetlb", "serve", "--config", str(path), "--workers", workers,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(HANG_S):
            _, errors = await process.communicate()
    assert process.returncode != 0
    assert f"listen[1]: 127.0.0.1:{taken} cannot be listened on" in errors.decode()


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ([], "listen: expected at least one address, got none"),
        ([{"port": 8080}, {"port": "x"}], "listen[1].port: expected"),
        ([{"port": 8080}, 8081], "listen[1]: expected"),
        ([{"tls": {"cert": "none.pem", "key": "none.key"}}], "listen.tls.cert"),
        ([{"port": 1}, {"tls": {"cert": "none.pem", "key": "none.key"}}], "listen[1].tls.cert"),
        ([{"port": 8080}, {"port": 8081}], "admin.port: expected another than listen.port"),
    ],
)
def test_mistakes_name_the_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], listen: Any, message: str
) -> None:
    fleet = {"version": 1, "listen": listen, "models": [{"name": "m", "instances": [{"url": "http://h:1"}]}]}
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(fleet))
    assert main(["serve", "--check", "--config", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_flag_chooses_no_address_of_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "version: 1\nlisten: [{port: 1}, {port: 2}]\nmodels: [{name: m, instances: [{url: 'http://h:1'}]}]\n"
    )
    assert main(["serve", "--check", "--config", str(path), "--port", "3"]) == 2
    assert "--port: expected one address under listen" in capsys.readouterr().err
    assert [each.port for each in load_fleet(path).file.addresses] == [1, 2]
