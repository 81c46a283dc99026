"""Check of server addresses that do not come from the operator's own fleet file.

Registrations, DNS answers, Kubernetes objects, files of instances and routes of stages must not make hetlb
send a key to an address that is no single machine (unspecified, multicast, broadcast) or that hands out
credentials (link-local, metadata), nor to one that embeds such an address (mapped, NAT64, 6to4, Teredo,
ISATAP). Loopback and private addresses are allowed.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from hetlb.errors import ConfigError

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_BROADCAST: Final = ipaddress.IPv4Address(0xFFFFFFFF)
#: Metadata addresses of clouds that are not link-local.
_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in ("100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254")
)
#: IPv6 addresses that lead to the IPv4 address in their last four bytes: translated (RFC 6052, RFC 8215, RFC
#: 2765) and compatible ones (RFC 4291, 2.5.5.1).
_EMBEDDED = tuple(
    ipaddress.IPv6Network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48", "::ffff:0:0:0/96", "::/96")
)
#: Interface identifiers of ISATAP (RFC 5214), in the bytes before the IPv4 address.
_ISATAP = frozenset({0x00005EFE, 0x02005EFE})


def allowed_address(addresses: Iterable[str], networks: tuple[Network, ...]) -> str:
    """Return the first address that an instance may be registered with. Raises `ConfigError`.

    With `networks` it must be in one of them. Special addresses (`is_special`) need a link-local network or
    the address itself in the list.
    """
    refused = ""
    for text in addresses:
        address = _plain(ipaddress.ip_address(text))
        listed = [network for network in networks if address in network]
        if is_special(address):
            allowed = any(network.is_link_local or network.num_addresses == 1 for network in listed)
        else:
            allowed = bool(listed) or not networks
        if allowed:
            return text
        refused = refused or text
    inside = f"one in {', '.join(map(str, networks))}" if networks else "no link-local or metadata address"
    raise ConfigError(f"url: expected an address that may be registered ({inside}), got {refused}")


def is_loopback(host: str) -> bool:
    """Return True for a loopback address in any form and for `localhost`."""
    try:
        return _plain(ipaddress.ip_address(host)).is_loopback
    except ValueError:
        return host == "localhost"


def is_literal(host: str) -> bool:
    """Return True if a host is an address and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def listening_place(host: str, port: int) -> dict[str, Any]:
    """Return the arguments of `create_server` for an address; `::` takes IPv4 too. Raises `OSError`."""
    if host != "::":
        try:
            host.encode("idna")
        except UnicodeError as error:
            raise OSError(errno.EADDRNOTAVAIL, "its host can be no name") from error
        return {"host": host, "port": port, "reuse_address": True}
    sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return {"sock": sock}


def is_special(address: Address | str) -> bool:
    """Return True for an address that no server may have, in any form; False for a name."""
    if isinstance(address, str):
        try:
            address = ipaddress.ip_address(address)
        except ValueError:
            return False
    address = _plain(address)
    return (
        address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address == _BROADCAST
        or address in _METADATA
    )


def refuse_special(address: str) -> None:
    """Raise `OSError` for an address that no server may have."""
    if is_special(address):
        raise OSError(errno.EACCES, f"expected the address of a server, got {address}")


def _plain(address: Address) -> Address:
    """Extract the IPv4 address embedded in an IPv6 one, or return the address itself."""
    if not isinstance(address, ipaddress.IPv6Address):
        return address
    if address.scope_id is not None:
        address = ipaddress.IPv6Address(int(address))
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    embeds = any(address in network for network in _EMBEDDED) and int(address) > 1  # but `::` and `::1`
    if embeds or (int(address) >> 32) & 0xFFFFFFFF in _ISATAP:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def network_of(text: str, where: str) -> Network:
    """Return the network at a key. Raises `ConfigError`."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as caught:
        raise ConfigError(f"{where}: expected networks like 10.0.0.0/8, got {text!r}") from caught
