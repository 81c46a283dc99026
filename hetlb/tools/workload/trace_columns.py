"""Public traces, read into rows: the meaning and the unit of each key of a record.

A trace is known by its keys (`TRACES`). Keys without a unit have the one of the trace they are known
from; of an unknown file only keys that name their unit are read (`named_columns`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hetlb.errors import TraceError
from hetlb.tools.workload.record_file import UNITS_S, Record, RecordFile, squashed, unit_of
from hetlb.tools.workload.rows import Row

#: Names of prompt tokens, output tokens, and of the blocks of a prompt, as squashed keys.
INPUT = (
    *("inputtokens", "inputlength", "inputlen", "inputtoks", "inputsequencelength", "isl", "numinputtokens"),
    *("prompttokens", "promptlength", "promptlen", "promptsize", "numprompttokens", "numberinputtokens"),
    *(
        "numprefilltokens",
        "prefilltokens",
        "contexttokens",
        "requesttokens",
        "inputids",
        "prompttokenids",
        "tokensprompt",
        "genaiusageinputtokens",
        "genaiusageprompttokens",
        "prompttokencount",
        "inputtokencount",
        "promptevalcount",
        "llmtokencountprompt",
        "tokensevaluated",
    ),
)
OUTPUT = (
    *("outputtokens", "outputlength", "outputlen", "outputtoks", "outputsequencelength", "osl"),
    *("completiontokens", "completionlength", "generatedtokens", "generationtokens", "responsetokens"),
    *("numoutputtokens", "numcompletiontokens", "numberoutputtokens", "numdecodetokens", "decodetokens"),
    *("tokensize", "responselength", "outputtokencount", "tokenscompletion"),
    *("genaiusageoutputtokens", "genaiusagecompletiontokens"),
    *("candidatestokencount", "completiontokencount", "evalcount", "tokenspredicted"),
    *("llmtokencountcompletion",),
)
_HASH_IDS = ("hashids", "blockhashes", "blockids")
_SESSION = ("sessionid", "conversationid")
#: Keys of the arrival time; a unit may follow.
ARRIVALS = (
    *("arrival", "arrivaltime", "arrivaltimestamp", "arrivedat", "timestamp", "ts", "time", "starttime"),
    *("start", "requeststart", "requeststarttime", "requesttime", "scheduledtime", "senttime", "startedat"),
    *("created", "createdat", "createtime", "requestcreatedat", "datetime", "date"),
)
#: Ends of keys of times since 1970.
_CLOCKS = ("unix", "epoch", "utc")


@dataclass(frozen=True, slots=True)
class TraceKeys:
    """Keys of a trace. `arrival` with its usual unit in seconds, None if it must show (`unit_of`).

    `block_tokens` is how many tokens one of its `hash_ids` names, None for as many as the reader takes.
    With `failed_without_output` a request without output tokens is one that failed.
    """

    arrival: str | None
    unit_s: float | None
    input: str
    output: str
    block_tokens: int | None = None
    session: str | None = None
    sequences: str | None = None
    failed_without_output: bool = False


#: Public traces by description: keys that all must be there, the more special ones first.
TRACES: Mapping[str, TraceKeys] = {
    "Bailian's trace (chat_id, timestamp in s, input_length, output_length, hash_ids of 16 tokens)": (
        TraceKeys("timestamp", 1.0, "inputlength", "outputlength", 16, session="chatid")
    ),
    "the form of Mooncake, AIPerf and Dynamo (timestamp in ms, input_length, output_length, hash_ids)": (
        TraceKeys("timestamp", 1e-3, "inputlength", "outputlength")
    ),
    "Azure's trace (TIMESTAMP, ContextTokens, GeneratedTokens)": (
        TraceKeys("timestamp", None, "contexttokens", "generatedtokens")
    ),
    "BurstGPT (Timestamp in s, Request tokens, Response tokens)": (
        TraceKeys("timestamp", 1.0, "requesttokens", "responsetokens", failed_without_output=True)
    ),
    "Splitwise's trace (arrival_timestamp in s, prompt_size, token_size)": (
        TraceKeys("arrivaltimestamp", 1.0, "promptsize", "tokensize", sequences="batchsize")
    ),
    "Vidur's trace (arrived_at in s, num_prefill_tokens, num_decode_tokens)": (
        TraceKeys("arrivedat", 1.0, "numprefilltokens", "numdecodetokens")
    ),
    "LLMServingSim's trace (arrival_time_ns, input_toks, output_toks)": (
        TraceKeys("arrivaltimens", 1e-9, "inputtoks", "outputtoks")
    ),
}


#: Largest number of `hash_ids` of a request: a prompt of ten million tokens has 625,000 of 16.
_MOST_BLOCKS = 1_000_000


def known_trace(file: RecordFile) -> tuple[str, TraceKeys] | None:
    """Return the public trace with a file's keys, None without one."""
    for title, keys in TRACES.items():
        needed = [keys.input, keys.output, *([keys.session] if keys.session else [])]
        if file.has(*needed, *([keys.arrival] if keys.arrival else [])):
            # Its columns are common ones: in a table without blocks the unit must show.
            if keys.unit_s == 1e-3 and file.shape == "CSV" and not file.name(*_HASH_IDS):
                return None
            return title, keys
    # Sessions of AIPerf begin with a time or none at all; Vidur's lengths come without times, too.
    if file.has("inputlength", "outputlength") and not arrival_keys(file):
        return "lengths in Mooncake's form, without times", TraceKeys(
            None, None, "inputlength", "outputlength"
        )
    return None


def named_columns(file: RecordFile) -> TraceKeys | None:
    """Return the keys of a file with self-explaining names, None if they are not."""
    found, given = file.name(*INPUT), file.name(*OUTPUT)
    if found is None or given is None:
        return None
    times = arrival_keys(file)
    if not times:
        return TraceKeys(None, None, squashed(found), squashed(given))
    return TraceKeys(times[0], None, squashed(found), squashed(given))


def arrival_keys(file: RecordFile) -> list[str]:
    """Return squashed keys of arrival times, keys with a unit in their name first."""
    with_unit = (begin + unit for begin in ARRIVALS for unit in (*UNITS_S, *_CLOCKS))
    return [key for key in (*with_unit, *ARRIVALS) if key in file.names]


def rows_of(file: RecordFile, keys: TraceKeys) -> tuple[list[Row], list[str]]:
    """Return the rows of a trace in file order, and the rows left out, in words. Raises `TraceError`."""
    names = file.names
    arrival = None if keys.arrival is None else names[keys.arrival]
    unit_s = 1.0 if arrival is None else unit_of(file, arrival, keys.unit_s)
    roots = _roots(file.records, names) if keys.session == "chatid" else None
    rows, failed, empty, delayed = [], 0, 0, 0
    delay, newest_s = file.name("delay", "delayms"), dict[str, float]()
    for record in file.records:
        at = record.get(arrival)
        prompt = record.tokens(names[keys.input], _count(record.get(names[keys.input])))
        output = record.tokens(names[keys.output], record.get(names[keys.output]))
        if keys.failed_without_output and not output:
            failed += 1
            continue
        if not prompt:
            empty += 1
            continue
        sequences = 1
        if keys.sequences in names:
            sequences = record.tokens(names[keys.sequences], record.get(names[keys.sequences]) or 1, 1)
        session = record.text(file.name(*_SESSION)) if roots is None else roots[record.text(names["chatid"])]
        arrival_s = None if at is None else record.moment(arrival or "", at, unit_s)
        if arrival_s is None and session in newest_s and record.get(delay) is not None:
            delayed += 1
            arrival_s = newest_s[session] + record.seconds(str(delay), record.get(delay), 1e-3)
        if arrival_s is not None and session:
            newest_s[session] = arrival_s
        rows.append(
            Row(
                arrival_s,
                prompt,
                output,
                session=session,
                hash_ids=_blocks(record, file.name(*_HASH_IDS), keys.block_tokens),
                turn=record.text(file.name("turn", "turnindex")),
                text=record.text(file.name("prompt", "textinput")) or None,
                sequences=sequences,
            )
        )
    left_out = [f"{failed:,} that failed (no output)"] if failed else []
    left_out += [f"{empty:,} without a prompt"] if empty else []
    left_out += [f"how long the answers before {delayed:,} delayed turns took"] if delayed else []
    left_out += [f"{file.odd:,} that are no objects"] if file.odd else []
    return rows, left_out


def _count(value: Any) -> Any:
    """Return the number of tokens of a list, another value as it is."""
    return len(value) if isinstance(value, list) else value


def _blocks(record: Record, key: str | None, block_tokens: int | None) -> tuple[str, ...]:
    """Return names of blocks, each with its length if the trace has one of its own. Raises `TraceError`."""
    value = record.get(key)
    parts: list[Any] = value if isinstance(value, list) else re.findall(r"[\w-]+", str(value or ""))
    if len(parts) > _MOST_BLOCKS:
        raise TraceError(f"{record.where}: {key}: expected at most {_MOST_BLOCKS:,} ids, got {len(parts):,}")
    names = [re.sub(r"[^\w-]", "_", str(part)) for part in parts]
    return tuple(names if block_tokens is None else (f"{name}={block_tokens}" for name in names))


def _roots(records: Iterable[Record], names: Mapping[str, str]) -> dict[str, str]:
    """Return the first chat of the conversation of each chat."""
    found: dict[str, str] = {}
    for record in records:
        chat, parent = record.text(names["chatid"]), record.text(names.get("parentchatid"))
        found[chat] = chat if parent in ("", "-1") else found.get(parent, parent)
    return found
