"""Grafana's dashboards and the alert rules name only metrics and labels that there are."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetlb.balancer.admin.causes import CAUSES as STATE_CAUSES
from hetlb.balancer.admin.causes import State
from hetlb.balancer.core.types import CAUSES, AdminState, Health, Outcome
from hetlb.balancer.telemetry.events import Event

ROOT = Path(__file__).parents[2]
BOARDS = sorted((ROOT / "configs" / "grafana").glob("*.json"))
ALERTS = ROOT / "configs" / "alerts" / "hetlb.yaml"
#: Labels that Prometheus itself or the functions used add to every series. It renames a label `instance` of a
#: series to `exported_instance`.
EVERYWHERE = {"instance", "job", "le"}


def described() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of every metric by the reference, which another test holds to the truth."""
    found = {}
    for line in (ROOT / "docs" / "reference" / "metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and re.fullmatch("`(hetlb|process)_[a-z_0-9]+`", cells[0]):
            labels = {label for label in re.split(r"[, ]+", cells[2]) if label}
            found[cells[0].strip("`")] = (cells[1], labels)
    return found


METRICS = described()


def panels(board: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(board.read_text())["panels"]
    return found


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    for board in BOARDS:
        for panel in panels(board):
            for target in panel["targets"]:
                yield f"{board.stem}: {panel['title']}", target["expr"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_metric_and_label_named_is_one(where: str, expression: str) -> None:
    names = set(re.findall(r"\b((?:hetlb|process)_[a-z_0-9]+)", expression))
    assert names
    labels: set[str] = set()
    for name in names:
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        histogram = METRICS.get(family, ("", set()))[0] == "histogram"
        kind, own = METRICS[family if histogram else name]
        labels |= own
        assert (kind == "histogram") == (name != family), f"{where}: {name}"
        grows = re.search(rf"(rate|increase)\({name}|{name}{{.*}} offset", expression)
        assert kind != "counter" or grows, f"{where}: {name}"
    matchers = re.findall(r"[{,]\s*([a-z_]+)\s*(?:=~|!~|!=|=)", expression)
    grouped = [
        label for group in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for label in group.split(",")
    ]
    for label in (*matchers, *(label.strip() for label in grouped if label.strip())):
        assert label.removeprefix("exported_") in labels | EVERYWHERE, f"{where}: {label}"


def test_each_cause_has_an_event_and_an_alert() -> None:
    alerts, events = {rule["alert"]: rule["expr"] for rule in rules()}, {each.event for each in Event}
    for name, kind in STATE_CAUSES.items():
        assert kind.event in events, name
        assert kind.alert or kind.severity is State.WELL, name
        causes = re.findall(r'hetlb_cause{cause=~?"([^"]*)"}', alerts.get(kind.alert, ""))
        assert not causes or name in causes[0].split("|"), f"{name}: {kind.alert} leaves it out"
        assert not kind.alert or kind.alert in alerts, name


def test_values_of_labels_exist() -> None:
    known = {"outcome": set(Outcome), "health": set(Health), "result": {"done", "refused"},
             "hetlb_state state": set(State), "hetlb_cause cause": set(STATE_CAUSES),
             "hetlb_instance_state state": set(AdminState),
             "hetlb_requests_total cause": set(CAUSES.values())}  # fmt: skip
    seen = 0
    for where, expression in expressions():
        for name, matchers in re.findall(r"([a-z_]+)\{([^}]*)\}", expression):
            for label, values in re.findall(
                r'\b(outcome|state|health|result|cause)[=!]~?"([^"]*)"', matchers
            ):
                of_label = known.get(label) or known[f"{name} {label}"]
                assert set(values.split("|")) <= of_label, where
                seen += 1
    assert seen > 5


def test_boards_are_as_their_table_says() -> None:
    spec = importlib.util.spec_from_file_location("boards", ROOT / "configs" / "site" / "boards.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert {each.stem: each.read_text() for each in BOARDS} == {
        name: made.board(name) for name in made.BOARDS
    }
    assert len(BOARDS) == 4


@pytest.mark.parametrize("board", BOARDS, ids=lambda each: each.stem)
def test_panels_do_not_overlap_and_say_their_unit(board: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels(board):
        box = panel["gridPos"]
        cells = {
            (x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])
        }
        assert box["x"] + box["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_alerts_name_the_instance_and_the_fault() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) > 10
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        for label in re.findall(r"\$labels\.([a-z_]+)", rule["annotations"]["summary"]):
            own = {"exported_instance"} if "hetlb_cause" in rule["expr"] else set()
            assert label in {"instance", "server", "model", "cause"} | own, rule["alert"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on this machine")
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
