"""A stream of tokens on its way to a client: its events, and the times between its tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from hetlb.balancer.http.sse import MAX_HELD_BYTES, SseWatcher
from hetlb.balancer.http.text_shape import TextShape, pass_events, text_shape
from hetlb.balancer.telemetry.histograms import FINE_MS, GapHistogram

if TYPE_CHECKING:
    from hetlb.options.resume.continuation import Continuation
    from hetlb.options.resume.progress import Progress

#: The first event has the token ids of the prompt where hetlb asked for them: it is held until it is whole.
_MAX_FIRST_BYTES: Final = 1 << 21
_TOKEN_IDS = re.compile(rb'("(?:prompt_)?token_ids":\s?)\[[0-9, ]*\]')
#: Of a stream whose shape changes so often it is seldom looked for.
_MOST_VAIN: Final = 32
LAST_EVENT: Final = b"data: [DONE]\n\n"
#: Reason of an end that is none; inside text the quotes would be escaped.
_ABORT: Final = b'"abort"'
_ABORTED = re.compile(rb'"finish_reason":\s?"abort"')


class StreamedAnswer(SseWatcher):
    """The stream of one answer. What passes for every token allocates nothing but what it counts."""

    __slots__ = (
        "_begins", "_fine", "_gaps", "_hides_ids", "_kept", "_read_last", "_shape", "_silent", "_text_at",
        "_vain", "lost", "progress", "rest",
    )  # fmt: skip

    def __init__(
        self,
        hold_usage: bool,
        silent: int,
        progress: Progress | None = None,
        rest: Continuation | None = None,
        asked_ids: bool = False,
    ) -> None:
        """`silent` events at its beginning are no text.

        `progress` keeps what comes, None where it goes on nowhere else; `rest` is that of a second lease.
        `asked_ids`: hetlb asked for token ids, and the client did not: it gets none.
        """
        super().__init__(hold_usage)
        self.progress = progress
        self.rest = rest
        #: The event by which the engine said that it has failed; it was not passed on.
        self.lost: bytes | None = None
        #: Progress that keeps reads as they come; in a second lease each event is looked at.
        self._kept = progress if rest is None else None
        self._each = rest is not None or asked_ids
        self._hides_ids = asked_ids
        if asked_ids:
            self._max_held = _MAX_FIRST_BYTES
        self._silent = silent
        self._text_at = 0.0
        self._gaps: GapHistogram | None = None
        #: Counts of the times between its tokens, by milliseconds.
        self._fine: list[int] | None = None
        #: Shape of its events of text: those of this shape go on as the engine framed them.
        self._shape: TextShape | None = None
        #: Shapes in a row that no event had.
        self._vain = 0
        #: The last read as it came, and whether it began with an event.
        self._read_last, self._begins = b"", True

    def count_gaps(self, gaps: GapHistogram) -> None:
        self._gaps = gaps
        self._fine = gaps.fine

    def pass_text(self, chunks: bytes) -> bytes:
        """Count a read of nothing but whole events of text; returns it for the client, b"" for another."""
        shape = self._shape
        if shape is None:
            return b""
        events, passed = pass_events(chunks, shape)
        if events:
            self.events += events
            self._vain = 0
            kept = self._kept
            if kept is not None:
                kept.add_chunks(chunks)
        return passed

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

    def _take(self, data: bytes) -> bytes:
        kept = self._kept
        if kept is None:
            return super()._take(data)
        kept.add(data)
        each, self._each = self._each, self._each or data.find(_ABORT) >= 0
        out = super()._take(data)
        if not each:
            self._each = False
        return out

    def read(self, payload: bytes, now: float) -> bytes:
        before = self.events
        self._shape = None
        self._read_last, self._begins = payload, self.between
        payload = self.feed(payload)
        if self.events != before:
            if before > self._silent:
                self.text_came(now)
            else:
                self._text_at = now
        return payload

    def learn_shape(self) -> None:
        """Look at the last read for the shape of the next events of text."""
        # The first event of a chat only says who speaks: it is no text.
        if self._begins and self.between and self.events > 1 and self.rest is None:
            self._vain += 1
            if self._vain <= _MOST_VAIN or not self._vain % _MOST_VAIN:
                self._shape = text_shape(self._read_last, hide_ids=self._hides_ids)
        self._read_last = b""

    def _pass_on(self, event: bytes, data: bytes) -> bytes:
        progress, rest = self.progress, self.rest
        if progress is None or self.lost is not None:
            return b"" if self.lost is not None else event
        if self.failed:
            if self.refused:
                return event
            self.lost = event
            return b""
        if self.done or not data:
            return event
        if rest is not None:
            translated = rest.translate(b"data: " + data, progress)
            if translated is None:
                progress.spoil("another instance says something else")
                self.lost = b""
                return b""
            event = translated
        else:
            self._max_held = MAX_HELD_BYTES  # the first event is over
            if self._hides_ids:
                event = _TOKEN_IDS.sub(rb"\1null", event)
        if _aborted(data):  # vLLM gives up what it runs when it is stopped
            self.lost = event
            return b""
        return event

    def _passed_in_parts(self) -> None:
        if self.progress is not None:
            self.progress.spoil("an event too long to be read")
            self._kept = None


def _aborted(data: bytes) -> bool:
    """Return True if the engine gave up the request of this event."""
    return data.find(_ABORT) >= 0 and _ABORTED.search(data) is not None
