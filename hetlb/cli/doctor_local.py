"""Checks of `hetlb doctor` that ask no engine: the file, this machine, a hetlb that runs there."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from hetlb.addresses import is_loopback
from hetlb.balancer.clients.access import Access
from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import Admin, Listen
from hetlb.balancer.config.gpus import gpu_named
from hetlb.cli.adminclient import AdminClient
from hetlb.errors import ConfigError, InputError, reason_of
from hetlb.files import readable_name
from hetlb.inputs.urls import bracketed, origin

#: Seconds that a publisher of KV events has to take a connection.
_PUBLISHER_S: Final = 2.0
#: Targets below these are of no GPU: they were meant in seconds.
_LEAST_TARGETS_S: Final = {"ttft_s": 0.005, "tpot_s": 0.001, "e2e_s": 0.005}
#: Times that differ from their default by more than this were stated in another unit.
_MOST_TIMES_DEFAULT: Final = 200
#: Least length of an admin token that other machines may try.
_LEAST_TOKEN_BYTES: Final = 16
#: Next step if a certificate is not valid yet.
NOT_YET_ADVICE: Final = "wait until it is valid, or correct the clock of this machine"
ANY_HOSTS: Final = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check: `name` of the checked thing, `advice` for a failure, "" if it passed."""

    name: str
    ok: bool
    found: str
    advice: str = ""


def checked(name: str, ok: bool, found: str, advice: str) -> Check:
    """Return a check, with the advice if it failed."""
    return Check(name, ok, found, "" if ok else advice)


def of_this_machine(fleet: Fleet, access: Access) -> Iterator[Check]:
    """Yield checks of what the listeners need of this machine."""
    addresses, admin = fleet.file.addresses, fleet.file.admin
    apart = not admin.port or all((each.host, each.port) != (admin.host, admin.port) for each in addresses)
    ports = (
        f"clients at {', '.join([str(each.port) for each in addresses])}, admin at {admin.port}"
        if apart
        else f"both at {admin.host}:{admin.port}"
    )
    yield checked("listeners", apart, ports, "give admin.port another number")
    named = [
        (key, each.tls, context)
        for key, each, context in zip(fleet.file.address_keys, addresses, access.tls, strict=True)
    ]
    for name, table, context in (*named, ("admin", admin.tls, access.admin_tls)):
        if table is not None and context is not None:
            trouble = certificate_trouble(context, fleet.base / table.cert)
            advice = NOT_YET_ADVICE if "not yet" in trouble else "renew it"
            yield checked(f"certificate of {name}", not trouble, trouble or "valid now", advice)
    token = access.admin_token
    if token is not None and not is_loopback(admin.host):
        told = (
            "long enough"
            if len(token) >= _LEAST_TOKEN_BYTES
            else f"{len(token)} characters: it can be guessed"
        )
        advice = "make a long one: openssl rand -hex 32"
        yield checked("admin token", len(token) >= _LEAST_TOKEN_BYTES, told, advice)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{hard:,}"
    advice = "raise it (ulimit -Hn, LimitNOFILE): two for a client"
    yield checked("file descriptors", unlimited or hard >= 4096, found, advice)


def of_targets(fleet: Fleet) -> Iterator[Check]:
    """Yield a check of each model with targets meant in seconds."""
    for model, classes in fleet.service_classes.items():
        wrong = [
            f"{name}: {target.removesuffix('s')}ms {1e3 * getattr(each, target):g}"
            for name, each in classes.items()
            for target, least_s in _LEAST_TARGETS_S.items()
            if getattr(each, target) < least_s
        ]
        if wrong:
            advice = "no GPU is so fast: state the target in milliseconds, 500 for half a second"
            yield checked(f"targets of {model}", False, "; ".join(wrong), advice)


def of_gpus(fleet: Fleet) -> Iterator[Check]:
    """Yield a check of each GPU that is neither a profile's nor in the table of data sheets."""
    for spec in fleet.instances:
        if spec.gpu and spec.latency is None:
            try:
                gpu_named(spec.gpu, "gpu")
            except ConfigError as unknown:
                advice = "correct it, or remove it and let answers tell the speed"
                yield checked(f"GPU of {spec.name}", False, str(unknown), advice)


def of_times(fleet: Fleet) -> Iterator[Check]:
    """Yield a check of times meant in another unit than seconds, if there are some."""
    wrong = [
        f"{table}.{field.name} {value:g} (default {field.default:g})"
        for table in ("queue", "health", "scrape", "proxy")
        for field in msgspec.structs.fields(getattr(fleet.file, table))
        if field.name.endswith("_s") and isinstance(field.default, float) and field.default > 0.0
        if (value := getattr(getattr(fleet.file, table), field.name)) > 0.0
        if not 1 / _MOST_TIMES_DEFAULT < value / field.default < _MOST_TIMES_DEFAULT
    ]
    if wrong:
        yield checked("times", False, ", ".join(wrong), "they are in seconds: correct them")


def _listeners(fleet: Fleet) -> list[tuple[str, Listen | Admin]]:
    """Return the listeners of a fleet file by name."""
    return [*(("listen", each) for each in fleet.file.addresses), ("admin", fleet.file.admin)]


def is_own_address(fleet: Fleet, url: str) -> str:
    """Return the listener that a URL leads back to, "listen" or "admin"; "" for none."""
    _, host, port = origin(url)
    for name, table in _listeners(fleet):
        here = is_loopback(host) or host in (table.host, socket.gethostname(), socket.getfqdn())
        listens_here = table.host in ANY_HOSTS or is_loopback(table.host) or host == table.host
        if table.port == port and here and listens_here:
            return name
    return ""


def running_instances(fleet: Fleet) -> dict[str, str] | None:
    """Return the instances of a running hetlb, found at the file's admin address, with their health.

    None if none answers. Raises `InputError` if one asks for a token.
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
    """Yield the listeners that cannot listen, and why: "" if another process holds the port."""
    for name, table in _listeners(fleet):
        family = socket.AF_INET6 if ":" in table.host else socket.AF_INET
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind((table.host, table.port))
            except OSError as error:
                taken = error.errno == errno.EADDRINUSE
                yield f"{name}.port {table.port}", "" if taken else f"{table.host}: {reason_of(error)}"


async def several_addresses(url: str) -> list[str]:
    """Return the addresses of a URL's host if it has several of one family; one of each is one machine."""
    _, host, port = origin(url)
    by_family: dict[int, dict[str, None]] = {}
    with contextlib.suppress(OSError, UnicodeError):
        for family, *_, address in await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        ):
            by_family.setdefault(family, {})[str(address[0])] = None
    most = max(by_family.values(), key=len, default={})
    return list(most) if len(most) > 1 else []


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
    with readable_name(cert) as name:
        client = ssl.create_default_context(cafile=name)
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


def of_running(fleet: Fleet) -> Iterator[Check]:
    """Yield checks of the ports and of a hetlb that runs on them already."""
    if fleet.file.admin.tls is not None:
        return  # with a certificate that this command need not trust
    try:
        instances = running_instances(fleet)
    except InputError as error:
        yield checked("running hetlb", False, "one runs, and asks for a token", str(error).partition(": ")[2])
        return
    if instances is None:
        closed = dict(closed_ports(fleet))
        taken = [name for name, reason in closed.items() if not reason]
        found = f"taken by another program: {', '.join(taken)}" if taken else "free"
        advice = "stop it (`ss -ltnp` names it), or choose another number"
        yield checked("ports", not taken, found, advice)
        for name, reason in closed.items():
            if reason:
                advice = (
                    "give an address of this machine, or 0.0.0.0 for all; below 1024 it needs the right to"
                )
                yield checked(name, False, reason, advice)
        return
    here = {each.name for each in fleet.instances}
    missing, more = sorted(here - instances.keys()), sorted(instances.keys() - here)
    down = sorted(name for name, health in instances.items() if health != "up")
    parts = [f"without {', '.join(missing)}"] if missing else []
    parts += [f"also with {', '.join(more)}"] if more and fleet.file.discovery is None else []
    advice = "it runs another file or refused this one: look for `reload_refused` in its log"
    found = "one runs at these ports" + (f", {'; '.join(parts)}" if parts else "")
    yield checked("running hetlb", not parts, found, advice)
    found = f"{len(instances) - len(down)} of {len(instances)} instances are up"
    found += f", not {', '.join(down)}" if down else ""
    yield checked("its instances", not down, found, "`hetlb status` and `hetlb top` say why")
