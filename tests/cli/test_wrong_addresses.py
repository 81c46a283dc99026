"""Commands at a wrong address: one line says what is wrong there and what to write."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli.test_doctor import GOOD, server
from proxy.services import Engine, document, serving
from proxy.test_tls import Authority

ASK = {"custom_id": "a", "url": "/v1/completions", "body": {"model": "m", "prompt": "x", "max_tokens": 1}}
FLAGS = {
    "bench": ["--dataset-name", "random", "--num-prompts", "1", "--url"],
    "batch": ["in.jsonl", "out.jsonl", "--timeout", "0.3", "--url"],
    "profile": ["--out", "p.yaml", "--url"],
    "init": [],
    "status": ["--admin"],
}


async def said(folder: Path, command: str, url: str) -> str:
    """Run a command at an address; return what it says."""
    (folder / "in.jsonl").write_text(json.dumps(ASK) + "\n")
    (folder / "out.jsonl").unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "hetlb", command, *FLAGS[command], url),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    told = (await process.communicate())[0].decode()
    assert process.returncode in (1, 2), told
    assert "Traceback" not in told
    assert "VERSION" not in told
    return told


@pytest.mark.parametrize("command", FLAGS)
async def test_the_scheme_is_wrong(tmp_path: Path, command: str) -> None:
    authority = Authority(tmp_path)
    async with server(GOOD) as plain, Engine(tls=authority.server("127.0.0.1")) as secret:
        told = await said(tmp_path, command, plain.replace("http:", "https:"))
        assert "it does not speak TLS" in told
        assert f"it answers at {plain}" in told or ": use http://" in told
        told = await said(tmp_path, command, secret.url.replace("https:", "http:"))
        assert "it closes the connection without an answer; " in told
        assert f"it answers at {secret.url}" in told or "use https://" in told
        assert "its certificate is not trusted: " in await said(tmp_path, command, secret.url)


@pytest.mark.parametrize("command", FLAGS)
async def test_a_port_of_hetlb_is_the_wrong_one(tmp_path: Path, command: str) -> None:
    found = {
        "bench": "the admin listener has no '/v1/models'; clients ask",
        "batch": "the admin listener has no '/v1/completions'; clients ask",
        "profile": "expected one server, got a hetlb",
        "init": "another hetlb answers there: give the addresses of the engines",
        "status": "the clients' port has no admin pages",
    }
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        port = running.service.admin.address[1] if command in ("bench", "batch") else running.port
        assert found[command] in await said(tmp_path, command, f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("command", ["bench", "batch", "profile", "init"])
async def test_a_key_is_wanted(tmp_path: Path, command: str) -> None:
    async with server(replace(GOOD, key="k")) as url:
        told = await said(tmp_path, command, url)
    assert "an API key" in told
    assert "OPENAI_API_KEY, got 401" in told or "--api-key-env" in told
