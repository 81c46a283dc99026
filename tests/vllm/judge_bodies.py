"""Draws request bodies from vLLM's own classes, and says what vLLM reads in each; run by vLLM's Python.

`python judge_bodies.py COUNT SEED` writes a JSON line per body: `path`, `body` (its text), `read`: what vLLM
takes from it, null where it refuses it, and `where`: the fields of which it says so. With `streams` behind
the seed all are streams of a few tokens, nearly all greedy, of chats and completions.
"""

from __future__ import annotations

import json
import math
import random
import sys
import types
import typing
from typing import Any

from pydantic import BaseModel, ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeCompletionRequest

CLASSES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": AnthropicMessagesRequest,
    "/v1/messages/count_tokens": AnthropicCountTokensRequest,
    "/v1/embeddings": EmbeddingCompletionRequest,
    "/tokenize": TokenizeCompletionRequest,
    "/detokenize": DetokenizeRequest,
}
MESSAGES = [{"role": "user", "content": "Hi \u00e9 \u2028"}]
NEEDED: dict[str, list[Any]] = {
    "messages": [MESSAGES, [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], *[MESSAGES] * 4],
    "prompt": ["Hi", [1, 2, 3], ["Hi", "you"], [[1, 2], [3]], 'Hi \\ "x"'],
    "input": ["Hi", "Hi"],
    "max_tokens": [7, 100],
    "tokens": [[1, 2]],
    "model": ["m"],
}
#: What clients write where a number or a truth value is expected.
ODD = [
    100.0, "100", " 100 ", "+100", "-5", "100.0", "1e2", "1_000", "100.5", 100.5, True, False, "true", "null",
    "", 1e18, 1e19, 2**63, 10**30, [], {}, "\u0663", "0x10", "00100", "1__0", "_1", "100\n", -0.0, "1.", ".0",
    None, 0, 1, 2, -1, 2.0, "2", 1.5, "TRUE", "On", "yes", "y", "t", "n", "off", "1", "0", " 1", "1.0", "x",
    1e400, 20_000, "false", "\u00a07",
]  # fmt: skip
USUAL: dict[type, list[Any]] = {
    int: [1, 2, 5, 100], float: [0.0, 0.5, 1, 1.0], bool: [True, False], str: ["a", "", "\u00e9 x"],
}  # fmt: skip
#: Fields that a router reads: odd values are tried in these most.
READ = (
    "stream", "n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens", "priority", "model",
    "stream_options", "cache_salt",
)  # fmt: skip


#: Names of a limit.
LIMITS: dict[type[BaseModel], list[str]] = {
    CompletionRequest: ["max_tokens"], ChatCompletionRequest: ["max_tokens", "max_completion_tokens"],
}  # fmt: skip
WORDS = ("the", "of", "\u00e9t\u00e9", "\u4f60\u597d", "Hello", "x" * 30, "\U0001f642", '"', "\\", "\n")
#: Values of fields that have an effect on streams, where any of their type would hardly have one.
VALUES: dict[str, list[Any]] = {
    "stop": ["e", ["a", "th"], "\u00e9", ["zzzz"], []], "stop_token_ids": [[300, 301], [], [5]],
    "logit_bias": [{"300": 5.0}, {"7": -100}, {}],
    "allowed_token_ids": [[300, 301, 302], list(range(300, 900))],
    "min_tokens": [0, 1, 4], "repetition_penalty": [1.0, 1.3], "seed": [1, 7], "n": [1, 1, 2],
    "stream_options": [
        {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True},
        {"include_usage": False}, {}, None,
    ],
    "top_k": [1, 5, -1, 0], "top_p": [0.5, 1.0], "min_p": [0.1, 0.0], "response_format": [{"type": "text"}],
    "echo": [False, True], "skip_special_tokens": [True, False], "best_of": [1], "priority": [0],
    "request_id": ["mine"], "presence_penalty": [0.0, 0.5], "frequency_penalty": [0, 0.5],
    "continue_final_message": [False], "add_generation_prompt": [True, False], "stream_interval": [1, 3],
    "return_token_ids": [True, False, None], "logprobs": [None, False, True, 0, 1],
    "truncate_prompt_tokens": [None, -1, 3], "max_tokens": [3, 9, None], "cache_salt": ["salt"],
    "thinking_token_budget": [None, 5], "vllm_xargs": [{}, {"a": 1}], "prompt_logprobs": [None, 0],
}  # fmt: skip


def usual(rng: random.Random, annotation: Any) -> Any:
    """Return a value of a type, None for types that are made of others."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return usual(rng, typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return usual(rng, rng.choice(typing.get_args(annotation)))
    if origin is typing.Literal:
        return rng.choice(typing.get_args(annotation))
    if origin is list:
        return [usual(rng, typing.get_args(annotation)[0]) for _ in range(rng.randrange(3))]
    return rng.choice(USUAL.get(annotation, [None]))


def draw(rng: random.Random, cls: type[BaseModel]) -> dict[str, Any]:
    """Return a body: the fields that are needed, some others, and some values that clients write oddly."""
    body: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
        if name in NEEDED and (field.is_required() or name in ("model", "prompt", "input", "messages")):
            body[name] = rng.choice(NEEDED[name])
        elif field.is_required() or rng.random() < (0.25 if name in READ else 0.04):
            body[name] = usual(rng, field.annotation)
        if name in READ and rng.random() < 0.12:
            body[name] = rng.choice(ODD)
    if "stream_options" in body and rng.random() < 0.8:
        body["stream_options"] = rng.choice([{}, {"include_usage": True}, {"include_usage": "yes"}, None])
    if rng.random() < 0.1:
        body[f"x_{rng.randrange(3)}"] = rng.choice(ODD)
    if rng.random() < 0.03:
        body.pop(rng.choice(list(body)), None)
    items = list(body.items())
    rng.shuffle(items)
    return dict(items)


def draw_stream(rng: random.Random, cls: type[BaseModel]) -> dict[str, Any]:
    """Return a body of a stream of few tokens, or of no stated limit, with a few fields of its class."""
    body: dict[str, Any] = {"model": "m", "stream": True}
    if rng.random() < 0.9:
        body["temperature"] = 0
    if rng.random() < 0.6:
        body[rng.choice(LIMITS[cls])] = rng.randint(1, 12)
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6)))
    if cls is CompletionRequest:
        body["prompt"] = rng.choice([words, [words], [5, 6, 7, 300], [[5, 6, 7]]])
    else:
        content: Any = rng.choice([words, [{"type": "text", "text": words}]])
        body["messages"] = [{"role": "user", "content": content}]
        if rng.random() < 0.3:
            body["messages"].insert(0, {"role": "system", "content": "\u00e9"})
    for name, field in cls.model_fields.items():
        if name not in body and name not in NEEDED and rng.random() < 0.05:
            body[name] = rng.choice(VALUES[name]) if name in VALUES else usual(rng, field.annotation)
    return body


def spelt(rng: random.Random, body: dict[str, Any]) -> str:
    """Return a body in one spelling of JSON."""
    separators = rng.choice([(",", ":"), (", ", ": "), (" ,\r\n", "\t:")])
    text = json.dumps(body, separators=separators, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.1:
        text = text.replace('"stream"', '"\\u0073tream"').replace('"n"', '"\\u006e"')
    if rng.random() < 0.1:
        text = f" \n{text}\r\n"
    return text


def read(cls: type[BaseModel], text: str) -> tuple[dict[str, Any] | None, list[str]]:
    """Return what vLLM takes from a body, None if it refuses it, and the fields of which it says so."""
    try:
        body = json.loads(text)
        if any(isinstance(each, float) and not math.isfinite(each) for each in body.values()):
            return None, ["body"]
        request: Any = cls.model_validate(body)
        if hasattr(request, "to_sampling_params"):
            most = 64 if getattr(request, "max_tokens", None) is None else request.max_tokens
            request.to_sampling_params(most, {})
    except ValidationError as error:
        return None, [str(each["loc"][0]) if each["loc"] else "" for each in error.errors()]
    except Exception as error:
        return None, [f"{type(error).__name__}: {error}"[:200]]
    names = ("stream", "n", "max_tokens", "max_completion_tokens", "max_output_tokens", "priority", "model")
    return {name: getattr(request, name, None) for name in names}, []


def main() -> None:
    count, rng = int(sys.argv[1]), random.Random(int(sys.argv[2]))
    streams = sys.argv[3:] == ["streams"]
    classes = [each for each in CLASSES.items() if not streams or each[1] in LIMITS]
    for _ in range(count):
        path, cls = rng.choice(classes)
        text = spelt(rng, (draw_stream if streams else draw)(rng, cls))
        found, where = read(cls, text)
        print(json.dumps({"path": path, "body": text, "read": found, "where": where}))


if __name__ == "__main__":
    main()
