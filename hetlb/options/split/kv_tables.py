"""Hand-over of KV blocks as the fleet file states it."""

from __future__ import annotations

from typing import Final

from hetlb.balancer.config.fleet_tables import KvTransferTable
from hetlb.balancer.core.types import Connector, KvLink

#: vLLM's own default: `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`.
MOONCAKE_LEASE_S: Final = 480.0


def kv_link(stated: str | KvTransferTable, kv_bytes_per_token: float | None) -> KvLink:
    """Return the KV connector of an instance; the bytes per token default to the profile's."""
    table = KvTransferTable(connector=stated) if isinstance(stated, str) else stated  # type: ignore[arg-type]
    connector = Connector(table.connector)
    figures = {
        "lease_s": table.lease_s or (MOONCAKE_LEASE_S if connector is Connector.MOONCAKE else None),
        "bytes_per_token": table.bytes_per_token or kv_bytes_per_token,
        "bandwidth_bytes_per_s": table.bandwidth_bytes_per_s,
        "latency_s": table.latency_s,
    }
    return KvLink(connector, **{key: float(value) for key, value in figures.items() if value is not None})


hook = kv_link
