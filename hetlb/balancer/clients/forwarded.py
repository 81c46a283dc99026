"""Reading of `X-Forwarded-For`, which only trusted proxies are believed."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from hetlb.balancer.http.http1 import RequestHead


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
