"""The metrics page: every name described, every figure counted where it happens, the format as parsed."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from helpers import make_scheduler, request, spec, turns_until
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from proxy.memory import Proxy
from proxy.services import Engine, Running, document, serving
from proxy.upstreams import DONE, LAST, LAST_TOKEN, SSE_HEAD, TOKEN, USAGE, Upstream, Visit, chunk, plain

from hetlb.balancer.admin import prometheus
from hetlb.balancer.admin.beliefs import reported
from hetlb.balancer.admin.prometheus import MetricsPage
from hetlb.balancer.core.facts import CapacityLearned, EngineSample, InstanceRemoved, SleepSet
from hetlb.balancer.core.occupancy import SIGNAL_STALE_S
from hetlb.balancer.core.types import CAUSES, Capacity, Health, Outcome
from hetlb.balancer.exchange.driver_timers import SWEEP_S
from hetlb.balancer.fleet.service import FleetService
from hetlb.balancer.telemetry.counters import FINE_MS, ITL_S, MAX_MODELS, GapHistogram, Histogram, Totals
from hetlb.balancer.telemetry.recent import Recent

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
STREAM = SSE_HEAD + chunk(TOKEN) + chunk(LAST_TOKEN) + chunk(USAGE) + chunk(DONE) + LAST


VIEW = SimpleNamespace(peer_leases=17, delay_s=0.004)
SHARING = SimpleNamespace(connected=True, peers=2, view=VIEW, sent=100, received=300, rejected=0)


def parsed(text: str) -> dict[str, Metric]:
    """The families of a page, by their full names; what no scraper accepts fails here."""
    families: dict[str, Metric] = {}
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        assert name not in families, f"{name} comes twice"
        families[name] = family
    return families


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    """One sample; 0 where there is no such series."""
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    for sample in families[base if base in families else name].samples:
        if sample.name == name and all(sample.labels.get(key) == text for key, text in labels.items()):
            return float(sample.value)
    return 0.0


async def page(running: Running) -> dict[str, Metric]:
    return parsed((await running.admin("GET", "/metrics")).body.decode())


async def stream(running: Any) -> None:
    """One streamed completion."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    body = b'{"model":"m","prompt":"hello","max_tokens":5,"stream":true}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-type: application/json\r\n"
    )
    writer.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
    try:
        assert b"[DONE]" in await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


# --- histograms ---

BOUNDS = [0.01, 0.1, 1.0, 10.0]


@given(st.lists(st.one_of(st.floats(0, 20), st.sampled_from(BOUNDS))))
def test_a_histogram_counts_what_is_at_most_each_bound(values: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    for each in values:
        histogram.observe(each)
    bounds, counts, total = histogram.figures()
    assert bounds == BOUNDS
    assert counts == [*(sum(each <= bound for each in values) for bound in BOUNDS), len(values)]
    assert total == pytest.approx(math.fsum(values))


@given(st.lists(st.integers(0, 50_000)))
def test_gaps_count_to_the_millisecond_and_beyond(milliseconds: list[int]) -> None:
    gaps = GapHistogram(ITL_S)
    for ms in milliseconds:
        if ms < FINE_MS:
            gaps.fine[ms] += 1
        else:
            gaps.long(ms / 1e3)
    bounds, counts, total = gaps.figures()
    expected = [sum(ms <= round(bound * 1e3) for ms in milliseconds) for bound in bounds]
    assert counts == [*expected, len(milliseconds)]
    assert total == pytest.approx(sum(milliseconds) / 1e3)


# --- the page and its description ---


def described() -> dict[str, tuple[str, set[str]]]:
    """Name, type and labels of every row of the tables in docs/reference/metrics.md."""
    found = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and re.fullmatch("`(hetlb|process)_[a-z_0-9]+`", cells[0]):
            name, kind, labels, _ = cells
            found[name.strip("`")] = kind, {label for label in re.split(r"[, ]+", labels) if label}
    return found


async def everything(tmp_path: Path) -> dict[str, Metric]:
    """A page on which every family has a series."""
    classes = {"report": {"e2e_ms": 60_000}}
    async with Engine(STREAM) as engine:
        fleet = document(engine)
        fleet["models"][0]["classes"] = classes
        async with serving(tmp_path, fleet) as running:
            return await of_everything(running)


async def of_everything(running: Running) -> dict[str, Metric]:
    # An answer within a tick of the clock is no sample, and says nothing of the speed.
    while not (running.instance("i0").errors.end.samples and running.instance("i0").speed.seen):
        await stream(running)
    await turns_until(lambda: running.instance("i0").sample is not None)
    running.service.sharing = cast(Any, SHARING)
    running.service.driver.totals.resumptions["m", "broken"] = 1
    running.service.scheduling.change(SleepSet("i0", "", wake_s=1.5))
    running.service.watch.pause("i0")
    running.service.scheduling.change(CapacityLearned("i0", Capacity(engines=2, rank_header=True)))
    running.service.reload_refused = "fleet.yaml: models: expected a list"
    try:
        return await page(running)
    finally:
        running.service.sharing = None


async def test_every_metric_is_described_and_every_description_is_of_one(tmp_path: Path) -> None:
    families = await everything(tmp_path)
    table = described()
    assert families.keys() == table.keys()
    for name, family in families.items():
        kind, labels = table[name]
        assert family.type == kind, name
        assert family.samples, f"{name} has no series on this page"
        found = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert found == labels, name
        assert family.documentation.endswith("."), name


async def test_units_and_endings_follow_prometheus(tmp_path: Path) -> None:
    for name, family in (await everything(tmp_path)).items():
        assert (family.type == "counter") == name.endswith("_total"), name
        assert not re.search(r"_(ms|millis\w*|percent|minutes?|kb|mb)(_|$)", name), name
        if family.type != "histogram":
            continue
        series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        totals: dict[tuple[tuple[str, str], ...], float] = {}
        for sample in family.samples:
            labels = dict(sample.labels)
            bound = labels.pop("le", None)
            key = tuple(sorted(labels.items()))
            if bound is not None:
                series.setdefault(key, []).append((float(bound), sample.value))
            elif sample.name.endswith("_count"):
                totals[key] = sample.value
        for key, buckets in series.items():
            assert buckets == sorted(buckets), name
            assert [count for _, count in buckets] == sorted(count for _, count in buckets), name
            assert buckets[-1] == (math.inf, totals[key]), name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on this machine")
async def test_promtool_has_nothing_to_say(tmp_path: Path) -> None:
    async with Engine(STREAM) as engine, serving(tmp_path, document(engine)) as running:
        await stream(running)
        body = (await running.admin("GET", "/metrics")).body
    process = await asyncio.create_subprocess_exec(
        "promtool", "check", "metrics",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate(body)
    assert (process.returncode, said) == (0, b"")


# --- what is counted ---


async def test_a_stream_is_counted_in_every_histogram(tmp_path: Path) -> None:
    async with Engine(STREAM) as engine, serving(tmp_path, document(engine)) as running:
        for _ in range(3):
            await stream(running)
        await running.settled()
        found = await page(running)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                 "predicted_output_ratio", "predicted_time_ratio"):  # fmt: skip
        assert value(found, f"hetlb_{name}_count", model="m") == 3, name
    assert value(found, "hetlb_requests_total", outcome="ok", phase="answer") == 3
    assert value(found, "hetlb_instance_requests_total", server="i0", outcome="ok") == 3
    assert value(found, "hetlb_instance_output_tokens_total", server="i0") == 6
    assert value(found, "hetlb_instance_prompt_tokens_total", server="i0") == 9
    assert value(found, "hetlb_decisions_total") == 3
    assert value(found, "hetlb_decision_seconds_count", event="arrival") == 3
    assert value(found, "hetlb_decision_seconds_count", event="end") == 3
    served = value(found, "hetlb_instance_served_seconds_total", server="i0")
    assert served == pytest.approx(value(found, "hetlb_e2e_request_latency_seconds_sum", model="m"), abs=0.1)
    assert value(found, "hetlb_instance_predicted_seconds_total", server="i0") > 0
    # Two tokens of each of the last two answers, predicted from the earlier ones.
    assert value(found, "hetlb_predicted_output_ratio_sum", model="m") > 0


def test_an_instance_that_left_is_forgotten_though_nothing_reads_the_page() -> None:
    proxy = Proxy(None, None)
    totals = proxy.driver.totals
    try:
        totals.tried_again("i1", Outcome.CONNECT_FAILED)
        totals.tried_again("i2", Outcome.CONNECT_FAILED)
        proxy.scheduling.change(InstanceRemoved("i1"))
        proxy.loop.turn(SWEEP_S)
        assert list(totals.instances) == ["i2"]
    finally:
        proxy.close()


async def test_the_times_between_tokens(start: Callable[..., Any]) -> None:
    gate = asyncio.Event()

    async def slow(visit: Visit) -> None:
        visit.send(SSE_HEAD)
        for _ in range(4):
            visit.send(chunk(TOKEN))
            await gate.wait()
            gate.clear()
        visit.send(chunk(USAGE) + chunk(DONE) + LAST)

    async with Upstream(slow) as engine:
        proxy = await start(engine.url)
        asking = asyncio.create_task(stream(proxy))
        counted = proxy.driver.totals.model("m").gaps
        try:
            # One read each: the next token is sent when the last one was counted.
            for number in range(4):
                await turns_until(
                    lambda number=number: (
                        [each.attempt.tokens_so_far for each in proxy.driver.exchanges.values()]
                        == [number + 1]
                    )
                )
                assert counted.figures()[1][-1] == number
                gate.set()
            await asking
        finally:
            asking.cancel()
            await asyncio.wait([asking])
        assert counted.figures()[1][-1] == 3


async def test_a_plain_answer_has_no_first_token(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        await running.ask()
        found = await page(running)
    assert value(found, "hetlb_time_to_first_token_seconds_count", model="m") == 0
    assert value(found, "hetlb_e2e_request_latency_seconds_count", model="m") == 1


async def test_what_is_refused_counts_and_leaves_no_label(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        body = b'{"model":"made-up-by-a-client","prompt":"x"}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\nconnection: close\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        assert b" 404 " in await reader.read()
        writer.close()
        await writer.wait_closed()
        reply = await running.admin("GET", "/metrics")
    assert b"made-up-by-a-client" not in reply.body
    assert value(parsed(reply.body.decode()), "hetlb_requests_total", outcome="bad_request") == 1


async def test_a_client_a_limit_and_an_engine_are_told_apart(tmp_path: Path) -> None:
    key = {"name": "t", "sha256": hashlib.sha256(b"key").hexdigest(), "limits": {"requests_per_minute": 3}}
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump([key]))
    async with Engine() as engine:
        fleet = document(engine, proxy={"api_keys_file": "keys.yaml"})
        async with serving(tmp_path, fleet) as running:
            for status in (b"200 OK", b"400 Bad Request", b"500 Wrong"):
                engine.reply = plain(status=status)
                await running.ask(Authorization="Bearer key")
            assert (await running.ask(Authorization="Bearer key")).status == 429
            assert (await running.ask(Authorization="Bearer nobody")).status == 401
            await running.settled()
            found = await page(running)
    told = {
        tuple(sample.labels[name] for name in ("cause", "outcome", "status", "model")): sample.value
        for sample in found["hetlb_requests_total"].samples
    }
    assert told == {
        ("none", "ok", "2xx", "m"): 1,
        ("client", "upstream_refused", "4xx", "m"): 1,
        ("engine", "upstream_error", "5xx", "m"): 1,
        ("limit", "rate_limited", "4xx", "m"): 1,
        ("client", "bad_request", "4xx", ""): 1,
    }
    assert CAUSES.keys() == {outcome.value for outcome in Outcome}


async def test_requests_that_waited_in_vain_are_in_the_queue_time(tmp_path: Path) -> None:
    fleet = {"queue": {"no_instance_timeout_s": 0}}
    async with Engine() as engine, serving(tmp_path, document(engine, **fleet)) as running:
        await running.admin("PUT", "/v1/fleet/instances/i0/state", {"state": "drain"})
        assert (await running.ask()).status == 503
        found = await page(running)
    assert value(found, "hetlb_request_queue_time_seconds_count", model="m") == 1
    assert value(found, "hetlb_requests_total", outcome="no_instance", phase="queue") == 1


async def test_retries_and_ejections(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two, serving(tmp_path, document(one, two)) as running:
        await one.__aexit__()
        for _ in range(4):
            assert (await running.ask()).status == 200
        await turns_until(lambda: running.instance("i0").evidence.health.state.value == "ejected")
        found = await page(running)
    assert value(found, "hetlb_instance_ejections_total", server="i0") == 1
    assert value(found, "hetlb_instance_ejections_total", server="i1") == 0
    assert value(found, "hetlb_instance_health", server="i0", health="ejected") == 1
    assert value(found, "hetlb_instance_health", server="i0", health="up") == 0
    assert value(found, "hetlb_retries_total") == value(
        found, "hetlb_instance_requests_total", server="i0", outcome="connect_failed"
    )


async def test_reloads_by_result(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        await running.admin("POST", "/v1/reload")
        running.path.write_text("version: 2\n")
        await running.admin("POST", "/v1/reload")
        found = await page(running)
    assert value(found, "hetlb_config_reloads_total", result="done") == 1
    assert value(found, "hetlb_config_reloads_total", result="refused") == 1


async def test_the_series_of_an_instance_end_with_it(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two:
        async with serving(tmp_path, document(one, two, admin={"registration": True})) as running:
            for _ in range(4):
                await running.ask()
            assert b'server="i1"' in (await running.admin("GET", "/metrics")).body
            await running.admin("DELETE", "/v1/fleet/instances/i1")
            reply = await running.admin("GET", "/metrics")
            assert b'server="i1"' not in reply.body
            assert value(parsed(reply.body.decode()), "hetlb_requests_total", outcome="ok") == 4


# --- the page alone ---


def source(count: int, totals: Totals | None = None, **more: Any) -> FleetService:
    scheduler = make_scheduler([spec(f"node-{number:03}") for number in range(count)], "hetlb")
    scheduler.on_scrape("node-000", EngineSample(3, 1, 0.25), 10.0)
    watch = SimpleNamespace(invalid_samples={"node-001": 4})
    return cast(
        FleetService,
        SimpleNamespace(
            scheduler=scheduler, totals=totals or Totals(), watch=watch, lost_lines=7,
            now=lambda: 12.5, workers=(), recent=Recent(), reload_refused="", waiting_elsewhere=({}, 0),
            **{"sharing": None, **more},
        ),
    )  # fmt: skip


def written(about: FleetService) -> dict[str, Metric]:
    return parsed("".join(MetricsPage(about).pieces()))


def test_gauges_say_what_the_scheduler_believes() -> None:
    about = source(2)
    about.scheduler.on_arrival(request(1, prompt=100, max_tokens=50), 11.0)
    found = written(about)
    busy = next(each for each in about.scheduler.instances if each.in_flight)
    assert value(found, "hetlb_instance_in_flight", server=busy.name) == 1
    assert value(found, "hetlb_instance_workload_seconds", server=busy.name) == busy.work_s > 0
    assert value(found, "hetlb_instance_kv_reserved_tokens", server=busy.name) == busy.kv_tokens > 0
    assert value(found, "hetlb_instance_kv_cache_tokens", server="node-001") == 10_000
    assert value(found, "hetlb_instance_kv_reported_ratio", server="node-000") == 0.25
    assert value(found, "hetlb_instance_signal_age_seconds", server="node-000") == 2.5
    assert value(found, "hetlb_instance_invalid_samples_total", server="node-001") == 4
    assert value(found, "hetlb_log_lost_lines_total") == 7
    # What was never reported has no series.
    assert len(found["hetlb_instance_kv_reported_ratio"].samples) == 1


def test_a_server_that_is_down_reports_nothing() -> None:
    """Its last figures stood for hours: "KV cache 97 %" of a server that was gone."""
    about = source(1)
    down = about.scheduler.instances[0]
    down.evidence.health.state = Health.EJECTED
    gauges = [
        f"hetlb_instance_{name}" for name in ("kv_reported_ratio", "reported_running", "reported_waiting")
    ]
    assert all(written(about)[name].samples for name in gauges)
    assert reported(down, 10.0 + SIGNAL_STALE_S) is down.sample
    cast(Any, about).now = lambda: 10.5 + SIGNAL_STALE_S
    assert not any(written(about)[name].samples for name in gauges)
    assert value(written(about), "hetlb_instance_signal_age_seconds", server="node-000") == 5.5
    down.evidence.health.state = Health.UP
    assert value(written(about), "hetlb_instance_kv_reported_ratio", server="node-000") == 0.25


def test_the_oldest_in_the_queue() -> None:
    about = source(1)
    assert value(written(about), "hetlb_oldest_wait_seconds") == 0
    assert about.scheduler.queue.has_room(request(1))
    for number, at in ((1, 4.0), (2, 9.0)):
        about.scheduler.queue.push(request(number, body_bytes=10), at)
    found = written(about)
    assert value(found, "hetlb_oldest_wait_seconds") == 8.5
    assert (value(found, "hetlb_queue_requests"), value(found, "hetlb_queue_bytes")) == (2, 20)


def test_a_name_with_quotes_and_line_ends_stays_one_label() -> None:
    totals = Totals()
    name = 'org/"odd"\\name\nwith lines'
    totals.model(name).ttft.observe(0.2)
    found = written(source(1, totals))
    assert value(found, "hetlb_time_to_first_token_seconds_sum", model=name.replace("\n", "?")) == 0.2


def test_adapters_without_end_share_the_last_label() -> None:
    totals = Totals()
    for number in range(3 * MAX_MODELS):
        totals.model(f"adapter-{number}").ttft.observe(1.0)
    found = written(source(1, totals))
    models = {sample.labels["model"] for sample in found["hetlb_time_to_first_token_seconds"].samples}
    assert len(models) == MAX_MODELS + 1
    assert value(found, "hetlb_time_to_first_token_seconds_count", model="other") == 2 * MAX_MODELS


async def test_a_large_page_lets_the_loop_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "SLICE_S", 0.0)
    about = source(200)
    about.totals.instances["node-003"].ended(Outcome.OK)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    body = await MetricsPage(about).render()
    counting.cancel()
    assert turns > 30
    assert len(parsed(body.decode())["hetlb_instance_state"].samples) == 600


def test_a_shared_view_is_told_of_where_there_is_one() -> None:
    found = written(source(1, sharing=SHARING))
    names = ("connected", "peers", "peer_leases", "delay_seconds")
    assert [value(found, f"hetlb_shared_{name}") for name in names] == [1, 2, 17, 0.004]
    assert value(found, "hetlb_shared_messages_total", direction="received") == 300
    assert not [name for name in written(source(1)) if name.startswith("hetlb_shared")]
