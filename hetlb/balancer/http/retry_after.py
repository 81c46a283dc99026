"""Time after which an engine wants to be asked again: `Retry-After` and `retry-after-ms` of its answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from hetlb.balancer.http.http1 import number


def retry_after_s(fields: Mapping[bytes, bytes]) -> float | None:
    """Return the seconds until a retry, None if the head has none or 0.

    `retry-after-ms` (OpenAI's) comes before `retry-after`, which is in seconds or a date (RFC 9110, 10.2.3).
    A date is compared with the date of the answer, else with this machine's clock.
    """
    if (ms := number(fields.get(b"retry-after-ms"))) is not None and ms > 0.0:
        return ms / 1e3
    stated = fields.get(b"retry-after")
    if stated is None:
        return None
    seconds = number(stated)
    if seconds is None and (at := _date(stated)) is not None:
        answered = _date(fields.get(b"date", b""))
        seconds = at - (time.time() if answered is None else answered)
    return seconds if seconds is not None and seconds > 0.0 else None


def _date(text: bytes) -> float | None:
    """Return the Unix time of an HTTP date, None of another text."""
    try:
        return parsedate_to_datetime(text.decode("ascii")).timestamp()
    except (ValueError, IndexError, TypeError, OverflowError):
        return None
