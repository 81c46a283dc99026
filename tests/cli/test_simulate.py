"""`hetlb simulate`: the contract's keys, the same bytes for the same seed, one line for wrong input."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.cli.main import main

PROFILE = """\
version: 1
name: p
engine: {{kv_cache_tokens: 40000, max_num_seqs: 32}}
prefill: {{k1: {k1}, k2: 1.0e-3, k3: 0.0, k4: 1.0e-2}}
decode: {{k5: 5.0e-8, k6: 6.0e-5, k7: 0.0, k8: {k8}}}
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "fast.yaml").write_text(PROFILE.format(k1=1e-4, k8=1e-2))
    (tmp_path / "slow.yaml").write_text(PROFILE.format(k1=3e-4, k8=3e-2))
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        "version: 1\nmodels:\n  - name: m\n    instances:\n"
        "      - {name: fast, profile: fast.yaml}\n      - {name: slow, profile: slow.yaml}\n"
    )
    trace = tmp_path / "trace.csv"
    rows = [f"{0.05 * i},{50 + 7 * (i % 40)},{20 + 11 * (i % 30)}" for i in range(200)]
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return str(fleet), str(trace)


def simulate(capsys: pytest.CaptureFixture[str], files: tuple[str, str], *flags: str) -> str:
    given = ["simulate", "--config", files[0], "--trace", files[1], "--json", *flags]
    assert main(given) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("served", "said"), [("openai/gpt-oss-120b", True), ("meta-llama/Llama-3.1-8B", False), ("chat", False)]
)
def test_a_profile_of_another_model_is_named(
    capsys: pytest.CaptureFixture[str], files: tuple[str, str], served: str, said: bool
) -> None:
    folder = Path(files[0]).parent
    (folder / "fast.yaml").write_text((folder / "fast.yaml").read_text() + "model: {name: Llama-3.1-8B}\n")
    Path(files[0]).write_text(Path(files[0]).read_text().replace("name: m", f"name: {served}"))
    assert main(["simulate", "--config", files[0], "--trace", files[1], "--num-prompts", "5"]) == 0
    warned = f"warning: fast: a profile of Llama-3.1-8B, not of {served}\n"
    assert (warned in capsys.readouterr().err) is said


def test_every_key_of_the_contract_is_there(
    capsys: pytest.CaptureFixture[str], files: tuple[str, str]
) -> None:
    runs = json.loads(simulate(capsys, files, "--policy", ",".join(POLICIES)))["runs"]
    assert [run["policy"] for run in runs] == list(POLICIES)
    for run in runs:
        expected = {
            "policy", "seed", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
            "request_throughput", "output_throughput", "total_token_throughput", "request_goodput",
            "instances", "request_rate", "predictor", "iteration", "bound", "split",
        }  # fmt: skip
        for name in ("ttft", "tpot", "itl", "e2el"):
            expected |= {f"{figure}_{name}_ms" for figure in ("mean", "median", "p90", "p99")}
        assert expected <= run.keys()
        assert run["completed"] == 200
        assert run["failed"] == 0
        assert sum(each["completed"] for each in run["instances"]) == 200
        for each in run["instances"]:
            assert {
                "name",
                "completed",
                "total_output_tokens",
                "last_finish_s",
                "preemptions",
                "kv_peak",
            } <= each.keys()
        assert set(run["bound"]) == set(run["split"]) == {"total_token_throughput"}
        assert run["total_token_throughput"] == pytest.approx(
            (run["total_input_tokens"] + run["total_output_tokens"]) / run["duration"]
        )


@pytest.mark.parametrize("rate", ["inf", "5", "trace"])
def test_the_same_seed_gives_the_same_bytes(
    capsys: pytest.CaptureFixture[str], files: tuple[str, str], rate: str
) -> None:
    flags = ("--request-rate", rate, "--policy", "random,paper,hetlb", "--predictor", "normal", "--seed", "7")
    assert simulate(capsys, files, *flags) == simulate(capsys, files, *flags)


def test_another_seed_is_another_run(capsys: pytest.CaptureFixture[str], files: tuple[str, str]) -> None:
    flags = ("--request-rate", "5", "--policy", "random")
    assert simulate(capsys, files, *flags) != simulate(capsys, files, *flags, "--seed", "1")


def test_the_trace_is_cycled_and_cut(capsys: pytest.CaptureFixture[str], files: tuple[str, str]) -> None:
    for count in (7, 450):
        run = json.loads(simulate(capsys, files, "--num-prompts", str(count)))["runs"][0]
        assert run["completed"] == count


def test_split_is_only_for_all_at_once(capsys: pytest.CaptureFixture[str], files: tuple[str, str]) -> None:
    assert json.loads(simulate(capsys, files, "--request-rate", "5"))["runs"][0]["split"] is None


def test_summing_iterations_takes_longer(capsys: pytest.CaptureFixture[str], files: tuple[str, str]) -> None:
    token, summed = (
        json.loads(simulate(capsys, files, "--policy", "single", "--iteration", rule))["runs"][0]["duration"]
        for rule in ("token", "sum")
    )
    assert summed > token


def test_prefix_caches_find_what_a_trace_says_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: tuple[str, str]
) -> None:
    trace = tmp_path / "sessions.csv"
    lines = ["arrival_s,input_tokens,output_tokens,session_id,turn"]
    lines += [f"{10 * i},{200 * (i % 4) + 100},100,s{i // 4},{i % 4}" for i in range(40)]
    trace.write_text("\n".join(lines) + "\n")
    flags = ("--policy", "single,rr", "--request-rate", "trace,inf", "--num-prompts", "80")
    here = (files[0], str(trace))
    cold = json.loads(simulate(capsys, here, *flags))["runs"]
    warm = json.loads(simulate(capsys, here, *flags, "--prefix-cache"))["runs"]
    assert all("prefix_hit_tokens" not in each for run in cold for each in run["instances"])
    hits = [sum(each["prefix_hit_tokens"] for each in run["instances"]) for run in warm]
    # Alone and in turn: of 100, 300, 500 and 700 tokens all but the newest 101 or so, in whole blocks.
    assert hits[0] == 20 * (192 + 384 + 592)
    assert hits[0] > hits[1] > 0
    for before, after in zip(cold, warm, strict=True):
        assert after["completed"] == before["completed"] == 80
        assert after["mean_ttft_ms"] < before["mean_ttft_ms"]
    assert main(["simulate", "--config", files[0], "--trace", str(trace), "--prefix-cache"]) == 0
    assert "prompt tokens found in prefix caches: hetlb " in capsys.readouterr().out


#: A value of each column for the last rows of a trace.
COLUMNS = {
    "arrival_s": "9",
    "input_tokens": "900",
    "output_tokens": "90",
    "session_id": "s",
    "turn": "1",
    "hash_ids": "1 2 3 4",
    "tenant": "acme",
    "sequences": "2",
    "n": "2",
    "endpoint": "embeddings",
    "adapter": "lora",
    "class": "background",
}


@pytest.mark.parametrize("column", COLUMNS)
def test_each_column_of_a_trace_changes_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: tuple[str, str], column: str
) -> None:
    fleet = Path(files[0])
    classes = "classes: {usual: {ttft_ms: 500}, background: {background: true}}"
    fleet.write_text(fleet.read_text().replace("    instances:", f"    {classes}\n    instances:"))
    usual = {"arrival_s": "0", "input_tokens": "1500", "output_tokens": "60"}
    if column == "turn":
        usual["session_id"] = "s"
    trace = tmp_path / "columns.csv"
    found = []
    for changed in ({}, {column: COLUMNS[column]}):
        names = list(dict.fromkeys([*usual, *COLUMNS]))
        rows = [
            {**usual, "session_id": "first"},
            *[usual] * 70,
            *[{**usual, "output_tokens": "20", **changed}] * 30,
        ]
        lines = [",".join(row.get(name, "") for name in names) for row in rows]
        trace.write_text("\n".join([",".join(names), *lines]) + "\n")
        flags = ("--request-rate", "trace", "--prefix-cache", "--policy", "hetlb")
        found.append(simulate(capsys, (files[0], str(trace)), *flags))
    assert found[0] != found[1]


def test_blocks_that_all_prompts_name_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: tuple[str, str]
) -> None:
    trace = tmp_path / "blocks.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens,hash_ids\n" + ",2148,60,1 2 3 4\n" * 100)
    flags = ("--prefix-cache", "--request-rate", "2", "--policy", "rr")
    run = json.loads(simulate(capsys, (files[0], str(trace)), *flags))["runs"][0]
    # Both servers compute the four blocks of 512 tokens once.
    assert sum(each["prefix_hit_tokens"] for each in run["instances"]) == 98 * 2048


def test_prefix_caches_need_a_trace_that_names_contents(
    capsys: pytest.CaptureFixture[str], files: tuple[str, str]
) -> None:
    assert main(["simulate", "--config", files[0], "--trace", files[1], "--prefix-cache"]) == 2
    err = capsys.readouterr().err
    assert f"{files[1]}: --prefix-cache: expected the column hash_ids or session_id" in err


def test_a_bounded_queue_turns_requests_away(
    capsys: pytest.CaptureFixture[str], files: tuple[str, str]
) -> None:
    run = json.loads(simulate(capsys, files, "--queue-limit", "10"))["runs"][0]
    assert 0 < run["failed"] < 200
    assert run["completed"] + run["failed"] == 200


def test_hetlb_keeps_its_promise_here(capsys: pytest.CaptureFixture[str], files: tuple[str, str]) -> None:
    flags = ("--num-prompts", "1500", "--policy", "rr,hetlb")
    rr, hetlb = json.loads(simulate(capsys, files, *flags))["runs"]
    assert hetlb["total_token_throughput"] > 0.9 * hetlb["bound"]["total_token_throughput"]
    assert hetlb["total_token_throughput"] > 1.4 * rr["total_token_throughput"]
    assert not math.isnan(hetlb["p99_itl_ms"])


def test_several_rates_policies_and_seeds_are_their_single_runs(
    capsys: pytest.CaptureFixture[str], files: tuple[str, str]
) -> None:
    flags = ("--policy", "random,hetlb", "--predictor", "normal")
    many = json.loads(
        simulate(capsys, files, *flags, "--request-rate", "5,trace,inf", "--seed", "1", "--seeds", "2")
    )
    keys = [(run["request_rate"], run["policy"], run["seed"]) for run in many["runs"]]
    assert keys == [
        (rate, policy, seed)
        for rate in ("5", "trace", "inf")
        for policy in ("random", "hetlb")
        for seed in (1, 2)
    ]
    for rate, seed in (("5", "1"), ("trace", "2"), ("inf", "1")):
        single = json.loads(simulate(capsys, files, *flags, "--request-rate", rate, "--seed", seed))
        assert single.keys() == {"runs"}
        for run in single["runs"]:
            assert run == many["runs"][keys.index((rate, run["policy"], int(seed)))]


def test_a_policy_that_is_named_twice_runs_twice(
    capsys: pytest.CaptureFixture[str], files: tuple[str, str]
) -> None:
    first, second = json.loads(simulate(capsys, files, "--policy", "rr,rr"))["runs"]
    assert first["policy"] == "rr"
    assert first == second


def test_medians_are_over_seeds(capsys: pytest.CaptureFixture[str], files: tuple[str, str]) -> None:
    document = json.loads(
        simulate(
            capsys, files, "--policy", "random,rr", "--seed", "4", "--seeds", "3", "--request-rate", "5,9"
        )
    )
    assert len(document["runs"]) == 12
    assert [(each["policy"], each["request_rate"]) for each in document["medians"]] == [
        ("random", "5"),
        ("rr", "5"),
        ("random", "9"),
        ("rr", "9"),
    ]
    first = document["medians"][0]
    runs = document["runs"][:3]
    assert first["seeds"] == [4, 5, 6] == [run["seed"] for run in runs]
    assert first["p99_ttft_ms"] == sorted(run["p99_ttft_ms"] for run in runs)[1]
    ends = sorted(run["instances"][1]["last_finish_s"] for run in runs)
    assert first["instances"][1] == {**first["instances"][1], "name": "slow", "last_finish_s": ends[1]}
    assert first["bound"] == runs[0]["bound"]
    assert first["split"] is None
    assert first.keys() - {"seeds"} == runs[0].keys() - {"seed"}


def test_the_number_of_processes_changes_no_byte(
    capsys: pytest.CaptureFixture[str], files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--policy", "random,paper", "--request-rate", "5,inf", "--seeds", "2")
    outputs = []
    for cores in ({0}, {0, 1}):
        monkeypatch.setattr("os.sched_getaffinity", lambda _pid, cores=cores: cores)
        monkeypatch.setattr("hetlb.cli.simulate._REQUESTS_WORTH_A_PROCESS", 1)
        outputs.append(simulate(capsys, files, *flags))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("rate", ["inf", "5,9,inf", "trace", "5,trace,inf"])
def test_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: tuple[str, str], rate: str
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.svg"
    flags = ("--policy", "rr,hetlb", "--request-rate", rate, "--num-prompts", "60")
    with_picture = simulate(capsys, files, *flags, "--plot", str(picture))
    assert picture.read_text().startswith("<?xml")
    assert with_picture == simulate(capsys, files, *flags)


def test_a_picture_of_a_run_in_which_nothing_completes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: tuple[str, str]
) -> None:
    pytest.importorskip("matplotlib")
    trace = tmp_path / "long.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,90000,5\n")
    picture = tmp_path / "p.png"
    flags = ["simulate", "--config", files[0], "--trace", str(trace), "--plot", str(picture)]
    assert main(flags) == 0
    assert picture.stat().st_size > 0


def test_a_picture_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: tuple[str, str]
) -> None:
    for name, message in (
        ("no/p.png", "a file in a folder that exists"),
        ("p.html", "a picture file, one of .png"),
    ):
        flags = ["simulate", "--config", files[0], "--trace", files[1], "--plot", str(tmp_path / name)]
        assert main(flags) == 2
        assert f"--plot: expected {message}" in capsys.readouterr().err


def test_each_rate_has_its_table(capsys: pytest.CaptureFixture[str], files: tuple[str, str]) -> None:
    flags = ["--request-rate", "5,trace,inf", "--seeds", "2"]
    assert main(["simulate", "--config", files[0], "--trace", files[1], *flags]) == 0
    out = capsys.readouterr().out
    headings = [line.strip() for line in out.splitlines() if "medians of 2 seeds" in line]
    assert headings == [
        f"{rate}, medians of 2 seeds" for rate in ("5 requests/s", "arrivals of the trace", "all at once")
    ]


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str], files: tuple[str, str]) -> None:
    assert main(["simulate", "--config", files[0], "--trace", files[1], "--policy", "rr,paper"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("rr", "paper", "fast", "slow"))


def test_the_share_of_the_sum_is_of_what_the_same_row_shows(
    capsys: pytest.CaptureFixture[str], files: tuple[str, str]
) -> None:
    """Each run has its tokens/s over the sum of the instances alone, its drain on both sides."""
    flags = ["simulate", "--config", files[0], "--trace", files[1], "--policy", "rr,hetlb"]
    assert main(flags) == 0
    shown = re.findall(r"^(rr|hetlb) +[\d,]+ +(\d+) %", capsys.readouterr().out, re.MULTILINE)
    assert main([*flags, "--json"]) == 0
    total = "total_token_throughput"
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert shown == [(run["policy"], f"{100 * run[total] / run['bound'][total]:.0f}") for run in runs]
    assert all(run[total] <= run["bound"][total] for run in runs)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "rr,best"], "--policy: expected names out of"),
        (["--request-rate", "-1"], "--request-rate: expected requests/s above 0, inf or trace"),
        (["--request-rate", "fast"], "--request-rate: expected"),
        (["--num-prompts", "0"], "--num-prompts: expected a whole number from 1, got 0"),
        (["--burstiness", "0"], "--burstiness: expected a number above 0"),
        (["--model", "x"], "--model: expected one of m, got 'x'"),
        (["--queue-limit", "-1"], "--queue-limit: expected a whole number from 0"),
        (["--request-rate", "5,0"], "--request-rate: expected requests/s above 0, inf or trace"),
        (["--seed", "1,x"], "--seed: expected a whole number, got 1,x"),
        (["--seeds", "0"], "--seeds: expected a whole number from 1, got 0"),
    ],
)
def test_wrong_flags(
    capsys: pytest.CaptureFixture[str], files: tuple[str, str], flags: list[str], message: str
) -> None:
    assert main(["simulate", "--config", files[0], "--trace", files[1], *flags]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_what_a_profile_lacks_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: tuple[str, str]
) -> None:
    text = (tmp_path / "slow.yaml").read_text()
    (tmp_path / "slow.yaml").write_text("\n".join(line for line in text.splitlines() if "engine" not in line))
    assert main(["simulate", "--config", files[0], "--trace", files[1]]) == 2
    assert "slow: p: engine.kv_cache_tokens: expected" in capsys.readouterr().err


def test_a_trace_without_times_cannot_be_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: tuple[str, str]
) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n,5,5\n")
    assert main(["simulate", "--config", files[0], "--trace", str(trace), "--request-rate", "trace"]) == 2
    assert f"{trace}: arrival_s: expected a time in every row" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["simulate", "explain"])
def test_a_fleet_that_is_only_discovered_is_one_line(
    command: str, capsys: pytest.CaptureFixture[str], files: tuple[str, str]
) -> None:
    fleet, trace = files
    Path(fleet).write_text("version: 1\nmodels: []\ndiscovery: {files: [more.yaml]}\n")
    flags = ["--trace", trace] if command == "simulate" else []
    assert main([command, "--config", fleet, *flags]) == 2
    assert f"{fleet}: models: expected at least one instance" in capsys.readouterr().err


def test_an_engine_that_schedules_otherwise_is_named(
    capsys: pytest.CaptureFixture[str], files: tuple[str, str]
) -> None:
    simulate(capsys, files)
    slow = Path(files[0]).with_name("slow.yaml")
    slow.write_text(slow.read_text().replace("engine: {", "engine: {name: sglang, "))
    assert main(["simulate", "--config", files[0], "--trace", files[1], "--num-prompts", "5"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("warning: p: times are simulated as vLLM schedules")
    assert "sglang computes prompts first" in said
    assert said.count("\n") == 1
