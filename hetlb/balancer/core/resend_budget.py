"""Budget of sends to one server beside the requests of clients."""

from __future__ import annotations

from typing import Final

#: Sends at once to a server that fails, and the pause before the next one, which doubles (seconds).
_RESENDS: Final = 4
_LEAST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 30.0


class Resends:
    """Budget of sends of one kind to one server, beside the first one of a client's request.

    Example: each request to free blocks fails. Four are sent at once, the next ones after 0.25, 0.5, 1 s and
    so on. An answer gives the whole budget back.
    """

    __slots__ = ("_left", "_next_at", "_pause_s")

    def __init__(self) -> None:
        self._next_at = 0.0
        self.answered()

    def answered(self) -> None:
        """Note that the server answered."""
        self._left, self._pause_s = _RESENDS, _LEAST_PAUSE_S

    def take(self, now: float) -> bool:
        """Return True if one more may be sent now."""
        if self._left:
            self._left -= 1
        elif now < self._next_at:
            return False
        else:
            self._pause_s = min(2.0 * self._pause_s, _LONGEST_PAUSE_S)
        self._next_at = now + self._pause_s
        return True

    def wait_s(self, now: float) -> float:
        """Return the seconds until one more may be sent."""
        return 0.0 if self._left else max(0.0, self._next_at - now)
