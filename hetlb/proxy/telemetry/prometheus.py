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
from typing import Any, NamedTuple, Protocol, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

import hetlb
from hetlb.build import compiled
from hetlb.core.instance import Instance
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import CAUSES, AdminState, Health
from hetlb.proxy.beliefs import Source, slots_source
from hetlb.proxy.telemetry.counters import AccountTotals, InstanceTotals, ModelTotals, Totals
from hetlb.proxy.telemetry.histograms import Gaps, Histogram

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


class MetricsSource(Protocol):
    """Interface of the service for a scrape."""

    @property
    def scheduler(self) -> Scheduler: ...
    @property
    def totals(self) -> Totals: ...
    @property
    def invalid_samples(self) -> Mapping[str, int]: ...
    @property
    def lost_lines(self) -> int: ...
    @property
    def workers(self) -> Sequence[WorkerState]: ...
    @property
    def stages(self) -> Mapping[str, Callable[[], list[dict[str, Any]]]]: ...
    @property
    def shared(self) -> SharedFigures | None: ...
    def now(self) -> float: ...


# --- the page ---

Number: TypeAlias = float | int
#: One family: its lines and, of the first piece, its HELP and TYPE.
Piece: TypeAlias = str


class MetricsPage:
    """Writes the page; keeps the text of the labels from one scrape to the next."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source
        self._labels: dict[str, str] = {}
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    async def render(self) -> bytes:
        """The page in the Prometheus text format, in slices of about `SLICE_S`."""
        pieces: list[Piece] = []
        started = time.perf_counter()
        for piece in self.pieces():
            pieces.append(piece)
            if time.perf_counter() - started > SLICE_S:
                await asyncio.sleep(0)
                started = time.perf_counter()
        return "".join(pieces).encode()

    def pieces(self) -> Iterator[Piece]:
        """All families, in a fixed order. Between two pieces the fleet may change."""
        source = self._source
        scheduler, totals, now = source.scheduler, source.totals, source.now()
        instances = scheduler.instances
        self._forget({instance.name for instance in instances})
        yield _family("hetlb_build_info", "gauge", "Version, policy, whether the hot path is compiled.", [
            f'{{version="{_escape(hetlb.__version__)}",policy="{scheduler.policy_name}",'
            f'compiled="{str(compiled()).lower()}"}} 1'
        ])  # fmt: skip
        yield _family(
            "hetlb_requests_total", "counter", "Requests that ended, and whose doing it was.",
            [
                f'{{outcome="{outcome}",cause="{CAUSES[outcome]}",phase="{phase}",'
                f'model="{_escape(model)}",status="{status}"}} {count}'
                for (outcome, phase, model, status), count in totals.requests.items()
            ],
        )  # fmt: skip
        yield _family(
            "hetlb_class_requests_total", "counter",
            "Requests of a service class that ended, by whether they met all its targets.",
            [
                f'{{model="{_escape(model)}",class="{_escape(name)}",met="{str(met).lower()}"}} {count}'
                for (model, name, met), count in totals.classes.items()
            ],
        )  # fmt: skip
        yield _family(
            "hetlb_retries_total", "counter", "Requests sent to another instance.", [totals.retries]
        )
        yield _family(
            "hetlb_kv_transfers_total", "counter",
            "Requests prefilled at one instance for another, by what came of it.",
            [f'{{result="{result}"}} {count}' for result, count in totals.kv_transfers.items()],
        )  # fmt: skip
        yield _family(
            "hetlb_requests_resumed_total", "counter",
            "Answers that went on at another instance, by why the first was lost.",
            [
                f'{{model="{_escape(model)}",reason="{reason}"}} {count}'
                for (model, reason), count in totals.resumptions.items()
            ],
        )  # fmt: skip
        yield _family("hetlb_decisions_total", "counter", "Dispatches decided.", [totals.decisions])
        yield _family(
            "hetlb_config_reloads_total", "counter", "Times the fleet file was read again, by result.",
            [f'{{result="{result}"}} {count}' for result, count in totals.reloads.items()],
        )  # fmt: skip
        yield _family(
            "hetlb_log_lost_lines_total", "counter", "Lines of logs that a slow reader made us drop.",
            [source.lost_lines],
        )  # fmt: skip
        queue = scheduler.queue
        models = _model_load(scheduler)
        yield _family(
            "hetlb_queue_requests", "gauge", "Requests waiting for an instance, by model.",
            [f'{{model="{_escape(each.model)}"}} {each.queued}' for each in models],
        )  # fmt: skip
        yield _family(
            "hetlb_model_instances", "gauge", "Instances of the model that take requests.",
            [f'{{model="{_escape(each.model)}"}} {each.instances}' for each in models],
        )  # fmt: skip
        yield _family(
            "hetlb_model_saturation_ratio", "gauge",
            "Sequences running and requests waiting, over the places there are; KV cache promised, if more.",
            [f'{{model="{_escape(each.model)}"}} {each.saturation!r}' for each in models],
        )  # fmt: skip
        yield _family(
            "hetlb_model_free_places", "gauge", "Sequences that could run at once besides those that do.",
            [f'{{model="{_escape(each.model)}"}} {each.free_places}' for each in models],
        )  # fmt: skip
        yield _family(
            "hetlb_model_capacity_assumed", "gauge", "1 while the slots of one of its instances are a guess.",
            [f'{{model="{_escape(each.model)}"}} {int(each.assumed)}' for each in models],
        )  # fmt: skip
        yield from _accounts(totals)
        yield _family("hetlb_queue_bytes", "gauge", "Bytes of the bodies waiting.", [queue.bytes])
        oldest_at = queue.oldest_at()
        yield _family(
            "hetlb_queue_oldest_seconds", "gauge", "How long the request that waits longest has waited.",
            [0.0 if oldest_at is None else now - oldest_at],
        )  # fmt: skip
        yield from self._models(totals)
        if source.stages:
            yield from self._stages(source)
        if source.shared is not None:
            yield from _shared(source.shared)
        calls = {"arrival": totals.arrival, "end": totals.end}
        yield _family(
            "hetlb_decision_seconds", "histogram", "Time of one call of the scheduler, by what happened.",
            chain.from_iterable(_buckets(f'event="{event}"', each) for event, each in calls.items()),
        )  # fmt: skip
        yield _family(
            "hetlb_loop_lag_seconds", "histogram", "How late the event loop called a timer, sampled.",
            _buckets("", totals.lag),
        )  # fmt: skip
        yield from self._counted(instances, totals, source.invalid_samples)
        yield from self._believed(instances, now)
        yield from self._states(instances)
        workers = source.workers or (WorkerState("0", True, 0),)
        yield _family(
            "hetlb_worker_up", "gauge", "1 for a process that serves requests.",
            [f'{{worker="{each.number}"}} {int(each.up)}' for each in workers],
        )  # fmt: skip
        yield _family(
            "hetlb_worker_restarts_total", "counter", "Times a process that serves was replaced.",
            [f'{{worker="{each.number}"}} {each.restarts}' for each in workers],
        )  # fmt: skip
        yield _family(
            "hetlb_worker_hangs_total", "counter", "Times it was killed because it no longer answered.",
            [f'{{worker="{each.number}"}} {each.hangs}' for each in workers],
        )  # fmt: skip
        yield generate_latest(self._process).decode()

    def _stages(self, source: MetricsSource) -> Iterator[Piece]:
        """Series of the workers that instances made of stages have."""
        found = [
            (f'{{server="{_escape(server)}",stage="{_escape(stage["name"])}"}}', stage)
            for server, documents in source.stages.items()
            for stage in documents()
        ]
        yield _family(
            "hetlb_stage_up", "gauge", "1 while a stage is used.",
            [f"{labels} {int(stage['state'] == 'up')}" for labels, stage in found],
        )  # fmt: skip
        yield _family(
            "hetlb_stage_in_flight", "gauge", "Requests whose path crosses a stage.",
            [f"{labels} {stage['in_flight']}" for labels, stage in found],
        )  # fmt: skip
        yield _family(
            "hetlb_stage_kv_reserved_token_layers", "gauge", "KV cache booked on a stage.",
            [f"{labels} {stage['kv_reserved_token_layers']}" for labels, stage in found],
        )  # fmt: skip

    def _models(self, totals: Totals) -> Iterator[Piece]:
        families: tuple[tuple[str, str, Callable[[ModelTotals], Histogram | Gaps]], ...] = (
            (
                "hetlb_time_to_first_token_seconds",
                "From arrival to the first byte of a streamed answer.",
                lambda each: each.ttft,
            ),
            (
                "hetlb_inter_token_latency_seconds",
                "Between two reads of a stream that brought text.",
                lambda each: each.gaps,
            ),
            (
                "hetlb_e2e_request_latency_seconds",
                "From arrival to the end of a request that was answered.",
                lambda each: each.e2e,
            ),
            (
                "hetlb_request_queue_time_seconds",
                "From arrival to the last dispatch, or to the end of those never dispatched.",
                lambda each: each.queue,
            ),
            (
                "hetlb_websocket_session_seconds",
                "From dispatch to the end of a WebSocket session.",
                lambda each: each.session,
            ),
            (
                "hetlb_predicted_output_ratio",
                "Predicted over actual output tokens.",
                lambda each: each.output_ratio,
            ),
            (
                "hetlb_predicted_time_ratio",
                "Predicted over actual time from dispatch to the end.",
                lambda each: each.time_ratio,
            ),
        )
        models = list(totals.models.items())
        for name, help_text, of in families:
            yield _head(name, "histogram", help_text)
            for model, each in models:
                yield "".join(f"{name}{line}\n" for line in _buckets(f'model="{_escape(model)}"', of(each)))

    def _counted(
        self, instances: Sequence[Instance], totals: Totals, invalid: Mapping[str, int]
    ) -> Iterator[Piece]:
        pairs = [(self._label(instance.name), totals.instance(instance.name)) for instance in instances]
        yield _family(
            "hetlb_forecast_bias", "gauge", "Mean forecast over mean true time - 1 of the newest answers.",
            [
                f'{{{self._label(instance.name)},figure="{figure}"}} {bias:.6g}'
                for instance in instances
                for figure, ratios in instance.errors.by_figure
                if (bias := ratios.bias) is not None
            ],
        )  # fmt: skip
        yield _family(
            "hetlb_forecast_coverage", "gauge", "Share of the newest answers within their 90 % bound.",
            [
                f'{{{self._label(instance.name)},figure="{figure}"}} {coverage:.6g}'
                for instance in instances
                for figure, ratios in instance.errors.by_figure
                if (coverage := ratios.coverage) is not None
            ],
        )  # fmt: skip
        yield _family(
            "hetlb_instance_requests_total", "counter", "Leases that ended, by instance and outcome.",
            [
                f'{{{label},outcome="{outcome}"}} {count}'
                for label, each in pairs
                for outcome, count in each.requests.items()
            ],
        )  # fmt: skip
        families: tuple[tuple[str, str, Callable[[InstanceTotals], Number]], ...] = (
            ("hetlb_instance_output_tokens_total", "Tokens generated.", lambda each: each.output_tokens),
            (
                "hetlb_instance_prompt_tokens_total",
                "Prompt tokens of requests, each prompt once.",
                lambda each: each.prompt_tokens,
            ),
            (
                "hetlb_instance_cached_prompt_tokens_total",
                "Prompt tokens that the engine read from its prefix cache, where its usage says so.",
                lambda each: each.cached_prompt_tokens,
            ),
            (
                "hetlb_instance_expected_cached_prompt_tokens_total",
                "Prompt tokens that were believed to be in the prefix cache when the request was sent.",
                lambda each: each.expected_cached_prompt_tokens,
            ),
            (
                "hetlb_instance_ejections_total",
                "Times it was taken out as dead.",
                lambda each: each.ejections,
            ),
            (
                "hetlb_instance_predicted_seconds_total",
                "Predicted time of completed answers, from dispatch to the end.",
                lambda each: each.expected_s,
            ),
            (
                "hetlb_instance_served_seconds_total",
                "Actual time of completed answers, from dispatch to the end.",
                lambda each: each.served_s,
            ),
        )
        for name, help_text, of in families:
            yield _family(name, "counter", help_text, [f"{{{label}}} {of(each)!r}" for label, each in pairs])
        for name, help_text, what in (
            (
                "hetlb_instance_model_expected_seconds_total",
                "Times that the profile as it is expects.",
                "expected",
            ),
            ("hetlb_instance_model_seen_seconds_total", "The same times as they were seen.", "seen"),
        ):
            yield _family(
                name, "counter", help_text,
                [
                    f'{{{label},part="{part}"}} {getattr(each, f"{part}_{what}_s")!r}'
                    for label, each in pairs
                    for part in ("prefill", "mixed", "decode")
                ],
            )  # fmt: skip
        yield _family(
            "hetlb_instance_invalid_samples_total", "counter", "Scrapes with absurd values.",
            [f"{{{self._label(each.name)}}} {invalid.get(each.name, 0)}" for each in instances],
        )  # fmt: skip

    def _believed(self, instances: Sequence[Instance], now: float) -> Iterator[Piece]:
        def reported(name: str) -> Callable[[Instance], Number | None]:
            return lambda each: None if each.sample is None else getattr(each.sample, name)

        families: tuple[tuple[str, str, Callable[[Instance], Number | None]], ...] = (
            ("hetlb_instance_in_flight", "Requests dispatched and not ended.", lambda each: each.in_flight),
            (
                "hetlb_instance_workload_seconds",
                "Work assigned and not completed.",
                lambda each: each.work_s,
            ),
            (
                "hetlb_instance_kv_reserved_tokens",
                "KV cache tokens promised to requests.",
                lambda each: each.kv_tokens,
            ),
            (
                "hetlb_instance_kv_cache_tokens",
                "KV cache tokens there are.",
                lambda each: each.kv_cache_tokens,
            ),
            (
                "hetlb_instance_slots",
                "Sequences that it is believed to run at once.",
                lambda each: each.max_num_seqs,
            ),
            (
                "hetlb_instance_slots_assumed",
                "1 while that is vLLM's default: neither stated nor measured nor learnt.",
                lambda each: int(slots_source(each) is Source.ASSUMED),
            ),
            (
                "hetlb_instance_kv_reported_ratio",
                "KV cache use the engine reports, 0 to 1.",
                reported("kv_usage"),
            ),
            (
                "hetlb_instance_kv_reported_max_ratio",
                "KV cache use of the fullest data-parallel engine, 0 to 1.",
                reported("kv_usage_max"),
            ),
            ("hetlb_instance_engines", "Data-parallel engines behind its URL.", lambda each: each.engines),
            (
                "hetlb_instance_reported_running",
                "Requests running, as the engine reports.",
                reported("running"),
            ),
            (
                "hetlb_instance_reported_waiting",
                "Requests waiting, as the engine reports.",
                reported("waiting"),
            ),
            (
                "hetlb_instance_signal_age_seconds",
                "Age of the engine's last report.",
                lambda each: None if each.sample_at is None else now - each.sample_at,
            ),
        )
        for name, help_text, of in families:
            lines = [
                f"{{{self._label(each.name)}}} {value!r}"
                for each in instances
                if (value := of(each)) is not None
            ]
            yield _family(name, "gauge", help_text, lines)

    def _states(self, instances: Sequence[Instance]) -> Iterator[Piece]:
        name = "hetlb_instance_state"
        yield _head(name, "gauge", "1 for the administrative state in force.")
        for state in AdminState:
            label = f',state="{state.value}"'
            yield "".join(
                f"{name}{{{self._label(each.name)}{label}}} {int(each.admin is state)}\n"
                for each in instances
            )
        name = "hetlb_instance_health"
        yield _head(name, "gauge", "1 for the health in force.")
        for health in Health:
            label = f',health="{health.value}"'
            yield "".join(
                f"{name}{{{self._label(each.name)}{label}}} {int(each.health.state is health)}\n"
                for each in instances
            )

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
        promised = sum(each.kv_tokens for each in able)
        cache = sum(each.kv_cache_tokens for each in able)
        used = max((running + waiting) / places, promised / cache) if able else float(waiting)
        assumed = any(slots_source(each) is Source.ASSUMED for each in able)
        loads.append(ModelLoad(model, len(able), waiting, max(0, places - running), used, assumed))
    return loads


def _shared(figures: SharedFigures) -> Iterator[Piece]:
    """The view that is shared with other processes of the fleet."""
    gauges: tuple[tuple[str, str, Number], ...] = (
        ("hetlb_shared_connected", "1 while the server of the shared state is reached.", figures.connected),
        ("hetlb_shared_peers", "Other processes whose leases are known.", figures.peers),
        ("hetlb_shared_peer_leases", "Requests at the engines that are theirs.", figures.leases),
        ("hetlb_shared_delay_seconds", "Age of their news, by own messages coming back.", figures.delay_s),
    )
    for name, help_text, value in gauges:
        yield _family(name, "gauge", help_text, [value + 0])
    yield _family(
        "hetlb_shared_messages_total", "counter", "Messages of the shared state.",
        [
            f'{{direction="{direction}"}} {getattr(figures, direction)}'
            for direction in ("sent", "received", "rejected")
        ],
    )  # fmt: skip
    if figures.leads is not None:
        yield _family("hetlb_shared_leads", "gauge", "1 while this process serves.", [figures.leads + 0])


def _accounts(totals: Totals) -> Iterator[Piece]:
    """Use of each model by each tenant."""
    families: tuple[tuple[str, str, Callable[[AccountTotals], Number]], ...] = (
        ("hetlb_tenant_requests_total", "Requests of the tenant that ended.", lambda each: each.requests),
        (
            "hetlb_tenant_prompt_tokens_total",
            "Prompt tokens of its requests.",
            lambda each: each.prompt_tokens,
        ),
        ("hetlb_tenant_output_tokens_total", "Tokens generated for it.", lambda each: each.output_tokens),
        ("hetlb_tenant_queue_seconds_total", "Time that its requests waited.", lambda each: each.queue_s),
    )
    accounts = list(totals.accounts.items())
    for name, help_text, of in families:
        yield _family(name, "counter", help_text, [
            f'{{tenant="{_escape(tenant)}",model="{_escape(model)}"}} {of(each)!r}'
            for (tenant, model), each in accounts
        ])  # fmt: skip


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


def _head(name: str, kind: str, help_text: str) -> Piece:
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"


def _family(name: str, kind: str, help_text: str, lines: Iterable[str | Number]) -> Piece:
    """A family; a number alone is the value of the one series without labels."""
    rest = "".join(f"{name}{line}\n" if isinstance(line, str) else f"{name} {line!r}\n" for line in lines)
    return _head(name, kind, help_text) + rest


def _buckets(label: str, histogram: Histogram | Gaps) -> list[str]:
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
