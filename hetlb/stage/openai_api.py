"""The OpenAI API in front of a coordinator, with vLLM's further fields: completions and chat.

A field that is not supported and would change the answer is refused with a sentence, never ignored.
A client that leaves ends its sequences at once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

import hetlb
from hetlb.core.types import RejectReason
from hetlb.stage.coordinator import Coordinator, Sequence
from hetlb.stage.messages import Sampling, Token
from hetlb.stage.stage_metrics import counter, gauge, page
from hetlb.stage.text import AnswerText, Ending, Piece, TemplateError, TextModel

_MAX_BODY_BYTES: Final = 64 << 20
#: Sequences of one request, stop strings, most likely tokens: as vLLM and OpenAI limit them.
_MOST_SEQUENCES: Final = 128
_MOST_LOGPROBS: Final = 20
#: Longer texts are tokenized in a thread.
_LONG_TEXT: Final = 20_000

_STATUS: Final = {
    RejectReason.TOO_LONG: (400, "BadRequestError"),
    RejectReason.QUEUE_FULL: (429, "TooManyRequests"),
    RejectReason.NO_INSTANCE: (503, "ServiceUnavailable"),
}
#: Fields that would change the answer and are not supported, with the values that ask for nothing.
_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "tools": ((), []),
    "functions": ((), []),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "suffix": ("",),
    "echo": (False,),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "best_of": (1,),
    "bad_words": ((), []),
    "kv_transfer_params": (),
    "prompt_embeds": (),
}


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = False


class _Fields(msgspec.Struct, kw_only=True):
    """Fields that both endpoints take."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False


class CompletionFields(_Fields, kw_only=True):
    """The body of `/v1/completions`."""

    prompt: str | list[Any]
    add_special_tokens: bool = True
    logprobs: int | None = None


class ChatFields(_Fields, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None


_FieldsT = TypeVar("_FieldsT", CompletionFields, ChatFields)


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def _bad(message: str, param: str | None = None) -> Refused:
    return Refused(400, "BadRequestError", message, param)


class _Answer:
    """One sequence of a request: takes tokens from the coordinator, gives pieces to the handler."""

    def __init__(
        self, index: int, text: AnswerText, queue: asyncio.Queue[tuple[int, Piece | Refused]]
    ) -> None:
        self._index = index
        self._text = text
        self._queue = queue

    def token(self, token: Token) -> bool:
        piece = self._text.add(token)
        self._queue.put_nowait((self._index, piece))
        return piece.finish is None

    def failed(self, reason: RejectReason, message: str) -> None:
        status, kind = _STATUS.get(reason, (502, "BadGateway"))
        self._queue.put_nowait((self._index, Refused(status, kind, message)))


class _Choice:
    """One sequence of a plain answer, collected."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens: list[Token] = []
        self.finish: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.tokens.append(piece.token)
        self.finish, self.stop_reason = piece.finish, piece.stop_reason


class _Call:
    """One request: its prompts, fields and identity."""

    def __init__(self, fields: CompletionFields | ChatFields, prompts: list[list[int]]) -> None:
        self.fields = fields
        self.prompts = prompts
        self.chat = isinstance(fields, ChatFields)
        self.n = 1 if fields.n is None else fields.n
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.prompt_tokens = sum(map(len, prompts))
        #: Length of the text so far by sequence, for `text_offset`.
        self.offsets: dict[int, int] = {}

    @property
    def logprobs(self) -> int:
        """Most likely tokens that are asked for, -1 for no log probabilities."""
        fields = self.fields
        if isinstance(fields, ChatFields):
            return (fields.top_logprobs or 0) if fields.logprobs else -1
        return -1 if fields.logprobs is None else fields.logprobs

    def usage(self, completion_tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }


class OpenAIServer:
    """HTTP in front of one coordinator."""

    def __init__(self, coordinator: Coordinator, text: TextModel) -> None:
        self._coordinator = coordinator
        self._text = text
        self._model = coordinator.group.model
        self._runner: web.AppRunner | None = None
        self._prompt_tokens = self._generated_tokens = 0
        self.port = 0

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen. Raises `OSError`."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    # --- small endpoints ---

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._coordinator.scheduler.passable else 503)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": f"hetlb-{hetlb.__version__}"})

    async def _models(self, request: web.Request) -> web.Response:
        card = {
            "id": self._model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "hetlb",
            "root": str(self._coordinator.group.folder),
            "max_model_len": self._coordinator.max_model_len,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, request: web.Request) -> web.Response:
        coordinator, model = self._coordinator, {"model_name": self._model}
        scheduler = coordinator.scheduler
        tokens = coordinator.kv_tokens
        lines = [
            gauge("vllm:num_requests_running", "Sequences on a path.", scheduler.in_flight, **model),
            gauge("vllm:num_requests_waiting", "Sequences without a path.", scheduler.waiting, **model),
            gauge(
                "vllm:kv_cache_usage_perc",
                "Booked share of the fullest layer's KV cache, 0 to 1.",
                min(1.0, scheduler.kv_usage()) if scheduler.passable else 0.0,
                **model,
            ),
            counter("vllm:prompt_tokens", "Prompt tokens.", self._prompt_tokens, **model),
            counter("vllm:generation_tokens", "Answer tokens.", self._generated_tokens, **model),
            counter(
                "vllm:num_preemptions", "Sequences that lost their KV.", coordinator.preemptions, **model
            ),
            counter("hetlb_stage_replays", "Paths that broke.", coordinator.replays),
        ]
        if tokens:
            lines.append(
                gauge(
                    "vllm:cache_config_info",
                    "Tokens of the layer with the least room.",
                    1,
                    block_size="1",
                    num_gpu_blocks=str(tokens),
                    kv_cache_size_tokens=str(tokens),
                )
            )
        for each in coordinator.documents():
            name = {"stage": each["name"]}
            lines.append(gauge("hetlb_stage_up", "1 while it is used.", each["state"] == "up", **name))
            lines.append(gauge("hetlb_stage_in_flight", "Paths through it.", each["in_flight"], **name))
            booked = each["kv_reserved_token_layers"]
            lines.append(gauge("hetlb_stage_kv_reserved_token_layers", "Booked KV.", booked, **name))
        return web.Response(text=page(lines), content_type="text/plain", charset="utf-8")

    # --- answers ---

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        try:
            fields = await _read(request, CompletionFields)
            call = _Call(fields, await self._prompts(fields))
            return await self._answer(request, call)
        except Refused as refused:
            return web.json_response(refused.body, status=refused.status)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            fields = await _read(request, ChatFields)
            call = _Call(fields, [await self._conversation(fields)])
            return await self._answer(request, call)
        except Refused as refused:
            return web.json_response(refused.body, status=refused.status)

    async def _prompts(self, fields: CompletionFields) -> list[list[int]]:
        prompt = fields.prompt
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        found = []
        for each in prompt if several else [prompt]:
            if isinstance(each, str):
                found.append(await self._encode(each, fields.add_special_tokens))
            elif isinstance(each, list):
                self._check_tokens(each, "prompt")
                found.append(each)
            else:
                raise _bad("Expected text, token ids, or a list of either.", "prompt")
        if not all(found):
            raise _bad("Expected a prompt of at least one token.", "prompt")
        return found

    async def _conversation(self, fields: ChatFields) -> list[int]:
        variables = fields.chat_template_kwargs or {}
        messages = [_flattened(message) for message in fields.messages]
        if not messages:
            raise _bad("Expected at least one message.", "messages")
        prompt_ends = fields.add_generation_prompt and not fields.continue_final_message
        try:
            text = self._text.chat(messages, add_generation_prompt=prompt_ends, **variables)
        except (TemplateError, TypeError) as error:
            raise _bad(str(error), "messages") from error
        if fields.continue_final_message:
            last = str(messages[-1].get("content", "")).strip()
            text = text[: text.rindex(last) + len(last)] if last and last in text else text
        return await self._encode(text, fields.add_special_tokens)

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < _LONG_TEXT:
            return self._text.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self._text.encode, text, add_special_tokens=add_special_tokens)

    def _check_tokens(self, tokens: list[int], param: str) -> None:
        size = self._coordinator.config.vocabulary
        if any(type(token) is not int or not 0 <= token < size for token in tokens):
            raise _bad(f"Expected token ids from 0 to {size - 1}.", param)

    def _ending(self, call: _Call, prompt: list[int]) -> Ending:
        """End of an answer to a prompt. Raises `Refused` where there is no room for one."""
        fields, longest = call.fields, self._coordinator.max_model_len
        stated = fields.max_tokens
        if isinstance(fields, ChatFields):
            stated = fields.max_completion_tokens if fields.max_completion_tokens is not None else stated
            wanted = longest - len(prompt) if stated is None else stated
        else:
            wanted = 16 if stated is None else stated
        if wanted < 1 and stated is not None:
            raise _bad(f"max_tokens must be at least 1, got {wanted}.", "max_tokens")
        if len(prompt) + wanted > longest or wanted < 1:
            raise _bad(
                f"This model's maximum context length is {longest} tokens. However, you requested "
                f"{max(wanted, 1)} output tokens and your prompt contains {len(prompt)} input tokens.",
                "max_tokens",
            )
        stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
        if not all(stop):
            raise _bad("stop cannot contain an empty string.", "stop")
        return Ending(
            max_tokens=wanted,
            min_tokens=fields.min_tokens or 0,
            eos=frozenset() if fields.ignore_eos else self._text.eos,
            stop_tokens=frozenset(fields.stop_token_ids or ()),
            stop=tuple(stop),
            keeps_stop=fields.include_stop_str_in_output,
        )

    def _sampling(self, call: _Call, prompt: list[int], ending: Ending, index: int) -> Sampling:
        fields, usual = call.fields, self._text.defaults
        _check_ranges(fields)

        def chosen(key: str) -> float:
            value = getattr(fields, key)
            return float(usual[key] if value is None else value)

        bias = tuple((_token_id(key), value) for key, value in (fields.logit_bias or {}).items())
        self._check_tokens([token for token, _ in bias], "logit_bias")
        stop = tuple(sorted(ending.eos | ending.stop_tokens))
        self._check_tokens(list(stop), "stop_token_ids")
        if not -1 <= call.logprobs <= _MOST_LOGPROBS:
            raise _bad(f"Expected at most {_MOST_LOGPROBS} logprobs, got {call.logprobs}.", "logprobs")
        seed = secrets.randbits(63) if fields.seed is None else (fields.seed + index) % (1 << 63)
        return Sampling(
            prompt_tokens=len(prompt),
            temperature=chosen("temperature"),
            top_p=chosen("top_p"),
            top_k=max(0, int(chosen("top_k"))),
            min_p=chosen("min_p"),
            seed=seed,
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            repetition_penalty=chosen("repetition_penalty"),
            min_tokens=ending.min_tokens,
            stop=stop,
            logit_bias=bias,
            logprobs=call.logprobs,
        )

    async def _answer(self, request: web.Request, call: _Call) -> web.StreamResponse:
        if call.fields.model not in (None, self._model):
            raise Refused(404, "NotFoundError", f"The model `{call.fields.model}` does not exist.", "model")
        if not self._coordinator.scheduler.passable:
            raise Refused(503, "ServiceUnavailable", "The stages that are up do not hold all layers.")
        count = len(call.prompts) * call.n
        if not 1 <= count <= _MOST_SEQUENCES:
            raise _bad(f"Expected 1 to {_MOST_SEQUENCES} answers to one request, got {count}.", "n")
        queue: asyncio.Queue[tuple[int, Piece | Refused]] = asyncio.Queue()
        asked = []
        for index in range(count):
            prompt = call.prompts[index // call.n]
            ending = self._ending(call, prompt)
            asked.append((prompt, self._sampling(call, prompt, ending, index % call.n), ending))
        sequences: list[Sequence] = []
        try:
            for index, (prompt, sampling, ending) in enumerate(asked):
                decode = self._text.stream(skip_special_tokens=call.fields.skip_special_tokens)
                answer = _Answer(index, AnswerText(decode, ending), queue)
                sequences.append(self._coordinator.submit(prompt, sampling, ending.max_tokens, answer))
            self._prompt_tokens += call.prompt_tokens
            pieces = self._pieces(queue, count)
            if call.fields.stream:
                return await self._stream(request, call, pieces)
            return await self._plain(call, pieces, count)
        finally:
            for sequence in sequences:
                self._coordinator.cancel(sequence)

    async def _pieces(
        self, queue: asyncio.Queue[tuple[int, Piece | Refused]], count: int
    ) -> AsyncIterator[tuple[int, Piece]]:
        """Pieces of all sequences until the last one ended. Raises `Refused` where one failed."""
        while count:
            index, piece = await queue.get()
            if isinstance(piece, Refused):
                raise piece
            self._generated_tokens += 1
            count -= piece.finish is not None
            yield index, piece

    async def _plain(
        self, call: _Call, pieces: AsyncIterator[tuple[int, Piece]], count: int
    ) -> web.StreamResponse:
        choices = [_Choice() for _ in range(count)]
        async for index, piece in pieces:
            choices[index].add(piece)
        body = {
            "id": call.id,
            "object": "chat.completion" if call.chat else "text_completion",
            "created": call.created,
            "model": self._model,
            "choices": [self._choice(call, index, choice) for index, choice in enumerate(choices)],
            "usage": call.usage(sum(len(choice.tokens) for choice in choices)),
        }
        return web.json_response(body)

    def _choice(self, call: _Call, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        found: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprobs(call, index, choice.tokens),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if call.chat:
            found["message"] = {"role": "assistant", "content": text}
        else:
            found["text"] = text
        if call.fields.return_token_ids:
            found["token_ids"] = [token.token for token in choice.tokens]
            found["prompt_token_ids"] = call.prompts[index // call.n]
        return found

    async def _stream(
        self, request: web.Request, call: _Call, pieces: AsyncIterator[tuple[int, Piece]]
    ) -> web.StreamResponse:
        """Server-sent events. The head waits for the first token: until then a failure is a status."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        begun: set[int] = set()
        tokens = 0
        try:
            async for index, piece in pieces:
                if not begun:
                    await response.prepare(request)
                tokens += 1
                events = b""
                if call.chat and index not in begun:
                    events = self._event(call, [_delta(index, {"role": "assistant", "content": ""})])
                begun.add(index)
                await response.write(events + self._event(call, [self._streamed(call, index, piece)]))
        except Refused as refused:
            if not begun:
                raise
            await response.write(b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(refused.body))
            return response
        options = call.fields.stream_options
        if options is not None and options.include_usage:
            await response.write(self._event(call, [], usage=call.usage(tokens)))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _streamed(self, call: _Call, index: int, piece: Piece) -> dict[str, Any]:
        choice = _delta(index, {"content": piece.text}) if call.chat else {"index": index, "text": piece.text}
        choice |= {
            "logprobs": self._logprobs(call, index, [piece.token]),
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_reason,
        }
        if call.fields.return_token_ids:
            choice["token_ids"] = [piece.token.token]
        return choice

    def _event(self, call: _Call, choices: list[dict[str, Any]], **more: Any) -> bytes:
        body = {
            "id": call.id,
            "object": "chat.completion.chunk" if call.chat else "text_completion",
            "created": call.created,
            "model": self._model,
            "choices": choices,
            **more,
        }
        return b"data: %b\n\n" % msgspec.json.encode(body)

    def _logprobs(self, call: _Call, index: int, tokens: list[Token]) -> dict[str, Any] | None:
        """Log probabilities as the endpoint writes them."""
        if call.logprobs < 0:
            return None
        entries = [
            [(self._text.decode([token]), value) for token, value in each.logprobs or ()] for each in tokens
        ]
        if call.chat:
            return {
                "content": [
                    {**_entry(*each[0]), "top_logprobs": [_entry(*e) for e in each[1:]]} for each in entries
                ]
            }
        at, offsets = call.offsets.get(index, 0), []
        for each in entries:
            offsets.append(at)
            at += len(each[0][0])
        call.offsets[index] = at
        return {
            "tokens": [each[0][0] for each in entries],
            "token_logprobs": [each[0][1] for each in entries],
            "top_logprobs": [dict(each) for each in entries],
            "text_offset": offsets,
        }


def _entry(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": None}


def _flattened(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose parts of text are one text. Raises `Refused` for other parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _bad("Expected parts of text: the model takes nothing else.", "messages")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}


def _token_id(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _bad(f"Expected token ids, got {text[:40]!r}.", "logit_bias") from None


def _check_ranges(fields: _Fields) -> None:
    for key, least, most in (
        ("n", 1, _MOST_SEQUENCES),
        ("temperature", 0.0, 100.0),
        ("top_p", 1e-9, 1.0),
        ("min_p", 0.0, 1.0),
        ("top_k", -1, 1 << 31),
        ("min_tokens", 0, 1 << 31),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("repetition_penalty", 1e-9, 1e9),
    ):
        value = getattr(fields, key)
        if value is not None and not least <= value <= most:
            raise _bad(f"{key} must be in [{least:g}, {most:g}], got {value}.", key)


async def _read(request: web.Request, kind: type[_FieldsT]) -> _FieldsT:
    """The body of a request. Raises `Refused`."""
    try:
        raw = msgspec.json.decode(await request.read())
        fields = msgspec.convert(raw, kind, strict=True)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _bad(f"Invalid body: {error}") from error
    for key, harmless in _REFUSED.items():
        if raw.get(key) is not None and raw[key] not in harmless:
            raise _bad(f"{key} is not supported by a model served through stages.", key)
    return fields
