"""The sources of instances that a fleet file names."""

from __future__ import annotations

from hetlb.config.discovery import DiscoveryTable
from hetlb.config.fleet import Fleet
from hetlb.proxy.discovery.dns_names import DnsSource
from hetlb.proxy.discovery.file_source import FileSource
from hetlb.proxy.discovery.inference_pool import InferencePoolSource
from hetlb.proxy.discovery.kubernetes import KubernetesSource
from hetlb.proxy.discovery.source import Source


def sources_of(fleet: Fleet, table: DiscoveryTable) -> list[Source]:
    """All of `discovery:`. Raises `ConfigError`."""
    sources: list[Source] = []
    paths = [fleet.base / each for each in table.files]
    if others := [each for each in paths if fleet.path is None or each.resolve() != fleet.path.resolve()]:
        sources.append(FileSource(others, table.poll_s))
    sources += [DnsSource(each) for each in table.names]
    for each in table.clusters:
        kind = InferencePoolSource if each.resource == "inferencepools" else KubernetesSource
        sources.append(kind(each, fleet.base))
    return sources
