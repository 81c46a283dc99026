"""A fleet of 2, 8 and 3 instances under load, by Kubernetes: no client notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from options.kubernetes.conftest import ApiServer
from proxy.growing import SIZES, converged, fleet, load
from proxy.services import Engine, serving


async def test_by_kubernetes(
    tmp_path: Path, engines: list[Engine], api_server: tuple[ApiServer, str]
) -> None:
    server, url = api_server
    have = 0

    async def scale(size: int) -> None:
        nonlocal have
        for n in range(have, size):
            await server.put(pod(f"vllm-{n}", engines[n]))
        for n in range(size, have):
            await server.delete(f"vllm-{n}")
        have = size

    await scale(2)
    source = {"api_server": url, "namespace": "prod", "selector": "app=vllm", "port": "http", "model": "m"}
    async with serving(tmp_path, fleet(kubernetes=source)) as running, load(running):
        for size in SIZES:
            await scale(size)
            await converged(running, engines, size)


def pod(name: str, engine: Engine, **more: Any) -> dict[str, Any]:
    port = int(engine.url.rpartition(":")[2])
    return {
        "metadata": {"name": name, "labels": {"app": "vllm"}},
        "spec": {
            "containers": [{"ports": [{"name": "http", "containerPort": port}]}],
            "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
        },
        "status": {
            "podIP": "127.0.0.1",
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
        **more,
    }
