"""Estimate of the tokens of a whole answer whose engine counts none."""

from __future__ import annotations

import re
from typing import Final

#: Texts of an answer: of a message, its reasoning, its calls of tools.
_TEXT: Final = re.compile(
    rb'"(?:content|text|reasoning|reasoning_content|arguments)"\s*+:\s*+"((?:[^"\\]|\\.)*+)', re.S
)


def tokens_of_text(tail: bytes, length: int, bytes_per_token: float) -> int:
    """Return the tokens of an answer of `length` bytes of JSON, by the texts in its `tail`.

    A word is a token at least.
    """
    texts = [found[1] for found in _TEXT.finditer(tail)]
    words = sum(len(each.split()) for each in texts)
    tokens = max(float(words), sum(map(len, texts)) / bytes_per_token)
    return round(tokens * max(1.0, length / max(1, len(tail))))
