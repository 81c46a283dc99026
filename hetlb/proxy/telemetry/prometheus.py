"""The proxy's own `/metrics` page: what the driver counted, and gauges read from the scheduler when asked.

Labels take only values that configuration, code or the engines define, never what a client makes up;
a series ends with its instance. Instances bear the label `server`: Prometheus itself sets `instance`, to the
proxy that it asked. The page of a large fleet is written in slices of about a millisecond, so that a scrape
delays no token. docs/reference/metrics.md has every name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

import hetlb
from hetlb.build import compiled
from hetlb.core.instance import Instance
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import CAUSES, AdminState, Health
from hetlb.proxy.beliefs import BeliefSource, slots_source
from hetlb.proxy.telemetry.counters import AccountTotals, InstanceTotals, ModelTotals, Totals
from hetlb.proxy.telemetry.histograms import GapHistogram, Histogram
from hetlb.proxy.telemetry.metric_families import head

if TYPE_CHECKING:
    from hetlb.proxy.service import FleetService

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: A slice of the page takes about this long; then the event loop goes round once.
SLICE_S = 0.001


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One of several processes that serve: whether it does now, and how often it had to be started again."""

    number: str
    up: bool
    restarts: int
    #: Times it was killed because it no longer answered.
    hangs: int = 0


class SharedFigures(NamedTuple):
    """A view that several processes share: `leases` are peers', `delay_s` the age of their news.

    `connected`: the server is reached; `leads` is None where all serve. Messages `sent`, `received` and
    `rejected`.
    """

    connected: bool
    peers: int
    leases: int
    delay_s: float
    sent: int
    received: int
    leads: bool | None
    rejected: int = 0


# --- the page ---

Number: TypeAlias = float | int


class MetricsPage:
    """Writes the page; keeps the text of the labels from one scrape to the next."""

    def __init__(self, source: FleetService) -> None:
        self._source = source
        self._labels: dict[str, str] = {}
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    async def render(self) -> bytes:
        """The page in the Prometheus text format, in slices of about `SLICE_S`."""
        pieces: list[str] = []
        started = time.perf_counter()
        for piece in self.pieces():
            pieces.append(piece)
            if time.perf_counter() - started > SLICE_S:
                await asyncio.sleep(0)
                started = time.perf_counter()
        return "".join(pieces).encode()

    def pieces(self) -> Iterator[str]:
        """Write all families in a fixed order, in pieces; between two of them the fleet may change."""
        source = self._source
        scheduler, totals, now = source.scheduler, source.totals, source.now()
        instances = scheduler.instances
        self._forget({instance.name for instance in instances})
        version, policy = _escape(hetlb.__version__), scheduler.policy_name
        build = f'{{version="{version}",policy="{policy}",compiled="{str(compiled()).lower()}"}} 1'
        yield _family("hetlb_build_info", [build])
        yield from _requests(totals)
        yield _family("hetlb_log_lost_lines_total", [source.lost_lines])
        yield from _loads(scheduler)
        yield from _accounts(totals)
        yield _family("hetlb_queue_bytes", [scheduler.queue.bytes])
        oldest_at = scheduler.queue.oldest_at()
        yield _family("hetlb_queue_oldest_seconds", [0.0 if oldest_at is None else now - oldest_at])
        for name, of in _MODEL_HISTOGRAMS:
            yield head(name)
            for model, each in list(totals.models.items()):
                yield "".join(f"{name}{line}\n" for line in _buckets(f'model="{_escape(model)}"', of(each)))
        yield from _stages(source.stages)
        if source.shared is not None:
            yield from _shared(source.shared)
        calls = {"arrival": totals.arrival, "end": totals.end}
        buckets = (_buckets(f'event="{event}"', each) for event, each in calls.items())
        yield _family("hetlb_decision_seconds", chain.from_iterable(buckets))
        yield _family("hetlb_loop_lag_seconds", _buckets("", totals.lag))
        yield from self._counted(instances, totals, source.watch.scraper.invalid_samples)
        yield from self._believed(instances, now)
        for name, states, state_of in _STATES:
            yield head(name)
            for state in states:
                label = f',{name.rpartition("_")[2]}="{state.value}"'
                yield "".join(
                    f"{name}{{{self._label(each.name)}{label}}} {int(state_of(each) is state)}\n"
                    for each in instances
                )
        workers = source.workers or (WorkerState("0", True, 0),)
        for name, count in _WORKERS:
            yield _family(name, [f'{{worker="{each.number}"}} {int(count(each))}' for each in workers])
        yield generate_latest(self._process).decode()

    def _counted(
        self, instances: Sequence[Instance], totals: Totals, invalid: Mapping[str, int]
    ) -> Iterator[str]:
        """Write what was counted of each instance."""
        pairs = [(self._label(instance.name), totals.instance(instance.name)) for instance in instances]
        errors = [
            (f'{{{self._label(instance.name)},figure="{figure}"}}', ratios)
            for instance in instances
            for figure, ratios in instance.errors.by_figure
        ]
        for name, of_errors in _FORECAST:
            found = [(label, of_errors(ratios)) for label, ratios in errors]
            yield _family(name, [f"{label} {value:.6g}" for label, value in found if value is not None])
        ended = ((label, outcome, n) for label, each in pairs for outcome, n in each.requests.items())
        yield _family(
            "hetlb_instance_requests_total",
            [f'{{{label},outcome="{outcome}"}} {count}' for label, outcome, count in ended],
        )
        for name, of in _INSTANCE_COUNTERS:
            yield _family(name, [f"{{{label}}} {of(each)!r}" for label, each in pairs])
        for what in ("expected", "seen"):
            yield _family(
                f"hetlb_instance_model_{what}_seconds_total",
                [
                    f'{{{label},part="{part}"}} {getattr(each, f"{part}_{what}_s")!r}'
                    for label, each in pairs
                    for part in ("prefill", "mixed", "decode")
                ],
            )
        lines = [f"{{{self._label(each.name)}}} {invalid.get(each.name, 0)}" for each in instances]
        yield _family("hetlb_instance_invalid_samples_total", lines)

    def _believed(self, instances: Sequence[Instance], now: float) -> Iterator[str]:
        """Write what is booked on each instance, and what its engine reported last."""
        sampled = [each for each in instances if each.sample is not None]
        for name, reported, of in _INSTANCE_GAUGES:
            yield _family(
                name,
                [
                    f"{{{self._label(each.name)}}} {value!r}"
                    for each in (sampled if reported else instances)
                    if (value := of(each.sample if reported else each)) is not None
                ],
            )
        ages = [(each, each.sample_at) for each in instances]
        lines = [f"{{{self._label(each.name)}}} {now - at!r}" for each, at in ages if at is not None]
        yield _family("hetlb_instance_signal_age_seconds", lines)

    def _label(self, name: str) -> str:
        label = self._labels.get(name)
        if label is None:
            label = self._labels[name] = f'server="{_escape(name)}"'
        return label

    def _forget(self, names: set[str]) -> None:
        """Drop what belongs to instances that left."""
        for name in self._labels.keys() - names:
            del self._labels[name]


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Load of the instances of one model. `saturation` may exceed 1: requests wait."""

    model: str
    instances: int
    queued: int
    free_places: int
    saturation: float
    #: True if the slots of one of them are a guess.
    assumed: bool


def _model_load(scheduler: Scheduler) -> list[ModelLoad]:
    """The load of every model that is served or waited for."""
    queued: dict[str, int] = {}
    for entry in scheduler.queue:
        queued[entry.request.model] = queued.get(entry.request.model, 0) + 1
    loads = []
    for model in dict.fromkeys([*scheduler.models, *queued]):
        able = [each for each in scheduler.instances if each.routable and each.serves(model)]
        places = sum(each.max_num_seqs for each in able)
        running = sum(each.sequences for each in able)
        waiting = queued.get(model, 0)
        reserved = sum(each.kv_tokens for each in able)
        cache = sum(each.kv_cache_tokens for each in able)
        used = max((running + waiting) / places, reserved / cache) if able else float(waiting)
        assumed = any(slots_source(each) is BeliefSource.ASSUMED for each in able)
        loads.append(ModelLoad(model, len(able), waiting, max(0, places - running), used, assumed))
    return loads


_MODEL_HISTOGRAMS: tuple[tuple[str, Callable[[ModelTotals], Histogram | GapHistogram]], ...] = (
    ("hetlb_time_to_first_token_seconds", attrgetter("ttft")),
    ("hetlb_inter_token_latency_seconds", attrgetter("gaps")),
    ("hetlb_e2e_request_latency_seconds", attrgetter("e2e")),
    ("hetlb_request_queue_time_seconds", attrgetter("queue")),
    ("hetlb_websocket_session_seconds", attrgetter("session")),
    ("hetlb_predicted_output_ratio", attrgetter("output_ratio")),
    ("hetlb_predicted_time_ratio", attrgetter("time_ratio")),
)
_ACCOUNT_COUNTERS: tuple[tuple[str, Callable[[AccountTotals], Number]], ...] = (
    ("hetlb_tenant_requests_total", attrgetter("requests")),
    ("hetlb_tenant_prompt_tokens_total", attrgetter("prompt_tokens")),
    ("hetlb_tenant_output_tokens_total", attrgetter("output_tokens")),
    ("hetlb_tenant_queue_seconds_total", attrgetter("queue_s")),
)
_INSTANCE_COUNTERS: tuple[tuple[str, Callable[[InstanceTotals], Number]], ...] = (
    ("hetlb_instance_output_tokens_total", attrgetter("output_tokens")),
    ("hetlb_instance_prompt_tokens_total", attrgetter("prompt_tokens")),
    ("hetlb_instance_cached_prompt_tokens_total", attrgetter("cached_prompt_tokens")),
    ("hetlb_instance_expected_cached_prompt_tokens_total", attrgetter("expected_cached_prompt_tokens")),
    ("hetlb_instance_ejections_total", attrgetter("ejections")),
    ("hetlb_instance_predicted_seconds_total", attrgetter("expected_s")),
    ("hetlb_instance_served_seconds_total", attrgetter("served_s")),
)
#: Of each instance, or (True) of the last sample of its engine.
_INSTANCE_GAUGES: tuple[tuple[str, bool, Callable[[Any], Number | None]], ...] = (
    ("hetlb_instance_in_flight", False, attrgetter("in_flight")),
    ("hetlb_instance_workload_seconds", False, attrgetter("work_s")),
    ("hetlb_instance_kv_reserved_tokens", False, attrgetter("kv_tokens")),
    ("hetlb_instance_kv_cache_tokens", False, attrgetter("kv_cache_tokens")),
    ("hetlb_instance_slots", False, attrgetter("max_num_seqs")),
    ("hetlb_instance_slots_assumed", False, lambda each: int(slots_source(each) is BeliefSource.ASSUMED)),
    ("hetlb_instance_kv_reported_ratio", True, attrgetter("kv_usage")),
    ("hetlb_instance_kv_reported_max_ratio", True, attrgetter("kv_usage_max")),
    ("hetlb_instance_engines", False, attrgetter("engines")),
    ("hetlb_instance_reported_running", True, attrgetter("running")),
    ("hetlb_instance_reported_waiting", True, attrgetter("waiting")),
)
_STATES: tuple[tuple[str, Iterable[AdminState | Health], Callable[[Instance], object]], ...] = (
    ("hetlb_instance_state", AdminState, attrgetter("admin")),
    ("hetlb_instance_health", Health, attrgetter("health.state")),
)
_FORECAST: tuple[tuple[str, Callable[[Any], float | None]], ...] = (
    ("hetlb_forecast_bias", attrgetter("bias")),
    ("hetlb_forecast_coverage", attrgetter("coverage")),
)
_WORKERS: tuple[tuple[str, Callable[[WorkerState], int]], ...] = (
    ("hetlb_worker_up", attrgetter("up")),
    ("hetlb_worker_restarts_total", attrgetter("restarts")),
    ("hetlb_worker_hangs_total", attrgetter("hangs")),
)
_STAGES = (
    ("hetlb_stage_up", lambda stage: int(stage["state"] == "up")),
    ("hetlb_stage_in_flight", itemgetter("in_flight")),
    ("hetlb_stage_kv_reserved_token_layers", itemgetter("kv_reserved_token_layers")),
)
_LOADS: tuple[tuple[str, Callable[[ModelLoad], Number]], ...] = (
    ("hetlb_queue_requests", attrgetter("queued")),
    ("hetlb_model_instances", attrgetter("instances")),
    ("hetlb_model_saturation_ratio", attrgetter("saturation")),
    ("hetlb_model_free_places", attrgetter("free_places")),
    ("hetlb_model_capacity_assumed", lambda each: int(each.assumed)),
)


def _requests(totals: Totals) -> Iterator[str]:
    """Write what became of requests and of reloads."""
    yield _family(
        "hetlb_requests_total",
        [
            f'{{outcome="{outcome}",cause="{CAUSES[outcome]}",phase="{phase}",'
            f'model="{_escape(model)}",status="{status}"}} {count}'
            for (outcome, phase, model, status), count in totals.requests.items()
        ],
    )
    yield _family(
        "hetlb_class_requests_total",
        [
            f'{{model="{_escape(model)}",class="{_escape(name)}",met="{str(met).lower()}"}} {count}'
            for (model, name, met), count in totals.classes.items()
        ],
    )
    yield _family("hetlb_retries_total", [totals.retries])
    transfers = [f'{{result="{result}"}} {count}' for result, count in totals.kv_transfers.items()]
    yield _family("hetlb_kv_transfers_total", transfers)
    resumed = totals.resumptions.items()
    lines = [f'{{model="{_escape(model)}",reason="{reason}"}} {count}' for (model, reason), count in resumed]
    yield _family("hetlb_requests_resumed_total", lines)
    yield _family("hetlb_decisions_total", [totals.decisions])
    reloads = [f'{{result="{result}"}} {count}' for result, count in totals.reloads.items()]
    yield _family("hetlb_config_reloads_total", reloads)


def _loads(scheduler: Scheduler) -> Iterator[str]:
    """Write the load of every model."""
    loads = _model_load(scheduler)
    for name, of in _LOADS:
        yield _family(name, [f'{{model="{_escape(each.model)}"}} {of(each)!r}' for each in loads])


def _stages(stages: Mapping[str, Callable[[], list[dict[str, Any]]]]) -> Iterator[str]:
    """Write the series of the workers that instances made of stages have."""
    found = [
        (f'{{server="{_escape(server)}",stage="{_escape(stage["name"])}"}}', stage)
        for server, documents in stages.items()
        for stage in documents()
    ]
    for name, of in _STAGES if stages else ():
        yield _family(name, [f"{labels} {of(stage)}" for labels, stage in found])


def _shared(figures: SharedFigures) -> Iterator[str]:
    """Write the view that is shared with other processes of the fleet."""
    yield _family("hetlb_shared_connected", [figures.connected + 0])
    yield _family("hetlb_shared_peers", [figures.peers])
    yield _family("hetlb_shared_peer_leases", [figures.leases])
    yield _family("hetlb_shared_delay_seconds", [figures.delay_s])
    directions = ("sent", "received", "rejected")
    lines = [f'{{direction="{direction}"}} {getattr(figures, direction)}' for direction in directions]
    yield _family("hetlb_shared_messages_total", lines)
    if figures.leads is not None:
        yield _family("hetlb_shared_leads", [figures.leads + 0])


def _accounts(totals: Totals) -> Iterator[str]:
    """Write the use of each model by each tenant."""
    accounts = list(totals.accounts.items())
    for name, of in _ACCOUNT_COUNTERS:
        yield _family(
            name,
            [
                f'{{tenant="{_escape(tenant)}",model="{_escape(model)}"}} {of(each)!r}'
                for (tenant, model), each in accounts
            ],
        )


def usage_document(totals: Totals) -> list[dict[str, Any]]:
    """The entries of `GET /v1/usage`: one for every tenant and model."""
    return [
        {
            "tenant": tenant or None,
            "model": model,
            "requests": each.requests,
            "prompt_tokens": each.prompt_tokens,
            "cached_prompt_tokens": each.cached_prompt_tokens,
            "output_tokens": each.output_tokens,
            "queue_s": each.queue_s,
        }
        for (tenant, model), each in sorted(totals.accounts.items())
    ]


def _family(name: str, lines: Iterable[str | Number]) -> str:
    """Write a family; a number alone is the value of the one series without labels."""
    rest = "".join(f"{name}{line}\n" if isinstance(line, str) else f"{name} {line!r}\n" for line in lines)
    return head(name) + rest


def _buckets(label: str, histogram: Histogram | GapHistogram) -> list[str]:
    """The lines of one histogram, without the name of its family."""
    bounds, counts, total = histogram.figures()
    comma = "," if label else ""
    lines = [
        f'_bucket{{{label}{comma}le="{bound!r}"}} {count}'
        for bound, count in zip(bounds, counts, strict=False)
    ]
    lines.append(f'_bucket{{{label}{comma}le="+Inf"}} {counts[-1]}')
    own = f"{{{label}}}" if label else ""
    lines.append(f"_sum{own} {total!r}")
    lines.append(f"_count{own} {counts[-1]}")
    return lines


def _escape(text: str) -> str:
    """The value of a label. Quotes would end it; what is not printable becomes a question mark."""
    if not text.isprintable():
        text = "".join(each if each.isprintable() else "?" for each in text)
    return text.replace("\\", r"\\").replace('"', r"\"")
