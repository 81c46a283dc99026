"""`hetlb stage`: wrong flags are one line; without its extra it says so."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hetlb.cli.main import main


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--layers", "3"], "--layers: expected A:B with A below B, got '3'"),
        (["--layers", "3:3"], "--layers: expected A:B with A below B, got '3:3'"),
        (["--layers", "0:2", "--port", "70000"], "--port: expected a port from 0 to 65535, got 70000"),
        (["--layers", "0:2", "--block-size", "0"], "--block-size: expected a whole number from 1, got 0"),
        (["--layers", "0:2", "--host", "0.0.0.0"], "--key-file: expected a shared key to listen on 0.0.0.0"),
        (["--layers", "0:2", "--ssl-certfile", "c.pem"], "--ssl-keyfile: expected it together with"),
    ],
)
def test_wrong_flags_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    assert main(["stage", "--model", str(tmp_path), *flags]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_without_torch_it_names_the_extra(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stage", "--model", str(tmp_path), "--layers", "0:2"]) == 2
    assert "hetlb[stage]" in capsys.readouterr().err
