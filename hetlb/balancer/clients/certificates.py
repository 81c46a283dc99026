"""TLS contexts of listeners and for engines, from PEM files."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from hetlb.balancer.config.fleet_tables import TlsTable
from hetlb.errors import ConfigError
from hetlb.files import content, readable_name


def server_context(table: TlsTable, key: str, base: Path) -> ssl.SSLContext:
    """Return the TLS context of a listener, 1.2 or newer. Raises `ConfigError` naming `key`."""
    cert_path, key_path = base / table.cert, base / table.key
    for name, path, label in (("cert", cert_path, b"CERTIFICATE"), ("key", key_path, b"PRIVATE KEY")):
        if label + b"-----" not in read_pem(path, f"{key}.{name}"):
            raise ConfigError(f"{key}.{name}: expected a PEM {label.decode().lower()}, got {str(path)!r}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A client could make this process compute handshakes on one connection for ever.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without a password at hand OpenSSL would ask for one on the terminal.
        with readable_name(cert_path) as chain, readable_name(key_path) as private:
            context.load_cert_chain(chain, private, password=lambda: b"")
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


def read_pem(path: Path, key: str) -> bytes:
    """Return the bytes of a PEM file. Raises `ConfigError` naming `key`."""
    try:
        return content(path)
    except OSError as caught:
        raise ConfigError(
            f"{key}: expected a readable file, got {str(path)!r}: {caught.strerror}"
        ) from caught


def engine_context(path: Path | None, key: str, known: dict[Path | None, ssl.SSLContext]) -> ssl.SSLContext:
    """Return the TLS context for connections to an engine: its certificate is verified. Raises `ConfigError`.

    `known` has one for each file of authorities, None for the system's, which takes a while to read.
    """
    if path not in known:
        if path is not None:
            read_pem(path, f"{key}.ca_file")
        try:
            with readable_name(path) if path is not None else nullcontext() as name:
                context = ssl.create_default_context(cafile=name)
        except (ssl.SSLError, OSError) as caught:
            raise ConfigError(
                f"{key}.ca_file: expected PEM certificates of authorities, got {str(path)!r}"
            ) from caught
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        known[path] = context
    return known[path]
