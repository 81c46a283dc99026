"""Instances by DNS names."""

from typing import Any

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import DiscoveryTable
from hetlb.options.dns.dns_table import DnsTable, check_serving

TABLES: dict[str, Any] = {"dns": tuple[DnsTable | str, ...]}


def hook(_: Fleet, table: DiscoveryTable) -> list[Any]:
    """Return the sources of `discovery.dns`; their package is one of an extra."""
    from hetlb.options.dns.dns_names import DnsSource

    return [DnsSource(DnsTable(name=each) if isinstance(each, str) else each) for each in table.dns]


__all__ = ["TABLES", "check_serving", "hook"]
