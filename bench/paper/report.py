"""How results are kept and shown: JSON in bench/results, Markdown tables, blocks of a page.

A page's block is replaced whole, between its two markers, or the page stays as it is.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fleets import ROOT

RESULTS = ROOT / "bench/results"
IMAGES = ROOT / "docs/img"
PAGE = ROOT / "bench/paper/RESULTS.md"


def about(command: str) -> dict[str, Any]:
    """When and with what."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": _output("git", "rev-parse", "HEAD"),
        "changed_since": _output("git", "diff", "HEAD", "--name-only", "--", "hetlb", "bench/paper").split(),
        "python": platform.python_version(),
    }


def write_result(name: str, document: dict[str, Any]) -> None:
    """`bench/results/paper-NAME.json`."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"paper-{name}.json"
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")


def read_result(name: str) -> dict[str, Any]:
    """The document that `write_result` wrote."""
    found: dict[str, Any] = json.loads((RESULTS / f"paper-{name}.json").read_text())
    return found


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are figures."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_block(name: str, text: str) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- end -->` on the page."""
    page = PAGE.read_text()
    begin = f"<!-- {name} -->\n"
    before, found, rest = page.partition(begin)
    _, end, after = rest.partition("<!-- end -->")
    if not found or not end:
        raise SystemExit(f"{PAGE}: expected the markers {begin.strip()} and <!-- end -->")
    PAGE.write_text(f"{before}{begin}{text.strip()}\n{end}{after}")


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
