"""The request that goes on where an answer broke off, and its events as the client knows them.

With token ids the engine is given those of the prompt and of the answer so far, as a completion: greedy, it
says what the first one would have said. By text it is given the words, which another tokenization may part
otherwise. What of an answer is not known to go on the same way is not resumed (docs/resume.md).
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from hetlb.proxy.http.endpoints import Kind
from hetlb.proxy.progress import Progress

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
_encode = msgspec.json.encode


class Seam:
    """Second lease of an answer: its request, and the changes to its events where the answer goes on.

    `path` is that of the request, None for that of the first, and `by_ids` says that its prompt is token ids,
    with those of the answer so far. `as_chat`: the engine answers as a completion and the client knows a
    chat. `generated` tokens of the answer are in the prompt. `only_end`: nothing but usage and the reason of
    the end is missing. `wants_usage` and `wants_ids`: the client asked for them, by the `fields` of its
    request.
    """

    __slots__ = ("as_chat", "body", "by_ids", "generated", "only_end", "path", "wants_ids", "wants_usage")

    def __init__(
        self,
        generated: int,
        fields: dict[str, Any],
        hides_usage: bool,
        *,
        by_ids: bool,
        as_chat: bool = False,
    ) -> None:
        self.path = b"/v1/completions" if as_chat else None
        self.body = b""
        self.by_ids = by_ids
        self.as_chat = as_chat
        self.generated = generated
        self.wants_usage = not hides_usage and _wants_usage(fields)
        self.wants_ids = bool(fields.get("return_token_ids"))
        self.only_end = False

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
        if self.as_chat:
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
            if not self._go_on(choice, delta, fields, progress):
                return None
            if self.only_end and not choice.get("finish_reason"):
                return b""
        return b"data: " + _encode(fields)

    def _go_on(
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
        if not self.wants_ids:
            ids = None
            if "token_ids" in choice:
                choice["token_ids"] = None
        if self.as_chat:
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


def ends_here(progress: Progress, body: bytes, *, hides_usage: bool) -> bool:
    """True if of the answer nothing but `[DONE]` is missing; `body` is the request's, the rest as below."""
    if not progress.usable or progress.finish is None:
        return False
    return hides_usage or progress.usage_sent or not _wants_usage(msgspec.json.decode(body))


def next_seam(
    kind: Kind, body: bytes, progress: Progress, *, hides_usage: bool, gives_ids: bool, by_text: bool
) -> Seam | None:
    """The request that goes on with an answer; None where it would not be right.

    `hides_usage`: hetlb asked for usage and the client did not. `gives_ids`: the engine takes and gives token
    ids; `by_text`: text will do.
    """
    if not progress.usable:
        return None
    fields: dict[str, Any] = msgspec.json.decode(body)
    texts = [msgspec.json.decode(b'"%b"' % piece) for piece in _PIECE.findall(progress.texts)]
    ids = [[int(each) for each in piece.split(b",") if each] for piece in _LIST.findall(progress.ids)]
    said = "".join(texts) + progress.ahead
    if not said and progress.plain_text and progress.finish is None:
        progress.forget()
        return _whole(fields, progress, hides_usage, gives_ids)
    if progress.in_block or not _resumable(fields):
        return None
    prompt = _prompt_ids(fields, kind, progress) if gives_ids and len(ids) == len(texts) else None
    can_say = by_text and progress.plain_text and _prompt_text(fields, kind) is not None
    if prompt is not None:
        first = _settled(texts, said, _held_back(fields), progress.settled)
        ahead = said[len("".join(first)) :]
        if ahead and can_say and fields.get("temperature") != 0:
            prompt = None  # what is said again may differ
    if prompt is None:
        return _by_text(kind, fields, progress, texts, hides_usage) if can_say else None
    kept = [each for piece in ids[: len(first)] for each in piece]
    progress.cut(first, ids[: len(first)], ahead)
    if kind is Kind.CHAT:
        fields["max_tokens"] = _most_tokens(fields)
        for name in _CHAT_ONLY:
            fields.pop(name, None)
    seam = Seam(len(kept), fields, hides_usage, by_ids=True, as_chat=kind is Kind.CHAT)
    fields["prompt"], fields["return_token_ids"] = prompt + kept, True
    return _finished(seam, fields, progress)


def _whole(fields: dict[str, Any], progress: Progress, hides_usage: bool, gives_ids: bool) -> Seam:
    """The request as it was: nothing was said yet."""
    seam = Seam(0, fields, hides_usage, by_ids=False)
    if gives_ids and not fields.get("tools"):
        fields.setdefault("return_token_ids", True)
    return _finished(seam, fields, progress)


def _by_text(
    kind: Kind, fields: dict[str, Any], progress: Progress, texts: list[str], hides_usage: bool
) -> Seam:
    """The request with the words so far: behind its prompt, or as the assistant's unfinished message."""
    if progress.ahead:
        texts.append(progress.ahead)
    words = said = "".join(texts)
    if kind is Kind.CHAT:
        # Templates strip white space at the end, each in its own way: it is said again.
        words = said.rstrip()
        messages = list(fields["messages"])
        before = ""
        if fields.get("continue_final_message") and isinstance(messages[-1].get("content"), str):
            before = messages.pop()["content"]
        fields["messages"] = [*messages, {"role": "assistant", "content": before + words}]
        fields["continue_final_message"], fields["add_generation_prompt"] = True, False
    else:
        fields["prompt"] = f"{_prompt_text(fields, kind)}{said}"
    first = _first(texts, len(words))
    progress.cut(first, None, said[len(words) :])
    return _finished(Seam(len(first), fields, hides_usage, by_ids=False), fields, progress)


def _first(texts: list[str], size: int) -> list[str]:
    """The first texts, of so many characters together; the last of them may be a part of one."""
    first: list[str] = []
    for text in texts:
        if size <= 0:
            break
        first.append(text[:size])
        size -= len(text)
    return first


def _finished(seam: Seam, fields: dict[str, Any], progress: Progress) -> Seam:
    """Finish the body of its request: its limits are less by what was generated."""
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(most := fields.get(name), int) and not isinstance(most, bool) and most:
            fields[name] = most - seam.generated
            seam.only_end = seam.only_end or fields[name] <= 0
    if progress.finish is not None:
        seam.only_end = True
    least = fields.get("min_tokens")
    if isinstance(least, int) and least:
        fields["min_tokens"] = 0 if seam.only_end else max(0, least - seam.generated)
    if seam.only_end:
        fields["max_tokens"] = 1
        fields.pop("max_completion_tokens", None)
        progress.ahead = ""
    options = fields.get("stream_options")
    fields["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    seam.body = _encode(fields)
    return seam


def _wants_usage(fields: dict[str, Any]) -> bool:
    options = fields.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def _most_tokens(fields: dict[str, Any]) -> Any:
    """Limit of a chat's output, None for as much as there is room."""
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
