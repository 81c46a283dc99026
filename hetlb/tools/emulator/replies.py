"""Answers of the emulated engine, in the shapes of vLLM 0.32 that clients read.

Their text is ` t0 t1 t2 ...`, one word a token, so that a reader sees what is missing or out of order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from hetlb.tools.emulator.counting import FIRST_ANSWER_ID, ToolCall, token_ids
from hetlb.tools.emulator.generation import Generation, Prompt
from hetlb.tools.emulator.real_time import EmulatedSequence
from hetlb.tools.openai import answers
from hetlb.tools.openai.requests import ApiError

VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-emulated"

_encode = msgspec.json.encode


def words(count: int) -> str:
    return "".join([f" t{number}" for number in range(count)])


class Reply:
    """One response being generated: `prompts * n` choices, answered when all of them are complete."""

    #: Begins the id.
    PREFIX = ""

    def __init__(self, generation: Generation, max_model_len: int, request_id: str) -> None:
        #: Sends one or more events of a stream after its head.
        self.send: Callable[[bytes], object] = lambda event: None
        #: Status and body of the answer; of a stream the body is empty, and all of it has been sent.
        self.ended: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.generation = generation
        self.id = f"{self.PREFIX}{request_id}"
        self.created = int(time.time())
        self.output_tokens = 0
        #: Prefix of a token's number: `x` if the KV cache of another prompt was fetched.
        self.word = "t"
        #: KV transfer: the answer's parameters for the kept blocks, and the source of fetched ones.
        self.on_finished: Callable[[Reply], dict[str, Any] | None] | None = None
        self.kv_source: dict[str, Any] | None = None
        self.kv_done = False
        self.choices: list[ReplyChoice] = []
        for prompt in generation.prompts:
            for number in range(generation.fields.n or 1):
                output, reason = generation.length(prompt, number, max_model_len)
                self.choices.append(ReplyChoice(self, len(self.choices), prompt, output, reason))
        self.open = len(self.choices)

    @property
    def usage(self) -> dict[str, int]:
        return answers.usage(sum(prompt.tokens for prompt in self.generation.prompts), self.output_tokens)

    def finished(self, choice: ReplyChoice) -> None:
        """Note that a choice is complete; its stream has been sent."""
        self.open -= 1
        self.output_tokens += choice.output_tokens
        if self.open:
            return
        params = None if self.on_finished is None else self.on_finished(self)
        body = b""
        if self.generation.fields.stream:
            for event in self.closing():
                self.send(event)
        else:
            body = _encode(self.body() if params is None else self.body() | {"kv_transfer_params": params})
        self._end(200, body)

    @property
    def done(self) -> bool:
        """True if the answer is complete, or its engine has failed."""
        return self.ended.done() and not self.ended.cancelled()

    def _end(self, status: int, body: bytes) -> None:
        if not self.ended.done():
            self.ended.set_result((status, body))

    def text(self, count: int) -> str:
        text = words(count)
        return text if self.word == "t" else text.replace(" t", f" {self.word}")

    def fail(self, message: str) -> None:
        """Answer that the engine has failed: a status, or after the head of a stream an event."""
        error = ApiError(500, message)
        if self.generation.fields.stream:
            self.send(b"data: %b\n\n" % error.body())
            self.send(answers.DONE)
        self._end(error.status, error.body())

    def body(self) -> dict[str, Any]:
        raise NotImplementedError

    def opening(self) -> list[bytes]:
        """Events before the first token of a stream."""
        return []

    def event(self, choice: ReplyChoice, text: str, *, last: bool = False) -> bytes:
        raise NotImplementedError

    def finish_reason(self, choice: ReplyChoice) -> str:
        """vLLM's word for why an answer ended; a call that the request named ends as text does."""
        tool = self.generation.tool
        called = tool is not None and not tool.forced and choice.finish_reason == "stop"
        return "tool_calls" if called else choice.finish_reason

    def closing(self) -> list[bytes]:
        return [answers.DONE]


class ReplyChoice(EmulatedSequence):
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
        return self.reply.text(self.reasoning_tokens) if self.reasoning_tokens else None

    @property
    def content(self) -> str:
        return self.text[len(words(self.reasoning_tokens)) :]

    @property
    def text(self) -> str:
        said = self.prompt.said
        return self.reply.text(said + self.output_tokens)[len(self.reply.text(said)) :]

    def token(self) -> None:
        if self.reply.generation.fields.stream:
            self._send()

    def finish(self) -> None:
        if self.reply.generation.fields.stream:
            self._send(last=True)
        self.reply.finished(self)

    def _send(self, *, last: bool = False) -> None:
        """Send the next token of a stream, and before the first one its opening."""
        reply = self.reply
        if not self.sent:
            for event in reply.opening():
                reply.send(event)
        word = f" {reply.word}{self.prompt.said + self.sent}"
        self.sent += 1
        reply.send(reply.event(self, word, last=last))

    @property
    def ids(self) -> list[int] | None:
        """Ids of its last token, None unless requested."""
        if not self.reply.generation.fields.return_token_ids:
            return None
        return [FIRST_ANSWER_ID + (self.output_tokens - self.sent if self.finish_reason == "stop" else 0)]

    @property
    def prompt_ids(self) -> list[int] | None:
        """The token ids of its prompt, with its first event."""
        if not self.reply.generation.fields.return_token_ids or not self.prompt.text or self.sent > 1:
            return None
        ids = token_ids(self.prompt.text)
        return [ids[number % len(ids)] for number in range(self.prompt.tokens)]

    def arguments(self, tool: ToolCall) -> str:
        pieces = range(self.output_tokens - self.reasoning_tokens)
        return "".join([tool.piece(number) for number in pieces])


class OpenAIReply(Reply):
    """Common part of completions and chat."""

    CHAT = False

    def __init__(self, generation: Generation, max_model_len: int, request_id: str) -> None:
        super().__init__(generation, max_model_len, request_id)
        self.envelope = answers.Envelope(request_id, generation.model, chat=self.CHAT)
        self.id = self.envelope.id

    def content(self, choice: ReplyChoice) -> str | dict[str, Any]:
        raise NotImplementedError

    def body(self) -> dict[str, Any]:
        choices = [
            self.envelope.choice(
                each.index, self.content(each), self.finish_reason(each), streamed=False, stop_reason=None
            )
            for each in self.choices
        ]
        return self.envelope.whole(choices, self.usage) | {"system_fingerprint": FINGERPRINT}

    def piece(self, choice: ReplyChoice, text: str | dict[str, Any], *, last: bool, **more: Any) -> bytes:
        reason = self.finish_reason(choice) if last else None
        fields = self.envelope.choice(choice.index, text, reason, streamed=True, **more)
        body = self.envelope.chunk([fields], self.usage_so_far(choice))
        if last and not self.generation.include_usage:  # else the event with the usage carries it
            body["system_fingerprint"] = FINGERPRINT
        return answers.event(body)

    def usage_so_far(self, choice: ReplyChoice) -> dict[str, int] | None:
        return answers.usage(choice.prompt_tokens, choice.sent) if self.generation.continuous_usage else None

    def closing(self) -> list[bytes]:
        if not self.generation.include_usage:
            return [answers.DONE]
        body = self.envelope.chunk([], self.usage) | {"system_fingerprint": FINGERPRINT}
        return [answers.event(body), answers.DONE]


class CompletionReply(OpenAIReply):
    """`POST /v1/completions`."""

    def content(self, choice: ReplyChoice) -> str:
        echoed = choice.prompt.text if self.generation.echo else ""
        return echoed + choice.text

    def event(self, choice: ReplyChoice, text: str, *, last: bool = False) -> bytes:
        if self.generation.echo and choice.sent == 1:
            text = choice.prompt.text + text
        ids = {"prompt_token_ids": choice.prompt_ids, "token_ids": choice.ids}
        return self.piece(choice, text, last=last, stop_reason=None, **ids)


class ChatReply(OpenAIReply):
    """`POST /v1/chat/completions`."""

    CHAT = True
    _opened = False

    def content(self, choice: ReplyChoice) -> dict[str, Any]:
        tool = self.generation.tool
        message: dict[str, Any] = {"content": choice.content if tool is None else None}
        if tool is not None and choice.output_tokens > choice.reasoning_tokens:
            function = {"name": tool.name, "arguments": choice.arguments(tool)}
            message["tool_calls"] = [{"id": self.call_id(choice), "type": "function", "function": function}]
        return message | {"reasoning": choice.reasoning}

    def call_id(self, choice: ReplyChoice) -> str:
        return f"chatcmpl-tool-{self.id.partition('-')[2]}{choice.index or ''}"

    def opening(self) -> list[bytes]:
        """Return the role of every choice, with the first token of any."""
        if self._opened:
            return []
        self._opened = True
        chunks = (self.envelope.chunk([self.envelope.role(choice.index)], self.usage_so_far(choice))
                  | {"prompt_token_ids": choice.prompt_ids} for choice in self.choices)  # fmt: skip
        return [answers.event(each) for each in chunks]

    def event(self, choice: ReplyChoice, text: str, *, last: bool = False) -> bytes:
        more = {"stop_reason": None} if last else {}
        return self.piece(choice, self._delta(choice, text), last=last, **more, token_ids=choice.ids)

    def _delta(self, choice: ReplyChoice, text: str) -> dict[str, Any]:
        number = choice.sent - 1 - choice.reasoning_tokens
        if choice.sent and number < 0:
            return {"reasoning": text}
        tool = self.generation.tool
        if tool is None:
            return {"content": text}
        call: dict[str, Any] = {"index": 0, "function": {"arguments": tool.piece(number)}}
        if number == 0:
            named = {"name": tool.name, "arguments": ""}
            call = {"id": self.call_id(choice), "type": "function", "index": 0, "function": named}
        return {"tool_calls": [call]}


class EmbeddingReply(Reply):
    """`POST /v1/embeddings`: prompts without an output."""

    PREFIX = "embd-"

    def body(self) -> dict[str, Any]:
        data = []
        for index, prompt in enumerate(self.generation.prompts):
            vector = [((prompt.seed >> (4 * place)) & 15) / 16 - 0.5 for place in range(8)]
            data.append({"index": index, "object": "embedding", "embedding": vector})
        head = {"id": self.id, "object": "list", "created": self.created, "model": self.generation.model}
        return head | {"data": data, "usage": self.usage}
