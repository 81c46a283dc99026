"""Client API keys: the file with their hashes and limits."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec

from hetlb.balancer.http.http1 import GateError, RequestHead
from hetlb.errors import ConfigError
from hetlb.inputs.mistakes import short
from hetlb.inputs.yaml_file import PositiveInt, convert, parse_yaml


class LimitsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of a key: requests and tokens in any 60 seconds, concurrent requests."""

    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    in_flight: PositiveInt | None = None


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One key of a client: `name` for the log, SHA-256 of the key in hex, its models, limits and classes.

    Keys of one name share their limits. Without `models` or `classes` it may use all of them.
    """

    name: str
    sha256: Any
    models: tuple[str, ...] | None = None
    limits: LimitsTable | None = None
    classes: tuple[str, ...] | None = None

    def may_use(self, model: str) -> bool:
        """Return True if requests with this key may name a model."""
        return self.models is None or model in self.models


class ClientKeys:
    """All keys of clients, by their SHA-256."""

    def __init__(self, keys: Iterable[Tenant]) -> None:
        self._tenants = {bytes.fromhex(each.sha256): each for each in keys}

    @property
    def limits(self) -> dict[str, LimitsTable]:
        """The limits of keys that have some, by the name of the key."""
        return {each.name: each.limits for each in self._tenants.values() if each.limits is not None}

    def tenant_of(self, head: RequestHead, *, required: bool) -> Tenant | None:
        """Return the tenant of a request by its key. Raises `GateError` (401) if one is required."""
        authorization = head.fields.get(b"authorization")
        if authorization is not None:
            scheme, _, key = authorization.partition(b" ")
            key = key.strip() if scheme.lower() == b"bearer" else b""
        else:
            key = head.fields.get(b"x-api-key") or b""  # as Anthropic's clients send it
        tenant = self._tenants.get(hashlib.sha256(key).digest()) if key else None
        if tenant is None and required:
            if key:
                raise GateError(401, "This API key is not known here.")
            raise GateError(401, "An API key is needed: Authorization: Bearer KEY.")
        return tenant


def client_keys(path: Path) -> ClientKeys:
    """Return the keys in a file. Raises `ConfigError`."""
    return ClientKeys(load_api_keys(path))


def load_api_keys(path: Path) -> tuple[Tenant, ...]:
    """Read the client key file. Raises `ConfigError`, which never shows a value."""
    raw = parse_yaml(path, ConfigError)
    if not isinstance(raw, list) or not raw or not all(isinstance(entry, dict) for entry in raw):
        raise ConfigError(f"{path}: the file: expected a list of {{name, sha256, models}}, at least one")
    try:
        keys = convert(raw, tuple[Tenant, ...])
    except ConfigError as caught:
        raise ConfigError(f"{path}: {caught}") from caught
    seen: set[str] = set()
    limits: dict[str, LimitsTable] = {}
    for index, key in enumerate(keys):
        if wrong := _wrong(key, seen):
            raise ConfigError(f"{path}: [{index}].{wrong}")
        if key.limits is not None and limits.setdefault(key.name, key.limits) != key.limits:
            raise ConfigError(
                f"{path}: [{index}].limits: expected the ones of the other key named {key.name}, or none"
            )
        seen.add(key.sha256.lower())
    return keys


def _wrong(key: Tenant, seen: Collection[str]) -> str:
    """Return the error of a key, given the hashes `seen` before it; "" if it is valid."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", key.name):
        return f"name: expected letters, digits and . _ - (64 at most), got {short(key.name)}"
    if not isinstance(key.sha256, str) or not re.fullmatch(r"[0-9A-Fa-f]{64}", key.sha256):
        return "sha256: expected the 64 hex digits (in quotes) that `printf %s KEY | sha256sum` prints"
    if key.sha256.lower() in seen:
        return f"sha256: expected every key once, got the one of {key.name} again"
    for field, what in (("models", "model"), ("classes", "class")):
        if getattr(key, field) == ():
            return f"{field}: expected at least one {what}, or no such key for all"
    return ""
