"""Policies of other packages: found by name, shown with their terms, refused in one line where broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import dispatched, make_scheduler, request, spec

from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.policies.registry import POLICIES, PolicyRegistry
from hetlb.balancer.core.policies.views import View, ViewPolicy, view
from hetlb.balancer.core.types import Outcome
from hetlb.errors import ConfigError, HetlbError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "policies.md").read_text()


def block(kind: str) -> str:
    [found] = re.findall(f"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    return found


def install(folder: Path, module: str, source: str, name: str, value: str) -> Path:
    """A package as pip leaves it: a module, and a folder that names its entry point."""
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hetlb.policies]\n{name} = {value}\n")
    return folder


def hetlb(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", ""))))
    return subprocess.run(
        [sys.executable, "-m", "hetlb", *arguments],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The package of the page."""
    [(name, value)] = re.findall(r'\n(\S+) = "(\S+:\S+)"', block("toml"))
    return install(tmp_path / "site", "short_first", block("python"), name, value)


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    profiles = ROOT / "hetlb" / "tools" / "demo"
    path.write_text(
        "version: 1\npolicy: {name: short-first}\nmodels:\n  - name: m\n    instances:\n"
        + "".join(
            f'      - {{name: {each}, url: "http://h:{n}", profile: {profiles}/{each}.yaml}}\n'
            for n, each in enumerate(("slow", "fast"), start=1)
        )
    )
    (tmp_path / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n" + "0,300,40\n0,20,10\n" * 60)
    return path


def test_the_policy_of_the_page_is_explained_and_simulated(site: Path, fleet: Path) -> None:
    explained = hetlb(site, "explain", "--config", str(fleet), "--json")
    assert explained.returncode == 0, explained.stderr
    document = json.loads(explained.stdout)
    slow, fast = document["candidates"]
    assert document["chosen"] == "fast"
    assert list(fast["terms"]) == ["first_token_s", "others_s"]
    assert fast["weights"] == {"first_token_s": 1.0, "others_s": 0.1}
    assert fast["terms"]["first_token_s"] == fast["forecast"]["first_token_s"] < slow["score"]
    trace = str(fleet.parent / "trace.csv")
    command = ("simulate", "--config", str(fleet), "--trace", trace, "--json", "--policy", "short-first,rr")
    simulated = hetlb(site, *command, "--seeds", "2")
    assert simulated.returncode == 0, simulated.stderr
    runs = json.loads(simulated.stdout)["runs"]
    assert [each["policy"] for each in runs] == ["short-first"] * 2 + ["rr"] * 2
    assert all(each["completed"] == 120 for each in runs)


def test_an_unknown_name_lists_what_there_is(site: Path, fleet: Path, tmp_path: Path) -> None:
    fleet.write_text(fleet.read_text().replace("short-first", "shortfirst"))
    refused = hetlb(site, "explain", "--config", str(fleet))
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "policy.name: expected one of rr, wrr" in refused.stderr
    assert "short-first" in refused.stderr
    assert "short-first" not in hetlb(tmp_path, "explain", "--config", str(fleet)).stderr.partition("got")[0]


@pytest.mark.parametrize(
    ("source", "value", "message"),
    [
        ("import missing_module\n", "broken:P", "ModuleNotFoundError: No module named 'missing_module'"),
        (
            "P = 3\n",
            "broken:P",
            "expected a subclass of ViewPolicy (hetlb.balancer.core.policies.views), got 3",
        ),
        ("", "broken:P", "has no attribute 'P'"),
        (
            "from hetlb.balancer.core.policies.views import ViewPolicy\n"
            "class P(ViewPolicy):\n    name = 'q'\n",
            "broken:P",
            "name: expected 'short-first', got 'q'",
        ),
    ],
)
def test_a_broken_package_names_itself(
    tmp_path: Path, source: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    monkeypatch.syspath_prepend(install(tmp_path / "broken", "broken", source, "short-first", value))
    with pytest.raises(ConfigError) as refused:
        PolicyRegistry()["short-first"]
    assert "policy 'short-first' of broken 1.0 (broken:P): " in str(refused.value)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


class Odd(ViewPolicy):
    name = "odd"

    def terms(self, view: View) -> dict[str, float]:
        return {"odd": 1.0 / (view.sequences - 1) if view.name == "b" else float("nan")}


def test_an_exception_in_a_policy_names_policy_and_instance() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")])
    scheduler.placement.use(Odd(PolicyParams(), scheduler._rng))
    with pytest.raises(HetlbError, match="policy odd: terms of a: ValueError: expected numbers"):
        scheduler.on_arrival(request(1), 0.0)


class Roomy(ViewPolicy):
    name = "roomy"
    holds_back = True

    def terms(self, view: View) -> dict[str, float] | None:
        return None if view.in_flight else {"end_s": view.end_s}


def test_a_request_waits_while_a_policy_has_no_terms_for_it() -> None:
    scheduler = make_scheduler([spec("a"), spec("b", slower=2.0)])
    scheduler.placement.use(Roomy(PolicyParams(), scheduler._rng))
    leases = [dispatched(scheduler.on_arrival(request(i), 0.0)) for i in range(2)]
    assert [each.instance for each in leases] == ["a", "b"]
    assert scheduler.on_arrival(request(2), 0.0) == []
    assert dispatched(scheduler.on_lease_ended(leases[1], Outcome.OK, 1.0)).instance == "b"


def test_nothing_can_be_changed_through_a_view() -> None:
    scheduler = make_scheduler([spec("a")])
    [instance] = scheduler.instances
    ctx = scheduler.placement.context(request(1), 10.0, 0, 0.0)
    seen = view(ctx, instance)
    public = [name for name in dir(View) if not name.startswith("_")]
    shown = {name: getattr(seen, name) for name in public}
    for name, value in shown.items():
        assert isinstance(value, int | float | str | None), name
        with pytest.raises(AttributeError):
            setattr(seen, name, value)
    named = re.findall(r"^\| the .*\| (.*) \|$", PAGE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(named))) == set(public)
    assert shown["slots"] == 64


def test_own_policies_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "site", "bad", "P = 3\n", "hetlb", "bad:P"))
    registry = PolicyRegistry()
    assert registry["hetlb"] is POLICIES["hetlb"]
    assert list(registry) == list(dict.fromkeys(registry))
    with pytest.raises(KeyError):
        registry["nobody"]
    monkeypatch.syspath_prepend(install(tmp_path / "more", "bad2", "P = 3\n", "odd", "bad2:P"))
    with pytest.raises(ConfigError, match="of bad2 1"):
        PolicyRegistry()["odd"]
