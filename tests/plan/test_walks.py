"""From an empty folder to an answer: what a planner prints is run, what it writes is served.

Commands run as printed. Two things are put in their place, in commands and fleet file alike: hosts that are
to be filled in, and ports, since all machines of a walk are this one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import free_port
from plan.walk_programs import install
from stage.toy import LAYERS, make_folder

from hetlb.cli.main import main

ROOT = Path(__file__).parents[2]
PROFILE = ROOT / "profiling" / "l40s-llama-3.1-8b-tp1.yaml"
MODEL = "{name: m, parameters: 8.03B, kv_bytes_per_token: 131072, layers: 32, hidden_size: 4096}"

MARKET = f"""version: 1
budget_per_hour: 2
models: [{MODEL}]
offers:
  - {{gpu: L40S, price_per_hour: 0.86, available: 2, memory_bytes: 48305799168,
     profiles: {{m: {{1: {PROFILE}}}}}}}
workloads: [{{name: w, input_tokens: 200, output_tokens: 10, share: 1}}]
"""
CLUSTER = f"""version: 1
model: {{name: m, parameters: 8.03B, kv_bytes_per_token: 131072}}
limits: {{max_input_tokens: 1000, max_output_tokens: 200}}
machines: [{{name: box, gpu: L40S, gpus: 2, memory_bytes: 48305799168, profiles: {{1: {PROFILE}}}}}]
"""
TRACE = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{i},200,10\n" for i in range(40))
#: Slow links inside the mean request: prompts of the fast machine are decoded by the others.
SPLIT = f"""version: 1
model: {MODEL}
workload: {{input_tokens: 4000, output_tokens: 400}}
machines:
  - {{name: quick, gpu: H100, gpus: 1, memory_bytes: 25769803776,
     roofline: {{flops: 989e12, bandwidth_bytes_per_s: 0.4e12}}}}
  - {{name: wide, gpu: A100, gpus: 1, memory_bytes: 85899345920,
     roofline: {{flops: 100e12, bandwidth_bytes_per_s: 2e12}}}}
links: {{between: 25e9}}
"""
PLACE = f"""version: 1
model: {{name: toy, parameters: 8.03B, kv_bytes_per_token: 131072, layers: {LAYERS}, hidden_size: 4096}}
machines: [{{name: box, gpu: L40S, gpus: 1, count: 3, memory_bytes: 12884901888, profiles: {{1: {PROFILE}}}}}]
links: {{between: 1.25e9}}
workload: {{input_tokens: 100, output_tokens: 50}}
"""


class Walk:
    """A folder, the processes that were started in it, and the ports of the servers in the plan."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports: dict[str, int] = {}
        self._processes: list[subprocess.Popen[str]] = []
        install(folder / "bin")
        self._environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "WALK_PROFILE": str(PROFILE),
        }

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return str(self.folder / name)

    def fill_in(self, path: Path) -> None:
        """Put this machine in place of the hosts of a file, with a port for each server."""

        def filled(found: re.Match[str]) -> str:
            self._ports[found[0]] = free_port()
            return f"http://127.0.0.1:{self._ports[found[0]]}"

        path.write_text(re.sub(r"http://[\w.-]+(?:\.invalid|\.1):\d+", filled, path.read_text()))

    def start(self, command: str) -> str:
        """Run a printed command; its first line once it is there."""
        machine, printed = re.search(r"# .*?\bon ([\w.-]+)", command), re.search(r"--port (\d+)", command)
        if printed is not None:
            host = "127.0.0.1" if machine is None else f"{machine[1]}.invalid"
            port = self._ports[f"http://{host}:{printed[1]}"]
            command = command.replace(printed[0], f"--port {port}")
        process = subprocess.Popen(
            ["sh", "-c", command], cwd=self.folder, env=self._environment, stdout=subprocess.PIPE, text=True,
            process_group=0,
        )  # fmt: skip
        self._processes.append(process)
        assert process.stdout is not None
        return process.stdout.readline()

    def ask(self, url: str, **body: Any) -> dict[str, Any]:
        """A completion through the proxy."""
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer

    def serve(self, model: str) -> dict[str, Any]:
        """`hetlb serve` with the fleet, and one answer."""
        with (self.folder / "fleet.yaml").open("a") as fleet:
            fleet.write("listen: {port: 0}\nadmin: {port: 0}\n")
        line = self.start("hetlb serve --config fleet.yaml")
        url = re.findall(r"http://[\d.:]+", line)[0]
        return self.ask(url, model=model, prompt="to be or not", max_tokens=4)

    def close(self) -> None:
        for process in reversed(self._processes):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Walk]:
    monkeypatch.chdir(tmp_path)
    made = Walk(tmp_path)
    yield made
    made.close()


def written(walk: Walk, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return the document of a planner that wrote a fleet."""
    assert main([*arguments, "--json", "--write-fleet", str(walk.folder / "fleet.yaml")]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def planned(walk: Walk, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return the document of a planner that wrote a fleet, whose placeholders are named, then filled in."""
    document, fleet = written(walk, capsys, *arguments), walk.folder / "fleet.yaml"
    assert main(["serve", "--config", str(fleet), "--check"]) == 2
    assert "expected the host in place of" in capsys.readouterr().err
    walk.fill_in(fleet)
    return document


def served(walk: Walk, document: dict[str, Any], model: str = "m") -> dict[str, Any]:
    """Start what the plan printed, and ask through the proxy."""
    for command in document["commands"]:
        if not command.startswith("hetlb serve "):
            walk.start(command)
    assert main(["serve", "--config", "fleet.yaml", "--check"]) == 0
    return walk.serve(model)


def test_rent_to_serve(walk: Walk, capsys: pytest.CaptureFixture[str]) -> None:
    market = walk.write("market.yaml", MARKET)
    document = planned(walk, capsys, "rent", "--config", market, "--no-cache", "--no-simulate")
    assert len(document["commands"]) == 2
    assert served(walk, document)["usage"]["completion_tokens"] == 4


def test_search_to_serve(walk: Walk, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, trace = walk.write("cluster.yaml", CLUSTER), walk.write("trace.csv", TRACE)
    document = planned(walk, capsys, "search", "--config", cluster, "--trace", trace)
    assert len(document["commands"]) == 2
    assert served(walk, document)["usage"]["completion_tokens"] == 4


def test_split_to_serve(walk: Walk, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = walk.write("cluster.yaml", SPLIT)
    document = planned(walk, capsys, "split", "--config", cluster, "--exhaustive", "--simulate", "0")
    assert {group["role"] for group in document["groups"]} == {"prefill", "decode"}
    assert served(walk, document)["usage"]["completion_tokens"] == 4


def test_place_to_stage_to_serve(walk: Walk, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(walk.folder / "toy")
    place = walk.write("place.yaml", PLACE)
    # The fleet's one instance is the coordinator beside it; the hosts stand in the file of the stages.
    document = written(walk, capsys, "place", "--config", place, "--time-limit", "1")
    for name in ("fleet.yaml", "fleet-stages.yaml"):
        walk.fill_in(walk.folder / name)
    assert document["commands"][-1] == f"hetlb serve --config {walk.folder / 'fleet.yaml'}"
    assert [0, LAYERS] not in document["placement"].values(), "expected a model that no machine holds"
    assert served(walk, document, "toy")["usage"]["completion_tokens"] == 4


def test_stdout_is_the_document_alone(walk: Walk) -> None:
    """As a process: what the solver's library prints by itself is not caught in this one."""
    command = "hetlb rent --config market.yaml --no-cache --no-simulate --json"
    walk.write("market.yaml", MARKET)
    assert json.loads(walk.start(command))["throughput_req_s"] > 0.0
