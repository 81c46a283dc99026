"""A plain `hetlb serve` imports what every fleet needs; fleets that need more import the rest."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import aiohttp
import pytest
import yaml
from proxy.services import Engine
from proxy.upstreams import DONE, LAST, LAST_TOKEN, SSE_HEAD, TOKEN, USAGE, chunk
from serve_process import serve_process

ROOT = Path(__file__).parents[2]
#: Runs a command and writes the names of all modules that it imported.
RECORDED = """
import sys
from pathlib import Path
from hetlb.cli.main import main
code = main(sys.argv[2:])
Path(sys.argv[1]).write_text(" ".join(sys.modules))
sys.exit(code)
"""
#: Rooms that a plain `serve` may import, and of `cli` only what it says.
ROOMS = {
    "addresses",
    "app_listener",
    "balancer",
    "build",
    "cli",
    "errors",
    "extras",
    "files",
    "inputs",
    "logs",
    "served_models",
    "systemd",
    "tasks",
    "turns",
    "watched_files",
}
OF_CLI = {"hetlb.cli", *(f"hetlb.cli.{name}" for name in ("flags", "main", "serve", "serving_options"))}
#: Options that are imported: what a process needs while another takes its place.
PEERS = (
    "hub", "lease_wire", "offer", "operators", "peer_messages", "shared_view", "sharing",
)  # fmt: skip
OF_OPTIONS = {"hetlb.options", "hetlb.options.peers", *(f"hetlb.options.peers.{name}" for name in PEERS)}
#: Imported when something goes wrong or shows, as on a machine without a CPU to spare: counted nowhere.
SELDOM = {
    "hetlb.balancer.admin.rare_causes",
    "hetlb.balancer.engines.engine_mistakes",
    *(f"hetlb.balancer.core.{name}" for name in ("placing_again", "slot_times", "twins", "waiting_targets")),
    *(f"hetlb.balancer.core.evidence.{name}" for name in ("clients", "kinds", "losses", "missing")),
}
#: Lines of code of all modules that a plain `serve` may import. Among them: the view that a process joins to
#: take this one's place, the places of kept responses, an engine's history, the places of lines on its last
#: page, round trips to engines, and trials of slow ones.
MOST_LINES = 19_340


async def a_plain_serve(folder: Path) -> set[str]:
    """Modules that `serve` has imported by its end: a stream, a page of metrics, a state of the fleet."""
    modules, fleet = folder / "modules", folder / "fleet.yaml"
    stream = SSE_HEAD + b"".join(map(chunk, (TOKEN, LAST_TOKEN, USAGE, DONE))) + LAST
    async with Engine(stream) as engine:
        document = {"version": 1, "models": [{"name": "m", "instances": [{"name": "a", "url": engine.url}]}]}
        fleet.write_text(yaml.safe_dump(document))
        ports = ("--port", "0", "--admin-port", "0")
        command = ("-c", RECORDED, str(modules), "serve", "--config", str(fleet), *ports)
        async with serve_process(*command) as (main, admin), aiohttp.ClientSession() as session:
            body = {"model": "m", "prompt": "hi", "stream": True}
            async with session.post(f"{main}/v1/completions", json=body) as reply:
                assert b"tok" in await reply.read()
            for path in ("/metrics", "/readyz", "/v1/fleet"):
                async with session.get(admin + path) as reply:
                    assert reply.status == 200
    return set(modules.read_text().split())


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return asyncio.run(a_plain_serve(tmp_path_factory.mktemp("plain")))


@pytest.fixture
def imported(loaded: set[str]) -> set[str]:
    """Modules of hetlb itself."""
    return {name for name in loaded if name.split(".")[0] == "hetlb"}


def test_it_imports_these_rooms_alone(imported: set[str]) -> None:
    assert {name for name in imported if name.startswith("hetlb.options")} <= OF_OPTIONS
    assert {name.split(".")[1] for name in imported - {"hetlb"} - OF_OPTIONS} <= ROOMS
    assert {name for name in imported if name.startswith("hetlb.cli")} == OF_CLI


def test_it_needs_no_package_of_an_extra(loaded: set[str]) -> None:
    assert loaded.isdisjoint({"dns", "grpc", "matplotlib", "opentelemetry", "redis", "tokenizers"})


def code_lines(text: str) -> int:
    """Return the lines of a module that hold code: no docstring, comment or blank line."""
    prose = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    written = [line.strip() for line in text.splitlines()]
    return sum(
        1
        for number, line in enumerate(written, 1)
        if line and not line.startswith("#") and number not in prose
    )


def test_it_is_small(imported: set[str]) -> None:
    lines = 0
    for name in imported - SELDOM:
        path = ROOT / name.replace(".", "/")
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        lines += code_lines(source.read_text())
    assert lines <= MOST_LINES, (lines, sorted(imported))
