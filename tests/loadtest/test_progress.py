"""Live figures are for a terminal: elsewhere nothing but warnings is written."""

from __future__ import annotations

import pytest

from hetlb.tools.tables import LoadProgress, Screen, live_figures


def test_a_run_so_far_in_a_few_words() -> None:
    progress = LoadProgress()
    progress.sent, progress.completed, progress.output_tokens = 30, 20, 4_000
    assert live_figures(progress, 2.0) == "10 in flight, 2,000 tok/s"
    progress.failed = 4
    assert live_figures(progress, 2.0) == "6 in flight, 2,000 tok/s, 4 failed"


async def test_without_a_terminal_only_warnings_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.say("news")
    async with screen.bar("a run", LoadProgress(), 10):
        pass
    screen.warn("SUSPECT: late")
    assert capsys.readouterr() == ("", "SUSPECT: late\n")
