"""Continuation of an answer at another instance: what came of it, and the request for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hetlb.proxy import ends
from hetlb.proxy.client_response import NOTHING
from hetlb.proxy.ends import End
from hetlb.proxy.engine_answer import EngineAnswer
from hetlb.proxy.engine_request import EngineRequest, with_field
from hetlb.proxy.exchange_states import RESUMED
from hetlb.proxy.http.endpoints import Kind
from hetlb.proxy.progress import Progress
from hetlb.proxy.resume import Seam, ends_here, next_seam
from hetlb.proxy.streamed_answer import LAST_EVENT, StreamedAnswer

if TYPE_CHECKING:
    from hetlb.proxy.exchange import Exchange

#: Maximum number of second leases: an answer may be what engines fail of.
MOST_RESUMED: Final = 5
_TOKEN_IDS: Final = b"return_token_ids"


class Continuation:
    """Second leases of one request, none at first, and what they need of the one before.

    `by_text`: an answer may go on by its text alone; `asks_ids`: hetlb asks for token ids where the engine
    has some; `hides_usage`: it asks for usage, which the client did not. `seam` is the second lease,
    None in the first.
    """

    __slots__ = (
        "_by_text", "_gives_ids", "_hides_usage", "_kind", "_outgoing", "_progress", "asks_ids", "seam",
    )  # fmt: skip

    def __init__(
        self, kind: Kind, outgoing: EngineRequest, *, by_text: bool, asks_ids: bool, hides_usage: bool
    ) -> None:
        self._kind = kind
        self._outgoing = outgoing
        self._by_text = by_text
        self.asks_ids = asks_ids
        self._hides_usage = hides_usage
        #: True if the engine of this lease takes and gives token ids.
        self._gives_ids = False
        #: Progress of a stream, None before it begins.
        self._progress: Progress | None = None
        self.seam: Seam | None = None

    def dispatched(self, gives_ids: bool) -> bool:
        """Another lease begins; False if its instance cannot go on with the answer."""
        self._gives_ids = gives_ids
        return self.seam is None or not self.seam.by_ids or gives_ids or self._plan()

    def head_lines(self, lines: bytes, path: str) -> bytes:
        """Header lines of the request, of which `path` is the client's."""
        if self.seam is None or self.seam.path is None:
            return lines
        return lines.replace(path.encode("ascii"), self.seam.path, 1)

    @property
    def body(self) -> bytes | None:
        """The body of this lease's request, None for that of the client."""
        if self.seam is not None:
            return self.seam.body
        if self.asks_ids and self._gives_ids:
            return with_field(self._outgoing.body, _TOKEN_IDS, b"true")
        return None

    def stream(self, silent: bool) -> StreamedAnswer:
        """The stream that begins; `silent`: its first event is no text."""
        if self.seam is not None:
            return StreamedAnswer(not self.seam.wants_usage, silent, self._progress, self.seam)
        if self._gives_ids or self._by_text:
            self._progress = Progress()
        asked_ids = self.asks_ids and self._gives_ids
        return StreamedAnswer(self._hides_usage, silent, self._progress, None, asked_ids)

    def _last_event(self, answer: EngineAnswer | None) -> bytes | None:
        """Last event, b"" if it was passed on; None where more of the answer is missing."""
        stream = None if answer is None else answer.stream
        if stream is not None and stream.done and not stream.failed:
            return b""
        progress = self._progress
        if progress is None or not ends_here(progress, self._outgoing.body, hides_usage=self._hides_usage):
            return None
        return LAST_EVENT

    def go_on(self, exchange: Exchange, end: End) -> bool:
        """Take another lease for the rest of the answer; False where it cannot go on."""
        response, answer, lease = exchange.response, exchange.answer, exchange.lease
        if lease is None or exchange.transfer is not None or exchange.resumed >= MOST_RESUMED:
            return False
        if not self._knows_the_rest(answer, unsent=response.state is NOTHING):
            return False
        if (last := self._last_event(answer)) is not None:
            response.write(response.last(last))
            if answer is not None:
                exchange.take_usage(answer)
            exchange.finish(ends.LAST_MISSING)
            return True
        generated = 0 if self.seam is None else self.seam.generated
        unsaid = not generated and end is not ends.NOTICE
        if exchange.dropped and unsaid:
            return False  # run twice, and not a token: the request itself may be what kills engines
        lease.output_tokens = 0 if answer is None else answer.tokens_so_far
        exchange.dropped = unsaid
        exchange.resumed += 1
        exchange.back_to_queue(RESUMED)
        exchange.resumed_tokens = generated
        exchange.request = exchange.request.goes_on(generated)
        exchange.driver.goes_on(exchange.request, lease, ends.HELD_UP if response.held_up else end)
        return True

    def _knows_the_rest(self, answer: EngineAnswer | None, *, unsent: bool) -> bool:
        """True if the rest of an answer is known; `unsent`: the client has nothing of it."""
        if self._progress is None:  # of a plain answer that is not whole nothing was sent
            return unsent and answer is not None and answer.whole_only
        if answer is not None and answer.stream is not None and answer.stream.part_is_out:
            return False
        self._progress.read()
        return self._last_event(answer) is not None or self._plan()

    @property
    def kept(self) -> int:
        """Reads of its stream that are kept as they came."""
        return 0 if self._progress is None else len(self._progress.raw)

    def read(self) -> None:
        """Keep no more of what came than is needed."""
        if self._progress is not None:
            self._progress.read()

    def _plan(self) -> bool:
        """Make the request of the next lease; False where there is none."""
        progress = self._progress
        if progress is None:
            return True
        seam = next_seam(
            self._kind,
            self._outgoing.body,
            progress,
            hides_usage=self._hides_usage,
            gives_ids=self._gives_ids,
            by_text=self._by_text,
        )
        if seam is not None:
            self.seam = seam
        return seam is not None
