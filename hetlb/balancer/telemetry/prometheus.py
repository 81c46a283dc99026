"""The proxy's own `/metrics` page: what the driver counted, and gauges read from the scheduler when asked.

Labels take only values that configuration, code or the engines define, never what a client makes up; a series
ends with its instance. Instances bear the label `server`: Prometheus itself sets `instance`. The page of a
large fleet is written in slices of about a millisecond, so that a scrape delays no token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

import hetlb
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import CAUSES, AdminState, Health
from hetlb.balancer.fleet.beliefs import BeliefSource, slots_source
from hetlb.balancer.telemetry.counters import ACCOUNT_COUNTS, Totals
from hetlb.balancer.telemetry.histograms import GapHistogram, Histogram
from hetlb.build import compiled

if TYPE_CHECKING:
    from hetlb.balancer.fleet.service import FleetService

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
#: A slice of the page takes about this long; then the event loop goes round once.
SLICE_S = 0.001
#: Lines written at once.
_LINES: Final = 256


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One of several processes that serve: whether it does now, and how often it had to be started again."""

    number: str
    up: bool
    restarts: int
    #: Times it was killed because it no longer answered.
    hangs: int = 0


#: Things of one kind, each with the text of its labels (without the braces).
Things: TypeAlias = Sequence[tuple[str, Any]]


class _Moment:
    """Sources of one page; instances and their counters come with the text of their labels."""

    def __init__(self, source: FleetService) -> None:
        self.source = source
        self.now: float = source.now()
        self._status: dict[str, Any] | None = None
        self.scheduler: Scheduler = source.scheduler
        self.totals: Totals = source.totals
        self.instances: Things = [(_pairs(server=each.name), each) for each in self.scheduler.instances]
        self.counted: Things = [(label, self.totals.instance(each.name)) for label, each in self.instances]
        invalid: Mapping[str, int] = source.watch.invalid_samples
        self.invalid: Things = [(label, invalid.get(each.name, 0)) for label, each in self.instances]

    @property
    def oldest_s(self) -> float:
        """Seconds that the request has waited that waits longest."""
        oldest_at = self.scheduler.queue.oldest_at()
        return 0.0 if oldest_at is None else self.now - oldest_at

    @property
    def status(self) -> dict[str, Any]:
        """Body of `GET /v1/status`."""
        from hetlb.balancer.fleet.fleet_status import pools, status

        if self._status is None:
            source = self.source
            found = pools(self.scheduler)
            self._status = status(self.scheduler, found, source.recent, self.now, source.reload_refused)
        return self._status

    def fleet(self) -> Things:
        """Figures of the fleet as its status has them; those that are not known are left out."""
        found = self.status
        names = {"load": "load", "capacity_req_s": "capacity", "headroom_req_s": "headroom"}
        known = {names[key]: found[key] for key in names if found[key] is not None}
        return [("", SimpleNamespace(oldest=found["oldest_wait_s"], **known))]

    def model_states(self) -> Things:
        """Every state of every model, True for the one that it is in."""
        return [
            (_pairs(model=each["model"], state=state), each["state"] == state)
            for each in self.status["models"]
            for state in ("well", "busy", "degraded", "down")
        ]

    def causes(self) -> Things:
        """Causes that there are now."""
        found = dict.fromkeys((each["cause"], each["instance"]) for each in self.status["causes"])
        return [(_pairs(cause=cause, instance=instance), 1) for cause, instance in found]

    def build(self) -> Things:
        policy, is_compiled = self.scheduler.placement.policy_name, str(compiled()).lower()
        return [(_pairs(version=hetlb.__version__, policy=policy, compiled=is_compiled), 1)]

    def times(self, what: str) -> Things:
        """Seconds by instance and part of its latency model, `model_expected_s` or `model_seen_s`."""
        return [
            (f'{label},part="{part}"', seconds)
            for label, each in self.counted
            for part, seconds in getattr(each, what).items()
        ]

    def states(self, label: str, states: Iterable[AdminState | Health], attribute: str) -> Things:
        """Every state of every instance, True for the one that it is in."""
        of = attrgetter(attribute)
        return [
            (f'{server},{label}="{state.value}"', of(each) is state)
            for state in states
            for server, each in self.instances
        ]

    def loads(self) -> Things:
        """Return the load of every model served or waited for. `saturation` above 1: requests wait."""
        queued, loads = self.scheduler.queue.by_model(), []
        for model in dict.fromkeys([*self.scheduler.fleet.ready, *queued]):
            able = [each for _, each in self.instances if each.routable and model in each.models]
            places, waiting = sum(each.max_num_seqs for each in able), queued.get(model, 0)
            running = sum(each.sequences for each in able)
            reserved = sum(each.kv_tokens for each in able)
            cache = sum(each.kv_cache_tokens for each in able)
            load = SimpleNamespace(
                queued=waiting,
                instances=len(able),
                free_places=max(0, places - running),
                saturation=max((running + waiting) / places, reserved / cache) if able else float(waiting),
                assumed=any(slots_source(each) is BeliefSource.ASSUMED for each in able),
            )
            loads.append((_pairs(model=model), load))
        return loads


Families: TypeAlias = tuple[tuple[Callable[[_Moment], Things | None], tuple[tuple[str, str, str], ...]], ...]
#: Sources of the things of each kind (None: its families are not on the page), and its families: name,
#: attribute of the thing ("": the thing itself), help. A name in
#: `_total` is a counter, every other one a gauge.
FAMILIES: Final[Families] = (
    (_Moment.build, (("hetlb_build_info", "", "Version, policy, whether the hot path is compiled."),)),
    (
        lambda moment: [
            (_pairs(outcome=end, cause=CAUSES[end], phase=phase, model=model, status=status), count)
            for (end, phase, model, status), count in moment.totals.requests.items()
        ],
        (("hetlb_requests_total", "", "Requests that ended, and whose doing it was."),),
    ),
    (
        lambda moment: [
            (f'{_pairs(model=model)},class="{_escape(name)}",met="{str(met).lower()}"', count)
            for (model, name, met), count in moment.totals.classes.items()
        ],
        (("hetlb_class_requests_total", "", "Requests of a service class that ended, by met targets."),),
    ),
    (
        lambda moment: [(_pairs(result=end), count) for end, count in moment.totals.kv_transfers.items()],
        (("hetlb_kv_transfers_total", "", "Requests prefilled at one instance for another, by result."),),
    ),
    (
        lambda moment: [
            (_pairs(model=model, reason=reason), count)
            for (model, reason), count in moment.totals.resumptions.items()
        ],
        (("hetlb_requests_resumed_total", "", "Answers that went on at another instance, by reason."),),
    ),
    (
        lambda moment: [(_pairs(result=end), count) for end, count in moment.totals.reloads.items()],
        (("hetlb_config_reloads_total", "", "Times the fleet file was read again, by result."),),
    ),
    (_Moment.model_states, (("hetlb_state", "", "State of a model: well, busy, degraded or down."),)),
    (_Moment.causes, (("hetlb_cause", "", "Causes of a state that is not well, while they last."),)),
    (
        lambda moment: [(label, each) for label, each in moment.fleet() if hasattr(each, "load")],
        (("hetlb_load_ratio", "load", "Arrivals over capacity of the worst model."),),
    ),
    (
        lambda moment: [(label, each) for label, each in moment.fleet() if hasattr(each, "capacity")],
        (
            ("hetlb_capacity_requests_per_second", "capacity", "Requests that its servers can serve."),
            ("hetlb_headroom_requests_per_second", "headroom", "Requests that could come beside."),
        ),
    ),
    (_Moment.fleet, (("hetlb_oldest_wait_seconds", "oldest", "Wait of the request that waits longest."),)),
    (
        lambda moment: [("", moment)],
        (
            ("hetlb_retries_total", "totals.retries", "Requests sent to another instance."),
            ("hetlb_decisions_total", "totals.decisions", "Dispatches decided."),
            (
                "hetlb_log_lost_lines_total",
                "source.lost_lines",
                "Lines of logs that a slow reader made us drop.",
            ),
            ("hetlb_queue_bytes", "scheduler.queue.bytes", "Bytes of the bodies waiting."),
            ("hetlb_queue_oldest_seconds", "oldest_s", "Age of the request that waits longest."),
        ),
    ),
    (
        _Moment.loads,
        (
            ("hetlb_queue_requests", "queued", "Requests waiting for an instance, by model."),
            ("hetlb_model_instances", "instances", "Instances of the model that take requests."),
            ("hetlb_model_saturation_ratio", "saturation", "Load over the slots, or the KV cache, if more."),
            ("hetlb_model_free_places", "free_places", "Sequences that could run besides those that do."),
            ("hetlb_model_capacity_assumed", "assumed", "1 while the slots of an instance are a guess."),
        ),
    ),
    (
        lambda moment: [
            (_pairs(tenant=tenant, model=model), each)
            for (tenant, model), each in moment.totals.accounts.items()
        ],
        (
            ("hetlb_tenant_requests_total", "requests", "Requests of the tenant that ended."),
            ("hetlb_tenant_prompt_tokens_total", "prompt_tokens", "Prompt tokens of its requests."),
            ("hetlb_tenant_output_tokens_total", "output_tokens", "Tokens generated for it."),
            ("hetlb_tenant_queue_seconds_total", "queue_s", "Time that its requests waited."),
        ),
    ),
    (
        lambda moment: None if moment.source.sharing is None else [("", moment.source.sharing)],
        (
            ("hetlb_shared_connected", "connected", "1 while the server of the shared state is reached."),
            ("hetlb_shared_peers", "peers", "Other processes whose leases are known."),
            ("hetlb_shared_peer_leases", "view.peer_leases", "Requests at the engines that are theirs."),
            ("hetlb_shared_delay_seconds", "view.delay_s", "Age of their news, by own messages coming back."),
        ),
    ),
    (
        lambda moment: (
            None
            if moment.source.sharing is None
            else [
                (_pairs(direction=each), getattr(moment.source.sharing, each))
                for each in ("sent", "received", "rejected")
            ]
        ),
        (("hetlb_shared_messages_total", "", "Messages of the shared state."),),
    ),
    (
        lambda moment: [
            (f'{label},figure="{figure}"', ratios)
            for label, each in moment.instances
            for figure, ratios in each.errors.by_figure
        ],
        (
            (
                "hetlb_forecast_bias",
                "bias",
                "Mean corrected forecast over mean true time - 1, newest answers.",
            ),
            ("hetlb_forecast_coverage", "coverage", "Share of them within their 90 % bound."),
        ),
    ),
    (
        lambda moment: [
            (f'{label},outcome="{outcome}"', count)
            for label, each in moment.counted
            for outcome, count in each.requests.items()
        ],
        (("hetlb_instance_requests_total", "", "Leases that ended, by instance and outcome."),),
    ),
    (
        attrgetter("counted"),
        (
            ("hetlb_instance_output_tokens_total", "output_tokens", "Tokens generated."),
            ("hetlb_instance_prompt_tokens_total", "prompt_tokens", "Tokens of prompts, each prompt once."),
            ("hetlb_instance_cached_prompt_tokens_total", "cached_prompt_tokens", "Those read from a cache."),
            (
                "hetlb_instance_expected_cached_prompt_tokens_total",
                "expected_cached_prompt_tokens",
                "Prompt tokens that were believed to be in the prefix cache when the request was sent.",
            ),
            ("hetlb_instance_ejections_total", "ejections", "Times it was taken out as dead."),
            ("hetlb_instance_stalls_total", "stalls", "Times it gave no token though it should."),
            ("hetlb_instance_predicted_seconds_total", "expected_s", "Predicted time of completed answers."),
            ("hetlb_instance_served_seconds_total", "served_s", "Their actual time, from dispatch on."),
        ),
    ),
    (
        lambda moment: moment.times("model_expected_s"),
        (("hetlb_instance_model_expected_seconds_total", "", "Times that the profile as it is expects."),),
    ),
    (
        lambda moment: moment.times("model_seen_s"),
        (("hetlb_instance_model_seen_seconds_total", "", "The same times as they were seen."),),
    ),
    (attrgetter("invalid"), (("hetlb_instance_invalid_samples_total", "", "Scrapes with absurd values."),)),
    (
        attrgetter("instances"),
        (
            ("hetlb_instance_in_flight", "in_flight", "Requests dispatched and not ended."),
            ("hetlb_instance_workload_seconds", "work_s", "Work assigned and not completed."),
            ("hetlb_instance_kv_reserved_tokens", "kv_tokens", "KV cache tokens reserved to requests."),
            ("hetlb_instance_kv_cache_tokens", "kv_cache_tokens", "KV cache tokens there are."),
            ("hetlb_instance_slots", "max_num_seqs", "Sequences that it is believed to run at once."),
            ("hetlb_instance_engines", "engines", "Data-parallel engines behind its URL."),
        ),
    ),
    (
        lambda moment: [
            (label, slots_source(each) is BeliefSource.ASSUMED) for label, each in moment.instances
        ],
        (("hetlb_instance_slots_assumed", "", "1 while that is vLLM's default, for want of knowledge."),),
    ),
    (
        lambda moment: [(label, each.sample) for label, each in moment.instances if each.sample is not None],
        (
            ("hetlb_instance_kv_reported_ratio", "kv_usage", "KV cache use the engine reports, 0 to 1."),
            ("hetlb_instance_kv_reported_max_ratio", "kv_usage_max", "Use of its fullest engine, 0 to 1."),
            ("hetlb_instance_reported_running", "running", "Requests running, as the engine reports."),
            ("hetlb_instance_reported_waiting", "waiting", "Requests waiting, as the engine reports."),
        ),
    ),
    (
        lambda moment: [
            (label, moment.now - each.sample_at)
            for label, each in moment.instances
            if each.sample_at is not None
        ],
        (("hetlb_instance_signal_age_seconds", "", "Age of the engine's last report."),),
    ),
    (
        lambda moment: moment.states("state", AdminState, "admin"),
        (("hetlb_instance_state", "", "1 for the administrative state in force."),),
    ),
    (
        lambda moment: moment.states("health", Health, "health.state"),
        (("hetlb_instance_health", "", "1 for the health in force."),),
    ),
    (
        lambda moment: [
            (_pairs(worker=each.number), each)
            for each in moment.source.workers or (WorkerState("0", True, 0),)
        ],
        (
            ("hetlb_worker_up", "up", "1 for a process that serves requests."),
            ("hetlb_worker_restarts_total", "restarts", "Times a process that serves was replaced."),
            ("hetlb_worker_hangs_total", "hangs", "Times it was killed because it no longer answered."),
        ),
    ),
)


#: The same of histograms.
HISTOGRAMS: Final[Families] = (
    (
        lambda moment: [("", moment.totals)],
        (("hetlb_loop_lag_seconds", "lag", "How late the event loop called a timer, sampled."),),
    ),
    (
        lambda moment: [(_pairs(model=model), each) for model, each in moment.totals.models.items()],
        (
            ("hetlb_time_to_first_token_seconds", "ttft", "From arrival to the first byte of a stream."),
            ("hetlb_inter_token_latency_seconds", "gaps", "Between two reads of a stream with text."),
            ("hetlb_e2e_request_latency_seconds", "e2e", "From arrival to the end of an answer."),
            ("hetlb_request_queue_time_seconds", "queue", "From arrival to the last dispatch, or the end."),
            ("hetlb_websocket_session_seconds", "session", "From dispatch to the end of a session."),
            ("hetlb_predicted_output_ratio", "output_ratio", "Predicted over actual output tokens."),
            ("hetlb_predicted_time_ratio", "time_ratio", "Predicted over actual time from the dispatch."),
        ),
    ),
    (
        lambda moment: [('event="arrival"', moment.totals.arrival), ('event="end"', moment.totals.end)],
        (("hetlb_decision_seconds", "", "Time of one call of the scheduler, by what happened."),),
    ),
)


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
        """Write all families in a fixed order, in pieces; between two of them the fleet may change."""
        moment = _Moment(self._source)
        for group in (*FAMILIES, *HISTOGRAMS):
            things_of, families = group
            if (things := things_of(moment)) is None:
                continue
            for name, attribute, help_text in families:
                of = attrgetter(attribute) if attribute else None
                kind = (
                    "histogram" if group in HISTOGRAMS else "counter" if name.endswith("_total") else "gauge"
                )
                yield f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"
                for at in range(0, len(things), _LINES):
                    some = [(label, of(each) if of else each) for label, each in things[at : at + _LINES]]
                    yield "".join([_series(name, *pair) for pair in some if pair[1] is not None])
        yield generate_latest(self._process).decode()


def _series(name: str, label: str, value: float | Histogram | GapHistogram) -> str:
    """Return the line of one figure, the lines of a histogram."""
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
    """Return the value of a label. Quotes would end it; what is not printable becomes a question mark."""
    if not text.isprintable():
        text = "".join(each if each.isprintable() else "?" for each in text)
    return text.replace("\\", r"\\").replace('"', r"\"")


def _pairs(**labels: str) -> str:
    """Labels without the braces around them."""
    return ",".join([f'{name}="{_escape(value)}"' for name, value in labels.items()])


def usage_document(totals: Totals) -> list[dict[str, Any]]:
    """Return the entries of `GET /v1/usage`: one for every tenant and model."""
    return [
        {"tenant": tenant or None, "model": model, **{name: getattr(each, name) for name in ACCOUNT_COUNTS}}
        for (tenant, model), each in sorted(totals.accounts.items())
    ]
