"""Files of texts, read into rows: conversations, prompts, and OpenAI's batches.

There is no tokenizer here: the length of a text is estimated at four bytes a token, and what a server reports
replaces the estimate in the results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from hetlb.errors import TraceError
from hetlb.tools.workload.record_file import Record, RecordFile, squashed
from hetlb.tools.workload.rows import Row
from hetlb.tools.workload.trace_columns import COLUMNS, Columns, Format

BYTES_PER_TOKEN = 4
#: Bounds of conversations, as in `vllm bench serve`: others are too short to measure, or too long for common
#: limits.
CHAT_MIN_TOKENS = 4
CHAT_MAX_PROMPT_TOKENS = 1024
CHAT_MAX_TOKENS = 2048

CHATS = "conversations (ShareGPT's conversations, or messages with role and content)"
BATCH = "OpenAI's batch (JSON lines of custom_id, url, body)"
PROMPTS = "prompts (JSON lines of prompt, and output_tokens if known)"

_CHAT_KEYS = (
    *("conversations", "conversation", "messages", "conversationa"),
    *("items", "dialogue", "dialog", "data"),
)
#: Number of these that only conversations have.
_PLAIN = 4
_SPEAKERS = ("from", "role", "user")
#: Names of speakers, by their part.
_ASKING = {"human", "user"}
_ANSWERING = {"gpt", "assistant", "chatgpt", "bard", "bing", "model", "bot"}
_ASIDE = {"system", "tool", "function", "observation", "developer", "function_call", "tool_call"}
#: Keys of a turn that calls a tool; its answer comes later.
_CALLS = ("tool_calls", "function_call")


def estimate_tokens(text: str) -> int:
    """Return tokens of a text at four bytes each, at least 1."""
    return max(1, math.ceil(len(text.encode()) / BYTES_PER_TOKEN))


def encodable(text: str) -> str:
    """Return the text with question marks for half surrogate pairs (`"\\ud83d"`): no request holds them."""
    return text.encode("utf-8", "replace").decode()


def is_chats(file: RecordFile) -> bool:
    """Return True for a file of conversations, by a key of its own or by lists of texts or of messages."""
    if file.shape == "CSV" or file.name(*_CHAT_KEYS) is None:
        return False
    lists = [each.values.get(str(file.name(*_CHAT_KEYS))) for each in file.records]
    firsts = [value[0] for value in lists if isinstance(value, list) and value]
    return file.name(*_CHAT_KEYS[:_PLAIN]) is not None or any(
        isinstance(each, str) or (isinstance(each, dict) and not each.keys().isdisjoint(_SPEAKERS))
        for each in firsts
    )


def chat_rows(file: RecordFile, answer_tokens: int | None) -> tuple[list[Row], list[str]]:
    """Return the first question and the length of its answer of each conversation, and the rows left out.

    `answer_tokens` replaces the length. Rows other than conversations are counted, as are rows beyond the
    limits of `vllm bench serve`.
    """
    rows, odd, beyond = [], file.odd, 0
    for record in file.records:
        pair = _first_question(record)
        if pair is None:
            odd += 1
            continue
        question, answer = pair
        asked, answered = estimate_tokens(question), estimate_tokens(answer)
        if answer_tokens is not None:
            answered = answer_tokens
        elif answered < CHAT_MIN_TOKENS:
            beyond += 1
            continue
        if CHAT_MIN_TOKENS <= asked <= CHAT_MAX_PROMPT_TOKENS and asked + answered <= CHAT_MAX_TOKENS:
            rows.append(Row(None, asked, answered, question))
        else:
            beyond += 1
    left_out = [f"{odd:,} that are no conversation with question and answer"] if odd else []
    left_out += [f"{beyond:,} beyond the limits of vllm bench serve"] if beyond else []
    return rows, left_out


def _first_question(record: Record) -> tuple[str, str] | None:
    """Return the first question and the answer that follows it, None for a row without both."""
    found = (record.values[key] for key in record.values if squashed(key) in _CHAT_KEYS)
    turns = next((each for each in found if isinstance(each, list) and each), None)
    question: str | None = None
    for number, turn in enumerate(turns or ()):
        if isinstance(turn, str):
            turn = {"value": turn}
        if not isinstance(turn, dict):
            return None
        text = _text(next((turn[key] for key in ("value", "content", "text") if key in turn), None))
        who = next((turn[key] for key in _SPEAKERS if isinstance(turn.get(key), str)), None)
        speaker = ("human", "gpt")[number % 2] if who is None else who.lower()
        if speaker in _ASIDE or (not text and any(turn.get(key) for key in _CALLS)):
            continue
        if text is None or not text.strip() or speaker not in _ASKING | _ANSWERING:
            return None
        if speaker in _ASKING:
            question = text if question is None else question
        elif question is not None:
            return encodable(question), encodable(text)
    return None


def _text(content: object) -> str | None:
    """Return the text of a message: a string, or the text parts of a list."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str)) or None


PAIRS = "pairs (instruction, question or prompt, and output, response, answer or completion)"
#: Times of prompts without a unit are AIPerf's, in ms.
_TEXTS = Format(PAIRS, "question answer", 1e-3)


def is_pairs(file: RecordFile) -> bool:
    """Return True for a file of questions with their answers."""
    return _TEXTS.fits(file)


def pair_rows(file: RecordFile) -> tuple[list[Row], list[str]]:
    """Return the questions of a file with the length of their answers."""
    columns, rows, odd = Columns(file, _TEXTS), [], file.odd
    for record in file.records:
        asked, beside, answer = (
            encodable(_text(columns.cell(record, role)[1]) or "")
            for role in ("question", "context", "answer")
        )
        text = "\n".join(each for each in (asked, beside) if each.strip())
        if not text or not answer:
            odd += 1
            continue
        rows.append(Row(None, estimate_tokens(text), estimate_tokens(answer), text))
    return rows, [f"{odd:,} without question or answer"] if odd else []


def is_batch(file: RecordFile) -> bool:
    """Return True for a batch of OpenAI's form."""
    return file.shape != "CSV" and file.has("customid") and file.name(*_BODIES) is not None


def batch_rows(file: RecordFile, answer_tokens: int | None) -> tuple[list[Row], list[str]]:
    """Return the requests of a batch: their texts, and the most tokens that each may answer with."""
    rows, odd, key = [], file.odd, file.name(*_BODIES) or ""
    for record in file.records:
        body = record.values.get(key)
        texts = list(asked_texts(body)) if isinstance(body, dict) else []
        ids = _token_ids(body) if isinstance(body, dict) else 0
        if not isinstance(body, dict) or not (texts or ids):
            odd += 1
            continue
        embeds = (
            re.search(r"embedding|rerank|score|classify|pooling|moderation", record.text("url")) is not None
        )
        most = next((body[key] for key in _MOST if body.get(key) is not None), answer_tokens)
        if most is None and not embeds:
            raise record.error("body.max_tokens", "the most tokens of the answer", None)
        text = encodable("\n".join(texts))
        output = 0 if embeds else record.tokens("body.max_tokens", most)
        endpoint = "embeddings" if embeds else "completions"
        tokens = ids or estimate_tokens(text)
        rows.append(Row(None, tokens, output, None if ids else text, endpoint=endpoint))
    return rows, [f"{odd:,} without a prompt"] if odd else []


_MOST = ("max_completion_tokens", "max_tokens", "max_output_tokens")
#: Keys of the request of a line: OpenAI's and Anthropic's.
_BODIES = ("body", "params")
_ASKED = (
    *("instructions", "system", "messages", "prompt", "input", "text_input"),
    *("query", "documents", "text_1", "text_2"),
)


def asked_texts(body: dict[str, Any]) -> Iterable[str]:
    """Yield the texts that a request asks with: strings, and texts of messages."""
    for key in _ASKED:
        value = body.get(key)
        for each in value if isinstance(value, list) else [value]:
            text = _text(each.get("content", each.get("text"))) if isinstance(each, dict) else each
            if isinstance(text, str) and text:
                yield text


def _token_ids(body: dict[str, Any]) -> int:
    """Return the number of tokens of a prompt of token ids, or of several together; 0 for a text."""
    ids = body.get("prompt", body.get("input"))
    lists = ids if isinstance(ids, list) and ids and isinstance(ids[0], list) else [ids]
    return sum(len(each) for each in lists if isinstance(each, list) and each and isinstance(each[0], int))


def prompt_rows(file: RecordFile, answer_tokens: int | None) -> tuple[list[Row], list[str]]:
    """Return the prompts of a file, with times if their unit shows.

    Raises `TraceError` if the length of an answer is unknown.
    """
    columns, rows = Columns(file, _TEXTS), []
    prompt = file.name("prompt", "textinput", "text") or ""
    aiperf = squashed(prompt) == "textinput"
    for record in file.records:
        text = record.values.get(prompt)
        if not isinstance(text, str) or not text:
            raise record.error(prompt, "a text", text)
        output = answer_tokens
        if columns.cell(record, "most")[0]:
            output = columns.tokens(record, "most", 1)
        elif answer_tokens is None:
            raise TraceError(f"{record.where}: output_tokens: expected the length of the answer, got none")
        arrival = squashed(columns.cell(record, "arrival")[0])
        timed = arrival not in COLUMNS["arrival"] or (aiperf and arrival == "timestamp")
        arrival_s = columns.moment(record, "arrival") if timed else None
        rows.append(Row(arrival_s, estimate_tokens(encodable(text)), output or 1, encodable(text)))
    return rows, [f"{file.odd:,} that are no objects"] if file.odd else []
