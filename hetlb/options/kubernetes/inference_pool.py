"""An InferencePool of the Gateway API Inference Extension (v1): its pods are the instances.

The pool names the pods by labels and their ports; each port of a pod is a server. Another selector begins the
watch of pods anew. Priorities come from the pool's InferenceObjectives, if the cluster has that kind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from hetlb.balancer.config.fleet_tables import KubernetesTable
from hetlb.balancer.fleet.source import Publish
from hetlb.errors import ConfigError
from hetlb.options.kubernetes.kubernetes import PODS, ApiServer, Item, ServersOf, Watch, kind_of, servers_of

_POOLS: Final = kind_of("inference.networking.k8s.io", "v1", "InferencePool")
_OBJECTIVES: Final = kind_of("inference.networking.x-k8s.io", "v1alpha2", "InferenceObjective")


def is_pool(table: KubernetesTable) -> bool:
    """Return True if a source is an InferencePool."""
    return table.resource == "inferencepools"


def pool_of(table: KubernetesTable) -> str:
    if table.pool is None:
        raise ConfigError("discovery.kubernetes.pool: expected the name of an InferencePool, got none")
    return table.pool


class InferencePoolSource:
    """The servers of one pool."""

    def __init__(self, table: KubernetesTable, base: Path) -> None:
        self._table = table
        self._api = ApiServer(table, base)
        self._pool = pool_of(table)
        self.name = f"InferencePool {self._pool} in {self._api.namespace}"

    async def run(self, publish: Publish) -> None:
        #: Labels and ports of the pods; None: there is no pool, or it selects nothing.
        wanted: tuple[dict[str, str], list[int]] | None = {}, []
        changes = asyncio.Event()

        def changed(pools: Mapping[str, Item]) -> None:
            nonlocal wanted
            spec = pools[self._pool].spec if self._pool in pools else None
            labels = spec.selector.match_labels if spec is not None and spec.selector is not None else {}
            found = (
                (labels, [port.number for port in spec.target_ports]) if spec is not None and labels else None
            )
            if found != wanted:
                wanted = found
                changes.set()

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(Watch(self._api, _POOLS, "", changed, self._pool).run())
                while True:
                    await changes.wait()
                    changes.clear()
                    if wanted is None:
                        publish([])
                        continue
                    pods = tasks.create_task(self._watch_pods(*wanted, publish))
                    await changes.wait()
                    pods.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _watch_pods(self, labels: dict[str, str], ports: list[int], publish: Publish) -> None:
        selector = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
        servers = ServersOf(lambda pod: servers_of(pod, ports, self._table))
        await Watch(self._api, PODS, selector, lambda pods: publish(servers(pods))).run()


class ObjectiveSource:
    """Priorities by the names of a pool's objectives; it knows no servers."""

    def __init__(self, table: KubernetesTable, base: Path, take: Callable[[Mapping[str, int]], None]) -> None:
        """`take` gets all priorities after every change. Raises `ConfigError`."""
        self._api = ApiServer(table, base)
        self._pool = pool_of(table)
        self._take = take
        self.name = f"objectives of InferencePool {self._pool} in {self._api.namespace}"

    async def run(self, publish: Publish) -> None:
        publish([])  # nothing waits for it: many clusters do not have the kind
        await Watch(self._api, _OBJECTIVES, "", lambda items: self._take(self._priorities(items))).run()

    def _priorities(self, items: Mapping[str, Item]) -> dict[str, int]:
        return {
            name: item.spec.priority
            for name, item in items.items()
            if item.spec is not None
            and item.spec.priority is not None
            and item.spec.pool_ref is not None
            and item.spec.pool_ref.name == self._pool
        }
