"""Control characters and line ends of others never reach the terminal: each command, an odd engine."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from helpers import HANG_S
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from serve_process import serve_process

from hetlb.errors import HetlbError, InputError, visible
from hetlb.tools.tables import Console

#: Colours, a bell, a title, a line of its own, the other direction of writing, and markup of rich.
ODD = "m\x1b[31m\x07\x9b2J\x1b]0;t\x07\nFORGED\u202e[/x]"
PROFILE = Path(__file__).parents[2] / "hetlb/tools/demo/fast.yaml"


async def answer(request: web.Request) -> web.Response:
    """Answer as an engine whose every text is odd."""
    if request.path == "/health":
        return web.Response()
    if request.path == "/v1/models":
        return web.json_response({"data": [{"id": ODD, "root": ODD, "max_model_len": 4096}]})
    if request.path == "/version":
        return web.json_response({"version": ODD})
    if request.path == "/metrics":
        return web.Response(text="")
    return web.json_response({"error": {"message": ODD, "type": ODD, "code": ODD}}, status=400, reason="x")


@asynccontextmanager
async def engine() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def printed(folder: Path, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hetlb", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=folder,
    )  # fmt: skip
    async with asyncio.timeout(HANG_S):
        out, _ = await process.communicate()
    return out.decode()


def assert_tame(arguments: object, said: str) -> None:
    assert said.strip(), arguments
    assert "Traceback" not in said, said
    bad = {each for each in said if each != "\n" and not each.isprintable()}
    assert not bad, (arguments, said)
    assert not [line for line in said.splitlines() if line.lstrip(" #").startswith("FORGED")], (
        arguments,
        said,
    )


@pytest.mark.parametrize(
    "command",
    [
        ("doctor", "--config", "fleet.yaml"),
        ("init", "URL"),
        ("bench", "--url", "URL", "--num-prompts", "2", "--request-rate", "inf"),
        ("bench", "--url", "URL", "--num-prompts", "2", "--request-rate", "inf", "--model", ODD),
        ("batch", "in.jsonl", "out.jsonl", "--url", "URL"),
        ("profile", "--url", "URL", "--out", "p.yaml"),
        ("profile", "odd.yaml"),
        ("profile", "odd.yaml", "odd.yaml"),
        ("profile", "."),
        ("explain", "--config", "paper.yaml"),
        ("simulate", "--config", "fleet.yaml", "--trace", f"{ODD}.csv"),
        ("simulate", "--config", "paper.yaml", "--trace", "odd.csv"),
        ("search", "--config", f"{ODD}.yaml", "--trace", f"{ODD}.csv"),
        ("model", "config.json"),
        ("serve", "--check", "--config", "paper.yaml"),
    ],
    ids=lambda command: " ".join(command)[:30].encode("ascii", "replace").decode(),
)
async def test_what_an_engine_or_a_file_says_is_printed_as_text(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    async with engine() as url:
        profile: dict[str, Any] = yaml.safe_load(PROFILE.read_text())
        (tmp_path / "odd.yaml").write_text(yaml.safe_dump({**profile, "name": ODD}))
        for name, instance in (("fleet", {"url": url}), ("paper", {"url": url, "profile": "odd.yaml"})):
            model = {"name": ODD, "instances": [{"name": "e", **instance}]}
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"version": 1, "models": [model]}))
        job = {"custom_id": ODD, "method": "POST", "url": "/v1/chat/completions", "body": {"model": ODD}}
        (tmp_path / "in.jsonl").write_text(json.dumps(job) + "\n")
        (tmp_path / "odd.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n0,{ODD},3\n")
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [ODD], "_name_or_path": ODD}))
        arguments = [url if each == "URL" else each for each in command]
        assert_tame(command, await printed(tmp_path, *arguments))


async def test_the_commands_that_watch_a_proxy(tmp_path: Path) -> None:
    async with engine() as url:
        fleet = {
            "version": 1, "listen": {"port": 0}, "admin": {"port": 0},
            "models": [{"name": ODD, "instances": [{"name": "e", "url": url}]}],
        }  # fmt: skip
        path = tmp_path / "fleet.yaml"
        path.write_text(yaml.safe_dump(fleet))
        async with serve_process("-m", "hetlb", "serve", "--config", str(path)) as (main, admin):
            await printed(tmp_path, "bench", "--url", main, "--num-prompts", "2", "--request-rate", "inf")
            for command in (
                ("status", "--admin", admin),
                ("top", "--once", "--admin", admin),
                ("explain", "--last", "3", "--url", admin),
                ("policy", "--admin", admin),
                ("drain", "e", "--admin", admin),
            ):
                assert_tame(command, await printed(tmp_path, *command))


@given(st.text())
def test_visible_text_is_one_printable_line(text: str) -> None:
    assert visible(text).isprintable()
    assert visible(visible(text)) == visible(text)
    assert str(InputError(text)).isprintable()
    assert str(HetlbError(text)).isprintable()


@given(st.text())
def test_a_console_writes_printable_lines(text: str) -> None:
    console = Console(force_terminal=False, width=200)
    grid = Table(text)
    grid.add_row(text)
    with console.capture() as captured:
        console.print(text, grid)
    assert all(each == "\n" or each.isprintable() for each in captured.get())
