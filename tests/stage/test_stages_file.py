"""Files of stages: what loads, and one line for what does not; and a log of paths checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from stage.rig import Collector, rig, until

from hetlb.cli.main import main
from hetlb.errors import ConfigError
from hetlb.tools.stage.stage_messages import Sampling
from hetlb.tools.stage.stages_file import load_stages

WORKERS = [{"name": "a", "url": "http://127.0.0.1:9100"}, {"name": "b", "url": "http://127.0.0.1:9101/"}]


def write(folder: Path, **stages: Any) -> Path:
    path = folder / "stages.yaml"
    table = {"version": 1, "model": "llama", "folder": "m", "workers": WORKERS, **stages}
    path.write_text(yaml.safe_dump(table))
    return path


def test_a_file_of_stages(tmp_path: Path) -> None:
    (tmp_path / "links.csv").write_text("from,to,bytes_per_s,latency_s\na,b,1e6,0.02\n")
    flows = [
        {"from": "source", "to": "a", "tokens_per_s": 5.0},
        {"from": "a", "to": "sink", "tokens_per_s": 5},
    ]
    (tmp_path / "plan.json").write_text(json.dumps({"flows": flows}))
    group = load_stages(write(tmp_path, links="links.csv", flows="plan.json", scheduler="iwrr"))
    assert (group.model, group.folder) == ("llama", tmp_path / "m")
    assert group.workers == {"a": "http://127.0.0.1:9100", "b": "http://127.0.0.1:9101"}
    assert group.links["a", "b"].latency_s == 0.02
    assert group.flows == {("source", "a"): 5.0, ("a", "sink"): 5.0}


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ({"workers": []}, "workers: expected at least one worker, got none"),
        ({"workers": [WORKERS[0]] * 2}, "workers[1].name: expected a name used once, got 'a' again"),
        ({"workers": [{"name": "sink", "url": "http://a:1"}]}, "workers[0].name: expected letters"),
        ({"workers": [{"name": "a", "url": "tcp://a:1"}]}, "workers[0].url: expected a URL like"),
        ({"workers": [{"name": "a", "url": "http://a"}]}, "workers[0].url: expected a URL like"),
        ({"ca_file": "ca.pem"}, "workers[0].url: expected https://"),
        ({"scheduler": "best"}, "scheduler: expected one of hetlb, iwrr"),
        ({"scheduler": "iwrr"}, "flows: expected the plan that scheduler iwrr follows, got none"),
        ({"high_water": 2}, "high_water"),
        ({"links": "none.csv"}, "none.csv: no such file"),
        ({"flows": "plan.json"}, "plan.json: flows: expected at least one, got none"),
        ({"speed": 1}, "speed: unknown key"),
    ],
)
def test_wrong_keys_are_one_line(tmp_path: Path, stages: dict[str, Any], told: str) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        load_stages(write(tmp_path, **stages))
    assert told in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "stages.yaml: folder: expected the model's config.json in it, got "),
        (("--model", "m"), "--model: expected --coordinate FILE or a worker's flags, got both"),
        (("--host", "0.0.0.0"), "--key-file: expected the key of clients to listen on 0.0.0.0, got none"),
    ],
)
def test_a_coordinator_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], told: str
) -> None:
    path = write(tmp_path)
    if flags:
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.json").write_text("{}")
    assert main(["stage", "--coordinate", str(path), "--check", *flags]) == 2
    assert told in capsys.readouterr().err


def test_a_good_file_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert main(["stage", "--coordinate", str(write(tmp_path)), "--check"]) == 0
    assert "is valid: 2 workers (not contacted)" in capsys.readouterr().out


def test_a_worker_needs_a_model_and_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stage"]) == 2
    assert "expected --model FOLDER and --layers A:B, or --coordinate FILE" in capsys.readouterr().err
    assert main(["stage", "--model", "m", "--layers", "0:2", "--check"]) == 2
    assert "--check: expected --coordinate with it" in capsys.readouterr().err


async def test_a_log_of_paths_is_checked(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with rig(folder) as made:
        asked = [Collector(3) for _ in range(6)]
        for number, collector in enumerate(asked):
            made.coordinator.submit([number], Sampling(1), 3, collector)
        await until(lambda: all(collector.done for collector in asked))
    log = tmp_path / "paths.jsonl"
    log.write_text("".join(made.events))
    assert main(["simulate", "--event-log", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"paths": 6, "wrong": []}
    lines = log.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"path":' in line)
    fact = json.loads(lines[at])
    fact["path"][0][2] -= 1  # the first stage ends a layer too early
    lines[at] = json.dumps(fact)
    log.write_text("\n".join(lines))
    assert main(["simulate", "--event-log", str(log)]) == 1
    assert f"line {at + 1}: " in capsys.readouterr().out
    log.write_text(lines[0] + "\n{}\n")
    assert main(["simulate", "--event-log", str(log)]) == 2
