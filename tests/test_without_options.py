"""With the folders of `hetlb/options` missing, all the rest is imported, and a plain `serve` serves.

`without_options.py` runs all tests without one.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest
import yaml
from helpers import HANG_S
from proxy.services import Engine
from proxy.upstreams import STREAM
from serve_process import serve_process

ROOT = Path(__file__).parents[1]
OPTIONS = sorted(path.parent.name for path in (ROOT / "hetlb" / "options").glob("*/__init__.py"))
#: Takes options away, as if their folders were deleted, then runs a command.
WITHOUT = """
import sys
sys.modules.update(("hetlb.options." + option, None) for option in sys.argv[1].split(","))
from hetlb.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
#: Runs each command without options in a process of its own, which has imported what `serve` imports.
EACH = """
import json, os, sys
import hetlb.cli.serve
from hetlb.cli.main import main
found = []
for gone, arguments in json.load(sys.stdin):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        gone = ["hetlb.options." + option for option in gone.split(",")]
        assert sys.modules.keys().isdisjoint(gone)
        sys.modules.update(dict.fromkeys(gone))
        sys.exit(main(arguments))
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    found.append((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said))
json.dump(found, sys.stdout)
"""
#: Takes options away, then imports modules; prints the ones that fail.
IMPORTED = """
import importlib, sys
from hetlb.extras import missing_extra
sys.modules.update(("hetlb.options." + option, None) for option in sys.argv[1].split(","))
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if missing_extra(error) is None or "hetlb.options" in str(error):
            print(name, error)
"""
MODEL = {"name": "m", "instances": [{"name": "a", "url": "http://127.0.0.1:1"}]}
MISSING = "expected an installation with the option {0}, but hetlb/options/{0} is missing"
#: A key of the fleet file that asks for an option, and a file with it.
ASKS = {
    "api_keys": ("proxy.api_keys_file", {"proxy": {"api_keys_file": "keys"}}),
    "browsers": ("proxy.cors_origins", {"proxy": {"cors_origins": ["*"]}}),
    "certificates": ("listen.tls", {"listen": {"tls": {"cert": "cert.pem", "key": "key.pem"}}}),
    "classes": ("models[0].classes", {"models": [{**MODEL, "classes": {"a": {}}}]}),
    "client_addresses": ("proxy.trusted_proxies", {"proxy": {"trusted_proxies": ["10.0.0.0/8"]}}),
    "dns": ("discovery.dns", {"discovery": {"dns": [{"name": "engines.invalid", "port": 1, "model": "m"}]}}),
    "instance_files": ("discovery.files", {"discovery": {"files": ["others"]}}),
    "kubernetes": ("discovery.kubernetes", {"discovery": {"kubernetes": {"selector": "app=vllm"}}}),
    "kv_events": (
        "models[0].instances[0].kv_events",
        {
            "models": [
                {**MODEL, "instances": [{"url": "http://127.0.0.1:1", "kv_events": "tcp://127.0.0.1:2"}]}
            ]
        },
    ),
    "length_samples": ("policy.trace", {"policy": {"predictor": "mean", "trace": "t.csv"}}),
    "model_names": ("models[0].aliases", {"models": [{**MODEL, "aliases": ["b"]}]}),
    "plans": ("policy.name", {"policy": {"name": "planned"}}),
    "policies": ("policy.name", {"policy": {"name": "rr"}}),
    "profiles": (
        "models[0].instances[0].profile",
        {"models": [{**MODEL, "instances": [{"url": "http://127.0.0.1:1", "profile": "p.yaml"}]}]},
    ),
    "relays": ("proxy.workers", {"proxy": {"workers": 2}}),
    "resume": ("proxy.resume", {"proxy": {"resume": "ids"}}),
    "split": ("models[0].kv_transfer", {"models": [{**MODEL, "kv_transfer": "nixl"}]}),
    "tenants": ("queue.tenant_weights", {"queue": {"tenant_weights": {"a": 2}}}),
    "tokenizers": ("models[0].tokenizer", {"models": [{**MODEL, "tokenizer": "t.json"}]}),
    "tracing": ("tracing", {"tracing": {"otlp_endpoint": "http://127.0.0.1:1"}}),
}
#: Flags that ask for one.
FLAGS = {"event_log": ("--event-log", "decisions.jsonl")}


async def run(*args: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(HANG_S):
        out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


def run_each(lines: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[int, str]]:
    """Return exit status and output of commands, each without the options that stand before it."""
    done = subprocess.run(
        [sys.executable, "-c", EACH], input=json.dumps(lines), capture_output=True, text=True, check=True,
        timeout=HANG_S,
    )  # fmt: skip
    return [(code, said) for code, said in json.loads(done.stdout)]


def test_there_are_options() -> None:
    assert len(OPTIONS) > 20


async def test_the_balancer_is_imported_without_any() -> None:
    """One option knows no other (`test_layers.py`): the modules of each are imported with all others."""
    modules = [*(ROOT / "hetlb/balancer").rglob("*.py"), *(ROOT / "hetlb/options").glob("*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules]
    assert await run("-c", IMPORTED, ",".join(OPTIONS), *names) == (0, "")


@pytest.mark.parametrize("kept", ["", "admin"])
async def test_a_plain_serve_needs_none(kept: str, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    gone = ",".join({*OPTIONS} - {kept})
    async with Engine(STREAM) as engine:
        document = {"version": 1, "models": [{"name": "m", "instances": [{"name": "a", "url": engine.url}]}]}
        fleet.write_text(yaml.safe_dump(document))
        ports = ("--port", "0", "--admin-port", "0")
        command = ("-c", WITHOUT, gone, "serve", "--config", str(fleet), *ports)
        async with serve_process(*command) as (main, admin), aiohttp.ClientSession() as session:
            body = {"model": "m", "prompt": "hi", "stream": True}
            async with session.post(f"{main}/v1/completions", json=body) as reply:
                assert b"tok" in await reply.read()
            for path in ("/metrics", "/readyz", "/v1/fleet", "/v1/status", "/v1/decisions", "/"):
                async with session.get(admin + path) as reply:
                    assert reply.status == (200 if kept == "admin" and path != "/" else 404)


def test_a_fleet_that_asks_for_it_is_told_in_one_line(tmp_path: Path) -> None:
    lines, expected = [], []
    for option in [*ASKS, *FLAGS]:
        key, tables = ASKS.get(option, ("", {}))
        fleet = tmp_path / f"{option}.yaml"
        fleet.write_text(json.dumps({"version": 1, "models": [MODEL], **tables}))
        ports = ("--port", "0", "--admin-port", "0")
        lines.append((option, ("serve", "--config", str(fleet), *ports, *FLAGS.get(option, ()))))
        where = rf"\S+: {re.escape(key)}: " if key else ""
        expected.append(rf"hetlb serve: {where}{MISSING.format(option)}( \(line 1\))?\n")
    for (code, said), line in zip(run_each(lines), expected, strict=True):
        assert code == 2, said
        assert re.fullmatch(line, said)


def test_a_command_that_imports_it_is_told_in_one_line() -> None:
    commands = {"plans": "rent", "profiles": "search"}
    lines = [(option, (command, "--config", "x")) for option, command in commands.items()]
    *told, (code, script) = run_each([*lines, (",".join(commands), ("completion", "bash"))])
    assert told == [(2, f"hetlb {commands[each]}: {MISSING.format(each)}\n") for each in commands]
    assert code == 0
    assert all(command in script for command in commands.values())


async def test_a_form_is_refused_without_its_reader(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(json.dumps({"version": 1, "models": [MODEL]}))
    ports = ("--port", "0", "--admin-port", "0")
    command = ("-c", WITHOUT, "forms", "serve", "--config", str(fleet), *ports)
    async with serve_process(*command) as (main, _), aiohttp.ClientSession() as session:
        form = aiohttp.FormData({"model": "m"}, default_to_multipart=True)
        async with session.post(f"{main}/v1/audio/transcriptions", data=form) as reply:
            assert reply.status == 415
            assert "reads no forms" in await reply.text()
