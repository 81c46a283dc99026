"""`hetlb rent`: the contract's document, a fleet that loads, replanning, sweeps, one line for wrong input."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetlb.balancer.config.fleet import load_fleet
from hetlb.cli.main import main
from hetlb.errors import ConfigError
from hetlb.tools.plan.highs import INFINITY, Interrupt
from hetlb.tools.plan.market import load_market
from hetlb.tools.plan.rent_search import PlanSearch

MARKETS = Path(__file__).parents[2] / "configs" / "markets"
TOY = str(MARKETS / "toy.yaml")
PROFILING = Path(__file__).parents[2] / "profiling"


def market(**changes: Any) -> dict[str, Any]:
    """A model that fits one L40S, and a second kind of GPU known by a roofline."""
    degrees = {tp: str(PROFILING / f"l40s-llama-3.1-8b-tp{tp}.yaml") for tp in (1, 2)}
    return {
        "version": 1,
        "budget_per_hour": 4.0,
        "models": [{"name": "8b", "parameters": 8.03e9, "kv_bytes_per_token": 131072, "layers": 32}],
        "offers": [
            {
                "gpu": "L40S",
                "price_per_hour": 0.86,
                "available": 2,
                "gpus_per_machine": 2,
                "memory_bytes": 48305799168,
                "profiles": {"8b": degrees},
            },
            {
                "gpu": "A40",
                "price_per_hour": 0.55,
                "available": 2,
                "gpus_per_machine": 2,
                "memory_bytes": 51539607552,
                "roofline": {"flops": 150e12, "bandwidth_bytes_per_s": 696e9},
            },
        ],
        "workloads": [
            {"name": "read", "input_tokens": 800, "output_tokens": 20, "share": 3},
            {"name": "write", "input_tokens": 200, "output_tokens": 200, "share": 1},
        ],
    } | changes


def small_market(**changes: Any) -> dict[str, Any]:
    """The same with one GPU of either kind, of which each is a machine: few throughputs to simulate."""
    document = market(**changes)
    for offer in document["offers"]:
        offer |= {"available": 1, "gpus_per_machine": 1}
    document["offers"][0]["profiles"]["8b"].pop(2)
    return document


def write(path: Path, document: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(document))
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Throughputs that one test has simulated are known to the others, and to none of another run."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def rent(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["rent", *flags, "--time-limit", "600", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_worked_example(capsys: pytest.CaptureFixture[str]) -> None:
    document = rent(capsys, "--config", TOY)
    assert document["makespan_s"] == pytest.approx(1450 / 51, abs=1e-9)
    assert {each["configuration"]: each["count"] for each in document["instances"]} == {"t1": 1, "t2x2-tp": 1}
    assert document["cost_per_hour"] == 8.0
    assert document["simulated"] is None
    names = [name.split(" (")[0] for name in document["baselines"]]
    assert {"homogeneous", "uniform composition", "one TP for all", "round robin over the plan"} <= set(names)


def test_no_limit_of_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float] = []

    def search(*arguments: Any) -> PlanSearch:
        deadlines.append(arguments[2].deadline)
        return PlanSearch(*arguments)

    monkeypatch.setattr("hetlb.cli.rent.PlanSearch", search)
    assert main(["rent", "--config", TOY, "--time-limit", "inf", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cost_per_hour"] == 8.0
    assert deadlines == [INFINITY]


def test_an_enumerated_market(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetlb.tools.plan.rent_simulation._RUN_STAYS", 4)
    monkeypatch.setattr("hetlb.tools.plan.rent_simulation._LEAST_REQUESTS", 500)
    fleet = tmp_path / "fleet.yaml"
    config = write(tmp_path / "market.yaml", small_market(budget_per_hour=1.5))
    document = rent(capsys, "--config", config, "--write-fleet", str(fleet))
    assert 0 < document["cost_per_hour"] <= 1.5
    for name in ("read", "write"):
        shares = [each["share"] for each in document["assignment"] if each["workload"] == name]
        assert sum(shares) == pytest.approx(1.0)
    planned, simulated = document["throughput_req_s"], document["simulated"]["request_throughput"]
    assert simulated == pytest.approx(planned, rel=0.15)
    assert document["bound_req_s"] >= planned * (1 - 1e-6)
    resolved = load_fleet(fleet)
    names = {spec.name for spec in resolved.instances}
    assert len(names) == sum(each["count"] for each in document["instances"]) == len(document["commands"])
    params = resolved.policy_params
    assert {name for name, _ in params.worth} == names
    # The instances are worth what the plan serves, by the times of the policy.
    assert sum(worth for _, worth in params.worth) == pytest.approx(planned, rel=0.2)
    assert [(each.input_tokens, each.output_tokens) for each in params.types] == [(800, 20), (200, 200)]
    for each in params.types:
        assert sum(share for _, share in each.instances) == pytest.approx(1.0)
        assert {name for name, _ in each.instances} <= names
    for policy in ("hetlb", "planned"):
        trace = tmp_path / "trace.csv"
        trace.write_text(
            "arrival_s,input_tokens,output_tokens\n" + ",800,20\n,800,20\n,800,20\n,200,200\n" * 5
        )
        flags = ["--config", str(fleet), "--trace", str(trace), "--request-rate", "inf", "--policy", policy]
        assert main(["simulate", *flags, "--json"]) == 0
        (run,) = json.loads(capsys.readouterr().out)["runs"]
        assert run["completed"] == 20


def test_a_target_at_least_cost_within_an_slo(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One type, one GPU of either kind: every configuration is searched for its highest rate in the SLO."""
    monkeypatch.setattr("hetlb.tools.plan.throughput._LEAST_SLO_REQUESTS", 150)
    document = small_market(target={"request_rate": 2.0}, workloads=market()["workloads"][1:])
    del document["budget_per_hour"]
    free = rent(capsys, "--config", write(tmp_path / "free.yaml", document), "--no-simulate")
    assert free["throughput_req_s"] == pytest.approx(2.0)
    document["slo"] = {"ttft_ms": 2000, "tpot_ms": 30, "attainment": 0.9}
    tight = rent(capsys, "--config", write(tmp_path / "tight.yaml", document), "--no-simulate")
    assert tight["cost_per_hour"] > free["cost_per_hour"]


def test_types_are_found_in_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = market()
    del document["workloads"]
    trace = tmp_path / "trace.csv"
    rows = [f",{800 + i},{20 + i % 3}\n,{200 + i},{190 + i}\n" for i in range(20)]
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(rows))
    config = write(tmp_path / "market.yaml", document)
    flags = ["--config", config, "--trace", str(trace), "--workloads", "2", "--no-simulate"]
    found = rent(capsys, *flags)
    assert [each["share"] for each in found["workloads"]] == [0.5, 0.5]
    assert found["clustering"]["explained"] > 0.95


def test_replanning_follows_a_running_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    running = tmp_path / "plan.json"
    assert main(["rent", "--config", TOY, "--json"]) == 0
    running.write_text(capsys.readouterr().out)
    document = yaml.safe_load(Path(TOY).read_text())
    document["offers"][0]["available"] = 0
    config = write(tmp_path / "market.yaml", document)
    found = rent(capsys, "--config", config, "--replan", str(running))
    assert found["replanning"]["stop"] == {"t1": 1}
    assert found["replanning"]["moves"] <= found["replanning"]["from_scratch"]["moves"]
    assert found["throughput_req_s"] >= 0.95 * found["replanning"]["from_scratch"]["throughput_req_s"]


def test_the_plan_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rent", "--config", TOY]) == 0
    out = capsys.readouterr().out
    assert "3.517 requests/s for 8.00 per hour" in out
    assert "at most 0.00% from the best plan there is" in out


@pytest.mark.parametrize("path", sorted(MARKETS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_market_loads(path: Path) -> None:
    assert load_market(path).offers


def test_ctrl_c_asks_the_solver_to_stop_and_a_second_one_ends() -> None:
    interrupt = Interrupt()
    with interrupt.catching():
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"budget_per_hour": None},
            "budget_per_hour: expected either budget_per_hour or target, got neither",
        ),
        ({"budget_per_hour": 0.1}, "the cheapest instance for workload"),
        ({"offers": []}, "offers: expected at least one offer"),
        ({"workloads": []}, "workloads: expected at least one workload"),
        ({"models": [{"name": "8b"}]}, "models.8b.parameters: expected a value"),
        ({"surprise": 1}, "surprise: unknown key"),
        (
            {"models": [{"name": "8b", "parameters": 900e9, "kv_bytes_per_token": 131072, "layers": 32}]},
            "offers: expected GPUs with a profile or roofline that hold a model",
        ),
        (
            {"workloads": [{"name": "w", "share": 1, "input_tokens": 5}]},
            "workloads[0].output_tokens: expected a value",
        ),
        ({"configurations": [{"name": "c", "gpus": {"H100": 1}, "throughput": {}}]}, "expected GPUs out of"),
        ({"slo": {}}, "slo: expected ttft_ms or tpot_ms"),
    ],
)
def test_wrong_input_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    config = write(tmp_path / "market.yaml", market(**changes))
    assert main(["rent", "--config", config]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_wrong_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rent", "--config", TOY, "--time-limit", "x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_file_that_is_no_plan_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    assert main(["rent", "--config", TOY, "--replan", str(path)]) == 2
    assert f"{path}: instances" in capsys.readouterr().err


def test_a_profile_that_is_not_there_is_named(tmp_path: Path) -> None:
    document = market()
    document["offers"][0]["profiles"] = {"8b": {1: "nowhere.yaml"}}
    with pytest.raises(ConfigError, match=r"offers\[0\].profiles.8b.1: .*nowhere.yaml"):
        load_market(Path(write(tmp_path / "market.yaml", document)))
