"""Exceptions of hetlb, by cause.

    HetlbError
    ├── InputError            a person's file, flag or environment: exit status 2, one line
    │   ├── ConfigError       a fleet or cluster file
    │   ├── ProfileError      a latency profile
    │   └── TraceError        a request trace or an event log
    └── PlanError             a plan that cannot be made

A request that hetlb itself turns down raises nothing: the scheduler returns a `Reject` command
(`hetlb.core.types`) and the proxy has one table from its reason to the HTTP reply
(`hetlb.proxy.http.error_responses`). A client that leaves is not an error at all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_UNPRINTABLE = re.compile(r"[^ -~\xa1-\uffff]|[\u2028\u2029\ud800-\udfff]")


class HetlbError(Exception):
    """Base class of everything hetlb raises on purpose."""


class InputError(HetlbError):
    """Wrong input from a person. `str()` is one line: file, key, value and what was expected."""

    @property
    def lines(self) -> list[str]:
        """One line for each mistake."""
        return [str(self)]

    def __str__(self) -> str:
        # Keys and values of a file may hold line ends and terminal control characters.
        text = super().__str__()
        return text if text.isprintable() else _UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], text)


class ConfigError(InputError):
    """A fleet or cluster file that cannot be used."""


class ConfigErrors(ConfigError):
    """Several errors of one file, in its order; `str()` joins them into one line."""

    def __init__(self, mistakes: Sequence[InputError]) -> None:
        super().__init__("; ".join(map(str, mistakes)))
        self._mistakes = mistakes

    @property
    def lines(self) -> list[str]:
        """One line for each mistake."""
        return [line for each in self._mistakes for line in each.lines]


class ProfileError(InputError):
    """A latency profile that cannot be used."""


class TraceError(InputError):
    """A request trace or event log that cannot be used."""


class PlanError(HetlbError):
    """No plan satisfies the constraints, or a plan failed its check."""


def connect_reason(error: OSError) -> str:
    """Text of a connection error, such as `Connection refused`."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)  # a name without an address has a negative number


def reason_of(error: BaseException) -> str:
    """Short text of a request's error; for aiohttp's errors that of the socket."""
    if isinstance(os_error := getattr(error, "os_error", None), OSError):
        return connect_reason(os_error)
    return "timeout" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
