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
#: Every command line of `sys.argv`, one after the other: `[exit status, standard error]` of each as JSON.
SEVERAL = (
    BLOCKED
    + """
import contextlib, io, json
found = []
for line in sys.argv[1:]:
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        try:
            code = main(line.split())
        except SystemExit as ended:
            code = ended.code
    found.append([code, error.getvalue()])
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


def several_without_tools(lines: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Exit status and standard error of command lines, run in one process."""
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, *lines], capture_output=True, text=True, check=True, timeout=HANG_S
    )
    return dict(zip(lines, map(tuple, json.loads(done.stdout)), strict=True))


def test_every_command_has_help_without_any_extra() -> None:
    found = several_without_tools([f"{command} --help" for command in COMMANDS])
    assert {line: code for line, (code, _) in found.items()} == dict.fromkeys(found, 0)


def test_help_of_a_command_whose_extra_is_missing_says_how_to_install_its_flags() -> None:
    for command in TOOLS_COMMANDS:
        shown = " ".join(hetlb_without_tools(command, "--help").stdout.split())
        assert COMMANDS[command].summary.split()[0] in shown.lower()
        assert "to be installed: pip install 'hetlb[tools]'" in shown


def test_a_command_whose_extra_is_missing_says_so_in_one_line() -> None:
    for line, (code, error) in several_without_tools(
        [line for command in sorted(TOOLS_COMMANDS) for line in (command, f"{command} --config F --json")]
    ).items():
        assert code == 2, line
        (said,) = error.splitlines()
        assert said.startswith(f"hetlb {line.split()[0]}: expected the package ")
        assert said.endswith("to be installed: pip install 'hetlb[tools]'")


def test_completion_of_the_base_commands_needs_no_extra() -> None:
    done = hetlb_without_tools("completion", "bash")
    assert done.returncode == 0, done.stderr
    assert "--event-log" in done.stdout


def test_simulate_and_explain_run_without_the_tools() -> None:
    fleet = str(ROOT / "configs" / "two-servers.yaml")
    simulated = hetlb_without_tools(
        "simulate", "--config", fleet, "--trace", str(DEMO / "trace.csv"), "--num-prompts", "20", "--json"
    )
    assert (simulated.returncode, simulated.stdout[:1]) == (0, "{"), simulated.stderr
    explained = hetlb_without_tools("explain", "--config", fleet, "--input", "512", "--json")
    assert (explained.returncode, explained.stdout[:1]) == (0, "{"), explained.stderr


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.csv")
    done = hetlb_without_tools("simulate", "--trace", missing, "--plot", str(tmp_path / "p.png"))
    assert done.returncode == 2
    assert "the package matplotlib" in done.stderr


@pytest.mark.parametrize(
    ("flags", "package"),
    [(("--plot", "r.png"), "matplotlib"), (("--compare", "rr,hetlb", "--rounds", "2"), "scipy")],
)
def test_a_bench_names_the_package_that_it_misses_before_it_measures(
    flags: Sequence[str], package: str
) -> None:
    done = hetlb_without_tools("bench", "--url", "http://127.0.0.1:9", *flags)
    assert (done.returncode, f"the package {package} to be" in done.stderr) == (2, True), done.stderr


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
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HETLB"))}

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
