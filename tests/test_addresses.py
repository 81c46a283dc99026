"""Addresses that others name: one rule for an address in all its forms."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.addresses import is_loopback, is_special, listening_place

SPECIAL = st.one_of(
    st.ip_addresses(network="169.254.0.0/16"),
    st.ip_addresses(network="224.0.0.0/4"),
    st.sampled_from([ipaddress.IPv4Address(n) for n in (0, 2**32 - 1, 0x646464C8, 0xA83F8110)]),
)  # fmt: skip
USUAL = st.one_of(*(st.ip_addresses(network=net) for net in ("10.0.0.0/8", "127.0.0.0/8", "192.168.0.0/16")))
#: Forms of IPv6 that lead to an IPv4 address: mapped, NAT64, 6to4, ISATAP, compatible.
FORMS = st.sampled_from(["::ffff:{}", "64:ff9b::{}", "2002:{:x}:{:x}::1", "2001:db8::5efe:{}"])


def written(form: str, address: ipaddress.IPv4Address) -> str:
    number = int(address)
    return form.format(number >> 16, number & 0xFFFF) if ":x}" in form else form.format(address)


@given(address=SPECIAL, form=FORMS)
def test_no_form_of_a_special_address_is_a_server_s(address: ipaddress.IPv4Address, form: str) -> None:
    assert is_special(str(address))
    assert is_special(written(form, address))


@given(address=USUAL, form=FORMS)
def test_loopback_and_private_addresses_are_usual(address: ipaddress.IPv4Address, form: str) -> None:
    assert not is_special(str(address))
    assert not is_special(written(form, address))
    assert is_loopback(str(address)) == is_loopback(written(form, address)) == address.is_loopback


@given(st.ip_addresses(v=6, network="fe80::/10") | st.ip_addresses(v=6, network="ff00::/8"))
def test_link_local_and_multicast_of_ipv6(address: ipaddress.IPv6Address) -> None:
    assert is_special(str(address))
    assert is_special(f"{address}%eth0")


@pytest.mark.parametrize(
    "name", ["", "localhost", "gpu-a", "169.254.169.254.example", "2852039166", "0x7f.1"]
)
def test_a_name_is_judged_by_its_address(name: str) -> None:
    assert not is_special(name)


@pytest.mark.parametrize(("host", "families"), [("::", 2), ("127.0.0.1", 1)])
async def test_the_unspecified_address_of_ipv6_takes_both_families(host: str, families: int) -> None:
    try:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, **listening_place(host, 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    port = server.sockets[0].getsockname()[1]
    found = 0
    for address in ("127.0.0.1", "::1"):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(address, port)
            writer.close()
            found += 1
    assert found == families
    server.close()


@pytest.mark.parametrize("host", ["a" * 300, "a..b", ".a"])
def test_a_host_that_can_be_no_name_is_an_error_of_the_address(host: str) -> None:
    """It was a traceback of the codec of names."""
    with pytest.raises(OSError, match="no name"):
        listening_place(host, 0)
