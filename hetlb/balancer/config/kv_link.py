"""The KV connector of an instance, by the tables of the fleet file."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from hetlb.balancer.config.fleet_tables import InstanceTable, KvTransferTable
from hetlb.balancer.core.types import Connector, KvLink
from hetlb.inputs.urls import bracketed, check_url

#: vLLM's own defaults: `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`, `VLLM_MOONCAKE_BOOTSTRAP_PORT`.
MOONCAKE_LEASE_S: Final = 480.0
MOONCAKE_BOOTSTRAP_PORT: Final = 8998


def kv_link(
    stated: str | KvTransferTable, instance: InstanceTable, key: str, kv_bytes_per_token: float | None
) -> KvLink:
    """Return the KV connector of the instance at `key`; the bytes per token default to its profile's.

    Raises `ConfigError`.
    """
    table = KvTransferTable(connector=stated) if isinstance(stated, str) else stated  # type: ignore[arg-type]
    connector = Connector(table.connector)
    figures = {
        "lease_s": table.lease_s or (MOONCAKE_LEASE_S if connector is Connector.MOONCAKE else None),
        "bytes_per_token": table.bytes_per_token or kv_bytes_per_token,
        "bandwidth_bytes_per_s": table.bandwidth_bytes_per_s,
        "latency_s": table.latency_s,
    }
    known = {key: float(value) for key, value in figures.items() if value is not None}
    return KvLink(connector, **known, bootstrap=_bootstrap(instance, key, connector))


def _bootstrap(instance: InstanceTable, key: str, connector: Connector) -> str | None:
    """Return the URL of an instance's bootstrap server, None where its connector has none."""
    if instance.kv_bootstrap is not None:
        return check_url(instance.kv_bootstrap, f"{key}.kv_bootstrap")
    if connector is not Connector.MOONCAKE or instance.url is None:
        return None
    return f"http://{bracketed(urlsplit(instance.url).hostname or '')}:{MOONCAKE_BOOTSTRAP_PORT}"
