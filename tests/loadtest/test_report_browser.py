"""The report in a browser: no table is cut at any width, and what rests on a SUSPECT run is marked."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loadtest.test_metrics import record, result
from proxy.dashboard.browser import Look, launched

from hetlb.loadtest.campaign import comparisons
from hetlb.loadtest.htmlreport import report

WIDTHS = (360, 768, 1400, 1920)
POLICIES = ("rr", "a-policy-with-a-rather-long-name")
INSTANCES = ("h100-node-17.rack-4.cluster.example", "l40s-0", "v100-0")
#: Elements that are wider than what they are shown in; nothing of the page may scroll sideways.
CUT = """() => {
  document.querySelectorAll('details').forEach(each => each.open = true);
  const found = [...document.querySelectorAll('.table, figure, details, section, .banner')]
    .filter(each => each.scrollWidth > each.clientWidth + 1)
    .map(each => `${each.className} ${each.scrollWidth} > ${each.clientWidth}: `
      + each.textContent.slice(0, 80));
  const root = document.documentElement;
  return root.scrollWidth > root.clientWidth ? [`page ${root.scrollWidth}`, ...found] : found;
}"""


def page(*, suspect: bool) -> str:
    """A report with two policies at two rates over three rounds; `suspect`: the second policy's runs are."""
    rng, measured = random.Random(0), []
    for policy in POLICIES:
        for rate in (250.0, 1234.5):
            for number in (1, 2, 3):
                records = result(*(record(i / rate, name=rng.choice(INSTANCES)) for i in range(40)))
                run: dict[str, Any] = {
                    "policy": policy, "round": number, "request_rate": rate, **records.figures()
                }  # fmt: skip
                late = suspect and policy == POLICIES[1]
                run["client"] = {
                    **run["client"],
                    "verdict": "SUSPECT" if late else "VALID",
                    "reasons": ["late: 12 % of the requests went out 131.4 ms or more after they were due"]
                    * late,
                }
                run |= {
                    "total_token_throughput": 1234567.8,
                    "output_throughput": 123456.7,
                    "slo_attainment": 0.5,
                }
                records.run = run
                measured.append(records)
    runs = [each.run for each in measured]
    search = {
        "slo_attainment": 0.95, "policy": POLICIES[1], "max_request_rate": 1234.5, "lowest_missed_rate": None,
        "probes": [{}] * 3, "verdict": "SUSPECT" if suspect else "VALID",
    }  # fmt: skip
    document = {
        "runs": runs,
        "comparison": comparisons(runs, POLICIES),
        "search": [search],
        "metadata": {
            "model_id": "a-model/with-a-long-name-and-no-place-to-break-it-at-all-70B",
            "url": "http://127.0.0.1:8080",
            "date": "2026-11-22T09:00:00+00:00",
            "command": "hetlb bench " + "--flag value " * 40,
            "commit": "0123456789abcdef" * 4,
        },
    }
    return report(document, measured)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_table_is_cut_at_any_width(browser: Any, tmp_path: Path, scheme: str) -> None:
    path = tmp_path / "report.html"
    path.write_text(page(suspect=True))
    look = Look(browser, path.as_uri(), color_scheme=scheme)
    try:
        for width in WIDTHS:
            look.page.set_viewport_size({"width": width, "height": 900})
            assert look.page.evaluate(CUT) == [], width
        assert look.errors == []
    finally:
        look.close()


def test_every_cell_of_a_list_has_its_heading(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page(suspect=False))
    look = Look(browser, path.as_uri())
    try:
        look.page.set_viewport_size({"width": 360, "height": 900})
        cell = look.page.locator("td[data-label='req/s']").first
        assert cell.evaluate("each => getComputedStyle(each, '::before').content") == '"req/s"'
        assert look.page.locator(".flag, .banner, .suspect").count() == 0
    finally:
        look.close()


def test_a_suspect_result_is_marked_wherever_it_stands(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page(suspect=True))
    look = Look(browser, path.as_uri())
    try:
        banner = look.page.locator(".banner")
        assert "SUSPECT: 6 of 12 runs" in banner.inner_text()
        rows = look.page.locator("tbody tr", has_text=POLICIES[1])
        for number in range(rows.count()):
            assert "SUSPECT" in (rows.nth(number).text_content() or ""), rows.nth(number).text_content()
            assert rows.nth(number).get_attribute("class") == "suspect"
        for title in look.page.locator("summary", has_text=POLICIES[1]).all():
            assert "SUSPECT" in (title.text_content() or "")
        assert look.page.locator("h2", has_text="Against the rate").locator(".flag").is_visible()
        legend = look.page.locator("figcaption .key", has_text=POLICIES[1]).first
        assert legend.text_content() == f" {POLICIES[1]} (SUSPECT)"
        of_the_other = look.page.locator("summary", has_text=re.compile(f"^{POLICIES[0]}, rate"))
        assert of_the_other.count() == 6
        assert of_the_other.locator(".flag").count() == 0
    finally:
        look.close()


def test_every_chart_is_drawn_and_read_with_the_keyboard(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page(suspect=False))
    look = Look(browser, path.as_uri())
    try:
        assert look.page.locator("[data-chart]").count() == 0
        # Output, three latencies and the limits met; three distributions a rate; two over time a run.
        assert look.page.locator("figure svg[role=img]").count() == 5 + 2 * 3 + 12 * 2
        chart = look.page.get_by_role("img", name="Output throughput")
        chart.focus()
        look.page.keyboard.press("End")
        label = chart.get_attribute("aria-label") or ""
        assert f"{POLICIES[0]}: 123.5k at 1234 offered requests/s" in label or "at 1235 offered" in label
        assert look.errors == []
        assert look.requests == [path.as_uri()]
    finally:
        look.close()
