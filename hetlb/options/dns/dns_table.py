"""DNS names of servers, as the fleet file states them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from hetlb.balancer.config.fleet import Fleet
from hetlb.extras import check_extra
from hetlb.inputs.yaml_file import Positive


class DnsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """DNS name of servers: one per address (A, else AAAA), or one per SRV record.

    Resolved again when the TTL expires, after `interval_s` at the latest. `servers` are name servers (`host`
    or `host:port`), the system's by default.
    """

    name: str
    type: Literal["A", "SRV"] = "A"
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 8000
    scheme: Literal["http", "https"] = "http"
    model: str | None = None
    labels: dict[str, str] = {}
    interval_s: Positive = 1.0
    servers: tuple[str, ...] = ()


def check_serving(fleet: Fleet) -> None:
    """Raise `ConfigError` unless the package is installed."""
    check_extra(f"{fleet.where}discovery.dns", "dns.resolver", "discovery")
