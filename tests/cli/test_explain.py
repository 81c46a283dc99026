"""`hetlb explain` prints the scheduler's own figures, unrounded, and refuses wrong flags in one line."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hetlb
from hetlb.build import compiled
from hetlb.cli.explain import _head
from hetlb.cli.main import main

PROFILE = """\
version: 1
name: p
engine: {{kv_cache_tokens: {kv}, max_num_seqs: {seqs}}}
prefill: {{k1: {k1}, k2: 1.0e-3, k3: 2.0e-6, k4: 1.0e-2}}
decode: {{k5: 5.0e-8, k6: 6.0e-5, k7: 1.0e-7, k8: {k8}}}
"""
FAST = {"kv": 690_000, "seqs": 256, "k1": 1.1e-4, "k8": 1.3e-2}
SLOW = {"kv": 41_234, "seqs": 64, "k1": 7.3e-4, "k8": 5.1e-2}
FORMS = {
    "power": lambda t, u, theta: t * theta**u,
    "exp": lambda t, u, theta: t * math.exp(theta * u),
    "linear": lambda t, u, theta: t * (1 + theta * u),
    "sum": lambda t, u, theta: t + theta * u,
}


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    for name, figures in (("fast", FAST), ("slow", SLOW)):
        (tmp_path / f"{name}.yaml").write_text(PROFILE.format(**figures))
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "version: 1\nmodels:\n  - name: m\n    instances:\n"
        '      - {name: slow, url: "http://h:1", profile: slow.yaml}\n'
        '      - {name: fast, url: "http://h:2", profile: fast.yaml}\n'
    )
    return path


def by_hand(figures: dict[str, float], inputs: int, outputs: int) -> tuple[int, float]:
    batch = min(int(figures["seqs"]), max(1, math.floor(figures["kv"] / (inputs + outputs))))
    prefill = figures["k1"] * batch * inputs + 1e-3 * batch + 2e-6 * inputs + 1e-2
    decode = math.fsum(
        5e-8 * batch * (inputs + j) + 6e-5 * batch + 1e-7 * (inputs + j) + figures["k8"]
        for j in range(1, outputs + 1)
    )
    return batch, (prefill + decode) / batch


@pytest.mark.parametrize("combine", sorted(FORMS))
@pytest.mark.parametrize(("inputs", "outputs"), [(512, 128), (1, 1), (9000, 700), (30_000, 20_000)])
def test_hand_computed_cases_agree_to_1e_9(
    fleet: Path, capsys: pytest.CaptureFixture[str], combine: str, inputs: int, outputs: int
) -> None:
    arguments = [
        "explain", "--config", str(fleet), "--policy", "paper", "--input", str(inputs),
        "--output", str(outputs), "--combine", combine, "--json",
        "--kv-used", "slow=0.371", "--kv-used", "fast=1.25", "--load", "fast=0.0123",
    ]  # fmt: skip
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    expected = {}
    for name, figures, u, load in (("slow", SLOW, 0.371, 0.0), ("fast", FAST, 1.25, 0.0123)):
        if inputs + outputs > figures["kv"]:
            continue
        u = round(u * figures["kv"]) / figures["kv"]  # of whole tokens
        batch, t = by_hand(figures, inputs, outputs)
        w = FORMS[combine](t, u, 2.0)
        expected[name] = load + w
        candidate = next(c for c in document["candidates"] if c["instance"] == name)
        assert candidate["ideal_batch"] == batch
        assert candidate["eligible"] is True
        for key, value in (
            ("processing_s", t), ("kv_utilization", u), ("workload", w), ("score", load + w),
        ):  # fmt: skip
            assert candidate[key] == pytest.approx(value, rel=1e-9), key
    assert [c["instance"] for c in document["candidates"]] == ["slow", "fast"]
    assert document["chosen"] == min(expected, key=expected.__getitem__)


def test_instances_that_cannot_take_it_are_shown_with_the_reason(
    fleet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--config", str(fleet), "--input", "50000", "--json"]) == 0
    slow, fast = json.loads(capsys.readouterr().out)["candidates"]
    assert (slow["eligible"], slow["score"]) == (False, None)
    assert "too small" in slow["reason"]
    assert fast["eligible"] is True


def test_the_score_is_the_sum_of_the_terms_that_are_shown(
    fleet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--config", str(fleet), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for each in document["candidates"]:
        total = sum(each["weights"][name] * seconds for name, seconds in each["terms"].items())
        assert each["score"] == pytest.approx(total)
        assert each["forecast"]["end_s"] > each["forecast"]["first_token_s"] == each["terms"]["first_token_s"]
        assert each["forecast"]["end_s_90"] > each["forecast"]["end_s"]
    assert main(["explain", "--config", str(fleet)]) == 0
    out = capsys.readouterr().out
    assert "30 x" in out, "the weight of a first token"
    assert "0.2 x" in out, "the weight of all being done later, as no more requests come"


def test_a_weight_is_shown_with_three_digits() -> None:
    assert [_head("own_s", each) for each in (30.0, 124.0 / 3.0, 0.600568)] == [
        "30 x\nown\ns",
        "41.3 x\nown\ns",
        "0.601 x\nown\ns",
    ]


def test_the_table_names_the_chosen_one(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--config", str(fleet), "--policy", "rr"]) == 0
    out = capsys.readouterr().out
    assert "chosen" in next(line for line in out.splitlines() if "slow" in line)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-used", "fast"], "--kv-used: expected NAME=NUMBER"),
        (["--kv-used", "fast=x"], "--kv-used: expected NAME=NUMBER"),
        (["--load", "nobody=1"], "--load: expected one of slow, fast, got 'nobody'"),
        (["--input", "0"], "--input: expected a whole number from 1, got 0"),
        (["--output", "nan"], "--output: expected a number of tokens"),
        (["--model", "x"], "--model: expected one of m, got 'x'"),
        (
            ["--input", "999999"],
            "--input: expected at most 689999 tokens, the most that an instance of m holds",
        ),
        (["--request", "1"], "--request: expected it with --admin"),
    ],
)
def test_wrong_flags(fleet: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["explain", "--config", str(fleet), *flags]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.skipif(not compiled(), reason="nothing is compiled here")
def test_compiled_and_interpreted_give_the_same_figures(fleet: Path) -> None:
    """The command as it is installed, and from a copy of its sources alone."""
    sources = fleet.parent / "sources"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(hetlb.__file__).parent, sources / "hetlb", ignore=ignored)
    flags = ["--kv-used", "slow=0.371", "--kv-used", "fast=1.25", "--load", "fast=0.0123", "--json"]
    answers = []
    for path in ("", str(sources)):
        for policy in ("hetlb", "paper", "least-kv"):
            command = [sys.executable, "-m", "hetlb", "explain", "--config", str(fleet), "--policy", policy]
            env = {**os.environ, "PYTHONPATH": path} if path else dict(os.environ)
            done = subprocess.run([*command, *flags], env=env, capture_output=True, text=True, check=True)
            answers.append(json.loads(done.stdout))
    assert answers[:3] == answers[3:]
    assert len({json.dumps(each) for each in answers}) == 3


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--polisy", "rr"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_default_policy_masks_a_full_instance(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--kv-used", "fast=1", "--output", "32", "--json"]
    assert main(["explain", "--config", str(fleet), *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    slow, fast = document["candidates"]
    assert document["chosen"] is None
    assert "passed over: a better one that is full" in slow["reason"], (
        "a much slower server is left for requests that it suits"
    )
    assert not fast["eligible"]
    assert fast["reason"].startswith("full: its KV cache would not hold it")
    assert fast["score"] is not None
