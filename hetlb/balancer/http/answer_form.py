"""Form of an answer to a chat or a completion: what is surely none, and what is odd.

`WRONG` is no answer: an error for a finish reason, no choice, nothing but a role. `ODD` may be one: another
model's name, no finish reason, a token or two, blanks, one character again and again, the text of an error,
JSON for a stream. It counts only if other instances answer the same traffic otherwise
(`core/evidence/clients.py`). All else is `GOOD`.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from hetlb.balancer.http.openai_fields import AnswerFields
from hetlb.errors import NOT_JSON

GOOD: Final = 0
ODD: Final = 1
WRONG: Final = 2
#: Paths with a known form.
PATHS: Final = ("/v1/chat/completions", "/v1/completions")
#: Finish reasons of engines that gave up.
_GIVEN_UP: Final = (b"error", b"abort")
#: Finish reasons of a text that has begun; tokens may be hidden, so that only their number tells.
_CUT: Final = (b"length", b"content_filter")
#: Tokens of an answer that is short, if it could have been longer.
_SHORT_TOKENS: Final = 2
_SHORT_CHARACTERS: Final = 24
#: Most tokens, events and characters of an answer that may be the text of an error.
_ERROR_TOKENS: Final = 12
_MOST_ERROR_EVENTS: Final = 16
_ERROR_CHARACTERS: Final = 64
#: Begin of a short text that a gateway or an engine gives as its answer when it fails.
_ERRORS: Final = (
    b"internal server error", b"internal error", b"bad gateway", b"service unavailable", b"gateway timeout",
    b"too many requests", b"unauthorized", b"forbidden", b"bad request", b"an error occurred", b"error:",
)  # fmt: skip
#: Their first characters.
_ERROR_BEGINS: Final = frozenset("".join(chr(each[0]) + chr(each[0]).upper() for each in _ERRORS))
#: Number of events, or of characters, in which more than one kind is expected.
_MANY: Final = 8
#: Characters of a text that is expected not to come again and again: one, or its escape.
_SAME_CHARACTERS: Final = 6
#: Inspected bytes at the start of an answer.
SAMPLE_BYTES: Final = 2048
_MODEL: Final = re.compile(rb'"model"\s*+:\s*+"([^"\\]{0,512}+)"')
_FINISH: Final = re.compile(rb'"finish_reason"\s*+:\s*+"([a-z_]{1,32}+)"')
_TEXT: Final = re.compile(rb'"(?:content|text|reasoning|reasoning_content)"\s*+:\s*+"([^"]{0,64}+)')
_NO_CHOICE: Final = re.compile(rb'"choices"\s*+:\s*+(?:\[\s*+\]|null)')
_CHOICE: Final = re.compile(rb'"choices"\s*+:\s*+\[\s*+\{')
_NO_TEXT: Final = (
    b'"tool_calls":[{',
    b'"tool_calls": [{',
    b'"function_call":{',
    b'"refusal":"',
    b'"audio":{',
)


def is_usual(fields: AnswerFields, model: str) -> bool:
    """Return True if a whole answer is good at one look, as most are. False says nothing.

    Its text begins with two different characters. The first one is no blank.
    """
    tokens: int = fields.usage.completion_tokens
    choice = fields.choices[0]
    message = choice.message
    text: str | None = choice.text if message is None else message.content
    if text is None or len(text) < 2 or tokens <= _SHORT_TOKENS:
        return False
    first = text[0]
    if first == text[1] or first <= " " or (tokens <= _ERROR_TOKENS and first in _ERROR_BEGINS):
        return False
    finish: str | None = choice.finish_reason
    return (finish == "stop" or finish == "length") and fields.model == model


def form_of_stream(
    sample: bytes, last: bytes, events: int, tokens: int | None, finish: bytes, may_be_short: bool
) -> int:
    """Return the form of a stream by its first events, its last text, and the finish reason that it gave."""
    if finish in _GIVEN_UP:
        return WRONG
    if _NO_CHOICE.search(sample) is not None and _CHOICE.search(sample) is None:
        return WRONG
    texts = _TEXT.findall(sample) + _TEXT.findall(last)
    said = b"".join(texts)
    if not finish:
        return ODD if said.strip() or _says_more(sample) else WRONG
    kinds = set(filter(None, texts))
    if events > _MANY and len(texts) > 2 and len(kinds) == 1 and len(said) <= len(texts) * _SAME_CHARACTERS:
        odd = True
    elif may_be_short:
        return GOOD
    else:
        count = len([each for each in texts if each]) if tokens is None else tokens
        odd = _is_odd(finish, count <= _SHORT_TOKENS, said, events <= _MOST_ERROR_EVENTS)
    return ODD if odd and not _says_more(sample) else GOOD


def form_of_body(body: bytes, tokens: int | None, may_be_short: bool) -> int:
    """Return the form of a whole answer, which is JSON."""
    found = _FINISH.search(body)
    if found is None:
        try:
            answer = msgspec.json.decode(body)
        except NOT_JSON:
            return GOOD  # another form: judged elsewhere
        choices = answer.get("choices") if isinstance(answer, dict) else None
        return WRONG if choices is not None and not choices else ODD
    finish = found[1]
    if finish in _GIVEN_UP:
        return WRONG
    text = _TEXT.search(body)
    begin = b"" if text is None else text[1]
    if begin[:12] == b"\\u0000\\u0000" or (len(begin) >= _MANY and begin == begin[:1] * len(begin)):
        return ODD
    if may_be_short:
        return GOOD
    few, brief = tokens is not None and tokens <= _SHORT_TOKENS, len(begin) < _ERROR_CHARACTERS
    odd = _is_odd(finish, few, begin, brief)
    return ODD if odd and not _says_more(body) else GOOD


def _is_odd(finish: bytes, few: bool, said: bytes, brief: bool) -> bool:
    """Return True if an answer of a `few` tokens or no text is odd for its finish reason.

    A `brief` one is odd, too, if it is the text of an error.
    """
    if finish == b"stop":
        if brief and said.strip().lower().startswith(_ERRORS):
            return True
        return (few and len(said) <= _SHORT_CHARACTERS) or not said.strip()
    return few and finish in _CUT and not said.strip()


def _says_more(answer: bytes) -> bool:
    """Return True if an answer has other content than text."""
    return any(answer.find(each) >= 0 for each in _NO_TEXT)


def model_of(sample: bytes) -> str:
    """Return the model that an answer names, "" for none."""
    found = _MODEL.search(sample)
    return "" if found is None else found[1].decode("utf-8", "replace")
