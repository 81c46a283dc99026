"""Continuation of an answer at another instance: what came of it, and the request for the rest.

The engine is given the token ids of the prompt and of the answer so far, as a completion: greedy, it says
what the first one would have said. Whether an answer may go on is decided when its request is sent, from one
reading of its body (`resume_fields.py`); what is not known to go on the same way ends (docs/resume.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hetlb.balancer.clients.client_response import NOTHING
from hetlb.balancer.engines.upstream import SideCall
from hetlb.balancer.exchange import ends
from hetlb.balancer.exchange.ends import End
from hetlb.balancer.exchange.engine_answer import EngineAnswer
from hetlb.balancer.exchange.engine_request import EngineRequest
from hetlb.balancer.exchange.exchange_states import RESUMED, Phase
from hetlb.balancer.exchange.streamed_answer import LAST_EVENT, StreamedAnswer
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.http.http1 import ResponseHead
from hetlb.balancer.http.openai_body import with_field
from hetlb.options.resume.progress import Kept, Progress
from hetlb.options.resume.resume_fields import CHAT_ONLY, NOT_READ, Asked, read_answer, read_asked, read_ids

if TYPE_CHECKING:
    from hetlb.balancer.core.types import Lease
    from hetlb.balancer.exchange.exchange import Exchange

#: Maximum number of leases in a row that bring few tokens: an answer may be what engines fail of.
MOST_RESUMED: Final = 5
#: Minimum number of tokens that a lease brings, or it counts.
_LEAST_TOKENS: Final = 16
#: Maximum number of engines that die in an answer which goes on after it: the request may be what kills them.
MOST_DEATHS: Final = 1
#: Prompt tokens that a template may add to one for each byte of the body.
_TEMPLATE_TOKENS: Final = 1024
_TOKEN_IDS: Final = b"return_token_ids"
_DONE: Final = Phase.DONE
#: Errors at an event that is not of the expected form.
_NOT_TRANSLATED: Final = (*NOT_READ, LookupError, TypeError, AttributeError)
#: Ends of a connection after which its engine may be dead.
_BY_CONNECTION: Final = (ends.BROKEN, ends.DROPPED)


class Draft:
    """Request for the rest of an answer: its body, and what of the progress is in its prompt.

    `generated` tokens of the answer are in its prompt, `texts` and `ids` their events; the client has
    `ahead` behind them.
    """

    __slots__ = (
        "_size", "ahead", "as_completion", "body", "generated", "ids", "texts",
    )  # fmt: skip

    def __init__(self, progress: Progress) -> None:
        self._size = len(progress.texts)
        self.body = b""
        self.generated = 0
        self.as_completion = False
        self.texts: list[str] = []
        self.ids: list[list[int]] = []
        self.ahead = ""

    def is_of(self, progress: Progress) -> bool:
        """True if nothing has come since it was made."""
        return self._size == len(progress.texts)


class Continuation:
    """Second leases of one request, none at first, and what they need of the one before.

    `asks_ids`: hetlb asks for token ids where the engine has some; `hides_usage`: it asks for usage, which
    the client did not. `second` is the body of a second lease's request, None in the first lease; `generated`
    tokens of the answer are in its prompt. `why` says why the answer is not resumed, "" where it may be.
    """

    __slots__ = (
        "_as_completion", "_asked", "_asks_ids", "_check", "_deaths", "_draft", "_fruitless", "_hides_usage",
        "_kept", "_kind", "_longest", "_outgoing", "_waiting", "generated", "pending_since", "progress",
        "second", "streamed", "why",
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
        #: Facts of the body, None where they were not read, or keep its answer from going on.
        self._asked: Asked | None = None
        self.why = "" if streamed else "no stream"
        #: Longest request of the first engine in tokens, 0 where it is not known.
        self._longest = 0
        #: Progress of a stream, None before it begins.
        self.progress: Progress | None = None
        self.second: bytes | None = None
        self._draft: Draft | None = None
        #: True if the engine answers as a completion what the client may know as a chat.
        self._as_completion = False
        self.generated = 0
        #: Time since which it is on its way to another lease, None while it is not.
        self.pending_since: float | None = None
        #: Leases in a row that brought few tokens.
        self._fruitless = 0
        #: Engines that died in this answer, and the question whether the last one lives.
        self._deaths = 0
        self._check: SideCall | None = None
        self._waiting: Callable[[], None] | None = None

    # --- the request of a lease ---

    def dispatched(self, gives_ids: bool, max_model_len: int) -> bool:
        """Another lease begins; False if its instance cannot go on with the answer."""
        if self.second is not None:
            return gives_ids
        self._longest = max_model_len
        self._asked = None
        if self.streamed:
            self.why = "its engine gives no token ids"
            if gives_ids:
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
        """Header lines of the request, of which `path` is the client's."""
        return lines.replace(path.encode("ascii"), b"/v1/completions", 1) if self._as_chat else lines

    @property
    def body(self) -> bytes | None:
        """The body of this lease's request, None for that of the client."""
        if self.second is None and self._hides_ids:
            return with_field(self._outgoing.body, _TOKEN_IDS, b"true")
        return self.second

    def draft(self) -> Draft | None:
        """Make the request of the next lease from what has come; None where none is right: `why` says so."""
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
            return self._no_draft("token ids that are none")
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
        """Return the limit of the first engine for the answer in tokens, None where it is not known."""
        stated, longest = asked.most_tokens, self._longest
        if not longest or prompt_tokens is None:
            return stated
        room = longest - prompt_tokens  # vLLM 0.32, `get_max_tokens`
        return room if stated is None else min(stated, room)

    def _asking(
        self, draft: Draft, fields: dict[str, msgspec.Raw], asked: Asked, prompt: list[int] | None
    ) -> Draft | None:
        """Finish the body of a draft: its limits are stated, and less by what was generated."""
        most = self._most_tokens(asked, None if prompt is None else len(prompt))
        if most is not None:
            if most <= draft.generated:
                return self._no_draft("all of its tokens without its end")
            fields["max_tokens"] = msgspec.Raw(b"%d" % (most - draft.generated))
            if "max_completion_tokens" in fields:
                fields["max_completion_tokens"] = fields["max_tokens"]
        if asked.least_tokens:
            fields["min_tokens"] = msgspec.Raw(b"%d" % max(0, asked.least_tokens - draft.generated))
        options = msgspec.json.decode(fields.get("stream_options", b"null")) or {}
        fields["stream_options"] = msgspec.Raw(msgspec.json.encode({**options, "include_usage": True}))
        draft.body = msgspec.json.encode(fields)
        self._draft = draft
        return draft

    def _take(self, draft: Draft) -> None:
        """Go by a draft from now on."""
        progress = self.progress
        assert progress is not None, "expected an answer that has begun"
        progress.cut(draft.texts, draft.ids, draft.ahead)
        few = draft.generated - self.generated < _LEAST_TOKENS
        self._fruitless = self._fruitless + 1 if few else 0
        self.second, self.generated = draft.body, draft.generated
        self._as_completion = draft.as_completion
        self._draft = None

    # --- its answer ---

    def stream(self, silent: bool) -> StreamedAnswer:
        asked = self._asked
        if self.second is not None:
            return StreamedAnswer(not self._wants_usage, silent, self.progress, self)
        if asked is not None:
            self.progress = Progress(self._kept)
            self.progress.most_tokens = self._most_tokens(asked, None) or self._longest
        return StreamedAnswer(self._hides_usage, silent, self.progress, None, self._hides_ids)

    def translate(self, event: bytes, progress: Progress) -> bytes | None:
        """An event of the second lease for the client, b"" for none; None where it does not go on."""
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
                if delta.get("role") is not None and progress.role_sent and not delta.get("content"):
                    return b""
                progress.take(event, has_prompt=not self.generated)
                progress.bound()
                if progress.why:
                    return None  # another shape: what is said again could not be told from what is new
                if not self._adapt(choice, delta, fields, progress):
                    return None
            return b"data: " + msgspec.json.encode(fields)
        except _NOT_TRANSLATED:
            return None

    def _adapt(
        self, choice: dict[str, Any], delta: dict[str, Any], fields: dict[str, Any], progress: Progress
    ) -> bool:
        """Change in place what an event says; False if it says other than was said before."""
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

    def go_on(self, exchange: Exchange, end: End, otherwise: Callable[[], None]) -> bool:
        """Begin to take another lease for the rest of an answer whose engine is lost; False if it cannot.

        Where that shows later, `otherwise` ends the exchange. Answers of one engine are read in turns.
        """
        answer, lease = exchange.answer, exchange.lease
        if lease is None or exchange.transfer is not None or self.pending_since is not None:
            return False
        if self._fruitless >= MOST_RESUMED or not self._may(answer, exchange.response.state is NOTHING):
            return False
        exchange.since = self.pending_since = exchange.now()

        exchange.driver.guard.later(exchange, lambda: self._go(exchange, lease, end, otherwise))
        return True

    def _may(self, answer: EngineAnswer | None, unsent: bool) -> bool:
        """True unless it is known already that an answer cannot go on; `unsent`: the client has nothing."""
        if self.progress is None:  # of a plain answer that is not whole nothing was sent
            return unsent and answer is not None and answer.whole_only
        stream = None if answer is None else answer.stream
        return not self.progress.why and not (stream is not None and stream.part_is_out)

    def _go(self, exchange: Exchange, lease: Lease, end: End, otherwise: Callable[[], None]) -> None:
        """End the answer where nothing of it is missing; else see whether it may go on."""
        answer, progress = exchange.answer, self.progress
        if self.pending_since is None:
            return
        if progress is not None:
            progress.read()
        if (last := self._last_events(answer)) is not None:
            self.pending_since = None
            exchange.response.write(exchange.response.last(last))
            if answer is not None:
                exchange.take_usage(answer)
            exchange.finish(ends.LAST_MISSING)
            return
        draft = self.draft()
        generated = 0 if draft is None else draft.generated
        # Run twice, and not a token: the request itself may be what kills engines.
        if exchange.dropped and not generated:
            self.why = self.why or "lost twice without a token"
        if (draft is None and progress is not None) or (exchange.dropped and not generated):
            self._stop(otherwise)
        elif end in _BY_CONNECTION:

            def go_on() -> None:
                self._leave(exchange, lease, end, draft)

            waits = self._deaths >= MOST_DEATHS
            self._ask_whether_it_lives(exchange, lease, go_on if waits else None, otherwise)
            if not waits:
                go_on()
        else:
            self._leave(exchange, lease, end, draft)

    def _stop(self, otherwise: Callable[[], None]) -> None:
        self.pending_since = None
        otherwise()

    def _ask_whether_it_lives(
        self,
        exchange: Exchange,
        lease: Lease,
        go_on: Callable[[], None] | None,
        otherwise: Callable[[], None],
    ) -> None:
        """Ask the engine of a lost lease for its health; `go_on`, if any, waits for the answer."""
        if self._check is not None:  # the one before has not answered yet
            self._check.abort()
            self._deaths += 1

        def told(dead: bool) -> None:
            self._check = self._waiting = None
            self._deaths += dead
            if go_on is None or self.pending_since is None or exchange.phase is _DONE:
                return
            if self._deaths > MOST_DEATHS:
                self._stop(otherwise)
            else:
                go_on()

        def done(head: ResponseHead, body: bytes) -> None:
            told(False)

        def failed(end: End, detail: str) -> None:
            told(True)

        pool = exchange.driver.pools.find(lease)
        if pool is None:
            told(False)
            return
        self._check = SideCall(pool, pool.head(b"GET /health"), b"", done, failed, on_fault=exchange.fault)
        self._waiting = go_on and (lambda: told(False))
        pool.send(self._check, fresh=True)

    def sweep(self, exchange: Exchange, now: float, patience_s: float) -> None:
        """Wait no longer for an engine to say that it lives: it hangs, and is no death."""
        waiting, check = self._waiting, self._check
        if self.pending_since is None or waiting is None or now - self.pending_since <= patience_s:
            return
        if check is not None:
            check.abort()
        waiting()

    def _leave(self, exchange: Exchange, lease: Lease, end: End, draft: Draft | None) -> None:
        """Give the lease back and wait for another one."""
        self.pending_since = None
        response, answer = exchange.response, exchange.answer
        if draft is not None:
            self._take(draft)
        else:
            self._fruitless += 1
        lease.output_tokens = 0 if answer is None else answer.tokens_so_far
        exchange.dropped = not self.generated and end is not ends.NOTICE
        exchange.resumed += 1
        exchange.back_to_queue(RESUMED)
        exchange.resumed_tokens = self.generated
        exchange.request = exchange.request.goes_on(self.generated)
        exchange.driver.goes_on(exchange.request, lease, ends.HELD_UP if response.held_up else end)

    def may_move(self, exchange: Exchange) -> bool:
        """True if an answer can go on elsewhere while its engine lives: then there is a `draft`."""
        answer = exchange.answer
        stream = None if answer is None else answer.stream
        if self.pending_since is not None or self.progress is None or self._fruitless >= MOST_RESUMED:
            return False
        if not self._may(answer, False) or (stream is not None and stream.done):
            return False
        return self.draft() is not None

    def moved(self, exchange: Exchange, lease: Lease) -> bool:
        """The rest has a place: leave the live engine of `lease`. False where it cannot go on after all."""
        answer, draft = exchange.answer, self.draft()
        if draft is None:
            return False
        self._take(draft)
        lease.output_tokens = 0 if answer is None else answer.tokens_so_far
        exchange.resumed += 1
        exchange.back_to_queue(RESUMED)
        exchange.resumed_tokens = self.generated
        exchange.request = exchange.request.goes_on(self.generated)
        return True

    def close(self) -> None:
        """The exchange has ended: keep nothing more."""
        if self._check is not None:
            self._check.abort()
            self._check = self._waiting = None
        if self.progress is not None:
            self.why = self.why or self.progress.why
            self.progress.release()

    def _last_events(self, answer: EngineAnswer | None) -> bytes | None:
        """Return the events that are missing behind the last token; None where tokens are, or their number.

        They are counted by their ids, in the engine's place.
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


def _settled(texts: list[str], ids: list[list[int]], said: str, held_back: int, settled: int) -> list[str]:
    """Return the first events of which all text was sent, with that text; later ones are said again.

    After an event with text the engine has generated what was sent and `held_back` characters more; after the
    first `settled` what was sent. The last ids of an event may be a part of a character, behind which vLLM
    0.32 says the whole prompt again (`DecodeStream`): not if it has one id and text, nor if the next text
    begins with ASCII.
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
