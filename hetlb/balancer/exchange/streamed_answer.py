"""A stream of tokens on its way to a client: its events, and the times between its tokens."""

from __future__ import annotations

from typing import Final

from hetlb.balancer.exchange import ends
from hetlb.balancer.http.sse import SseWatcher
from hetlb.balancer.http.text_shape import TextShape, pass_events, text_shape
from hetlb.balancer.telemetry.counters import FINE_MS, GapHistogram

#: Events in a row without the known shape after which a shape is seldom looked for.
_MOST_VAIN_EVENTS: Final = 32
LAST_EVENT: Final = b"data: [DONE]\n\n"


class StreamedAnswer(SseWatcher):
    """The stream of one answer. A token allocates no memory but for its counts."""

    __slots__ = (
        "_begins", "_fine", "_gaps", "_hides_ids", "_read_last", "_shape", "_silent", "_vain", "last", "lost",
        "lost_by", "text_at",
    )  # fmt: skip

    def __init__(self, hold_usage: bool, silent: int, hides_ids: bool = False) -> None:
        """`silent` events at its beginning are no text. `hides_ids`: the client gets no token ids."""
        super().__init__(hold_usage)
        #: Event in which the engine reported its failure, which is not passed on. End of the stream by it.
        self.lost: bytes | None = None
        self.lost_by = ends.ERROR_EVENT
        self._hides_ids = hides_ids
        self._silent = silent
        #: Time of its newest event, 0.0 before the first.
        self.text_at = 0.0
        self._gaps: GapHistogram | None = None
        #: Counts of the times between its tokens, by milliseconds.
        self._fine: list[int] | None = None
        #: Shape of its events of text. Events of this shape are passed on as the engine framed them.
        self._shape: TextShape | None = None
        #: Number of shapes in a row that matched no event.
        self._vain = 0
        #: The last read as it came, and whether it began with an event.
        self._read_last, self._begins = b"", True
        #: The last read of nothing but text.
        self.last = b""

    def count_gaps(self, gaps: GapHistogram) -> None:
        self._gaps = gaps
        self._fine = gaps.fine

    def pass_text(self, chunks: bytes) -> bytes:
        """Count a read of whole events of text. Return it for the client; b"" if it is another read."""
        shape = self._shape
        if shape is None:
            return b""
        events, passed = pass_events(chunks, shape)
        if events:
            self.last = chunks
            self.events += events
            self._vain = 0
        return passed

    def text_came(self, now: float) -> None:
        """Note that text came. Called for about every token."""
        fine = self._fine
        if fine is not None:
            gap_s = now - self.text_at
            ms = int(gap_s * 1e3 + 0.5)
            if ms < FINE_MS:
                fine[ms] += 1
            elif self._gaps is not None:
                self._gaps.long(gap_s)
        self.text_at = now

    def read(self, payload: bytes, now: float) -> bytes:
        before = self.events
        self._shape = None
        self._read_last, self._begins = payload, self.between
        payload = self.feed(payload)
        if self.events != before:
            if before > self._silent:
                self.text_came(now)
            else:
                self.text_at = now
        return payload

    def usage(self) -> tuple[int | None, int | None, int | None]:
        """Return completion, prompt and cached prompt tokens of its lease."""
        return self.completion_tokens, self.prompt_tokens, self.cached_tokens

    def learn_shape(self) -> None:
        """Look at the last read for the shape of the next events of text."""
        # The first event of a chat only says who speaks: it is no text.
        if self._begins and self.between and self.events > 1:
            self._vain += 1
            if self._vain <= _MOST_VAIN_EVENTS or not self._vain % _MOST_VAIN_EVENTS:
                self._shape = text_shape(self._read_last, hide_ids=self._hides_ids)
        self._read_last = b""
