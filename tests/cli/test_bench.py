"""`hetlb bench` as a person meets it: the contract's keys, one line for wrong input, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import http.server
import json
import random
import shlex
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import HANG_S

import hetlb.cli.bench
import hetlb.tools.demo
from hetlb.cli.main import main
from hetlb.errors import InputError
from hetlb.tools.loadtest.fleet_admin import fleet_admin
from hetlb.tools.loadtest.load_result import LoadResult, csv_text
from hetlb.tools.loadtest.processes import helper_processes
from hetlb.tools.loadtest.runs import measure
from hetlb.tools.workload.arrivals import make_plan
from hetlb.tools.workload.trace_formats import read_trace

DEMO = Path(hetlb.tools.demo.__file__).parent
COUNT = 12


@contextlib.contextmanager
def answering_but_one() -> Iterator[tuple[str, threading.Event]]:
    """A server that never answers its fourth request; the event is set when that has come."""
    asked = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        calls = 0

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert self.path == "/v1/completions"
            type(self).calls += 1
            if self.calls == 4:
                asked.set()
                self.rfile.read(1)  # until the client is gone
                return
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            events = [{"choices": [{"index": 0, "text": "x"}]}, {"choices": [], "usage": usage}]
            data = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data.encode())

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


@dataclass
class Fleet:
    """Two engines of unequal speed, and the proxy in front of them."""

    engine: str
    proxy: str
    admin: str


async def both_up(admin_url: str) -> None:
    async with fleet_admin(admin_url) as admin:
        await admin.idle()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with helper_processes() as helpers:
        arguments = ("--port", "0", "--served-model-name", "m", "--time-scale", "0.02")
        engines = [
            helpers.start(name, "engine", "--profile", str(DEMO / f"{name}.yaml"), *arguments)
            for name in ("fast", "slow")
        ]
        for engine in engines:
            asyncio.run(engine.ready())
        document = {
            "version": 1,
            "listen": {"port": 0},
            "admin": {"port": 0},
            # Every run waits for what the engines say before and after it.
            "scrape": {"interval_s": 0.05, "timeout_s": HANG_S},
            "proxy": {"connect_timeout_s": HANG_S},  # turns are strict: no engine is skipped for being slow
            "models": [{"name": "m", "instances": [{"url": engine.urls[0]} for engine in engines]}],
        }
        config = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
        config.write_text(yaml.safe_dump(document))
        proxy = helpers.start("proxy", "serve", "--config", str(config))
        asyncio.run(proxy.ready())
        asyncio.run(both_up(proxy.urls[1]))
        yield Fleet(engines[0].urls[0], *proxy.urls)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"{0.01 * i},{20 + i},{2 + i % 5}" for i in range(COUNT)]
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return path


def bench(capsys: pytest.CaptureFixture[str], *flags: str | Path, status: int = 0) -> dict[str, Any]:
    assert main(["bench", "--json", *map(str, flags)]) == status
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_every_key_of_the_contract_is_there(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, trace: Path
) -> None:
    document = bench(capsys, "--url", fleet.proxy, "--trace", trace, "--request-rate", "200", "--seed", "3")
    (run,) = document["runs"]
    expected = {
        "policy", "seed", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
        "request_throughput", "output_throughput", "total_token_throughput", "request_goodput",
        "instances", "request_rate",
    }  # fmt: skip
    for name in ("ttft", "tpot", "itl", "e2el"):
        expected |= {f"{figure}_{name}_ms" for figure in ("mean", "median", "p90", "p99")}
    assert expected <= run.keys()
    plan = make_plan(read_trace(trace), None, 200.0, random.Random(3))
    assert (run["completed"], run["failed"], run["seed"], run["request_rate"]) == (COUNT, 0, 3, 200.0)
    assert run["total_input_tokens"] == sum(planned.prompt_tokens for planned in plan)
    assert run["total_output_tokens"] == sum(planned.output_tokens for planned in plan)
    assert (run["client"]["mismatched_lengths"], run["client"]["mismatched_prompts"]) == (0, 0)
    assert sum(each["completed"] for each in run["instances"]) == COUNT
    for each in run["instances"]:
        assert {
            "name", "completed", "total_output_tokens", "last_finish_s", "preemptions", "kv_peak",
            "median_ttft_ms", "p99_e2el_ms", "failed",
        } <= each.keys()  # fmt: skip
    for name in ("ttft", "e2el"):
        assert run["from_sent"][f"mean_{name}_ms"] <= run[f"mean_{name}_ms"] + 2  # a timer may fire early
    assert {"date", "command", "hetlb", "python", "platform", "prompt_salt"} <= document["metadata"].keys()
    assert document["metadata"]["model_id"] == "m"


def test_a_server_that_names_no_instance_gives_none(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, trace: Path
) -> None:
    (run,) = bench(capsys, "--url", fleet.engine, "--trace", trace)["runs"]
    assert run["instances"] == []
    assert run["request_rate"] == "inf"


def test_the_same_seed_is_the_same_load_and_every_rate_is_a_run(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, trace: Path
) -> None:
    flags = ("--url", fleet.engine, "--trace", trace, "--request-rate", "100,200", "--num-prompts", "5")
    first, again = (bench(capsys, *flags)["runs"] for _ in range(2))
    other = bench(capsys, *flags, "--seed", "1")["runs"]
    assert [run["request_rate"] for run in first] == [100.0, 200.0]
    hashes = [[run["plan_sha256"] for run in runs] for runs in (first, again, other)]
    assert hashes[0] == hashes[1]
    assert not set(hashes[0]) & set(hashes[2])


def test_limits_and_percentiles_that_were_asked_for(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, trace: Path
) -> None:
    flags = ("--url", fleet.engine, "--trace", trace, "--num-warmups", "2", "--metric-percentiles", "25,99.9")
    (run,) = bench(capsys, *flags, "--goodput", "ttft:60000", "e2el:60000")["runs"]
    assert run["slo_attainment"] == 1.0
    assert run["request_goodput"] == pytest.approx(run["request_throughput"])
    assert run["p25_ttft_ms"] <= run["median_ttft_ms"] <= run["p99.9_ttft_ms"]
    (run,) = bench(capsys, *flags, "--goodput", "e2el:0.001")["runs"]
    assert (run["slo_attainment"], run["request_goodput"], run["completed"]) == (0.0, 0.0, COUNT)


def test_a_closed_loop_never_has_more_in_flight(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, trace: Path
) -> None:
    (run,) = bench(capsys, "--url", fleet.engine, "--trace", trace, "--max-concurrency", "3")["runs"]
    assert 1 <= run["max_concurrent_requests"] <= 3
    assert run["completed"] == COUNT


@pytest.mark.parametrize(
    "flags",
    [
        ("--request-rate", "trace"),
        ("--request-rate", "300", "--burstiness", "inf"),
        ("--ramp-up-strategy", "exponential", "--ramp-up-start-rps", "100", "--ramp-up-end-rps", "400"),
        ("--prompt-format", "text"),
        ("--endpoint", "/v1/chat/completions", "--no-ignore-eos"),
    ],
)
def test_other_loads(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, trace: Path, flags: tuple[str, ...]
) -> None:
    (run,) = bench(capsys, "--url", fleet.engine, "--trace", trace, *flags)["runs"]
    assert (run["completed"], run["client"]["mismatched_lengths"]) == (COUNT, 0)


def test_results_in_files(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, trace: Path, tmp_path: Path
) -> None:
    document = bench(
        capsys, "--url", fleet.proxy, "--trace", trace, "--save-result", "--save-detailed", "--result-dir",
        tmp_path, "--metadata", "gpu=h100", "note=a=b", "--request-rate",
        "300",
    )  # fmt: skip
    (saved,) = tmp_path.glob("300qps-m-*.json")
    assert json.loads(saved.read_text()) == document
    assert (document["metadata"]["gpu"], document["metadata"]["note"]) == ("h100", "a=b")
    (run,) = document["runs"]
    assert [len(itls) + 1 for itls in run["itls"]] == run["output_lens"]
    assert len(run["ttfts"]) == len(run["start_times"]) == COUNT


def test_a_result_in_csv(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, trace: Path, tmp_path: Path
) -> None:
    flags = ("--save-result", "--result-dir", tmp_path, "--result-filename", "runs.csv")
    (run,) = bench(capsys, "--url", fleet.proxy, "--trace", trace, *flags)["runs"]
    with (tmp_path / "runs.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert float(line["p99_ttft_ms"]) == run["p99_ttft_ms"]
    assert line["verdict"] == run["client"]["verdict"]


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str], fleet: Fleet, trace: Path) -> None:
    assert main(["bench", "--url", fleet.proxy, "--trace", str(trace), "--goodput", "ttft:60000"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("TTFT", "ITL", "E2EL", "verdict", "100 %"))


# --- several policies, several rates ----------------------------------------------------------------------


def policy_of(fleet: Fleet) -> str:
    with urllib.request.urlopen(f"{fleet.admin}/v1/fleet", timeout=HANG_S) as reply:
        return str(json.load(reply)["policy"])


def test_policies_meet_the_same_load_and_the_policy_is_put_back(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, trace: Path
) -> None:
    document = bench(
        capsys, "--url", fleet.proxy, "--admin", fleet.admin, "--trace", trace, "--request-rate", "200",
        "--compare", "rr,single", "--rounds", "2",
    )  # fmt: skip
    runs = document["runs"]
    assert [(run["policy"], run["round"]) for run in runs] == [
        ("rr", 1), ("single", 1), ("single", 2), ("rr", 2),
    ]  # fmt: skip
    plans = {number: {run["plan_sha256"] for run in runs if run["round"] == number} for number in (1, 2)}
    assert [len(found) for found in plans.values()] == [1, 1]
    assert plans[1] != plans[2]
    for run in runs:
        shares = [each["completed"] for each in run["instances"]]
        assert shares == ([COUNT // 2] * 2 if run["policy"] == "rr" else [COUNT, 0])
    (comparison,) = document["comparison"]
    assert (comparison["policy"], comparison["baseline"], comparison["rounds"]) == ("single", "rr", 2)
    figure = comparison["figures"]["mean_e2el_ms"]
    by_policy = {
        policy: [run["mean_e2el_ms"] for run in runs if run["policy"] == policy]
        for policy in ("rr", "single")
    }
    assert figure["difference"] == pytest.approx((sum(by_policy["single"]) - sum(by_policy["rr"])) / 2)
    assert figure["low"] <= figure["difference"] <= figure["high"]
    assert policy_of(fleet) == "hetlb"
    assert document["search"] == []


def test_the_policy_in_force_and_what_the_engines_report_are_told(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, trace: Path
) -> None:
    (run,) = bench(capsys, "--url", fleet.proxy, "--admin", fleet.admin, "--trace", trace)["runs"]
    assert run["policy"] == "hetlb"
    for each in run["instances"]:
        assert each["preemptions"] == 0
        assert 0 <= each["kv_peak"] < 1


@pytest.mark.parametrize(
    ("limit", "met", "missed"),
    [("e2el:0.001", False, True), ("e2el:60000", True, False)],
)
def test_the_search_goes_on_from_the_listed_rates(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fleet: Fleet,
    trace: Path,
    limit: str,
    met: bool,
    missed: bool,
) -> None:
    """Limits that nothing meets, or everything: it gives up at some rate. `test_search` has the rest."""
    monkeypatch.setattr("hetlb.tools.loadtest.campaign.MAX_PROBES", 3)
    document = bench(
        capsys, "--url", fleet.engine, "--trace", trace, "--num-prompts", "1", "--request-rate", "64,128",
        "--sweep", "0.5", "--goodput", limit,
    )  # fmt: skip
    (search,) = document["search"]
    assert (search["max_request_rate"] is not None, search["lowest_missed_rate"] is not None) == (met, missed)
    rates = [probe["request_rate"] for probe in search["probes"]]
    assert rates == sorted(run["request_rate"] for run in document["runs"])
    assert len(rates) == 2 + 3


def test_the_picture_is_written(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, trace: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "p.png"
    bench(
        capsys, "--url", fleet.proxy, "--admin", fleet.admin, "--trace", trace, "--request-rate", "100,200",
        "--compare", "rr,p2c", "--plot", picture,
    )  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_told_to_stop_it_ends_at_once_and_the_policy_is_put_back(fleet: Fleet, trace: Path) -> None:
    """Within a run that would take hours, by each of the signals."""
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            [sys.executable, "-m", "hetlb", "bench", "--url", fleet.proxy, "--admin", fleet.admin, "--trace",
             str(trace), "--request-rate", "0.001", "--compare", "rr,p2c"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        try:
            while policy_of(fleet) != "rr":
                assert process.poll() is None
            process.send_signal(number)
            out, err = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
        assert process.returncode == 1
        if out:  # the first request may have ended
            assert "interrupted: 1 of 48 requests had ended" in err
        else:
            assert err == "hetlb bench: interrupted: no request of this run had ended\n"
        assert policy_of(fleet) == "hetlb"


def test_interrupted_it_prints_what_has_ended(tmp_path: Path, trace: Path) -> None:
    """Also where a request is never answered: by a signal, and in every form that was asked for."""
    result = tmp_path / "r.json"
    with answering_but_one() as (url, asked):
        process = subprocess.Popen(
            [sys.executable, "-m", "hetlb", "bench", "--url", f"{url}/v1/", "--model", "m", "--trace",
             str(trace), "--max-concurrency", "1", "--json", "--save-result", "--result-dir", str(tmp_path),
             "--result-filename", "r.json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        try:
            assert asked.wait(HANG_S)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
    (run,) = json.loads(out)["runs"]
    assert json.loads(result.read_text())["runs"] == [run]
    assert (process.returncode, run["completed"], run["failed"]) == (1, 3, 0)
    assert f"interrupted: 3 of {COUNT} requests had ended" in err
    assert run["client"]["verdict"] == "SUSPECT"


def test_interrupted_while_results_are_written_they_are_all_there(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fleet: Fleet,
    trace: Path,
    tmp_path: Path,
) -> None:
    def text(runs: list[dict[str, Any]]) -> str:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
        return csv_text(runs)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(hetlb.cli.bench, "csv_text", text)
    flags = ("--save-result", "--result-dir", tmp_path, "--result-filename", "r.csv")
    document = bench(capsys, "--url", fleet.proxy, "--trace", trace, *flags)
    assert document["runs"][0]["completed"] == COUNT
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 2
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("command", ["bench", "batch"])
def test_interrupted_while_its_input_is_read_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    def read(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("hetlb.cli.bench._read_rows", read)
    monkeypatch.setattr("hetlb.cli.batch.read_jobs", read)
    files = [str(tmp_path / "in"), str(tmp_path / "out")] if command == "batch" else []
    assert main([command, *files, "--url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr() == ("", f"hetlb {command}: interrupted\n")


@pytest.mark.parametrize("runs", [0, 1], ids=["first", "second"])
def test_interrupted_before_a_request_has_ended_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fleet: Fleet, trace: Path, runs: int
) -> None:
    """In a run after another one: that one is printed."""

    async def measured(*positional: Any, **named: Any) -> LoadResult:
        nonlocal runs
        runs -= 1
        if runs < 0:
            signal.raise_signal(signal.SIGINT)
        return await measure(*positional, **named)

    monkeypatch.setattr("hetlb.tools.loadtest.campaign.measure", measured)
    whole = runs
    command = ["bench", "--url", fleet.proxy, "--trace", str(trace), "--request-rate", "100,200", "--json"]
    assert main(command) == 1
    out, err = capsys.readouterr()
    # A busy machine may be late with the first run's requests; that is said, too.
    said = [line for line in err.splitlines() if "SUSPECT" not in line]
    assert said == ["hetlb bench: interrupted: no request of this run had ended"]
    found = [run["completed"] for run in json.loads(out)["runs"]] if out else []
    assert found == [COUNT] * whole


def test_a_request_that_is_never_answered_ends_by_the_timeout(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    with answering_but_one() as (url, _):
        flags = ("--url", url, "--model", "m", "--trace", trace, "--max-concurrency", "1")
        assert main(["bench", "--json", *map(str, flags), "--timeout", "2"]) == 1
    out, err = capsys.readouterr()
    (run,) = json.loads(out)["runs"]
    assert f"{url}: 1 of {COUNT} requests failed, the first with timed out: no end" in err
    assert (run["completed"], run["failed"]) == (COUNT - 1, 1)
    assert run["client"]["errors"] == {"timed out": 1}


def test_a_search_may_cause_failures(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    with answering_but_one() as (url, _):
        flags = ("--url", url, "--model", "m", "--trace", trace, "--request-rate", "100,200", "--sweep")
        runs = bench(capsys, *flags, "--timeout", "2", status=0)["runs"]
    assert [run["failed"] for run in runs] == [1, 0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("streams", "status", "said"),
    [
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", 1, "hetlb bench: the output could not be written: No space left on device\n"),
        ("2>/dev/full", 0, ""),
        ("| true", 0, ""),
    ],
)
def test_what_happens_to_its_output_takes_no_result_away(
    fleet: Fleet, trace: Path, tmp_path: Path, streams: str, status: int, said: str
) -> None:
    result = tmp_path / "r.json"
    flags = ("--json", "--save-result", "--result-dir", str(tmp_path), "--result-filename", result.name)
    command = shlex.join(
        [sys.executable, "-m", "hetlb", "bench", "--url", fleet.engine, "--trace", str(trace), *flags]
    )
    done = subprocess.run(f"{command} {streams}", shell=True, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == status
    assert [line for line in done.stderr.splitlines() if "SUSPECT" not in line] == said.splitlines()
    [run] = json.loads(result.read_text())["runs"]
    assert run["completed"] == COUNT
    if done.stdout:
        assert json.loads(done.stdout)["runs"] == [run]


def test_a_result_that_cannot_be_written_is_printed(
    capsys: pytest.CaptureFixture[str],
    fleet: Fleet,
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def full(*_: Any) -> None:
        raise InputError("no space left")

    monkeypatch.setattr(hetlb.cli.bench, "write_text", full)
    flags = ("--url", fleet.engine, "--trace", trace, "--save-result", "--result-dir", tmp_path)
    [run] = bench(capsys, *flags, status=2)["runs"]
    assert run["completed"] == COUNT


def test_other_prompts(capsys: pytest.CaptureFixture[str], fleet: Fleet, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is a proxy?\nAnd why?\n")
    turns = [{"from": "human", "value": "w" * 40}, {"from": "gpt", "value": "a" * 32}]
    (tmp_path / "sharegpt.json").write_text(json.dumps([{"conversations": turns}] * 3))
    url = ("--url", fleet.engine)
    flags = ("--random-input-len", "30", "--random-output-len", "5", "--random-range-ratio", "0.5")
    (run,) = bench(capsys, *url, "--dataset-name", "random", *flags, "--num-prompts", "7")["runs"]
    assert run["completed"] == 7
    custom = ("--dataset-name", "custom", "--dataset-path", prompts, "--custom-output-len", "4")
    (run,) = bench(capsys, *url, *custom, "--endpoint", "/v1/chat/completions")["runs"]
    assert (run["completed"], run["total_output_tokens"]) == (2, 8)
    sharegpt = ("--dataset-name", "sharegpt", "--dataset-path", tmp_path / "sharegpt.json")
    (run,) = bench(capsys, *url, *sharegpt, "--num-prompts", "4")["runs"]
    assert (run["total_input_tokens"], run["total_output_tokens"]) == (40, 32)


# --- what is wrong ----------------------------------------------------------------------------------------

WRONG = [
    (["--url", "localhost:80"], "--url: expected a URL like http://host:8000, got 'localhost:80'"),
    (["--request-rate", "0"], "--request-rate: expected requests/s above 0"),
    (["--request-rate", "2,x"], "--request-rate: expected requests/s above 0"),
    (["--burstiness", "nan"], "--burstiness: expected a number above 0"),
    (["--num-prompts", "0"], "--num-prompts: expected a whole number from 1, got 0"),
    (["--num-warmups", "-1"], "--num-warmups: expected a whole number from 0, got -1"),
    (["--max-concurrency", "0"], "--max-concurrency: expected a whole number from 1, got 0"),
    (["--goodput", "itl:5"], "--goodput: expected NAME:MILLISECONDS"),
    (["--goodput", "ttft:fast"], "--goodput: expected NAME:MILLISECONDS"),
    (["--goodput", "ttft:1", "ttft:2"], "--goodput: expected one limit for ttft, got two"),
    (["--metric-percentiles", "101"], "--metric-percentiles: expected numbers from 0 to 100"),
    (["--percentile-metrics", "ttft,x"], "--percentile-metrics: expected names out of"),
    (["--metadata", "x"], "--metadata: expected KEY=VALUE, got 'x'"),
    (["--ramp-up-start-rps", "5"], "--ramp-up-strategy: expected linear or exponential"),
    (["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "5"], "--ramp-up-end-rps: expected requests/s"),
    (["--ramp-up-start-rps", "0"], "--ramp-up-start-rps: expected a number above 0, at most 1e+15, got 0"),
    (["--ramp-up-end-rps", "inf"], "--ramp-up-end-rps: expected a number above 0, at most 1e+15, got inf"),
    (["--compare", "rr,p2c"], "--admin: expected the proxy's admin address to compare policies"),
    (["--admin", "http://x:1", "--compare", "rr,best"], "--compare: expected names out of"),
    (["--compare", "", "--rounds", "2"], "--rounds: expected --compare to repeat, got 2"),
    (["--admin", "http://x:1", "--compare", "rr,rr"], "--compare: expected every name once, got 'rr,rr'"),
    (["--seed", "x"], "--seed: expected a whole number, got x"),
    (["--rounds", "2"], "--rounds: expected --compare to repeat, got 2"),
    (["--sweep"], "--sweep: expected several rates in --request-rate, or limits in --goodput"),
    (["--sweep", "--goodput", "ttft:1"], "--request-rate: expected rates to search from, got 'inf'"),
    (["--sweep", "0"], "--sweep: expected a share above 0 up to 1"),
    (["--random-range-ratio", "2"], "--random-range-ratio: expected 0 to 1, got 2"),
    (["--plot", "/nowhere/to/x.png"], "--plot: expected a file in a folder that exists"),
    (["--timeout", "0"], "--timeout: expected a number above 0, at most 1e+15, got 0"),
    (["--dataset-name", "random"], "expected --trace FILE, --dataset-name random, or --dataset-path"),
    (["--session-header", "x y"], "--session-header: expected the name of a header, got 'x y'"),
    (["--plot", "x.html"], "--plot: expected a picture file, one of .png"),
    (["--save-result", "--result-dir", "/nowhere/to"], "--result-dir: expected a folder that exists"),
    (["--save-result", "--result-filename", "a/b"], "--result-filename: expected a file in a folder that"),
    (["--endpoint", "/v1/chat/completions", "--prompt-format", "ids"], "--prompt-format: expected text"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_wrong_flags_are_one_line(
    capsys: pytest.CaptureFixture[str], trace: Path, flags: list[str], message: str
) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1", "--trace", str(trace), *flags]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "expected --trace FILE, --dataset-name random, or --dataset-path"),
        (["--dataset-name", "custom"], "--dataset-path: expected a file for custom"),
        (
            ["--dataset-name", "random", "--request-rate", "trace"],
            "--request-rate: expected --trace to replay",
        ),
        (["--dataset-name", "sharegpt", "--dataset-path", "/nowhere"], "/nowhere: no such file"),
        (["--trace", "/nowhere"], "/nowhere: no such file"),
        (["--dataset-name", "random", "--config", "nosuch.yaml"], "nosuch.yaml: no such file"),
    ],
)
def test_nothing_to_ask(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1", *flags]) == 2
    assert message in capsys.readouterr().err


def test_an_admin_address_that_is_none(capsys: pytest.CaptureFixture[str], fleet: Fleet, trace: Path) -> None:
    flags = ["--url", fleet.proxy, "--trace", str(trace), "--compare", "rr,p2c", "--admin"]
    for address in (fleet.engine, "http://127.0.0.1:1"):
        assert main(["bench", *flags, address]) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"hetlb bench: {address}/v1/fleet: ")
        assert err.count("\n") == 1


def test_a_trace_without_times_cannot_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,5,5\n,5,5\n")
    flags = ["--url", "http://127.0.0.1:1", "--trace", str(trace), "--request-rate", "trace"]
    assert main(["bench", *flags]) == 2
    assert f"{trace}: arrival_s: expected a time in every row to replay, row 2" in capsys.readouterr().err


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1", "--trace", str(trace)]) == 1
    err = capsys.readouterr().err
    assert err == "hetlb bench: http://127.0.0.1:1: no answer: Connection refused\n"


def test_requests_that_all_fail_are_an_error_after_the_result(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, trace: Path
) -> None:
    flags = ["--url", fleet.engine, "--trace", str(trace), "--model", "other", "--json"]
    assert main(["bench", *flags]) == 1
    out, err = capsys.readouterr()
    (run,) = json.loads(out)["runs"]
    assert (run["completed"], run["failed"]) == (0, COUNT)
    assert run["client"]["verdict"] == "SUSPECT"
    assert "every request failed, the first with http 404" in err


def test_requests_of_every_kind_are_answered_and_counted(
    capsys: pytest.CaptureFixture[str], fleet: Fleet, tmp_path: Path
) -> None:
    trace = tmp_path / "kinds.csv"
    trace.write_text(
        "arrival_s,input_tokens,output_tokens,session_id,turn,hash_ids,tenant,sequences,n,endpoint\n"
        ",200,10,s,0,sys=100,acme,1,1,\n"
        ",300,10,s,1,sys=100,acme,1,1,\n"
        ",64,6,,,few=32,beta,4,1,\n"
        ",64,6,,,,beta,2,3,\n"
        ",50,0,,,,beta,8,1,embeddings\n"
    )
    flags = ("--request-rate", "50", "--waves", "0.05:0.05", "--tenant-header", "x-tenant")
    (run,) = bench(capsys, "--url", fleet.proxy, "--trace", trace, *flags)["runs"]
    assert (run["completed"], run["failed"]) == (5, 0), run["error_examples"]
    assert run["total_input_tokens"] == 200 + 300 + 4 * 64 + 2 * 64 + 8 * 50
    assert run["total_output_tokens"] == 10 + 10 + 4 * 6 + 6 * 6
    assert (run["client"]["mismatched_lengths"], run["client"]["mismatched_prompts"]) == (0, 0)


def test_a_chat_has_one_prompt(fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens,sequences\n,5,5,1\n,5,5,2\n")
    flags = ["--url", fleet.proxy, "--trace", str(trace), "--endpoint", "/v1/chat/completions"]
    assert main(["bench", *flags]) == 2
    assert (
        f"{trace}: row 2: sequences: expected 1 with /v1/chat/completions, got 2" in capsys.readouterr().err
    )
