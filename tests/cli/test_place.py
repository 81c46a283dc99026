"""`hetlb place` on a small cluster of files: results, errors, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hetlb.cli.main import main
from hetlb.tools.paths.stages import SINK
from hetlb.tools.plan.placement.place_file import load_place

NODES = "node,gpu_type,region,max_layers,nic_in_bytes_per_s,nic_out_bytes_per_s\n" + "".join(
    f"n{i},{'fast' if i < 2 else 'slow'},r0,3,1e10,1e10\n" for i in range(4)
)
TIMES = "gpu_type,phase,batch_tokens,time_per_layer_ms\n" + "".join(
    f"{kind},{phase},{tokens},{tokens * scale}\n"
    for kind, scale in (("fast", 1.0), ("slow", 3.0))
    for phase in ("prompt", "decode")
    for tokens in (0, 1000)
)
LIMITS = (
    "gpu_type,layers,tokens_per_s,kv_entries_token_layer,prompt_max_requests,prompt_max_tokens,"
    "decode_max_tokens,decode_max_context_tokens\n"
    + "".join(
        f"{kind},{j},{rate / j},{40000 // j},2,4096,64,64000\n"
        for kind, rate in (("fast", 300.0), ("slow", 100.0))
        for j in (1, 2, 3)
    )
)
MODEL = '{"model": "tiny", "num_layers": 4, "activation_bytes_per_token": 1000, "token_bytes": 2}'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    names = ["n0", "n1", "n2", "n3"]
    edges = [(a, b) for a in names for b in names if a != b]
    edges += [("source", name) for name in names] + [(name, "sink") for name in names]
    links = "from,to,bytes_per_s,latency_s\n" + "".join(f"{a},{b},1e9,0.001\n" for a, b in edges)
    files = {
        "nodes.csv": NODES,
        "links.csv": links,
        "times.csv": TIMES,
        "limits.csv": LIMITS,
        "model.json": MODEL,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "lengths.csv").write_text("input_tokens,output_tokens\n100,20\n60,30\n")
    path = tmp_path / "place.yaml"
    path.write_text(
        "version: 1\nnodes: nodes.csv\nlinks: links.csv\nlayer_times: times.csv\nlimits: limits.csv\n"
        "model: model.json\n"
    )
    return path


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["place", *arguments, "--json"]) == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


def test_the_highest_flow_is_found_and_proven(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = run_json(capsys, "--config", str(config), "--time-limit", "60")
    # Each half on a fast and a slow machine: 150 + 50. All layer rates together give no more: 800 / 4.
    assert document["max_flow_tokens_per_s"] == pytest.approx(200.0)
    assert document["upper_bound_tokens_per_s"] == pytest.approx(200.0, rel=1e-4)
    assert document["simulated"] is None
    assert document["partial_inference"] is False
    assert len(document["commands"]) == 3 + len(document["placement"]) == 7  # type: ignore[arg-type]


def test_a_placement_is_evaluated_and_simulated(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placement = tmp_path / "p.json"
    placement.write_text('{"n0": [0, 2], "n1": [2, 4], "n2": [0, 2], "n3": [2, 4]}')
    for scheduler in ("hetlb", "iwrr", "swarm", "random", "shortest-queue"):
        document = run_json(
            capsys, "--config", str(config), "--placement", str(placement), "--simulate", "20",
            "--scheduler", scheduler, "--lengths", str(tmp_path / "lengths.csv"), "--load", "2",
        )  # fmt: skip
        assert document["max_flow_tokens_per_s"] == pytest.approx(200.0)
        simulated = document["simulated"]
        assert isinstance(simulated, dict)
        assert simulated["scheduler"] == scheduler
        assert simulated["decode_tokens_per_s"] == pytest.approx(50.0, rel=0.3)


def test_simulations_choose_the_plan(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = run_json(
        capsys, "--config", str(config), "--simulate", "5", "--lengths", str(tmp_path / "lengths.csv"),
        "--time-limit", "4",
    )  # fmt: skip
    assert isinstance(document["simulated"], dict)
    assert document["simulated"]["decode_tokens_per_s"] > 0.0
    assert document["highest_flow"] is not None


def test_the_table_names_every_node(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", "--config", str(config), "--time-limit", "2"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("n0", "n1", "n2", "n3", "hetlb stage --model tiny"))


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("nodes.csv", "n1,fast", "n0,fast", "nodes.csv: line 3: node: expected every name once"),
        ("nodes.csv", "n1,fast", "n1,odd", "gpu_type: expected one of fast, slow"),
        ("links.csv", "n0,n1,1e9", "n0,n1,-1", "bytes_per_s: expected a number greater than 0, got '-1'"),
        ("links.csv", "n0,n1,", "n0,nx,", "to: expected a node of the nodes file or sink"),
        ("limits.csv", "fast,2,", "fast,5,", "layers: expected 2, the next number of layers of fast"),
        ("times.csv", "fast,prompt", "fast,think", "phase: expected prompt or decode, got 'think'"),
        ("model.json", '"num_layers": 4', '"num_layers": 0', "num_layers: expected a whole number from 1"),
        ("model.json", "{", "[", "expected valid JSON"),
        ("model.json", '"num_layers": 4', '"num_layers": 13', "expected room for 13 layers, got 12"),
        ("place.yaml", "model: model.json", "model: model.json\nmodell: x", "modell: unknown key"),
    ],
)
def test_bad_files_are_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], file: str, old: str, new: str, told: str
) -> None:
    path = config.parent / file
    path.write_text(path.read_text().replace(old, new, 1))
    assert main(["place", "--config", str(config), "--time-limit", "1"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("placement", "told"),
    [
        ('{"nx": [0, 1]}', "expected a node of the nodes file"),
        ('{"n0": [0, 4]}', "expected at most 3 layers on a fast, got 4"),
        ('{"n0": [2, 2]}', "expected [first, end] within 0 and 4"),
        ('{"n0": [0, true]}', "expected [first, end]"),
        ("{}", "expected at least one node"),
    ],
)
def test_bad_placements_are_one_line(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], placement: str, told: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(placement)
    assert main(["place", "--config", str(config), "--placement", str(path)]) == 2
    assert told in capsys.readouterr().err


def test_a_fleet_of_stages_is_written_with_hosts_to_fill_in(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placement, fleet = tmp_path / "p.json", tmp_path / "fleet.yaml"
    # Plans that share machines too: a path per request needs no separate pipelines.
    placement.write_text('{"n0": [0, 1], "n1": [1, 3], "n2": [3, 4], "n3": [3, 4]}')
    document = run_json(
        capsys, "--config", str(config), "--placement", str(placement), "--write-fleet", str(fleet),
    )  # fmt: skip
    (instance,) = yaml.safe_load(fleet.read_text())["models"][0]["instances"]
    assert instance == {"name": "stages", "url": "http://127.0.0.1:9200"}
    assert main(["serve", "--config", str(fleet), "--check"]) == 0
    capsys.readouterr()
    written = tmp_path / "fleet-stages.yaml"
    assert main(["stage", "--coordinate", str(written), "--check"]) == 2
    assert "workers: n0: url: expected the host in place of n0.invalid" in capsys.readouterr().err
    stages = yaml.safe_load(written.read_text())
    assert stages["workers"][0] == {"name": "n0", "url": "http://n0.invalid:9100"}
    assert stages["folder"] == "tiny"
    commands = document["commands"]
    assert isinstance(commands, list)
    assert commands[1].startswith("hetlb stage --model tiny --layers 0:1 --host 0.0.0.0 --port 9100")
    assert "--key-file stage.key" in commands[1]
    assert commands[-2].startswith(f"hetlb stage --coordinate {written} --port 9200")
    assert commands[-1] == f"hetlb serve --config {fleet}"


MACHINES = """version: 1
model: {name: llama-3.1-70b, parameters: 70.6e9, layers: 80, hidden_size: 8192, kv_bytes_per_token: 327680}
machines:
  - {name: l40s, gpu: L40S, gpus: 2, count: 2, memory_bytes: 48e9, profiles: {1: l40s.yaml}, site: a}
  - {name: big, gpu: L40S-96, gpus: 1, memory_bytes: 96e9, profiles: {1: l40s.yaml}, site: b}
links: {inside: {L40S: 20e9}, between: 1e9, between_sites: 1e8, latency_s: 0.001}
"""


@pytest.fixture
def machines(tmp_path: Path) -> Path:
    profile = Path(__file__).parents[2] / "profiling" / "l40s-llama-3.1-70b-tp1.yaml"
    (tmp_path / "l40s.yaml").write_text(profile.read_text())
    path = tmp_path / "machines.yaml"
    path.write_text(MACHINES.replace("48e9", "48000000000").replace("96e9", "96000000000"))
    return path


def test_the_template_loads() -> None:
    cluster = load_place(Path(__file__).parents[2] / "configs" / "placements" / "llama-70b.yaml")
    assert sum(cluster.most_layers(node) for node in cluster.nodes) >= cluster.model.layers


def test_machines_with_profiles_are_a_cluster(machines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = load_place(machines)
    names = [node.name for node in cluster.nodes]
    assert names == ["l40s-0-gpu0", "l40s-0-gpu1", "l40s-1-gpu0", "l40s-1-gpu1", "big"]
    # (48e9 * 0.9) bytes hold at most 24 layers of 70.6e9 * 2 / 80, and then some KV for one request.
    assert cluster.most_layers(cluster.nodes[0]) == 24
    assert cluster.most_layers(cluster.nodes[4]) > 2 * 23
    kind = cluster.kind(cluster.nodes[0])
    for held, holding in enumerate(kind.holdings, start=1):
        weights = 70.6e9 * 2 * held / 80
        assert weights + holding.kv_token_layers * 327680 / 80 <= 48e9 * 0.9
        assert holding.tokens_per_s > 0
    rates = [holding.tokens_per_s for holding in kind.holdings]
    assert rates == sorted(rates, reverse=True)
    assert cluster.links["l40s-0-gpu0", "l40s-0-gpu1"].bytes_per_s == 20e9
    assert cluster.links["l40s-0-gpu0", "l40s-1-gpu0"].bytes_per_s == 1e9
    assert cluster.links["l40s-1-gpu0", "big"].bytes_per_s == 1e8
    assert cluster.links["big", SINK].bytes_per_s == 1e8
    document = run_json(capsys, "--config", str(machines), "--time-limit", "3")
    assert document["max_flow_tokens_per_s"] > 0  # type: ignore[operator]
    # GPUs of one machine are workers of one host, each with its own port.
    commands = document["commands"]
    assert isinstance(commands, list)
    assert commands[2].startswith("CUDA_VISIBLE_DEVICES=1 hetlb stage --model llama-3.1-70b --layers ")
    assert commands[2].endswith("--port 9101 --key-file stage.key  # on l40s-0")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "profiles: {1: l40s.yaml}, site: a",
            "profiles: {2: l40s.yaml}",
            "profiles.1: expected a latency profile",
        ),
        ("l40s.yaml}, site: a", "none.yaml}", "expected the path of a latency profile, got 'none.yaml'"),
        (
            "gpus: 2, c",
            "gpus: 2, roofline: {flops: 1, bandwidth_bytes_per_s: 1}, c",
            "machines[0].roofline: unknown key",
        ),
        (
            "gpus: 2, c",
            "gpus: 2, price_per_gpu_hour: 1, c",
            "machines[0].price_per_gpu_hour: unknown key",
        ),
        ("parameters: 70.6e9, ", "", "model.parameters: expected a value or model.config, got neither"),
        ("layers: 80, ", "", "model.layers: expected a value or model.config"),
        ("name: big", "name: l40s", "expected every name once"),
        (
            "memory_bytes: 48000000000",
            "memory_bytes: 2000000",
            "machines[0].memory_bytes: expected room for one",
        ),
        (
            "memory_bytes: 96000000000",
            "memory_bytes: 2MB",
            "machines[1].memory_bytes: expected room for one layer",
        ),
        (
            "name: big",
            "name: source",
            "machines[1].name: expected a name other than source and sink, got 'source'",
        ),
        ("name: big", "name: l40s-0-gpu1", "machines: expected every name once, got 'l40s-0-gpu1' again"),
        (
            "inside: {L40S: 20e9}, between: 1e9, between_sites: 1e8",
            "matrix: [[1e9]]",
            "links.matrix: expected 3 rows (machines)",
        ),
        ("version: 1", "version: 1\nnodes: n.csv", "nodes: expected either nodes or machines, got both"),
    ],
)
def test_bad_machines_are_one_line(
    machines: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, told: str
) -> None:
    assert old in machines.read_text()
    machines.write_text(machines.read_text().replace(old, new, 1))
    assert main(["place", "--config", str(machines), "--time-limit", "1"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_plan_without_shared_machines_is_said_as_vllm_servers(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placement = tmp_path / "p.json"
    placement.write_text('{"n0": [0, 3], "n1": [3, 4]}')
    document = run_json(capsys, "--config", str(config), "--placement", str(placement))
    vllm = document["vllm"]
    assert isinstance(vllm, dict)
    assert vllm["pipelines"] == [["n0", "n1"]]
    assert vllm["commands"][0].startswith(
        "VLLM_PP_LAYER_PARTITION=3,1 vllm serve tiny --tensor-parallel-size 1 --pipeline-parallel-size 2"
    )
    assert str(document["advice"]).startswith(
        "vLLM: its pipelines of separate machines reach 100% of the flow"
    )
    placement.write_text('{"n0": [0, 2], "n1": [2, 4], "n2": [0, 2]}')
    document = run_json(capsys, "--config", str(config), "--placement", str(placement))
    vllm = document["vllm"]
    assert isinstance(vllm, dict)
    assert sorted(map(sorted, vllm["pipelines"])) == [["n0", "n1"], ["n2", "n3"]], "servers of one kind"


def test_no_stage_is_started_for_a_model_that_stages_do_not_compute(
    machines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192,
        "num_hidden_layers": 80, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256,
    }  # fmt: skip
    path = machines.parent / "config.json"
    document = yaml.safe_load(machines.read_text())
    document["model"] = {"name": "m", "config": "config.json"}
    machines.write_text(yaml.safe_dump(document))
    for more, words in (
        ({}, None),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: expected none"),
    ):
        path.write_text(json.dumps(config | more))
        found = run_json(capsys, "--config", str(machines), "--time-limit", "2")
        assert bool(found["commands"]) == (words is None)
        assert (words or "None") in str(found["unstaged"])
    arguments = ["--config", str(machines), "--time-limit", "2"]
    assert main(["place", *arguments, "--write-fleet", str(machines.parent / "f.yaml")]) == 2
    assert "expected a model that hetlb stage computes" in capsys.readouterr().err
    assert main(["place", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "hetlb stage does not compute this model" in printed
    assert "hetlb stage --model" not in printed
