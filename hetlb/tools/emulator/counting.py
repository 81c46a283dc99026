"""Tokens without a tokenizer: 4 bytes of text count as one; lengths of answers follow from their prompts."""

from __future__ import annotations

import math
import zlib
from statistics import NormalDist
from typing import Any

from hetlb.tools.openai.requests import bad, message_text

#: Size of the largest vocabulary of models in common use: ids from here on are out of it.
VOCABULARY_TOKENS = 262_144
BYTES_PER_TOKEN = 4
#: Token ids from here on are of answers: the one that stands for the last has this id, the one before it one
#: more, and so on; in an answer without an end of its own each has this id.
FIRST_ANSWER_ID = 196_608
#: Tokens that a chat template adds to a message.
TOKENS_PER_MESSAGE = 4
#: Answers without `max_tokens` end by themselves: log-normal lengths, mean about 220 tokens.
ANSWER_SIGMA = 0.8
ANSWER_MU = math.log(220) - ANSWER_SIGMA**2 / 2

_NORMAL = NormalDist()


def count_text(text: str) -> int:
    """Return the tokens of a text: one per 4 bytes of UTF-8, at least one."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return max(1, -(-size // BYTES_PER_TOKEN))


def token_ids(text: str) -> list[int]:
    """Make as many token ids as `count_text` counts, the same ones for the same text."""
    data = text.encode("utf-8", "surrogatepass")
    pieces = [data[at : at + BYTES_PER_TOKEN] for at in range(0, len(data), BYTES_PER_TOKEN)] or [b""]
    return [zlib.crc32(piece) % FIRST_ANSWER_ID for piece in pieces]


def text_seed(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def answer_length(seed: int, index: int) -> int:
    """Return the length of an answer that no limit cuts: deterministic, log-normal, at least one token."""
    uniform = (zlib.crc32(b"%d/%d" % (seed, index)) + 0.5) / 2**32
    return max(1, round(math.exp(ANSWER_MU + ANSWER_SIGMA * _NORMAL.inv_cdf(uniform))))


def chat_text(messages: list[dict[str, Any]]) -> tuple[str, int]:
    """Return the text of a conversation and its token count. Raises `ApiError` for a malformed message."""
    parts: list[str] = []
    tokens = 0
    for message in messages:
        if "role" not in message:
            raise bad("Expected a role in every message.", "messages")
        text = message_text(message)
        parts.append(text)
        tokens += TOKENS_PER_MESSAGE + count_text(text)
    return "\n".join(parts), tokens
