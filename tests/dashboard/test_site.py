"""The documentation site in a browser: readable at each width, in both schemes, for screen readers too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard.browser import launched

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
#: Of the theme alone: its buttons to copy a block, and its blocks that scroll.
OF_THE_THEME = {"landmark-unique", "scrollable-region-focusable"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.mark.parametrize("name", ["index", "tasks", "scheduling", "dashboard"])
def test_a_page_has_no_flaw_at_any_width(browser: Any, site: Path, name: str) -> None:
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(f"file://{site}/{name}.html")
        for width in (390, 768, 1024, 1440):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
            found = axe.Axe().run(page).response["violations"]
            flaws = [
                (each["id"], each["nodes"][0]["html"]) for each in found if each["id"] not in OF_THE_THEME
            ]
            assert flaws == [], (scheme, width)
        context.close()
