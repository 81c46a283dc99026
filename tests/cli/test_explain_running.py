"""`hetlb explain --last N`: the last decisions of a running proxy, as they were made."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from proxy.services import Engine, document, serving

from hetlb.cli import adminclient, explain
from hetlb.cli.main import main

PROFILE = Path(__file__).parents[2] / "hetlb" / "tools" / "demo" / "fast.yaml"


async def test_the_last_decisions_in_words_and_as_a_document(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    async with Engine() as one, Engine() as two:
        fleet = document(one, two, policy={"name": "paper"})
        for instance in fleet["models"][0]["instances"]:
            instance["profile"] = str(PROFILE)
        async with serving(tmp_path, fleet) as running:
            for _ in range(3):
                await running.ask()
            await running.admin("PUT", "/v1/fleet/instances/i0/state", {"state": "drain"})
            await running.ask()
            await running.settled()
            url = f"http://127.0.0.1:{running.service.admin.address[1]}"
            capfd.readouterr()
            assert await asyncio.to_thread(main, ["explain", "--admin", url, "--last", "2"]) == 0
            text = capfd.readouterr().out
            assert await asyncio.to_thread(main, ["explain", "--admin", url, "--last", "4", "--json"]) == 0
            shown = json.loads(capfd.readouterr().out)["decisions"]
            assert shown == (await running.admin("GET", "/v1/decisions?last=4")).json["decisions"]
            assert await asyncio.to_thread(main, ["explain", "--admin", url]) == 0
            assert capfd.readouterr().out.count(" s ago: ") == 4
    assert [each["request_id"] for each in shown] == [1, 2, 3, 4]
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 80
    assert [line.split(",")[0] for line in lines if line.startswith("request")] == ["request 3", "request 4"]
    assert re.search(r" \d output tokens predicted, 2 generated;\s+policy paper", text.replace("\n", " "))
    first, second = (rows(lines, f"request {number}") for number in (3, 4))
    assert first["i0"].endswith(" chosen")
    assert first["i1"].endswith(" equal, later")
    assert second["i0"].endswith("draining")
    assert second["i1"].endswith(" chosen")


def rows(lines: list[str], title: str) -> dict[str, str]:
    """The rows of one decision's table, by instance."""
    start = next(index for index, line in enumerate(lines) if line.startswith(title))
    end = lines.index("", start)
    return {line.split()[0]: line for line in lines[start:end] if line.startswith("i")}


def test_a_sentence_stands_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    candidate = {
        "instance": "v100", "ideal_batch": 3, "processing_s": 0.1, "kv_utilization": 0.0, "workload": 0.2,
        "terms": {"own_s": 0.4}, "score": 2.0, "eligible": False, "reason": "passed over: it takes too long",
    }  # fmt: skip
    able = {**candidate, "eligible": True, "reason": ""}
    decision = {
        "request_id": 7, "lease": 9, "policy": "hetlb", "model": "m",
        "prompt_tokens_per_sequence": 10, "sequences": 2,
        "predicted_output": 5.0, "dispatched_at_s": 99.0, "output_tokens": 8, "ended": False,
        "chosen": "a800",
        "candidates": [
            candidate, {**able, "instance": "a800", "score": 1.0}, {**able, "instance": "late", "score": 1.5},
        ],
    }  # fmt: skip
    explain.Console(width=80).print(explain._decision(decision, 100.0))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "v100 passed over: it takes too long" in lines
    [row] = [line for line in lines if line.startswith("v100 ") and line.endswith("passed over")]
    assert row.split()[:3] == ["v100", "2", "0.4"]
    assert next(line for line in lines if line.startswith("late")).endswith(" +50 %")
    text = " ".join(lines)
    assert "request 7, 1.0 s ago: 10 prompt tokens in each of 2 sequences" in text
    assert "4 so far" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "expected --config FLEET.yaml, or --admin URL and --last N for a running proxy"),
        (["--last", "0"], "--last: expected a whole number from 1 to 1000, got 0"),
        (["--last", "1001"], "--last: expected a whole number from 1 to 1000, got 1001"),
        (["--config", "x.yaml", "--last", "3"], "--last: expected it with --admin"),
        (
            ["--url", "localhost"],
            "--admin: expected a URL like http://127.0.0.1:8081, got 'localhost' (did you mean http://localhost?)",
        ),
        (["--url", "http://127.0.0.1:1"], "--admin: expected the admin address of a running proxy, got"),
    ],
)
def test_wrong_flags(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["explain", *flags]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_the_address_is_of_a_proxy_on_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adminclient, "DEFAULT_URL", "http://127.0.0.1:1")
    assert main(["explain", "--last", "1"]) == 2
    error = capsys.readouterr().err
    assert "expected a running proxy at 'http://127.0.0.1:1': Connection refused; start it with" in error
    assert error.count("--admin") == 1  # it was not typed


async def test_an_answer_that_is_no_proxys(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with Engine() as engine:
        assert await asyncio.to_thread(main, ["explain", "--admin", engine.url]) == 2
    assert "expected the admin address of a running proxy" in capfd.readouterr().err
