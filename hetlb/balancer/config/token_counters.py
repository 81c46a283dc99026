"""Tokenizers in `tokenizer.json` files, or in the folders that hold them."""

from __future__ import annotations

from collections.abc import Callable

from hetlb.balancer.config.fleet import Fleet
from hetlb.errors import ConfigError
from hetlb.files import content


def token_counters(fleet: Fleet) -> dict[str, Callable[[str], int]]:
    """Return the tokenizers of models, as functions from a text to its tokens. Raises `ConfigError`."""
    counters: dict[str, Callable[[str], int]] = {}
    for m, model in enumerate(fleet.file.models):
        if model.tokenizer is None:
            continue
        key, path = f"{fleet.where}models[{m}].tokenizer", fleet.base / model.tokenizer
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                f"{key}: expected the package 'tokenizers' (pip install 'hetlb[tokenizer]')"
            ) from error
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            tokenizer = Tokenizer.from_buffer(content(file))
        except OSError as error:
            raise ConfigError(
                f"{key}: expected a tokenizer.json, got {str(path)!r}: {error.strerror}"
            ) from error
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"{key}: expected a tokenizer.json, got {str(path)!r}") from error

        def count(text: str, tokenizer: Tokenizer = tokenizer) -> int:
            return len(tokenizer.encode(text, add_special_tokens=True).ids)

        counters[model.name] = count
    return counters
