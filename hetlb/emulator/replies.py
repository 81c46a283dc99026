"""The shapes of vLLM 0.32's answers, recorded from a real server (`tests/vllm/data`).

Keys, their order and their nulls are those of the recordings. The text of every answer is
` t0 t1 t2 ...`, one word a token, so that a reader sees what is missing or out of order. What does not
change from token to token is built once per answer: a token costs one formatting and one write.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from hetlb.emulator.requests import Generation, Prompt
from hetlb.emulator.runner import Choice
from hetlb.emulator.tools import ToolCall

VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-emulated"

#: Stands where a token's text goes while a template is built; JSON never holds it unescaped.
_MARK = "\0"
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"

_encode = msgspec.json.encode
_words = ""
_word_count = 0


def words(count: int) -> str:
    """The text of the first `count` tokens of any answer."""
    global _words, _word_count
    if count > _word_count:
        more = max(count, 2 * _word_count, 1024)
        _words += "".join([f" t{number}" for number in range(_word_count, more)])
        _word_count = more
    length = 2 * count  # " t" of each, then the digits: one each, one more from 10 on, and so on
    step = 1
    while step <= count:
        length += count - step if step > 1 else count
        step *= 10
    return _words[:length]


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def quoted(text: str) -> str:
    """A JSON string."""
    return _encode(text).decode()


class Out(Protocol):
    """Interface of a reply's connection."""

    def write(self, data: bytes) -> None:
        """Send bytes of the body."""

    def respond(self, status: int, body: bytes) -> None:
        """Send a whole JSON response and be done."""

    def done(self) -> None:
        """The whole response has been written."""


class Reply:
    """One response being generated: `prompts * n` choices, answered when all of them are complete."""

    def __init__(self, out: Out, generation: Generation, max_model_len: int, request_id: str) -> None:
        self.out = out
        self.generation = generation
        self.id = f"{self.PREFIX}{request_id}"
        self.created = int(time.time())
        self.output_tokens = 0
        #: Prefix of the number of a token: `x` where its KV cache is that of another prompt.
        self.word = "t"
        #: KV hand-over: what the answer says of the blocks that are kept, and whence they are fetched.
        self.on_finished: Callable[[Reply], dict[str, Any] | None] | None = None
        self.kv_source: dict[str, Any] | None = None
        self.kv_done = False
        self.choices: list[ReplyChoice] = []
        kind = self.choice_type()
        for prompt in generation.prompts:
            for number in range(generation.n):
                output, reason = generation.length(prompt, number, max_model_len)
                self.choices.append(kind(self, len(self.choices), prompt, output, reason))
        self.open = len(self.choices)

    PREFIX = ""

    def choice_type(self) -> type[ReplyChoice]:
        """Class of the choices, by the way their tokens are sent."""
        return PlainChoice

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens in and out so far, all choices together."""
        prompt_tokens = sum(prompt.tokens for prompt in self.generation.prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + self.output_tokens,
            "completion_tokens": self.output_tokens,
        }

    def finished(self, choice: ReplyChoice, tail: bytes = b"") -> None:
        """A choice is complete; `tail` is the last piece of its stream."""
        self.open -= 1
        self.output_tokens += choice.output_tokens
        params = None if self.on_finished is None or self.open else self.on_finished(self)
        if self.generation.stream:
            if self.open:
                self.out.write(tail)
            else:
                self.out.write(tail + self.closing())
                self.out.done()
        elif not self.open:
            body = self.body()
            if params is not None:
                body["kv_transfer_params"] = params
            self.out.respond(200, _encode(body))

    def text(self, count: int) -> str:
        """The first `count` tokens of the answer."""
        text = words(count)
        return text if self.word == "t" else text.replace(" t", f" {self.word}")

    def fail(self, message: str) -> None:
        """Answer that the engine has failed: a status, or the event of a stream whose head is out."""
        error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
        body = _encode({"error": error})
        if self.generation.stream:
            self.out.write(chunk(b"data: %b\n\n" % body) + DONE)
            self.out.done()
        else:
            self.out.respond(500, body)

    def body(self) -> dict[str, Any]:
        """The whole answer of a plain request."""
        raise NotImplementedError

    def opening(self) -> bytes:
        """Bytes before the first token of a stream, framed."""
        return b""

    def event(self, choice: ReplyChoice, text: str, *, last: bool = False) -> str:
        """One event of a stream; `text` goes in as it is."""
        raise NotImplementedError

    def finish_reason(self, choice: ReplyChoice) -> str:
        """vLLM's word for why an answer ended; a call that the request named ends as text does."""
        tool = self.generation.tool
        called = tool is not None and not tool.forced and choice.finish_reason == "stop"
        return "tool_calls" if called else choice.finish_reason

    def closing(self) -> bytes:
        """Bytes that end a stream, framed."""
        return DONE

    def usage_event(self, kind: str) -> bytes:
        """The event with the usage of the whole answer, framed; nothing where the client asked for none."""
        if not self.generation.include_usage:
            return b""
        event = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.generation.model,
            "choices": [],
            "usage": self.usage,
            "system_fingerprint": FINGERPRINT,
        }
        return chunk(b"data: %b\n\n" % _encode(event))

    def usage_so_far(self, choice: ReplyChoice, extra: str = "") -> str:
        """The `usage` of one event under `continuous_usage_stats`."""
        if not self.generation.continuous_usage:
            return ""
        prompt, output = choice.prompt_tokens, choice.sent
        return (
            f',"usage":{{"prompt_tokens":{prompt},"total_tokens":{prompt + output},'
            f'"completion_tokens":{output}{extra}}}'
        )

    def stamp(self, last: bool) -> str:
        """The fingerprint on a choice's last event, unless a usage event follows and carries it."""
        if last and not self.generation.include_usage:
            return f',"system_fingerprint":"{FINGERPRINT}"'
        return ""


class ReplyChoice(Choice):
    """One of the answers of a reply. `sent` counts its tokens."""

    __slots__ = ("index", "prompt", "reasoning_tokens", "reply", "sent")

    def __init__(self, reply: Reply, index: int, prompt: Prompt, output_tokens: int, reason: str) -> None:
        super().__init__(prompt.tokens, output_tokens, reason)
        self.pieces = prompt.pieces
        self.reply = reply
        self.index = index
        self.prompt = prompt
        self.sent = 0
        self.reasoning_tokens = reply.generation.reasoning_tokens(output_tokens)

    @property
    def reasoning(self) -> str | None:
        """The text of its reasoning; None where it has none."""
        return self.reply.text(self.reasoning_tokens) if self.reasoning_tokens else None

    @property
    def content(self) -> str:
        """The text that follows the reasoning."""
        return self.reply.text(self.output_tokens)[len(words(self.reasoning_tokens)) :]

    def arguments(self, tool: ToolCall) -> str:
        """The arguments of its call, as far as its tokens reach."""
        pieces = range(self.output_tokens - self.reasoning_tokens)
        return "".join([tool.piece(number) for number in pieces])


class PlainChoice(ReplyChoice):
    """Its text goes out with the whole answer."""

    __slots__ = ()

    def finish(self) -> None:
        self.reply.finished(self)


class StreamChoice(ReplyChoice):
    """Every token is an event that differs from the one before in nothing but the token's number."""

    __slots__ = ("_head", "_prefix", "_suffix", "_widen_at", "_write")

    def __init__(self, reply: Reply, index: int, prompt: Prompt, output_tokens: int, reason: str) -> None:
        super().__init__(reply, index, prompt, output_tokens, reason)
        self._write = reply.out.write
        self._head = self._prefix = self._suffix = b""
        self._widen_at = 0

    def token(self) -> None:
        number = self.sent
        if number >= self._widen_at:
            self._widen(number)
        self.sent = number + 1
        self._write(b"%b%d%b" % (self._prefix, number, self._suffix))

    def finish(self) -> None:
        number = self.sent
        opening = self.reply.opening() if number == 0 else b""
        self.sent = number + 1
        event = self.reply.event(self, f" {self.reply.word}{number}", last=True)
        self.reply.finished(self, opening + chunk(event.encode()))

    def _widen(self, number: int) -> None:
        """Prepare for numbers of one more digit: the chunk's size is part of what is constant."""
        if number == 0:
            head, _, tail = self.reply.event(self, _MARK).partition(_MARK)
            self._head = head.encode() + f" {self.reply.word}".encode()
            self._suffix = tail.encode() + b"\r\n"
            if opening := self.reply.opening():
                self._write(opening)
        digits = len(str(number))
        size = len(self._head) + digits + len(self._suffix) - 2
        self._prefix = b"%x\r\n%b" % (size, self._head)
        self._widen_at = 10**digits


class EventChoice(ReplyChoice):
    """Every token is an event built anew, for streams whose events count something."""

    __slots__ = ()

    def token(self) -> None:
        self.reply.out.write(self._event(last=False))

    def finish(self) -> None:
        self.reply.finished(self, self._event(last=True))

    def _event(self, *, last: bool) -> bytes:
        number = self.sent
        opening = self.reply.opening() if number == 0 else b""
        self.sent = number + 1
        return opening + chunk(self.reply.event(self, f" {self.reply.word}{number}", last=last).encode())


class CompletionReply(Reply):
    """`POST /v1/completions`."""

    PREFIX = "cmpl-"

    def choice_type(self) -> type[ReplyChoice]:
        generation = self.generation
        if not generation.stream:
            return PlainChoice
        return EventChoice if generation.continuous_usage or generation.echo else StreamChoice

    def body(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.generation.model,
            "choices": [
                {
                    "index": choice.index,
                    "text": (choice.prompt.text if self.generation.echo else "")
                    + self.text(choice.output_tokens),
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": None,
                    "token_ids": None,
                    "prompt_logprobs": None,
                    "prompt_token_ids": None,
                    "routed_experts": None,
                }
                for choice in self.choices
            ],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {**self.usage, "prompt_tokens_details": None, "completion_tokens_details": None},
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def event(self, choice: ReplyChoice, text: str, *, last: bool = False) -> str:
        if self.generation.echo and choice.sent == 1:
            text = quoted(choice.prompt.text)[1:-1] + text
        reason = f'"{choice.finish_reason}"' if last else "null"
        return (
            f'data: {{"id":{quoted(self.id)},"object":"text_completion","created":{self.created},'
            f'"model":{quoted(self.generation.model)},"choices":[{{"index":{choice.index},"text":"{text}",'
            f'"logprobs":null,"finish_reason":{reason},"stop_reason":null,"prompt_token_ids":null,'
            f'"token_ids":null}}]{self.usage_so_far(choice)}{self.stamp(last)}}}\n\n'
        )

    def closing(self) -> bytes:
        return self.usage_event("text_completion") + DONE


class ChatReply(Reply):
    """`POST /v1/chat/completions`."""

    PREFIX = "chatcmpl-"

    _opened = False

    def choice_type(self) -> type[ReplyChoice]:
        generation = self.generation
        if not generation.stream:
            return PlainChoice
        varies = generation.continuous_usage or generation.tool is not None or generation.reasoning
        return EventChoice if varies else StreamChoice

    def _message(self, choice: ReplyChoice) -> dict[str, Any]:
        tool = self.generation.tool
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.content if tool is None else None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if tool is not None and choice.output_tokens > choice.reasoning_tokens:
            function = {"name": tool.name, "arguments": choice.arguments(tool)}
            message["tool_calls"] = [{"id": self.call_id(choice), "type": "function", "function": function}]
        return {**message, "reasoning": choice.reasoning}

    def call_id(self, choice: ReplyChoice) -> str:
        """The id of the call of a choice."""
        return f"chatcmpl-tool-{self.id[len(self.PREFIX) :]}{choice.index or ''}"

    def body(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.generation.model,
            "choices": [
                {
                    "index": choice.index,
                    "message": self._message(choice),
                    "logprobs": None,
                    "finish_reason": self.finish_reason(choice),
                    "stop_reason": None,
                    "token_ids": None,
                    "routed_experts": None,
                }
                for choice in self.choices
            ],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {**self.usage, "prompt_tokens_details": None, "completion_tokens_details": None},
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _frame(self, rest: str) -> str:
        return (
            f'data: {{"id":{quoted(self.id)},"object":"chat.completion.chunk","created":{self.created},'
            f'"model":{quoted(self.generation.model)},"choices":[{rest}}}\n\n'
        )

    def opening(self) -> bytes:
        """The role of every choice, with the first token of any."""
        if self._opened:
            return b""
        self._opened = True
        events = []
        for choice in self.choices:
            usage = self.usage_so_far(choice, ',"completion_tokens_details":null')
            rest = (
                f'{{"index":{choice.index},"delta":{{"role":"assistant","content":""}},"logprobs":null,'
                f'"finish_reason":null}}]{usage},"prompt_token_ids":null,"prompt_text":null'
            )
            events.append(chunk(self._frame(rest).encode()))
        return b"".join(events)

    def event(self, choice: ReplyChoice, text: str, *, last: bool = False) -> str:
        reason = f'"{self.finish_reason(choice)}","stop_reason":null' if last else "null"
        usage = self.usage_so_far(choice, ',"completion_tokens_details":null')
        return self._frame(
            f'{{"index":{choice.index},"delta":{{{self._delta(choice, text)}}},"logprobs":null,'
            f'"finish_reason":{reason},"token_ids":null}}]{usage}{self.stamp(last)}'
        )

    def _delta(self, choice: ReplyChoice, text: str) -> str:
        """The fields of a delta, as JSON without braces."""
        number = choice.sent - 1 - choice.reasoning_tokens
        if choice.sent and number < 0:
            return f'"reasoning":"{text}"'
        tool = self.generation.tool
        if tool is None:
            return f'"content":"{text}"'
        if number == 0:
            call = f'"id":{quoted(self.call_id(choice))},"type":"function","index":0,'
            return f'"tool_calls":[{{{call}"function":{{"name":{quoted(tool.name)},"arguments":""}}}}]'
        return f'"tool_calls":[{{"index":0,"function":{{"arguments":{quoted(tool.piece(number))}}}}}]'

    def closing(self) -> bytes:
        return self.usage_event("chat.completion.chunk") + DONE


class ResponsesReply(Reply):
    """`POST /v1/responses`: named events that are numbered."""

    PREFIX = "resp_"

    _sequence = 0

    def choice_type(self) -> type[ReplyChoice]:
        return EventChoice if self.generation.stream else PlainChoice

    @property
    def item_id(self) -> str:
        """The id of the one message it holds."""
        return f"msg_{self.id[len(self.PREFIX) :]}"

    def body(self) -> dict[str, Any]:
        choice = self.choices[0]
        cut = choice.finish_reason == "length"
        usage = self.usage
        return self._response(
            status="incomplete" if cut else "completed",
            incomplete={"reason": "max_output_tokens"} if cut else None,
            output=[self._item(self.text(choice.output_tokens))],
            usage={
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {
                    "cached_tokens": 0,
                    "cache_write_tokens": 0,
                    "input_tokens_per_turn": [],
                    "cached_tokens_per_turn": [],
                },
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {
                    "reasoning_tokens": 0,
                    "tool_output_tokens": 0,
                    "output_tokens_per_turn": [],
                    "tool_output_tokens_per_turn": [],
                },
                "total_tokens": usage["total_tokens"],
            },
        )

    def _item(self, text: str) -> dict[str, Any]:
        return {
            "id": self.item_id,
            "content": [self._part(text, None)],
            "role": "assistant",
            "status": "completed",
            "type": "message",
            "phase": None,
        }

    def _part(self, text: str, logprobs: list[Any] | None) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}

    def _response(
        self,
        status: str,
        incomplete: dict[str, str] | None = None,
        output: list[dict[str, Any]] | None = None,
        usage: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "created_at": self.created,
            "incomplete_details": incomplete,
            "instructions": None,
            "metadata": None,
            "model": self.generation.model,
            "object": "response",
            "output": output or [],
            "parallel_tool_calls": True,
            "temperature": self.generation.temperature,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": self.choices[0].output_tokens
            if self.generation.max_tokens is None
            else self.generation.max_tokens,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": usage,
            "user": None,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _named(self, name: str, fields: dict[str, Any]) -> str:
        event = {**fields, "sequence_number": self._sequence, "type": name}
        self._sequence += 1
        return f"event: {name}\ndata: {_encode(dict(sorted(event.items()))).decode()}\n\n"

    def opening(self) -> bytes:
        item = {**self._item(""), "content": [], "status": "in_progress"}
        part = {"content_index": 0, "item_id": self.item_id, "output_index": 0, "part": self._part("", [])}
        return b"".join(
            chunk(self._named(name, fields).encode())
            for name, fields in (
                ("response.created", {"response": self._response("in_progress")}),
                ("response.in_progress", {"response": self._response("in_progress")}),
                ("response.output_item.added", {"item": item, "output_index": 0}),
                ("response.content_part.added", part),
            )
        )

    def event(self, choice: ReplyChoice, text: str, *, last: bool = False) -> str:
        fields = {
            "content_index": 0,
            "delta": text,
            "item_id": self.item_id,
            "logprobs": [],
            "output_index": 0,
        }
        return self._named("response.output_text.delta", fields)

    def closing(self) -> bytes:
        text = self.text(self.choices[0].output_tokens)
        place = {"content_index": 0, "item_id": self.item_id}
        done = {**place, "logprobs": [], "output_index": 0, "text": text}
        part = {**place, "output_index": 0, "part": self._part(text, None)}
        events = (
            ("response.output_text.done", done),
            ("response.content_part.done", part),
            ("response.output_item.done", {"item": self._item(text), "output_index": 0}),
            ("response.completed", {"response": self.body()}),
        )
        return b"".join(chunk(self._named(name, fields).encode()) for name, fields in events) + LAST_CHUNK


class EmbeddingReply:
    """`POST /v1/embeddings`: prompts that are read and have no output."""

    def __init__(self, out: Out, model: str, prompts: list[Prompt], request_id: str) -> None:
        self.out = out
        self.model = model
        self.prompts = prompts
        self.id = f"embd-{request_id}"
        self.created = int(time.time())
        self.choices = [EmbeddingChoice(self, prompt) for prompt in prompts]
        self.open = len(self.choices)

    def finished(self) -> None:
        """One of the prompts has been read."""
        self.open -= 1
        if self.open:
            return
        tokens = sum(prompt.tokens for prompt in self.prompts)
        body = {
            "id": self.id,
            "object": "list",
            "created": self.created,
            "model": self.model,
            "data": [
                {"index": index, "object": "embedding", "embedding": _embedding(prompt)}
                for index, prompt in enumerate(self.prompts)
            ],
            "usage": {
                "prompt_tokens": tokens,
                "total_tokens": tokens,
                "completion_tokens": 0,
                "prompt_tokens_details": None,
            },
        }
        self.out.respond(200, _encode(body))


class EmbeddingChoice(Choice):
    """One prompt of an embedding request."""

    __slots__ = ("_reply",)

    def __init__(self, reply: EmbeddingReply, prompt: Prompt) -> None:
        super().__init__(prompt.tokens, 0)
        self._reply = reply

    def finish(self) -> None:
        self._reply.finished()


def _embedding(prompt: Prompt) -> list[float]:
    """Eight numbers that stand for the prompt."""
    return [((prompt.seed >> (4 * place)) & 15) / 16 - 0.5 for place in range(8)]
