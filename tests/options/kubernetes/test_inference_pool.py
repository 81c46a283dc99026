"""An InferencePool and its objectives, against the small API server of these tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import HANG_S, turns_until
from options.kubernetes.conftest import Cluster, serving
from options.kubernetes.test_kubernetes import Seen, pod

from hetlb.balancer.config.fleet_tables import KubernetesTable
from hetlb.balancer.fleet.source import Sources
from hetlb.errors import ConfigError
from hetlb.options.kubernetes.inference_pool import InferencePoolSource, ObjectiveSource


def pool(name: str, labels: dict[str, str], *ports: int) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": labels},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "hetlb-picker", "port": {"number": 9002}},
        },
    }


def labelled(name: str, **labels: str) -> dict[str, Any]:
    return pod(name, metadata={"labels": labels})


def table(url: str, **fields: Any) -> KubernetesTable:
    given = {"api_server": url, "namespace": "prod", "resource": "inferencepools", "pool": "qwen", **fields}
    return KubernetesTable(**given)


@asynccontextmanager
async def watching(cluster: Cluster, **fields: Any) -> AsyncIterator[Seen]:
    async with serving(cluster.handle) as url:
        seen = Seen()
        sources = Sources([InferencePoolSource(table(url, **fields), Path())], seen)
        await sources.start(HANG_S)
        try:
            yield seen
        finally:
            await sources.close()
            for kind in cluster.kinds.values():
                await kind.cut()


async def test_the_pods_of_a_pool_are_its_instances() -> None:
    cluster = Cluster("inferencepools", "pods")
    pools, pods = cluster.kinds["inferencepools"], cluster.kinds["pods"]
    await pools.put(pool("qwen", {"app": "vllm"}, 8000))
    await pools.put(pool("other", {"app": "other"}, 1))
    await pods.put(labelled("a", app="vllm", gpu="H100"))
    await pods.put(labelled("bb", app="other"))
    await pods.put({**labelled("ccc", app="vllm"), "status": {"podIP": "10.0.0.3", "conditions": []}})
    async with watching(cluster, model="m") as seen:
        assert [(each.name, each.url, each.model) for each in seen.found] == [
            ("a", "http://10.0.0.1:8000", "m")
        ]
        assert seen.found[0].labels["gpu"] == "H100"
        await pods.put(labelled("ccc", app="vllm"))
        await turns_until(lambda: seen.names == ["a", "ccc"])
        await pods.delete("a")
        await turns_until(lambda: seen.names == ["ccc"])
    assert cluster.paths == {
        "/apis/inference.networking.k8s.io/v1/namespaces/prod/inferencepools",
        "/api/v1/namespaces/prod/pods",
    }


async def test_each_port_of_a_pod_is_an_instance() -> None:
    cluster = Cluster("inferencepools", "pods")
    await cluster.kinds["inferencepools"].put(pool("qwen", {"app": "vllm"}, 8000, 8001))
    await cluster.kinds["pods"].put(labelled("a", app="vllm"))
    async with watching(cluster) as seen:
        assert {each.name: each.url for each in seen.found} == {
            "a-rank-0": "http://10.0.0.1:8000",
            "a-rank-1": "http://10.0.0.1:8001",
        }


async def test_a_pool_that_changes_comes_late_or_goes() -> None:
    cluster = Cluster("inferencepools", "pods")
    pools, pods = cluster.kinds["inferencepools"], cluster.kinds["pods"]
    await pods.put(labelled("a", app="vllm"))
    await pods.put(labelled("bb", app="next"))
    async with watching(cluster) as seen:
        assert seen.names == []
        await pools.put(pool("qwen", {"app": "vllm"}, 8000))
        await turns_until(lambda: seen.names == ["a"])
        lists = pods.lists
        await pools.put(pool("qwen", {"app": "vllm"}, 8000))  # the same again
        await pods.put(labelled("aaaa", app="vllm"))
        await turns_until(lambda: seen.names == ["a", "aaaa"])
        assert pods.lists == lists
        await pools.put(pool("qwen", {"app": "next"}, 9000))
        await turns_until(lambda: [each.url for each in seen.found] == ["http://10.0.0.2:9000"])
        await pools.delete("qwen")
        await turns_until(lambda: seen.names == [])


async def test_a_cluster_without_pools_is_told_of_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Cluster("pods").handle) as url:
        seen = Seen()
        sources = Sources([InferencePoolSource(table(url), Path())], seen)
        await sources.start(0.2)
        await turns_until(lambda: "inferencepools answers 404" in caplog.text)
        assert seen.times == 0
        await sources.close()
    assert "inferencepools answers 404: Not Found; its last list stays in force" in caplog.text


async def test_priorities_come_from_the_pools_objectives() -> None:
    def objective(name: str, pool: str, **spec: int) -> dict[str, Any]:
        return {"metadata": {"name": name}, "spec": {"poolRef": {"name": pool}, **spec}}

    cluster = Cluster("inferenceobjectives")
    kind = cluster.kinds["inferenceobjectives"]
    await kind.put(objective("critical", "qwen", priority=10))
    await kind.put(objective("batch", "qwen", priority=-1))
    await kind.put(objective("unranked", "qwen"))
    await kind.put(objective("theirs", "other", priority=5))
    known: dict[str, int] = {}

    def take(priorities: Any) -> None:
        known.clear()
        known.update(priorities)

    async with serving(cluster.handle) as url:
        seen = Seen()
        sources = Sources([ObjectiveSource(table(url), Path(), take)], seen)
        await sources.start(HANG_S)
        await turns_until(lambda: known == {"critical": 10, "batch": -1})
        await kind.put(objective("batch", "qwen", priority=-7))
        await kind.delete("critical")
        await turns_until(lambda: known == {"batch": -7})
        assert seen.names == []
        await sources.close()
        await kind.cut()


def test_a_pool_without_a_name_is_a_mistake() -> None:
    fields = KubernetesTable(resource="inferencepools", api_server="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"kubernetes\.pool: expected the name of an InferencePool"):
        InferencePoolSource(fields, Path())
