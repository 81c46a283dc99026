"""The watcher: what it reports of good, silent, broken and absent engines, and that it goes on."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from helpers import HANG_S, free_port, make_scheduler, spec

from hetlb.balancer.config.fleet_tables import ScrapeTable
from hetlb.balancer.core.evidence.evidence import Evidence
from hetlb.balancer.core.facts import (
    CapacityLearned,
    EngineSample,
    InstanceChange,
    ModelsLearned,
    Probed,
    ProbeResult,
)
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import InstanceSpec
from hetlb.balancer.engines.engine_metrics import EnginePage
from hetlb.balancer.engines.rounds import Looked
from hetlb.balancer.engines.scrape import EngineWatch
from hetlb.balancer.engines.upstream import UnansweredError
from hetlb.balancer.exchange.scheduler_driver import SchedulerDriver
from hetlb.served_models import read_model_list, read_version

PAGE = (Path(__file__).parents[1] / "vllm" / "data" / "metrics-busy.http").read_text()
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def stub(**handlers: Handler) -> AsyncIterator[str]:
    """An engine that answers what the handlers say, by path without its slashes."""
    app = web.Application()
    for name, handler in handlers.items():
        app.router.add_get("/" + name.replace("__", "/"), handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Watch:
    """A watch over servers, and what it reported."""

    def __init__(self, urls: tuple[str, ...], timeout_s: float) -> None:
        self.changes: list[InstanceChange] = []
        self.samples: list[tuple[str, EngineSample]] = []
        self._news = asyncio.Event()
        self._urls = urls
        # The scheduler knows no instance: what the watch reports is kept here.
        scheduling = SimpleNamespace(
            scheduler=make_scheduler([]), change=self._on_change, sample=self._on_sample
        )
        table = ScrapeTable(interval_s=0.05, timeout_s=timeout_s)
        self.watch = EngineWatch(table, cast(SchedulerDriver, scheduling), {})

    async def start(self) -> None:
        """Begin to watch; returns once every server was looked at."""
        await self.watch.start({}, HANG_S)
        for i, url in enumerate(self._urls):
            self.watch.add(f"e{i}", url)
        async with asyncio.timeout(HANG_S):
            for event in list(self.watch._first_looks.values()):
                await event.wait()

    def _on_change(self, change: InstanceChange) -> None:
        self.changes.append(change)
        self._news.set()

    def _on_sample(self, name: str, sample: EngineSample) -> None:
        self.samples.append((name, sample))
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_S):
            while not condition():
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def watching(*urls: str, timeout_s: float = HANG_S) -> AsyncIterator[Watch]:
    watch = Watch(urls, timeout_s)
    await watch.start()
    try:
        yield watch
    finally:
        await watch.watch.close()


async def ok(_: web.Request) -> web.Response:
    return web.Response()


async def page(_: web.Request) -> web.Response:
    return web.Response(text=PAGE.partition("\r\n\r\n")[2] or PAGE)


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m", "max_model_len": 2048}, {"id": "lora"}, {"no": "id"}]})


async def version(_: web.Request) -> web.Response:
    return web.json_response({"version": "0.32.0"})


async def test_a_good_engine_is_known_after_the_first_round() -> None:
    async with stub(health=ok, metrics=page, v1__models=models, version=version) as url:
        async with watching(url) as watch:
            assert Probed("e0", ProbeResult.OK) in watch.changes
            assert ModelsLearned("e0", ("m", "lora")) in watch.changes
            assert any(
                isinstance(change, CapacityLearned) and change.capacity.max_model_len == 2048
                for change in watch.changes
            )
            assert watch.watch.versions == {"e0": "0.32.0"}
            _, sample = watch.samples[0]
            assert sample.running == 64
            assert sample.missing == ()


async def test_an_absent_engine_is_refused_and_comes_back() -> None:
    port = free_port()
    async with watching(f"http://127.0.0.1:{port}") as watch:
        assert watch.changes[0] == Probed("e0", ProbeResult.REFUSED)
        app = web.Application()
        app.router.add_get("/health", ok)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await watch.until(lambda: Probed("e0", ProbeResult.OK) in watch.changes)
        await runner.cleanup()


async def test_a_silent_engine_fails_its_probe_and_delays_no_other() -> None:
    async def silent(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with (
        stub(health=silent) as slow,
        stub(health=ok, metrics=page, v1__models=models, version=version) as good,
        watching(slow, good, timeout_s=0.2) as watch,
    ):
        await watch.until(lambda: Probed("e0", ProbeResult.FAILED) in watch.changes)
        await watch.until(lambda: Probed("e1", ProbeResult.OK) in watch.changes and watch.samples)
        assert {name for name, _ in watch.samples} == {"e1"}


@pytest.mark.parametrize(
    "body", ["<html>hello</html>", "vllm:num_requests_running NaN\n", "\0" * 100, "vllm:x{" * 10_000]
)
async def test_whatever_the_metrics_page_is_a_sample_comes_out(body: str) -> None:
    async def broken(_: web.Request) -> web.Response:
        return web.Response(text=body)

    async with stub(health=ok, metrics=broken, v1__models=ok, version=ok) as url, watching(url) as watch:
        await watch.until(lambda: len(watch.samples) >= 2)
        assert watch.samples[0][1].running is None


async def test_missing_names_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def empty(_: web.Request) -> web.Response:
        return web.Response(text="")

    async with stub(health=ok, metrics=empty, v1__models=models, version=version) as url:
        async with watching(url) as watch:
            await watch.until(lambda: len(watch.samples) >= 3)
    said = [record.message for record in caplog.records if "does not report" in record.message]
    assert len(said) == 1
    assert "vllm:kv_cache_usage_perc" in said[0]


async def test_no_redirect_is_followed() -> None:
    reached = False

    async def elsewhere(_: web.Request) -> web.Response:
        nonlocal reached
        reached = True
        return web.Response()

    async def redirect(_: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/elsewhere")

    async with stub(health=redirect, elsewhere=elsewhere) as url, watching(url) as watch:
        assert watch.changes[0] == Probed("e0", ProbeResult.FAILED)
    assert not reached


async def test_removed_targets_are_left_alone() -> None:
    async with stub(health=ok, metrics=page, v1__models=models, version=version) as url:
        async with watching(url) as watch:
            watch.watch.remove("e0")
            assert watch.watch.models == {}
            watch.watch.add("e1", url)
            await watch.until(lambda: any(name == "e1" for name, _ in watch.samples))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"data": 5}', b'{"data": [1, {"id": 5}, {"id": ""}]}', b"\xff", b"[" * 100_000]
)
def test_a_model_list_that_is_none(body: bytes) -> None:
    assert read_model_list(body) == []
    assert read_version(body) is None


async def test_what_an_engine_serves_is_known_before_it_is_said_to_be_up() -> None:
    async with stub(health=ok, metrics=page, v1__models=models, version=version) as url:
        async with watching(url) as watch:
            kinds = [type(change) for change in watch.changes]
            assert kinds.index(ModelsLearned) < kinds.index(Probed)


async def test_another_process_at_the_address_is_asked_for_its_models_at_once() -> None:
    began, served, asked = 1.0, "m", 0

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=f"process_start_time_seconds {began}\nvllm:num_requests_running 0\n")

    async def list_of_models(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.json_response({"data": [{"id": served}]})

    async with stub(health=ok, metrics=metrics, v1__models=list_of_models, version=version) as url:
        async with watching(url) as watch:
            await watch.until(lambda: len(watch.samples) >= 3)
            assert asked == 1
            began, served = 2.0, "other"
            await watch.until(lambda: ModelsLearned("e0", ("other",)) in watch.changes)
            assert len(watch.samples) <= 6


async def test_without_a_start_time_the_models_are_read_in_every_round() -> None:
    served = "m"

    async def list_of_models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": served}]})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text="vllm:num_requests_running 0\n")

    async with stub(health=ok, metrics=metrics, v1__models=list_of_models, version=version) as url:
        async with watching(url) as watch:
            served = "other"
            rounds = len(watch.samples)
            await watch.until(lambda: ModelsLearned("e0", ("other",)) in watch.changes)
            assert len(watch.samples) <= rounds + 2


async def test_a_page_of_many_engines_is_read() -> None:
    one = 'vllm:e2e_request_latency_seconds_bucket{engine="%d",le="%d"} 1\n'
    lines = [one % (n, bound) for n in range(32) for bound in range(700)]
    lines += [f'vllm:num_requests_running{{engine="{n}"}} 2\n' for n in range(32)]

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text="".join(lines))

    assert sum(map(len, lines)) > 1 << 20
    async with stub(health=ok, metrics=metrics, v1__models=models, version=version) as url:
        async with watching(url) as watch:
            await watch.until(lambda: bool(watch.samples))
            _, sample = watch.samples[0]
            assert (sample.running, sample.capacity.engines) == (64, 32)


async def test_a_page_that_is_too_large_is_not_read_every_round(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetlb.balancer.engines.scrape.MAX_METRICS_BYTES", 1 << 20)
    asked = 0

    async def metrics(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(text="vllm:num_requests_running 0\n" * 40_000)

    async with stub(health=ok, metrics=metrics, v1__models=models, version=version) as url:
        async with watching(url) as watch:
            probes = watch.changes.count(Probed("e0", ProbeResult.OK))
            await watch.until(lambda: watch.changes.count(Probed("e0", ProbeResult.OK)) >= probes + 3)
            assert asked == 1
            assert not watch.samples
    assert sum("/metrics has more than" in record.getMessage() for record in caplog.records) == 1


def listing(served: list[str]) -> Handler:
    """A list of models that follows `served`."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": each} for each in served]})

    return answer


async def test_an_engine_with_an_empty_list_of_models_loads() -> None:
    served: list[str] = []
    async with stub(health=ok, metrics=page, v1__models=listing(served), version=version) as url:
        async with watching(url) as watch:
            assert watch.changes == [Probed("e0", ProbeResult.LOADING)]
            assert not watch.samples
            served.append("m")
            await watch.until(lambda: Probed("e0", ProbeResult.OK) in watch.changes)
            assert watch.changes.index(ModelsLearned("e0", ("m",))) < watch.changes.index(
                Probed("e0", ProbeResult.OK)
            )
            served.clear()
            before = watch.changes.count(Probed("e0", ProbeResult.LOADING))
            await watch.until(lambda: watch.changes.count(Probed("e0", ProbeResult.LOADING)) > before)


async def test_an_engine_that_is_not_ready_before_it_ever_was_up_loads() -> None:
    async def unavailable(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "Loading model", "code": 503}}, status=503)

    # llama.cpp lists its model while it loads it.
    async with stub(health=unavailable, metrics=unavailable, v1__models=models) as url:
        async with watching(url) as watch:
            assert watch.changes == [Probed("e0", ProbeResult.LOADING)]
            assert watch.changes[0].detail == "loading: /health answers 503"  # type: ignore[union-attr]


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_an_engine_without_a_health_page_is_up_if_it_lists_its_models(status: int) -> None:
    asked: list[str] = []
    served = ["m"]

    @web.middleware
    async def noted(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked.append(request.path)
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return web.Response(status=status, text="no such page")

    app = web.Application(middlewares=[noted])
    app.router.add_get("/v1/models", listing(served))
    app.router.add_get("/api/version", version)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with watching(f"http://127.0.0.1:{runner.addresses[0][1]}") as watch:
        assert Probed("e0", ProbeResult.OK) in watch.changes
        assert watch.watch.versions == {"e0": "0.32.0"}
        count = watch.changes.count(Probed("e0", ProbeResult.OK))
        await watch.until(lambda: watch.changes.count(Probed("e0", ProbeResult.OK)) >= count + 3)
        # A page that it does not have is not asked for in every round.
        assert (asked.count("/health"), asked.count("/metrics")) == (1, 1)
        served.clear()
        await watch.until(lambda: Probed("e0", ProbeResult.LOADING) in watch.changes)
    await runner.cleanup()


async def test_the_first_page_of_an_engine_of_unknown_speed_tells_its_history() -> None:
    text = PAGE + "".join(
        f"vllm:{name} {value}\n"
        for name, value in (
            ("inter_token_latency_seconds_sum", 20.0),
            ("inter_token_latency_seconds_count", 1000),
            ("request_success_total", 10),
            ("prompt_tokens_total", 5000),
        )
    )

    async def told(_: web.Request) -> web.Response:
        return web.Response(text=text)

    async with stub(health=ok, metrics=told, v1__models=models, version=version) as url:
        watch = Watch((url,), HANG_S)
        instance = Instance(InstanceSpec("e0", "m", url), 1, Evidence(random.Random(1), 0.0), 0.0)
        watch.watch._scheduler.fleet.instances["e0"] = instance
        await watch.watch.start({}, HANG_S)
        try:
            await watch.until(lambda: bool(watch.samples))
            instance.sample = watch.samples[0][1]
            await watch.until(lambda: watch.samples[-1][1].history is None)
        finally:
            await watch.watch.close()
    assert watch.samples[0][1].history is not None


async def test_nothing_outlives_a_look() -> None:
    """Pages are large, the frames of an error hold more, and garbage is collected seldom."""
    absent = f"http://127.0.0.1:{free_port()}"
    gc.collect()
    gc.disable()
    try:
        async with stub(health=ok, metrics=page, v1__models=models) as url, watching(url, absent) as watch:
            refused = Probed("e1", ProbeResult.REFUSED)
            await watch.until(lambda: min(len(watch.samples), watch.changes.count(refused)) > 10)
            left = [each for each in gc.get_objects() if isinstance(each, (EnginePage, UnansweredError))]
            assert len(left) <= 4
    finally:
        gc.enable()


async def test_a_slow_network_is_noted_until_answers_over_it_come_fast() -> None:
    """A link without traffic has no queue: it shows nothing."""
    async with stub(health=ok, metrics=page, v1__models=models, version=version) as url:
        async with watching(url) as watch:
            assert 0.0 < watch.watch._pool("e0").round_trip_s() < 1.0  # of the kernel
            [instance] = make_scheduler([spec("e0")]).instances
            seen = Looked()

            def far(trip_s: float) -> float:
                pool = SimpleNamespace(round_trip_s=lambda: trip_s, close=lambda: None)
                watch.watch._pools["e0"] = cast(Any, (pool, None))
                watch.watch._note_network("e0", seen, instance)
                return instance.far_s

            assert [far(each) for each in (0.0, 0.002, 0.015, 0.3, 0.0, 0.001)] == [0, 0, 0, 0.3, 0.3, 0.3]
            instance.in_flight = 1
            assert [far(each) for each in (0.004, 0.1)] == [0, 0.1]
            instance.speed.slowed_since = 5.0
            assert far(0.001) == 0.1
            instance.in_flight = 0
