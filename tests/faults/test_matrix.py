"""Every row of the fault matrix, alone and under fifty streams, with the invariants checked after each."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest
from faults.everything import CASES, Case
from faults.matrix import ROWS, table
from faults.rig import Background, Checker, Launcher, check_requests, engines, in_process

DOCS = Path(__file__).parent / "MATRIX.md"

PARAMETERS = [
    pytest.param(
        each,
        crowd,
        id=f"{each.row}-{each.name}-{'crowd' if crowd else 'alone'}",
        marks=[
            *([pytest.mark.xfail(strict=not each.race, reason=each.known)] if each.known else []),
            *([pytest.mark.slow] if crowd or each.process else [pytest.mark.light] if each.crowd else []),
        ],
    )
    for each in CASES
    for crowd in ((False, True) if each.crowd else (False,))
]


@pytest.mark.parametrize(("each", "crowd"), PARAMETERS)
async def test_row(
    each: Case,
    crowd: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with engines(each.engines, modes=each.modes) as (made, neighbour):
        if each.process:
            await each.run(Launcher(tmp_path, made, neighbour, each.tables, crowd=crowd))
            return
        async with in_process(tmp_path, made, neighbour, each.tables) as rig:
            checker = Checker(rig.admin_port, (*made, neighbour), own_process=True)
            before = await checker.snapshot()
            background = Background(rig)
            if crowd:
                await background.start()
            try:
                await each.run(rig)
            finally:
                await background.stop()
            now = await checker.back_to(before)
            expected = each.outcomes
            if expected is not None:
                expected = expected + Counter(ok=background.completed)
            sent = None if each.uncounted else len(rig.first_bytes) + background.completed
            check_requests(rig, before, now, expected, sent)
            assert background.completed >= 50 * crowd
    ended = now.outcomes.total()
    log = capfd.readouterr().err
    assert log.count("\n") <= ended, "more than a line for a request"
    assert "secret-" not in log, "a prompt in the log"
    wrong = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert each.errors or not wrong, wrong


@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_run(row: str) -> None:
    assert any(each.row == row for each in CASES)


def test_no_case_is_of_a_row_that_is_none() -> None:
    assert {each.row for each in CASES} <= ROWS.keys()


def test_the_docs_hold_the_table() -> None:
    """Print it with `python tests/faults/matrix.py`."""
    lines = table((each.row, each.known) for each in CASES)
    assert "\n".join(lines) in DOCS.read_text()
