"""Takes the pictures of the dashboard that are in the docs: a fleet of processes under load, light and dark.

PYTHONPATH=tests python tests/proxy/dashboard/pictures.py docs/pictures
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from proxy.dashboard.browser import ENGINES, PROFILES, Fleet, Look, launched, playwright

REQUESTS = 6_000
#: What three emulated engines carry on two cores.
RATE = 12
MINUTES_SEEN_MS = 90_000


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch, launched() as browser:
        fleet = Fleet(Path(scratch))
        load = None
        try:
            fleet.serve(
                {name: fleet.start_engine(name, profile) for name, profile in ENGINES.items()},
                proxy={"request_log": False},
            )
            load = subprocess.Popen(
                [
                    sys.executable, "-m", "hetlb", "bench", "--url", fleet.url, "--request-rate", str(RATE),
                    "--trace", str(PROFILES / "trace.csv"), "--num-prompts", str(REQUESTS), "--disable-tqdm",
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
            for scheme in ("light", "dark"):
                look = Look(browser, f"{fleet.admin}/", color_scheme=scheme).live()
                page = look.page
                if scheme == "light":
                    page.wait_for_timeout(MINUTES_SEEN_MS)
                page.locator("button.open").nth(1).click()
                playwright.expect(page.locator("tr.detail table")).to_be_visible()
                page.evaluate("scrollTo(0, 0)")
                page.mouse.move(0, 0)
                page.screenshot(path=folder / f"dashboard-{scheme}.png", full_page=True)
                if scheme == "light":
                    page.screenshot(path=folder / "dashboard.png")
                look.close()
                assert look.errors == []
        finally:
            if load is not None:
                load.kill()
                load.wait()
            fleet.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
