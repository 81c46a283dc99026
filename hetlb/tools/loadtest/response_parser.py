"""Answers of an OpenAI-compatible server, read into a record: bytes and the time they came in.

A token has come when text has: events with only a role, empty text or usage never stop the TTFT
clock; reasoning and tool calls are text. Token counts are the server's own if it sends `usage`, else
events with text are counted. Time is stamped by the caller before anything here is parsed.
"""

from __future__ import annotations

from array import array

from hetlb.tools.openai.answer_events import AnswerError, AnswerUsage, EventReader, read_answer
from hetlb.tools.workload.records import RequestResult


class StreamReader:
    """A stream of one request, read into its record."""

    __slots__ = ("_events", "_last_s", "_record", "_usage", "tokens")

    def __init__(self, record: RequestResult) -> None:
        self._record = record
        self._events = EventReader()
        self._usage: AnswerUsage | None = None
        #: Events with text so far.
        self.tokens = 0
        #: Time of the last text of each choice, seconds.
        self._last_s: dict[int, float] = {}
        record.itl_s = array("d")

    def feed(self, data: bytes, now_s: float) -> int:
        """Take bytes read at `now_s`; return the number of events with text they completed.

        Raises `AnswerError` on an error event or on what is not JSON.
        """
        before = self.tokens
        for event in self._events.feed(data):
            for choice in event.choices or ():
                if choice.says_something:
                    self._token(choice.index, now_s)
            if event.usage is not None:
                self._usage = event.usage
        return self.tokens - before

    def _token(self, index: int, now_s: float) -> None:
        record, before_s = self._record, self._last_s.get(index)
        if before_s is not None:
            record.itl_s.append(now_s - before_s)  # type: ignore[union-attr]
        elif record.first_token_s is None:
            record.first_token_s = now_s
        self._last_s[index] = record.last_token_s = now_s
        self.tokens += 1

    def close(self, now_s: float) -> None:
        """End the body at `now_s`. Raises `AnswerError` if the stream has not ended."""
        record = self._record
        _count(record, self._usage, self.tokens)
        if not self._events.begun:
            raise AnswerError("no stream", "the body has no events")
        if not self._events.done:
            raise AnswerError("broken stream", "the body ended without [DONE]")
        if record.last_token_s is None:
            record.last_token_s = now_s  # the model ended at once: an answer without text


def read_plain(body: bytes, record: RequestResult, now_s: float) -> None:
    """Read an answer that came whole at `now_s`. Raises `AnswerError`."""
    answer = read_answer(body)
    if not answer.choices and not answer.data:
        raise AnswerError("malformed answer", "neither choices nor data")
    _count(record, answer.usage, 0)
    record.last_token_s = now_s


def _count(record: RequestResult, usage: AnswerUsage | None, tokens: int) -> None:
    record.output_tokens = tokens
    if usage is not None:
        if usage.completion_tokens is not None:
            record.output_tokens = usage.completion_tokens
        if usage.prompt_tokens is not None:
            record.prompt_tokens = usage.prompt_tokens
