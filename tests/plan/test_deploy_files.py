"""From plans to servers: placeholders that the check names, forms that an engine refuses, commands."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from hetlb.balancer.core.types import Role
from hetlb.cli.main import main
from hetlb.tools.plan.common.capabilities import NIXL, VLLM_FACTS, Form, Status, fact_of, refused
from hetlb.tools.plan.common.servers import VllmServer

PROFILING = Path(__file__).parents[2] / "profiling"
MARKET = f"""version: 1
budget_per_hour: 2
models: [{{name: m, parameters: 8.03B, kv_bytes_per_token: 131072, layers: 32, hidden_size: 4096}}]
offers:
  - {{gpu: L40S, price_per_hour: 0.86, available: 2, memory_bytes: 48305799168,
     profiles: {{m: {{1: {PROFILING}/l40s-llama-3.1-8b-tp1.yaml}}}}}}
configurations: [{{name: one, gpus: {{L40S: 1}}, profile: {PROFILING}/l40s-llama-3.1-8b-tp1.yaml}}]
workloads: [{{name: w, input_tokens: 200, output_tokens: 10, share: 1}}]
"""


@pytest.fixture
def server() -> Iterator[int]:
    """A server that answers every page."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield listening.server_port
    listening.shutdown()
    listening.server_close()


def test_a_rented_fleet_is_checked_filled_in_and_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], server: int
) -> None:
    market, fleet = tmp_path / "market.yaml", tmp_path / "fleet.yaml"
    market.write_text(MARKET)
    arguments = ["rent", "--config", str(market), "--no-cache", "--no-simulate", "--json"]
    assert main([*arguments, "--write-fleet", str(fleet)]) == 0
    document = json.loads(capsys.readouterr().out)
    # A plan for stated lengths is no limit on what clients send.
    assert all("--max-model-len auto" in command for command in document["commands"])
    assert main(["serve", "--config", str(fleet), "--check"]) == 2
    told = capsys.readouterr().err
    assert "instance one-0: url: expected the host in place of l40s-0.invalid" in told
    filled = yaml.safe_load(fleet.read_text())
    instances = filled["models"][0]["instances"][:1]
    instances[0]["url"] = f"http://127.0.0.1:{server}"
    filled["models"][0]["instances"] = instances
    filled.pop("policy")
    fleet.write_text(yaml.safe_dump(filled))
    assert main(["serve", "--config", str(fleet), "--check"]) == 0


def test_stages_that_are_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "stages.yaml"
    workers = [{"name": "a", "url": "http://box-0.invalid:9100"}]
    stages = {"version": 1, "model": "m", "folder": "llama", "key_file": "stage.key", "workers": workers}
    file.write_text(yaml.safe_dump(stages))
    assert main(["stage", "--coordinate", str(file), "--check"]) == 2
    told = capsys.readouterr().err
    for words in (
        "workers: a: url: expected the host",
        "expected the model's config.json",
        "key_file: expected",
    ):
        assert words in told


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "8.03B",
            "70.6",
            "models[0].parameters: expected a number of parameters, got 70.6: did you mean 70.6B?",
        ),
        (
            "workloads:",
            "links: {between: 10}\nworkloads:",
            "links.between: expected bytes/s, got 10: did you mean",
        ),
    ],
)
def test_figures_without_their_unit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, told: str
) -> None:
    path = tmp_path / "market.yaml"
    path.write_text(MARKET.replace(old, new, 1))
    assert main(["rent", "--config", str(path), "--no-cache"]) == 2
    assert told in capsys.readouterr().err


def test_every_form_has_a_fact_with_its_source() -> None:
    for connector in (None, NIXL):
        for role in Role:
            for tp, pp, machines in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (4, 4, 2)):
                assert fact_of(Form(tp, pp, machines, connector, role)).source
    assert refused(Form(1, 2, 1, NIXL, Role.DECODE))
    assert refused(Form(1, 2, 1, NIXL, Role.BOTH))
    assert refused(Form(1, 2, 1, NIXL, Role.PREFILL))  # it starts, but no transfer succeeds
    assert not refused(Form(1, 1, 1, NIXL, Role.PREFILL))
    assert not refused(Form(8, 8, 8))
    assert {fact.status for fact in VLLM_FACTS} == set(Status)


def test_a_command_is_one_line_of_a_shell_and_says_if_it_was_never_tried() -> None:
    server = VllmServer(
        name="p",
        model="org/a model",
        form=Form(2, 3, 2),
        gpus=[("a", (0, 1, 2, 3)), ("b", (0, 1))],
        utilization=0.9,
        layers=[10, 12, 10],
    )
    command = server.command()
    words = shlex.split(command, comments=True)
    assert words[:4] == ["VLLM_PP_LAYER_PARTITION=10,12,10", "vllm", "serve", "org/a model"]
    assert words[words.index("--max-model-len") + 1] == "auto"
    assert "not tried" in command
    assert server.url == "http://a.invalid:8000"
