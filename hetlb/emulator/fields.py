"""Fields of request bodies as vLLM 0.32 reads them, and the errors that it answers with.

Numbers are read as pydantic reads them (`"5"`, `5.0` and `true` are integers). Prompts are not tokenised:
4 bytes of text count as one token.
"""

from __future__ import annotations

import json
import math
import zlib
from statistics import NormalDist
from typing import Any

import msgspec

#: Ids from here on are out of vocabulary: the largest vocabulary of models in common use.
VOCABULARY = 262_144
BYTES_PER_TOKEN = 4
#: Tokens that a chat template adds to a message.
TOKENS_PER_MESSAGE = 4
#: Answers without `max_tokens` end by themselves: log-normal lengths, mean about 220 tokens.
ANSWER_SIGMA = 0.8
ANSWER_MU = math.log(220) - ANSWER_SIGMA**2 / 2

_DIGITS = NormalDist()
_TRUE = frozenset(("1", "on", "t", "true", "y", "yes"))
_FALSE = frozenset(("0", "off", "f", "false", "n", "no"))
_decode = msgspec.json.Decoder().decode


class ApiError(Exception):
    """A refusal in OpenAI's form."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """The JSON that vLLM sends."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.kind,
                    "param": self.param,
                    "code": self.status,
                }
            }
        )

    def messages_body(self) -> bytes:
        """The JSON of `/v1/messages`: Anthropic's form, once vLLM has read the body itself."""
        if self.kind == "Bad Request":
            return self.body()
        error = {"type": self.kind, "message": self.message}
        return msgspec.json.encode({"type": "error", "error": error})


def bad_value(message: str, param: str | None = None, value: object = None) -> ApiError:
    """A value that vLLM itself refuses (as opposed to one of the wrong type)."""
    if param is not None:
        shown = "" if value is None else f", value={value}"
        message = f"{message} (parameter={param}{shown})"
    return ApiError(400, message, "BadRequestError", param)


def bad_type(kind: str, location: str, message: str, value: object, **context: object) -> ApiError:
    """A field of the wrong type, in the words of pydantic as vLLM relays them."""
    if isinstance(value, list | dict):
        shown = f"<{type(value).__name__} of {len(value)} items>"
    else:
        shown = str(value)
    detail = {"type": kind, "loc": location, "msg": message, "input": shown, **context}
    return ApiError(400, f"1 validation error:\n  {detail}", "Bad Request", location)


def unknown_model(name: object, served: tuple[str, ...]) -> ApiError:
    """The model asked for is not served here."""
    aliases = ", ".join(served)
    message = f"The model `{name}` does not exist. Valid aliases: {aliases}."
    return ApiError(404, message, "NotFoundError", "model")


# --- reading JSON ------------------------------------------------------------------------------------


def read_object(body: bytes, content_type: str) -> dict[str, Any]:
    """The JSON object of a body. Raises `ApiError`."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise ApiError(400, message, "Bad Request")
    if not body:
        raise bad_type("missing", "body", "Field required", None)
    try:
        data = _decode(body)
    except (msgspec.DecodeError, RecursionError):
        data = _read_as_the_standard_library(body)
    else:
        # msgspec reads integers beyond 64 bits as floats: in that rare case the digits are wanted.
        if type(data) is dict and any(type(v) is float and abs(v) >= 2**63 for v in data.values()):
            data = _read_as_the_standard_library(body)
    if not isinstance(data, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise bad_type("model_attributes_type", "body", message, data)
    return data


def _read_as_the_standard_library(body: bytes) -> Any:
    """Decode as vLLM's own parser does: NaN passes, errors have its position and words."""
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise bad_type(
            "json_invalid", f"body.{error.pos}", "JSON decode error", {}, ctx={"error": error.msg}
        ) from None
    except (ValueError, RecursionError):  # not UTF-8, numbers of thousands of digits, deep nesting
        raise ApiError(400, "There was an error parsing the body", "Bad Request") from None


def read_int(data: dict[str, Any], key: str, default: int | None) -> int | None:
    """An optional integer, read leniently as pydantic does."""
    value = data.get(key)
    if type(value) is int:
        return value
    if value is None:
        return default
    location = f"body.{key}"
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        if value.is_integer():
            return int(value)
        if math.isfinite(value):
            message = "Input should be a valid integer, got a number with a fractional part"
            raise bad_type("int_from_float", location, message, value)
        raise bad_type("finite_number", location, "Input should be a finite number", value)
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            message = "Input should be a valid integer, unable to parse string as an integer"
            raise bad_type("int_parsing", location, message, value) from None
    raise bad_type("int_type", location, "Input should be a valid integer", value)


def read_bool(data: dict[str, Any], key: str, where: str = "body") -> bool:
    """An optional flag, read leniently as pydantic does; absent is false."""
    value = data.get(key)
    if value is None or value is False:
        return False
    if value is True or (isinstance(value, int | float) and value == 1):
        return True
    location = f"{where}.{key}"
    if isinstance(value, int | float) and value == 0:
        return False
    if isinstance(value, str | int | float):
        lower = str(value).lower()
        if lower in _TRUE or lower in _FALSE:
            return lower in _TRUE
        message = "Input should be a valid boolean, unable to interpret input"
        raise bad_type("bool_parsing", location, message, value)
    raise bad_type("bool_type", location, "Input should be a valid boolean", value)


def read_float(data: dict[str, Any], key: str, default: float) -> float:
    """An optional number, read leniently as pydantic does."""
    value = data.get(key)
    if value is None:
        return default
    if isinstance(value, int | float):
        return float(value) if abs(value) < 1e300 or isinstance(value, float) else math.inf
    location = f"body.{key}"
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            message = "Input should be a valid number, unable to parse string as a number"
            raise bad_type("float_parsing", location, message, value) from None
    raise bad_type("float_type", location, "Input should be a valid number", value)


# --- counting ----------------------------------------------------------------------------------------


def count_text(text: str) -> int:
    """Tokens of a text: one per 4 bytes of UTF-8, at least one."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return max(1, -(-size // BYTES_PER_TOKEN))


def token_ids(text: str) -> list[int]:
    """As many token ids as `count_text` counts, the same ones for the same text."""
    data = text.encode("utf-8", "surrogatepass")
    pieces = [data[at : at + BYTES_PER_TOKEN] for at in range(0, len(data), BYTES_PER_TOKEN)] or [b""]
    return [zlib.crc32(piece) % VOCABULARY for piece in pieces]


def text_seed(text: str) -> int:
    """A number that stands for the text."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def answer_length(seed: int, index: int) -> int:
    """Length of an answer that no limit cuts: deterministic, log-normal, at least one token."""
    uniform = (zlib.crc32(b"%d/%d" % (seed, index)) + 0.5) / 2**32
    return max(1, round(math.exp(ANSWER_MU + ANSWER_SIGMA * _DIGITS.inv_cdf(uniform))))


def chat_text(messages: list[Any]) -> tuple[str, int]:
    """The text of a conversation and its tokens. Raises `ApiError` on what is no message."""
    parts: list[str] = []
    tokens = 0
    for number, message in enumerate(messages):
        where = f"body.messages.{number}"
        if not isinstance(message, dict):
            raise bad_type("dict_type", where, "Input should be a valid dictionary", message)
        if "role" not in message:
            raise bad_type("missing", f"{where}.role", "Field required", message)
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(
                part["text"]
                for part in content
                if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
        elif content is None:
            content = ""
        elif not isinstance(content, str):
            raise bad_type("string_type", f"{where}.content", "Input should be a valid string", content)
        parts.append(content)
        tokens += TOKENS_PER_MESSAGE + count_text(content)
    return "\n".join(parts), tokens
