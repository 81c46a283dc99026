"""The demo shows what it promises, and leaves no process behind however it ends."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import HANG_S

import hetlb.tools.demo
from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.config.profile_file import load_profile
from hetlb.cli.demo import ENGINES, MAX_TOKENS, MODEL, _meaning
from hetlb.cli.main import main
from hetlb.tools.loadtest.fleet_admin import busy_figures
from hetlb.tools.sim.simulation_sweep import StudyCell, run_sweep
from hetlb.tools.sim.study import make_study, run_document
from hetlb.tools.workload.arrivals import Load
from hetlb.tools.workload.trace_formats import read_trace

DATA = Path(hetlb.tools.demo.__file__).parent
MARK = "HETLB_TEST_MARK"


class Demo:
    """A running `hetlb demo` and everything it started, found by a mark in their environment."""

    def __init__(self, *arguments: str) -> None:
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hetlb", "demo", *arguments],
            env={**os.environ, name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, text: str) -> None:
        """Read its progress up to a line with `text`."""
        assert self.process.stderr is not None
        seen = []
        for line in self.process.stderr:
            seen.append(line)
            if text in line:
                return
        pytest.fail(f"never said {text!r}: {''.join(seen)}")

    def end(self) -> tuple[int, str, str]:
        """Exit status and the rest of what it printed."""
        out, err = self.process.communicate(timeout=HANG_S)
        return self.process.returncode, out, err

    def family(self) -> dict[int, str]:
        """Every process with our mark: pid and command line."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                        if command:  # else it is dead and about to be collected
                            found[int(folder.name)] = command
        return found

    def assert_nobody_left(self) -> None:
        """Everything with our mark ends; a process that was just being started may need a moment for it."""
        deadline = time.monotonic() + HANG_S
        while family := self.family():
            for pid, command in family.items():
                with contextlib.suppress(ProcessLookupError):
                    descriptor = os.pidfd_open(pid)
                    try:
                        patience = max(0.0, deadline - time.monotonic())
                        ended, _, _ = select.select([descriptor], [], [], patience)
                    finally:
                        os.close(descriptor)
                    assert ended, f"still there: {command}"


@pytest.fixture
def demo() -> Iterator[Any]:
    started: list[Demo] = []

    def start(*arguments: str) -> Demo:
        started.append(Demo(*arguments))
        return started[-1]

    yield start
    for each in started:
        for pid in each.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        each.process.communicate()


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@linux
@pytest.mark.slow
def test_a_small_demo_from_end_to_end(demo: Any) -> None:
    running = demo("--num-prompts", "25", "--json")
    running.wait_for("policy rr")
    family = running.family()
    assert sum(" engine " in command for command in family.values()) == 2
    assert sum(" serve " in command for command in family.values()) == 1
    status, out, err = running.end()
    assert status == 0, err
    running.assert_nobody_left()
    result = json.loads(out)
    assert [run["policy"] for run in result["runs"]] == ["rr", "hetlb"]
    alone = result["standalone"]
    assert [each["instances"][0]["name"] for each in alone["instances"]] == list(ENGINES)
    for each in (*alone["instances"], *result["runs"]):
        assert (each["completed"], each["failed"], each["client"]["errors"]) == (25, 0, {})
        assert each["client"]["mismatched_lengths"] == 0
        assert each["total_output_tokens"] == alone["instances"][0]["total_output_tokens"]
        assert each["seed"] == 0
        assert each["request_rate"] == "inf"
    for figure in ("output_throughput", "total_token_throughput"):
        assert alone[figure] == pytest.approx(sum(each[figure] for each in alone["instances"]))
    for run in result["runs"]:
        assert [each["name"] for each in run["instances"]] == list(ENGINES)
        assert sum(each["completed"] for each in run["instances"]) == 25
    assert abs(result["runs"][0]["instances"][0]["completed"] - 12.5) == 0.5


@linux
@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGTERM, "starting 2 emulated"),
        (signal.SIGKILL, "starting 2 emulated"),
        (signal.SIGINT, "each engine alone"),
        pytest.param(signal.SIGKILL, "each engine alone", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "policy rr", marks=pytest.mark.slow),
        (signal.SIGKILL, "policy rr"),
    ],
)
def test_no_process_is_left_however_it_ends(demo: Any, number: signal.Signals, moment: str) -> None:
    running = demo("--num-prompts", "60" if moment != "policy rr" else "12")
    running.wait_for(moment)
    running.process.send_signal(number)
    status, out, err = running.end()
    assert status == (1 if number is not signal.SIGKILL else -signal.SIGKILL)
    assert out == ""
    assert "Traceback" not in err
    running.assert_nobody_left()


@linux
def test_an_engine_that_dies_is_one_line_and_status_1(demo: Any) -> None:
    running = demo("--num-prompts", "60")
    running.wait_for("each engine alone")
    family = running.family()
    os.kill(next(pid for pid, command in family.items() if "slow.yaml" in command), signal.SIGKILL)
    status, out, err = running.end()
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith("hetlb demo: engine slow ended with status -9")
    assert "Traceback" not in err
    running.assert_nobody_left()


def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--num-prompts", "0"]) == 2
    assert capsys.readouterr().err == (
        "hetlb demo: --num-prompts: expected a whole number from 1, got 0 (see hetlb demo --help)\n"
    )


# --- the workload it brings along ---------------------------------------------------------------------


def test_every_request_fits_every_engine() -> None:
    rows = read_trace(DATA / "trace.csv")
    assert len(rows) == 800
    assert max(row.output_tokens for row in rows) < MAX_TOKENS / 4, "the cap must not give lengths away"
    for name in ENGINES:
        capacity = load_profile(DATA / f"{name}.yaml").capacity
        assert capacity.kv_cache_tokens is not None
        assert max(row.input_tokens for row in rows) + MAX_TOKENS <= capacity.kv_cache_tokens


def test_the_data_are_small() -> None:
    assert sum(path.stat().st_size for path in DATA.iterdir() if path.is_file()) < 20_000


def test_in_virtual_time_the_demo_shows_what_it_is_for(tmp_path: Path) -> None:
    """Engines between 2:1 and 4:1; `hetlb` at least 0.85 of their sum and 1.4 times round robin."""
    instances = "".join(
        f'      - {{name: {name}, url: "http://127.0.0.1:{port}", profile: {DATA / name}.yaml}}\n'
        for port, name in enumerate(ENGINES, start=1)
    )
    path = tmp_path / "fleet.yaml"
    path.write_text(f"version: 1\nmodels:\n  - name: {MODEL}\n    instances:\n{instances}")
    study = make_study(load_fleet(path), Load(read_trace(DATA / "trace.csv")))
    ran = run_sweep(study, [StudyCell(policy, math.inf, 0) for policy in ("single", "rr", "hetlb")])
    runs = [run_document(study, each, "inf") for each in ran]
    fast, rr, hetlb = (run["total_token_throughput"] for run in runs)
    total = runs[0]["bound"]["total_token_throughput"]
    assert 2.0 < fast / (total - fast) < 4.0
    assert hetlb > 0.9 * total
    assert hetlb > 1.6 * rr
    assert hetlb == max(fast, rr, hetlb)
    assert sum(run["duration"] for run in runs[1:]) + rows_alone_s(runs, total, fast) < 60


def rows_alone_s(runs: list[dict[str, Any]], total: float, fast: float) -> float:
    """How long the slow engine takes for everything: both run alone at the same time."""
    return float((runs[0]["total_input_tokens"] + runs[0]["total_output_tokens"]) / (total - fast))


# --- words --------------------------------------------------------------------------------------------


def fleet(**changes: Any) -> dict[str, Any]:
    instance = {
        "name": "fast",
        "health": "up",
        "in_flight": 0,
        "queued": 0,
        "workload": 0.0,
        "kv_reserved_tokens": 0,
    }
    return {
        "models": [{"instances": [{**instance, **changes}]}],
        "queue": {"requests": 0, "bytes": 0},
    }


def test_an_idle_fleet_is_one_whose_every_figure_is_zero() -> None:
    assert busy_figures(fleet()) == []
    assert busy_figures(fleet(workload=1e-9)) == ["fast.workload: 1e-09"]
    assert busy_figures(fleet(health="suspect", in_flight=2)) == ["fast.in_flight: 2", "fast is suspect"]
    assert busy_figures({**fleet(), "queue": {"requests": 1, "bytes": 0}}) == ["requests in the queue: 1"]


def test_the_result_in_words() -> None:
    def run(policy: str, speed: float, *ends: float) -> dict[str, Any]:
        instances = [{"name": name, "last_finish_s": end} for name, end in zip(ENGINES, ends, strict=True)]
        return {"policy": policy, "total_token_throughput": speed, "instances": instances}

    words = _meaning([run("rr", 500.0, 5.0, 15.0), run("hetlb", 900.0, 8.0, 8.2)], 1000.0)
    assert "delivers 90 % of what" in words
    assert "1.80 times" in words
    assert "fast is done after 5.0 s and idle until slow is, after 15.0 s" in words
    assert words.endswith("Under hetlb they are done after 8.0 s and 8.2 s.")
    assert _meaning([run("rr", 0.0, 0.0, 0.0), run("hetlb", 0.0, 0.0, 0.0)], 0.0) == "Nothing was completed."
