"""`hetlb completion`: what bash offers when Tab is pressed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hetlb.cli.completion import SHELLS
from hetlb.cli.main import COMMANDS, main

#: Sources the script ($1), puts the cursor behind the other arguments, and prints what is offered.
PRESS_TAB = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
handler=$(complete -p hetlb | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$handler" hetlb "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "hetlb", "completion", shell], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "hetlb.bash"
    path.write_text(script("bash"))
    return path


def offered(path: Path, *words: str, cwd: Path | None = None) -> set[str]:
    done = subprocess.run(
        ["bash", "-c", PRESS_TAB, "bash", str(path), "hetlb", *words],
        check=True, capture_output=True, text=True, cwd=cwd,
    )  # fmt: skip
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_offers_commands_flags_values_and_files(bash_script: Path, tmp_path: Path) -> None:
    assert offered(bash_script, "") >= COMMANDS.keys()
    assert offered(bash_script, "serve", "--ad") == {"--admin-port"}
    assert {"rr", "hetlb"} <= offered(bash_script, "serve", "--policy", "")
    (tmp_path / "fleet.yaml").touch()
    assert offered(bash_script, "serve", "--config", "fl", cwd=tmp_path) == {"fleet.yaml"}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_every_command(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)
