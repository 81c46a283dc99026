"""Continuation of an answer at another instance: its parts so far, and the request for the rest.

The engine is given the token ids of the prompt and of the answer so far, as a completion: greedy, it says
what the first one would have said. Whether an answer may go on is decided when its request is sent, from one
reading of its body (`resume_fields.py`); what is not known to go on the same way ends (docs/resume.md).
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from hetlb.balancer.exchange import ends
from hetlb.balancer.exchange.engine_answer import EngineAnswer
from hetlb.balancer.exchange.exchange import EngineRequest
from hetlb.balancer.exchange.streamed_answer import LAST_EVENT, StreamedAnswer
from hetlb.balancer.http import error_responses
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.http.openai_body import with_field
from hetlb.balancer.http.sse import MAX_HELD_BYTES
from hetlb.options.resume.progress import Kept, Progress
from hetlb.options.resume.resume_fields import CHAT_ONLY, NOT_READ, Asked, read_answer, read_asked, read_ids

#: Most leases in a row that bring few tokens. Beyond that, the answer itself may cause their failures.
MAX_FRUITLESS_LEASES: Final = 5
#: Maximum bytes of a resumable request's body: each of its messages is an object here.
MAX_ASKED_BYTES: Final = 1 << 20
#: Fewest tokens of a lease that is not fruitless.
_LEAST_TOKENS: Final = 16
#: Prompt tokens that a template may add to one for each byte of the body.
_TEMPLATE_TOKENS: Final = 1024
_TOKEN_ID_LISTS = re.compile(rb'("(?:prompt_)?token_ids":\s?)\[[0-9, ]*\]')
#: hetlb asks for the prompt's token ids in some requests. The first event then has them; it is held until
#: complete.
_MAX_FIRST_BYTES: Final = 1 << 21
#: A `finish_reason` that does not count as an end; inside text the quotes would be escaped.
_ABORT: Final = b'"abort"'
_ABORTED = re.compile(rb'"finish_reason":\s?"abort"')
#: The event of an answer that no instance has room for.
_FULL: Final = error_responses.error_event(
    error_responses.BROKEN_STREAM, "No other instance has room for the rest of the answer.", "/"
).rstrip()
#: Errors at an event of an unexpected form.
_NOT_TRANSLATED: Final = (*NOT_READ, LookupError, TypeError, AttributeError)


class Draft:
    """Request for the rest of an answer: its body, and the part of the progress in its prompt.

    The prompt holds `generated` tokens of the answer; `texts` and `ids` are their events. The client already
    has `ahead`, the events behind them. `room`: tokens of the prompt, and of the rest at most; None if
    unknown.
    """

    __slots__ = (
        "_size", "ahead", "as_completion", "body", "generated", "ids", "room", "texts",
    )  # fmt: skip

    def __init__(self, progress: Progress) -> None:
        self._size = len(progress.texts)
        self.body = b""
        self.generated = 0
        self.as_completion = False
        self.texts: list[str] = []
        self.ids: list[list[int]] = []
        self.room: tuple[int, int] | None = None
        self.ahead = ""

    def is_of(self, progress: Progress) -> bool:
        """Return True if nothing has come since it was made."""
        return self._size == len(progress.texts)


class Continuation:
    """Requests of one answer's second leases, none at first, and the state they need of earlier leases.

    `asks_ids`: hetlb asks the engine for token ids. `hides_usage`: hetlb asks for usage, the client did not.
    `second` is the body of a second lease's request, None in the first lease; its prompt holds `generated`
    tokens of the answer. `why` is the reason for not resuming the answer, "" while it may be resumed.
    """

    __slots__ = (
        "_as_completion", "_asked", "_asks_ids", "_draft", "_fruitless", "_hides_usage", "_kept", "_kind",
        "_longest", "_outgoing", "_room", "_short", "full", "generated", "progress", "second", "streamed",
        "why",
    )  # fmt: skip

    def __init__(
        self,
        kind: Kind,
        outgoing: EngineRequest,
        kept: Kept,
        *,
        streamed: bool,
        asks_ids: bool,
        hides_usage: bool,
    ) -> None:
        self._kind = kind
        self._outgoing = outgoing
        self._kept = kept
        self.streamed = streamed
        self._asks_ids = asks_ids
        self._hides_usage = hides_usage
        #: Facts of the body. None if it was not read, or if it keeps its answer from being resumed.
        self._asked: Asked | None = None
        self.why = "" if streamed else "no stream"
        #: Longest request of the first engine in tokens, 0 if unknown.
        self._longest = 0
        #: Progress of a stream, None before it begins.
        self.progress: Progress | None = None
        self.second: bytes | None = None
        self._draft: Draft | None = None
        #: True if the engine answers as a completion what the client may know as a chat.
        self._as_completion = False
        self.generated = 0
        #: Tokens of the second lease's prompt, and of its answer at most; None if unknown.
        self._room: tuple[int, int] | None = None
        #: True if its engine holds a shorter answer than the first one, and if that limit is reached.
        self._short = self.full = False
        #: Leases in a row that brought few tokens.
        self._fruitless = 0

    # --- the request of a lease ---

    def dispatched(self, gives_ids: bool, max_model_len: int) -> bool:
        """Begin another lease. Return False if its instance cannot go on with the answer."""
        if self.second is not None:
            return gives_ids and self._fits(max_model_len)
        self._longest = max_model_len
        self._asked = None
        if self.streamed:
            self.why = "its engine gives no token ids"
            if len(self._outgoing.body) > MAX_ASKED_BYTES:
                self.why = "a long body"
            elif gives_ids:
                asked = read_asked(self._outgoing.body, chat=self._kind is Kind.CHAT)
                if isinstance(asked, str):
                    self.why = asked
                elif not (self._asks_ids or asked.wants_ids):
                    self.why = "no token ids are asked for"
                elif asked.most_tokens is None and not max_model_len:
                    self.why = "max_model_len of its engine is not known"
                else:
                    self._asked, self.why = asked, ""
        return True

    def _fits(self, max_model_len: int) -> bool:
        """Limit the request to an engine's room if that is smaller. Return False without room."""
        self._short = self.full = False
        if not max_model_len or self._room is None or self.second is None:
            return True
        prompt_tokens, most = self._room
        room = max_model_len - prompt_tokens
        if room < most:
            self._short = True
            fields = msgspec.json.decode(self.second, type=dict[str, msgspec.Raw])
            _limit(fields, room)
            self.second = msgspec.json.encode(fields)
        return room > 0

    @property
    def _as_chat(self) -> bool:
        """True if the engine answers as a completion and the client knows a chat."""
        return self._as_completion and self._kind is Kind.CHAT

    @property
    def _hides_ids(self) -> bool:
        """True if hetlb asks for token ids that the client does not get."""
        return self._asked is not None and not self._asked.wants_ids

    @property
    def _wants_usage(self) -> bool:
        """True if the client asked for usage."""
        return not self._hides_usage and self._asked is not None and self._asked.wants_usage

    def head_lines(self, lines: bytes, path: str) -> bytes:
        """Return the header lines of the request; `path` is the path of the client's request."""
        return lines.replace(path.encode("ascii"), b"/v1/completions", 1) if self._as_chat else lines

    @property
    def body(self) -> bytes | None:
        """The body of this lease's request, None for the client's own."""
        if self.second is None and self._hides_ids:
            body = self._outgoing.body
            if body.find(b'"return_token_ids"') < 0:
                return with_field(body, b"return_token_ids", b"true")
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            return msgspec.json.encode(fields | {"return_token_ids": True})
        return self.second

    def draft(self) -> Draft | None:
        """Return the request of the next lease, from the tokens so far; None, with `why`, if impossible."""
        progress, asked = self.progress, self._asked
        if progress is None or asked is None:
            return None
        progress.read()
        if progress.why or progress.finish is not None:
            return self._no_draft(progress.why or "its end came without usage")
        if (made := self._draft) is not None and made.is_of(progress):
            return made
        prompt = asked.prompt or (read_ids(progress.prompt_ids) if progress.prompt_ids else None)
        if prompt is not None and len(prompt) > len(self._outgoing.body) + _TEMPLATE_TOKENS:
            return self._no_draft("more token ids than its prompt can have")
        fields = msgspec.json.decode(self._outgoing.body, type=dict[str, msgspec.Raw])
        draft = Draft(progress)
        read = read_answer(bytes(progress.texts), bytes(progress.ids))
        if read is None:
            return self._no_draft("invalid token ids")
        texts, ids = read
        said = "".join(texts) + progress.ahead
        if not said and not progress.thought:
            if self._hides_ids:
                fields["return_token_ids"] = msgspec.Raw(b"true")
            return self._asking(draft, fields, asked, prompt)
        if progress.in_block or (progress.thought and not said):
            return self._no_draft("reasoning that has not ended")
        if prompt is None or len(ids) != len(texts):
            return self._no_draft("events without token ids")
        draft.as_completion = True
        draft.texts = _settled(texts, ids, said, asked.held_back, progress.settled)
        draft.ids = ids[: len(draft.texts)]
        sent = sum(map(len, draft.texts))
        draft.ahead = said[sent:]
        if draft.ahead and not asked.greedy:
            return self._no_draft("text that another draw would say otherwise")
        answer = [each for piece in draft.ids for each in piece]
        draft.generated = len(answer)
        if self._kind is Kind.CHAT:
            for name in CHAT_ONLY:
                fields.pop(name, None)
        fields["prompt"] = msgspec.Raw(msgspec.json.encode(prompt + answer))
        fields["return_token_ids"] = msgspec.Raw(b"true")
        return self._asking(draft, fields, asked, prompt)

    def _no_draft(self, why: str) -> Draft | None:
        self.why = why
        return None

    def _most_tokens(self, asked: Asked, prompt_tokens: int | None) -> int | None:
        """Return the first engine's limit for the answer in tokens, None if unknown."""
        stated, longest = asked.most_tokens, self._longest
        if not longest or prompt_tokens is None:
            return stated
        room = longest - prompt_tokens  # vLLM 0.32, `get_max_tokens`
        return room if stated is None else min(stated, room)

    def _asking(
        self, draft: Draft, fields: dict[str, msgspec.Raw], asked: Asked, prompt: list[int] | None
    ) -> Draft | None:
        """Finish the body of a draft: its limits are stated, less the generated tokens."""
        most = self._most_tokens(asked, None if prompt is None else len(prompt))
        if most is not None:
            left = most - draft.generated
            if left <= 0:
                return self._no_draft("all of its tokens without its end")
            _limit(fields, left)
            if prompt is not None:
                draft.room = len(prompt) + draft.generated, left
        if asked.least_tokens:
            fields["min_tokens"] = msgspec.Raw(b"%d" % max(0, asked.least_tokens - draft.generated))
        options = msgspec.json.decode(fields.get("stream_options", b"null")) or {}
        fields["stream_options"] = msgspec.Raw(msgspec.json.encode({**options, "include_usage": True}))
        draft.body = msgspec.json.encode(fields)
        self._draft = draft
        return draft

    def take(self, draft: Draft | None) -> None:
        """Adopt a draft. Without one, the same request is sent again."""
        if draft is None:
            self._fruitless += 1
            return
        progress = self.progress
        assert progress is not None, "expected an answer that has begun"
        progress.cut(draft.texts, draft.ids, draft.ahead)
        few = draft.generated - self.generated < _LEAST_TOKENS
        self._fruitless = self._fruitless + 1 if few else 0
        self.second, self.generated, self._room = draft.body, draft.generated, draft.room
        self._as_completion = draft.as_completion
        self._draft = None

    # --- its answer ---

    def stream(self, silent: bool) -> StreamedAnswer:
        asked = self._asked
        if self.second is not None and self.progress is not None:
            return KeptStream(not self._wants_usage, silent, self.progress, self)
        if asked is None:
            return StreamedAnswer(self._hides_usage, silent)
        self.progress = Progress(self._kept)
        self.progress.most_tokens = self._most_tokens(asked, None) or self._longest
        return KeptStream(self._hides_usage, silent, self.progress, hides_ids=self._hides_ids)

    def translate(self, event: bytes, progress: Progress) -> bytes | None:
        """Return a second lease's event for the client, b"" to send none, None if it cannot continue."""
        try:
            fields: dict[str, Any] = msgspec.json.decode(event[6:])
            choices = fields["choices"]
            if not progress.id:
                progress.named(fields.get("id"), fields.get("created"), fields.get("model"))
            fields["id"], fields["created"], fields["model"] = progress.id, progress.created, progress.model
            if self._as_chat:
                fields["object"] = "chat.completion.chunk"
            if isinstance(usage := fields.get("usage"), dict):
                self._add_up(usage)
                progress.usage_sent = not choices
            if choices:
                choice = choices[0]
                delta = choice.get("delta") or {}
                if self._short and choice.get("finish_reason") == "length":
                    self.full, choice["finish_reason"] = True, None
                    event = b"data: " + msgspec.json.encode(fields)
                if delta.get("role") is not None and progress.role_sent and not delta.get("content"):
                    return b""
                progress.take(event, has_prompt=not self.generated)
                progress.bound()
                if progress.why:
                    return None  # another shape: repeated text could not be told from new text
                if not self._adapt(choice, delta, fields, progress):
                    return None
            return b"data: " + msgspec.json.encode(fields)
        except _NOT_TRANSLATED:
            return None

    def _adapt(
        self, choice: dict[str, Any], delta: dict[str, Any], fields: dict[str, Any], progress: Progress
    ) -> bool:
        """Change an event of the second engine to what the client expects, in place.

        Return False if its text differs from the text that the first engine has already given.
        """
        text, ids = choice.get("text", delta.get("content")) or "", choice.get("token_ids")
        if progress.ahead and text:
            size = min(len(progress.ahead), len(text))
            if progress.ahead[:size] != text[:size]:
                return False
            progress.ahead, text = progress.ahead[size:], text[size:]
        for of in (choice, fields):
            if of.get("prompt_token_ids"):
                of["prompt_token_ids"] = None
        if self._asked is None or not self._asked.wants_ids:
            ids = None
            if "token_ids" in choice:
                choice["token_ids"] = None
        if self._as_chat:
            reason = choice.get("finish_reason")
            why = {} if reason is None else {"stop_reason": choice.get("stop_reason")}
            fields["choices"] = [
                {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": reason, **why}
                | {"token_ids": ids}
            ]
        elif "text" in choice:
            choice["text"] = text
        elif delta.get("content") is not None:
            delta["content"] = text
        return True

    def _add_up(self, usage: dict[str, Any]) -> None:
        """Count the tokens of earlier leases, which were part of this one's prompt, as its output."""
        prompt, output = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
        prompt = usage["prompt_tokens"] = max(0, prompt - self.generated)
        output = usage["completion_tokens"] = self.generated + output
        usage["total_tokens"] = prompt + output
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(cached := details.get("cached_tokens"), int):
            details["cached_tokens"] = min(cached, prompt)

    # --- its end ---

    def may_go_on(self, answer: EngineAnswer | None, unsent: bool) -> bool:
        """Return False if it is known already that an answer cannot continue.

        `unsent`: the client has no part of it.
        """
        if self._fruitless >= MAX_FRUITLESS_LEASES:
            return False
        if self.progress is None:  # no part of a plain, incomplete answer was sent
            return unsent and answer is not None and answer.whole_only
        stream = None if answer is None else answer.stream
        return not self.progress.why and not (stream is not None and stream.part_is_out)

    def close(self) -> None:
        """Keep nothing more: the exchange has ended."""
        if self.progress is not None:
            self.why = self.why or self.progress.why
            self.progress.release()

    def last_events(self, answer: EngineAnswer | None) -> bytes | None:
        """Return the events missing behind the last token. Return None if tokens or their number are missing.

        Tokens are counted by their ids, in the engine's place.
        """
        progress, asked = self.progress, self._asked
        if progress is None or asked is None or progress.why or progress.finish is None:
            return None
        prompt = asked.prompt or read_ids(progress.prompt_ids)
        counted = prompt is not None and bool(progress.ids or not progress.texts)
        stream = None if answer is None else answer.stream
        if prompt is not None and counted and stream is not None and stream.completion_tokens is None:
            stream.prompt_tokens = len(prompt) + self.generated
            stream.completion_tokens = progress.tokens - self.generated
        if progress.usage_sent or not self._wants_usage:
            return LAST_EVENT
        if prompt is None or not counted:
            return None
        usage = {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + progress.tokens,
            "completion_tokens": progress.tokens,
        }
        fields: dict[str, Any] = {
            "id": progress.id,
            "object": "chat.completion.chunk" if self._kind is Kind.CHAT else "text_completion",
            "created": progress.created,
            "model": progress.model,
            "choices": [],
            "usage": usage,
        }
        return b"data: " + msgspec.json.encode(fields) + b"\n\n" + LAST_EVENT


class KeptStream(StreamedAnswer):
    """A stream with its events kept in `progress`. `rest`: a second lease's continuation, else None.

    `hides_ids`: hetlb asked for token ids and the client did not, so they are removed.
    """

    __slots__ = ("_kept", "_progress", "_rest")

    def __init__(
        self,
        hold_usage: bool,
        silent: int,
        progress: Progress,
        rest: Continuation | None = None,
        *,
        hides_ids: bool = False,
    ) -> None:
        super().__init__(hold_usage, silent, hides_ids)
        self._progress = progress
        self._rest = rest
        #: Progress that keeps reads as they come; in a second lease each event is looked at.
        self._kept = progress if rest is None else None
        self._each = rest is not None or hides_ids
        if hides_ids:
            self._max_held = _MAX_FIRST_BYTES

    def pass_text(self, chunks: bytes) -> bytes:
        passed = super().pass_text(chunks)
        kept = self._kept
        if passed and kept is not None:
            kept.add_chunks(chunks)
        return passed

    def learn_shape(self) -> None:
        if self._rest is None:
            super().learn_shape()

    def usage(self) -> tuple[int | None, int | None, int | None]:
        """Return the tokens of its lease; its prompt is the client's."""
        prompt, cached, rest = self.prompt_tokens, self.cached_tokens, self._rest
        if prompt is not None and rest is not None:
            prompt -= rest.generated  # the tokens of earlier leases were part of this one's prompt
            cached = None if cached is None else min(cached, prompt)
        return self.completion_tokens, prompt, cached

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

    def _pass_on(self, event: bytes, data: bytes) -> bytes:
        progress, rest = self._progress, self._rest
        if self.lost is not None:
            return b""
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
            if rest.full:
                self.lost, self.lost_by = _FULL, ends.SHORT_OF_ROOM
                return event
        else:
            self._max_held = MAX_HELD_BYTES  # the first event is over
            if self._hides_ids:
                event = _TOKEN_ID_LISTS.sub(rb"\1null", event)
        if data.find(_ABORT) >= 0 and _ABORTED.search(data) is not None:
            self.lost = event  # vLLM ends its running requests when it is stopped
            return b""
        return event

    def _passed_in_parts(self) -> None:
        self._progress.spoil("an event too long to be read")
        self._kept = None


def _limit(fields: dict[str, msgspec.Raw], tokens: int) -> None:
    """State the limit of an answer in the fields of a body."""
    fields["max_tokens"] = msgspec.Raw(b"%d" % tokens)
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = fields["max_tokens"]


def _settled(texts: list[str], ids: list[list[int]], said: str, held_back: int, settled: int) -> list[str]:
    """Return the texts of the leading events that need not be generated again; the last one may be longer.

    `said` is all text that the token ids stand for. An event with text may end the part that is kept. Up to
    it the engine has generated the sent text and `held_back` characters more; up to the first `settled`
    events, just the sent text. The last ids of an event may be a part of a character; behind such ids vLLM
    0.32 says the whole prompt again (`DecodeStream`). So the kept part ends with an event of one id and text,
    or before text that begins with ASCII.
    """
    count = settled
    at = size = sum(map(len, texts[:settled]))
    for number, text in enumerate(texts[settled:], settled + 1):
        at += len(text)
        if text and at + held_back <= len(said):
            following = next(filter(None, texts[number:]), "\ufffd")
            if len(ids[number - 1]) <= 1 or following[0].isascii():
                count, size = number, at
    first = texts[:count]
    if count > settled:
        first[-1] += said[size : size + held_back]
    return first
