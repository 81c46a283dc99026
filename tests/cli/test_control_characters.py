"""Control characters and line ends of others never reach the terminal: each command, an odd engine."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from serve_process import serve_process

from hetlb.cli.main import main
from hetlb.errors import HetlbError, InputError, visible
from hetlb.tools.tables import Console

#: Colours, a bell, a title, a line of its own, the other direction of writing, and markup of rich.
ODD = "m\x1b[31m\x07\x9b2J\x1b]0;t\x07\nFORGED\u202e[/x]"
PROFILE = Path(__file__).parents[2] / "hetlb/tools/demo/fast.yaml"


class Answering(BaseHTTPRequestHandler):
    """An engine whose every text is odd."""

    def do_GET(self) -> None:
        answers: dict[str, Any] = {
            "/health": "",
            "/metrics": "",
            "/v1/models": {"data": [{"id": ODD, "root": ODD, "max_model_len": 4096}]},
            "/version": {"version": ODD},
        }
        error = {"error": {"message": ODD, "type": ODD, "code": ODD}}
        document = answers.get(self.path, error)
        body = document.encode() if isinstance(document, str) else json.dumps(document).encode()
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(400 if document is error else 200, "x")
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Address of such an engine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


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
def test_what_an_engine_or_a_file_says_is_printed_as_text(
    tmp_path: Path,
    command: tuple[str, ...],
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
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
    monkeypatch.chdir(tmp_path)
    main(arguments)
    assert_tame(command, "".join(capfd.readouterr()))


def ask(proxy: str) -> None:
    """Send the proxy one request, which fails."""
    body = json.dumps({"model": ODD, "prompt": "x"}).encode()
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(f"{proxy}/v1/completions", body))


async def test_the_commands_that_watch_a_proxy(
    tmp_path: Path, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    fleet = {
        "version": 1, "listen": {"port": 0}, "admin": {"port": 0},
        "models": [{"name": ODD, "instances": [{"name": "e", "url": url}]}],
    }  # fmt: skip
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(fleet))
    async with serve_process("-m", "hetlb", "serve", "--config", str(path)) as (proxy, admin):
        await asyncio.to_thread(ask, proxy)
        for command in (
            ("status", "--admin", admin),
            ("top", "--once", "--admin", admin),
            ("explain", "--last", "3", "--url", admin),
            ("policy", "--admin", admin),
            ("drain", "e", "--admin", admin),
        ):
            capfd.readouterr()
            await asyncio.to_thread(main, list(command))
            assert_tame(command, "".join(capfd.readouterr()))


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
