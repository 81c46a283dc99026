"""A stream of tokens on its way to a client: its events, and the times between its tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from hetlb.proxy.http.sse import MAX_HELD_BYTES, SseWatcher, TextShape, pass_events, text_shape
from hetlb.proxy.telemetry.histograms import FINE_MS, GapHistogram

if TYPE_CHECKING:
    from hetlb.proxy.continuation import Continuation
    from hetlb.proxy.progress import Progress

#: The first event has the token ids of the prompt where hetlb asked for them: it is held until it is whole.
_MAX_FIRST_BYTES: Final = 1 << 21
_TOKEN_IDS = re.compile(rb'("(?:prompt_)?token_ids":)\[[0-9,]*\]')
LAST_EVENT: Final = b"data: [DONE]\n\n"
_ABORT: Final = b'"finish_reason":"abort"'


class StreamedAnswer(SseWatcher):
    """The stream of one answer. What passes for every token allocates nothing but what it counts."""

    __slots__ = (
        "_fine", "_gaps", "_hides_ids", "_raw", "_shape", "_silent", "_text_at", "_with_ids", "lost",
        "progress", "rest",
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
        #: Reads that are kept as they come; in a second lease each event is looked at.
        self._raw = progress.raw if progress is not None and rest is None else None
        self._each = rest is not None or asked_ids
        self._hides_ids = asked_ids
        #: The last event as it came, where it goes on without its token ids.
        self._with_ids = b""
        if asked_ids:
            self._max_held = _MAX_FIRST_BYTES
        self._silent = silent
        self._text_at = 0.0
        self._gaps: GapHistogram | None = None
        #: Counts of the times between its tokens, by milliseconds.
        self._fine: list[int] | None = None
        #: Shape of its events of text: those of this shape go on as the engine framed them.
        self._shape: TextShape | None = None

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
            raw = self._raw
            if raw is not None:
                raw.append(chunks)
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

    def feed(self, data: bytes) -> bytes:
        progress = self.progress
        if self._raw is None or progress is None:
            return super().feed(data)
        progress.add(data)
        each, self._each = self._each, self._each or data.find(_ABORT) >= 0
        out = super().feed(data)
        if not each:
            self._each = False
        return out

    def read(self, payload: bytes, now: float) -> bytes:
        before = self.events
        self._shape = None
        payload = self.feed(payload)
        if self.events != before:
            if before > self._silent:
                self.text_came(now)
            else:
                self._text_at = now
        return payload

    def learn_shape(self, passed: bytes) -> None:
        """Look at what was passed on for the shape of the next events of text."""
        # The first event of a chat only says who speaks: it is no text.
        if self.between and self.events > 1 and self.rest is None:
            if self._hides_ids:
                self._shape = text_shape(self._with_ids + b"\n\n", hide_ids=True)
                self._with_ids = b""
            else:
                self._shape = text_shape(passed)

    def _pass_on(self, event: bytes) -> bytes:
        progress, rest = self.progress, self.rest
        if progress is None or self.lost is not None:
            return b"" if self.lost is not None else event
        if self.failed:
            if self.refused:
                return event
            self.lost = event
            return b""
        if self.done or event[:6] != b"data: ":
            return event
        if rest is not None:
            translated = rest.translate(event, progress)
            if translated is None:
                progress.spoil()
                self.lost = b""
                return b""
            aborted = event.find(_ABORT) >= 0 and not rest.only_end
            event = translated
        else:
            aborted = event.find(_ABORT) >= 0
            self._max_held = MAX_HELD_BYTES  # the first event is over
            if self._hides_ids:
                self._with_ids, event = event, _TOKEN_IDS.sub(rb"\1null", event)
        if aborted:  # vLLM gives up what it runs when it is stopped
            self.lost = event
            return b""
        return event

    def _passed_in_parts(self) -> None:
        if self.progress is not None:
            self.progress.spoil()
            self._raw = None
