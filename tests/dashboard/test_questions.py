"""The questions of the dashboard in a browser: does it balance, why there; desk and phone."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from dashboard.browser import MODEL, Fleet, Look, launched, playwright
from helpers import HANG_S

pytestmark = pytest.mark.slow
expect = playwright.expect
WIDTHS = (1400, 390)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


def fleet_of(folder: Path, engines: dict[str, str], **tables: Any) -> Fleet:
    """A fleet without profiles, as in the quick start: speeds are learnt."""
    fleet = Fleet(folder)
    try:
        urls = {
            name: fleet.start_engine(name, profile, 0, "--time-scale", "0.2")
            for name, profile in engines.items()
        }
        instances = [{"name": name, "url": url} for name, url in urls.items()]
        fleet.serve(urls, models=[{"name": MODEL, "instances": instances}], **tables)
    except BaseException:
        fleet.close()
        raise
    return fleet


def ask(fleet: Fleet, number: int, tokens: int = 40) -> list[str]:
    """Requests, eight at a time; returns their ids."""

    def one(_: int) -> str:
        body = json.dumps({"model": MODEL, "prompt": "hello " * 50, "max_tokens": tokens}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{fleet.url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=HANG_S) as reply:
            return str(reply.headers["x-request-id"])

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, range(number)))


def choose_policy(fleet: Fleet, name: str) -> None:
    """Set the policy: tests share a fleet and run in any order."""
    body, headers = json.dumps({"name": name}).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{fleet.admin}/v1/policy", body, headers, method="PUT")
    ):
        pass


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = fleet_of(
        tmp_path_factory.mktemp("even"), {"a": "fast.yaml", "b": "fast.yaml"}, policy={"name": "rr"}
    )
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = fleet_of(
        tmp_path_factory.mktemp("odd"), {"fast": "fast.yaml", "slow": "slow.yaml"}, policy={"name": "rr"}
    )
    yield fleet
    fleet.close()


def look_at(browser: Any, fleet: Fleet, width: int) -> Look:
    look = Look(browser, f"{fleet.admin}/")
    look.page.set_viewport_size({"width": width, "height": 900})
    return look.live()


@pytest.mark.parametrize("width", WIDTHS)
def test_does_it_balance(browser: Any, balanced: Fleet, skewed: Fleet, width: int) -> None:
    for fleet, words, state in (
        (balanced, r"Balanced: shares of work and speed agree within \d+ points\.", "good"),
        (
            skewed,
            r"fast does \d+ % of the work .*: the policy rr does not consider speed\.",
            "wait",
        ),
    ):
        choose_policy(fleet, "rr")
        ask(fleet, 64)  # few requests have large shares, and say little of speeds
        look = look_at(browser, fleet, width)
        line = look.page.locator("#balance li")
        expect(line).to_have_text(re.compile(words))
        expect(line.locator(".pill")).to_have_attribute("data-state", state)
        shares = look.page.locator("#models tbody tr td[data-title=Share]").all_inner_texts()
        work = [float(text.split("/")[0].strip(" %")) for text in shares]
        assert sum(work) == pytest.approx(100, abs=1.5)
        expect(look.page.locator("#shares figure")).to_have_count(3)
        look.close()
        assert look.errors == []


@pytest.mark.parametrize("width", WIDTHS)
def test_why_there(browser: Any, skewed: Fleet, width: int) -> None:
    choose_policy(skewed, "hetlb")
    label = ask(skewed, 5)[2]
    look = look_at(browser, skewed, width)
    page = look.page
    page.get_by_label("Request", exact=True).fill(label)
    page.get_by_role("button", name="Find").click()
    expect(page.locator("#found")).to_have_text("1 decision found among those that are kept.")
    expect(page.locator("#decision-rows tr.decision")).to_have_count(1)
    page.locator("#decision-rows button.open").click()
    table = page.locator("tr.detail table")
    expect(table.locator("tbody tr")).to_have_count(2)
    headers = table.locator("thead th").all_inner_texts()
    assert any(re.match(r"[\d.,]+ × first token", text) for text in headers), headers
    assert "Processing s" not in headers
    last_term = max(i for i, text in enumerate(headers) if text.endswith(" s"))
    for row in table.locator("tbody tr").all():
        cells = [text.replace(",", "") for text in row.locator("th, td").all_inner_texts()]
        score, terms = float(cells[1]), [float(text) for text in cells[2 : last_term + 1] if text != "–"]
        assert sum(terms) == pytest.approx(score, rel=2e-3)
    page.get_by_role("button", name="Show the newest").click()
    expect(page.locator("#held")).to_have_text("")
    look.close()
    assert look.errors == []


def test_a_phone_can_drain(browser: Any, balanced: Fleet) -> None:
    look = look_at(browser, balanced, 390)
    button = look.row("a").get_by_role("button", name="drain")
    box = button.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    assert box["height"] >= 24
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    assert balanced.state("a") == "drain"
    expect(look.page.locator("#balance li")).to_contain_text("a is draining")
    look.row("a").get_by_role("button", name="ready").click()
    expect(look.row("a")).to_have_attribute("data-state", "ready")
    assert look.page.evaluate("document.documentElement.scrollWidth") <= 390
    look.close()
    assert look.errors == []
