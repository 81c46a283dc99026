"""Metrics pages of engines to an `EngineSample`, by the names of `engine_tables`.

Any text (HTML, NaN, negative, repeated or missing series) gives a sample, with None for what is absent or
absurd and the names of those. A server of several data-parallel engines has one series per engine (label
`engine`): counts and KV tokens are summed; KV use is the mean weighted by capacity, and that of the fullest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from hetlb.core.engine_tables import VLLM, table_of
from hetlb.core.pickle_by_fields import PickleByFields
from hetlb.core.types import Capacity, EngineSample

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
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ENGINE = re.compile(r'(?:^|,)engine="([^"\\]*)"')
#: Texts of labels that were read and are kept: they are the same at every scrape, but for those of a restart.
_LABELS_KEPT: Final = 1024
#: More engines than this behind one URL is nonsense.
_MAX_ENGINES: Final = 4096
#: More requests or tokens than this on one server is nonsense.
_MAX_COUNT: Final = 1 << 40
#: Lines of one name that are read: an engine has one for each of its data-parallel ranks.
MOST_SERIES: Final = 4096


@dataclass(frozen=True, slots=True)
class EngineCounters(PickleByFields):
    """Counters of a server since it started; `iterations` are those in which a token came out."""

    iterations: int | None
    prompt_tokens: int | None
    cached_tokens: int | None
    generated_tokens: int | None
    preemptions: int | None
    drafts: int | None = None
    accepted_tokens: int | None = None

    def tokens_per_step(self, before: EngineCounters) -> float | None:
        """Tokens of a decode step since `before`, with speculative decoding; None if nothing was drafted."""
        if self.drafts is None or self.accepted_tokens is None:
            return None
        drafts = self.drafts - (before.drafts or 0)
        return 1.0 + (self.accepted_tokens - (before.accepted_tokens or 0)) / drafts if drafts > 0 else None


def parse_counters(text: str) -> EngineCounters:
    """Read the counters of a Prometheus text page of one vLLM server."""
    series = _series(text, _COUNTERS)
    return EngineCounters(*(_count(series, names, [], []) for names in _COUNTERS))


def parse(text: str) -> EngineSample:
    """Read a Prometheus text page of one server; one of no known engine as vLLM's, without its figures."""
    known = table_of(text)
    table = VLLM if known is None else known
    figures = (table.running, table.waiting, table.kv_usage, table.kv_tokens)
    series = _series(
        text,
        (
            *filter(None, figures),
            *[(name,) for name in table.tokens],
            *(_VLLM_ALONE if table is VLLM else ()),
        ),
    )
    missing: list[str] = []
    invalid: list[str] = []
    running = _count(series, table.running, missing, invalid)
    waiting = _count(series, table.waiting, missing, invalid)
    usage = _usage(series, table.kv_usage, missing, invalid) if table.kv_usage else {}
    per_engine: dict[str, int] = {}
    if table is VLLM:
        per_engine, block_size = _kv_tokens(series, missing, invalid)
        max_loras, adapters = _adapters(series)
        capacity = Capacity(
            kv_cache_tokens=sum(per_engine.values()) or None,
            block_size=block_size,
            kv_tokens_per_request=min(per_engine.values(), default=None),
            engines=_engines(series),
            enable_prefix_caching=_caches_prefixes(series),
            max_loras=max_loras,
        )
    else:
        # Nothing is missing where only some versions tell it.
        tokens = _count(series, table.kv_tokens, [], invalid) if table.kv_tokens else None
        capacity, adapters = Capacity(kv_cache_tokens=tokens or None), None
    kv_usage = None
    if usage:
        # Without the capacity of every engine, all count alike.
        engines = {labels: _engine(labels) for labels in usage}
        weighted = per_engine.keys() >= set(engines.values())
        weights = {labels: per_engine[engine] if weighted else 1 for labels, engine in engines.items()}
        kv_usage = sum(weights[labels] * share for labels, share in usage.items()) / sum(weights.values())
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
        process_began(text),
        "" if known is None else known.name,
        _from_source(series, "external_kv_transfer"),
        _from_source(series, "local_compute"),
        generated=_sum(series, table.tokens, invalid),
    )


def _from_source(series: dict[str, dict[str, float]], source: str) -> int | None:
    """Return the prompt tokens of a source, None where the page does not tell them apart."""
    wanted = f'source="{source}"'
    values = [value for labels, value in series.get(PROMPT_SOURCES[0], {}).items() if wanted in labels]
    return round(sum(values)) if values and all(0 <= value <= _MAX_COUNT for value in values) else None


def _sum(series: dict[str, dict[str, float]], names: tuple[str, ...], invalid: list[str]) -> int | None:
    """Return the sum of several counters, None where none of them is told."""
    counts = [_count(series, (name,), [], invalid) for name in names]
    known = [each for each in counts if each is not None]
    return sum(known) if known else None


def _asleep(series: dict[str, dict[str, float]]) -> bool | None:
    """True if an engine says that it is not awake; None where no engine tells."""
    awake = [
        value for labels, value in series.get(SLEEP_STATE[0], {}).items() if 'sleep_state="awake"' in labels
    ]
    return any(value == 0 for value in awake) if awake else None


def _adapters(series: dict[str, dict[str, float]]) -> tuple[int | None, tuple[str, ...] | None]:
    """Adapters that a batch may hold, and those of the newest series, which run; None where not told."""
    told = series.get(LORA_INFO[0])
    if not told:
        return None, None
    labels = dict(_LABEL.findall(max(told, key=lambda each: told[each])))
    running = tuple(name for name in labels.get("running_lora_adapters", "").split(",") if name)
    return _whole(labels.get("max_lora")), running


def has_prefix_cache(text: str) -> bool:
    """True if the server of this page says that it keeps prefixes of prompts."""
    return _caches_prefixes(_series(text, (CACHE_CONFIG,))) is True


def _caches_prefixes(series: dict[str, dict[str, float]]) -> bool | None:
    """True if the engines keep prefixes of prompts, by the labels of their configuration; None: not told."""
    told = [_cache_config(labels)[3] for labels in series.get(CACHE_CONFIG[0], ())]
    return next((each for each in told if each is not None), None)


def _series(text: str, wanted: Iterable[tuple[str, ...]]) -> dict[str, dict[str, float]]:
    """The wanted samples by name and labels; of several names of one metric the first that is there."""
    text = "\n" + text
    series: dict[str, dict[str, float]] = {}
    for names in wanted:
        for name in names:
            # A repeated series replaces itself: last wins, nothing is counted twice.
            if found := dict(filter(None, [_sample(line, name) for line in _lines(text, name)])):
                series[name] = found
                break
    return series


def _lines(text: str, beginning: str) -> Iterator[str]:
    """The first lines that begin so, of a text before which stands a line break."""
    sought, at = "\n" + beginning, 0
    for _ in range(MOST_SERIES):
        at = text.find(sought, at)
        if at < 0:
            return
        end = text.find("\n", at + 1)
        yield text[at + 1 : end] if end >= 0 else text[at + 1 :]
        if end < 0:
            return
        at = end


def _sample(line: str, name: str) -> tuple[str, float] | None:
    """Labels and value (NaN if it is no number) of a line that begins with a name; None: no sample of it."""
    labels, rest = "", line[len(name) :]
    if rest.startswith("{"):
        labels, _, rest = rest[1:].rpartition("}")
    fields = rest.split()
    if not rest[:1].isspace() or not 1 <= len(fields) <= 2:  # a time stamp may follow
        return None
    try:
        return labels, float(fields[0])
    except ValueError:
        return labels, math.nan


def process_began(text: str) -> float | None:
    """Start time of the server's process (Unix time, s), None where its page does not say."""
    for line in _lines("\n" + text, "process_start_time_seconds "):
        try:
            began = float(line.split()[1])
        except (IndexError, ValueError):
            return None
        return began if math.isfinite(began) else None
    return None


def _find(
    series: dict[str, dict[str, float]], names: Iterable[str], missing: list[str]
) -> tuple[str, list[float]]:
    names = tuple(names)
    for name in names:
        if name in series:
            return name, list(series[name].values())
    missing.append(names[0])
    return names[0], []


def _count(
    series: dict[str, dict[str, float]], names: Iterable[str], missing: list[str], invalid: list[str]
) -> int | None:
    name, values = _find(series, names, missing)
    if not values:
        return None
    if not all(0 <= value <= _MAX_COUNT for value in values):
        invalid.append(name)
        return None
    return round(sum(values))


@lru_cache(_LABELS_KEPT)
def _engine(labels: str) -> str:
    """The value of the label `engine`; "0" for servers of before it was there."""
    match = _ENGINE.search(labels)
    return "0" if match is None else match[1]


def _engines(series: dict[str, dict[str, float]]) -> int | None:
    """Number of engines the page has series of, None without any of the gauges."""
    for name in (*RUNNING, *KV_USAGE, *CACHE_CONFIG):
        if name in series:
            found = len(set(map(_engine, series[name])))
            return found if found <= _MAX_ENGINES else None
    return None


def _usage(
    series: dict[str, dict[str, float]], names: Iterable[str], missing: list[str], invalid: list[str]
) -> dict[str, float]:
    """KV use by labels; empty where a value is absurd."""
    name, values = _find(series, names, missing)
    if all(0 <= value <= 1 for value in values):
        return series.get(name, {})
    invalid.append(name)
    return {}


def _kv_tokens(
    series: dict[str, dict[str, float]], missing: list[str], invalid: list[str]
) -> tuple[dict[str, int], int | None]:
    """KV cache tokens by engine, and the block size."""
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


@lru_cache(_LABELS_KEPT)
def _cache_config(text: str) -> tuple[str, int | None, int | None, bool | None]:
    """Parse the labels of a `CACHE_CONFIG`: engine, block size, KV tokens, prefix caching."""
    labels = dict(_LABEL.findall(text))
    size = _whole(labels.get("block_size"))
    tokens = _whole(labels.get("kv_cache_size_tokens"))
    if tokens is None:
        blocks = _whole(labels.get("num_gpu_blocks"))
        tokens = blocks * size if blocks and size else None
    caches = {"True": True, "False": False}.get(labels.get("enable_prefix_caching", ""))
    return labels.get("engine", "0"), size, tokens, caches


def _whole(text: str | None) -> int | None:
    if text is None or not re.fullmatch(r"[0-9]{1,15}", text):
        return None
    return int(text) or None
