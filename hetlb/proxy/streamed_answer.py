"""A stream of tokens on its way to a client: its events, and the times between its tokens."""

from __future__ import annotations

from typing import Final

from hetlb.proxy.http.sse import SseWatcher, text_beginning, text_events
from hetlb.proxy.progress import Progress
from hetlb.proxy.resume import Seam
from hetlb.proxy.telemetry.histograms import FINE_MS, Gaps

#: The first event has the token ids of the prompt where hetlb asked for them: it is held until it is whole.
_MAX_FIRST_BYTES: Final = 1 << 20


class StreamedAnswer(SseWatcher):
    """The stream of one answer. What passes for every token allocates nothing but what it counts."""

    __slots__ = ("_beginning", "_fine", "_gaps", "_shaped", "_silent", "_text_at", "lost", "progress", "seam")

    def __init__(
        self, hold_usage: bool, silent: int, progress: Progress | None = None, seam: Seam | None = None
    ) -> None:
        """`silent` events at its beginning are no text.

        `progress` keeps what passes, None where it goes on nowhere else; `seam` is that of a second lease.
        """
        super().__init__(hold_usage)
        self.progress = progress
        self.seam = seam
        #: The event by which the engine said that it has failed; it was not passed on.
        self.lost: bytes | None = None
        #: True if the next events of text pass without a closer look, and are kept.
        self._shaped = False
        if progress is not None:
            self._each = True
            if progress.hides_ids:
                self._max_held = _MAX_FIRST_BYTES
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

    def pass_text(self, chunks: bytes) -> bytes:
        """Pass on a read that is nothing but whole events of text; b"": take a closer look."""
        if self._shaped:
            progress = self.progress
            assert progress is not None
            chunks, events = progress.take_chunks(chunks)
            self.events += events
            return chunks
        beginning = self._beginning
        if beginning is None:
            return b""
        events = text_events(chunks, beginning)
        self.events += events
        return chunks if events > 0 else b""

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
        self._shaped = False
        payload = self.feed(payload)
        if self.events != before:
            if before > self._silent:
                self.text_came(now)
            else:
                self._text_at = now
        return payload

    def learn_beginning(self, passed: bytes) -> None:
        """Look at what was passed on for how the next events of text begin."""
        if not self.between:
            return
        progress = self.progress
        if progress is not None and progress.usable:
            self._shaped = self.seam is None and progress.learn()
        elif self.events > 1:
            # The first event of a chat only says who speaks: it is no text.
            self._beginning = text_beginning(passed)

    def _pass_on(self, event: bytes) -> bytes:
        progress, seam = self.progress, self.seam
        if progress is None or self.lost is not None:
            return b"" if self.lost is not None else event
        if self.failed:
            if self.refused:
                return event
            self.lost = event
            return b""
        if self.done or event[:6] != b"data: ":
            return event
        if seam is None:
            event = progress.take(event)
        else:
            translated = seam.translate(event, progress)
            if translated is None:
                progress.spoil()
                self.lost = b""
                return b""
            event = translated
        if progress.finish == "abort":
            # vLLM gives up what it runs when it is stopped.
            progress.finish = None
            self.lost = event
            return b""
        return event

    def _passed_in_parts(self) -> None:
        if self.progress is not None:
            self.progress.spoil()
