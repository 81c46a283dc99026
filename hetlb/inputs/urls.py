"""Checks of URLs and addresses in files and requests."""

from __future__ import annotations

import re
from typing import TypeAlias
from urllib.parse import SplitResult, urlsplit

from hetlb.errors import ConfigError
from hetlb.inputs.mistakes import short

#: Scheme, host and port, with the scheme's default port.
Origin: TypeAlias = tuple[str, str, int]

#: Authority of a URL, which is sent as the Host header.
_NETLOC = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_ZMQ_ADDRESS = re.compile(r"tcp://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[1-9][0-9]{0,4}|ipc:///[!-~]+")


def check_url(url: str, where: str, *, prefixed: bool = False) -> str:
    """Normalise a server's base URL: no trailing slash or `/v1`. Raises `ConfigError` naming `where`.

    With `prefixed` a path may stand before the `/v1`.
    """
    parts = _split(url)
    path = "" if parts is None else parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    if parts is None or parts.query or (path and not prefixed) or "/v1/" in path:
        raise _no_url(url, where, "http://host:8000")
    return f"{parts.scheme}://{parts.netloc}{path}"


def check_base(url: str, where: str, example: str) -> str:
    """Normalise an http(s) URL that may have a path: no trailing slash. Raises `ConfigError`."""
    if _split(url) is None or "?" in url:
        raise _no_url(url, where, example)
    return url.rstrip("/")


def _no_url(url: str, where: str, example: str) -> ConfigError:
    """Return the error of a text that is no URL, with a suggestion if only the scheme is missing."""
    without_scheme = "//" not in url and _split(f"http://{url}") is not None
    meant = f" (did you mean http://{url}?)" if without_scheme else ""
    return ConfigError(f"{where}: expected a URL like {example}, got {_shown(url)}{meant}")


def check_publisher(address: str, where: str) -> None:
    """Raise `ConfigError` unless `address` is a ZeroMQ address."""
    if _ZMQ_ADDRESS.fullmatch(address) is None:
        raise ConfigError(f"{where}: expected an address like tcp://host:5557, got {short(address)}")


def origin(url: str) -> Origin:
    """Return the origin of a base URL; equal origins are one server."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def bracketed(host: str) -> str:
    """Return the host in URL form: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def _split(url: str) -> SplitResult | None:
    """Split an http(s) URL with a plain host; None for any other text."""
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    right = right and _NETLOC.fullmatch(parts.netloc) is not None and not parts.fragment
    return parts if right and re.search(r"[\x00-\x20\x7f#]", url) is None else None


def _shown(url: str) -> str:
    """Return a URL for an error message, password removed."""
    return short(re.sub(r"//[^/]*@", "//***@", url))
