"""Signs of work of one instance: tokens and its own counters. Without any it is silent, then stalled."""

from __future__ import annotations

import math
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.evidence import table

#: Seconds for which scraped counters show whether an engine works.
COUNTERS_STALE_S: Final = 5.0


@mypyc_attr(acyclic=True)
class Silence:
    """Time of the last signs of work, and since when there are none."""

    __slots__ = (
        "_generated", "begins", "moved_at", "overdue_s", "read_at", "silent_since", "stalled_since", "still",
        "token_at",
    )  # fmt: skip

    def __init__(self, now: float) -> None:
        #: Time of its last token, as far as it is known.
        self.token_at = now
        #: Time of the first missing sign of work, None while it works. The same once it is certain (stalled).
        self.silent_since: float | None = None
        self.stalled_since: float | None = None
        #: True while it stands still behind a request of a kind that its process has not answered yet.
        self.begins = False
        #: Lateness of its next token in seconds.
        self.overdue_s = 0.0
        #: Its counter of tokens; time of the last scrape; time of the scrape before its last change; True if
        #: the counter has not changed since its last token.
        self._generated: int | None = None
        self.read_at = self.moved_at = -math.inf
        self.still = False

    def read(self, generated: int | None, now: float) -> None:
        """Store the engine's own count of generated tokens, None if it reports none."""
        known, self._generated = self._generated, generated
        if generated is None:
            return
        if known is not None and generated != known:
            self.moved_at = self.read_at  # at the earliest
            self.still = False
        else:
            self.still = known is not None and self.read_at > self.token_at
        self.read_at = now

    def counts(self, now: float) -> bool:
        """Return True if its own counters are known."""
        return self._generated is not None and now - self.read_at <= COUNTERS_STALE_S

    def works(self, now: float) -> bool:
        """Return True if its own counters moved recently, also since its last token."""
        return self.moved_at >= now - COUNTERS_STALE_S and not self.still

    def watch(
        self,
        since: float,
        need_s: float,
        late_s: float,
        stands_s: float,
        least_s: float,
        now: float,
        *,
        begins: bool,
    ) -> bool:
        """Compare the silence since a token or a dispatch (`since`) with the time that a token needs.

        Return True if a stall begins or ends now. The instance stands still after `stands_s`. It has stalled
        after `least_s`. Neither comes before `STALL_FACTOR` times `need_s`, the time that a token needs.
        `since` is infinite if it owes no token: this does not prove that it works. `late_s`: delay of another
        request's first token. `begins`: a request of a new kind came last, and an engine may have to compile
        for it.
        """
        self.overdue_s, self.begins = 0.0, False
        if self.works(now):
            return self._goes_on()
        if since == math.inf:
            if self.stalled_since is None:
                self.silent_since = None
            return False
        silence_s = now - max(since, self.token_at)
        if silence_s <= need_s:
            if self.stalled_since is None:
                self.silent_since = None
            self.overdue_s = late_s
            return False
        self.overdue_s = max(late_s, silence_s - need_s)
        if silence_s <= table.STALL_FACTOR * need_s or self.stalled_since is not None:
            return False
        if silence_s > stands_s:
            self.silent_since = now - silence_s
        if silence_s <= least_s or (self.counts(now) and not self.still):
            return False  # it may have worked since its last token: the next scrape tells
        self.begins = begins and silence_s <= table.BEGINNING_S
        if self.begins:
            return False
        self.stalled_since = now
        return True

    def token(self, now: float) -> bool:
        """Note a token. Return True if it ends a stall."""
        self.token_at = now
        return self.stalled_since is not None and self._goes_on()

    def _goes_on(self) -> bool:
        stalled = self.stalled_since is not None
        self.silent_since = self.stalled_since = None
        return stalled

    def told(self, now: float) -> str:
        """Return the message that says for how many seconds it is stalled."""
        silent_s = now - (self.silent_since or self.stalled_since or now)
        return f"{table.STALLED}: no token for {silent_s:.3g} s"
