"""Keys, values and flags of earlier versions, and what to use in their place: the whole list."""

from __future__ import annotations

import re
from typing import Any, Final

#: By key path of a file, list positions left out.
GONE_KEYS: Final = {
    "policy.state_file": "lengths are learnt anew after a start: delete the key; `policy.trace` with"
    " `predictor: empirical` states lengths",
}
#: By key path and value.
GONE_VALUES: Final[dict[tuple[str, object], str]] = {}
#: By command and flag, or flag and value.
GONE_FLAGS: Final[dict[tuple[str, str], str]] = {}


def gone_key(path: str) -> str | None:
    """Return the line about a key that went, None for other keys; `path` is as in `models[0].name`."""
    use = GONE_KEYS.get(_without_positions(path))
    return None if use is None else f"{path}: this key went; {use}"


def gone_value(path: str, value: Any) -> str | None:
    """Return the line about a value that went, None for other values."""
    try:
        use = GONE_VALUES.get((_without_positions(path), value))
    except TypeError:  # not hashable
        return None
    return None if use is None else f"{path}: {value!r} went; {use}"


def gone_flag(command: str | None, flag: str, value: str = "") -> str | None:
    """Return the line about a flag, or a value of it, that went; None for others."""
    text = f"{flag} {value}".strip()
    use = GONE_FLAGS.get((command or "", text))
    return None if use is None else f"{text}: went; {use}"


def _without_positions(path: str) -> str:
    return re.sub(r"\[\d+\]", "[]", path)
