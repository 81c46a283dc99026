"""Tokenizer and chat template of a model's folder, and the text of an answer as its tokens come.

Pieces of a stream joined are the text of the whole. As in vLLM, as many characters as a stop string could
still take are held back.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hetlb.errors import ConfigError
from hetlb.extras import check_extra
from hetlb.files import content, read_text
from hetlb.inputs.yaml_file import read_object
from hetlb.tools.stage.stage_messages import Token

#: Defaults of vLLM that a model's generation_config.json may change.
DEFAULTS: Final[dict[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


class TemplateError(Exception):
    """Messages that the chat template refuses."""


def _optional_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if the file is missing. Raises `ConfigError`."""
    return read_object(path) if path.exists() else {}


class TextModel:
    """Text to tokens and back."""

    def __init__(self, folder: Path) -> None:
        """Read tokenizer.json and its companion files. Raises `ConfigError`."""
        for package in ("tokenizers", "jinja2"):
            check_extra("stages", package, "stage")
        import jinja2.sandbox
        import tokenizers

        path = folder / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path}: expected a tokenizer file: {error}") from error
        self._decode_stream: Callable[..., Any] = tokenizers.decoders.DecodeStream
        config = _optional_json(folder / "tokenizer_config.json")
        self._special = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in config.items()
            if key.endswith("_token") and isinstance(value, str | dict)
        }
        generation = _optional_json(folder / "generation_config.json")
        self.defaults = {
            key: generation[key] if isinstance(generation.get(key), int | float) else default
            for key, default in DEFAULTS.items()
        }
        self.eos = self._eos(generation, _optional_json(folder / "config.json"))
        self._template = self._read_template(folder, config, jinja2.sandbox)

    def _eos(self, *configs: dict[str, Any]) -> frozenset[int]:
        """Return the tokens that end an answer."""
        found: set[int] = set()
        for config in configs:
            value = config.get("eos_token_id")
            values = value if isinstance(value, list) else [value]
            found.update(each for each in values if isinstance(each, int))
        token = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        return frozenset(found if token is None else found | {token})

    def _read_template(self, folder: Path, config: dict[str, Any], sandbox: Any) -> Any:
        path = folder / "chat_template.jinja"
        text = read_text(path, ConfigError) if path.exists() else config.get("chat_template")
        if isinstance(text, list):  # several, by name
            text = next((each.get("template") for each in text if each.get("name") == "default"), None)
        if not isinstance(text, str):
            return None

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().astimezone().strftime(form)
        try:
            return environment.from_string(text)
        except Exception as error:  # whatever a template does
            raise ConfigError(f"{path}: expected a chat template: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones too."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def chat(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """Return the prompt of a conversation. Raises `TemplateError`."""
        if self._template is None:
            raise TemplateError("The model has no chat template.")
        try:
            return str(self._template.render(messages=messages, **self._special, **variables))
        except TemplateError:
            raise
        except Exception as error:  # a template may raise anything for a client's input
            raise TemplateError(f"The chat template does not take these messages: {error}") from error

    def stream(self, *, skip_special_tokens: bool) -> Callable[[int], str]:
        """Return a decoder of one answer: token in, newly complete text out."""
        decoder = self._decode_stream(skip_special_tokens=skip_special_tokens)
        tokenizer = self._tokenizer
        return lambda token: decoder.step(tokenizer, token) or ""


@dataclass(frozen=True, slots=True)
class Ending:
    """Conditions that end an answer: tokens of the model and of the client, texts, length."""

    max_tokens: int
    min_tokens: int = 0
    eos: frozenset[int] = frozenset()
    stop_tokens: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    keeps_stop: bool = False

    def stopped(self, text: str) -> str | None:
        """Return the first complete stop string, the longest of several; None without one."""
        found = [(at + len(each), -len(each), each) for each in self.stop if (at := text.find(each)) >= 0]
        return min(found)[2] if found else None

    @property
    def held(self) -> int:
        """Characters at the end of a text that may begin a stop string, at most."""
        return max(map(len, self.stop), default=1) - 1


@dataclass(slots=True)
class Piece:
    """Addition of one token to an answer. `finish` is `stop` or `length` on the last one."""

    text: str
    token: Token
    finish: str | None = None
    stop_reason: int | str | None = None


class AnswerText:
    """The text of one answer as its tokens come."""

    def __init__(self, decode: Callable[[int], str], ending: Ending) -> None:
        self._decode = decode
        self._ending = ending
        self._tokens = 0
        #: Text that may be the beginning of a stop string.
        self._held = ""

    def add(self, token: Token) -> Piece:
        """Take the next token; return what it adds to the answer."""
        ending, number = self._ending, token.token
        self._tokens += 1
        if number in ending.eos or number in ending.stop_tokens:
            reason = number if number in ending.stop_tokens else None
            return Piece(self._held, token, "stop", reason)
        text = self._held + self._decode(number)
        sure = len(text)
        if self._tokens > ending.min_tokens:
            if (stop := ending.stopped(text)) is not None:
                at = text.find(stop)
                return Piece(text[: at + len(stop) * ending.keeps_stop], token, "stop", stop)
            sure = max(0, sure - ending.held)
        if self._tokens >= ending.max_tokens:
            return Piece(text, token, "length")
        self._held = text[sure:]
        return Piece(text[:sure], token)
