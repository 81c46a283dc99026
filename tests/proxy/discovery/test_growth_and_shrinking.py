"""A fleet of 2, 8 and 3 instances under load, by each source: no client notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from proxy.discovery.conftest import ApiServer, NameServer, converged, load
from proxy.services import Engine, serving

SIZES = (2, 8, 3)


def fleet(**discovery: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": 0},
        "policy": {"name": "rr"},
        "health": {"slow_start_s": 0},
        "scrape": {"interval_s": 0.05},
        "proxy": {"request_log": False},
        "models": [{"name": "m", "instances": []}],
        "discovery": {"poll_s": 0.05, **discovery},
    }


def instance_file(path: Path, engines: list[Engine]) -> None:
    """Write a file as careful programs do: under another name, then moved to its place."""
    instances = [{"name": f"e{n}", "url": engine.url} for n, engine in enumerate(engines)]
    written = path.with_name(f".{path.name}")
    written.write_text(yaml.safe_dump({"models": [{"name": "m", "instances": instances}]}))
    written.replace(path)


async def test_by_files(tmp_path: Path, engines: list[Engine]) -> None:
    folder = tmp_path / "instances.d"
    folder.mkdir()
    instance_file(folder / "a.yaml", engines[:2])
    async with serving(tmp_path, fleet(files=["instances.d"])) as running, load(running):
        for size in SIZES:
            instance_file(folder / "a.yaml", engines[:size])
            await converged(running, engines, size)


async def test_by_the_fleet_file_itself(tmp_path: Path, engines: list[Engine]) -> None:
    document = {**fleet(), "watch": True}

    def write(size: int) -> dict[str, Any]:
        instances = [{"name": f"e{n}", "url": engine.url} for n, engine in enumerate(engines[:size])]
        document["models"] = [{"name": "m", "instances": instances}]
        return document

    async with serving(tmp_path, write(2)) as running, load(running):
        for size in SIZES:
            running.rewrite(write(size))
            await converged(running, engines, size)


async def test_by_dns(tmp_path: Path, engines: list[Engine], name_server: NameServer) -> None:
    def answer(size: int) -> None:
        ports = [engine.url.rpartition(":")[2] for engine in engines[:size]]
        name_server.records["engines.test", "SRV"] = [f"0 1 {port} localhost." for port in ports]

    answer(2)
    table = {"name": "engines.test", "type": "SRV", "model": "m", "servers": [name_server.address]}
    async with serving(tmp_path, fleet(dns=[{**table, "interval_s": 0.05}])) as running, load(running):
        for size in SIZES:
            answer(size)
            await converged(running, engines, size)


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
