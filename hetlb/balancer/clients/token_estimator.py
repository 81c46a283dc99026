"""Prompt tokens estimated without tokenising on the hot path.

Token ids are counted. Text is counted by a local tokenizer if one is configured. Other text is estimated from
its bytes, and media from their number. Both ratios come from the `usage` of the model's earlier answers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final

#: Bytes per token before anything was learnt: English text and common vocabularies.
START_BYTES_PER_TOKEN: Final = 4.0
#: Bounds of bytes per token.
_LEAST_BYTES_PER_TOKEN: Final = 0.5
_MOST_BYTES_PER_TOKEN: Final = 16.0
#: Tokens of an image, sound or video before anything was learnt.
START_TOKENS_PER_MEDIUM: Final = 600.0
#: Maximum bytes of a prompt that a local tokenizer counts: it takes about a millisecond.
_MAX_TOKENIZED_BYTES: Final = 64 << 10


class LearntRatio:
    """Ratio of two sums with slow forgetting, from `least` to `most`.

    Its value at the start weighs as `weight` of the lower sum; older evidence halves after about `memory`.
    """

    __slots__ = ("_least", "_memory", "_most", "above", "below", "value")

    def __init__(
        self, start: float, weight: float, memory: float, least: float = 0.0, most: float = math.inf
    ) -> None:
        self._memory = memory
        self._least = least
        self._most = most
        self.below = weight
        self.above = weight * start
        self.value = start

    def learn(self, above: float, below: float) -> None:
        """Add a pair to the two sums, such as the bytes and the tokens of one prompt."""
        if self.below > self._memory:
            self.below /= 2.0
            self.above /= 2.0
        self.below += below
        self.above += above
        self.value = min(self._most, max(self._least, self.above / self.below))


def bytes_per_token() -> LearntRatio:
    return LearntRatio(START_BYTES_PER_TOKEN, 200.0, 200_000.0, _LEAST_BYTES_PER_TOKEN, _MOST_BYTES_PER_TOKEN)


def tokens_per_medium() -> LearntRatio:
    return LearntRatio(START_TOKENS_PER_MEDIUM, 2.0, 1000.0)


_NO_TEXT: Final = bytes_per_token()
_NO_MEDIUM: Final = tokens_per_medium()


class TokenEstimator:
    """Estimates of prompt lengths in tokens, by model; `counters` count the tokens of a text."""

    def __init__(self, counters: Mapping[str, Callable[[str], int]] | None = None) -> None:
        #: Ratios of bytes to tokens by model.
        self.text: dict[str, LearntRatio] = defaultdict(bytes_per_token)
        self._media: dict[str, LearntRatio] = defaultdict(tokens_per_medium)
        self._counters = dict(counters or {})

    def tokens(self, model: str, text: bytes, text_bytes: float, media: int = 0) -> int:
        """Return the tokens of a prompt, at least 1: counted with the model's tokenizer, else estimated.

        `text` is the prompt as JSON; `text_bytes` is its length without encoded media.
        """
        counter = self._counters.get(model) if self._counters and not media else None
        if counter is not None and 0 < len(text) <= _MAX_TOKENIZED_BYTES:
            return max(1, counter(text.decode("utf-8", "replace")))
        tokens = self._text_tokens(model, text_bytes)
        if media:
            tokens += media * self._media.get(model, _NO_MEDIUM).value
        return max(1, round(tokens))

    def learn(self, model: str, text_bytes: int, media: int, tokens: int) -> None:
        """Learn from the engine's count of a prompt's tokens: of its media, if it has some, or of its text.

        Absurd counts are ignored.
        """
        if not 0 < tokens <= 1 << 31 or text_bytes <= 0:
            return
        if media:
            rest = tokens - self._text_tokens(model, text_bytes)
            if rest > 0:
                self._media[model].learn(rest, media)
        else:
            self.text[model].learn(text_bytes, tokens)

    def text_ratio(self, model: str) -> float:
        """Return the bytes of a token of text."""
        return self.text.get(model, _NO_TEXT).value

    def _text_tokens(self, model: str, text_bytes: float) -> float:
        return text_bytes / self.text_ratio(model)
