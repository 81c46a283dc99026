"""The file of an event log: on a full disk it ends, whole as far as it goes."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import most_file_bytes, turns_until

from hetlb.options.event_log.log_file import EventLog


async def test_on_a_full_disk_the_log_ends_with_a_whole_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Facts after a gap cannot be replayed."""
    caplog.set_level("INFO")
    path = tmp_path / "events.jsonl"
    log, lost = EventLog(path), list[str]()
    log.on_lost = lost.append
    log.write("a" * 99 + "\n")
    log.flush()
    await turns_until(lambda: path.stat().st_size == 100)
    with most_file_bytes(150):
        log.write("b" * 99 + "\n")
        log.flush()
        await turns_until(lambda: log.lost == 1)
    log.write("c\n")
    log.close()
    assert path.read_text() == "a" * 99 + "\n"
    assert log.lost == 2
    assert lost == ["File too large"] * 2
    told = [each.getMessage() for each in caplog.records]
    assert told == [f"the event log ends, {path} cannot be written: File too large"]
