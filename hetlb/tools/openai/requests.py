"""OpenAI's requests as servers of the tools take them: bodies, their one error, and the application.

Bodies have vLLM's further fields, with types and ranges.

Numbers in strings are read as vLLM reads them (`"5"` is 5). Fields not named here are ignored: a
server that cannot ignore one says so itself.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hetlb.errors import NOT_JSON

#: Answers to one request, and prompts of one: vLLM's own limits.
MOST_ANSWERS: Final = 16_384
MOST_PROMPTS: Final = 1024
#: Type of an error by its status, as vLLM names it.
_KINDS: Final = {
    404: "NotFoundError",
    429: "TooManyRequests",
    500: "InternalServerError",
    502: "BadGateway",
    503: "ServiceUnavailable",
}
#: Path of a field in msgspec's errors.
_AT: Final = re.compile(r"`\$\.(\w+)")


class ApiError(Exception):
    """A request answered with an error."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = _KINDS.get(status, "BadRequestError")
        self.param = param

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


def bad(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param)


def unknown_model(name: object) -> ApiError:
    return ApiError(404, f"The model `{name}` does not exist.", "model")


_Share: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
_Penalty: TypeAlias = Annotated[float, Meta(ge=-2.0, le=2.0)]
_Count: TypeAlias = Annotated[int, Meta(ge=0)]


class StreamOptions(msgspec.Struct, frozen=True):
    """Field `stream_options` of a request for a stream."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SampledRequest(msgspec.Struct, kw_only=True):
    """Fields of every request for text."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_ANSWERS)] | None = None
    max_tokens: int | None = None
    min_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: _Share | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=1e9)] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def cap(self) -> int | None:
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with its usage. Raises `ApiError` if nothing is streamed."""
        if self.stream_options is None:
            return False
        if not self.stream:
            raise bad("Stream options can only be defined when `stream=True`.", "stream_options")
        return bool(self.stream_options.include_usage)


class CompletionRequest(SampledRequest, kw_only=True):
    """The body of `/v1/completions`."""

    prompt: str | list[Any] | None = None
    add_special_tokens: bool = True
    echo: bool | None = False
    logprobs: int | None = None


class ChatRequest(SampledRequest, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None

    @property
    def cap(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


RequestT = TypeVar("RequestT")


def read(body: bytes | dict[str, Any], kind: type[RequestT]) -> RequestT:
    """Return a body as a request of this kind. Raises `ApiError`."""
    try:
        if isinstance(body, dict):
            return msgspec.convert(body, kind, strict=False)
        return msgspec.json.decode(body, type=kind, strict=False)
    except NOT_JSON as error:
        where = _AT.search(str(error))
        raise bad(f"Invalid body: {error}", where and where[1]) from error


def prompts_of(prompt: object, vocabulary: int, param: str = "prompt") -> list[str | list[int]]:
    """Return the prompts of a completion: a text, token ids, or a list of either. Raises `ApiError`."""
    if isinstance(prompt, str) and prompt:
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise bad("Expected a prompt of at least one token.", param)
    if type(prompt[0]) is int:
        check_tokens(prompt, vocabulary, param)
        return [prompt]
    if len(prompt) > MOST_PROMPTS:
        raise bad(f"Expected at most {MOST_PROMPTS} prompts, got {len(prompt)}.", param)
    for each in prompt:
        if isinstance(each, list) and each:
            check_tokens(each, vocabulary, param)
        elif not isinstance(each, str):
            raise bad("Expected text, token ids, or a list of either.", param)
    return prompt


def check_tokens(tokens: list[Any], vocabulary: int, param: str) -> None:
    if tokens and (set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= vocabulary):
        raise bad(f"Expected token ids from 0 to {vocabulary - 1}.", param)


def message_text(message: dict[str, Any]) -> str:
    """Return the text of a message of a conversation; parts without text are left out. Raises `ApiError`."""
    content = message.get("content")
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return "".join(part for part in parts if isinstance(part, str))
    if content is None:
        return ""
    if not isinstance(content, str):
        raise bad("Expected text or a list of parts.", "messages")
    return content


ErrorBody: TypeAlias = Callable[[web.Request, ApiError], bytes]


def application(
    routes: Sequence[web.RouteDef], most_bytes: int, error_body: ErrorBody = lambda _, error: error.body()
) -> web.Application:
    """Return the application of these routes; bodies have at most `most_bytes` bytes (0: any number).

    `error_body` is the JSON of an error of a handler, or of a path or method that there is not.
    """

    @web.middleware
    async def errors(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        headers = None
        try:
            return await handler(request)
        except ApiError as caught:
            error = caught
        except web.HTTPException as caught:
            headers = {"allow": caught.headers["allow"]} if "allow" in caught.headers else None
            error = ApiError(caught.status, f"{caught.reason}: {request.method} {request.path[:200]}")
        body = error_body(request, error)
        return web.Response(body=body, status=error.status, headers=headers, content_type="application/json")

    app = web.Application(client_max_size=most_bytes, middlewares=[errors])
    app.add_routes(routes)
    return app


#: Labels of one series, and its value.
Series = Iterable[tuple[Mapping[str, str], float]]


def gauge(name: str, text: str, series: Series) -> Metric:
    return _filled(GaugeMetricFamily(name, text), series)


def counter(name: str, text: str, series: Series) -> Metric:
    """Return a counter; `_total` is added to its name."""
    return _filled(CounterMetricFamily(name, text), series, "_total")


def _filled(family: Metric, series: Series, suffix: str = "") -> Metric:
    for labels, value in series:
        family.add_sample(family.name + suffix, dict(labels), value)
    return family


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def page(families: Iterable[Metric]) -> bytes:
    return generate_latest(_Families(families))  # type: ignore[arg-type, unused-ignore]
