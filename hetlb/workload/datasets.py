"""Sources of requests besides traces: ShareGPT, files of prompts, and lengths drawn at random.

Every source gives the same rows for the same seed, each with the length of its prompt and of its
answer in tokens; wrong input is one `TraceError` line that names file, place and value. There is no
tokenizer here: the length of a text is estimated at four bytes a token, and what a server reports replaces
the estimate in the results.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetlb.errors import TraceError
from hetlb.files import read_text
from hetlb.workload.traces import Row

BYTES_PER_TOKEN = 4

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


def sharegpt_rows(path: Path, output_tokens: int | None, rng: random.Random) -> list[Row]:
    """First question and first answer of every conversation of a ShareGPT file, in an order that `rng` draws.

    The answer gives the length of the answer, unless `output_tokens` does. Very short and very long ones are
    left out, by the limits of `vllm bench serve`. Raises `TraceError`.
    """
    try:
        conversations = json.loads(read_text(path, TraceError))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: expected a JSON list of conversations: {error}") from error
    if not isinstance(conversations, list):
        raise TraceError(
            f"{path}: expected a JSON list of conversations, got a {type(conversations).__name__}"
        )
    rows = []
    for number, entry in enumerate(conversations, start=1):
        turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            raise TraceError(
                f"{path}: entry {number}: conversations: expected a list of turns, got {turns!r}"
            )
        if len(turns) < 2:
            continue
        question, answer = (_turn(path, number, turn) for turn in turns[:2])
        asked, answered = estimate_tokens(question), estimate_tokens(answer)
        if output_tokens is None and answered < SHAREGPT_MIN_TOKENS:
            continue
        answered = answered if output_tokens is None else output_tokens
        if (
            SHAREGPT_MIN_TOKENS <= asked <= SHAREGPT_MAX_PROMPT_TOKENS
            and asked + answered <= SHAREGPT_MAX_TOKENS
        ):
            rows.append(Row(None, asked, answered, question))
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
    for number, line in _lines(path):
        text, length = line, output_tokens
        if path.suffix == ".jsonl":
            text, length = _json_line(path, number, line, output_tokens)
        rows.append(Row(None, estimate_tokens(text), length, text))
    if not rows:
        raise TraceError(f"{path}: expected at least one prompt, got none")
    return rows


def estimate_tokens(text: str) -> int:
    """Estimated tokens of a text."""
    return max(1, math.ceil(len(text.encode()) / BYTES_PER_TOKEN))


def _json_line(path: Path, number: int, line: str, output_tokens: int) -> tuple[str, int]:
    try:
        document: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: line {number}: expected a JSON object: {error}") from error
    text = document.get("prompt") if isinstance(document, dict) else None
    if not isinstance(text, str) or not text:
        raise TraceError(f'{path}: line {number}: expected {{"prompt": "…"}}, got {line[:80]!r}')
    length = document.get("output_tokens", output_tokens)
    if type(length) is not int or length < 1:
        raise TraceError(
            f"{path}: line {number}: output_tokens: expected a whole number from 1, got {length!r}"
        )
    return _encodable(text), length


def _turn(path: Path, number: int, turn: Any) -> str:
    value = turn.get("value") if isinstance(turn, dict) else None
    if not isinstance(value, str):
        raise TraceError(f'{path}: entry {number}: expected turns of the form {{"from": …, "value": "…"}}')
    return _encodable(value)


def _encodable(text: str) -> str:
    """The text with question marks for half surrogate pairs (`"\\ud83d"`), which no request can hold."""
    return text.encode("utf-8", "replace").decode()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    # Line ends alone: texts may hold U+2028 and what else `splitlines` splits at.
    for number, line in enumerate(read_text(path, TraceError).split("\n"), start=1):
        if line.strip():
            yield number, line.removesuffix("\r")
