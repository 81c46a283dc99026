"""A few hundred raw mutants; `make fuzz` sends ten thousand."""

from __future__ import annotations

from pathlib import Path

from fuzz.mutants import run


async def test_mutants(tmp_path: Path) -> None:
    report = await run(400, 7, tmp_path)
    assert not report.finds, "\n".join(report.finds)
    assert report.sent == 400
    assert report.good > 0
