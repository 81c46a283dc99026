"""Access: tokens, keys, certificates and networks of clients, operators and engines.

Files and variables are read whole at start and at reload, never for a request; an error names the
key of the fleet file and where it points, never what stands there, and no secret is in a `repr`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hetlb.addresses import Network, is_loopback
from hetlb.config.api_keys import LimitsTable, load_api_keys
from hetlb.config.fleet import EngineSource, Fleet, SecretSource, secret_source
from hetlb.config.fleet_tables import TlsTable
from hetlb.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineAccess:
    """Access to one engine: its key and its TLS context.

    `authorization` is the value of that header; without one, `passthrough` lets the client's own through.
    `tls` is there for https. `address` is connected to in place of the URL's host, where that was resolved
    once and for all. `kv_bootstrap` is the URL of its Mooncake bootstrap server. `confined`: its name may not
    lead to an address where no engine can be (`hetlb.addresses`).
    """

    authorization: bytes | None = field(default=None, repr=False)
    passthrough: bool = False
    tls: ssl.SSLContext | None = None
    address: str | None = None
    kv_bootstrap: str | None = None
    confined: bool = False


_UNLISTED = EngineSource(key="instance")
#: Access to an engine of which nothing is said: no key, no TLS.
PLAIN_ACCESS = EngineAccess()


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of a client's key; `models` or `classes` None is all of them."""

    name: str
    models: frozenset[str] | None = None
    limits: LimitsTable | None = None
    classes: tuple[str, ...] | None = None

    def may_use(self, model: str) -> bool:
        """True if this key is for that model."""
        return self.models is None or model in self.models


@dataclass(frozen=True, slots=True)
class Access:
    """All of it, for one fleet. `tenants`, by the SHA-256 of their keys, is None where no key is needed."""

    engines: Mapping[str, EngineAccess]
    model_keys: Mapping[str, bytes] = field(repr=False)
    admin_token: bytes | None = field(repr=False)
    tenants: Mapping[bytes, Tenant] | None = field(repr=False)
    tls: ssl.SSLContext | None
    admin_tls: ssl.SSLContext | None
    networks: tuple[Network, ...]
    passthrough: bool
    authorities: _Authorities

    def unlisted(self, url: str, model: str, address: str | None) -> EngineAccess:
        """Access to an instance that is in no file: the system's authorities, the key of its model."""
        tls = self.authorities.context(_UNLISTED) if url.startswith("https:") else None
        key = _bearer(self.model_keys.get(model))
        return EngineAccess(key, self.passthrough, tls, address, confined=address is None)

    @property
    def limits(self) -> dict[str, LimitsTable]:
        """The limits of keys that have some, by the name of the key."""
        return {each.name: each.limits for each in (self.tenants or {}).values() if each.limits is not None}


def load_access(fleet: Fleet) -> Access:
    """Read what the fleet names. Raises `ConfigError`."""
    where, base, proxy, admin = fleet.where, fleet.base, fleet.file.proxy, fleet.file.admin
    if proxy.passthrough_authorization and proxy.api_keys_file is not None:
        raise ConfigError(
            f"{where}proxy.passthrough_authorization: expected false where proxy.api_keys_file is set, "
            "got true: the engines would see those keys"
        )
    networks = tuple(
        _network(text, f"{where}admin.registration_networks") for text in admin.registration_networks
    )
    for text in fleet.file.proxy.trusted_proxies:
        _network(text, f"{where}proxy.trusted_proxies")
    if admin.registration and not networks:
        _check_unconfined(fleet)
    token = secret_source(admin.token_file, admin.token_env, f"{where}admin.token", base)
    if token is None and not is_loopback(admin.host):
        raise ConfigError(
            f"{where}admin.host: expected a loopback address like 127.0.0.1 where neither admin.token_file "
            f"nor admin.token_env is set, got {admin.host!r}"
        )
    model_keys = {name: read_secret(source) for name, source in fleet.model_keys.items()}
    tenants = None if proxy.api_keys_file is None else _tenants(base / proxy.api_keys_file)
    authorities = _Authorities()
    return Access(
        engines={
            spec.name: EngineAccess(
                authorization=_bearer(_engine_key(fleet.engines[spec.name], model_keys.get(spec.model))),
                passthrough=proxy.passthrough_authorization,
                tls=authorities.context(fleet.engines[spec.name]) if spec.url.startswith("https:") else None,
                kv_bootstrap=fleet.engines[spec.name].kv_bootstrap,
            )
            for spec in fleet.instances
        },
        model_keys=model_keys,
        admin_token=None if token is None else read_secret(token),
        tenants=tenants,
        tls=_listener_context(fleet.file.listen.tls, f"{where}listen.tls", base),
        admin_tls=_listener_context(admin.tls, f"{where}admin.tls", base),
        networks=networks,
        passthrough=proxy.passthrough_authorization,
        authorities=authorities,
    )


def _check_unconfined(fleet: Fleet) -> None:
    """Raise `ConfigError` where registration in any network would reach or give away too much."""
    expected = f"{fleet.where}admin.registration_networks: expected the networks "
    if fleet.model_keys:
        model = next(iter(fleet.model_keys))
        raise ConfigError(f"{expected}to which the api key of {model!r} may be sent, but the key is missing")
    if fleet.file.proxy.passthrough_authorization:
        raise ConfigError(f"{expected}to which the clients' keys may be sent, but the key is missing")
    if not is_loopback(fleet.file.admin.host):
        raise ConfigError(
            f"{expected}in which instances may be registered where admin.host is not on loopback, "
            "but the key is missing"
        )


# --- secrets -----------------------------------------------------------------------------------------


def read_secret(source: SecretSource) -> bytes:
    """The secret of a file (without the line end) or of a variable. Raises `ConfigError`."""
    if source.file is not None:
        key, shown = f"{source.key}_file", repr(str(source.file))
        try:
            data = source.file.read_bytes().strip()
        except OSError as caught:
            raise ConfigError(
                f"{key}: expected a readable file, got {shown}: {os.strerror(caught.errno or 0)}"
            ) from caught
    else:
        assert source.env is not None, "expected a file or a variable"
        # A secret written here by mistake must not reach a log.
        key = f"{source.key}_env"
        shown = repr(source.env) if re.fullmatch("[A-Z_][A-Z0-9_]*", source.env) else "something else"
        text = os.environ.get(source.env)
        if text is None:
            raise ConfigError(f"{key}: expected the name of a variable that is set, got {shown}")
        data = text.strip().encode("utf-8", "surrogateescape")
    if not re.fullmatch(rb"[!-~]{1,4096}", data):
        raise ConfigError(f"{key}: expected one word of visible ASCII in {shown}, got something else")
    return data


def _engine_key(source: EngineSource, model_key: bytes | None) -> bytes | None:
    return model_key if source.api_key is None else read_secret(source.api_key)


def _bearer(key: bytes | None) -> bytes | None:
    return None if key is None else b"Bearer " + key


def _tenants(path: Path) -> dict[bytes, Tenant]:
    return {
        bytes.fromhex(key.sha256): Tenant(
            key.name, None if key.models is None else frozenset(key.models), key.limits, key.classes
        )
        for key in load_api_keys(path)
    }


# --- certificates ------------------------------------------------------------------------------------


def _listener_context(table: TlsTable | None, key: str, base: Path) -> ssl.SSLContext | None:
    return None if table is None else server_context(table, key, base)


def server_context(table: TlsTable, key: str, base: Path) -> ssl.SSLContext:
    """TLS context of a listener, 1.2 or newer. Raises `ConfigError` naming `key`."""
    cert_path, key_path = base / table.cert, base / table.key
    for name, path, label in (("cert", cert_path, b"CERTIFICATE"), ("key", key_path, b"PRIVATE KEY")):
        if label + b"-----" not in _pem(path, f"{key}.{name}"):
            raise ConfigError(f"{key}.{name}: expected a PEM {label.decode().lower()}, got {str(path)!r}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A client could make this process compute handshakes on one connection for ever.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without a password at hand OpenSSL would ask for one on the terminal.
        context.load_cert_chain(cert_path, key_path, password=lambda: b"")
    except (ssl.SSLError, OSError) as caught:
        reason = getattr(caught, "reason", None) or "it cannot be read, or is encrypted"
        raise ConfigError(
            f"{key}.key: expected the unencrypted private key of {str(cert_path)!r}, "
            f"got {str(key_path)!r}: {reason}"
        ) from caught
    return context


def show_newest(context: ssl.SSLContext, newest: Callable[[], ssl.SSLContext | None]) -> None:
    """Show the newest certificate at every handshake of a listener that began with `context`."""

    def choose(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        current = newest()
        assert current is not None, "expected a listener with TLS"
        connection.context = current

    context.sni_callback = choose


class _Authorities:
    """Contexts for connections to engines, one per file: reading the system's authorities takes a while."""

    def __init__(self) -> None:
        self._contexts: dict[Path | None, ssl.SSLContext] = {}

    def context(self, source: EngineSource) -> ssl.SSLContext:
        """Certificates are verified, the name in them too; TLS 1.2 or newer. Raises `ConfigError`."""
        path = source.ca_file
        if path not in self._contexts:
            if path is not None:
                _pem(path, f"{source.key}.ca_file")
            try:
                context = ssl.create_default_context(cafile=path)
            except (ssl.SSLError, OSError) as caught:
                raise ConfigError(
                    f"{source.key}.ca_file: expected PEM certificates of authorities, got {str(path)!r}"
                ) from caught
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            self._contexts[path] = context
        return self._contexts[path]


def _pem(path: Path, key: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as caught:
        raise ConfigError(
            f"{key}: expected a readable file, got {str(path)!r}: {os.strerror(caught.errno or 0)}"
        ) from caught


# --- networks ----------------------------------------------------------------------------------------


def _network(text: str, where: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as caught:
        raise ConfigError(f"{where}: expected networks like 10.0.0.0/8, got {text!r}") from caught
