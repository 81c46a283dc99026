"""Tuner: it lowers a figure, measures the gain on other seeds, and writes none that is not certain."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from hetlb.cli.main import main
from hetlb.tools.sim.tune import search
from hetlb.tools.workload.records import student_margin

DEMO = Path(__file__).parents[2] / "hetlb" / "tools" / "demo"


def test_a_bowl_is_descended_and_the_gain_is_of_seeds_not_seen() -> None:
    seen: list[int] = []

    def losses(weights: Mapping[str, float], seed: int) -> dict[str, float]:
        seen.append(seed)
        loss = 10.0 + math.log2(weights["a"] / 4.0) ** 2 + math.log2(weights["b"]) ** 2 + 0.01 * seed
        return {"x": loss, "y": weights["a"]}

    start = {"a": 1.0, "b": 1.0}
    found = search(start, start, "x", losses, [1, 2], [7, 8, 9])
    assert found.others == {"y": -3.0}, "what the weights cost in the other figure is said"
    assert found.weights == {"a": 4.0, "b": 1.0}
    assert found.certain
    expected = [1.0 - (10.0 + 0.01 * seed) / (14.0 + 0.01 * seed) for seed in (7, 8, 9)]
    assert found.gain == pytest.approx(sum(expected) / 3)
    assert found.low < found.gain < found.high
    assert seen[-6:] == [7, 7, 8, 8, 9, 9]
    assert set(seen[:-6]) == {1, 2}
    assert found.runs == len(seen)


def test_noise_is_no_gain() -> None:
    def losses(weights: Mapping[str, float], seed: int) -> dict[str, float]:
        return {"x": random.Random(f"{sorted(weights.items())} {seed}").uniform(1.0, 2.0)}

    start = {"a": 1.0, "b": 1.0}
    found = search(start, start, "x", losses, [1], range(10, 20))
    assert found.weights != {"a": 1.0, "b": 1.0}
    assert not found.certain


def test_the_interval_is_student_s() -> None:
    # t(0.975, 2) = 4.3027; mean 2, deviation 1.
    assert student_margin([1.0, 2.0, 3.0]) == pytest.approx(4.3027 / 3**0.5, abs=1e-3)


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        "version: 1\npolicy: {weights: {first_token_s: 0.0}}\nmodels:\n  - name: m\n    instances:\n"
        + "".join(
            f'      - {{name: {each}, url: "http://h:{n}", profile: {DEMO}/{each}.yaml}}\n'
            for n, each in enumerate(("slow", "fast"), start=1)
        )
    )
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "0,900,40\n0,20,10\n" * 30)
    return ["simulate", "--config", str(fleet), "--trace", str(trace), "--request-rate", "20"]


def test_what_is_written_is_what_is_said_and_is_certain(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--tune", "mean_ttft_ms", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["figure"] == "mean_ttft_ms"
    assert document["certain"] is (document["interval"][0] > 0.0)
    capsys.readouterr()
    assert main([*command, "--tune", "mean_ttft_ms"]) == 0
    written, told = capsys.readouterr()
    assert ("the weights stay as they are" in told) is not document["certain"]
    if document["certain"]:
        assert yaml.safe_load(written)["policy"]["weights"] == pytest.approx(document["weights"], rel=1e-5)
    else:
        assert not written
        assert document["weights"] == document["start"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tune", "speed"], "--tune: expected one of mean_ttft_ms, "),
        (["--tune", "attainment"], "--tune: expected a fleet with models[].classes"),
        (
            ["--tune", "mean_ttft_ms", "--policy", "rr"],
            "--tune: expected one --request-rate, and no --policy",
        ),
    ],
)
def test_wrong_flags(
    command: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main([*command, *flags]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
