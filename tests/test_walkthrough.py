"""The pages that a newcomer walks through: what they show is run, or read by the program it is for."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import free_port
from test_docs import PAGES, reference

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.config.fleet_tables import FleetFile
from hetlb.balancer.config.profile_file import load_profile
from hetlb.cli.main import COMMANDS, build_parser
from hetlb.errors import ConfigErrors

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GETTING_STARTED = DOCS / "getting-started.md"
VLLM = ROOT / ".venv-vllm"

#: `<!-- not run: why -->` on the line before a block keeps it from being run.
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_HERE_DOCUMENT = re.compile(r"<<'EOF'(?P<rest>[^\n]*)\n.*?^EOF$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. `why` it is not run, None where it is."""

    kind: str
    text: str
    line: int
    why: str | None


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    return [
        Block(found["kind"], found["text"], text.count("\n", 0, found.start("kind")) + 1, found["why"])
        for found in _BLOCK.finditer(text)
    ]


def shell_commands(script: str) -> Iterator[list[str]]:
    """The words of every command of a script, without redirections and variables set for it alone."""
    script = _HERE_DOCUMENT.sub(r"\g<rest>", script).replace("\\\n", " ")
    script = re.sub(r"\b[0-9](?=>)|(?:^|(?<=\s))#[^\n]*", "", script)
    lexer = shlex.shlex(script, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    redirected = False
    for token in [*lexer, "\n"]:
        if set(token) <= set("();<>|&\n"):
            if ">" not in token and "<" not in token and words:
                yield words
                words = []
            redirected = ">" in token or "<" in token
        elif redirected:
            redirected = False
        elif words or not re.match(r"\w+=", token):
            words.append(token)


def shown(command: str) -> list[tuple[str, list[str]]]:
    """Every use of `command` in the shell blocks of all pages, with where it stands."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            if block.kind == "sh":
                for words in shell_commands(block.text):
                    # `docker stop hetlb` is none of ours; `docker run hetlb serve …` is.
                    found += [
                        (f"{page.name}:{block.line}", words[i + 1 :])
                        for i, word in enumerate(words)
                        if Path(word).name == command and (i == 0 or words[i + 1 : i + 2] == ["serve"])
                    ]
    return found


@pytest.mark.parametrize(("where", "arguments"), shown("hetlb"), ids=lambda value: str(value)[:60])
def test_every_command_in_a_shell_block_is_one(where: str, arguments: list[str]) -> None:
    if arguments == ["--version"]:
        return
    assert arguments[0] in COMMANDS, where
    build_parser(arguments[0]).parse_args(arguments)


def test_shell_blocks_are_read_as_a_shell_reads_them() -> None:
    script = "A=1 x 'b c' > log 2>&1 &\ncat > f <<'EOF'\nhetlb no\nEOF\ny \\\n  -d '{\n}' | z; w\n"
    assert list(shell_commands(script)) == [["x", "b c"], ["cat"], ["y", "-d", "{\n}"], ["z"], ["w"]]


# --- getting started ---------------------------------------------------------------------------------------

#: The ports of the page, and what is smaller in a test than on the page: time and load, nothing else.
_PORTS = ("8000", "8001", "8080", "8081")
_SMALLER = {
    "hetlb engine --profile": "hetlb engine --time-scale 0.05 --profile",
    "--num-prompts 180 --request-rate 12": "--num-prompts 24 --request-rate 240",
    "--budget 1m": "--budget 1m --repeats 1",
}


def walk(folder: Path, ports: list[int]) -> str:
    """Run the blocks of the page in order in one shell; what they printed. Nothing outlives it."""
    script = ["set -eu"]
    for block in blocks(GETTING_STARTED):
        assert block.kind == "sh", f"line {block.line}: expected a block that is run, or marked as not run"
        if block.why is None:
            script += [f"echo '=== line {block.line}'", block.text]
    text = "\n".join([*script, "wait"])
    for shown_text, smaller in _SMALLER.items():
        assert shown_text in text
        text = text.replace(shown_text, smaller)
    for port, instead in zip(_PORTS, ports, strict=True):
        assert port in text
        text = re.sub(rf"\b{port}\b", str(instead), text)
    environment = {
        key: value for key, value in os.environ.items() if key not in ("OPENAI_API_KEY", "HETLB_ADMIN_TOKEN")
    }
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    output = folder / "output"
    with output.open("w") as stream:
        process = subprocess.Popen(
            ["bash", "-c", text], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=stream,
            stderr=subprocess.STDOUT, process_group=0,
        )  # fmt: skip
        try:
            status = process.wait()
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                left_over = False
            else:
                left_over = True
            process.wait()
    said = output.read_text()
    logs = "".join(f"\n--- {log.name}\n{log.read_text()}" for log in sorted(folder.glob("*/*.log")))
    assert status == 0, said[-4000:] + logs[-4000:]
    assert not left_over, f"the page leaves processes behind\n{said[-2000:]}"
    return said


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("curl") and shutil.which("bash")), reason="the page uses curl and a shell"
)
def test_getting_started_leads_from_nothing_to_a_report(tmp_path: Path) -> None:
    ports = [free_port() for _ in _PORTS]
    said = walk(tmp_path, ports)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())

    assert re.search(r"^x-hetlb-instance: (h100|l40s)\r?$", said, re.MULTILINE | re.IGNORECASE)

    compared = json.loads((folder / "compare.json").read_text())
    assert [run["policy"] for run in compared["runs"]].count("hetlb") == 3
    assert {run["policy"] for run in compared["runs"]} == {"rr", "least-requests", "hetlb"}
    for run in compared["runs"]:
        assert (run["completed"], run["failed"]) == (24, 0)
        assert {each["name"] for each in run["instances"]} <= {"h100", "l40s"}
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")

    for name in ("h100", "l40s"):
        profile = load_profile(folder / f"{name}.yaml")
        assert profile.source is not None
        assert (profile.source.kind, profile.source.measured) == ("live", True)
    assert {spec.name: spec.latency is not None for spec in load_fleet(folder / "fleet.yaml").instances} == {
        "h100": True,
        "l40s": True,
    }
    assert re.search("event=reloaded .*0 instances out, 0 in, 2 changed", said)

    fleet, _ = json.JSONDecoder().raw_decode(said, said.index('{"policy"'))
    states = {each["name"]: each["state"] for each in fleet["models"][0]["instances"]}
    assert states == {"h100": "ready", "l40s": "drain"}


def test_what_getting_started_does_not_run_says_why() -> None:
    skipped = [block for block in blocks(GETTING_STARTED) if block.why is not None]
    assert [block.why for block in skipped] == ["installs", "needs two GPUs"]
    # What needs a GPU differs from what is run in who answers, and in nothing that comes after.
    real = list(shell_commands(skipped[1].text))
    assert [words[:2] for words in real] == [["vllm", "serve"]] * 2
    emulated = "".join(block.text for block in blocks(GETTING_STARTED) if "hetlb engine" in block.text)
    for words in real:
        for flag in ("--served-model-name", "--port"):
            assert f"{flag} {words[words.index(flag) + 1]} " in emulated


_VLLM_PARSER = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for arguments in json.load(sys.stdin):
    make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    print("ok")
"""


def vllm_accepts(commands: list[list[str]]) -> None:
    """Each is what follows `vllm serve`; vLLM's own parser reads it."""
    result = subprocess.run(
        [str(VLLM / "bin" / "python"), "-c", _VLLM_PARSER],
        input=json.dumps(commands), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.stdout.split() == ["ok"] * len(commands), result.stderr[-2000:]


@pytest.mark.vllm
def test_vllm_knows_the_flags_that_the_pages_show() -> None:
    commands = [arguments[1:] for _, arguments in shown("vllm")]
    assert commands
    vllm_accepts(commands)


# --- the other pages ---------------------------------------------------------------------------------------


def test_every_fleet_file_shown_is_one(tmp_path: Path) -> None:
    """Profiles and keys that a file names are not there: all else is as it should be."""
    shown_here = [block.text for page in PAGES for block in blocks(page) if block.kind == "yaml"]
    fleets = [text for text in shown_here if text.startswith("version: 1\nmodels:")]
    assert fleets
    for number, text in enumerate(fleets):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        try:
            wrong = [] if load_fleet(path).instances else ["no instances"]
        except ConfigErrors as found:
            wrong = [line for line in found.lines if "no such file" not in line]
        assert wrong == [], text


def test_every_key_named_exists() -> None:
    known = [key.path for key in reference().keys_of(FleetFile)]
    pattern = r"`((?:listen|admin|policy|queue|health|scrape|proxy|pick|models\[\])\.[a-z_.\[\]]+)[`:]"
    for page in PAGES:
        if page.name not in ("CHANGELOG.md", "experiments.md"):  # these tell of former keys too
            for key in re.findall(pattern, page.read_text()):
                assert any(each == key or each.startswith((f"{key}.", f"{key}[")) for each in known), (
                    page.name,
                    key,
                )


def test_the_table_of_contents_has_every_page() -> None:
    contents = (DOCS / "README.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in contents, page.name
