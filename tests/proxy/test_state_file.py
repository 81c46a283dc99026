"""A state file that is none costs one line, and teaches nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import make_scheduler, request, spec

from hetlb.core.predictor import OnlinePredictor
from hetlb.proxy.state_file import StateFile
from hetlb.proxy.token_estimator import TokenEstimator


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"[1]",
        b'{"kind":"hetlb-state","version":1,"lengths":{"mod',
        b'{"kind":"hetlb-state","version":1,"lengths":{}}',
        b'{"kind":"hetlb-state","version":2,"lengths":null,"tokens":{}}',
        b'{"kind":"another","version":1,"lengths":null,"tokens":{}}',
    ],
)
def test_a_file_that_is_none_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: bytes
) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(damaged)
    predictor = OnlinePredictor()
    scheduler = make_scheduler([spec("a")], predictor=predictor)
    StateFile(path, scheduler, TokenEstimator()).load()
    [record] = caplog.records
    assert f"policy.state_file: {path} is not used: " in record.getMessage()
    assert "\n" not in record.getMessage()
    assert predictor.predict(request(1)) == OnlinePredictor().predict(request(1))


def test_a_file_that_is_not_there_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler([spec("a")], predictor=OnlinePredictor())
    StateFile(tmp_path / "state.json", scheduler, TokenEstimator()).load()
    assert not caplog.records
