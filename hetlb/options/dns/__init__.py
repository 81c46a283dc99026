"""Instances by DNS names."""

from hetlb.balancer.config.discovery import DiscoveryTable
from hetlb.balancer.config.fleet import Fleet
from hetlb.options.dns.dns_names import DnsSource


def hook(_: Fleet, table: DiscoveryTable) -> list[DnsSource]:
    """Return the sources of `discovery.dns` and `discovery.ray`."""
    return [DnsSource(each) for each in table.names]
