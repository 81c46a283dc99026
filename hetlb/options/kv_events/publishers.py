"""Publishers of KV events, as the fleet file states them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from hetlb.balancer.config.fleet import Fleet
from hetlb.errors import ConfigError
from hetlb.inputs.urls import check_publisher


class KvEventsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Source of vLLM's KV events (`--kv-events-config`): ZeroMQ addresses."""

    endpoint: str
    replay: str | None = None


def publisher_of(stated: str | KvEventsTable | None) -> KvEventsTable | None:
    """Return the publisher of an instance, None without one."""
    return KvEventsTable(endpoint=stated) if isinstance(stated, str) else stated


def mistakes(fleet: Fleet) -> Iterator[str]:
    """Yield a line for each address that is none."""
    for m, model in enumerate(fleet.file.models):
        for i, instance in enumerate(model.instances):
            key, publisher = f"models[{m}].instances[{i}].kv_events", publisher_of(instance.kv_events)
            if publisher is None:
                continue
            try:
                check_publisher(publisher.endpoint, key)
                if publisher.replay is not None:
                    check_publisher(publisher.replay, f"{key}.replay")
            except ConfigError as error:
                yield str(error)
