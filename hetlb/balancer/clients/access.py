"""Access: tokens, keys, certificates and networks of clients, operators and engines.

Files and variables are read at start and at reload; an error names the key of the fleet file and its
source, never the secret, and no secret is in a `repr`.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hetlb.addresses import Network, is_loopback, network_of
from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import TlsTable
from hetlb.errors import ConfigError
from hetlb.files import content

if TYPE_CHECKING:
    from hetlb.balancer.clients.api_keys import ClientKeys, LimitsTable


MAX_SECRET_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class EngineAccess:
    """Access to one engine: its key and its TLS context.

    `authorization` is the value of that header. Without one, `passthrough` forwards the client's own header.
    `tls` is the context for https. `address`, if there is one, is connected to in place of the host of the
    URL. `confined`: connections to addresses that no engine can have are refused (`hetlb.addresses`).
    """

    authorization: bytes | None = field(default=None, repr=False)
    passthrough: bool = False
    tls: ssl.SSLContext | None = None
    address: str | None = None
    confined: bool = False


#: Access to an engine without settings: no key, no TLS.
PLAIN_ACCESS = EngineAccess()


@dataclass(frozen=True, slots=True)
class Access:
    """Access to one fleet. `keys` is None if clients need none."""

    engines: Mapping[str, EngineAccess]
    model_keys: Mapping[str, bytes] = field(repr=False)
    admin_token: bytes | None = field(repr=False)
    keys: ClientKeys | None = field(repr=False)
    tls: list[ssl.SSLContext | None]
    admin_tls: ssl.SSLContext | None
    networks: tuple[Network, ...]
    passthrough: bool
    contexts: dict[Path | None, ssl.SSLContext]

    def unlisted(self, url: str, model: str, address: str | None) -> EngineAccess:
        """Return access to an instance that is in no file: the system's authorities, the key of its model."""
        tls = _engine_tls(url, None, "instance", self.contexts)
        key = _bearer(self.model_keys.get(model))
        return EngineAccess(key, self.passthrough, tls, address, confined=address is None)

    @property
    def limits(self) -> dict[str, LimitsTable]:
        """The limits of keys that have some, by the name of the key."""
        return {} if self.keys is None else self.keys.limits


def load_access(fleet: Fleet) -> Access:
    """Read the keys and certificates of a fleet. Raises `ConfigError`."""
    where, base, proxy, admin = fleet.where, fleet.base, fleet.file.proxy, fleet.file.admin
    networks = tuple(
        network_of(text, f"{where}admin.registration_networks") for text in admin.registration_networks
    )
    model_keys = {}
    for m, model in enumerate(fleet.file.models):
        key = read_secret(model.api_key_file, model.api_key_env, f"{where}models[{m}].api_key", base)
        if key is not None:
            model_keys[model.name] = key
    gives_keys = model_keys or proxy.passthrough_authorization
    if admin.registration and not networks and (gives_keys or not is_loopback(admin.host)):
        raise ConfigError(
            f"{where}admin.registration_networks: expected the networks in which instances may be registered "
            "(keys are sent to engines, or admin.host is not on loopback), but the key is missing"
        )
    token = read_secret(admin.token_file, admin.token_env, f"{where}admin.token", base)
    if token is None and not is_loopback(admin.host):
        raise ConfigError(
            f"{where}admin.host: expected a loopback address like 127.0.0.1, or a token (admin.token_file "
            f"or admin.token_env), got {admin.host!r}"
        )
    keys: ClientKeys | None = None
    if proxy.api_keys_file is not None:
        from hetlb.balancer.clients.api_keys import client_keys

        keys = client_keys(base / proxy.api_keys_file)
    contexts: dict[Path | None, ssl.SSLContext] = {}
    engines = {}
    for spec in fleet.instances:
        named, table = fleet.listed[spec.name].key, fleet.listed[spec.name].table
        key = read_secret(table.api_key_file, table.api_key_env, f"{named}.api_key", base)
        authorities = None if table.ca_file is None else base / table.ca_file
        engines[spec.name] = EngineAccess(
            authorization=_bearer(model_keys.get(spec.model) if key is None else key),
            passthrough=proxy.passthrough_authorization,
            tls=_engine_tls(spec.url, authorities, named, contexts),
        )
    addresses = fleet.file.addresses
    shown = [
        None if each.tls is None else _listener_tls(each.tls, f"{where}{key}.tls", base)
        for each, key in zip(addresses, fleet.file.address_keys, strict=True)
    ]
    return Access(
        engines=engines,
        model_keys=model_keys,
        admin_token=token,
        keys=keys,
        tls=shown,
        admin_tls=None if admin.tls is None else _listener_tls(admin.tls, f"{where}admin.tls", base),
        networks=networks,
        passthrough=proxy.passthrough_authorization,
        contexts=contexts,
    )


# --- secrets -----------------------------------------------------------------------------------------


def read_secret(file: str | None, env: str | None, key: str, base: Path) -> bytes | None:
    """Return the secret of a file (without line end) or variable, or None. Raises `ConfigError`.

    `key` is the common beginning of the two keys of the fleet file.
    """
    if file is not None:
        key, path = f"{key}_file", base / file
        shown = repr(str(path))
        try:
            data = content(path, MAX_SECRET_BYTES).strip()
        except OSError as caught:
            raise ConfigError(f"{key}: expected a readable file, got {shown}: {caught.strerror}") from caught
    elif env is not None:
        # A secret written here by mistake must not reach a log.
        key = f"{key}_env"
        shown = repr(env) if re.fullmatch("[A-Z_][A-Z0-9_]*", env) else "something else"
        text = os.environ.get(env)
        if text is None:
            raise ConfigError(f"{key}: expected the name of a variable that is set, got {shown}")
        data = text.strip().encode("utf-8", "surrogateescape")
    else:
        return None
    if not re.fullmatch(rb"[!-~]{1,4096}", data):
        raise ConfigError(f"{key}: expected one word of visible ASCII in {shown}, got something else")
    return data


def _engine_tls(
    url: str, authorities: Path | None, key: str, known: dict[Path | None, ssl.SSLContext]
) -> ssl.SSLContext | None:
    """Return the TLS context for an engine's URL, None if it needs none. Raises `ConfigError`."""
    if not url.startswith("https:"):
        return None
    from hetlb.balancer.clients.certificates import engine_context

    return engine_context(authorities, key, known)


def _listener_tls(table: TlsTable, key: str, base: Path) -> ssl.SSLContext:
    from hetlb.balancer.clients.certificates import server_context

    return server_context(table, key, base)


def _bearer(key: bytes | None) -> bytes | None:
    return None if key is None else b"Bearer " + key
