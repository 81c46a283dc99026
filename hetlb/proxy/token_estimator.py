"""Prompt tokens estimated without tokenising on the hot path.

Token ids are counted, and so is text where a local tokenizer is configured. Other text is its bytes over the
bytes per token learnt for that model from the engines' own `usage`. An image counts by the rule of its model
where the fleet file states one and the image's size is known, else as the mean image learnt from `usage`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hetlb.errors import ConfigError
from hetlb.proxy.http.media import UNKNOWN_SIZE, ImageSize

if TYPE_CHECKING:
    from hetlb.image_tokens import ImageRule

#: Bytes per token before anything was learnt: English text and common vocabularies.
START_BYTES_PER_TOKEN: Final = 4.0
#: The start value weighs as this many tokens; older evidence halves after about `_MEMORY_TOKENS`.
_START_WEIGHT_TOKENS: Final = 200.0
_MEMORY_TOKENS: Final = 200_000.0
_LEAST: Final = 0.5
_MOST: Final = 16.0
#: Tokens of an image before anything was learnt; it weighs as this many images. Older evidence halves.
START_TOKENS_PER_IMAGE: Final = 600.0
_START_WEIGHT_IMAGES: Final = 2.0
_MEMORY_IMAGES: Final = 1000.0
#: A local tokenizer is asked for prompts up to this size: it takes about a millisecond for it.
_MAX_TOKENIZED_BYTES: Final = 64 << 10


class BytesPerToken:
    """Bytes per token as a ratio of sums with slow forgetting, for one model."""

    __slots__ = ("_bytes", "_tokens", "ratio")

    def __init__(self) -> None:
        self._tokens = _START_WEIGHT_TOKENS
        self._bytes = _START_WEIGHT_TOKENS * START_BYTES_PER_TOKEN
        #: Bytes per token, within reason.
        self.ratio = START_BYTES_PER_TOKEN

    def learn(self, text_bytes: int, tokens: float) -> None:
        """A prompt of `text_bytes` had `tokens` tokens."""
        if self._tokens > _MEMORY_TOKENS:
            self._tokens /= 2.0
            self._bytes /= 2.0
        self._tokens += tokens
        self._bytes += text_bytes
        self.ratio = min(_MOST, max(_LEAST, self._bytes / self._tokens))

    @property
    def sums(self) -> tuple[float, float]:
        """Bytes and tokens, as far as they are remembered."""
        return self._bytes, self._tokens

    @sums.setter
    def sums(self, sums: tuple[float, float]) -> None:
        self._bytes, self._tokens = sums
        self.ratio = min(_MOST, max(_LEAST, self._bytes / self._tokens))


class TokensPerImage:
    """Mean tokens of an image with slow forgetting, for one model."""

    __slots__ = ("_images", "_tokens", "mean")

    def __init__(self) -> None:
        self._images = _START_WEIGHT_IMAGES
        self._tokens = _START_WEIGHT_IMAGES * START_TOKENS_PER_IMAGE
        self.mean = START_TOKENS_PER_IMAGE

    def learn(self, images: int, tokens: float) -> None:
        """Learn from images that had `tokens` tokens together."""
        if self._images > _MEMORY_IMAGES:
            self._images /= 2.0
            self._tokens /= 2.0
        self._images += images
        self._tokens += tokens
        self.mean = self._tokens / self._images

    @property
    def sums(self) -> tuple[float, float]:
        """Tokens and images, as far as they are remembered."""
        return self._tokens, self._images

    @sums.setter
    def sums(self, sums: tuple[float, float]) -> None:
        self._tokens, self._images = sums
        self.mean = self._tokens / self._images


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
        self._text: dict[str, BytesPerToken] = {}
        self._images: dict[str, TokensPerImage] = {}
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
            learnt_images = self._images.setdefault(model, TokensPerImage())
            if others:
                rest = tokens - by_rule - self._text_tokens(model, text_bytes)
                if rest > 0:
                    learnt_images.learn(others, rest)
                return
            # Remote images of this model are like those that came with their size.
            learnt_images.learn(len(images), by_rule)
            text_tokens -= by_rule
            if text_tokens <= 0:
                return
        learnt = self._text.get(model)
        if learnt is None:
            learnt = self._text[model] = BytesPerToken()
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
            self._text.setdefault(model, BytesPerToken()).sums = sums
        for model, sums in images.items():
            self._images.setdefault(model, TokensPerImage()).sums = sums

    def _text_tokens(self, model: str, text_bytes: float) -> float:
        learnt = self._text.get(model)
        return text_bytes / (START_BYTES_PER_TOKEN if learnt is None else learnt.ratio)

    def _mean_image(self, model: str) -> float:
        learnt = self._images.get(model)
        return START_TOKENS_PER_IMAGE if learnt is None else learnt.mean

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
