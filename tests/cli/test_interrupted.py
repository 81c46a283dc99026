"""Ctrl-C ends every command at once with status 1, says nothing and leaves no process.

`serve`, `engine`, `bench`, `demo` and `top` have tests of their own beside their others.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from helpers import HANG_S

from hetlb.cli.main import main
from hetlb.tools.plan.highs import SolveLimits

CONFIGS = Path(__file__).parents[2] / "configs"
TRACE = Path(__file__).parents[2] / "bench" / "data" / "azure-conv-sample.csv"
SEARCH = ["search", "--config", str(CONFIGS / "clusters" / "l40s-llama-70b.yaml"), "--trace", str(TRACE)]


def interrupted(arguments: list[str], busy: Callable[[], object]) -> tuple[int, str, str]:
    """Start a command in a group of its own, press Ctrl-C once it is `busy`; status and output."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hetlb", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    waiting = threading.Thread(target=busy, daemon=True)
    waiting.start()
    try:
        while waiting.is_alive():
            waiting.join(0.1)
            assert process.poll() is None or not waiting.is_alive(), "it ended before it was busy"
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)  # no process of its group is left
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return process.returncode, out, err


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "--config", str(CONFIGS / "two-servers.yaml"), "--request-rate", "inf"],
        ["search", "--config", str(CONFIGS / "clusters" / "l40s-llama-70b.yaml")],
        ["split", "--config", str(CONFIGS / "clusters" / "split-llama-70b.yaml")],
    ],
    ids=["simulate", "search", "split"],
)
def test_while_it_reads_a_trace(tmp_path: Path, arguments: list[str]) -> None:
    trace = tmp_path / "trace.csv"
    os.mkfifo(trace)
    with contextlib.ExitStack() as stack:
        # Opening waits for the reader.
        status, out, err = interrupted(
            [*arguments, "--trace", str(trace)], lambda: stack.enter_context(trace.open("w"))
        )
    assert (status, out, err) == (1, "", "")


@pytest.mark.parametrize("command", ["profile", "explain"])
def test_while_a_server_does_not_answer(tmp_path: Path, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        arguments = {
            "profile": ["profile", "--url", url, "--out", str(tmp_path / "p.yaml")],
            "explain": ["explain", "--url", url, "--last", "3"],
        }
        status, out, err = interrupted(
            arguments[command], lambda: stack.enter_context(server.accept()[0]).recv(1)
        )
    assert (status, out) == (1, "")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["place", "--config", str(CONFIGS / "placements" / "llama-70b.yaml")],
        ["split", "--config", str(CONFIGS / "clusters" / "split-llama-8b.yaml"), "--simulate", "0"],
        [*SEARCH, "--num-prompts", "20"],
        ["rent", "--config", str(CONFIGS / "markets" / "llama-8b.yaml"), "--no-cache"],
    ],
    ids=["place", "split", "search", "rent"],
)
@pytest.mark.parametrize("look", [1, 4, 20, 40])
def test_a_planner_prints_its_best_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], look: int
) -> None:
    looks = itertools.count(1)

    def clock() -> float:
        if next(looks) == look:
            signal.raise_signal(signal.SIGINT)
        return time.monotonic()

    monkeypatch.setattr("hetlb.cli.plan_limits.SolveLimits", partial(SolveLimits, clock=clock))
    assert main([*arguments, "--time-limit", "600", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["interrupted"]
    assert (
        max(
            document.get(key, 0.0)
            for key in ("throughput_req_s", "max_flow_tokens_per_s", "throughput_tok_s")
        )
        > 0.0
    )
