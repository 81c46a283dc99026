"""Takes the pictures of the dashboard and of `top` that are in the docs: a fleet of processes under load.

PYTHONPATH=tests python tests/dashboard/pictures.py docs/pictures
"""

from __future__ import annotations

import argparse
import io
import tempfile
from pathlib import Path

from dashboard.browser import ENGINES, PROFILES, Fleet, Look, launched, playwright
from rich.console import Console

from hetlb.cli.adminclient import AdminClient
from hetlb.cli.top import FleetScreen

REQUESTS = 6_000
#: The engines are as slow as large models are, so that two cores carry what keeps all three of them busy.
TIME_SCALE = 8
RATE = 12
SEEN_MS = 150_000
#: Parts of the page that the docs explain by number, in their order.
PARTS = (
    "#status-line",
    "#tiles",
    "#fleet",
    "[aria-labelledby=time-title]",
    "[aria-labelledby=decisions-title]",
    "[aria-labelledby=accuracy-title]",
)
NUMBER = """(nodes, number) => nodes.forEach((node) => {
  const mark = document.createElement("span");
  mark.textContent = number;
  mark.style.cssText = "position:absolute;z-index:9;display:grid;place-items:center;width:1.9rem;"
    + "height:1.9rem;border-radius:50%;font:700 1rem system-ui;color:#fff;background:#bc4c00;"
    + "box-shadow:0 1px 4px #0006";
  const at = node.getBoundingClientRect();
  mark.style.left = `${at.right - 22 + scrollX}px`;
  mark.style.top = `${at.top - 10 + scrollY}px`;
  document.body.append(mark);
})"""


def terminal(admin: str, path: Path) -> None:
    """The picture of `top` in a terminal of 100 columns."""
    view = FleetScreen("http://127.0.0.1:8081")
    view.snapshot = next(AdminClient(admin).snapshots())
    console = Console(
        record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(view.render(100, 22))
    console.save_svg(str(path), title="hetlb top")


def main(folder: Path, seen_ms: int) -> None:
    with tempfile.TemporaryDirectory() as scratch, launched() as browser:
        fleet = Fleet(Path(scratch))
        try:
            slowly = ("--time-scale", str(TIME_SCALE))
            urls = {name: fleet.start_engine(name, profile, 0, *slowly) for name, profile in ENGINES.items()}
            fleet.serve(urls, profiles=False, proxy={"request_log": False})
            fleet.load(
                "--request-rate", str(RATE), "--trace", str(PROFILES / "trace.csv"),
                "--num-prompts", str(REQUESTS),
            )  # fmt: skip
            for scheme in ("light", "dark"):
                look = Look(browser, f"{fleet.admin}/", color_scheme=scheme).live()
                page = look.page
                if scheme == "light":
                    page.wait_for_timeout(seen_ms)
                    terminal(fleet.admin, folder / "top.svg")
                page.locator("button.open").nth(1).click()
                playwright.expect(page.locator("tr.detail table")).to_be_visible()
                page.evaluate("scrollTo(0, 0)")
                page.mouse.move(0, 0)
                page.screenshot(path=folder / f"first-screen-{scheme}.png")
                for number, part in enumerate(PARTS, start=1):
                    page.locator(part).evaluate_all(NUMBER, number)
                page.screenshot(path=folder / f"dashboard-{scheme}.png", full_page=True)
                look.close()
                assert look.errors == []
        finally:
            fleet.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a look of two seconds, to see that it runs")
    args = parser.parse_args()
    main(args.folder, 2_000 if args.smoke else SEEN_MS)
