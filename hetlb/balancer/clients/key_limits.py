"""Limits of a client's key: requests and tokens of the last 60 seconds, and requests in flight.

Tokens are reserved when a request comes (its prompt and `max_tokens`, or the mean answer of the key) and
settled when it ends. A request that alone is over the limit passes only an empty window.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final

from hetlb.balancer.clients.api_keys import LimitsTable
from hetlb.balancer.http.error_responses import RATE_LIMITED, Refusal

if TYPE_CHECKING:
    from hetlb.balancer.clients.limiters import KeyJournal, Limiters

WINDOW_S: Final = 60.0
#: Seconds within which requests count as one entry: a window holds at most 600 of them.
_SLOT_S: Final = 0.1
#: Unit of seconds to which times are rounded up: a client that comes again then finds the window over.
_CLOCK_S: Final = 0.001
#: Tokens of an answer before any of the key has ended, and weight of a new one in the mean.
_FIRST_ANSWER_TOKENS: Final = 256.0
_ANSWER_WEIGHT: Final = 0.1
#: Seconds until a retry where a key has too many requests in flight, as one may end at any time.
_IN_FLIGHT_RETRY_S: Final = 1.0


class _Slot:
    """The amount counted within `_SLOT_S`; `until` is its end."""

    __slots__ = ("amount", "until")

    def __init__(self, until: float) -> None:
        self.until = until
        self.amount = 0


class Window:
    """The amounts counted in the last `WINDOW_S` seconds."""

    __slots__ = ("_slots", "total")

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque()
        self.total = 0

    def forget(self, now: float) -> None:
        slots = self._slots
        while slots and slots[0].until + WINDOW_S <= now:
            self.total -= slots.popleft().amount

    def add(self, amount: int, now: float) -> _Slot:
        slots = self._slots
        if not slots or slots[-1].until < now:
            slots.append(_Slot(now + _SLOT_S))
        slots[-1].amount += amount
        self.total += amount
        return slots[-1]

    def settle(self, slot: _Slot, more: int, now: float) -> None:
        """Correct a counted amount by `more`, which may be negative, unless it is older than the window."""
        if slot.until + WINDOW_S > now:
            slot.amount += more
            self.total += more

    def room_in_s(self, amount: int, limit: int, now: float) -> float:
        """Return the seconds until `amount` fits below `limit`, or until the window is empty."""
        total = self.total
        if not total or total + amount <= limit:
            return 0.0
        until = now
        for slot in self._slots:
            total -= slot.amount
            until = slot.until
            if not total or total + amount <= limit:
                break
        return max(_CLOCK_S, until + WINDOW_S - now + _CLOCK_S)

    def lines(self, name: bytes, limit: int, now: float) -> bytes:
        """Return the header lines: the limit, its rest, and the time until the window is empty."""
        slots = self._slots
        if slots and slots[0].until + WINDOW_S <= now:
            self.forget(now)
        tenths = int((slots[-1].until + WINDOW_S - now) * 10.0) if slots else 0
        left, reset = max(0, limit - self.total), duration(tenths / 10.0)
        lines = b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %d\r\nx-ratelimit-reset-%b: %b\r\n"
        return lines % (name, limit, name, left, name, reset)


class Limiter:
    """The limits of one key. The clock is the proxy's, in seconds."""

    def __init__(self, limits: LimitsTable, name: str = "", limiters: Limiters | None = None) -> None:
        self.name = name
        self._limiters = limiters
        self._requests = Window()
        self._tokens = Window()
        self._in_flight = 0
        self._answer = _FIRST_ANSWER_TOKENS
        self.limits = limits

    def admit(self, prompt_tokens: int, max_tokens: int, now: float) -> Ticket:
        """Count an arriving request, or raise `Refusal` (429); `max_tokens` 0: the request states none."""
        limits, requests, tokens = self.limits, self._requests, self._tokens
        requests.forget(now)
        tokens.forget(now)
        reserved = prompt_tokens + (max_tokens or round(self._answer))
        if limits.in_flight is not None and self._in_flight >= limits.in_flight:
            raise self._refusal(f"{limits.in_flight} requests in flight", _IN_FLIGHT_RETRY_S, now)
        if limits.requests_per_minute is not None:
            wait_s = requests.room_in_s(1, limits.requests_per_minute, now)
            if wait_s > 0.0:
                raise self._refusal(f"{limits.requests_per_minute} requests per minute", wait_s, now)
        if limits.tokens_per_minute is not None:
            wait_s = tokens.room_in_s(reserved, limits.tokens_per_minute, now)
            if wait_s > 0.0:
                raise self._refusal(f"{limits.tokens_per_minute} tokens per minute", wait_s, now)
        self._in_flight += 1
        requests.add(1, now)
        ticket = Ticket(self, tokens.add(reserved, now), reserved)
        if self.journal is not None:
            self.journal.admitted(ticket)
        return ticket

    @property
    def journal(self) -> KeyJournal | None:
        """Journal that tells other processes what is counted here, None if there are none."""
        return None if self._limiters is None else self._limiters.journal

    def adopt(self, reserved: int, fresh: bool, now: float) -> Ticket:
        """Count a request that another process admitted.

        If it is `fresh`, it counts in the current minute; else only as in flight.
        """
        requests, tokens = self._requests, self._tokens
        requests.forget(now)
        tokens.forget(now)
        self._in_flight += 1
        if fresh:
            requests.add(1, now)
        reserved = reserved if fresh else 0
        return Ticket(self, tokens.add(reserved, now), reserved, own=False)

    def ended(self, ticket: Ticket, prompt_tokens: int, output_tokens: int, now: float) -> None:
        self._in_flight -= 1
        self._tokens.settle(ticket.slot, prompt_tokens + output_tokens - ticket.reserved, now)
        if output_tokens:
            self._answer += _ANSWER_WEIGHT * (output_tokens - self._answer)

    def used(self, tokens: int, now: float) -> None:
        self._tokens.forget(now)
        self._tokens.add(tokens, now)

    def headers(self, now: float) -> bytes:
        """Return the `x-ratelimit` header lines that OpenAI's SDKs read."""
        limits = self.limits
        lines = b""
        if limits.requests_per_minute is not None:
            lines = self._requests.lines(b"requests", limits.requests_per_minute, now)
        if limits.tokens_per_minute is not None:
            lines += self._tokens.lines(b"tokens", limits.tokens_per_minute, now)
        return lines

    def _refusal(self, what: str, wait_s: float, now: float) -> Refusal:
        message = f"This API key has reached its limit of {what}. Please try again in {wait_s:.3g} s."
        # Whole seconds, rounded up: sooner it would be of no use.
        return Refusal(RATE_LIMITED, message, float(math.ceil(wait_s)), self.headers(now))


class Ticket:
    """One request that a limiter let in, with its reservations."""

    __slots__ = ("limiter", "number", "own", "reserved", "slot")

    def __init__(self, limiter: Limiter, slot: _Slot, reserved: int, *, own: bool = True) -> None:
        """Make a ticket; `own` is False if another process admitted the request."""
        self.limiter = limiter
        self.own = own
        #: Its number in the journal.
        self.number = 0
        self.slot = slot
        self.reserved = reserved

    def used(self, prompt_tokens: int, output_tokens: int, now: float) -> None:
        tokens = prompt_tokens + output_tokens
        self.limiter.used(tokens, now)
        self.reserved += tokens
        self._tell(prompt_tokens, output_tokens, False)

    def ended(self, prompt_tokens: int, output_tokens: int, now: float) -> None:
        self.limiter.ended(self, prompt_tokens, output_tokens, now)
        self._tell(prompt_tokens, output_tokens, True)

    def _tell(self, prompt_tokens: int, output_tokens: int, last: bool) -> None:
        journal = self.limiter.journal
        if self.own and journal is not None:
            journal.used(self, prompt_tokens, output_tokens, last)

    def headers(self, now: float) -> bytes:
        return self.limiter.headers(now)


def duration(seconds: float) -> bytes:
    """Return `6m0s`, `1.5s` or `20ms`, as OpenAI writes times."""
    if seconds < 1.0:
        return b"%dms" % round(seconds * 1000)
    minutes, rest = divmod(round(seconds, 1), 60)
    return (b"%dm" % minutes if minutes else b"") + f"{rest:g}s".encode()
