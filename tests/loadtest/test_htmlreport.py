"""The report is one well-formed page that shows what the document says and asks for nothing from outside."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

from loadtest.test_figures import record, result

from hetlb.loadtest.figures import run_figures
from hetlb.loadtest.htmlreport import report
from hetlb.loadtest.runs import Measured

VOID = {"meta", "br"}
SVG_EMPTY = {"line", "polyline", "circle"}


class Balanced(HTMLParser):
    """Fails on a tag that is closed out of turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        assert tag in SVG_EMPTY

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page(*, failed: bool = False, name: str = "a") -> Balanced:
    measured = []
    for rate in (2.0, 4.0):
        records = result(*(record(i / rate, name=name, ok=not failed) for i in range(10)))
        run = {"policy": None, "round": 1, "request_rate": rate, **run_figures(records)}
        measured.append(Measured(run, records))
    document = {
        "runs": [each.run for each in measured],
        "comparison": [],
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
    assert re.findall(r"src=|href=|<script|@import|url\(", text) == []
    balanced = Balanced()
    balanced.feed(text)
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
