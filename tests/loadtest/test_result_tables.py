"""Tables show what the runs say, on a terminal of 80 columns."""

from __future__ import annotations

import re
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from hetlb.tools.loadtest.result_tables import (
    comparison_table,
    instances_table,
    latency_table,
    milliseconds,
    runs_table,
    search_table,
    throughput_table,
)
from hetlb.tools.workload.records import RequestResult, summarize


def run(policy: str, counts: dict[str, int], *, failed: int = 0) -> dict[str, Any]:
    """`counts` requests per instance, 100 + 10 tokens each, TTFT 0.5 s, the last over after count seconds."""
    records = [
        RequestResult(
            scheduled_s=0.0,
            prompt_tokens=100,
            output_tokens=10,
            first_token_s=0.5,
            last_token_s=float(number + 1),
            instance=name,
            ok=True,
        )
        for name, count in counts.items()
        for number in range(count)
    ]
    records += [RequestResult(0.0, 100) for _ in range(failed)]
    return {"policy": policy, **summarize(records, instances=counts)}


def rendered(table: Table) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def row(text: str, first: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.strip().startswith(first))
    return re.split(r" {2,}", line.strip())


def test_a_line_per_run_with_shares_and_ends() -> None:
    text = rendered(
        runs_table(
            [run("rr", {"a800": 4, "v100": 4}), run("hetlb", {"a800": 6, "v100": 2})], reference_tok_s=220
        )
    )
    assert row(text, "rr") == [
        "rr",
        "220",
        "100 %",
        "500 ms",
        "500 ms",
        "222 ms",
        "50 % 4.0 s",
        "50 % 4.0 s",
    ]
    assert row(text, "hetlb")[-2:] == ["75 % 6.0 s", "25 % 2.0 s"]
    assert "…" not in text
    assert "failed" not in text


def test_what_each_instance_does_alone_stands_above_with_its_sum() -> None:
    alone = [run("a800 alone", {"a800": 8}), run("v100 alone", {"v100": 8})]
    text = rendered(runs_table([run("rr", {"a800": 4, "v100": 4})], reference_tok_s=220, alone=alone))
    assert row(text, "a800 alone")[-2:] == ["100 % 8.0 s", "-"]
    assert row(text, "sum") == ["sum", "220", "100 %"]
    lines = [
        line.split()[0] for line in text.splitlines() if line[:5].strip() in ("a800", "v100", "sum", "rr")
    ]
    assert lines == ["a800", "v100", "sum", "rr"]


def test_failures_get_a_column_only_when_there_are_some() -> None:
    text = rendered(runs_table([run("rr", {"a": 1}), run("p2c", {"a": 1}, failed=3)]))
    assert (row(text, "rr")[-1], row(text, "p2c")[-1]) == ("0", "3")


def test_many_instances_are_summed_up() -> None:
    text = rendered(runs_table([run("rr", {f"i{n}": n + 1 for n in range(200)})]))
    assert row(text, "rr")[-1] == "1.0 s, 200 s"


def test_a_server_that_names_no_instance_and_a_run_without_tokens_are_no_error() -> None:
    bare = {**run("rr", {}, failed=2), "instances": []}
    assert row(rendered(runs_table([bare], reference_tok_s=10)), "rr")[1:3] == ["0", "0 %"]
    idle = run("rr", {"a": 0})
    assert row(rendered(instances_table(idle)), "a")[3] == "0 %"


def test_the_instances_of_one_run() -> None:
    one = run("hetlb", {"a800": 3, "v100": 1})
    one["instances"][0] |= {"preemptions": 7, "kv_peak": 0.5}
    text = rendered(instances_table(one))
    assert row(text, "a800") == ["a800", "3", "30", "75 %", "3.0 s", "7", "50 %"]
    assert row(text, "v100") == ["v100", "1", "10", "25 %", "1.0 s", "-", "-"]


def bench_run(policy: str | None, number: int = 1, *, failed: int = 0) -> dict[str, Any]:
    more = {"round": number, "request_rate": 12.5, "slo_attainment": 0.5, "client": {"verdict": "VALID"}}
    return {**run(policy or "", {"a": 4}, failed=failed), **more, "policy": policy}


def test_what_a_bench_served() -> None:
    text = rendered(throughput_table([bench_run("p2c"), bench_run("hetlb", 2, failed=1)]))
    assert row(text, "p2c") == ["p2c", "12.5", "1", "4", "1.00", "10", "110", "0", "50 %", "VALID"]
    assert row(text, "hetlb")[2:4] == ["2", "5"]
    assert "…" not in text
    assert "failed" not in rendered(throughput_table([bench_run("p2c")]))


def test_latencies_of_a_bench() -> None:
    metrics = ["ttft", "tpot", "itl", "e2el"]
    figures = ["500", "500", "222", "386", "0.0", "0.0", "2,500", "3,970"]
    text = rendered(latency_table([bench_run("p2c")], metrics, [90, 99]))
    assert " ".join(["p2c", "12.5", *figures]) in re.sub(r" +", " ", text)
    suspect = bench_run("least-requests", 2) | {"client": {"verdict": "SUSPECT"}}
    wide = rendered(latency_table([suspect], metrics, [90, 99]))
    assert " ".join(["least-requests", "12.5", "2", *figures, "SUSPECT"]) in re.sub(r" +", " ", wide)
    alone = rendered(latency_table([bench_run(None)], ["ttft"], [90]))
    assert "12.5 500 500" in re.sub(r" +", " ", alone)
    assert "TTFT" in alone


def test_a_comparison_and_a_search() -> None:
    figure = {"mean": 3.0, "baseline_mean": 2.0, "difference": 1.0, "low": -0.5, "high": 2.5, "relative": 0.5}
    comparison = {
        "request_rate": "inf", "policy": "p2c", "baseline": "rr", "rounds": 3, "confidence": 0.95,
        "verdict": "VALID",
        "figures": {"mean_ttft_ms": figure, "request_goodput": {**figure, "low": None, "relative": None}},
    }  # fmt: skip
    text = rendered(comparison_table(comparison))
    assert "p2c against rr, rate inf, 3 paired rounds" in text
    assert row(text, "mean_ttft_ms") == ["mean_ttft_ms", "2", "3", "+1 (+50.0 %)", "-0.5 to +2.5"]
    assert row(text, "request_goodput")[-1] == "-"
    suspect = rendered(comparison_table({**comparison, "verdict": "SUSPECT"}))
    assert "rate inf, 3 paired rounds, SUSPECT" in suspect
    search = {
        "slo_attainment": 0.95,
        "policy": None,
        "verdict": "VALID",
        "max_request_rate": 4.0,
        "probes": [{}] * 3,
    }
    text = rendered(search_table([{**search, "lowest_missed_rate": None}]))
    assert row(text, "-  ") == ["-", "4", "none", "3"]
    text = rendered(search_table([{**search, "lowest_missed_rate": None, "verdict": "SUSPECT"}]))
    assert row(text, "-  ") == ["-", "4", "none", "3", "SUSPECT"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0 ms"),
        (5.49, "5.5 ms"),
        (81.3, "81 ms"),
        (1234.0, "1.23 s"),
        (61_234.0, "61.2 s"),
        (256_900.0, "257 s"),
    ],
)
def test_latencies_are_readable(value: float, text: str) -> None:
    assert milliseconds(value) == text
