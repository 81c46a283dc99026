"""Sources of requests besides traces: ShareGPT, files of prompts, and lengths drawn at random.

There is no tokenizer here: the length of a text is estimated at four bytes a token, and what a server reports
replaces the estimate in the results.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from hetlb.errors import TraceError
from hetlb.files import read_text
from hetlb.workload.traces import Row

BYTES_PER_TOKEN = 4
KindT = TypeVar("KindT")

#: Conversations of ShareGPT beyond these are left out, as by `vllm bench serve`: too short to measure, or too
#: long for common limits.
SHAREGPT_MIN_TOKENS = 4
SHAREGPT_MAX_PROMPT_TOKENS = 1024
SHAREGPT_MAX_TOKENS = 2048


def random_rows(
    count: int, input_tokens: int, output_tokens: int, range_ratio: float, rng: random.Random
) -> list[Row]:
    """Lengths drawn evenly from `length * (1 - range_ratio)` to `length * (1 + range_ratio)`, at least 1."""

    def draw(length: int) -> int:
        low, high = math.floor(length * (1 - range_ratio)), math.ceil(length * (1 + range_ratio))
        return max(1, rng.randint(low, high))

    return [Row(None, draw(input_tokens), draw(output_tokens)) for _ in range(count)]


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []
    conversation: list[_Turn] = []


class _Prompt(msgspec.Struct):
    prompt: Annotated[str, Meta(min_length=1)]
    output_tokens: Annotated[int, Meta(ge=1)] | None = None


def sharegpt_rows(path: Path, output_tokens: int | None, rng: random.Random) -> list[Row]:
    """First question and first answer of every conversation of a ShareGPT file, in an order that `rng` draws.

    The answer gives the length of the answer, unless `output_tokens` does. Very short and very long ones are
    left out, by the limits of `vllm bench serve`. Raises `TraceError`.
    """
    rows = []
    for each in _decoded(path, read_text(path, TraceError), list[_Conversation], "list of conversations"):
        turns = [_encodable(turn.value) for turn in each.conversations or each.conversation]
        if len(turns) < 2:
            continue
        asked, answered = estimate_tokens(turns[0]), estimate_tokens(turns[1])
        if output_tokens is None and answered < SHAREGPT_MIN_TOKENS:
            continue
        answered = answered if output_tokens is None else output_tokens
        if (
            SHAREGPT_MIN_TOKENS <= asked <= SHAREGPT_MAX_PROMPT_TOKENS
            and asked + answered <= SHAREGPT_MAX_TOKENS
        ):
            rows.append(Row(None, asked, answered, turns[0]))
    if not rows:
        raise TraceError(f"{path}: expected at least one conversation of usable length, got none")
    rng.shuffle(rows)
    return rows


def custom_rows(path: Path, output_tokens: int) -> list[Row]:
    """Prompts of a file, one a line; of a `.jsonl` file the `prompt` of each line.

    `output_tokens` is the length of every answer, but for a line of a `.jsonl` file that has its own
    `output_tokens`. Raises `TraceError`.
    """
    rows = []
    # Line ends alone: texts may hold U+2028 and what else `splitlines` splits at.
    for number, line in enumerate(read_text(path, TraceError).split("\n"), start=1):
        if not line.strip():
            continue
        text, length = line.removesuffix("\r"), output_tokens
        if path.suffix == ".jsonl":
            found = _decoded(f"{path}: line {number}", line, _Prompt, "object with a prompt")
            text, length = _encodable(found.prompt), found.output_tokens or output_tokens
        rows.append(Row(None, estimate_tokens(text), length, text))
    if not rows:
        raise TraceError(f"{path}: expected at least one prompt, got none")
    return rows


def estimate_tokens(text: str) -> int:
    return max(1, math.ceil(len(text.encode()) / BYTES_PER_TOKEN))


def _decoded(where: object, text: str, kind: type[KindT], expected: str) -> KindT:
    try:
        return msgspec.convert(json.loads(text), kind)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: expected a JSON {expected}: {error}") from error


def _encodable(text: str) -> str:
    """The text with question marks for half surrogate pairs (`"\\ud83d"`), which no request can hold."""
    return text.encode("utf-8", "replace").decode()
