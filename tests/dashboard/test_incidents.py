"""The first line of the dashboard in incidents, by colour and words; and the switch stays in reach."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard.browser import ENGINES, PROFILES, Fleet, Look, launched, playwright
from dashboard.test_browser import flaws
from helpers import free_port

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python")

pytestmark = pytest.mark.slow
expect = playwright.expect


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


def says(look: Look, state: str, colour: str, advice: str) -> None:
    """Expect a first line; and a screen without flaws at each width, in both schemes."""
    expect(look.page.locator("#status-word")).to_have_text(state)
    expect(look.page.locator("#status")).to_have_attribute("data-state", colour)
    expect(look.page.locator("#status-advice")).to_contain_text(
        re.compile(re.escape(advice) or ".", re.IGNORECASE)
    )
    for scheme in ("light", "dark"):
        look.page.emulate_media(color_scheme=scheme)
        for width in (390, 768, 1024, 1440):
            look.page.set_viewport_size({"width": width, "height": 900})
            assert flaws(look) == {}, (state, scheme, width)
        found = axe.Axe().run(look.page).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found] == [], (state, scheme)


def test_two_of_three_die_and_then_the_last(browser: Any, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    try:
        ports = {name: free_port() for name in ENGINES}
        fleet.serve({name: fleet.start_engine(name, ENGINES[name], ports[name]) for name in ports})
        look = Look(browser, f"{fleet.admin}/").live()
        says(look, "Well", "good", "No recent requests")
        fleet.ask(2)
        says(look, "Well", "good", "Nothing to do.")
        for name in ("v100-0", "v100-1"):
            fleet.kill(name)
        says(
            look,
            "Degraded",
            "bad",
            "v100-0 and v100-1 are down (connection refused). Start them, wait if they are loading, "
            "or check their network.",
        )
        expect(look.page.locator("#balance .pill")).to_have_attribute("data-state", "bad")
        for width in (390, 1024, 1440):  # the reason takes lines, and the switch is where it was
            look.page.set_viewport_size({"width": width, "height": 900})
            box = look.row("v100-0").get_by_role("button", name="drain").bounding_box()
            assert box is not None
            assert 0 <= box["x"] <= width - box["width"]
        fleet.kill("a800-0")
        says(look, "Down", "bad", "are down (connection refused). Start one, wait if one is loading")
        fleet.start_engine("a800-0", ENGINES["a800-0"], ports["a800-0"])
        says(look, "Degraded", "bad", "v100-0 and v100-1 are down")
        look.close()
        assert look.errors == []
    finally:
        fleet.close()


@contextlib.contextmanager
def load(fleet: Fleet, *flags: str) -> Iterator[None]:
    """Requests of `hetlb bench` until the end of the block."""
    command = ["bench", "--url", fleet.url, "--trace", str(PROFILES / "trace.csv"), "--num-prompts", "9000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hetlb", *command, "--disable-tqdm", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_the_same_fleet_below_saturation_saturated_and_beyond(browser: Any, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    try:
        # Ten times slower than their profiles' engines: three requests/s are many for them, on any machine.
        names = ("v100-0", "v100-1")
        urls = {name: fleet.start_engine(name, ENGINES[name], 0, "--time-scale", "10") for name in names}
        fleet.serve(urls, profiles=False)
        look = Look(browser, f"{fleet.admin}/").live()
        with load(fleet, "--request-rate", "0.5"):
            expect(look.page.locator("#status-sentence")).to_contain_text("limited by")
            says(look, "Well", "good", "")
        with load(fleet, "--max-concurrency", "50"):  # 44 slots
            says(look, "Busy", "warn", "All servers are full. Add ")
            expect(look.page.locator("#balance .pill")).to_have_attribute("data-state", "good")
        with load(fleet, "--request-rate", "30"):
            says(look, "Degraded", "bad", "More comes than can be served")
        look.close()
        assert look.errors == []
    finally:
        fleet.close()


def test_one_server_is_slower_than_its_profile(browser: Any, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    try:
        slow = {"a800-0": "1", "v100-0": "4"}
        fleet.serve(
            {
                name: fleet.start_engine(name, ENGINES[name], 0, "--time-scale", by)
                for name, by in slow.items()
            }
        )
        look = Look(browser, f"{fleet.admin}/").live()
        with load(fleet, "--max-concurrency", "50"):
            says(look, "Degraded", "bad", "times as long as its profile says. Look at its GPU")
            expect(look.page.locator("#status-advice")).to_contain_text("v100-0")
            look.page.set_viewport_size({"width": 1440, "height": 900})
            expect(look.row("v100-0").locator(".factors")).to_contain_text("× its profile")
        look.close()
        assert look.errors == []
    finally:
        fleet.close()


def test_one_hangs_and_one_is_drained(browser: Any, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    try:
        fleet.serve({name: fleet.start_engine(name, profile) for name, profile in ENGINES.items()})
        look = Look(browser, f"{fleet.admin}/").live()
        look.row("v100-1").get_by_role("button", name="drain").click()
        expect(look.row("v100-1")).to_have_attribute("data-state", "drain")
        says(look, "Well", "good", "v100-1 is drained")
        with load(fleet, "--max-concurrency", "20"):
            expect(look.row("v100-0").locator("td[data-title='In flight']")).not_to_have_text("0")
            with fleet.stopped("v100-0"):
                says(look, "Degraded", "bad", "v100-0")
        look.close()
        assert look.errors == []
    finally:
        fleet.close()


def test_a_server_is_added_and_removed(browser: Any, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    try:
        urls = {name: fleet.start_engine(name, ENGINES[name]) for name in ("a800-0", "v100-0")}
        later = urls.pop("v100-0")
        fleet.serve(urls, admin={"registration": True})
        look = Look(browser, f"{fleet.admin}/").live()
        page = look.page
        page.get_by_role("button", name="Add server").click()
        page.get_by_label("Address").fill(later)
        page.get_by_label("Name").fill("v100-0")
        page.get_by_role("dialog").get_by_role("button", name="Add server").click()
        expect(look.row("v100-0").locator(".pill")).to_have_text("up")
        page.on("dialog", lambda each: each.accept())
        look.row("v100-0").get_by_role("button", name="Remove v100-0").click()
        expect(look.row("v100-0")).to_have_count(0)
        look.close()
        assert look.errors == []
    finally:
        fleet.close()
