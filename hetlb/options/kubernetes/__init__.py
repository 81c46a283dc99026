"""Instances by Kubernetes' API."""

from collections.abc import Callable, Mapping
from typing import Any

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import DiscoveryTable
from hetlb.options.kubernetes.cluster_tables import KubernetesTable, check_serving, clusters

TABLES: dict[str, Any] = {"kubernetes": KubernetesTable | tuple[KubernetesTable, ...]}


def hook(
    fleet: Fleet, table: DiscoveryTable, objectives: Callable[[Mapping[str, int]], None] | None = None
) -> list[Any]:
    """Return the sources of `discovery.kubernetes`, or sources of priorities, which `objectives` takes."""
    from hetlb.options.kubernetes.inference_pool import InferencePoolSource, ObjectiveSource
    from hetlb.options.kubernetes.kubernetes import KubernetesSource

    stated = clusters(table.kubernetes)
    pools = [each for each in stated if each.resource == "inferencepools"]
    if objectives is not None:
        return [ObjectiveSource(each, fleet.base, objectives) for each in pools]
    return [(InferencePoolSource if each in pools else KubernetesSource)(each, fleet.base) for each in stated]


__all__ = ["TABLES", "check_serving", "hook"]
