"""Readers of an engine's `/v1/models` and `/version`; an answer without their fields is no error."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from hetlb.errors import NOT_JSON


def read_model_list(body: bytes) -> list[dict[str, Any]]:
    """Return the entries of a `/v1/models` answer that have a name, [] if it is none."""
    document = _json(body)
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, list):
        return []
    return [
        entry
        for entry in data[:1000]
        if isinstance(entry, dict) and isinstance(entry.get("id"), str) and 0 < len(entry["id"]) <= 512
    ]


def lists_nothing(body: bytes) -> bool:
    """Return True for a `/v1/models` answer with an empty list: the engine serves nothing yet."""
    document = _json(body)
    return isinstance(document, dict) and document.get("data") == []


def longest_context(entries: list[dict[str, Any]]) -> int | None:
    """Return the largest `max_model_len` of the entries in tokens, None if none has one."""
    lengths = (entry.get("max_model_len") for entry in entries)
    return max((each for each in lengths if type(each) is int and 0 < each < 1 << 31), default=None)


def read_version(body: bytes) -> str | None:
    """Return the text of a `/version` answer."""
    document = _json(body)
    version = document.get("version") if isinstance(document, dict) else None
    return version if isinstance(version, str) and len(version) <= 64 else None


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (0, 11) of "0.11.2rc1"."""
    return tuple(int(each[:9]) for each in re.findall(r"\d+", version)[:2])


def _json(body: bytes) -> object:
    try:
        return msgspec.json.decode(body)
    except NOT_JSON:
        return None
