"""`pip install hetlb` is enough for the commands that serve; the others name their extra in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers import HANG_S

import hetlb.tools.demo
from hetlb.cli.main import COMMANDS
from hetlb.extras import EXTRAS

ROOT = Path(__file__).parents[1]
DEMO = Path(hetlb.tools.demo.__file__).parent
#: Commands that need the extra `tools`; other commands have an extra of their own or need none.
TOOLS_COMMANDS = {"place", "profile", "rent", "search", "split"} & COMMANDS.keys()
#: Largest installed tree without the tools, in bytes.
LARGEST_TREE = 60_000_000

ENGINE = ("engine", "--profile", str(DEMO / "fast.yaml"), "--served-model-name", "m", "--port", "0")

#: A `hetlb` in which the packages of the extra `tools` cannot be imported.
BLOCKED = """
import sys
from hetlb.cli.main import main
from hetlb.extras import EXTRAS

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
"""
ONE = BLOCKED + "sys.exit(main(sys.argv[1:]))"
#: Every command line of standard input, one after the other: `[exit status, output, errors]` of each as JSON.
SEVERAL = (
    BLOCKED
    + """
import contextlib, io, json
found = []
for line in json.load(sys.stdin):
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = main(line.split())
        except SystemExit as ended:
            code = ended.code
    found.append([code, output.getvalue(), errors.getvalue()])
print(json.dumps(found))
"""
)


def hetlb_without_tools(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ONE, *arguments], capture_output=True, text=True, check=False, timeout=HANG_S
    )


def start_until_ready(command: list[str]) -> str:
    """Start a server, wait for its first line, stop it as Ctrl-C does; returns the line."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            return process.stdout.readline()
        finally:
            process.terminate()


def test_every_extra_is_one_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        assert any(
            line.startswith(package.replace("_", "-")) for line in project["optional-dependencies"][extra]
        )
        assert not any(line.startswith(package) for line in project["dependencies"])


def several_without_tools(lines: Sequence[str]) -> dict[str, tuple[int, str, str]]:
    """Return exit status, standard output and error of command lines, run in one process."""
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL], input=json.dumps(lines), capture_output=True, text=True, check=True,
        timeout=HANG_S,
    )  # fmt: skip
    return dict(zip(lines, map(tuple, json.loads(done.stdout)), strict=True))


def test_every_command_has_help_without_any_extra() -> None:
    """The help of a command without its extra says how to install the flags."""
    found = several_without_tools([f"{command} --help" for command in COMMANDS])
    assert {line: code for line, (code, _, _) in found.items()} == dict.fromkeys(found, 0)
    for command in TOOLS_COMMANDS:
        shown = " ".join(found[f"{command} --help"][1].split())
        assert COMMANDS[command].summary.split()[0] in shown.lower()
        assert "to be installed: pip install 'hetlb[tools]'" in shown


def test_a_command_whose_extra_is_missing_says_so_in_one_line() -> None:
    for line, (code, _, error) in several_without_tools(
        [line for command in sorted(TOOLS_COMMANDS) for line in (command, f"{command} --config F --json")]
    ).items():
        assert code == 2, line
        (said,) = error.splitlines()
        assert said.startswith(f"hetlb {line.split()[0]}: expected the package ")
        assert said.endswith("to be installed: pip install 'hetlb[tools]'")


def test_completion_simulate_and_explain_run_without_the_tools() -> None:
    fleet = ROOT / "configs" / "two-servers.yaml"
    simulate = f"simulate --config {fleet} --trace {DEMO / 'trace.csv'} --num-prompts 20 --json"
    explain = f"explain --config {fleet} --input 512 --json"
    found = several_without_tools(["completion bash", simulate, explain])
    assert [(code, error) for code, _, error in found.values()] == [(0, "")] * 3
    assert "--event-log" in found["completion bash"][1]
    assert (found[simulate][1][0], found[explain][1][0]) == ("{", "{")


def test_a_package_that_is_missing_is_named_before_the_work(tmp_path: Path) -> None:
    picture = f"simulate --trace {tmp_path / 'none.csv'} --plot {tmp_path / 'p.png'}"
    bench = "bench --url http://127.0.0.1:9"
    packages = {
        picture: "matplotlib",
        f"{bench} --plot r.png": "matplotlib",
        f"{bench} --compare rr,hetlb --rounds 2": "scipy",
    }
    for line, (code, _, error) in several_without_tools(list(packages)).items():
        assert (code, f"the package {packages[line]} to be" in error) == (2, True), error


def test_the_demo_runs_without_the_tools() -> None:
    done = hetlb_without_tools("demo", "--num-prompts", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert [run["completed"] for run in json.loads(done.stdout)["runs"]] == [4, 4]


def test_engine_and_serve_start_without_the_tools() -> None:
    hetlb = [sys.executable, "-c", ONE]
    assert start_until_ready([*hetlb, *ENGINE]).startswith("hetlb engine ready on ")
    serve = ["serve", "--instance", "http://127.0.0.1:9", "--port", "0", "--admin-port", "0"]
    assert start_until_ready([*hetlb, *serve]).startswith("hetlb ready on ")


@pytest.mark.slow
def test_an_empty_environment_gets_a_small_tree_that_serves(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    tests_own = ("PYTHON", "HETLB", "SSL_CERT_FILE")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(tests_own)}

    def run(*command: str) -> str:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment
        ).stdout

    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", str(ROOT))
    run(python, "-m", "pip", "uninstall", "-q", "-y", "pip", "setuptools")  # the environment's own
    size = sum(each.lstat().st_size for each in (folder / "lib").rglob("*") if each.is_file())
    assert size <= LARGEST_TREE
    hetlb = str(folder / "bin" / "hetlb")
    for command in COMMANDS:
        run(hetlb, command, "--help")
    assert start_until_ready([hetlb, *ENGINE]).startswith("hetlb engine ready on ")
