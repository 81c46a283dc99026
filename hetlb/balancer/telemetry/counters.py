"""Counters and histograms of requests, models and instances. They only grow."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence, Set
from itertools import accumulate, repeat
from operator import add, mul
from typing import Any, Final

from hetlb.balancer.core.types import Lease, Outcome
from hetlb.balancer.telemetry.recent import Recent
from hetlb.balancer.telemetry.request_record import RequestRecord

#: Milliseconds of a gap below which gaps are counted by the millisecond.
FINE_MS: Final = 2048
#: Values of a histogram counted at once: of 256 each costs 690 instructions compiled, of 64 1,060, a binary
#: search for each 1,220.
_BATCH_VALUES: Final = 256


class Histogram:
    """Counts of values at or below each bound, in Prometheus' sense. Values are counted in batches."""

    __slots__ = ("_bounds", "_counts", "_total", "_values")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        #: Values at or below each bound; the last one is of all.
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0
        #: Values that are not counted yet.
        self._values: list[float] = []

    def observe(self, value: float) -> None:
        self._values.append(value)
        if len(self._values) >= _BATCH_VALUES:
            self._count()

    def _count(self) -> None:
        """Count the values that wait."""
        values = self._values
        if values:
            values.sort()
            below = [*map(bisect_right, repeat(values), self._bounds), len(values)]
            self._counts = list(map(add, self._counts, below))
            self._total += sum(values)
            values.clear()

    def add(self, other: Histogram) -> None:
        """Count the values of another histogram of the same bounds too."""
        self._counts = list(map(add, self._counts, other._counts))
        self._total += other._total
        self._values += other._values

    def figures(self) -> tuple[Sequence[float], list[int], float]:
        """Return the bounds, counts up to each (and, last, of all), and the sum."""
        self._count()
        return self._bounds, self._counts.copy(), self._total

    def __reduce__(self) -> tuple[Any, ...]:
        return _histogram, (self._bounds, self._counts, self._total, self._values)


def _histogram(bounds: list[float], counts: list[int], total: float, values: list[float]) -> Histogram:
    histogram = Histogram(bounds)
    histogram._counts, histogram._total, histogram._values = counts, total, values
    return histogram


class GapHistogram:
    """Times between the tokens of streams, to the millisecond.

    The owner of a stream adds one to `fine[milliseconds]` itself; `FINE_MS` or longer is given to `long`.
    """

    __slots__ = ("_bounds", "fine", "longer")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self.longer = Histogram(bounds)
        self.fine = [0] * FINE_MS

    def long(self, gap_s: float) -> None:
        """Count a gap of `FINE_MS` milliseconds or more."""
        self.longer.observe(gap_s)

    def figures(self) -> tuple[Sequence[float], list[int], float]:
        _, counts, total_s = self.longer.figures()
        sums = list(accumulate(self.fine))
        for index, bound in enumerate(self._bounds):
            counts[index] += sums[min(FINE_MS - 1, round(bound * 1e3))]
        counts[-1] += sums[-1]
        return self._bounds, counts, total_s + sum(map(mul, self.fine, range(FINE_MS))) / 1e3

    def __reduce__(self) -> tuple[Any, ...]:
        return _gaps, (self._bounds, self.longer, self.fine)


def _gaps(bounds: tuple[float, ...], long: Histogram, fine: list[int]) -> GapHistogram:
    gaps = GapHistogram(bounds)
    gaps.longer, gaps.fine = long, fine
    return gaps


#: vLLM's own bounds (0.32), so that its figures and ours can be laid over each other; ITL and E2E have a
#: finer first one.
TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_S = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
E2E_S = (
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
#: Durations of sessions, as vLLM's `websocket_connection_duration_seconds`.
SESSION_S = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
QUEUE_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
#: Of predictions: predicted over actual.
RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.11, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
DECISION_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1)
LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_OK: Final = Outcome.OK
#: Status of a request that became a WebSocket session.
_SWITCHED: Final = 101
#: Label `status` of a request by the hundreds of its status, 0 without one. A session is well.
STATUS_CLASSES: Final = ("none", "2xx", "2xx", "2xx", "4xx", "5xx")
#: Resolution of the event loop's clock, seconds.
CLOCK_S: Final = 0.001
#: Models with series of their own (engines may list many adapters); further ones are `other`.
MAX_MODELS: Final = 64
OTHER_MODELS: Final = "other"
OTHER_TENANTS: Final = "other"


#: Attributes of the totals of a model and of an instance that can be added up.
MODEL_HISTOGRAMS = ("e2e", "gaps", "output_ratio", "queue", "session", "time_ratio", "ttft")
INSTANCE_COUNTS = (
    "cached_prompt_tokens", "ejections", "expected_cached_prompt_tokens", "expected_s", "output_tokens",
    "prompt_tokens", "served_s", "stalls",
)  # fmt: skip
#: Parts of a latency model: times to the first token with nothing beside them, what had prompts and decodes
#: beside each other, and steps without prompts.
PARTS: Final = ("prefill", "mixed", "decode")


ACCOUNT_COUNTS = ("cached_prompt_tokens", "output_tokens", "prompt_tokens", "queue_s", "requests")
#: Accounts of their own (a header may name tenants); further ones are `other`.
MAX_ACCOUNTS: Final = 4096


class ModelTotals:
    """Histograms of one model, by the name that clients ask for."""

    __slots__ = MODEL_HISTOGRAMS

    def __init__(self) -> None:
        self.ttft = Histogram(TTFT_S)
        self.gaps = GapHistogram(ITL_S)
        self.e2e = Histogram(E2E_S)
        self.queue = Histogram(QUEUE_S)
        self.session = Histogram(SESSION_S)
        self.output_ratio = Histogram(RATIOS)
        self.time_ratio = Histogram(RATIOS)


class PartTimes:
    """Seconds of one part of a latency model: as profiled, and as seen."""

    __slots__ = ("expected_s", "seen_s")

    def __init__(self) -> None:
        self.expected_s = self.seen_s = 0.0


class InstanceTotals:
    """Counters of one instance."""

    __slots__ = (*INSTANCE_COUNTS, "parts", "requests")

    def __init__(self) -> None:
        #: By outcome.
        self.requests: dict[str, int] = {}
        self.output_tokens = 0
        #: Tokens of all prompts, each prompt once; prompt tokens that the engine read from its prefix cache.
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        #: Tokens of prompts that were believed to be there at dispatch.
        self.expected_cached_prompt_tokens = 0
        self.ejections = 0
        self.stalls = 0
        #: Seconds from dispatch to the end of answers that completed, predicted and actual.
        self.expected_s = 0.0
        self.served_s = 0.0
        #: By part of the latency model.
        self.parts = {part: PartTimes() for part in PARTS}

    def took(self, part: str, expected_s: float, seen_s: float) -> None:
        times = self.parts[part]
        times.expected_s += expected_s
        times.seen_s += seen_s

    def ended(self, outcome: str, output_tokens: int = 0) -> None:
        self.output_tokens += output_tokens
        self.requests[outcome] = self.requests.get(outcome, 0) + 1


class AccountTotals:
    """Use of one model by one tenant."""

    __slots__ = ACCOUNT_COUNTS

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.cached_prompt_tokens = self.output_tokens = 0
        self.queue_s = 0.0


#: Results of a KV transfer (docs/disaggregation.md).
KV_TRANSFER_RESULTS: Final = (
    "done", "not_fetched", "late", "no_params", "no_bootstrap", "decode_error", "decode_failed",
    "prefill_failed", "prefill_error",
)  # fmt: skip


class Totals:
    """All counters of one process. The driver increments them."""

    # Compiled, it is pickled by these.
    __slots__ = (
        "accounts", "arrival", "classes", "decisions", "end", "instances", "kv_transfers", "lag", "models",
        "recent", "reloads", "requests", "resumptions", "retries",
    )  # fmt: skip

    def __init__(self) -> None:
        #: By outcome, phase, model ("" where none was read) and class of the status.
        self.requests: dict[tuple[str, str, str, str], int] = {}
        #: Requests by model, service class, and whether they met every target of it.
        self.classes: dict[tuple[str, str, bool], int] = {}
        self.decisions = 0
        self.retries = 0
        #: Answers that went on at another instance, by model and reason.
        self.resumptions: dict[tuple[str, str], int] = {}
        #: Transfers of a request's KV blocks from one instance to another, by result.
        self.kv_transfers = dict.fromkeys(KV_TRANSFER_RESULTS, 0)
        self.reloads = {"done": 0, "refused": 0}
        self.models: dict[str, ModelTotals] = defaultdict(ModelTotals)
        self.instances: dict[str, InstanceTotals] = defaultdict(InstanceTotals)
        #: By tenant ("" without one) and model.
        self.accounts: dict[tuple[str, str], AccountTotals] = defaultdict(AccountTotals)
        #: Seconds of the scheduler's calls: for a request that arrived, for one that ended.
        self.arrival = Histogram(DECISION_S)
        self.end = Histogram(DECISION_S)
        self.lag = Histogram(LAG_S)
        #: The requests that ended lately.
        self.recent = Recent()

    def model(self, name: str) -> ModelTotals:
        """Return the counters of a name that the fleet serves."""
        return self.models[self._label(name)]

    def _label(self, model: str) -> str:
        """Return the label of a model: one name for all beyond `MAX_MODELS`."""
        return model if model in self.models or len(self.models) < MAX_MODELS else OTHER_MODELS

    def keep(self, names: Set[str]) -> None:
        """Forget the instances that are not among these: they left."""
        for name in self.instances.keys() - names:
            del self.instances[name]

    def account(self, tenant: str | None, model: str) -> AccountTotals:
        key = (tenant or "", model)
        account = self.accounts.get(key)
        if account is None:
            full = len(self.accounts) >= MAX_ACCOUNTS
            account = self.accounts[(OTHER_TENANTS, OTHER_MODELS) if full else key]
        return account

    def tried_again(self, name: str, outcome: Outcome) -> None:
        self.retries += 1
        self.instances[name].ended(outcome._value_)

    def resumed(self, model: str, reason: str, outcome: Outcome, lease: Lease) -> None:
        """Note that an answer continues at another instance, after a part of it came from this lease."""
        key = (model, reason)
        self.resumptions[key] = self.resumptions.get(key, 0) + 1
        self.instances[lease.instance].ended(outcome._value_, lease.output_tokens)

    def kv_transferred(self, result: str, count: int = 1) -> None:
        self.kv_transfers[result] += count

    def count(self, outcome: str, phase: str, model: str, status: int) -> None:
        """Note that a request ended. `model` is one that the fleet serves, `OTHER_MODELS` or ""."""
        label = model and self._label(model)
        key = (outcome, phase, label, STATUS_CLASSES[status // 100 if status < 600 else 5])
        self.requests[key] = self.requests.get(key, 0) + 1

    def believed(self, lease: Lease, instance: InstanceTotals) -> None:
        """Count the scheduler's expectations of an ended lease: cached prompt tokens, decode time."""
        if lease.shared is not None:
            prompts = lease.request.sequences // max(1, lease.request.samples)
            instance.expected_cached_prompt_tokens += prompts * lease.shared.held_tokens
        if lease.seen_s > 0.0:
            instance.took("mixed" if lease.mixed else "decode", lease.expected_s, lease.seen_s)

    def finished(self, record: RequestRecord, served: bool) -> None:
        """Count an ended request; `served` says whether the fleet serves its model."""
        outcome, ended_at = record.outcome, record.ended_at
        assert outcome is not None
        assert ended_at is not None
        request, lease, name = record.request, record.lease, outcome._value_  # `value` is a Python function
        ttft_s, e2e_s, queue_s = record.ttft_s, record.e2e_s, record.queue_s
        prompt_tokens, cached_tokens = record.prompt_tokens_total, record.cached_tokens or 0
        self.recent.finished(record)
        if not served:  # a client may have made up the name of its model
            label = OTHER_MODELS if request.model else ""
            self.count(name, record.ended_in._value_, label, record.status)
            return
        model = self.model(request.model)
        self.count(name, record.ended_in._value_, request.model, record.status)
        if request.service.name and outcome is not Outcome.CLIENT_GONE:
            key = (request.model, request.service.name, outcome is _OK and _met(record))
            self.classes[key] = self.classes.get(key, 0) + 1
        model.queue.observe(queue_s)
        account = self.account(request.tenant, request.model)
        account.requests += 1
        account.queue_s += queue_s
        if lease is None:
            return
        account.prompt_tokens += prompt_tokens
        account.cached_prompt_tokens += cached_tokens
        account.output_tokens += record.output_tokens
        instance = self.instances[lease.instance]
        instance.ended(name, lease.output_tokens)
        instance.prompt_tokens += prompt_tokens
        instance.cached_prompt_tokens += cached_tokens
        if record.streamed and ttft_s is not None:
            model.ttft.observe(ttft_s)
            if (
                lease.expected_first_s > 0.0
                and not record.resumed
                and request.generates
                and record.first_byte_at is not None
            ):
                seen_s = record.first_byte_at - lease.dispatched_at
                instance.took("mixed" if lease.beside else "prefill", lease.expected_first_s, seen_s)
        self.believed(lease, instance)
        if record.status == _SWITCHED:
            model.session.observe(ended_at - lease.dispatched_at)
            return
        if outcome is not _OK:
            return
        model.e2e.observe(e2e_s)
        if request.generates and lease.output_tokens and not record.resumed:
            served_s = ended_at - lease.dispatched_at
            model.output_ratio.observe(lease.predicted_output * request.sequences / lease.output_tokens)
            instance.expected_s += lease.forecast_end_s
            instance.served_s += served_s
            model.time_ratio.observe(lease.forecast_end_s / max(served_s, CLOCK_S))


def _met(record: RequestRecord) -> bool:
    """Return True if an answer met the targets of its class; the first token of a whole answer is unseen."""
    request, ttft_s = record.request, record.ttft_s if record.streamed else 0.0
    tokens = record.output_tokens // max(1, request.sequences)
    return request.service.met(ttft_s or 0.0, record.e2e_s, tokens)
