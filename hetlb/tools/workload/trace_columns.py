"""Columns of requests: names, units and roles, for traces and logs in CSV, JSON lines and documents.

`COLUMNS` has the names of each role, `FORMATS` what the keys of a file do not say themselves: its name, the
unit of times without one in their key, the size of its blocks. A new column is a name, a new format is a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.errors import TraceError
from hetlb.tools.workload.record_file import UNITS_S, Record, RecordFile, flat, unit_of
from hetlb.tools.workload.rows import Row

#: Largest number of `hash_ids` of a request: a prompt of ten million tokens has 625,000 of 16.
_MOST_BLOCKS = 1_000_000
#: Ends of keys of times since 1970.
_CLOCKS = ("unix", "epoch", "utc")
#: Roles with names that may end with a unit of time.
_MOMENTS, _DURATIONS = ("arrival", "first", "end"), ("ttft", "e2e", "queue")

#: Names of each role as squashed keys, the first one counts. Times may have their unit behind the name.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    role: tuple(names.split())
    for role, names in {
        "arrival": "arrival arrivaltime arrivaltimestamp arrivedat timestamp ts time starttime start "
        "requeststart requeststarttime requesttime scheduledtime senttime startedat created createdat "
        "createtime requestcreatedat datetime date starttimes resolvestart",
        "input": "inputtokens inputlength inputlen inputtoks inputsequencelength isl numinputtokens "
        "prompttokens promptlength promptlen promptsize numprompttokens numberinputtokens numprefilltokens "
        "prefilltokens contexttokens requesttokens inputids prompttokenids tokensprompt "
        "genaiusageinputtokens genaiusageprompttokens prompttokencount inputtokencount promptevalcount "
        "llmtokencountprompt tokensevaluated usageinput usageprompt usagedetailsinput inputlens "
        "inputmetricstexttokens inputmetricstotaltokens",
        "output": "outputtokens outputlength outputlen outputtoks outputsequencelength osl completiontokens "
        "completionlength generatedtokens generationtokens responsetokens numoutputtokens "
        "numcompletiontokens numberoutputtokens numdecodetokens decodetokens tokensize responselength "
        "outputtokencount tokenscompletion genaiusageoutputtokens genaiusagecompletiontokens "
        "candidatestokencount completiontokencount evalcount tokenspredicted llmtokencountcompletion "
        "usageoutput usagecompletion usagedetailsoutput outputlens outputmetricstexttokens "
        "outputmetricstotaltokens",
        "ttft": "ttft timetofirsttoken firsttokenlatency measuredttft ttfts",
        "first": "firsttokentime firsttokenat firsttokentimestamp completionstarttime firsttoken "
        "firsttokeniteration firstoutputtokeniteration firstiteration",
        "e2e": "e2e e2el e2elatency endtoendlatency requestlatency latency measurede2e "
        "duration generationtime",
        "end": "endtime end requestend requestendtime finishtime finishedat completedat responsecreatedat "
        "resolveend",
        "queue": "queue measuredqueue",
        "gaps": "itls",
        "tokens_at": "outputtokentimes",
        "failed": "error errormsg errormessage errorcode errored incomplete wascancelled errors",
        "phase": "benchmarkphase",
        "session": "sessionid conversationid",
        "turn": "turn turnindex",
        "delay": "delay delayms",
        "hash_ids": "hashids blockhashes blockids",
        "text": "prompt textinput",
        "question": "instruction question query problem user article prompt",
        "context": "context input",
        "answer": "output response answer completion canonicalsolution solution assistant highlights chosen",
        "most": "outputtokens outputlength outputlen maxtokens",
        "chat": "chatid",
        "parent": "parentchatid",
    }.items()
}


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file: the keys or roles that it has, and what they leave open.

    `unit_s` is the unit of times without one in their key, None if a time must show it (`unit_of`). A
    `kind` is of measured requests. `block_tokens`: tokens that one of the `hash_ids` names, None for as many
    as the reader takes. `names` are roles of this format alone. `inside`: the lists with its records.
    """

    title: str
    keys: str
    unit_s: float | None = None
    kind: str = ""
    block_tokens: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    inside: tuple[str, str] | None = None
    #: Shapes other than CSV alone.
    json: bool = False
    #: A request without output tokens is one that failed.
    failed_without_output: bool = False
    #: An answer without a first token came whole.
    whole: bool = False

    def fits(self, file: RecordFile) -> bool:
        """Return True if a file has the keys."""
        if self.json and file.shape == "CSV":
            return False
        return all(file.name(*COLUMNS.get(key, (key,))) is not None for key in self.keys.split())


NAMED = Format("records whose keys name what they are", "input output", kind="records")
#: The more special ones first.
FORMATS = (
    Format("AIPerf's profile_export.jsonl", "metadata metrics", kind="aiperf", json=True),
    Format(
        *("GuideLLM's results", "benchmarks", 1.0, "guidellm"),
        inside=("benchmarks", "requests"),
        json=True,
        whole=True,
    ),
    Format(
        "inference-perf's per-request metrics", "starttime endtime info", 1.0, "inference-perf", whole=True
    ),
    Format(
        "Bailian's trace (chat_id, timestamp in s, input_length, output_length, hash_ids of 16 tokens)",
        "timestamp inputlength outputlength chat",
        1.0,
        block_tokens=16,
    ),
    *(
        Format(
            "the form of Mooncake, AIPerf and Dynamo "
            "(timestamp in ms, input_length, output_length, hash_ids)",
            f"timestamp inputlength outputlength {more}",
            1e-3,
            json=not more,  # in a table without blocks the unit must show: its columns are common ones
        )
        for more in ("hash_ids", "")
    ),
    Format(
        "Azure's trace (TIMESTAMP, ContextTokens, GeneratedTokens)", "timestamp contexttokens generatedtokens"
    ),
    Format(
        "BurstGPT (Timestamp in s, Request tokens, Response tokens)",
        "timestamp requesttokens responsetokens",
        1.0,
        failed_without_output=True,
    ),
    Format(
        "Splitwise's trace (arrival_timestamp in s, prompt_size, token_size)",
        "arrivaltimestamp promptsize tokensize",
        1.0,
        names={"sequences": "batchsize"},
    ),
    Format(
        "Vidur's trace (arrived_at in s, num_prefill_tokens, num_decode_tokens)",
        "arrivedat numprefilltokens numdecodetokens",
        1.0,
    ),
    Format(
        "LLMServingSim's trace (arrival_time_ns, input_toks, output_toks)",
        "arrivaltimens inputtoks outputtoks",
    ),
)


@dataclass(frozen=True, slots=True)
class Times:
    """Measured times of a request, in seconds; `queue_s` is None if the file does not say."""

    ttft_s: float
    e2e_s: float
    queue_s: float | None = None
    instance: str = ""


@dataclass(slots=True)
class Requests:
    """The requests of a file in its order, and of a measured one the times of each."""

    kind: str = ""
    rows: list[Row] = field(default_factory=list)
    times: list[Times] = field(default_factory=list)
    failed: int = 0
    warm_ups: int = 0
    #: Others that were left out, in words.
    others: list[str] = field(default_factory=list)
    #: The set-up of an event log.
    setup: SchedulerSetup | None = None

    @property
    def left_out(self) -> list[str]:
        """Return the requests that were left out, in words."""
        found = [f"{self.failed:,} that failed"] if self.failed else []
        return found + ([f"{self.warm_ups:,} of the warm-up"] if self.warm_ups else []) + self.others


class Columns:
    """The cells of a file by role. Methods return None for a record without it, and raise `TraceError`."""

    def __init__(self, file: RecordFile, form: Format) -> None:
        self.file, self._usual_s = file, form.unit_s
        names = {**COLUMNS, **{role: (name,) for role, name in form.names.items()}}
        self._keys = {role: list(self._found(role, each)) for role, each in names.items()}
        self._units_s: dict[str, float] = {}

    def _found(self, role: str, names: tuple[str, ...]) -> Iterator[str]:
        """Yield the file's keys that may hold a role; keys with a unit in their name come first."""
        units = (*UNITS_S, *_CLOCKS) if role in _MOMENTS else UNITS_S if role in _DURATIONS else ()
        yield from (key for name in names for unit in units if (key := self.file.names.get(name + unit)))
        if role not in _DURATIONS or self._usual_s is not None:
            yield from (key for name in names if (key := self.file.names.get(name)))

    def has(self, *roles: str) -> bool:
        """Return True if the file has one of these roles."""
        return any(self._keys[role] for role in roles)

    def cell(self, record: Record, role: str) -> tuple[str, Any]:
        """Return the key and the value of a role, "" and None without one."""
        for key in self._keys.get(role, ()):
            if (value := record.get(key)) is not None:
                return key, value
        return "", None

    def tokens(self, record: Record, role: str, least: int = 0) -> int:
        """Return a number of tokens, of a list its length. Raises `TraceError` also without one."""
        key, value = self.cell(record, role)
        if not key:
            key = next(iter(self._keys[role]), f"{role}_tokens")
        return record.tokens(key, len(value) if isinstance(value, list) else value, least)

    def moment(self, record: Record, role: str) -> float | None:
        key, value = self.cell(record, role)
        return None if value is None else record.moment(key, value, self._unit_s(key))

    def seconds(self, record: Record, role: str, least_s: float = 0.0) -> float | None:
        key, value = self.cell(record, role)
        return None if value is None else record.seconds(key, value, self._unit_s(key), least_s)

    def text(self, record: Record, role: str) -> str:
        value = self.cell(record, role)[1]
        return "" if value is None else str(value)

    def _unit_s(self, key: str) -> float:
        if key not in self._units_s:
            self._units_s[key] = unit_of(self.file, key, self._usual_s)
        return self._units_s[key]


def read_requests(file: RecordFile, form: Format, measured: bool) -> Requests:
    """Return the requests of a file of a format, with their times if they were `measured`.

    Raises `TraceError`.
    """
    columns = Columns(flat(file), form)
    found = Requests(form.kind if measured else "")
    missing = [role for role in ("input", "output") if not columns.has(role)]
    if measured:
        missing += [] if columns.has("arrival") else ["arrival_s"]
        missing += [] if form.whole or columns.has("ttft", "first") else ["ttft_s"]
        missing += [] if columns.has("e2e", "end", "tokens_at", "gaps") else ["e2e_s"]
    if missing and any(not columns.cell(each, "failed")[1] for each in columns.file.records):
        names = ", ".join(f"{role}_tokens" if role in ("input", "output") else role for role in missing)
        raise TraceError(f"{file.path}: expected {names}, but it is missing ({file.described})")
    roots = _roots(columns)
    newest_s: dict[str, float] = {}
    empty = delayed = 0
    for record in columns.file.records:
        if measured and re.sub("[-_]", "", columns.text(record, "phase").lower()) == "warmup":
            found.warm_ups += 1
            continue
        if measured and columns.cell(record, "failed")[1]:
            found.failed += 1
            continue
        prompt, output = columns.tokens(record, "input"), columns.tokens(record, "output")
        arrival_s = columns.moment(record, "arrival")
        times = times_of(columns, form, record, arrival_s) if measured else None
        if (not output and (measured or form.failed_without_output)) or (times and not times.ttft_s):
            found.failed += 1
            continue
        if not prompt and not measured:
            empty += 1
            continue
        session = columns.text(record, "session") if roots is None else roots[columns.text(record, "chat")]
        delay_s = None if arrival_s is not None or session not in newest_s else _delay_s(columns, record)
        if delay_s is not None:
            delayed += 1
            arrival_s = newest_s[session] + delay_s
        if arrival_s is not None and session:
            newest_s[session] = arrival_s
        found.times += [] if times is None else [times]
        found.rows.append(
            Row(
                arrival_s,
                max(1, prompt),
                output,
                session=session,
                hash_ids=_blocks(record, *columns.cell(record, "hash_ids"), form.block_tokens),
                turn=columns.text(record, "turn"),
                text=columns.text(record, "text") or None,
                sequences=columns.tokens(record, "sequences", 1)
                if columns.cell(record, "sequences")[1]
                else 1,
            )
        )
    found.others += [f"{empty:,} without a prompt"] if empty else []
    found.others += [f"how long the answers before {delayed:,} delayed turns took"] if delayed else []
    found.others += [f"{file.odd:,} that are no objects"] if file.odd else []
    return found


def times_of(columns: Columns, form: Format, record: Record, start_s: float | None) -> Times:
    """Return the times of a measured request: durations, or moments less its arrival. Raises `TraceError`."""
    if start_s is None:
        raise TraceError(f"{record.where}: expected the time of its arrival, got none")
    ttft_s = columns.seconds(record, "ttft")
    tokens_at = columns.cell(record, "tokens_at")[1]
    moments = [first_s] if (first_s := columns.moment(record, "first")) is not None else []
    if isinstance(tokens_at, list):
        moments += [record.moment("output_token_times", each, form.unit_s or 1.0) for each in tokens_at[:1]]
    if ttft_s is None and moments:
        ttft_s = record.seconds("the first token, from the arrival on", moments[0] - start_s)
    if (e2e_s := columns.seconds(record, "e2e", ttft_s or 0.0)) is None:
        end_s, gaps = columns.moment(record, "end"), columns.cell(record, "gaps")[1]
        if end_s is not None:
            e2e_s = record.seconds("the end, from the arrival on", end_s - start_s, 1.0, ttft_s or 0.0)
        elif ttft_s is not None and columns.has("gaps"):
            e2e_s = ttft_s + record.seconds("sum of itls", _sum(gaps))
    if e2e_s is None or (ttft_s is None and not form.whole):
        name = "e2e_s" if e2e_s is None else "ttft_s"
        raise TraceError(f"{record.where}: expected {name}, but it is missing")
    return Times(e2e_s if ttft_s is None else ttft_s, e2e_s, columns.seconds(record, "queue"))


def _sum(values: Any) -> float:
    """Return the sum of numbers, NaN of anything else."""
    try:
        return math.fsum(values or ())
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _delay_s(columns: Columns, record: Record) -> float | None:
    key, value = columns.cell(record, "delay")
    return None if value is None else record.seconds(key, value, 1e-3)


def _blocks(record: Record, key: str, value: Any, block_tokens: int | None) -> tuple[str, ...]:
    """Return names of blocks, each with its length if the trace has one of its own. Raises `TraceError`."""
    parts: list[Any] = value if isinstance(value, list) else re.findall(r"[\w-]+", str(value or ""))
    if len(parts) > _MOST_BLOCKS:
        raise TraceError(f"{record.where}: {key}: expected at most {_MOST_BLOCKS:,} ids, got {len(parts):,}")
    names = [re.sub(r"[^\w-]", "_", str(part)) for part in parts]
    return tuple(names if block_tokens is None else (f"{name}={block_tokens}" for name in names))


def _roots(columns: Columns) -> dict[str, str] | None:
    """Return the first chat of the conversation of each chat, None for a file without chats."""
    if not columns.has("chat"):
        return None
    found: dict[str, str] = {}
    for record in columns.file.records:
        chat, parent = columns.text(record, "chat"), columns.text(record, "parent")
        found[chat] = chat if parent in ("", "-1") else found.get(parent, parent)
    return found
