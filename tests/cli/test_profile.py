"""`hetlb profile`: from CSV or a roofline to a file that loads; one line for wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetlb.balancer.config.profile_file import Hardware, ModelInfo, ProfileSource, load_profile
from hetlb.balancer.config.profile_writer import write_profile
from hetlb.balancer.core.step_times import SplitKv
from hetlb.cli.main import main
from hetlb.errors import ProfileError
from hetlb.inputs.yaml_file import yaml_text
from hetlb.tools.profiler.aiconfigurator import Layout, query
from hetlb.tools.profiler.grid import StepKind
from hetlb.tools.profiler.sources import corrected
from hetlb.tools.sim.iteration_times import uneven_s

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "profiler" / "data" / "l40s-llama-3.1-8b.csv"
HEADER = "system,backend,backend_version,model,tp,phase,batch,length,latency_ms\n"
ROOFLINE = {
    "model": {"name": "m", "parameters": 8e9, "kv_bytes_per_token": 131072},
    "roofline": {"flops": 125e12, "bandwidth_bytes_per_s": 900e9},
}


def stated(folder: Path, facts: dict[str, Any]) -> list[str]:
    """Return the flag of a file with these facts."""
    path = folder / "facts.yaml"
    path.write_text(yaml_text(facts))
    return ["--facts", str(path)]


def test_a_csv_becomes_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.yaml"
    flags = ["--from", f"csv:{DATA}", "--tp", "1", "--out", str(out), "--json"]
    assert main(["profile", *flags, *stated(tmp_path, {"licence": "Apache-2.0"})]) == 0
    document = json.loads(capsys.readouterr().out)
    profile = load_profile(out)
    assert document["profile"]["name"] == profile.name == "l40s-llama-3.1-8b-tp1"
    assert profile.engine.tensor_parallel_size == 1
    assert profile.source is not None
    assert (profile.source.licence, profile.source.measured) == ("Apache-2.0", True)
    assert profile.grid is not None
    assert (len(profile.grid.prefill), len(profile.grid.decode)) == (30, 45)
    assert profile.latency.better_prefill is not None
    assert profile.fit is not None
    assert profile.fit.prefill is not None
    assert profile.fit.prefill.mean_error < 0.05
    assert {p.name for p in tmp_path.iterdir()} == {"p.yaml", "facts.yaml"}
    assert main(["profile", "show", str(out)]) == 0
    assert "prefill" in capsys.readouterr().out
    assert main(["profile", "show", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == profile.name
    assert main(["profile", "compare", str(out), str(out)]) == 0
    assert "equal" in capsys.readouterr().out


def test_a_roofline_is_marked_unmeasured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "r.yaml")
    assert (
        main(["profile", "--from", "roofline", "--tp", "2", "--out", out, *stated(tmp_path, ROOFLINE)]) == 0
    )
    source = load_profile(Path(out)).source
    assert source is not None
    assert not source.measured
    capsys.readouterr()
    assert main(["profile", "show", out]) == 0
    assert "unmeasured" in capsys.readouterr().out


def test_the_folder_of_the_profile_is_created(tmp_path: Path) -> None:
    out = tmp_path / "profiles" / "v100.yaml"
    assert main(["profile", "--from", "roofline", *stated(tmp_path, ROOFLINE), "--out", str(out)]) == 0
    assert load_profile(out).decode.k8 > 0


def test_a_file_in_place_of_the_folder_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profiles").write_text("")
    out = str(tmp_path / "profiles" / "v100.yaml")
    assert main(["profile", "--from", "roofline", *stated(tmp_path, ROOFLINE), "--out", out]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hetlb profile: --out: expected a folder that can be written: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("phase,batch,length\n", "header: expected the columns"),
        (HEADER, "expected at least one row"),
        (
            HEADER + "a,v,1,m,1,prefill,1,128,0\n",
            "line 2: latency_ms: expected milliseconds above 0, got '0'",
        ),
        (HEADER + "a,v,1,m,1,prefill,1,128,nan\n", "line 2: latency_ms: expected"),
        (
            HEADER + "a,v,1,m,1,train,1,128,1\n",
            "line 2: phase: expected prefill, decode or mixed, got 'train'",
        ),
        (HEADER + "a,v,1,m,1,prefill,0,128,1\n", "line 2: batch: expected a whole number from 1, got '0'"),
        (HEADER + "a,v,1,m,1,prefill,1,1.5,1\n", "line 2: length: expected a whole number"),
        (HEADER + "a,v,1,m,x,prefill,1,128,1\n", "line 2: tp: expected a whole number"),
        (HEADER + "a,v,1\n", "line 2: expected 9 columns, got 3"),
        (HEADER + "a,v,1,m,1,prefill,1,128,1\n", "prefill: expected at least 8 points"),
        (
            HEADER + "a,v,1,m,1,prefill,1,8,1\nb,v,1,m,1,prefill,1,8,1\n",
            "--system: expected one to be chosen",
        ),
    ],
)
def test_mistakes_in_a_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "g.csv"
    path.write_text(text)
    assert main(["profile", "--from", f"csv:{path}", "--out", str(tmp_path / "p.yaml")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert str(path) in err
    assert err.count("\n") == 1
    assert not (tmp_path / "p.yaml").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "x.yaml"], "expected one of --url and --from"),
        (["--from", "guess", "--out", "x.yaml"], "aiconfigurator or roofline, got 'guess'"),
        (["--from", "roofline", "--out", "x.yaml"], "--facts: expected a file with `roofline:` and `model:`"),
        (["--from", f"csv:{DATA}", "--out", "x.yaml"], "--tp: expected one to be chosen out of 1, 8"),
        (["--from", f"csv:{DATA}", "--tp", "3", "--out", "x.yaml"], "--tp: expected one of 1, 8, got '3'"),
        (["--from", "csv:/nowhere.csv", "--out", "x.yaml"], "no such file"),
        (["show"], "show: expected one profile file and"),
        (["compare", "a.yaml"], "compare: expected two profile files and"),
    ],
)
def test_wrong_flags(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["profile", *flags]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            {**ROOFLINE, "model": {"name": "m"}},
            "model.parameters: expected a value or model.config, got neither",
        ),
        ({"engine": {"kv_tokens": 5}}, "engine.kv_tokens: "),
        ({**ROOFLINE, "host": {}}, "host: expected none"),
        ({"roofline": {"flops": -1, "bandwidth_bytes_per_s": 1}}, "roofline.flops: expected"),
    ],
)
def test_wrong_facts_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], facts: dict[str, Any], message: str
) -> None:
    flags = ["--from", "roofline", "--out", str(tmp_path / "p.yaml"), *stated(tmp_path, facts)]
    assert main(["profile", *flags]) == 2
    err = capsys.readouterr().err
    assert f"{tmp_path / 'facts.yaml'}: {message}" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("source", [f"csv:{DATA}", "log:nowhere.csv"])
def test_facts_of_another_source_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    flags = ["--from", source, "--tp", "1", "--start", "s.yaml", "--out", str(tmp_path / "p.yaml")]
    assert main(["profile", *flags, *stated(tmp_path, ROOFLINE)]) == 2
    err = capsys.readouterr().err
    assert "expected --from roofline with it" in err or "expected `name` alone with --from log:" in err
    assert err.count("\n") == 1


def test_facts_stand_before_what_a_source_knows(tmp_path: Path) -> None:
    out = tmp_path / "p.yaml"
    facts = {
        "name": "mine",
        "hardware": {"gpu": "L40S", "memory_bytes": 48_000_000_000},
        "model": {"name": "x", "kv_bytes_per_token": 131072},
        "engine": {
            "kv_cache_tokens": 1000,
            "block_size": 16,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 512,
        },
    }
    source = ["profile", "--from", f"csv:{DATA}", "--tp", "8", "--out", str(out)]
    assert main([*source, *stated(tmp_path, facts)]) == 0
    made = load_profile(out)
    assert (made.hardware, made.model) == (
        Hardware(gpu="L40S", gpus=8, memory_bytes=48_000_000_000),
        ModelInfo(name="Llama-3.1-8B", kv_bytes_per_token=131072),
    )
    assert made.name == "mine"
    assert (made.engine.kv_cache_tokens, made.engine.max_num_seqs, made.engine.tensor_parallel_size) == (
        1000,
        64,
        8,
    )


@pytest.mark.parametrize("path", sorted((ROOT / "profiling").glob("*.yaml")), ids=lambda path: path.name)
def test_every_ready_profile_loads_with_its_source(path: Path) -> None:
    profile = load_profile(path)
    assert profile.source is not None
    assert profile.fit is not None
    assert profile.source.licence if profile.source.measured else profile.source.note


LIBRARY = Path(__file__).parents[2] / "profiling"


def test_every_profile_of_the_library_says_where_it_is_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "list", str(LIBRARY), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["profiles"]
    assert len(rows) == len(list(LIBRARY.glob("*.yaml")))
    for row in rows:
        assert row["measured"] is not None
        assert row["origin"].endswith("unmeasured") == (not row["measured"])
        assert row["licence"] is not None or not row["measured"]
    assert main(["profile", "list", str(LIBRARY)]) == 0
    assert "l40s-llama-3.1-8b-tp2.yaml" in capsys.readouterr().out


def test_sources_on_the_same_hardware_compared(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (str(LIBRARY / f"a100_sxm-llama-3.1-8b-tp{tp}.yaml") for tp in (1, 2))
    assert main(["profile", "compare", one, two, "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == "warning: different degrees: 1 and 2\n"
    for phase, summary in document["summary"].items():
        ratios = [p["b_s"] / p["a_s"] for p in document["points"] if p["phase"] == phase]
        assert summary["least_ratio"] == pytest.approx(min(ratios))
        assert min(ratios) <= summary["mean_ratio"] <= max(ratios)
    assert main(["profile", "compare", one, two]) == 0
    assert "prefill: B takes 0." in capsys.readouterr().out


def test_nothing_to_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "list", str(tmp_path)]) == 2
    assert f"list: expected profiles in {tmp_path}, got none" in capsys.readouterr().err


def test_what_tables_do_not_hold_is_assumed_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ["profile", "--from", f"csv:{DATA}", "--tp", "1"]
    assert main([*source, "--out", str(tmp_path / "a.yaml")]) == 0
    printed = capsys.readouterr().out
    profile = load_profile(tmp_path / "a.yaml")
    assert profile.host is not None
    assert profile.host.iteration_s > 0
    assert profile.latency.request_s == profile.host.request_s > 0
    for part in ("host: ", "mixed: 2 times the attention of a decode step", "prompts beyond 4096 tokens"):
        assert any(part in each for each in profile.assumed)
        assert f"assumed {part}" in printed.replace("\n", " ")
    assert profile.mixed is not None
    assert profile.better_decode is not None
    assert profile.mixed.token_s == pytest.approx(2 * profile.better_decode.token_s)
    assert (
        main(
            [
                *source,
                *stated(tmp_path, {"engine": {"async_scheduling": False}}),
                "--out",
                str(tmp_path / "s.yaml"),
            ]
        )
        == 0
    )
    assert load_profile(tmp_path / "s.yaml").latency.host_s > profile.latency.host_s
    assert main([*source, *stated(tmp_path, {"host": {}}), "--out", str(tmp_path / "b.yaml")]) == 0
    bare = load_profile(tmp_path / "b.yaml")
    assert bare.latency.host_s == bare.latency.host_sequence_s == 0.0
    assert not any(each.startswith("host") for each in bare.assumed)


def test_speculative_decoding_divides_the_time_of_a_step(tmp_path: Path) -> None:
    source = ["profile", "--from", f"csv:{DATA}", "--tp", "1"]
    assert main([*source, "--out", str(tmp_path / "a.yaml")]) == 0
    assert (
        main(
            [
                *source,
                *stated(tmp_path, {"engine": {"tokens_per_step": 2.5}}),
                "--out",
                str(tmp_path / "b.yaml"),
            ]
        )
        == 0
    )
    plain, drafted = (load_profile(tmp_path / f"{name}.yaml").latency for name in "ab")
    for batch in (1, 16, 100):
        expected_s = plain.step_s(batch, batch * 800) / 2.5
        assert drafted.step_s(batch, batch * 800) == pytest.approx(expected_s, rel=0.01)
    assert drafted.prefill_s(900) == plain.prefill_s(900)


@pytest.mark.parametrize("layout", [Layout(2), Layout(4, expert_parallel=True), Layout(1, dp=4)])
def test_a_mixture_of_experts_has_tables_at_every_layout(layout: Layout) -> None:
    pytest.importorskip("aiconfigurator_core")
    found = query("Qwen/Qwen3-30B-A3B", "h100_sxm", layout)
    assert found.engine.kv_cache_tokens is not None
    long = [point for point in found.points if point.length >= 32768]
    assert {point.phase for point in long} == {StepKind.PREFILL, StepKind.DECODE}


@pytest.mark.parametrize(
    ("model", "system", "degree", "kv_bytes"),
    [
        ("Qwen/Qwen3-235B-A22B-FP8", "h200_sxm", 4, 192_512),  # 8-bit weights, a 16-bit cache
        ("google/gemma-4-26B-A4B", "h200_sxm", 1, 20_480),
        ("deepseek-ai/DeepSeek-R1", "h200_sxm", 8, 70_272),
    ],
)
def test_weights_and_cache_of_tables_fit_the_memory(
    model: str, system: str, degree: int, kv_bytes: int
) -> None:
    pytest.importorskip("aiconfigurator_core")
    found = query(model, system, Layout(degree))
    assert found.model is not None
    assert found.model.kv_bytes_per_token == kv_bytes
    # Tokens are of layers that keep all of them: windows count as needs of requests (`kv_need`).
    copies = degree if "DeepSeek" in model else 1
    assert found.hardware is not None
    memory = degree * (found.hardware.memory_bytes or 0)
    assert 0 < (found.engine.kv_cache_tokens or 0) * kv_bytes * copies < 0.9 * memory


@pytest.mark.parametrize(
    ("system", "limits"),
    [
        ("l40s", (2048, 256)),
        ("a100_sxm", (2048, 256)),
        ("h100_sxm", (8192, 1024)),
        ("b200_sxm", (16384, 1024)),
    ],
)
def test_limits_of_tables_are_vllms_on_the_gpu(system: str, limits: tuple[int, int]) -> None:
    pytest.importorskip("aiconfigurator_core")
    engine = query("Qwen/Qwen3-8B", system, Layout(1)).engine
    assert (engine.max_num_batched_tokens, engine.max_num_seqs) == limits
    stated = query("Qwen/Qwen3-8B", system, Layout(1), max_num_batched_tokens=4096, max_num_seqs=64).engine
    assert (stated.max_num_batched_tokens, stated.max_num_seqs) == (4096, 64)
    assert (stated.kv_cache_tokens or 0) != engine.kv_cache_tokens


def test_a_layout_without_tables_is_one_line() -> None:
    pytest.importorskip("aiconfigurator_core")
    with pytest.raises(ProfileError, match=r"--tp 8 .*moe_tp_size=8"):
        query("Qwen/Qwen3-235B-A22B-FP8", "h200_sxm", Layout(8))


def test_unequal_contexts_are_assumed_where_a_kernel_splits_them_alike(tmp_path: Path) -> None:
    pytest.importorskip("aiconfigurator_core")
    command = ["profile", "--from", "aiconfigurator", "--model", "Qwen/Qwen3-32B"]
    # One KV head a GPU (TP 8): no step was seen to wait for its longest context.
    for system, degree, blocks in (("b300_sxm", 2, 37.0), ("b300_sxm", 8, None), ("h100_sxm", 2, None)):
        out = tmp_path / f"{system}-{degree}.yaml"
        assert main([*command, "--system", system, "--tp", str(degree), "--out", str(out)]) == 0
        profile = load_profile(out)
        split = profile.latency.split_kv
        assert (split and split.blocks) == blocks
        assert any(line.startswith("split_kv") for line in profile.assumed) == (blocks is not None)
        more_s = uneven_s(profile.latency, 24, 24 * 1000 + 15_000, 16_000)
        assert (more_s > 1e-3) == (blocks is not None)


def test_unequal_contexts_of_a_profile_survive_its_corrections(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    assert main(["profile", "--from", f"csv:{DATA}", "--tp", "1", "--out", str(path)]) == 0
    text = path.read_text() + "split_kv: {blocks: 37, context_s: 1e-6}\n"
    path.write_text(text)
    profile = load_profile(path)
    assert profile.latency.split_kv == SplitKv(37.0, 1e-6)
    changed = corrected(profile, profile.latency.scaled(2.0), ProfileSource(kind="log"))
    write_profile(path, changed)
    assert load_profile(path).latency.split_kv == SplitKv(37.0, 2e-6)
