"""TLS contexts of connections to engines."""

from __future__ import annotations

import ssl
from contextlib import nullcontext
from pathlib import Path

from hetlb.balancer.clients.certificates import read_pem
from hetlb.errors import ConfigError
from hetlb.files import readable_name


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
