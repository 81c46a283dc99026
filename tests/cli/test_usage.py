"""Way in: `hetlb` alone, examples of every command, suggestions for what is misspelt."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hetlb.cli.main import COMMANDS, build_parser, main


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_hetlb_alone_prints_the_help_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    assert text == printed(capsys, "--help")
    assert text.index("examples:") < text.index("  hetlb demo\n") < text.index("  hetlb serve --config")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_ends_with_an_example_that_works(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = COMMANDS[command].example
    assert printed(capsys, command, "--help").endswith(f"example:\n  {example}\n")
    words = shlex.split(example.partition(" > ")[0].partition(" || ")[0])
    assert words[:2] == ["hetlb", command]
    build_parser(command).parse_args(words[1:])


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("serve", "--confg", "fleet.yaml"), "--config"),
        (("serv",), "serve"),
        (("top", "--onec"), "--once"),
        (("serve", "fleet.yaml"), "--config fleet.yaml"),
        (("serve", "http://a:8000"), "--instance http://a:8000"),
        (("status", "http://a:8081"), "--admin http://a:8081"),
        (("bench", "trace.csv", "--url", "http://a:1"), "--trace trace.csv"),
    ],
)
def test_what_is_misspelt_gets_a_suggestion(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], meant: str
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"; did you mean {meant}? (see " in line


@pytest.mark.parametrize("command", ["place", "rent", "search", "split"])
@pytest.mark.parametrize("place", ["nowhere/fleet.yaml", "."])
def test_a_fleet_file_that_cannot_be_written_is_refused_before_the_work(
    command: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--config", str(tmp_path / "none.yaml"), "--write-fleet", str(tmp_path / place)]
    trace = ["--trace", "none.csv"] if command == "search" else []
    assert main([command, *flags, *trace]) == 2
    expected = f"--write-fleet: expected a file in a folder that exists, got {tmp_path / place}"
    assert expected in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
