"""`hetlb search`: the contract's document, both estimates, what does not fit, one line for wrong input."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from hetlb.balancer.config.fleet import load_fleet
from hetlb.cli.main import main
from hetlb.tools.plan.cluster import load_cluster, load_split

CLUSTERS = Path(__file__).parents[2] / "configs" / "clusters"
L40S = str(CLUSTERS / "l40s-llama-70b.yaml")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests for each layout: of 2,000."""
    monkeypatch.setattr("hetlb.tools.plan.layouts._MOST_REQUESTS", 300)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rng = random.Random(3)
    rows = [f",{rng.randint(50, 400)},{rng.randint(200, 900)}" for _ in range(150)]
    path = tmp_path / "decode-heavy.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return str(path)


@pytest.mark.parametrize("estimate", ["static", "simulate"])
def test_two_instances_at_4_beat_one_at_8_on_l40s(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path, estimate: str
) -> None:
    fleet = tmp_path / "fleet.yaml"
    flags = ["--trace", trace, "--estimate", estimate, "--write-fleet", str(fleet), "--json"]
    assert main(["search", "--config", L40S, *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    (machine,) = document["machines"]
    ranking = machine["ranking"]
    assert [option["tensor_parallel_size"] for option in ranking] == [4, 8, 1, 2]
    assert document["best"] == {"l40s-box": 4}
    assert document["throughput_tok_s"] == ranking[0]["throughput_tok_s"] > ranking[1]["throughput_tok_s"]
    for option in ranking[2:]:
        assert not option["feasible"]
        assert option["throughput_tok_s"] == 0
        # t * (0.9 * 48305799168 - 2147483648) - 141.1e9 against 327680 * 9216 bytes
        room = option["tensor_parallel_size"] * (0.9 * 48305799168 - 2147483648) - 141.1e9
        assert option["missing_bytes"] == pytest.approx(327680 * 9216 - room, abs=1)
        assert str(option["missing_bytes"]) in option["reason"]
    assert len(document["commands"]) == 2
    assert "CUDA_VISIBLE_DEVICES=4,5,6,7 vllm serve" in document["commands"][1]
    assert [spec.name for spec in load_fleet(fleet).instances] == ["l40s-box-tp4-0", "l40s-box-tp4-1"]


@pytest.mark.parametrize(
    "path", sorted(set(CLUSTERS.glob("*.yaml")) - set(CLUSTERS.glob("split-*"))), ids=lambda path: path.name
)
def test_every_example_cluster_loads(path: Path) -> None:
    assert load_cluster(path).machines


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    assert main(["search", "--config", L40S, "--trace", trace, "--estimate", "static"]) == 0
    out = capsys.readouterr().out
    assert "l40s-box" in out
    assert "bytes missing" in out.replace("\n", " ")


def changed(tmp_path: Path, old: str, new: str) -> str:
    text = Path(L40S).read_text().replace("../../profiling", str(CLUSTERS.parents[1] / "profiling"))
    text = text.replace("llama-3.1-70b.config.json", str(CLUSTERS / "llama-3.1-70b.config.json"))
    assert old in text
    path = tmp_path / "cluster.yaml"
    path.write_text(text.replace(old, new))
    return str(path)


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: str) -> None:
    path = changed(tmp_path, "parameters: 70.55e9", "parameters: 700e9")
    fleet = tmp_path / "fleet.yaml"
    assert main(["search", "--config", path, "--trace", trace, "--write-fleet", str(fleet)]) == 2
    out, err = capsys.readouterr()
    assert "missing" in out
    assert err == f"hetlb search: {path}: expected a layout that fits, got none\n"
    assert not fleet.exists()


def test_a_degree_without_profile_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    text = Path(changed(tmp_path, "version: 1", "version: 1")).read_text()
    lines = [line for line in text.splitlines() if "tp4" not in line]
    (tmp_path / "cluster.yaml").write_text("\n".join(lines))
    flags = ["--trace", trace, "--estimate", "static", "--json"]
    assert main(["search", "--config", str(tmp_path / "cluster.yaml"), *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["best"] == {"l40s-box": 8}
    reasons = {o["tensor_parallel_size"]: o["reason"] for o in document["machines"][0]["ranking"]}
    assert reasons[4] == "no profile for tensor_parallel_size 4"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gpus: 8", "gpus: 8\n    colour: red", "machines[0].colour: unknown key"),
        ("limits:", "# limits:", "limits: expected a value, but the key is missing"),
        ("gpus: 8", "gpus: none", "machines[0].gpus: expected a whole number, got 'none'"),
        (
            "  gpu_memory_utilization: 0.9",
            "  gpu_memory_utilization: 1.9",
            "gpu_memory_utilization: expected",
        ),
        ("      8: ", "      9: ", "machines[0].profiles.9: expected a degree of at most the 8 GPUs, got 9"),
        (
            "memory_bytes: 48305799168",
            "memory_bytes: 48",
            "machines[0].memory_bytes: expected bytes, got 48: did you mean 48GiB?",
        ),
        (
            "parameters: 70.55e9",
            "parameters: 70.55",
            "model.parameters: expected a number of parameters, got 70.55: did you mean 70.55B?",
        ),
        ("parameters: 70.55e9", "parameters: 70 bn", "expected a number or one with a unit such as 8.03B"),
        ("      8: ", "      x: ", "machines[0].profiles.x: expected a tensor-parallel degree"),
        ("tp8.yaml", "tp4.yaml", "expected a profile of degree 8, got one of degree 4"),
        ("tp8.yaml", "tp16.yaml", "no such file"),
        ("  config:", "  # config:", "model.kv_bytes_per_token: expected a value or model.config"),
        ("max_output_tokens: 1024", "max_output_tokens: 1", "limits: expected some row of"),
    ],
)
def test_mistakes_in_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: str, old: str, new: str, message: str
) -> None:
    path = changed(tmp_path, old, new)
    assert main(["search", "--config", path, "--trace", trace]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert path in err
    assert err.count("\n") == 1


def test_one_file_is_read_by_search_and_split(tmp_path: Path, trace: str) -> None:
    path = Path(changed(tmp_path, "gpus: 8", "gpus: 8\n    site: a"))
    path.write_text(
        path.read_text() + "workload: {input_tokens: 512, output_tokens: 64}\nslo: {tpot_ms: 50}\n"
    )
    machines = load_cluster(path).machines
    assert load_split(path).machines == machines
    assert machines[0].site == "a"


@pytest.mark.parametrize("profiles", ["", "profiles: {}"])
def test_a_machine_without_profiles_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: str, profiles: str
) -> None:
    path = tmp_path / "cluster.yaml"
    text = SIX.replace("CONFIG", str(CLUSTERS / "llama-3.1-70b.config.json"))
    path.write_text(re.sub(r"profiles: \{.*\}", profiles, text))
    assert main(["search", "--config", str(path), "--trace", trace]) == 2
    told = "machines[0].profiles: expected latency profiles by degree, got none"
    assert capsys.readouterr().err == f"hetlb search: {path}: {told}\n"


def test_wrong_flags(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    assert main(["search", "--config", L40S, "--trace", trace, "--num-prompts", "2001"]) == 2
    assert "--num-prompts: expected a whole number from 1 to 2000, got 2001" in capsys.readouterr().err


SIX = """version: 1
model: {name: m, parameters: 8.03B, config: CONFIG}
limits: {max_input_tokens: 2048, max_output_tokens: 1024}
machines:
  - name: six
    gpu: a100
    gpus: 6
    memory_bytes: 80GiB
    reserved_bytes_per_gpu: 2GiB
    price_per_gpu_hour: 2.5
    profiles: {2: PROFILING/a100_sxm-llama-3.1-8b-tp2.yaml, 4: PROFILING/a100_sxm-llama-3.1-8b-tp4.yaml}
"""


@pytest.fixture
def six(tmp_path: Path) -> str:
    """A machine of six GPUs without a profile of degree 1, with the heads of Llama-3.1-70B."""
    path = tmp_path / "six.yaml"
    config = str(CLUSTERS / "llama-3.1-70b.config.json")
    path.write_text(
        SIX.replace("CONFIG", config).replace("PROFILING", str(CLUSTERS.parents[1] / "profiling"))
    )
    return str(path)


def search_json(capsys: pytest.CaptureFixture[str], config: str, trace: str, *flags: str) -> dict[str, Any]:
    assert main(["search", "--config", config, "--trace", trace, "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_unequal_layouts_and_what_vllm_refuses(
    capsys: pytest.CaptureFixture[str], six: str, trace: str
) -> None:
    document = search_json(capsys, six, trace)
    (machine,) = document["machines"]
    by_degree = {each["tensor_parallel_size"]: each for each in machine["ranking"]}
    assert sorted(by_degree) == [1, 2, 3, 4, 6]
    assert by_degree[6]["reason"] == "vLLM refuses it: 64 attention heads are not divisible by 6"
    assert by_degree[4]["instances"] == 1
    layouts = [
        [(part["tensor_parallel_size"], part["count"]) for part in each["instances"]]
        for each in machine["layouts"]
    ]
    assert layouts[0] == [(2, 3)]
    assert [(4, 1), (2, 1)] in layouts
    assert document["degrees_checked"] is True
    assert document["rows"] == {"total": 150, "within_limits": 150}
    assert document["fleet"]["simulated"]["total_token_throughput"] > 0
    assert machine["layouts"][0]["cost_per_hour"] == pytest.approx(15.0)


def test_a_rate_and_targets(capsys: pytest.CaptureFixture[str], six: str, trace: str) -> None:
    document = search_json(capsys, six, trace, "--request-rate", "2", "--goodput", "ttft:2000", "tpot:100")
    best = document["machines"][0]["layouts"][0]
    assert best["simulated"]["slo_attainment"] > 0.99
    assert best["simulated"]["goodput_req_s"] == pytest.approx(2.0, rel=0.01)
    assert best["gpus"] == 2  # the cheapest that meets them
    assert document["request_rate"] == 2.0
    assert len(document["commands"]) == 1
    unmet = search_json(capsys, six, trace, "--request-rate", "400", "--goodput", "ttft:200")
    assert unmet["machines"][0]["layouts"][0]["simulated"]["slo_attainment"] < 0.9


def test_data_parallel_replicas_share_a_url(
    capsys: pytest.CaptureFixture[str], six: str, trace: str, tmp_path: Path
) -> None:
    fleet = tmp_path / "fleet.yaml"
    document = search_json(capsys, six, trace, "--data-parallel", "--write-fleet", str(fleet))
    (command,) = document["commands"]
    assert command.startswith("CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 vllm serve m --tensor-parallel-size 2 ")
    assert "--data-parallel-size 3" in command
    assert [spec.url for spec in load_fleet(fleet).instances] == ["http://six.invalid:8000"]


def test_pipelines_where_gpus_would_be_left_over(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path
) -> None:
    """A 70B model on six L40S: two GPUs do not hold it, and TP 4 alone leaves two without work."""
    path = Path(changed(tmp_path, "gpus: 8", "gpus: 6"))
    path.write_text("\n".join(line for line in path.read_text().splitlines() if "tp8" not in line))
    fleet = tmp_path / "fleet.yaml"
    document = search_json(capsys, str(path), trace, "--write-fleet", str(fleet))
    (command,) = document["commands"]
    assert "--tensor-parallel-size 2 --pipeline-parallel-size 3" in command
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 " in command
    source = load_fleet(fleet).profiles["l40s-box-tp2pp3-0"].source
    assert source is not None
    assert not source.measured
    alone = search_json(capsys, str(path), trace, "--pipeline-parallel", "1")
    assert "--tensor-parallel-size 4 --gpu" in alone["commands"][0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--goodput", "ttft:1000"), "--goodput: expected --request-rate with it"),
        (("--request-rate", "inf"), "--request-rate: expected a number above 0, at most 1e+15, got inf"),
        (("--request-rate", "2", "--goodput", "ttft:fast"), "--goodput: expected NAME:MILLISECONDS"),
        (("--request-rate", "2", "--goodput", "e2el:9"), "--goodput: expected ttft, tpot or both, got e2el"),
        (("--pipeline-parallel", "9"), "--pipeline-parallel: expected a whole number from 1 to 8, got 9"),
    ],
)
def test_wrong_targets(
    capsys: pytest.CaptureFixture[str], six: str, trace: str, flags: tuple[str, ...], message: str
) -> None:
    assert main(["search", "--config", six, "--trace", trace, *flags]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_few_rows_within_the_limits(capsys: pytest.CaptureFixture[str], six: str, tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    rows = [",100,100"] * 4 + [",9000,100"] * 6
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    assert main(["search", "--config", six, "--trace", str(path)]) == 2
    assert "limits: expected at least half of the rows of" in capsys.readouterr().err
    path.write_text(path.read_text().replace(",9000,100\n", "", 2))
    assert main(["search", "--config", six, "--trace", str(path)]) == 0
    out = capsys.readouterr().out
    assert "estimated on 4 of 8 rows of the trace; 4 exceed the cluster's limits" in out


def test_tokens_per_second_do_not_depend_on_the_number_of_rows_and_are_what_the_fleet_serves(
    capsys: pytest.CaptureFixture[str], six: str, tmp_path: Path
) -> None:
    """An estimate to the last answer holds the drain, of which a short trace has the larger part."""
    rates = []
    for rows in (60, 600):
        path = tmp_path / f"{rows}.csv"
        lengths = "".join(f",{300 + 37 * n % 211},{60 + 53 * n % 97}\n" for n in range(rows))
        path.write_text(f"arrival_s,input_tokens,output_tokens\n{lengths}")
        document = search_json(capsys, six, str(path))
        rates.append(document["throughput_tok_s"])
    assert rates[0] == pytest.approx(rates[1], rel=0.05)
    assert document["fleet"]["simulated"]["total_token_throughput"] == pytest.approx(rates[1], rel=0.05)


def test_a_fleet_of_profiles_without_a_cache_size_can_be_simulated(
    capsys: pytest.CaptureFixture[str], six: str, trace: str, tmp_path: Path
) -> None:
    for degree in (2, 4):
        written = CLUSTERS.parents[1] / "profiling" / f"a100_sxm-llama-3.1-8b-tp{degree}.yaml"
        lines = [line for line in written.read_text().splitlines() if "kv_cache_tokens" not in line]
        (tmp_path / f"tp{degree}.yaml").write_text("\n".join(lines))
        assert len(lines) < len(written.read_text().splitlines())
        text = Path(six).read_text().replace(str(written), f"tp{degree}.yaml")
        Path(six).write_text(text)
    fleet = tmp_path / "fleet.yaml"
    search_json(capsys, six, trace, "--write-fleet", str(fleet))
    assert main(["simulate", "--config", str(fleet), "--trace", trace, "--num-prompts", "5", "--json"]) == 0
