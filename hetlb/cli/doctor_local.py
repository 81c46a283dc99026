"""Facts of this machine for `hetlb doctor`: ports, a hetlb that runs at them, and its own addresses."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from hetlb.addresses import is_loopback
from hetlb.balancer.config.fleet import Fleet
from hetlb.cli.adminclient import AdminClient
from hetlb.errors import InputError, reason_of
from hetlb.inputs.urls import bracketed, origin

#: Seconds that a publisher of KV events has to take a connection.
_PUBLISHER_S: Final = 2.0
ANY_HOSTS: Final = ("0.0.0.0", "::", "")


def is_own_address(fleet: Fleet, url: str) -> str:
    """Return the listener that a URL leads back to, "listen" or "admin"; "" for none."""
    _, host, port = origin(url)
    for name, table in (("listen", fleet.file.listen), ("admin", fleet.file.admin)):
        here = is_loopback(host) or host in (table.host, socket.gethostname(), socket.getfqdn())
        listens_here = table.host in ANY_HOSTS or is_loopback(table.host) or host == table.host
        if table.port == port and here and listens_here:
            return name
    return ""


def running_instances(fleet: Fleet) -> dict[str, str] | None:
    """Return the instances of a hetlb that runs at the admin address of the file, with their health.

    None where none answers. Raises `InputError` where one asks for a token.
    """
    table = fleet.file.admin
    host = "127.0.0.1" if table.host in ANY_HOSTS else table.host
    if not table.port:
        return None
    try:
        client = AdminClient(f"http://{bracketed(host)}:{table.port}")
        document = client.document("/v1/fleet", "policy", "models")
        every = [each for model in document["models"] for each in model["instances"]]
        return {each["name"]: each["health"] for each in every}
    except InputError as error:
        if "401" in str(error):
            raise
        return None
    except (LookupError, TypeError):
        return None


def closed_ports(fleet: Fleet) -> Iterator[tuple[str, str]]:
    """Yield the listeners that cannot listen, and why: "" where another process holds the port."""
    for name, table in (("listen", fleet.file.listen), ("admin", fleet.file.admin)):
        family = socket.AF_INET6 if ":" in table.host else socket.AF_INET
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind((table.host, table.port))
            except OSError as error:
                taken = error.errno == errno.EADDRINUSE
                yield f"{name}.port {table.port}", "" if taken else f"{table.host}: {reason_of(error)}"


async def publisher_trouble(endpoint: str) -> str:
    """Return why the ZeroMQ address of a publisher takes no connection, "" if it does or is no TCP."""
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp":
        return ""
    try:
        async with asyncio.timeout(_PUBLISHER_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except OSError as error:
        return reason_of(error).lower()
    writer.close()
    return ""


def certificate_trouble(server: ssl.SSLContext, cert: Path) -> str:
    """Return what clients that trust the authority of a listener's certificate find wrong, "" for nothing."""
    client = ssl.create_default_context(cafile=str(cert))
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    for side in 2 * sides:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            return reason_of(error)
    return ""
