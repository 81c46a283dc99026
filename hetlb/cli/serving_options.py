"""The options of `hetlb serve` and `hetlb pick`: each is imported when a fleet first uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hetlb.balancer.option_record import Options

if TYPE_CHECKING:
    from hetlb.balancer.config.fleet import Fleet
    from hetlb.balancer.config.fleet_tables import DiscoveryTable, TracingTable
    from hetlb.balancer.core.block_index import KvEventBatch
    from hetlb.balancer.core.facts import InstanceChange
    from hetlb.balancer.core.placement import Splitting
    from hetlb.balancer.core.scheduler import Scheduler
    from hetlb.balancer.core.types import Command
    from hetlb.balancer.engines.engine_pools import EnginePools
    from hetlb.balancer.exchange.driver import Driver, Handshake, Splits
    from hetlb.balancer.fleet.shared_fleet import SleepWatch
    from hetlb.balancer.fleet.source import Source
    from hetlb.balancer.http.http1 import RequestHead
    from hetlb.balancer.option_record import (
        CacheReports,
        Resumption,
        SchedulerLog,
        SpanMaker,
    )


def _splitting(scheduler: Scheduler) -> Splitting:
    from hetlb.options.split.hand_overs import HandOvers

    return HandOvers(scheduler)


def _splits(driver: Driver, scheduler: Scheduler, carry_out: Callable[[list[Command]], None]) -> Splits:
    from hetlb.options.split.kv_transfers import KvTransfers

    return KvTransfers(driver, scheduler, carry_out)


def _resumption(driver: Driver) -> Resumption:
    from hetlb.options.resume.resumed import resumption

    return resumption(driver)


def _handshake(driver: Driver, head: RequestHead, body: bytes, open_to_all: bool) -> Handshake:
    from hetlb.options.tunnel.realtime import TunnelHandshake

    return TunnelHandshake(driver, head, body, open_to_all=open_to_all)


def _spans(table: TracingTable) -> SpanMaker:
    from hetlb.options.tracing.tracing import Tracing

    return Tracing(table)


def _event_log(path: Path) -> SchedulerLog:
    from hetlb.options.event_log.log_file import EventLog

    return EventLog(path)


def _sources(fleet: Fleet, table: DiscoveryTable) -> list[Source]:
    found: list[Source] = []
    if table.files:
        from hetlb.options.instance_files.file_source import sources_of

        found += sources_of(fleet, table)
    if table.dns:
        from hetlb.options.dns.dns_names import DnsSource

        found += [DnsSource(each) for each in table.names]
    if table.kubernetes:
        from hetlb.options.kubernetes.inference_pool import InferencePoolSource, is_pool
        from hetlb.options.kubernetes.kubernetes import KubernetesSource

        for each in table.clusters:
            found.append((InferencePoolSource if is_pool(each) else KubernetesSource)(each, fleet.base))
    return found


def _objectives(
    fleet: Fleet, table: DiscoveryTable, take: Callable[[Mapping[str, int]], None]
) -> list[Source]:
    from hetlb.options.kubernetes.inference_pool import ObjectiveSource, is_pool

    return [ObjectiveSource(each, fleet.base, take) for each in table.clusters if is_pool(each)]


def _cache_reports(on_events: Callable[[str, KvEventBatch], None]) -> CacheReports:
    from hetlb.options.kv_events.kv_events import KvEventReader

    return KvEventReader(on_events)


def _sleep_watch(
    scheduler: Scheduler, change: Callable[[InstanceChange], None], pools: EnginePools
) -> SleepWatch:
    from hetlb.options.peers import sleep_news  # noqa: F401  (for a process that takes this one's place)
    from hetlb.options.wake.waker import Waker

    return Waker(scheduler, change, pools, asyncio.get_running_loop().time)


OPTIONS = Options(
    splitting=_splitting,
    splits=_splits,
    resumption=_resumption,
    handshake=_handshake,
    spans=_spans,
    event_log=_event_log,
    sources=_sources,
    objectives=_objectives,
    cache_reports=_cache_reports,
    sleep_watch=_sleep_watch,
)
