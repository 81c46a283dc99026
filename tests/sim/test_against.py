"""A log held against a model: its errors, corrections, and logs that say what they lack."""

from __future__ import annotations

import csv
import functools
import gzip
import io
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import examples, request, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.latency import LatencyModel, scaled
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.step_times import DecodeTable, MixedTerm, PnormPrefill
from hetlb.balancer.core.types import Dispatch, Health, Lease, Outcome
from hetlb.errors import ConfigError, TraceError
from hetlb.options.event_log.eventlog import RecordingScheduler, encode_setup
from hetlb.tools.sim.against import (
    Comparison,
    Corrections,
    compare,
    errors,
    fit_corrections,
    reach,
    replay,
    varies_enough,
)
from hetlb.tools.sim.against_report import engines
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.workload.measured_logs import Log, LoggedRequest, read_log

TRUE = LatencyModel(
    *(8e-5, 0.0, 0.0, 0.015, 1.4e-7, 4.5e-5, 0.0, 0.016),
    better_prefill=PnormPrefill(0.018, 9e-5, 2e-9, 4.0, None, 128),
    better_decode=DecodeTable(1.4e-7, 1e-9, (1, 8, 32, 128), (0.0166, 0.0174, 0.0190, 0.0222)),
    mixed=MixedTerm(3.4e-5, 5e-8, 2.8e-7, 9e-7),
    host_s=0.001,
)
ENGINE = EngineSpec(TRUE, EngineLimits(60_000, 16, 128, 2048, async_scheduling=True))


def asked(rate: float, count: int = 150, seed: int = 1) -> list[LoggedRequest]:
    rng, at_s, found = random.Random(seed), 0.0, []
    for index in range(count):
        at_s += rng.expovariate(rate * (0.4 if index < count / 2 else 1.6))
        found.append(LoggedRequest(at_s, rng.randint(50, 1800), rng.randint(5, 300), 0.0, 0.0))
    return found


def log_of(engine: EngineSpec, requests: list[LoggedRequest]) -> Log:
    said = replay(requests, engine).requests
    return Log("csv", tuple(said))


LOG = log_of(ENGINE, asked(4.0))


#: A part of the time, and a model in which it is wrong.
PLANTED = [
    ("prefill", Corrections(prefill=0.6)),
    ("mixed", Corrections(mixed=0.2)),
    ("decode", Corrections(decode=1.3)),
    ("host", Corrections(host_s=0.006)),
]


def compared(latency: LatencyModel) -> Comparison:
    return compare(LOG, {"": replace(ENGINE, latency=latency)})


@functools.cache
def corrections_of(latency: LatencyModel) -> Corrections:
    """The corrections of this model by the log: once for all tests, since a fit takes seconds."""
    return fit_corrections(LOG.requests, replace(ENGINE, latency=latency))


def test_the_model_that_made_a_log_is_right_about_it() -> None:
    found = compared(TRUE)
    assert all(abs(error.error) < 1e-9 and error.per_request < 1e-9 for error in found.errors.values())
    assert found.verdict == "right within 1 %"


@pytest.mark.parametrize(("part", "wrong"), PLANTED)
def test_a_planted_wrong_term_is_found_with_how_sure_that_is(part: str, wrong: Corrections) -> None:
    engine = replace(ENGINE, latency=wrong.applied(TRUE))
    found = compared(engine.latency)
    assert found.verdict.startswith(("off by", "right within 3 %, except"))
    seen = corrections_of(engine.latency)
    after = replace(engine, latency=seen.applied(engine.latency))
    corrected = errors(LOG.requests, replay(LOG.requests, after).requests)
    assert abs(corrected["e2e"].error) < max(0.01, 0.3 * abs(found.errors["e2e"].error))
    phrase = next(each for each in seen.described() if each.startswith(part))
    assert "may be none" not in phrase
    if part == "host":
        assert seen.host_s == pytest.approx(-wrong.host_s, abs=1.5e-3)
    else:
        assert getattr(seen, part) == pytest.approx(1.0 / getattr(wrong, part), rel=0.2)


def test_requests_of_one_size_one_after_the_other_tell_no_parts_apart() -> None:
    requests = [LoggedRequest(20.0 * i, 500, 50, 0.0, 0.0) for i in range(30)]
    assert "1 to 1 sequences" in varies_enough(replay(requests, ENGINE))
    assert varies_enough(replay(asked(4.0), ENGINE)) == ""


def test_corrections_of_a_right_model_are_none() -> None:
    found = corrections_of(TRUE)
    for factor in (found.prefill, found.mixed, found.decode):
        assert factor == pytest.approx(1.0, abs=0.02)
    assert abs(found.host_s) < 2e-4
    model = Corrections(1.0, 1.0, 1.0, -0.01).applied(TRUE)
    assert model.host_s == 0.0
    assert 0.0 < model.step_s(1, 100) < TRUE.step_s(1, 100)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_time_to_join_a_running_engine_is_what_the_engine_model_takes(asynchronous: bool) -> None:
    engine = replace(
        ENGINE,
        latency=replace(TRUE, request_s=0.004),
        limits=replace(ENGINE.limits, async_scheduling=asynchronous),
    )
    step_s = TRUE.step_s(8, 8 * 600)
    running = [LoggedRequest(0.0, 100, 1000, 0.0, 0.0) for _ in range(8)]
    # Far enough apart that each finds decodes alone, and at every point of a step equally often.
    late = [LoggedRequest(1.0 + i * 6.618 * step_s, 1, 1, 0.0, 0.0) for i in range(120)]
    queues = [each.queue_s or 0.0 for each in replay([*running, *late], engine).requests[8:]]
    expected = engine.latency.joining_s(step_s, asynchronous)
    assert sum(queues) / len(queues) == pytest.approx(expected, rel=0.05)
    alone = replay(late[:1], engine).requests[0].queue_s
    assert alone == pytest.approx(engine.latency.joining_s(0.0, asynchronous))


def test_a_correction_that_makes_another_load_worse_is_refused() -> None:
    wrong = replace(ENGINE, latency=replace(TRUE, host_s=0.004))
    told = log_of(ENGINE, asked(4.0, 100)).requests
    tested = reach(told, wrong, fit_corrections(told, wrong))
    assert not tested.harms
    assert abs(tested.after) < 0.3 * abs(tested.before)
    assert tested.times >= 1.0
    assert tested.sequences > 1
    # The quiet half was slowed down by something that the busy half did not meet.
    loads = replay(told, ENGINE).loads
    middle = sorted(loads)[len(loads) // 2]
    slowed = [
        replace(each, ttft_s=1.5 * each.ttft_s, e2e_s=1.5 * each.e2e_s) if load < middle else each
        for each, load in zip(told, loads, strict=True)
    ]
    assert reach(slowed, ENGINE, Corrections()).harms


def test_a_correction_holds_up_to_the_load_at_which_another_form_says_the_same() -> None:
    server = replace(ENGINE, latency=replace(TRUE, mixed=MixedTerm(0.0, 2.5e-7, 0.0, 0.0)))
    told = log_of(server, asked(3.0, 100)).requests
    found = fit_corrections(told, ENGINE)
    tested = reach(told, ENGINE, found)
    assert 1.0 <= tested.times < 2.0
    fixed = replace(ENGINE, latency=found.applied(TRUE))

    def off(factor: float) -> float:
        faster = [replace(each, arrival_s=each.arrival_s / factor) for each in told]
        seen = errors(log_of(server, faster).requests, replay(faster, fixed).requests)
        return max(abs(seen[name].error) for name in ("ttft", "tpot", "e2e"))

    assert off(tested.times) < 0.05 < off(3.0)


def test_each_part_is_told_with_how_sure_the_log_makes_it() -> None:
    assert TRUE.better_decode is not None
    slower = replace(TRUE, better_decode=scaled(TRUE.better_decode, 0.8))
    found = fit_corrections(LOG.requests, replace(ENGINE, latency=slower))
    phrases = dict(zip(("prefill", "mixed", "decode", "host", "request"), found.described(), strict=True))
    assert phrases["decode"].startswith("decode x 1.")
    assert "may be none" not in phrases["decode"]
    assert all("may be none" in each for each in corrections_of(TRUE).described())


# --- logs ------------------------------------------------------------------------------------------------


def bench_document(part: tuple[LoggedRequest, ...] = LOG.requests) -> dict[str, Any]:
    return {
        "start_times": [1000.0 + each.arrival_s for each in part],
        "input_lens": [each.input_tokens for each in part],
        "output_lens": [each.output_tokens for each in part],
        "ttfts": [each.ttft_s for each in part],
        "itls": [[each.tpot_s] * (each.output_tokens - 1) for each in part],
        "errors": ["" for _ in part],
    }


def aiperf_lines(part: tuple[LoggedRequest, ...] = LOG.requests) -> list[str]:
    return [
        json.dumps(
            {
                "metadata": {"request_start_ns": int(1e9 * each.arrival_s)},
                "metrics": {
                    "input_sequence_length": {"value": each.input_tokens, "unit": "tokens"},
                    "output_sequence_length": {"value": each.output_tokens, "unit": "tokens"},
                    "time_to_first_token": {"value": 1e3 * each.ttft_s, "unit": "ms"},
                    "request_latency": {"value": 1e3 * each.e2e_s, "unit": "ms"},
                },
                "error": None,
            }
        )
        for each in part
    ]


def test_lines_end_at_line_ends_alone(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    named = [line.replace('"metadata": {', '"metadata": {"session": "a\u2028b", ') for line in aiperf_lines()]
    path.write_bytes("\r\n".join(named).encode())
    assert len(read_log(path).requests) == len(named)


def csv_text(part: tuple[LoggedRequest, ...] = LOG.requests) -> str:
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["arrival_s", "input_tokens", "output_tokens", "ttft_s", "e2e_s"])
    for each in part:
        rows.writerow([each.arrival_s, each.input_tokens, each.output_tokens, each.ttft_s, each.e2e_s])
    return file.getvalue()


def test_every_kind_of_log_tells_the_same(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("bench.json", "profile_export.jsonl", "log.csv")]
    paths[0].write_text(json.dumps(bench_document()))
    paths[1].write_text("\n".join(aiperf_lines()) + "\n")
    paths[2].write_text(csv_text())
    first_s = LOG.requests[0].arrival_s
    for path, kind in zip(paths, ("bench", "aiperf", "csv"), strict=True):
        log = read_log(path)
        assert log.kind == kind
        assert len(log.requests) == len(LOG.requests)
        for got, expected in zip(log.requests, LOG.requests, strict=True):
            assert got.arrival_s == pytest.approx(expected.arrival_s - first_s, abs=1e-6)
            assert (got.input_tokens, got.output_tokens) == (expected.input_tokens, expected.output_tokens)
            assert (got.ttft_s, got.e2e_s) == pytest.approx((expected.ttft_s, expected.e2e_s), rel=1e-6)


def event_lines(part: tuple[LoggedRequest, ...] = LOG.requests) -> list[str]:
    """Requests as a recording scheduler in front of one instance writes them."""
    setup = SchedulerSetup(
        (spec("a"),), "least-requests", PolicyParams(), QueueLimits(), initial_health=Health.UP
    )
    lines = [encode_setup(setup)]
    scheduler = RecordingScheduler(setup, write=lines.append)
    facts: list[tuple[float, int, int]] = []
    for number, each in enumerate(part):
        moments = (each.arrival_s, each.arrival_s + each.ttft_s, each.arrival_s + each.e2e_s)
        facts += [(now, kind, number) for kind, now in enumerate(moments)]
    leases: dict[int, Lease] = {}
    for now, kind, number in sorted(facts):
        each = part[number]
        if kind == 0:
            [command] = scheduler.on_arrival(request(number, prompt=each.input_tokens, max_tokens=300), now)
            assert isinstance(command, Dispatch)
            leases[number] = command.lease
        elif kind == 1:
            scheduler.on_first_token(leases[number], now)
        else:
            leases[number].output_tokens = each.output_tokens
            scheduler.on_lease_ended(leases[number], Outcome.OK, now)
    return lines


def test_an_event_log_tells_the_same_as_what_it_recorded(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(event_lines()) + "\n")
    log = read_log(path)
    assert (log.kind, log.failed, len(log.requests)) == ("events", 0, len(LOG.requests))
    assert log.setup is not None
    assert [each.name for each in log.setup.specs] == ["a"]
    first_s = LOG.requests[0].arrival_s
    for got, expected in zip(log.requests, LOG.requests, strict=True):
        assert got.arrival_s == pytest.approx(expected.arrival_s - first_s, abs=1e-6)
        assert (got.input_tokens, got.output_tokens) == (expected.input_tokens, expected.output_tokens)
        assert (got.ttft_s, got.e2e_s) == pytest.approx((expected.ttft_s, expected.e2e_s), rel=1e-5)


def test_an_instance_without_a_profile_when_the_log_began_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(event_lines(LOG.requests[:30])) + "\n")
    log = read_log(path)
    assert list(engines(path, log, None)) == ["a"]
    assert compare(log, engines(path, log, None)).requests == 30
    added = replace(log, requests=(*log.requests, replace(log.requests[0], instance="b")))
    with pytest.raises(ConfigError, match=r"events\.jsonl: b: expected an instance that had a profile"):
        engines(path, added, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"ttfts": [0.1]}), "missing input_lens, output_lens, itls"),
        ("arrival_s,input_tokens,output_tokens\n0,1,2\n", "hetlb's CSV without ttft_s and e2e_s"),
        ("INFO 01-01 Received request cmpl-1: params\n", "token counts and first-token times"),
        ("hello\n", "hetlb reads: vllm bench serve"),
        ('{"metadata": {}, "metrics": {}}\n', "expected input_tokens, output_tokens, arrival_s"),
        ("arrival_s,input_tokens,output_tokens,ttft_s,e2e_s\n0,5,2,0.1,0.2\n", "at least 10 requests"),
        (
            "arrival_s,input_tokens,output_tokens,ttft_s,e2e_s\n0,5,2,soon,0.2\n",
            "line 2: ttft_s: expected seconds",
        ),
        (" \n", "got an empty file"),
        ("arrival_s,input_tokens,output_tokens,ttft_s,e2e_s\n0,5,2,nan,0.2\n", "ttft_s: .* got 'nan'"),
        (
            "arrival_s,input_tokens,output_tokens,ttft_s,e2e_s\n0,5,2,0.3,0.2\n",
            "e2e_s: expected seconds from 0.3",
        ),
        (json.dumps({"runs": [bench_document(), bench_document()]}), "runs: expected one run, got 2"),
        (json.dumps({**bench_document(), "errors": [""]}), "errors: expected lists of one length"),
        (json.dumps({**bench_document(), "ttfts": "soon"}), "expected lists of one length"),
        ("[" * 100_000, "expected JSON"),
        ('{"a":' * 100_000, "expected JSON"),
        ('{"kind": "setup", "setup": 1}\n', "line 1: expected the set-up of an event log"),
    ],
)
def test_a_log_with_too_little_in_it_says_what_is_missing(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as caught:
        read_log(path)
    assert "\n" not in str(caught.value)


def test_whole_answers_tell_no_first_token(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    rows = "".join(f"{i},5,2,0.3,0.3\n" for i in range(20))
    path.write_text("arrival_s,input_tokens,output_tokens,ttft_s,e2e_s\n" + rows)
    with pytest.raises(TraceError, match="not streamed"):
        read_log(path)


def test_an_archive_and_another_encoding_are_named(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(gzip.compress(csv_text().encode()))
    assert len(read_log(path).requests) == len(LOG.requests)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match="expected a whole gzip file"):
        read_log(path)
    path.write_text(csv_text(), encoding="utf-16")
    with pytest.raises(TraceError, match="expected UTF-8 text"):
        read_log(path)
    path.write_text(csv_text(), encoding="utf-8-sig")  # as spreadsheets write it
    assert len(read_log(path).requests) == len(LOG.requests)


def test_the_order_of_lines_does_not_matter_and_repeated_requests_count(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    header, *rows = csv_text().splitlines()
    path.write_text("\n".join([header, *rows]))
    expected = read_log(path).requests
    random.Random(1).shuffle(rows)
    path.write_text("\n".join([header, *rows]))
    assert read_log(path).requests == expected
    path.write_text("\n".join([header, *rows, *rows]))
    assert len(read_log(path).requests) == 2 * len(expected)


def test_answers_of_one_token_tell_no_parts_apart() -> None:
    requests = [LoggedRequest(float(i), 500, 1, 0.0, 0.0) for i in range(30)]
    assert varies_enough(replay(requests, ENGINE)) == "no answer has a second token"
    found = compare(log_of(ENGINE, requests), {"": ENGINE})
    assert "tpot" not in found.errors or found.errors["tpot"].requests == 0
    assert found.verdict == "right within 1 %"


#: Values that no log should hold, and JSON can.
hostile = st.sampled_from(
    [None, True, "", "x", -1, -0.5, 0, 1e-320, 1e300, 10**400, float("nan"), float("inf"), [], [None], {}]
)
FEW = LOG.requests[:12]


def broken(value: Any, draw: st.DrawFn) -> Any:
    """The same with one of its values replaced, at any depth."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: broken(value[key], draw)}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        index = draw(st.integers(0, len(value) - 1))
        return [*value[:index], broken(value[index], draw), *value[index + 1 :]]
    return draw(hostile)


@st.composite
def broken_logs(draw: st.DrawFn) -> str:
    """A log of any kind with one value broken."""
    kind = draw(st.sampled_from(["bench", "aiperf", "csv", "events"]))
    if kind == "bench":
        return json.dumps(broken(bench_document(FEW), draw))
    lines = {"aiperf": aiperf_lines, "events": event_lines, "csv": lambda part: csv_text(part).splitlines()}[
        kind
    ](FEW)
    number = draw(st.integers(0, len(lines) - 1))
    if kind == "csv":
        cells = lines[number].split(",")
        cells[draw(st.integers(0, len(cells) - 1))] = str(draw(hostile))
        lines[number] = ",".join(cells)
    else:
        lines[number] = json.dumps(broken(json.loads(lines[number]), draw))
    return "\n".join(lines) + "\n"


@given(text=broken_logs())
@settings(max_examples=examples(100))
def test_a_broken_value_is_one_line_or_does_not_matter(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("broken") / "log"
    path.write_text(text)
    message = ""
    try:
        log = read_log(path)
        assert len(log.requests) >= 10
        replay(log.requests, ENGINE)
    except TraceError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1000
