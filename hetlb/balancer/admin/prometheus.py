"""The proxy's own `/metrics` page: the driver's counters, and gauges read from the scheduler on request.

Labels take only values that configuration, code or the engines define, never a client's inventions; a series
ends with its instance. Instances bear the label `server`: Prometheus itself sets `instance`. The page of a
large fleet is written in slices of about a millisecond, so that a scrape delays no token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

import hetlb
from hetlb.balancer.admin.beliefs import BeliefSource, reported, slots_source
from hetlb.balancer.admin.fleet_status import pools, status
from hetlb.balancer.core.types import CAUSES, AdminState, Health
from hetlb.balancer.fleet.service import WorkerState
from hetlb.balancer.telemetry.counters import ACCOUNT_COUNTS, GapHistogram, Histogram, Totals
from hetlb.build import compiled

if TYPE_CHECKING:
    from hetlb.balancer.fleet.service import FleetService
    from hetlb.balancer.fleet.shared_fleet import SharedFleet

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
#: Seconds of a slice of the page, after which the event loop goes round once.
SLICE_S = 0.001
#: Lines of the page written at once.
_WRITTEN_LINES: Final = 256


Series: TypeAlias = Iterable[tuple[str, float | Histogram | GapHistogram | None]]
#: Name of a family, and its series: text of the labels (without the braces), value (None: no series).
Family: TypeAlias = tuple[str, Series]

#: Help of counters (`_total`) and gauges, in the order of the page.
FIGURES: Final = {
    "hetlb_build_info": "Version, policy, whether the hot path is compiled.",
    "hetlb_requests_total": "Requests that ended, by outcome and the party that caused it.",
    "hetlb_class_requests_total": "Requests of a service class that ended, by met targets.",
    "hetlb_kv_transfers_total": "Requests prefilled at one instance for another, by result.",
    "hetlb_requests_resumed_total": "Answers continued at another instance, by reason.",
    "hetlb_config_reloads_total": "Reloads of the fleet file, by result.",
    "hetlb_state": "State of a model: well, busy, degraded or down.",
    "hetlb_cause": "Causes of a state that is not well, while they last.",
    "hetlb_load_ratio": "Arrivals over capacity of the worst model.",
    "hetlb_capacity_requests_per_second": "Requests per second that the worst model can serve.",
    "hetlb_headroom_requests_per_second": "Requests per second that could arrive in addition.",
    "hetlb_oldest_wait_seconds": "Age of the oldest request in the queue.",
    "hetlb_retries_total": "Requests sent to another instance.",
    "hetlb_decisions_total": "Dispatches decided.",
    "hetlb_log_lost_lines_total": "Log lines that a slow reader or a full disk lost.",
    "hetlb_queue_bytes": "Bytes of the bodies of waiting requests.",
    "hetlb_queue_requests": "Requests waiting for an instance, by model.",
    "hetlb_model_instances": "Instances of the model that take requests.",
    "hetlb_model_saturation_ratio": "Load over the slots, or KV cache use if larger.",
    "hetlb_model_free_places": "Free slots: sequences that could start now.",
    "hetlb_model_capacity_assumed": "1 while the slots of an instance are a guess.",
    "hetlb_tenant_requests_total": "Requests of a tenant that ended.",
    "hetlb_tenant_prompt_tokens_total": "Prompt tokens of the requests of a tenant.",
    "hetlb_tenant_output_tokens_total": "Tokens generated for a tenant.",
    "hetlb_tenant_queue_seconds_total": "Seconds that the requests of a tenant waited.",
    "hetlb_shared_connected": "1 while the server of the shared state is reached.",
    "hetlb_shared_peers": "Other processes with known leases.",
    "hetlb_shared_peer_leases": "Requests that other processes have at the engines.",
    "hetlb_shared_delay_seconds": "Seconds until an own message came back from the shared state.",
    "hetlb_shared_messages_total": "Messages of the shared state.",
    "hetlb_forecast_bias": "Mean forecast over mean actual time, minus 1, of the newest answers.",
    "hetlb_forecast_coverage": "Share of the newest answers within the 90 % bound of their forecast.",
    "hetlb_instance_requests_total": "Leases that ended, by instance and outcome.",
    "hetlb_instance_output_tokens_total": "Tokens generated.",
    "hetlb_instance_prompt_tokens_total": "Tokens of prompts, each prompt once.",
    "hetlb_instance_cached_prompt_tokens_total": "Prompt tokens read from a cache.",
    "hetlb_instance_expected_cached_prompt_tokens_total": (
        "Prompt tokens that were believed to be in the prefix cache when the request was sent."
    ),
    "hetlb_instance_ejections_total": "Times that an instance was ejected as dead.",
    "hetlb_instance_stalls_total": "Times that an instance with work gave no token.",
    "hetlb_instance_predicted_seconds_total": "Predicted seconds of completed answers, from dispatch to end.",
    "hetlb_instance_served_seconds_total": "Actual seconds of completed answers, from dispatch to end.",
    "hetlb_instance_model_expected_seconds_total": "Seconds that the uncorrected profile predicts.",
    "hetlb_instance_model_seen_seconds_total": "The same seconds, as measured.",
    "hetlb_instance_invalid_samples_total": "Scrapes with impossible values.",
    "hetlb_instance_in_flight": "Requests dispatched and not ended.",
    "hetlb_instance_workload_seconds": "Seconds of work assigned and not completed.",
    "hetlb_instance_kv_reserved_tokens": "KV cache tokens reserved to requests.",
    "hetlb_instance_kv_cache_tokens": "KV cache tokens in total.",
    "hetlb_instance_slots": "Sequences that an instance is believed to run at once.",
    "hetlb_instance_engines": "Data-parallel engines behind the URL of an instance.",
    "hetlb_instance_slots_assumed": "1 while the number of slots is the default of vLLM.",
    "hetlb_instance_kv_reported_ratio": "KV cache use the engine reports, 0 to 1.",
    "hetlb_instance_kv_reported_max_ratio": "KV cache use of the fullest engine of an instance, 0 to 1.",
    "hetlb_instance_reported_running": "Requests running, as the engine reports.",
    "hetlb_instance_reported_waiting": "Requests waiting, as the engine reports.",
    "hetlb_instance_signal_age_seconds": "Age of the engine's last report.",
    "hetlb_rank_in_flight": "Requests dispatched to one data-parallel engine and not ended.",
    "hetlb_rank_kv_reserved_tokens": "KV cache tokens of one data-parallel engine reserved to requests.",
    "hetlb_instance_asleep": "1 while an instance sleeps, or is about to sleep or to wake up.",
    "hetlb_wake_seconds": "Seconds that the last wake of an instance took.",
    "hetlb_instance_state": "1 for the administrative state in force.",
    "hetlb_instance_health": "1 for the health in force.",
    "hetlb_worker_up": "1 for a process that serves requests.",
    "hetlb_worker_restarts_total": "Times a process that serves was replaced.",
    "hetlb_worker_hangs_total": "Times that a process was killed because it did not answer.",
}
#: Help of histograms.
HISTOGRAMS: Final = {
    "hetlb_loop_lag_seconds": "Lag of the event loop at a timer, sampled.",
    "hetlb_time_to_first_token_seconds": "From arrival to the first byte of a stream.",
    "hetlb_inter_token_latency_seconds": "Between two reads of a stream with text.",
    "hetlb_e2e_request_latency_seconds": "From arrival to the end of an answer.",
    "hetlb_request_queue_time_seconds": "From arrival to the last dispatch, or the end.",
    "hetlb_websocket_session_seconds": "From dispatch to the end of a session.",
    "hetlb_predicted_output_ratio": "Predicted over actual output tokens.",
    "hetlb_predicted_time_ratio": "Predicted over actual time from the dispatch.",
    "hetlb_decision_seconds": "Time of one call of the scheduler, by event.",
}
HELP: Final = {**FIGURES, **HISTOGRAMS}


def _totals(source: FleetService, now: float) -> Iterator[Family]:
    """Yield the counters of the whole fleet."""
    totals, scheduler = source.totals, source.scheduler
    policy, is_compiled = scheduler.placement.policy_name, str(compiled()).lower()
    build = _pairs(version=hetlb.__version__, policy=policy, compiled=is_compiled)
    yield "hetlb_build_info", [(build, 1)]
    yield (
        "hetlb_requests_total",
        [
            (_pairs(outcome=end, cause=CAUSES[end], phase=phase, model=model, status=status), count)
            for (end, phase, model, status), count in totals.requests.items()
        ],
    )
    yield (
        "hetlb_class_requests_total",
        [
            (f'{_pairs(model=model)},class="{_escape(name)}",met="{str(met).lower()}"', count)
            for (model, name, met), count in totals.classes.items()
        ],
    )
    yield "hetlb_kv_transfers_total", [(_pairs(result=end), n) for end, n in totals.kv_transfers.items()]
    yield (
        "hetlb_requests_resumed_total",
        [(_pairs(model=model, reason=reason), n) for (model, reason), n in totals.resumptions.items()],
    )
    yield "hetlb_config_reloads_total", [(_pairs(result=end), n) for end, n in totals.reloads.items()]
    yield "hetlb_retries_total", [("", totals.retries)]
    yield "hetlb_decisions_total", [("", totals.decisions)]
    yield "hetlb_log_lost_lines_total", [("", source.lost_lines)]
    yield "hetlb_queue_bytes", [("", scheduler.queue.bytes + source.waiting_elsewhere[1])]
    tenants = [(_pairs(tenant=tenant, model=model), n) for (tenant, model), n in totals.accounts.items()]
    yield "hetlb_tenant_requests_total", [(label, each.requests) for label, each in tenants]
    yield "hetlb_tenant_prompt_tokens_total", [(label, each.prompt_tokens) for label, each in tenants]
    yield "hetlb_tenant_output_tokens_total", [(label, each.output_tokens) for label, each in tenants]
    yield "hetlb_tenant_queue_seconds_total", [(label, each.queue_s) for label, each in tenants]
    workers = [(_pairs(worker=each.number), each) for each in source.workers or (WorkerState("0", True, 0),)]
    yield "hetlb_worker_up", [(label, each.up) for label, each in workers]
    yield "hetlb_worker_restarts_total", [(label, each.restarts) for label, each in workers]
    yield "hetlb_worker_hangs_total", [(label, each.hangs) for label, each in workers]


def _states(source: FleetService, now: float) -> Iterator[Family]:
    """Yield the state of the fleet as `GET /v1/status` has it; figures that are not known are left out."""
    found = status(source.scheduler, pools(source.scheduler), source.recent, now, source.reload_refused)
    yield (
        "hetlb_state",
        [
            (_pairs(model=each["model"], state=state), each["state"] == state)
            for each in found["models"]
            for state in ("well", "busy", "degraded", "down")
        ],
    )
    causes = dict.fromkeys((each["cause"], each["instance"]) for each in found["causes"])
    yield "hetlb_cause", [(_pairs(cause=cause, instance=instance), 1) for cause, instance in causes]
    yield "hetlb_load_ratio", [("", found["load"])]
    yield "hetlb_capacity_requests_per_second", [("", found["capacity_req_s"])]
    yield "hetlb_headroom_requests_per_second", [("", found["headroom_req_s"])]
    yield "hetlb_oldest_wait_seconds", [("", found["oldest_wait_s"])]


def _loads(source: FleetService, now: float) -> Iterator[Family]:
    """Yield the load of every model served or waited for. A saturation above 1: requests wait."""
    scheduler = source.scheduler
    queued, saturation = dict(scheduler.queue.by_model()), []
    for model, count in source.waiting_elsewhere[0].items():
        queued[model] = queued.get(model, 0) + count
    able = {
        model: [each for each in scheduler.instances if each.routable and model in each.models]
        for model in dict.fromkeys([*scheduler.fleet.ready, *queued])
    }
    labelled = [(_pairs(model=model), model, instances) for model, instances in able.items()]
    places = {model: sum(each.max_num_seqs for each in instances) for model, instances in able.items()}
    running = {model: sum(each.sequences for each in instances) for model, instances in able.items()}
    for label, model, instances in labelled:
        load = float(queued.get(model, 0))
        if instances:
            reserved = sum(each.kv_tokens for each in instances)
            cache = sum(each.kv_cache_tokens for each in instances)
            load = max((running[model] + load) / places[model], reserved / cache)
        saturation.append((label, load))
    yield "hetlb_queue_requests", [(label, queued.get(model, 0)) for label, model, _ in labelled]
    yield "hetlb_model_instances", [(label, len(instances)) for label, _, instances in labelled]
    yield "hetlb_model_saturation_ratio", saturation
    yield (
        "hetlb_model_free_places",
        [(label, max(0, places[model] - running[model])) for label, model, _ in labelled],
    )
    yield (
        "hetlb_model_capacity_assumed",
        [
            (label, any(slots_source(each) is BeliefSource.ASSUMED for each in instances))
            for label, _, instances in labelled
        ],
    )


def _peers(source: FleetService, now: float) -> Iterator[Family]:
    """Yield the figures of the peers of this process, if the fleet can have some."""
    sharing: SharedFleet | None = source.sharing
    if sharing is not None:
        yield "hetlb_shared_connected", [("", sharing.connected)]
        yield "hetlb_shared_peers", [("", sharing.peers)]
        yield "hetlb_shared_peer_leases", [("", sharing.view.peer_leases)]
        yield "hetlb_shared_delay_seconds", [("", sharing.view.delay_s)]
        counts = {"sent": sharing.sent, "received": sharing.received, "rejected": sharing.rejected}
        yield "hetlb_shared_messages_total", [(_pairs(direction=name), n) for name, n in counts.items()]


def _counted(source: FleetService, now: float) -> Iterator[Family]:
    """Yield the counters of each instance."""
    names = [(_pairs(server=each.name), each.name) for each in source.scheduler.instances]
    of = [(label, source.totals.instances[name]) for label, name in names]
    yield (
        "hetlb_instance_requests_total",
        [(f'{label},outcome="{outcome}"', n) for label, each in of for outcome, n in each.requests.items()],
    )
    yield "hetlb_instance_output_tokens_total", [(label, each.output_tokens) for label, each in of]
    yield "hetlb_instance_prompt_tokens_total", [(label, each.prompt_tokens) for label, each in of]
    yield (
        "hetlb_instance_cached_prompt_tokens_total",
        [(label, each.cached_prompt_tokens) for label, each in of],
    )
    yield (
        "hetlb_instance_expected_cached_prompt_tokens_total",
        [(label, each.expected_cached_prompt_tokens) for label, each in of],
    )
    yield "hetlb_instance_ejections_total", [(label, each.ejections) for label, each in of]
    yield "hetlb_instance_stalls_total", [(label, each.stalls) for label, each in of]
    yield "hetlb_instance_predicted_seconds_total", [(label, each.expected_s) for label, each in of]
    yield "hetlb_instance_served_seconds_total", [(label, each.served_s) for label, each in of]
    yield (
        "hetlb_instance_model_expected_seconds_total",
        [(f'{label},part="{part}"', s.expected_s) for label, each in of for part, s in each.parts.items()],
    )
    yield (
        "hetlb_instance_model_seen_seconds_total",
        [(f'{label},part="{part}"', s.seen_s) for label, each in of for part, s in each.parts.items()],
    )
    invalid: Mapping[str, int] = source.watch.invalid_samples
    yield "hetlb_instance_invalid_samples_total", [(label, invalid.get(name, 0)) for label, name in names]


def _instances(source: FleetService, now: float) -> Iterator[Family]:
    """Yield the beliefs about each instance, and its reports."""
    of = [(_pairs(server=each.name), each) for each in source.scheduler.instances]
    ratios = [(f'{at},figure="{name}"', r) for at, each in of for name, r in each.errors.by_figure]
    yield "hetlb_forecast_bias", [(label, each.bias) for label, each in ratios]
    yield "hetlb_forecast_coverage", [(label, each.coverage) for label, each in ratios]
    yield "hetlb_instance_in_flight", [(label, each.in_flight) for label, each in of]
    yield "hetlb_instance_workload_seconds", [(label, each.work_s) for label, each in of]
    yield "hetlb_instance_kv_reserved_tokens", [(label, each.kv_tokens) for label, each in of]
    yield "hetlb_instance_kv_cache_tokens", [(label, each.kv_cache_tokens) for label, each in of]
    yield "hetlb_instance_slots", [(label, each.max_num_seqs) for label, each in of]
    yield "hetlb_instance_engines", [(label, each.engines) for label, each in of]
    yield (
        "hetlb_instance_slots_assumed",
        [(label, slots_source(each) is BeliefSource.ASSUMED) for label, each in of],
    )
    samples = [(label, reported(each, now)) for label, each in of]
    reports = [(label, sample) for label, sample in samples if sample is not None]
    yield "hetlb_instance_kv_reported_ratio", [(label, each.kv_usage) for label, each in reports]
    yield "hetlb_instance_kv_reported_max_ratio", [(label, each.kv_usage_max) for label, each in reports]
    yield "hetlb_instance_reported_running", [(label, each.running) for label, each in reports]
    yield "hetlb_instance_reported_waiting", [(label, each.waiting) for label, each in reports]
    yield (
        "hetlb_instance_signal_age_seconds",
        [(label, now - each.sample_at) for label, each in of if each.sample_at is not None],
    )
    ranks = [
        (f'{label},rank="{number}"', rank)
        for label, each in of
        if each.ranks is not None
        for number, rank in enumerate(each.ranks.each)
    ]
    yield "hetlb_rank_in_flight", [(label, rank.in_flight) for label, rank in ranks]
    yield "hetlb_rank_kv_reserved_tokens", [(label, rank.kv_tokens) for label, rank in ranks]
    yield "hetlb_instance_asleep", [(label, each.asleep or bool(each.sleep.reason)) for label, each in of]
    woken = [(label, each.sleep.wake_s) for label, each in of if each.sleep.wake_s is not None]
    yield "hetlb_wake_seconds", woken
    yield (
        "hetlb_instance_state",
        [
            (f'{label},state="{state.value}"', each.admin is state)
            for state in AdminState
            for label, each in of
        ],
    )
    yield (
        "hetlb_instance_health",
        [
            (f'{label},health="{state.value}"', each.evidence.health.state is state)
            for state in Health
            for label, each in of
        ],
    )


def _histograms(source: FleetService, now: float) -> Iterator[Family]:
    """Yield the histograms."""
    totals = source.totals
    of = [(_pairs(model=model), each) for model, each in totals.models.items()]
    yield "hetlb_loop_lag_seconds", [("", totals.lag)]
    yield "hetlb_time_to_first_token_seconds", [(label, each.ttft) for label, each in of]
    yield "hetlb_inter_token_latency_seconds", [(label, each.gaps) for label, each in of]
    yield "hetlb_e2e_request_latency_seconds", [(label, each.e2e) for label, each in of]
    yield "hetlb_request_queue_time_seconds", [(label, each.queue) for label, each in of]
    yield "hetlb_websocket_session_seconds", [(label, each.session) for label, each in of]
    yield "hetlb_predicted_output_ratio", [(label, each.output_ratio) for label, each in of]
    yield "hetlb_predicted_time_ratio", [(label, each.time_ratio) for label, each in of]
    yield "hetlb_decision_seconds", [('event="arrival"', totals.arrival), ('event="end"', totals.end)]


#: Parts of the page, in its order.
_PARTS: Final = (_totals, _states, _loads, _peers, _counted, _instances, _histograms)


class MetricsPage:
    """Writes the page of a service."""

    def __init__(self, source: FleetService) -> None:
        self._source = source
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    async def render(self) -> bytes:
        """Return the page in the Prometheus text format, in slices of about `SLICE_S`."""
        pieces: list[str] = []
        started = time.perf_counter()
        for piece in self.pieces():
            pieces.append(piece)
            if time.perf_counter() - started > SLICE_S:
                await asyncio.sleep(0)
                started = time.perf_counter()
        return "".join(pieces).encode()

    def pieces(self) -> Iterator[str]:
        """Yield the page in pieces, in a fixed order. Between two pieces the fleet may change."""
        source = self._source
        now = source.now()
        for part in _PARTS:
            for name, series in part(source, now):
                kind = "counter" if name.endswith("_total") else "gauge"
                if name in HISTOGRAMS:
                    kind = "histogram"
                yield f"# HELP {name} {HELP[name]}\n# TYPE {name} {kind}\n"
                lines = iter(series)
                while some := list(islice(lines, _WRITTEN_LINES)):
                    yield "".join([_series(name, *each) for each in some])
        yield generate_latest(self._process).decode()


def _series(name: str, label: str, value: float | Histogram | GapHistogram | None) -> str:
    """Return the sample line of a number or the lines of a histogram; "" for None."""
    if value is None:
        return ""
    own = f"{{{label}}}" if label else ""
    if isinstance(value, int | float):
        return f"{name}{own} {value + 0!r}\n"
    bounds, counts, total = value.figures()
    comma = "," if label else ""
    buckets = [
        f'{name}_bucket{{{label}{comma}le="{bound}"}} {count}\n'
        for bound, count in zip([*bounds, "+Inf"], counts, strict=True)
    ]
    return "".join(buckets) + f"{name}_sum{own} {total!r}\n{name}_count{own} {counts[-1]}\n"


def _escape(text: str) -> str:
    """Return the value of a label. Quotes would end it; unprintable characters become question marks."""
    if not text.isprintable():
        text = "".join(each if each.isprintable() else "?" for each in text)
    return text.replace("\\", r"\\").replace('"', r"\"")


def _pairs(**labels: str) -> str:
    """Return the labels of a series, without braces."""
    return ",".join([f'{name}="{_escape(value)}"' for name, value in labels.items()])


def usage_document(totals: Totals) -> list[dict[str, Any]]:
    """Return the entries of `GET /v1/usage`: one for every tenant and model."""
    return [
        {"tenant": tenant or None, "model": model, **{name: getattr(each, name) for name in ACCOUNT_COUNTS}}
        for (tenant, model), each in sorted(totals.accounts.items())
    ]
