"""The sources of instances that a fleet file names."""

from __future__ import annotations

from pathlib import Path

from hetlb.config.discovery import DiscoveryTable, KubernetesTable
from hetlb.config.fleet import Fleet
from hetlb.proxy.discovery.dns_names import DnsSource
from hetlb.proxy.discovery.file_source import FileSource
from hetlb.proxy.discovery.inference_pool import InferencePoolSource
from hetlb.proxy.discovery.kubernetes import KubernetesSource
from hetlb.proxy.discovery.source import Source


def sources_of(fleet: Fleet, table: DiscoveryTable) -> list[Source]:
    """All of `discovery:`. Raises `ConfigError`."""
    paths = [fleet.base / each for each in table.files]
    sources: list[Source] = []
    if others := [each for each in paths if fleet.path is None or each.resolve() != fleet.path.resolve()]:
        sources.append(FileSource(others, table.poll_s))
    sources += [DnsSource(each) for each in table.names]
    sources += [_of_cluster(each, fleet.base) for each in table.clusters]
    return sources


def _of_cluster(table: KubernetesTable, base: Path) -> Source:
    if table.resource == "inferencepools":
        return InferencePoolSource(table, base)
    return KubernetesSource(table, base)
