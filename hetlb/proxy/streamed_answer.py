"""A stream of tokens on its way to a client: its events, and the times between its tokens."""

from __future__ import annotations

from hetlb.proxy.http.sse import SseWatcher, text_beginning, text_events
from hetlb.proxy.telemetry.histograms import FINE_MS, Gaps


class StreamedAnswer(SseWatcher):
    """The stream of one answer. What passes for every token allocates nothing but what it counts."""

    __slots__ = ("_beginning", "_fine", "_gaps", "_silent", "_text_at")

    def __init__(self, hold_usage: bool, silent: int) -> None:
        """`silent` events at its beginning are no text."""
        super().__init__(hold_usage)
        self._silent = silent
        self._text_at = 0.0
        self._gaps: Gaps | None = None
        #: Counts of the times between its tokens, by milliseconds.
        self._fine: list[int] | None = None
        #: First bytes of its events; those that begin like it go on as the engine framed them.
        self._beginning: bytes | None = None

    def count_gaps(self, gaps: Gaps) -> None:
        """Count the times between its tokens here."""
        self._gaps = gaps
        self._fine = gaps.fine

    def is_text(self, chunks: bytes) -> bool:
        """Count the events of a read that is nothing but whole events of text; False: take a closer look."""
        beginning = self._beginning
        if beginning is None:
            return False
        events = text_events(chunks, beginning)
        self.events += events
        return events > 0

    def text_came(self, now: float) -> None:
        """Text came. Called for about every token."""
        fine = self._fine
        if fine is not None:
            gap_s = now - self._text_at
            ms = int(gap_s * 1e3 + 0.5)
            if ms < FINE_MS:
                fine[ms] += 1
            elif self._gaps is not None:
                self._gaps.long(gap_s)
        self._text_at = now

    def read(self, payload: bytes, now: float) -> bytes:
        """Look at the next bytes; returns those to pass on, as `feed` does."""
        before = self.events
        self._beginning = None
        payload = self.feed(payload)
        if self.events != before:
            if before > self._silent:
                self.text_came(now)
            else:
                self._text_at = now
        return payload

    def learn_beginning(self, passed: bytes) -> None:
        """Look at what was passed on for how the next events of text begin."""
        # The first event of a chat only says who speaks: it is no text.
        self._beginning = text_beginning(passed) if self.events > 1 and self.between else None
