"""Prompt tokens estimated without tokenising on the hot path.

Token ids are counted, and so is text where a local tokenizer is configured. Other text is its bytes over the
bytes per token learnt for that model from the engines' own `usage`. An image counts by the rule of its model
where the fleet file states one and the image's size is known, else as the mean image learnt from `usage`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hetlb.errors import ConfigError
from hetlb.proxy.http.media import UNKNOWN_SIZE, ImageSize

if TYPE_CHECKING:
    from hetlb.image_tokens import ImageRule

#: Bytes per token before anything was learnt: English text and common vocabularies.
START_BYTES_PER_TOKEN: Final = 4.0
#: Bounds of bytes per token.
_LEAST: Final = 0.5
_MOST: Final = 16.0
#: Tokens of an image before anything was learnt.
START_TOKENS_PER_IMAGE: Final = 600.0
#: Maximum bytes of a prompt that a local tokenizer counts: it takes about a millisecond.
_MAX_TOKENIZED_BYTES: Final = 64 << 10


class LearntRatio:
    """Ratio of two sums with slow forgetting, from `least` to `most`.

    Its value at the start weighs as `weight` of the lower sum; older evidence halves after about `memory`.
    """

    __slots__ = ("_above", "_below", "_least", "_memory", "_most", "value")

    def __init__(
        self, start: float, weight: float, memory: float, least: float = 0.0, most: float = math.inf
    ) -> None:
        self._memory = memory
        self._least = least
        self._most = most
        self._below = weight
        self._above = weight * start
        self.value = start

    def learn(self, above: float, below: float) -> None:
        """Learn from one more pair."""
        if self._below > self._memory:
            self._below /= 2.0
            self._above /= 2.0
        self._below += below
        self._above += above
        self.value = min(self._most, max(self._least, self._above / self._below))

    @property
    def sums(self) -> tuple[float, float]:
        """Upper and lower sum, as far as they are remembered."""
        return self._above, self._below

    @sums.setter
    def sums(self, sums: tuple[float, float]) -> None:
        self._above, self._below = sums
        self.value = min(self._most, max(self._least, self._above / self._below))


def bytes_per_token() -> LearntRatio:
    """Bytes per token of one model, nothing learnt yet."""
    return LearntRatio(START_BYTES_PER_TOKEN, 200.0, 200_000.0, _LEAST, _MOST)


def tokens_per_image() -> LearntRatio:
    """Tokens per image of one model, nothing learnt yet."""
    return LearntRatio(START_TOKENS_PER_IMAGE, 2.0, 1000.0)


def _sums(raw: Any) -> tuple[float, float]:
    above, below = float(raw[0]), float(raw[1])
    if not (0.0 < above < 1e18 and 0.0 < below < 1e18):
        raise ValueError(f"expected two positive sums, got {raw!r}")
    return above, below


class TokenEstimator:
    """Estimates of prompt lengths in tokens, by model.

    `counters` count the tokens of a text; `image_rules` give the tokens of an image by its size.
    """

    def __init__(
        self,
        counters: Mapping[str, Callable[[str], int]] | None = None,
        image_rules: Mapping[str, ImageRule] | None = None,
    ) -> None:
        self._text: dict[str, LearntRatio] = {}
        self._images: dict[str, LearntRatio] = {}
        self._counters = dict(counters or {})
        self._image_rules = dict(image_rules or {})

    def tokens(self, model: str, text: bytes, text_bytes: float, images: Sequence[ImageSize] = ()) -> int:
        """Tokens of a prompt, at least 1: counted where the model has a local tokenizer, else estimated.

        `text` is the prompt as JSON; `text_bytes` is its length without encoded media.
        """
        counter = self._counters.get(model) if self._counters and not images else None
        if counter is not None and 0 < len(text) <= _MAX_TOKENIZED_BYTES:
            return max(1, counter(text.decode("utf-8", "replace")))
        return self.estimate(model, text_bytes, images)

    def estimate(self, model: str, text_bytes: float, images: Sequence[ImageSize] = ()) -> int:
        """Tokens of `text_bytes` bytes of text and of these images, at least 1."""
        tokens = self._text_tokens(model, text_bytes)
        if images:
            by_rule, others = self._by_rule(model, images)
            tokens += by_rule + others * self._mean_image(model)
        return max(1, round(tokens))

    def learn(self, model: str, text_bytes: int, images: Sequence[ImageSize], tokens: int) -> None:
        """Learn from the engine's count of a prompt's tokens. Absurd counts are ignored.

        With images of unknown tokens they are what is learnt from it, else the bytes per token.
        """
        if not 0 < tokens <= 1 << 31 or text_bytes <= 0:
            return
        text_tokens = float(tokens)
        if images:
            by_rule, others = self._by_rule(model, images)
            learnt_images = self._images.setdefault(model, tokens_per_image())
            if others:
                rest = tokens - by_rule - self._text_tokens(model, text_bytes)
                if rest > 0:
                    learnt_images.learn(rest, others)
                return
            # Remote images of this model are like those that came with their size.
            learnt_images.learn(by_rule, len(images))
            text_tokens -= by_rule
            if text_tokens <= 0:
                return
        learnt = self._text.get(model)
        if learnt is None:
            learnt = self._text[model] = bytes_per_token()
        learnt.learn(text_bytes, text_tokens)

    def state(self) -> dict[str, Any]:
        """Learnt bytes per token of each model, as a JSON document: restored by `restore`."""
        return {
            "text": {model: each.sums for model, each in self._text.items()},
            "images": {model: each.sums for model, each in self._images.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a document that `state` gave. Raises `ValueError` or `TypeError` where it is none."""
        text = {str(model): _sums(raw) for model, raw in state["text"].items()}
        images = {str(model): _sums(raw) for model, raw in state["images"].items()}
        for model, sums in text.items():
            self._text.setdefault(model, bytes_per_token()).sums = sums
        for model, sums in images.items():
            self._images.setdefault(model, tokens_per_image()).sums = sums

    def _text_tokens(self, model: str, text_bytes: float) -> float:
        learnt = self._text.get(model)
        return text_bytes / (START_BYTES_PER_TOKEN if learnt is None else learnt.value)

    def _mean_image(self, model: str) -> float:
        learnt = self._images.get(model)
        return START_TOKENS_PER_IMAGE if learnt is None else learnt.value

    def _by_rule(self, model: str, images: Sequence[ImageSize]) -> tuple[int, int]:
        """Tokens of the images that the model's rule covers, and the number of the others."""
        rule = self._image_rules.get(model)
        if rule is None:
            return 0, len(images)
        sized = [image for image in images if image != UNKNOWN_SIZE]
        return sum(rule.tokens(width, height) for width, height in sized), len(images) - len(sized)


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
