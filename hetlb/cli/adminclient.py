"""Client of a running proxy's admin listener: its address and the operator's token.

The token comes from an environment variable, is shown nowhere and goes to that address alone;
whatever is wrong with an address or an answer is one line.
"""

from __future__ import annotations

import argparse
import http.client
import os
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from hetlb.errors import InputError

#: Default address of `hetlb serve`'s admin listener.
DEFAULT_URL = "http://127.0.0.1:8081"
TOKEN_VARIABLE = "HETLB_ADMIN_TOKEN"
_TIMEOUT_S = 10.0


def add_token_argument(parser: argparse.ArgumentParser) -> None:
    """The flag that names the variable with the token."""
    parser.add_argument(
        "--token-env",
        metavar="NAME",
        help=f"environment variable with the admin token (default {TOKEN_VARIABLE}, which may be unset)",
    )


def admin_url(text: str, flag: str = "--url") -> str:
    """An admin address without its last slash. Raises `InputError` naming the flag."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.username is not None or parts.query or parts.fragment:
        raise InputError(f"{flag}: expected an admin address like {DEFAULT_URL}, got {text!r}")
    return text.rstrip("/")


def authorization(variable: str | None, flag: str = "--token-env") -> dict[str, str]:
    """The header with the token of a variable, none where there is no token.

    Raises `InputError` where a variable was named (by `flag`) that is not set, or holds what no header can.
    """
    name = variable or TOKEN_VARIABLE
    token = os.environ.get(name, "").strip()
    if not token and variable is not None:
        raise InputError(f"{flag}: expected a variable with the admin token, but {name!r} is not set")
    if not token.isascii() or not token.isprintable():
        raise InputError(f"{name}: expected an admin token of printable ASCII, got something else")
    return {"Authorization": f"Bearer {token}"} if token else {}


def refusal(status: int, reason: str | None, flag: str = "--token-env") -> str:
    """Message for an answer that reports an error, with the remedy for a missing token."""
    if status == 401:
        return f"401 Unauthorized: expected the admin token in {TOKEN_VARIABLE}, or where {flag} says"
    return f"status {status} {reason or ''}".rstrip()


def get(
    url: str, path: str, variable: str | None, *, flag: str = "--url", token_flag: str = "--token-env"
) -> bytes:
    """Body of the answer to one GET; a redirect does not get the token. Raises `InputError` naming `flag`."""
    request = urllib.request.Request(url + path)
    for name, value in authorization(variable, token_flag).items():
        request.add_unredirected_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            body: bytes = reply.read()
    except urllib.error.HTTPError as error:
        raise InputError(f"{flag}: {url}: {refusal(error.code, error.reason, token_flag)}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", None) or error
        raise InputError(no_proxy(url, getattr(cause, "strerror", None) or cause, flag)) from error
    return body


def no_proxy(url: str, why: object, flag: str = "--url") -> str:
    """Message for an address where no running proxy answers."""
    return f"{flag}: expected the admin address of a running proxy, got {url!r}: {why}"
