"""Nothing that a user can set, see or read in a result is left out of the docs."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hetlb.cli.main import COMMANDS, build_parser
from hetlb.config.api_keys import ApiKeyTable
from hetlb.config.cluster import ClusterFile
from hetlb.config.fleet_tables import FleetFile, ModelTable
from hetlb.config.profile import Profile
from hetlb.core.policies.base import COMBINE_FORMS
from hetlb.core.policies.registry import POLICIES
from hetlb.core.predictor import PREDICTORS
from hetlb.core.types import Outcome, RejectReason
from hetlb.proxy.http.error_responses import REJECTIONS

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def keys(kind: type, prefix: str = "") -> list[str]:
    """Every key of a table and of the tables in it, as `a.b`."""
    found = []
    for field in msgspec.structs.fields(kind):
        inner = [
            part
            for part in (field.type, *getattr(field.type, "__args__", ()))
            if isinstance(part, type) and issubclass(part, msgspec.Struct)
        ]
        if inner:
            repeated = "[]" if str(field.type).startswith("tuple") else ""
            found += keys(inner[0], f"{prefix}{field.name}{repeated}.")
        else:
            found.append(prefix + field.name)
    return found


@pytest.mark.parametrize("key", [*keys(FleetFile), *keys(ModelTable, "models[].")])
def test_every_key_of_a_fleet_file_is_described(key: str) -> None:
    assert f"`{key}`" in page("configuration.md")


@pytest.mark.parametrize("key", [*keys(ClusterFile), *keys(ApiKeyTable)])
def test_every_key_of_a_cluster_file_and_of_the_clients_keys_is_described(key: str) -> None:
    assert f"`{key}`" in page("configuration.md")


@pytest.mark.parametrize("key", keys(Profile))
def test_every_key_of_a_profile_is_described(key: str) -> None:
    text = page("configuration.md")
    if re.fullmatch(r"(prefill|decode)\.k[1-8]", key):
        assert key.partition(".")[0] + ".k" in text
        return
    assert f"`{key}`" in text or all(part in page("profiles.md") for part in key.split("."))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_named(command: str) -> None:
    text = page("configuration.md")
    line = next(line for line in text.splitlines() if line.startswith(f"| `hetlb {command}`"))
    parser = build_parser(command)
    subparsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for action in subparsers.choices[command]._actions:
        for option in action.option_strings:
            assert option in ("-h", "--help") or f"`{option}`" in line, option


def test_every_metric_is_described() -> None:
    source = (ROOT / "hetlb" / "proxy" / "telemetry" / "prometheus.py").read_text()
    names = set(re.findall(r'"(hetlb_[a-z_]+)"', source))
    assert len(names) > 15
    text = page("metrics.md")
    for name in names:
        assert re.search(rf"`{name}(_total|_info)?`", text), name


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_is_described(outcome: Outcome) -> None:
    assert f"| `{outcome.value}` |" in page("behaviour.md")


@pytest.mark.parametrize("reason", list(RejectReason))
def test_every_reason_to_turn_a_request_down_is_described_with_its_outcome(reason: RejectReason) -> None:
    assert f"| `{reason.value}` | `{REJECTIONS[reason].outcome.value}` |" in page("behaviour.md")


@pytest.mark.parametrize("name", [*POLICIES, *PREDICTORS])
def test_every_policy_and_predictor_is_described(name: str) -> None:
    assert f"| `{name}` |" in page("scheduling.md")


@pytest.mark.parametrize("form", COMBINE_FORMS)
def test_every_combine_form_is_described(form: str) -> None:
    assert f"`{form}`" in page("scheduling.md")


def test_the_readme_shows_the_two_commands() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:40]
    for command in ("make demo", "make test"):
        assert any(line.startswith(command) for line in first_screen)


def shown_commands() -> list[str]:
    found = []
    for path in PAGES:
        for block in re.findall(r"```\n(.*?)```", path.read_text(), re.DOTALL):
            found += [
                line
                for line in block.splitlines()
                if line.startswith("hetlb ") and line.split()[1] in COMMANDS
            ]
    return found


@pytest.mark.parametrize("line", shown_commands())
def test_every_command_shown_is_one(line: str) -> None:
    arguments = shlex.split(line, comments=True)[1:]
    build_parser(arguments[0]).parse_args(arguments)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_inside_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_the_site_has_no_dead_link_and_no_page_without_a_place(tmp_path: Path) -> None:
    """MkDocs in strict mode: links, anchors and the navigation, of the pages outside docs/ too."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in tmp_path.glob("*.html")} >= {"index", "ARCHITECTURE", "configuration"}
    assert (tmp_path / "configs" / "deploy" / "fleet.yaml").is_file()


def test_the_manual_page_has_every_command(tmp_path: Path) -> None:
    """The page that `make man` writes."""
    page = tmp_path / "hetlb.1"
    subprocess.run(
        [
            str(Path(sys.executable).parent / "argparse-manpage"), "--module", "hetlb.cli.main",
            "--function", "build_parser", "--prog", "hetlb", "--project-name", "hetlb", "--output", str(page),
        ],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    text = page.read_text().replace("\\-", "-")
    assert all(f"'hetlb {command}'" in text for command in COMMANDS)
    assert "--event-log" in text
