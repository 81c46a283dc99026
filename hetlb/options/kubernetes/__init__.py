"""Instances by Kubernetes' API."""

from collections.abc import Callable, Mapping

from hetlb.balancer.config.discovery import DiscoveryTable
from hetlb.balancer.config.fleet import Fleet
from hetlb.options.kubernetes.inference_pool import InferencePoolSource, ObjectiveSource
from hetlb.options.kubernetes.kubernetes import KubernetesSource
from hetlb.options.source import Source


def hook(
    fleet: Fleet, table: DiscoveryTable, objectives: Callable[[Mapping[str, int]], None] | None = None
) -> list[Source]:
    """Return the sources of `discovery.kubernetes`, or sources of priorities, which `objectives` takes."""
    pools = [each for each in table.clusters if each.resource == "inferencepools"]
    if objectives is not None:
        return [ObjectiveSource(each, fleet.base, objectives) for each in pools]
    return [
        (InferencePoolSource if each in pools else KubernetesSource)(each, fleet.base)
        for each in table.clusters
    ]
