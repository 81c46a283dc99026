"""Reader of engines' metrics pages: text to an `EngineSample`, by the names of `engine_tables`.

Any text (HTML, NaN, negative, repeated or missing series) gives a sample, with None for figures that are
absent or absurd and the names of these. A server of several data-parallel engines has one series per engine:
counts and KV tokens are summed; KV use is the mean weighted by capacity, and the fullest engine's. Series of
one engine are not summed: ranks of a model repeat a figure, and a figure by priority has its total beside it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.pickle_by_fields import PickleByFields
from hetlb.balancer.core.types import Capacity
from hetlb.balancer.engines.engine_tables import TABLES, VLLM, EngineTable, spelled, table_by

#: Maximum kept lines of one name; an engine has one for each of its ranks, priorities and models.
MOST_SERIES: Final = 4096
#: Maximum bytes of a line, of a name, and of all kept labels of a page.
MAX_LINE_BYTES: Final = 64 << 10
_MAX_NAME_BYTES: Final = 128
MAX_LABEL_BYTES: Final = 512 << 10
#: Number of first bytes that identify a line to skip, and number of such lines remembered.
START_BYTES: Final = 32
_MOST_STARTS: Final = 4096
#: Possessive repeats alone: none of them gives back what it took, so a text is read once.
_STRING: Final = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_VALUE: Final = r"\s*+([^\s{]\S*+)"
_STAMP: Final = r"(?:\s++[^\s#]\S*+)?+"
_EXEMPLAR: Final = r"\s*+(?:#.*+)?+"
#: Labels (128 at most), a value, a time stamp and an exemplar, behind a name.
_SAMPLE: Final = re.compile(
    (
        rf'\s*+(?:\{{([^"{{}}]*+(?:{_STRING}[^"{{}}]*+){{0,128}}+)\}})?+' + _VALUE + _STAMP + _EXEMPLAR
    ).encode(),
    re.DOTALL,
)
#: The name and the string of a label, or whatever else stands there.
_LABEL: Final = re.compile(
    rf'([a-zA-Z_][a-zA-Z0-9_]*+)(?:\s*+=\s*+({_STRING}))?+|{_STRING}|[^"a-zA-Z_]++|"', re.S
)

Series = dict[str, dict[str, float]]
#: First bytes of skipped lines, by the one prefix of all names on the page.
_passed_over: Final[dict[str, set[bytes]]] = {"": set()}


def labels_of(text: str) -> dict[str, str]:
    """Return the labels of a series by name, without the escapes of their values."""
    found = {each[1]: each[2][1:-1] for each in _LABEL.finditer(text) if each[2]}
    if "\\" in text:
        found = {name: _plain(value) for name, value in found.items()}
    return found


def _plain(value: str) -> str:
    """Return a value without its escapes; no engine has a NUL in one."""
    value = value.replace("\\\\", "\0").replace('\\"', '"')
    return value.replace("\\n", "\n").replace("\0", "\\")


class SeriesReader:
    """Values by name and labels (as text) of the lines so far.

    `known` returns the prefix and the name for the name of a line, "" for an unused one. `passed` returns
    the prefix if every line with such first bytes can be skipped, else None. Prefixes are in `seen`. A
    repeated series replaces the earlier one; of several spellings of a name the first is read.
    """

    def __init__(
        self, known: Callable[[bytes], tuple[str, str]], passed: Callable[[bytes], str | None]
    ) -> None:
        self.series: Series = {}
        self.seen: set[str] = set()
        self._known = known
        self._passed = passed
        self._spelled: dict[str, bytes] = {}
        self._starts = _passed_over[""]
        self._label_bytes = 0
        self._rest = bytearray()  # the unfinished line at the end of the input
        self._skips = False  # that line is too long to be read

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the page."""
        end = data.rfind(b"\n")
        if end >= 0:
            lines = bytes(self._rest) + data[:end]
            if self._skips:
                lines = lines.partition(b"\n")[2]
            self._rest, self._skips = bytearray(), False
            self._read(lines)
        if not self._skips:
            self._rest += data[end + 1 :]
            if len(self._rest) > MAX_LINE_BYTES:
                self._rest, self._skips = bytearray(), True

    def end(self) -> None:
        """Read the last line, which may have no end."""
        self._read(bytes(self._rest))
        self._rest = bytearray()

    def _read(self, lines: bytes) -> None:
        starts = self._starts
        for line in lines.split(b"\n"):
            if line[:START_BYTES] not in starts:
                self._line(line)
                starts = self._starts

    def _line(self, line: bytes) -> None:
        """Read a line, or remember its start as one to skip."""
        start = line[:START_BYTES]
        passed = self._passed(start)
        if passed is not None:
            self._see(passed)
            if len(self._starts) >= _MOST_STARTS:
                self._starts.clear()
            self._starts.add(start)
            return
        line = line.strip()
        if not line or line[:1] == b"#" or len(line) > MAX_LINE_BYTES:
            return
        quoted = line[:2] == b'{"'  # its name is the first of the labels
        name = line[2:].partition(b'"')[0] if quoted else line.split(None, 1)[0].partition(b"{")[0]
        if len(name) > _MAX_NAME_BYTES:
            return
        prefix, known = self._known(name)
        self._see(prefix)
        if not known or self._spelled.setdefault(known, name) != name:
            return
        found = _SAMPLE.fullmatch(b"{" + line[len(name) + 3 :].lstrip(b", ") if quoted else line[len(name) :])
        if found is None:
            return
        labels = (found[1] or b"").strip().decode("utf-8", "replace")
        kept = self.series.setdefault(known, {})
        if labels not in kept:
            if len(kept) >= MOST_SERIES or self._label_bytes + len(labels) > MAX_LABEL_BYTES:
                return
            self._label_bytes += len(labels)
        kept[labels] = _number(found[2])

    def _see(self, prefix: str) -> None:
        if prefix and prefix not in self.seen:
            self.seen.add(prefix)
            self._starts = _passed_over.setdefault(prefix, set()) if len(self.seen) == 1 else set()


def _number(text: bytes) -> float:
    """Return the value of a sample, NaN if it is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


RUNNING, WAITING, KV_USAGE = VLLM.running, VLLM.waiting, VLLM.kv_usage
CACHE_CONFIG = ("vllm:cache_config_info",)

ITERATIONS = ("vllm:iteration_tokens_total_count",)
PROMPT_TOKENS = ("vllm:prompt_tokens_total",)
CACHED_TOKENS = ("vllm:prefix_cache_hits_total",)
GENERATED_TOKENS = ("vllm:generation_tokens_total",)
PREEMPTIONS = ("vllm:num_preemptions_total",)
DRAFTS = ("vllm:spec_decode_num_drafts_total",)
ACCEPTED_TOKENS = ("vllm:spec_decode_num_accepted_tokens_total",)
SLEEP_STATE = ("vllm:engine_sleep_state",)
LORA_INFO = ("vllm:lora_requests_info",)
PROMPT_SOURCES = ("vllm:prompt_tokens_by_source_total",)

_VLLM_ALONE = (CACHE_CONFIG, PREEMPTIONS, SLEEP_STATE, LORA_INFO, PROMPT_SOURCES)
_COUNTERS = (
    ITERATIONS, PROMPT_TOKENS, CACHED_TOKENS, GENERATED_TOKENS, PREEMPTIONS, DRAFTS, ACCEPTED_TOKENS,
)  # fmt: skip
#: Labels of the ranks of one engine: each holds a part of the model, and all have the same requests.
_RANKS: Final = (
    "tp_rank", "pp_rank", "ep_rank", "moe_ep_rank", "moe_tp_rank", "moe_dp_rank", "attn_tp_rank",
    "attn_cp_rank", "cp_rank", "dcp_rank", "pcp_rank", "rank", "local_rank", "pid",
)  # fmt: skip
#: Labels of the replicas of one page: each is an engine of its own.
_REPLICAS: Final = ("ReplicaId", "WorkerId", "replica", "pod", "instance", "model")
_PRIORITY: Final = "priority"
#: Number of kept label texts, and the longest of them: they are the same at every scrape until
#: a restart.
_KEPT_LABELS: Final = 1024
_MAX_KEPT_LABELS: Final = 2048
#: Maximum number of engines behind one URL: more is nonsense.
_MAX_ENGINES: Final = 4096
#: Maximum number of requests or tokens on one server: more is nonsense.
_MAX_COUNT: Final = 1 << 40
_BEGAN: Final = "process_start_time_seconds"
_CPU: Final = "process_cpu_seconds_total"
_NAMES: Final = frozenset(
    name.partition("{")[0]
    for name in (
        *(name for table in TABLES for name in table.figures),
        *(name for names in (*_VLLM_ALONE, *_COUNTERS) for name in names),
        _BEGAN,
        _CPU,
    )
)


@dataclass(frozen=True, slots=True)
class EngineCounters(PickleByFields):
    """Counters of a server since it started; `iterations` count only iterations with a token."""

    iterations: int | None
    prompt_tokens: int | None
    cached_tokens: int | None
    generated_tokens: int | None
    preemptions: int | None
    drafts: int | None = None
    accepted_tokens: int | None = None

    def tokens_per_step(self, before: EngineCounters) -> float | None:
        """Return the tokens of a decode step since `before`, with speculative decoding, if any."""
        if self.drafts is None or self.accepted_tokens is None:
            return None
        drafts = self.drafts - (before.drafts or 0)
        return 1.0 + (self.accepted_tokens - (before.accepted_tokens or 0)) / drafts if drafts > 0 else None


@lru_cache(_KEPT_LABELS)
def _known(name: bytes) -> tuple[str, str]:
    """Return the prefix of a name's table, and the name as tables spell it if it is read; "" for none."""
    prefix, found = spelled(name.decode("utf-8", "replace"))
    return prefix, found if found in _NAMES else ""


@lru_cache(_KEPT_LABELS)
def _passed(start: bytes) -> str | None:
    """Return the prefix of the lines with these first bytes if all of them can be skipped, else None."""
    if not start or start[:1] == b"#":
        return ""
    if start[:1] <= b" " or start[:1] == b"{":
        return None  # its name stands further on
    name = start.split(None, 1)[0].partition(b"{")[0]
    prefix, known = _known(name)
    if len(name) < START_BYTES:
        return None if known else prefix
    text = name.decode("utf-8", "replace")
    found, rest = spelled(text)[1], text.rpartition(":")[2]
    may_be = any(each.startswith(found) or each.partition(":")[2].startswith(rest) for each in _NAMES)
    return None if may_be else prefix


class EnginePage:
    """Metrics page of one server, fed in pieces of any size."""

    def __init__(self) -> None:
        self._page = SeriesReader(_known, _passed)
        self.feed = self._page.feed

    @property
    def table(self) -> EngineTable | None:
        """Names of the engine that the page is of, None if none is known."""
        return table_by(self._page.seen)

    @property
    def series(self) -> Series:
        """Series of the whole page."""
        self._page.end()
        return self._page.series

    def same(self, other: EnginePage) -> bool:
        """Return True if another page says the same."""
        return repr(self.series) == repr(other.series) and self.table == other.table

    def counters(self) -> EngineCounters:
        """Return the counters of one vLLM server, once all of its page was fed."""
        return EngineCounters(*(_count(self.series, names, [], []) for names in _COUNTERS))

    def sample(self) -> EngineSample:
        """Return the sample of the whole page; of an unknown engine as vLLM, without figures."""
        return _sample_of(self.series, self.table)


def page_of(text: str) -> EnginePage:
    """Return a whole page, read from its text."""
    page = EnginePage()
    page.feed(text.encode("utf-8", "replace"))
    return page


def parse(text: str) -> EngineSample:
    """Read a Prometheus text page of one server; one of no known engine as vLLM's, without its figures."""
    return page_of(text).sample()


def _sample_of(series: Series, known: EngineTable | None) -> EngineSample:
    table = VLLM if known is None else known
    missing: list[str] = []
    invalid: list[str] = []
    label = table.engine_label
    running = _count(series, table.running, missing, invalid, label)
    waiting = _waiting(series, table, running, missing, invalid)
    usage = _usage(series, table, missing, invalid) if table.kv_usage else {}
    if table.tells_config:
        per_engine, block_size = _kv_tokens(series, missing, invalid)
        max_loras, adapters = _adapters(series)
        engines, caches = _engines(series), _caches_prefixes(series)
    else:
        # Nothing is missing where only some versions tell it.
        per_engine, block_size = _table_tokens(series, table, invalid)
        max_loras, adapters, caches = None, None, None
        engines = len(per_engine) or None
    capacity = Capacity(
        kv_cache_tokens=sum(per_engine.values()) or None,
        block_size=block_size,
        kv_tokens_per_request=min(per_engine.values(), default=None),
        engines=engines,
        enable_prefix_caching=caches,
        max_loras=max_loras,
    )
    kv_usage = None
    if usage:
        # Without the capacity of every engine, all count alike.
        weighted = per_engine.keys() >= usage.keys()
        weights = {engine: per_engine[engine] if weighted else 1 for engine in usage}
        kv_usage = sum(weights[engine] * share for engine, share in usage.items()) / sum(weights.values())
    return EngineSample(
        running,
        waiting,
        kv_usage,
        capacity,
        tuple(missing),
        tuple(invalid),
        # Nothing rests on it: an engine that does not count them has nothing missing.
        _count(series, PREEMPTIONS, [], invalid),
        max(usage.values(), default=None),
        _asleep(series),
        adapters,
        _of_process(series, _BEGAN),
        "" if known is None else known.name,
        _from_source(series, "external_kv_transfer"),
        _from_source(series, "local_compute"),
        generated=_sum(series, table, table.tokens, invalid),
        answered=_sum(series, table, table.tokens[:1], invalid),
        cpu_s=_of_process(series, _CPU),
    )


def _from_source(series: Series, source: str) -> int | None:
    """Return the prompt tokens of a source, None if the page does not tell sources apart."""
    wanted = f'source="{source}"'
    values = [value for labels, value in series.get(PROMPT_SOURCES[0], {}).items() if wanted in labels]
    return round(sum(values)) if values and all(0 <= value <= _MAX_COUNT for value in values) else None


def _sum(series: Series, table: EngineTable, names: tuple[str, ...], invalid: list[str]) -> int | None:
    """Return the sum of counters of tokens, None if the page has none of them."""
    counts = [_count(series, (name,), [], invalid, table.engine_label) for name in names]
    known = [each for each in counts if each is not None]
    return sum(known) if known else None


def _asleep(series: Series) -> bool | None:
    """Return True if an engine reports that it sleeps, None if no engine reports its state."""
    awake = [
        value for labels, value in series.get(SLEEP_STATE[0], {}).items() if 'sleep_state="awake"' in labels
    ]
    return any(value == 0 for value in awake) if awake else None


def _adapters(series: Series) -> tuple[int | None, tuple[str, ...] | None]:
    """Return the adapters that a batch may hold, and the running ones (newest series); None if not listed."""
    told = series.get(LORA_INFO[0])
    if not told:
        return None, None
    labels = labels_of(max(told, key=lambda each: told[each]))
    running = tuple(name for name in labels.get("running_lora_adapters", "").split(",") if name)
    return _whole(labels.get("max_lora")), running


def _caches_prefixes(series: Series) -> bool | None:
    """Return True if the engines keep prefixes of prompts, by their configuration's labels, if told."""
    told = [_cache_config(labels)[3] for labels in series.get(CACHE_CONFIG[0], ())]
    return next((each for each in told if each is not None), None)


def _of_process(series: Series, name: str) -> float | None:
    """Return a figure of the server's process in seconds, None if its page does not say."""
    found = next(iter(series.get(name, {}).values()), math.nan)
    return found if math.isfinite(found) else None


def _find(series: Series, names: Iterable[str]) -> tuple[str, dict[str, float]]:
    """Return the first of some names that the page has, with its series; without any, the first name."""
    names = tuple(names)
    for name in names:
        plain, _, label = name.partition("{")
        found = series.get(plain, {})
        if label:
            wanted = label.rstrip("}")
            found = {labels: value for labels, value in found.items() if wanted in labels}
        if found:
            return plain, found
    return names[0].partition("{")[0], {}


def _by_engine(
    found: dict[str, float], engine_label: str, of_ranks: Callable[[float, float], float]
) -> dict[str, float]:
    """Return the figures of each engine: `of_ranks` takes one of two ranks, all other labels are summed."""
    places = {labels: _place(labels, engine_label) for labels in found}
    whole = any(not priority for _, priority, _ in places.values())
    ranks: dict[tuple[str, str, str], float] = {}
    for labels, value in found.items():
        place = places[labels]
        if place[1] and whole:
            continue  # it is in the whole
        ranks[place] = of_ranks(ranks[place], value) if place in ranks else value
    engines: dict[str, float] = {}
    for (engine, _, _), value in ranks.items():
        engines[engine] = engines.get(engine, 0.0) + value
    return engines


def _place(text: str, engine_label: str) -> tuple[str, str, str]:
    """Return the labels of the place of a series: engine, priority, and all others but ranks."""
    return (_kept_place if len(text) <= _MAX_KEPT_LABELS else _read_place)(text, engine_label)


def _read_place(text: str, engine_label: str) -> tuple[str, str, str]:
    labels = {name: value for name, value in labels_of(text).items() if name not in _RANKS}
    # "0" is the engine of servers of before there were several.
    engine, priority = labels.pop(engine_label, "") or "0", labels.pop(_PRIORITY, "")
    replica = "".join(f" {labels[name]}" for name in _REPLICAS if name in labels)
    return engine + replica, priority, repr(sorted(labels.items()))


_kept_place: Final = lru_cache(_KEPT_LABELS)(_read_place)


def _count(
    series: Series,
    names: Iterable[str],
    missing: list[str],
    invalid: list[str],
    engine_label: str = VLLM.engine_label,
) -> int | None:
    name, found = _find(series, names)
    if not found:
        missing.append(name)
        return None
    if not all(0 <= value <= _MAX_COUNT for value in found.values()):
        invalid.append(name)
        return None
    return round(sum(_by_engine(found, engine_label, max).values()))


def _waiting(
    series: Series, table: EngineTable, running: int | None, missing: list[str], invalid: list[str]
) -> int | None:
    """Return the requests that wait, by their own figure or as the rest of all requests."""
    if table.all_requests and not _find(series, table.waiting)[1] and running is not None:
        present = _count(series, table.all_requests, missing, invalid, table.engine_label)
        return None if present is None else max(0, present - running)
    return _count(series, table.waiting, missing, invalid, table.engine_label)


def _engines(series: Series) -> int | None:
    """Return the number of engines that the page has series of, None without any of the gauges."""
    for name in (*RUNNING, *KV_USAGE, *CACHE_CONFIG):
        if name in series:
            found = len({_place(labels, VLLM.engine_label)[0] for labels in series[name]})
            return found if found <= _MAX_ENGINES else None
    return None


def _usage(series: Series, table: EngineTable, missing: list[str], invalid: list[str]) -> dict[str, float]:
    """Return KV use by engine, of its fullest rank; empty where a value is absurd."""
    name, found = _find(series, table.kv_usage)
    if not found:
        if table.tells_usage:
            missing.append(name)
        return {}
    if not all(0 <= value <= 1 for value in found.values()):
        invalid.append(name)
        return {}
    engines: dict[str, float] = {}
    for labels, value in found.items():
        engine = _place(labels, table.engine_label)[0]
        engines[engine] = max(value, engines.get(engine, 0.0))
    return engines


def _table_tokens(
    series: Series, table: EngineTable, invalid: list[str]
) -> tuple[dict[str, int], int | None]:
    """Return KV cache tokens by engine, and the tokens of a block where these are counted."""
    if not table.kv_tokens:
        return {}, None
    name, found = _find(series, table.kv_tokens)
    size: int | None = None
    if table.block_tokens:
        sizes = _find(series, table.block_tokens)[1]
        size = int(max(sizes.values())) if sizes and 0 < max(sizes.values()) <= _MAX_COUNT else None
        if size is None:
            return {}, None
    if not all(0 <= value <= _MAX_COUNT for value in found.values()):
        invalid.append(name)
        return {}, size
    per_engine = _by_engine(found, table.engine_label, min)
    return {engine: round(value) * (size or 1) for engine, value in per_engine.items() if value}, size


def _kv_tokens(series: Series, missing: list[str], invalid: list[str]) -> tuple[dict[str, int], int | None]:
    """Return the KV cache tokens by engine, and the block size."""
    name = CACHE_CONFIG[0]
    if name not in series:
        missing.append(name)
        return {}, None
    per_engine: dict[str, int] = {}
    block_size: int | None = None
    for labels in series[name]:
        engine, size, tokens, _ = _cache_config(labels)
        block_size = size or block_size
        if tokens is not None:
            per_engine[engine] = tokens
    if not per_engine:
        invalid.append(name)
    return per_engine, block_size


def _cache_config(text: str) -> tuple[str, int | None, int | None, bool | None]:
    """Parse the labels of a `CACHE_CONFIG`: engine, block size, KV tokens, prefix caching."""
    return (_kept_config if len(text) <= _MAX_KEPT_LABELS else _read_config)(text)


def _read_config(text: str) -> tuple[str, int | None, int | None, bool | None]:
    labels = labels_of(text)
    size = _whole(labels.get("block_size"))
    tokens = _whole(labels.get("kv_cache_size_tokens"))
    if tokens is None and _whole(labels.get("mamba_block_size")) is None:
        # The blocks of a hybrid model are of several kinds: their number times their size has no meaning.
        blocks = _whole(labels.get("num_gpu_blocks"))
        tokens = blocks * size if blocks and size else None
    caches = {"True": True, "False": False}.get(labels.get("enable_prefix_caching", ""))
    return _place(text, VLLM.engine_label)[0], size, tokens, caches


_kept_config: Final = lru_cache(_KEPT_LABELS)(_read_config)


def _whole(text: str | None) -> int | None:
    if text is None or not re.fullmatch(r"[0-9]{1,15}", text):
        return None
    return int(text) or None
