"""Requests of a file in any known form: one recogniser, by the keys that its records have."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hetlb.errors import TraceError
from hetlb.tools.workload.chats import (
    BATCH,
    CHATS,
    PAIRS,
    PROMPTS,
    batch_rows,
    chat_rows,
    is_batch,
    is_chats,
    is_pairs,
    pair_rows,
    prompt_rows,
)
from hetlb.tools.workload.measured_logs import NAMED_RECORDS, kind_of_log, summary_of
from hetlb.tools.workload.record_file import RecordFile, open_records, say, unwrapped
from hetlb.tools.workload.rows import REQUIRED_COLUMNS, Row, is_own, own_rows
from hetlb.tools.workload.trace_columns import TRACES, known_trace, named_columns, rows_of

#: Largest depth of nested objects read.
_MOST_WRAPPED: Final = 3
#: Supported forms, for a refusal.
_TITLES = (
    f"hetlb's CSV ({','.join(REQUIRED_COLUMNS)})",
    *TRACES,
    "records whose keys name what they are (arrival_s, _ms or _ns, prompt_tokens, completion_tokens)",
    CHATS,
    PAIRS,
    BATCH,
    PROMPTS,
    "results of a load test with the times of each request",
)


def read_trace(path: Path, answer_tokens: int | None = None) -> list[Row]:
    """Return every request of a file, in its order. Raises `TraceError`; a file without any is an error.

    `answer_tokens` is the length of answers if the file has none. What a file of another program was taken
    for goes to stderr.
    """
    return rows_in(open_records(path), answer_tokens)


def rows_in(file: RecordFile, answer_tokens: int | None = None, chat_tokens: int | None = None) -> list[Row]:
    """Return the requests of an open file; see `read_trace`.

    `chat_tokens` replaces the length of the answers of conversations.
    """
    if is_own(file):
        return own_rows(file)
    found, inner = _recognised(file, answer_tokens, chat_tokens), file
    for _ in range(_MOST_WRAPPED if summary_of(file) is None else 0):
        if found is not None or (within := unwrapped(inner)) is None:
            break
        found, inner = _recognised(within, answer_tokens, chat_tokens), within
    if found is None:
        raise TraceError(
            f"{file.path}: {summary_of(file) or f'expected requests, got {file.described}'}; "
            f"read are: {'; '.join(_TITLES)}"
        )
    title, rows, left_out = found
    if not rows:
        raise TraceError(f"{file.path}: {title}: expected at least one request, got none of use")
    times = [row.arrival_s for row in rows if row.arrival_s is not None]
    timed = len(times) == len(rows)
    span = f" over {max(times) - min(times):,.1f} s" if timed else ", not all with times" if times else ""
    notes = "".join(f"; left out: {each}" for each in left_out)
    say(file.path, f"read as {title}: {len(rows):,} request{'s'[: len(rows) > 1]}{span}{notes}")
    return rows


def _recognised(
    file: RecordFile, answer_tokens: int | None, chat_tokens: int | None
) -> tuple[str, list[Row], list[str]] | None:
    """Return the kind of a file, its rows, the rows left out; None of an unknown one. Raises `TraceError`."""
    if (trace := known_trace(file)) is not None:
        title, keys = trace
        return title, *rows_of(file, keys)
    if is_chats(file):
        return CHATS, *chat_rows(file, chat_tokens)
    if is_batch(file):
        return BATCH, *batch_rows(file, answer_tokens)
    named = named_columns(file)
    timed = named is not None and named.arrival is not None
    if (log := kind_of_log(file)) is not None and (timed or log[0] != NAMED_RECORDS):
        title, reader = log
        measured = reader(file)
        rows = [
            Row(each.arrival_s, max(1, each.input_tokens), each.output_tokens) for each in measured.requests
        ]
        left_out = [f"{measured.failed:,} that failed"] if measured.failed else []
        left_out += [f"{measured.warm_ups:,} of the warm-up"] if measured.warm_ups else []
        return title, rows, left_out
    if named is not None and summary_of(file) is None:
        return NAMED_RECORDS, *rows_of(file, named)
    if is_pairs(file):
        return PAIRS, *pair_rows(file)
    if file.name("prompt", "textinput", "text") is not None:
        return PROMPTS, *prompt_rows(file, answer_tokens)
    return None
