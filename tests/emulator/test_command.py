"""Shows `hetlb engine` as a process: what it prints, how it ends, and how it refuses wrong input."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from emulator.conftest import PROFILE, make_profile
from helpers import HANG_S

from hetlb.cli.main import main
from hetlb.errors import ConfigError, ProfileError
from hetlb.tools.emulator import EmulatedEngine


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(PROFILE))
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "hetlb", "engine", *map(str, arguments)]


@contextlib.contextmanager
def started(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL."""
    with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("hetlb engine ready on http://127.0.0.1:")
            yield process, line.split()[-1]
        finally:
            process.kill()


def ended(*arguments: object) -> int:
    """The exit status of a command that does not begin to serve, in this process."""
    return main(["engine", *map(str, arguments)])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_and_ends_at_once(profile: Path, number: signal.Signals) -> None:
    """Ready line, answers, and status 0 on a signal even while a client holds a stream."""
    arguments = ["--profile", profile, "--port", 0, "--served-model-name", "a", "b", "--time-scale", 0.5]
    with started(*arguments, "--max-model-len", 500) as (process, url):
        with urllib.request.urlopen(f"{url}/v1/models") as response:
            models = json.load(response)["data"]
        assert [(model["id"], model["max_model_len"]) for model in models] == [("a", 500), ("b", 500)]
        body = json.dumps({"model": "b", "prompt": "x", "max_tokens": 400, "stream": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            assert response.readline().startswith(b"data: ")
            process.send_signal(number)
            assert process.wait(timeout=HANG_S) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--port", "70000"], 2, "expected a port from 0 to 65535, got 70000"),
        (["--time-scale", "0"], 2, "expected a number above 0, at most 1e+15, got 0"),
        (["--time-scale", "nan"], 2, "expected a number above 0, at most 1e+15, got nan"),
        (["--data-parallel-size", "0"], 2, "expected a whole number from 1 to 64, got 0"),
        (["--max-model-len", "9000"], 2, "--max-model-len: expected 1 to 8192"),
        (["--host", "203.0.113.1"], 1, "cannot listen on 203.0.113.1:0"),
    ],
)
def test_wrong_arguments(
    capsys: pytest.CaptureFixture[str], profile: Path, arguments: list[str], status: int, message: str
) -> None:
    assert ended("--profile", profile, "--port", 0, *arguments) == status
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


def test_a_port_in_use(profile: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = subprocess.run(command("--profile", profile, "--port", port), capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith(f"hetlb engine: cannot listen on 127.0.0.1:{port}: ")
    assert "in use" in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("engine", "model", "message"),
    [
        ({}, True, "p.yaml: engine.kv_cache_tokens: expected the capacity in tokens, but the key is missing"),
        ({"kv_cache_tokens": 8192}, False, "p.yaml: model.name: expected the model to serve, but the key"),
        ({"kv_cache_tokens": 9}, True, "p.yaml: engine.kv_cache_tokens: expected at least one block"),
        ({"kv_cache_tokens": 8192, "max_model_len": 8193}, True, "p.yaml: engine.max_model_len: expected"),
        (
            {"kv_cache_tokens": 8192, "max_num_seqs": 9, "max_num_batched_tokens": 8},
            True,
            "p.yaml: engine.max_num_batched_tokens: expected at least engine.max_num_seqs (9), got 8",
        ),
    ],
)
def test_profiles_that_give_no_engine(
    capsys: pytest.CaptureFixture[str], profile: Path, engine: dict[str, int], model: bool, message: str
) -> None:
    """The missing or contradicting key is named, in one line, with status 2."""
    content = {key: value for key, value in PROFILE.items() if key != "model" or model}
    profile.write_text(yaml.safe_dump({**content, "engine": engine}))
    assert ended("--profile", profile, "--port", 0) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_defaults_of_the_context() -> None:
    """The argument, else the profile's, else the whole blocks of the KV cache."""
    assert EmulatedEngine(make_profile(), max_model_len=100).max_model_len == 100
    assert EmulatedEngine(make_profile(max_model_len=200)).max_model_len == 200
    assert EmulatedEngine(make_profile(max_model_len=200), max_model_len=300).max_model_len == 300
    assert EmulatedEngine(make_profile(kv_cache_tokens=1000)).max_model_len == 992
    with pytest.raises(ConfigError, match="served-model-name"):
        EmulatedEngine(make_profile(), served_model_names=[""])
    with pytest.raises(ProfileError, match=r"test: engine\.max_model_len"):
        EmulatedEngine(make_profile(max_model_len=9000))
