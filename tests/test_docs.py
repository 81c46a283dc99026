"""Nothing that a user can set, see or read in a result is left out of the docs."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from hetlb.balancer.clients.api_keys import Tenant
from hetlb.balancer.config.fleet_tables import FleetFile
from hetlb.balancer.core.policies.baselines import COMBINE_FORMS
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.predictor import PREDICTORS
from hetlb.balancer.core.types import Outcome, RejectReason
from hetlb.balancer.http.error_responses import REJECTIONS
from hetlb.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "bench").rglob("*.md")),
]

#: Paths of the Python files of the project.
SCRIPTS = ["hatch_build.py"]
SCRIPTS += [
    path.relative_to(ROOT).as_posix()
    for folder in ("bench", "configs", "hetlb", "profiling", "tests")
    for path in (ROOT / folder).rglob("*.py")
]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def reference() -> ModuleType:
    """The module that makes the pages of docs/reference."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "configs" / "site" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_code_says() -> None:
    pages = reference().PAGES
    assert {path.name for path in (ROOT / "docs" / "reference").iterdir()} == pages.keys()
    for name, make in pages.items():
        assert page(f"reference/{name}") == make(), "run `make reference`"
    behaviour = page("behaviour.md")
    assert reference().with_evidence(behaviour) == behaviour, "run `make reference`"


def test_a_key_without_words_and_words_without_a_key_are_found() -> None:
    made = reference()
    keys = list(made.keys_of(Tenant))
    words = made.meanings()["keys of clients"]
    with pytest.raises(ValueError, match="spare: not a key"):
        made._key_rows(keys, {**words, "spare": "words"})
    words.pop("name")
    with pytest.raises(ValueError, match="name: no meaning"):
        made._key_rows(keys, words)


def test_the_first_table_of_keys_has_what_most_fleets_need() -> None:
    made = reference()
    known = {key.path for key in made.keys_of(FleetFile)}
    assert set(made.FIRST_KEYS) <= known
    first, advanced = re.split(r"^## Fleet file, advanced$", page("reference/keys.md"), flags=re.MULTILINE)
    for path in made.FIRST_KEYS:
        assert f"`{path}`" in first
    assert "`scrape.interval_s`" in advanced
    names = [row.split("|")[1] for row in first.splitlines() if row.startswith("| `")]
    assert sum(len(each.split()) for each in names) <= 25
    assert "`scrape.interval_s`" not in first


def test_every_flag_says_what_it_is() -> None:
    rows = re.findall(r"^\| (`.*?`) \|.*\| (.*?) \|$", page("reference/flags.md"), re.MULTILINE)
    assert len(rows) > 150
    assert [flag for flag, meaning in rows if not meaning] == []


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_is_described(outcome: Outcome) -> None:
    assert f"| `{outcome.value}` |" in page("reference/states.md")


@pytest.mark.parametrize("reason", list(RejectReason))
def test_every_reason_to_turn_a_request_down_is_described_with_its_outcome(reason: RejectReason) -> None:
    assert f"| `{reason.value}` | `{REJECTIONS[reason].outcome.value}` |" in page("reference/states.md")


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_described(name: str) -> None:
    assert f"| `{name}` |" in page("scheduling.md")


@pytest.mark.parametrize("name", PREDICTORS)
def test_every_predictor_is_described(name: str) -> None:
    assert f"| `{name}` |" in page("estimates.md")


@pytest.mark.parametrize("form", COMBINE_FORMS)
def test_every_combine_form_is_described(form: str) -> None:
    assert f"`{form}`" in page("scheduling.md")


def test_the_runbook_has_every_alert() -> None:
    groups = yaml.safe_load((ROOT / "configs/alerts/hetlb.yaml").read_text())["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]
    assert re.findall(r"^\| `(\w+)` \|", page("runbook.md"), re.MULTILINE) == alerts


def test_the_readme_shows_the_two_commands() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:40]
    for command in ("make demo", "make test"):
        assert any(line.startswith(command) for line in first_screen)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_inside_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_script_that_a_page_names_is_there(path: Path) -> None:
    if path.name == "CHANGELOG.md":
        pytest.skip("names what went, too")
    text = path.read_text()
    named = set(re.findall(r"(?<![\w/])[a-z0-9_-]+(?:/[a-z0-9_-]+)*\.py\b", text))
    named -= set(re.findall(r"<!-- file: (\S+) -->", text))  # files that the reader writes
    assert {
        name for name in named if not any(f"/{script}".endswith(f"/{name}") for script in SCRIPTS)
    } == set()


def test_the_site_has_no_dead_link_and_no_page_without_a_place(tmp_path: Path) -> None:
    """MkDocs in strict mode: links, anchors and the navigation, of the pages outside docs/ too.

    With `--quiet` it counts no warning, and so finds nothing.
    """
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in tmp_path.glob("*.html")} >= {"index", "ARCHITECTURE", "configuration"}
    assert (tmp_path / "configs" / "deploy" / "fleet.yaml").is_file()


def test_the_site_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert [name for name in pages if name not in nav] == []


def test_the_manual_page_is_what_the_parser_says() -> None:
    made = reference()
    text = made.MANUAL.read_text()
    assert text == made.manual_page(), "run `make reference`"
    plain = text.replace("\\-", "-")
    assert ".SH NAME\nhetlb - reverse proxy" in plain  # what `whatis hetlb` reads
    assert all(f".SS \\fBhetlb {command}\\fR" in plain for command in COMMANDS)
    assert "--event-log" in plain


#: Two screens: lines of a guide, folded at 160 columns.
LONGEST_GUIDE = 120
GUIDES = sorted((ROOT / "docs").glob("*.md"))


def folded_lines(text: str) -> int:
    return sum(max(1, math.ceil(len(line) / 160)) for line in text.splitlines())


def test_a_guide_is_at_most_two_screens() -> None:
    assert folded_lines("a\n\n" + "b" * 161) == 4
    lengths = {path.name: folded_lines(path.read_text()) for path in GUIDES}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_GUIDE} == {}


def test_the_guides_grow_no_longer() -> None:
    """Words of the pages beside the reference, and of the README, as `wc -w` counts them."""
    assert sum(len(path.read_text().split()) for path in (*GUIDES, ROOT / "README.md")) <= 22_000
