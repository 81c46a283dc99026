"""Commands in the comments of example files: they run as they are shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hetlb.cli.main import main

ROOT = Path(__file__).parents[1]
#: Commands that plan, and what keeps them short here.
SHORT = {
    "search": ["--estimate", "static"],
    "split": ["--time-limit", "5"],
    "rent": ["--no-simulate", "--time-limit", "10"],
    "place": ["--time-limit", "5"],
    "model": [],
}
#: Flags that write a file.
WRITE = ("--write-fleet", "--out", "--plot", "--write-deploy")


def shown() -> list[str]:
    """Return the planning commands of example files that name files of the repository alone."""
    text = "\n".join(path.read_text() for path in sorted(ROOT.glob("configs/*/*.yaml")))
    found: dict[str, None] = {}
    for line in re.findall(r"^#   (hetlb \w+ --.*)$", text, re.MULTILINE):
        words = shlex.split(line, comments=True)
        written = {words[i + 1] for i, word in enumerate(words[:-1]) if word in WRITE}
        files = {word for word in words if re.fullmatch(r"[\w./-]+\.(yaml|csv|json|jsonl)", word)} - written
        if words[1] in SHORT and files and all((ROOT / file).is_file() for file in files):
            found[shlex.join(words)] = None
    return list(found)


def test_the_examples_have_such_commands() -> None:
    assert {line.split()[1] for line in shown()} >= {"search", "split", "rent"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("line", shown())
def test_the_command_runs(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line)[1:]
    for i, word in enumerate(words[:-1]):
        if word in WRITE:
            words[i + 1] = str(tmp_path / Path(words[i + 1]).name)
    monkeypatch.chdir(ROOT)
    assert main([*words, *SHORT[words[0]]]) == 0
    out = capsys.readouterr().out
    # Models are called as on the hub: what is printed can be pasted.
    for model in re.findall(r"vllm serve (\S+)", out):
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", model), model
