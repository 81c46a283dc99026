"""Continuation of an answer at another instance: what came of it, and the request for the rest.

With token ids the engine is given those of the prompt and of the answer so far, as a completion: greedy, it
says what the first one would have said. By text it is given the words, which another tokenization may part
otherwise. What of an answer is not known to go on the same way is not resumed (docs/resume.md).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hetlb.proxy import ends
from hetlb.proxy.client_response import NOTHING
from hetlb.proxy.ends import End
from hetlb.proxy.engine_answer import EngineAnswer
from hetlb.proxy.engine_request import EngineRequest
from hetlb.proxy.exchange_states import RESUMED
from hetlb.proxy.http.endpoints import Kind
from hetlb.proxy.http.openai_body import with_field
from hetlb.proxy.progress import Progress
from hetlb.proxy.streamed_answer import LAST_EVENT, StreamedAnswer

if TYPE_CHECKING:
    from hetlb.proxy.exchange import Exchange

#: Maximum number of second leases: an answer may be what engines fail of.
MOST_RESUMED: Final = 5
_TOKEN_IDS: Final = b"return_token_ids"
#: Fields of a body with which no continuation is known to be the same, unless null, false or 0.
_NOT_RESUMED: Final = (
    "best_of", "echo", "use_beam_search", "top_logprobs", "prompt_logprobs", "presence_penalty",
    "frequency_penalty", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_decoding_backend", "structured_outputs", "prompt_embeds", "suffix", "truncate_prompt_tokens",
    "kv_transfer_params", "thinking_token_budget", "logits_processors", "grammar", "json_schema", "regex",
)  # fmt: skip
#: Fields of a chat that are part of its prompt by the time there are token ids, or mean nothing without it.
_CHAT_ONLY: Final = (
    "messages", "max_completion_tokens", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "documents", "reasoning_effort", "include_reasoning", "parallel_tool_calls",
    "mm_processor_kwargs", "tools", "tool_choice", "functions", "function_call", "response_format",
    "logprobs", "add_special_tokens", "return_prompt_text",
)  # fmt: skip
_PIECE = re.compile(rb'((?:[^"\\]|\\.)*)"')
_LIST = re.compile(rb"\[([0-9,]*)\]")


class Continuation:
    """Second leases of one request, none at first, and what they need of the one before.

    `by_text`: an answer may go on by its text alone; `asks_ids`: hetlb asks for token ids where the engine
    has some; `hides_usage`: it asks for usage, which the client did not. `second` is the body of a second
    lease's request, None in the first lease; `generated` tokens of the answer are in its prompt, and with
    `only_end` nothing but usage and the reason of the end is missing.
    """

    __slots__ = (
        "_asks_ids", "_by_ids", "_by_text", "_gives_ids", "_hides_usage", "_kind", "_outgoing",
        "_wants_ids", "_wants_usage", "generated", "only_end", "progress", "second",
    )  # fmt: skip

    def __init__(
        self, kind: Kind, outgoing: EngineRequest, *, by_text: bool, asks_ids: bool, hides_usage: bool
    ) -> None:
        self._kind = kind
        self._outgoing = outgoing
        self._by_text = by_text
        self._asks_ids = asks_ids
        self._hides_usage = hides_usage
        #: True if the engine of this lease takes and gives token ids.
        self._gives_ids = False
        #: Progress of a stream, None before it begins.
        self.progress: Progress | None = None
        self.second: bytes | None = None
        #: True if the prompt of the second lease is token ids, with those of the answer so far.
        self._by_ids = False
        self.generated = 0
        self.only_end = False
        #: True if the client asked for usage, and for token ids; read for a second lease.
        self._wants_usage = self._wants_ids = False

    # --- the request of a lease ---

    def dispatched(self, gives_ids: bool) -> bool:
        """Another lease begins; False if its instance cannot go on with the answer."""
        self._gives_ids = gives_ids
        return self.second is None or not self._by_ids or gives_ids or self.plan()

    @property
    def _as_chat(self) -> bool:
        """True if the engine answers as a completion and the client knows a chat."""
        return self._by_ids and self._kind is Kind.CHAT

    def head_lines(self, lines: bytes, path: str) -> bytes:
        """Header lines of the request, of which `path` is the client's."""
        return lines.replace(path.encode("ascii"), b"/v1/completions", 1) if self._as_chat else lines

    @property
    def body(self) -> bytes | None:
        """The body of this lease's request, None for that of the client."""
        if self.second is None and self._asks_ids and self._gives_ids:
            return with_field(self._outgoing.body, _TOKEN_IDS, b"true")
        return self.second

    def plan(self) -> bool:
        """Make the request of the next lease; False where none would be right."""
        progress = self.progress
        if progress is None:
            return True
        if not progress.usable:
            return False
        fields: dict[str, Any] = msgspec.json.decode(self._outgoing.body)
        self._wants_usage = not self._hides_usage and _asks_usage(fields)
        self._wants_ids = bool(fields.get("return_token_ids"))
        texts = [msgspec.json.decode(b'"%b"' % piece) for piece in _PIECE.findall(progress.texts)]
        ids = [[int(each) for each in piece.split(b",") if each] for piece in _LIST.findall(progress.ids)]
        said = "".join(texts) + progress.ahead
        if not said and progress.plain_text and progress.finish is None:
            progress.forget()
            if self._gives_ids and not fields.get("tools"):
                fields.setdefault("return_token_ids", True)
            self._ask(fields, progress, 0, by_ids=False)
            return True
        if progress.in_block or not _resumable(fields):
            return False
        prompt = (
            _prompt_ids(fields, self._kind, progress) if self._gives_ids and len(ids) == len(texts) else None
        )
        can_say = self._by_text and progress.plain_text and _prompt_text(fields, self._kind) is not None
        if prompt is not None:
            first = _settled(texts, said, _held_back(fields), progress.settled)
            settled = len("".join(first))
            ahead = said[settled:]
            if ahead and can_say and fields.get("temperature") != 0:
                prompt = None  # what is said again may differ
        if prompt is None:
            if can_say:
                self._ask_by_text(fields, progress, texts, said)
            return can_say
        kept = [each for piece in ids[: len(first)] for each in piece]
        progress.cut(first, ids[: len(first)], ahead)
        if self._kind is Kind.CHAT:
            fields["max_tokens"] = _most_tokens(fields)
            for name in _CHAT_ONLY:
                fields.pop(name, None)
        fields["prompt"], fields["return_token_ids"] = prompt + kept, True
        self._ask(fields, progress, len(kept), by_ids=True)
        return True

    def _ask_by_text(self, fields: dict[str, Any], progress: Progress, texts: list[str], said: str) -> None:
        """Ask with the words so far: behind the prompt, or as the assistant's unfinished message."""
        if progress.ahead:
            texts.append(progress.ahead)
        words = said
        if self._kind is Kind.CHAT:
            # Templates strip white space at the end, each in its own way: it is said again.
            words = said.rstrip()
            messages = list(fields["messages"])
            before = ""
            if fields.get("continue_final_message") and isinstance(messages[-1].get("content"), str):
                before = messages.pop()["content"]
            fields["messages"] = [*messages, {"role": "assistant", "content": before + words}]
            fields["continue_final_message"], fields["add_generation_prompt"] = True, False
        else:
            fields["prompt"] = f"{_prompt_text(fields, self._kind)}{said}"
        first = _first(texts, len(words))
        progress.cut(first, None, said[len(words) :])
        self._ask(fields, progress, len(first), by_ids=False)

    def _ask(self, fields: dict[str, Any], progress: Progress, generated: int, *, by_ids: bool) -> None:
        """Finish the body of the request: its limits are less by what was generated."""
        self._by_ids, self.generated = by_ids, generated
        self.only_end = progress.finish is not None
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(most := fields.get(name), int) and not isinstance(most, bool) and most:
                fields[name] = most - generated
                self.only_end = self.only_end or fields[name] <= 0
        least = fields.get("min_tokens")
        if isinstance(least, int) and least:
            fields["min_tokens"] = 0 if self.only_end else max(0, least - generated)
        if self.only_end:
            fields["max_tokens"] = 1
            fields.pop("max_completion_tokens", None)
            progress.ahead = ""
        options = fields.get("stream_options")
        fields["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        self.second = msgspec.json.encode(fields)

    # --- its answer ---

    def stream(self, silent: bool) -> StreamedAnswer:
        if self.second is not None:
            return StreamedAnswer(not self._wants_usage, silent, self.progress, self)
        if self._gives_ids or self._by_text:
            self.progress = Progress()
        asked_ids = self._asks_ids and self._gives_ids
        return StreamedAnswer(self._hides_usage, silent, self.progress, None, asked_ids)

    def translate(self, event: bytes, progress: Progress) -> bytes | None:
        """An event of the second lease for the client, b"" for none; None where it does not go on."""
        try:
            fields: dict[str, Any] = msgspec.json.decode(event[6:])
            choices = fields["choices"]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
            return None
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
            if not self.only_end:
                progress.take(event, has_prompt=not self.generated)
                if not progress.usable:
                    return None  # another shape: what is said again could not be told from what is new
            if not self._adapt(choice, delta, fields, progress):
                return None
            if self.only_end and not choice.get("finish_reason"):
                return b""
        return b"data: " + msgspec.json.encode(fields)

    def _adapt(
        self, choice: dict[str, Any], delta: dict[str, Any], fields: dict[str, Any], progress: Progress
    ) -> bool:
        """Change in place what an event says; False if it says other than was said before."""
        text, ids = choice.get("text", delta.get("content")) or "", choice.get("token_ids")
        if self.only_end:
            # It was given one more token to say, which is none of the answer's.
            ended = choice.get("finish_reason") and progress.finish is None
            choice["finish_reason"] = "length" if ended else None
            progress.finish = progress.finish or choice["finish_reason"]
            text, ids = "", None
        if progress.ahead and text:
            size = min(len(progress.ahead), len(text))
            if progress.ahead[:size] != text[:size]:
                return False
            progress.ahead, text = progress.ahead[size:], text[size:]
        for of in (choice, fields):
            if of.get("prompt_token_ids"):
                of["prompt_token_ids"] = None
        if not self._wants_ids:
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
        output = usage["completion_tokens"] = self.generated + (0 if self.only_end else output)
        usage["total_tokens"] = prompt + output
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(cached := details.get("cached_tokens"), int):
            details["cached_tokens"] = min(cached, prompt)

    # --- its end ---

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
        unsaid = not self.generated and end is not ends.NOTICE
        if exchange.dropped and unsaid:
            return False  # run twice, and not a token: the request itself may be what kills engines
        lease.output_tokens = 0 if answer is None else answer.tokens_so_far
        exchange.dropped = unsaid
        exchange.resumed += 1
        exchange.back_to_queue(RESUMED)
        exchange.resumed_tokens = self.generated
        exchange.request = exchange.request.goes_on(self.generated)
        exchange.driver.goes_on(exchange.request, lease, ends.HELD_UP if response.held_up else end)
        return True

    def _knows_the_rest(self, answer: EngineAnswer | None, *, unsent: bool) -> bool:
        """True if the rest of an answer is known; `unsent`: the client has nothing of it."""
        if self.progress is None:  # of a plain answer that is not whole nothing was sent
            return unsent and answer is not None and answer.whole_only
        if answer is not None and answer.stream is not None and answer.stream.part_is_out:
            return False
        self.progress.read()
        return self._last_event(answer) is not None or self.plan()

    def _last_event(self, answer: EngineAnswer | None) -> bytes | None:
        """Last event, b"" if it was passed on; None where more of the answer is missing."""
        stream = None if answer is None else answer.stream
        if stream is not None and stream.done and not stream.failed:
            return b""
        progress = self.progress
        if progress is None or not progress.usable or progress.finish is None:
            return None
        if self._hides_usage or progress.usage_sent:
            return LAST_EVENT
        return None if _asks_usage(msgspec.json.decode(self._outgoing.body)) else LAST_EVENT


def _first(texts: list[str], size: int) -> list[str]:
    """The first texts, of so many characters together; the last of them may be a part of one."""
    first: list[str] = []
    for text in texts:
        if size <= 0:
            break
        first.append(text[:size])
        size -= len(text)
    return first


def _asks_usage(fields: dict[str, Any]) -> bool:
    options = fields.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def _most_tokens(fields: dict[str, Any]) -> Any:
    most = fields.get("max_completion_tokens")
    return fields.get("max_tokens") if most is None else most


def _resumable(fields: dict[str, Any]) -> bool:
    """True if nothing in a body keeps its answer from going on elsewhere."""
    logprobs = fields.get("logprobs")  # 0 asks for those of the tokens that were chosen
    if any(fields.get(name) for name in _NOT_RESUMED) or not (logprobs is None or logprobs is False):
        return False
    if fields.get("include_stop_str_in_output") and fields.get("stop"):
        return False  # a stop string could lie across the seam
    form = fields.get("response_format")
    return form is None or (isinstance(form, dict) and form.get("type") == "text")


def _held_back(fields: dict[str, Any]) -> int:
    """Characters that the engine holds back, since a stop string may begin with them."""
    stop = fields.get("stop")
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    return max([len(each) for each in stops if isinstance(each, str)], default=1) - 1


def _settled(texts: list[str], said: str, held_back: int, settled: int) -> list[str]:
    """The first events of which all text was sent, with that text; later ones are said again.

    After an event with text the engine has generated what was sent and `held_back` characters more; after the
    first `settled` what was sent. An event without text may be the first part of a character.
    """
    count = settled
    at = size = sum(map(len, texts[:settled]))
    for number, text in enumerate(texts[settled:], settled + 1):
        at += len(text)
        if text and at + held_back <= len(said):
            count, size = number, at
    first = texts[:count]
    if count > settled:
        first[-1] += said[size : size + held_back]
    return first


def _prompt_text(fields: dict[str, Any], kind: Kind) -> str | None:
    """The text of a prompt, None where it is none; of a chat ""."""
    if kind is Kind.CHAT:
        return "" if isinstance(fields.get("messages"), list) and fields["messages"] else None
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else None


def _prompt_ids(fields: dict[str, Any], kind: Kind, progress: Progress) -> list[int] | None:
    """The token ids of a prompt, None where they are not all of it."""
    if kind is Kind.CHAT:
        if fields.get("tools") or fields.get("functions"):
            return None  # the parser of calls is the chat's
        for message in fields.get("messages") or ():
            parts = message.get("content") if isinstance(message, dict) else None
            if isinstance(parts, list) and any(
                not isinstance(part, dict) or part.get("type") != "text" for part in parts
            ):
                return None  # ids stand in for an image
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return prompt
    found: list[int] | None = msgspec.json.decode(progress.prompt_ids) if progress.prompt_ids else None
    return found
