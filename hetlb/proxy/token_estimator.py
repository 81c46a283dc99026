"""Input tokens without tokenising on the hot path.

Promise: exact where the prompt is token ids; else bytes over the bytes per token learnt for that model
from the engines' own `usage`; exact again where a local tokenizer is configured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from hetlb.errors import ConfigError

#: Bytes per token before anything was learnt: English text and common vocabularies.
START_BYTES_PER_TOKEN: Final = 4.0
#: The start value weighs as this many tokens; older evidence halves after about `_MEMORY_TOKENS`.
_START_WEIGHT_TOKENS: Final = 200.0
_MEMORY_TOKENS: Final = 200_000.0
_LEAST: Final = 0.5
_MOST: Final = 16.0
#: A local tokenizer is asked for prompts up to this size: it takes about a millisecond for it.
_MAX_TOKENIZED_BYTES: Final = 64 << 10


class BytesPerToken:
    """A ratio of sums with slow forgetting, for one model."""

    __slots__ = ("_bytes", "_tokens", "ratio")

    def __init__(self) -> None:
        self._tokens = _START_WEIGHT_TOKENS
        self._bytes = _START_WEIGHT_TOKENS * START_BYTES_PER_TOKEN
        #: Bytes per token, within reason.
        self.ratio = START_BYTES_PER_TOKEN

    def learn(self, text_bytes: int, tokens: int) -> None:
        """A prompt of `text_bytes` had `tokens` tokens."""
        if self._tokens > _MEMORY_TOKENS:
            self._tokens /= 2.0
            self._bytes /= 2.0
        self._tokens += tokens
        self._bytes += text_bytes
        self.ratio = min(_MOST, max(_LEAST, self._bytes / self._tokens))


class TokenEstimator:
    """Estimates of prompt lengths, by model."""

    def __init__(self, counters: Mapping[str, Callable[[str], int]] | None = None) -> None:
        self._learnt: dict[str, BytesPerToken] = {}
        self._counters = dict(counters or {})

    def tokens(self, model: str, text: bytes, text_bytes: float) -> int:
        """Tokens of a prompt, at least 1: counted where the model has a local tokenizer, else estimated.

        `text_bytes` is what to estimate from; a picture in `text` is longer than what it counts for.
        """
        counter = self._counters.get(model) if self._counters else None
        if counter is not None and 0 < len(text) <= _MAX_TOKENIZED_BYTES:
            return max(1, counter(text.decode("utf-8", "replace")))
        return self.estimate(model, text_bytes)

    def estimate(self, model: str, text_bytes: float) -> int:
        """Tokens of `text_bytes` bytes of prompt, at least 1."""
        learnt = self._learnt.get(model)
        ratio = START_BYTES_PER_TOKEN if learnt is None else learnt.ratio
        return max(1, round(text_bytes / ratio))

    def learn(self, model: str, text_bytes: int, tokens: int) -> None:
        """An engine said how many tokens a prompt had. Absurd answers are ignored."""
        if not 0 < tokens <= 1 << 31 or text_bytes <= 0:
            return
        learnt = self._learnt.get(model)
        if learnt is None:
            learnt = self._learnt[model] = BytesPerToken()
        learnt.learn(text_bytes, tokens)


def load_tokenizers(paths: Mapping[str, Path]) -> dict[str, Callable[[str], int]]:
    """Counters from `tokenizer.json` files (or the folders that hold them). Raises `ConfigError`."""
    counters: dict[str, Callable[[str], int]] = {}
    for model, path in paths.items():
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                f"tokenizer of {model}: expected the package 'tokenizers' (pip install 'hetlb[tokenizer]')"
            ) from error
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(
                f"tokenizer of {model}: expected a tokenizer.json, got {str(path)!r}"
            ) from error

        def count(text: str, tokenizer: Tokenizer = tokenizer) -> int:
            return len(tokenizer.encode(text, add_special_tokens=True).ids)

        counters[model] = count
    return counters
