"""Access: tokens, keys, certificates and networks of clients, operators and engines.

Files and variables are read at start and at reload; an error names the key of the fleet file and where it
points, never what stands there, and no secret is in a `repr`.
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
from hetlb.balancer.config.api_keys import LimitsTable, Tenant, load_api_keys
from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import SharedTable, TlsTable
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


#: Access to an engine of which nothing is said: no key, no TLS.
PLAIN_ACCESS = EngineAccess()


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
    contexts: dict[Path | None, ssl.SSLContext]

    def unlisted(self, url: str, model: str, address: str | None) -> EngineAccess:
        """Access to an instance that is in no file: the system's authorities, the key of its model."""
        tls = _engine_context(None, "instance", self.contexts) if url.startswith("https:") else None
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
    model_keys = {}
    for m, model in enumerate(fleet.file.models):
        key = read_secret(model.api_key_file, model.api_key_env, f"{where}models[{m}].api_key", base)
        if key is not None:
            model_keys[model.name] = key
    gives_keys = model_keys or proxy.passthrough_authorization
    if admin.registration and not networks and (gives_keys or not is_loopback(admin.host)):
        raise ConfigError(
            f"{where}admin.registration_networks: expected the networks in which instances may be registered "
            "where keys are sent to engines or admin.host is not on loopback, but the key is missing"
        )
    token = read_secret(admin.token_file, admin.token_env, f"{where}admin.token", base)
    if token is None and not is_loopback(admin.host):
        raise ConfigError(
            f"{where}admin.host: expected a loopback address like 127.0.0.1 where neither admin.token_file "
            f"nor admin.token_env is set, got {admin.host!r}"
        )
    tenants = None
    if proxy.api_keys_file is not None:
        tenants = {bytes.fromhex(each.sha256): each for each in load_api_keys(base / proxy.api_keys_file)}
    contexts: dict[Path | None, ssl.SSLContext] = {}
    engines = {}
    for spec in fleet.instances:
        named, table = fleet.listed[spec.name].key, fleet.listed[spec.name].table
        key = read_secret(table.api_key_file, table.api_key_env, f"{named}.api_key", base)
        authorities = None if table.ca_file is None else base / table.ca_file
        engines[spec.name] = EngineAccess(
            authorization=_bearer(model_keys.get(spec.model) if key is None else key),
            passthrough=proxy.passthrough_authorization,
            tls=_engine_context(authorities, named, contexts) if spec.url.startswith("https:") else None,
            kv_bootstrap=table.kv_bootstrap,
        )
    listen = fleet.file.listen.tls
    return Access(
        engines=engines,
        model_keys=model_keys,
        admin_token=token,
        tenants=tenants,
        tls=None if listen is None else server_context(listen, f"{where}listen.tls", base),
        admin_tls=None if admin.tls is None else server_context(admin.tls, f"{where}admin.tls", base),
        networks=networks,
        passthrough=proxy.passthrough_authorization,
        contexts=contexts,
    )


# --- secrets -----------------------------------------------------------------------------------------


def read_secret(file: str | None, env: str | None, key: str, base: Path) -> bytes | None:
    """Return the secret of a file (without line end) or variable, or None. Raises `ConfigError`.

    `key` is what the two keys of the fleet file have in common.
    """
    if file is not None:
        key, path = f"{key}_file", base / file
        shown = repr(str(path))
        try:
            data = path.read_bytes().strip()
        except OSError as caught:
            raise ConfigError(
                f"{key}: expected a readable file, got {shown}: {os.strerror(caught.errno or 0)}"
            ) from caught
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


def _bearer(key: bytes | None) -> bytes | None:
    return None if key is None else b"Bearer " + key


# --- certificates ------------------------------------------------------------------------------------


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


def _engine_context(path: Path | None, key: str, known: dict[Path | None, ssl.SSLContext]) -> ssl.SSLContext:
    """TLS context for connections to an engine: its certificate is verified. Raises `ConfigError`.

    `known` has one for each file of authorities, None for the system's, which takes a while to read.
    """
    if path not in known:
        if path is not None:
            _pem(path, f"{key}.ca_file")
        try:
            context = ssl.create_default_context(cafile=path)
        except (ssl.SSLError, OSError) as caught:
            raise ConfigError(
                f"{key}.ca_file: expected PEM certificates of authorities, got {str(path)!r}"
            ) from caught
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        known[path] = context
    return known[path]


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


def shared_url(table: SharedTable, key: str) -> str:
    """Return the address of the server. Raises `ConfigError` that names `key`."""
    url = table.url
    if table.url_env is not None:
        if url is not None:
            raise ConfigError(f"{key}.url: expected either url or url_env, got both")
        url = os.environ.get(table.url_env)
        if url is None:
            raise ConfigError(f"{key}.url_env: expected the name of a variable that is set")
    if url is None:
        raise ConfigError(f"{key}.url: expected an address, but the key is missing")
    if not url.startswith(("redis://", "rediss://", "unix://", "hub:")):
        raise ConfigError(f"{key}.url: expected redis://, rediss://, unix:// or hub: at its beginning")
    return url
