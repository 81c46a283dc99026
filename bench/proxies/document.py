"""Recorded results: what was run, where, with what; JSON with one run a line; marked sections of a page."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peers import ROOT, Peer


def about(script: str, peers: Iterable[Peer]) -> dict[str, Any]:
    """Command, time, commit, machine, and versions of the proxies; `script` is a path in the repository."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    changed = _git("status", "--porcelain", "hetlb")
    return {
        "command": f"python {script} {shlex.join(sys.argv[1:])}".rstrip(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _git("rev-parse", "--short", "HEAD") + (" with changes" if changed else ""),
        "machine": f"{model}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}",
        "load_average": os.getloadavg(),
        "proxies": {peer.name: {"version": peer.version(), "log": peer.log} for peer in peers},
    }


def save(document: Mapping[str, Any], path: Path) -> None:
    """Write all lists of runs with one run a line, numbers with six digits; a whole file or none."""
    lists = {key: value for key, value in document.items() if isinstance(value, list)}
    rest = {key: value for key, value in document.items() if key not in lists}
    parts = [f"{json.dumps(key)}: {json.dumps(value, indent=1)}" for key, value in rest.items()]
    for key, runs in lists.items():
        lines = ",\n".join(json.dumps(_rounded(run)) for run in runs)
        parts.append(f"{json.dumps(key)}: [\n{lines}\n]")
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("{" + ",\n".join(parts) + "}\n")
    partial.replace(path)


def replace_sections(page: Path, sections: Mapping[str, str]) -> None:
    """Put text between `<!-- NAME -->` and `<!-- /NAME -->`; the page stays as it is if a mark is missing."""
    text = page.read_text()
    for name, new in sections.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if not (begin and end):
            raise RuntimeError(f"{page}: expected <!-- {name} --> ... <!-- /{name} -->")
        text = before + begin + new + end + after
    page.write_text(text)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def number_text(value: float | None, digits: int) -> str:
    """A number with thousands separators; `-` for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return value
