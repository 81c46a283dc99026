"""The report is one well-formed page that shows what the document says and asks for nothing from outside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import pytest
from loadtest.test_metrics import record, result

from hetlb.loadtest import htmlreport
from hetlb.loadtest.compare import FIGURES, comparisons
from hetlb.loadtest.htmlreport import report
from hetlb.loadtest.metrics import run_figures
from hetlb.loadtest.runs import MeasuredRun

VOID = {"meta", "br"}


class Balanced(HTMLParser):
    """Fails on a tag that is closed out of turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.bold = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.bold += tag == "b"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page(*, failed: bool = False, name: str = "a", comparison: Sequence[dict[str, Any]] = ()) -> Balanced:
    measured = []
    for rate in (2.0, 4.0):
        records = result(*(record(i / rate, name=name, ok=not failed) for i in range(10)))
        run = {"policy": None, "round": 1, "request_rate": rate, **run_figures(records)}
        measured.append(MeasuredRun(run, records))
    document = {
        "runs": [each.run for each in measured],
        "comparison": comparison,
        "search": [],
        "metadata": {
            "model_id": "m <i>",
            "url": "http://h",
            "date": "2026-01-01",
            "note": "</td>",
            "slo": {},
        },
    }
    text = report(document, measured)
    assert re.findall(r"src=|href=|@import|url\(|^import |^export \{", text, re.MULTILINE) == []
    balanced = Balanced()
    balanced.feed(text)
    balanced.text = " ".join(balanced.text.split())
    assert balanced.open == []
    return balanced


def test_a_page() -> None:
    text = page(name="<b>gpu</b>").text
    assert "m <i>" in text
    assert "<b>gpu</b>" in text
    for heading in (
        "Runs",
        "Against the rate",
        "Distributions",
        "Instances over time",
        "To measure it again",
    ):
        assert heading in text


def test_a_page_of_runs_without_an_answer() -> None:
    text = page(failed=True, name="").text
    assert "SUSPECT: 2 of 2 runs" in text
    assert "failed: 10 of 10 requests (10 x timeout)" in text


def rounds_of(rounds: int, spread: float, suspect: str) -> list[dict[str, Any]]:
    """`p2c` gives 10 % more than `rr` (100) in every figure, give or take `spread` from round to round."""
    return [
        {
            "policy": policy, "round": number, "request_rate": 2.0,
            "client": {"verdict": "SUSPECT" if policy == suspect else "VALID"},
            **dict.fromkeys(FIGURES, 100.0 if policy == "rr" else 110.0 + spread * (-1) ** number),
        }
        for policy in ("rr", "p2c")
        for number in range(1, rounds + 1)
    ]  # fmt: skip


def compared(rounds: int, *, spread: float) -> Balanced:
    return page(comparison=comparisons(rounds_of(rounds, spread, ""), ["rr", "p2c"]))


@pytest.mark.parametrize(("suspect", "marked"), [("", []), ("p2c", ["p2c"]), ("rr", ["rr", "p2c"])])
def test_a_policy_is_marked_where_its_own_runs_or_the_first_ones_are_suspect(
    suspect: str, marked: list[str]
) -> None:
    runs = rounds_of(2, 1.0, suspect)
    [(rate, table)] = htmlreport._policies(comparisons(runs, ["rr", "p2c"]), runs)
    assert rate == "2"
    assert [
        row[0] for row, each in zip(table.rows, table.verdicts, strict=True) if each == "SUSPECT"
    ] == marked


def test_policies_are_beside_each_other_and_sure_differences_are_bold() -> None:
    sure, unsure, once = compared(4, spread=1.0), compared(4, spread=40.0), compared(1, spread=0.0)
    for found in (sure, unsure, once):
        assert found.text.count("+10.0 %") >= 7
        assert "Differences" in found.text
    assert (sure.bold, unsure.bold, once.bold) == (7, 0, 0)
    assert "Means over 4 rounds. Bold: the 95 % confidence interval" in sure.text
    assert "One round gives no interval" in once.text
