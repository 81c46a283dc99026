"""Hand-over of KV blocks as the fleet file states it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import InstanceTable, ModelTable
from hetlb.balancer.core.types import Connector, KvLink
from hetlb.inputs.urls import bracketed, check_url
from hetlb.inputs.yaml_file import NonNegative, Positive

#: vLLM's own defaults: `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`, `VLLM_MOONCAKE_BOOTSTRAP_PORT`.
MOONCAKE_LEASE_S: Final = 480.0
MOONCAKE_BOOTSTRAP_PORT: Final = 8998

ConnectorName: TypeAlias = Literal["nixl", "mooncake"]


class KvTransferTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Hand-over of KV blocks between instances of a model: the connector of vLLM, and its figures.

    `lease_s` is the engines' `kv_lease_duration` (Mooncake: `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`), whole
    seconds in vLLM. The others are the first estimate of a transfer's time.
    """

    connector: ConnectorName
    lease_s: Annotated[float, msgspec.Meta(ge=1)] | None = None
    bytes_per_token: Positive | None = None
    bandwidth_bytes_per_s: Positive | None = None
    latency_s: NonNegative | None = None


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


def mistakes(fleet: Fleet) -> Iterator[str]:
    """Yield a line for each role with which the instances of a model cannot serve requests."""
    for m, model in enumerate(fleet.file.models):
        yield from _role_mistakes(model, f"models[{m}]")


def _role_mistakes(model: ModelTable, key: str) -> Iterator[str]:
    roles = [instance.role for instance in model.instances]
    if model.kv_transfer is None:
        for i, role in enumerate(roles):
            if role != "both":
                yield f"{key}.instances[{i}].role: expected both where there is no kv_transfer, got {role!r}"
    elif all(role == "prefill" for role in roles):
        yield f"{key}.instances: expected one with the role decode or both, got none"


hook = kv_link
