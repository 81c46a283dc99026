"""Files that are no regular files: one line at the start, no change at a reload. Pipes of a command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import HANG_S

from hetlb.cli.main import main

REPOSITORY = Path(__file__).parents[2]
HETLB = (sys.executable, "-m", "hetlb")
FLEET: dict[str, Any] = {
    "version": 1,
    "listen": {"port": 0},
    "admin": {"port": 0},
    "models": [{"name": "m", "instances": [{"url": "http://127.0.0.1:1"}]}],
}


def with_key(key: str, name: str) -> dict[str, Any]:
    """Return a fleet whose `key` names a file."""
    engine: dict[str, Any] = {"url": "http://127.0.0.1:1"}
    model: dict[str, Any] = {"name": "m", "instances": [engine]}
    fleet = {**FLEET, "models": [model]}
    if key == "listen.tls":
        fleet["listen"] = {"port": 0, "tls": {"cert": name, "key": name}}
    elif key == "ca_file":
        engine |= {"url": "https://127.0.0.1:1", "ca_file": name}
    elif key in ("profile", "api_key_file"):
        engine[key] = name
    elif key == "tokenizer":
        model[key] = name
    else:
        table, _, inner = key.partition(".")
        fleet[table] = {**fleet.get(table, {}), inner: name}
    return fleet


@pytest.mark.parametrize(
    "key",
    [
        "listen.tls", "ca_file", "profile", "api_key_file", "tokenizer", "proxy.api_keys_file",
        "admin.token_file", "policy.trace",
    ],
)  # fmt: skip
def test_each_file_of_a_fleet_that_is_a_pipe_is_one_line(
    tmp_path: Path, key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(with_key(key, "fifo")))
    assert main(["serve", "--check", "--config", str(path)]) == 2
    assert (said := capfd.readouterr().err).count("not a regular file") == said.count("\n") == 1
    main(["doctor", "--config", str(path)])
    assert "Traceback" not in "".join(capfd.readouterr())


def test_keys_that_became_a_pipe_stay_and_the_process_ends(tmp_path: Path) -> None:
    keys, path = tmp_path / "keys.yaml", tmp_path / "fleet.yaml"
    keys.write_text(yaml.safe_dump([{"name": "one", "sha256": "0" * 64}]))
    path.write_text(yaml.safe_dump(with_key("proxy.api_keys_file", "keys.yaml")))
    with subprocess.Popen(
        [*HETLB, "serve", "--config", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert " ready on " in process.stdout.readline()
            os.mkfifo(tmp_path / "fifo")
            (tmp_path / "fifo").replace(keys)
            process.send_signal(signal.SIGHUP)
            refused = next(line for line in process.stderr if "not reloaded" in line)
            assert "not a regular file but a pipe (FIFO)" in refused
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANG_S) == 0
        finally:
            process.kill()


def test_pipes_of_a_command_line_are_files(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(yaml.safe_dump(FLEET))
    hetlb = f"{sys.executable} -m hetlb"
    trace, servers = REPOSITORY / "hetlb/tools/demo/trace.csv", REPOSITORY / "configs/two-servers.yaml"
    for command in (
        f"{hetlb} serve --check --config <(cat {fleet})",
        f"{hetlb} serve --check --config /dev/stdin < {fleet}",
        f"cat {fleet} | {hetlb} serve --check --config -",
        f"gzip < {trace} | {hetlb} simulate --config {servers} --trace - --policy rr",
    ):
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=HANG_S, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
