"""The report is one well-formed page that shows what the document says and asks for nothing from outside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

from loadtest.test_metrics import record, result

from hetlb.loadtest.campaign import FIGURES, comparisons
from hetlb.loadtest.htmlreport import report

VOID = {"meta", "br"}


class Balanced(HTMLParser):
    """Fails on a tag that is closed out of turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
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
        records.run = {"policy": None, "round": 1, "request_rate": rate, **records.figures()}
        measured.append(records)
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


def test_policies_are_compared_in_pairs() -> None:
    runs: list[dict[str, Any]] = [
        {
            "policy": policy, "round": number, "request_rate": 2.0,
            "client": {"verdict": "VALID"}, **dict.fromkeys(FIGURES, value + number),
        }
        for policy, value in (("rr", 98.0), ("p2c", 108.0))
        for number in (1, 2)
    ]  # fmt: skip
    text = page(comparison=comparisons(runs, ["rr", "p2c"])).text
    assert "p2c against rr, rate 2, 2 paired rounds" in text
    assert text.count("+10 (+10.1 %)") == len(FIGURES)
