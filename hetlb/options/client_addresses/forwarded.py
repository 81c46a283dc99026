"""Reading of `X-Forwarded-For`, which only trusted proxies are believed."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator

from hetlb.balancer.clients.access import network_of
from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.http.http1 import RequestHead
from hetlb.errors import ConfigError


class ForwardedAddresses:
    """Addresses that proxies in these networks (CIDR) tell."""

    def __init__(self, networks: Iterable[str]) -> None:
        self._trusted = tuple(ipaddress.ip_network(each) for each in networks)

    def of(self, head: RequestHead, peer: str) -> str:
        """Return the client's address: of `peer` and `X-Forwarded-For` the last that is no trusted proxy."""
        forwarded = head.fields.get(b"x-forwarded-for")
        if forwarded is None:
            return peer
        for text in [peer, *reversed(forwarded.decode("latin-1").split(","))]:
            text = text.strip()
            try:
                address = ipaddress.ip_address(text)
            except ValueError:
                break
            peer = str(address)
            if not any(address in network for network in self._trusted):
                break
        return peer


def mistakes(fleet: Fleet) -> Iterator[str]:
    """Yield a line for each text that is no network."""
    for text in fleet.file.proxy.trusted_proxies:
        try:
            network_of(text, "proxy.trusted_proxies")
        except ConfigError as error:
            yield str(error)
