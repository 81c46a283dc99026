"""Exceptions of hetlb, by cause.

    HetlbError
    ├── InputError            a person's file, flag or environment: exit status 2, one line
    │   ├── ConfigError       a fleet or cluster file
    │   ├── ProfileError      a latency profile
    │   └── TraceError        a request trace or an event log
    └── PlanError             a plan that cannot be made

A request that hetlb itself turns down raises nothing: the scheduler returns a `Reject` command
(`hetlb.balancer.core.types`) and the proxy has one table from its reason to the HTTP reply
(`hetlb.balancer.http.error_responses`). A client that leaves is not an error at all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import msgspec

#: Errors of `msgspec` at JSON of others: names that are no UTF-8 have their own, and so has depth.
NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def visible(text: str) -> str:
    """Return a text of others on one line, its control characters as escapes."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


class HetlbError(Exception):
    """Base class of everything hetlb raises on purpose. `str()` is one line."""

    def __str__(self) -> str:
        # Keys and values of a file or of an answer may hold line ends and terminal control characters.
        return visible(super().__str__())


class InputError(HetlbError):
    """Wrong input from a person. `str()` is one line: file, key, value and what was expected."""

    @property
    def lines(self) -> list[str]:
        """One line for each mistake."""
        return [str(self)]


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


def reason_of(error: BaseException) -> str:
    """Return short text of a request's error: the certificate's, else the socket's (`Connection refused`)."""
    if isinstance(error, TimeoutError):
        return "timeout"
    text = next(iter(str(getattr(error, "message", "") or error).splitlines()), "")
    of_socket = getattr(error, "certificate_error", None) or getattr(error, "os_error", error)
    if found := getattr(of_socket, "verify_message", None) or getattr(of_socket, "reason", None):
        return str(found)  # errors of TLS: their numbers are not the system's
    if isinstance(of_socket, OSError):
        number = of_socket.errno or 0  # negative for a name without an address
        text = os.strerror(number) if number > 0 else of_socket.strerror or str(of_socket)
    return text or type(error).__name__
