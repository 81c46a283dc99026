"""Sources of requests besides traces: ShareGPT, files of prompts, and lengths drawn at random."""

from __future__ import annotations

import math
import random
from pathlib import Path

from hetlb.errors import TraceError
from hetlb.files import read_text
from hetlb.tools.workload.chats import CHATS, encodable, estimate_tokens, is_chats
from hetlb.tools.workload.input_limit import max_input_bytes
from hetlb.tools.workload.record_file import open_records
from hetlb.tools.workload.rows import Row
from hetlb.tools.workload.trace_formats import rows_in

#: Suffixes of files with keyed records; others hold a prompt a line.
_KEYED = (".jsonl", ".json", ".csv", ".gz", ".ndjson")


def random_rows(
    count: int, input_tokens: int, output_tokens: int, range_ratio: float, rng: random.Random
) -> list[Row]:
    """Lengths drawn evenly from `length * (1 - range_ratio)` to `length * (1 + range_ratio)`, at least 1."""

    def draw(length: int) -> int:
        low, high = math.floor(length * (1 - range_ratio)), math.ceil(length * (1 + range_ratio))
        return max(1, rng.randint(low, high))

    return [Row(None, draw(input_tokens), draw(output_tokens)) for _ in range(count)]


def sharegpt_rows(path: Path, output_tokens: int | None, rng: random.Random) -> list[Row]:
    """Return the first question and answer of each conversation of a file, in an order that `rng` draws.

    The answer gives its length, unless `output_tokens` does. Raises `TraceError`.
    """
    file = open_records(path)
    if not is_chats(file):
        raise TraceError(f"{path}: expected {CHATS}, got {file.described}")
    rows = rows_in(file, chat_tokens=output_tokens)
    rng.shuffle(rows)
    return rows


def custom_rows(path: Path, output_tokens: int) -> list[Row]:
    """Return the prompts of a file, one a line, or the requests of a file in a known form.

    `output_tokens` is the length of answers if the file has none. Raises `TraceError`.
    """
    if path.suffix in _KEYED:
        return rows_in(open_records(path), output_tokens)
    # Line ends alone: texts may hold U+2028 and what else `splitlines` splits at.
    lines = (line.removesuffix("\r") for line in read_text(path, TraceError, max_input_bytes()).split("\n"))
    rows = [
        Row(None, estimate_tokens(line), output_tokens, encodable(line)) for line in lines if line.strip()
    ]
    if not rows:
        raise TraceError(f"{path}: expected at least one prompt, got none")
    return rows
