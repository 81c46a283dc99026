"""What is counted of requests, models and instances: counters that only grow, and histograms."""

from __future__ import annotations

from typing import Final

from hetlb.core.types import Outcome
from hetlb.proxy.exchange import Exchange
from hetlb.proxy.histograms import Gaps, Histogram

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
QUEUE_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
#: Of predictions: predicted over actual.
RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.11, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
DECISION_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1)
LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

#: Seconds expected of a part of a latency model before what was seen says anything.
LEAST_EVIDENCE_S: Final = 1.0
#: What the event loop's clock tells apart.
CLOCK_S: Final = 0.001
#: Names of models that get series of their own; engines may list many adapters. The rest is `other`.
MODELS_MAX: Final = 64
OTHER_MODELS: Final = "other"


#: What there is of every model, and of every instance.
MODEL_HISTOGRAMS = ("e2e", "gaps", "output_ratio", "queue", "time_ratio", "ttft")
INSTANCE_COUNTS = (
    "decode_expected_s", "decode_seen_s", "ejections", "expected_s", "mixed_expected_s", "mixed_seen_s",
    "output_tokens", "prefill_expected_s", "prefill_seen_s", "prompt_tokens", "served_s",
)  # fmt: skip


class ModelTotals:
    """What is counted by the name that clients asked for."""

    __slots__ = MODEL_HISTOGRAMS

    def __init__(self) -> None:
        self.ttft = Histogram(TTFT_S)
        self.gaps = Gaps(ITL_S)
        self.e2e = Histogram(E2E_S)
        self.queue = Histogram(QUEUE_S)
        self.output_ratio = Histogram(RATIOS)
        self.time_ratio = Histogram(RATIOS)


class InstanceTotals:
    """What is counted by instance."""

    __slots__ = (*INSTANCE_COUNTS, "requests")

    def __init__(self) -> None:
        #: By outcome.
        self.requests: dict[str, int] = {}
        self.output_tokens = 0
        self.prompt_tokens = 0
        self.ejections = 0
        #: Of answers that completed, from dispatch to the end: as foreseen and as it was.
        self.expected_s = 0.0
        self.served_s = 0.0
        #: What the latency model as profiled says, and what was seen: times to the first token with nothing
        #: beside them, steps without prompts beside them, and what had both.
        self.prefill_expected_s = self.prefill_seen_s = 0.0
        self.decode_expected_s = self.decode_seen_s = 0.0
        self.mixed_expected_s = self.mixed_seen_s = 0.0

    def first_token(self, expected_s: float, seen_s: float, mixed: bool) -> None:
        """A first token came; `mixed`: prompts or decodes were beside it."""
        if mixed:
            self.mixed_expected_s += expected_s
            self.mixed_seen_s += seen_s
        else:
            self.prefill_expected_s += expected_s
            self.prefill_seen_s += seen_s

    def decoded(self, expected_s: float, seen_s: float, mixed: bool) -> None:
        """The steps of an answer have ended; `mixed`: prompts were beside them."""
        if mixed:
            self.mixed_expected_s += expected_s
            self.mixed_seen_s += seen_s
        else:
            self.decode_expected_s += expected_s
            self.decode_seen_s += seen_s

    def model_factors(self) -> dict[str, float | None]:
        """Seen over expected time by part of the latency model; None where too little was seen."""
        return {
            part: seen_s / expected_s if expected_s >= LEAST_EVIDENCE_S else None
            for part, expected_s, seen_s in (
                ("prefill", self.prefill_expected_s, self.prefill_seen_s),
                ("mixed", self.mixed_expected_s, self.mixed_seen_s),
                ("decode", self.decode_expected_s, self.decode_seen_s),
            )
        }

    def ended(self, outcome: Outcome) -> None:
        """A lease on it ended."""
        name = outcome._value_  # `value` and the hash of a member are functions in Python
        self.requests[name] = self.requests.get(name, 0) + 1


class Totals:
    """Counters that only grow, bumped by the driver as things happen."""

    __slots__ = (
        "arrival",
        "decisions",
        "end",
        "instances",
        "lag",
        "models",
        "reloads",
        "requests",
        "retries",
    )

    def __init__(self) -> None:
        #: By outcome and phase.
        self.requests: dict[tuple[str, str], int] = {}
        self.decisions = 0
        self.retries = 0
        self.reloads = {"done": 0, "refused": 0}
        self.models: dict[str, ModelTotals] = {}
        self.instances: dict[str, InstanceTotals] = {}
        #: Seconds of the scheduler's calls: for a request that arrived, for one that ended.
        self.arrival = Histogram(DECISION_S)
        self.end = Histogram(DECISION_S)
        self.lag = Histogram(LAG_S)

    def model(self, name: str) -> ModelTotals:
        """The counters of a name that the fleet serves."""
        totals = self.models.get(name)
        if totals is None:
            if len(self.models) >= MODELS_MAX:
                name = OTHER_MODELS
            totals = self.models.setdefault(name, ModelTotals())
        return totals

    def instance(self, name: str) -> InstanceTotals:
        """The counters of an instance."""
        totals = self.instances.get(name)
        if totals is None:
            totals = self.instances[name] = InstanceTotals()
        return totals

    def tried_again(self, name: str, outcome: Outcome) -> None:
        """A lease on an instance ended, and its request goes on."""
        self.retries += 1
        self.instance(name).ended(outcome)

    def count(self, outcome: Outcome, phase: str) -> None:
        """A request ended."""
        key = (outcome._value_, phase)
        self.requests[key] = self.requests.get(key, 0) + 1

    def finished(self, exchange: Exchange, served: bool) -> None:
        """A request has its outcome; `served` says whether the fleet knows the name it asked for."""
        outcome, ended_at = exchange.outcome, exchange.ended_at
        assert outcome is not None
        assert ended_at is not None
        self.count(outcome, exchange.ended_in._value_)
        if not served:
            return
        request, lease, arrived_at = exchange.request, exchange.lease, exchange.arrived_at
        model = self.model(request.model)
        dispatched_at = exchange.dispatched_at
        model.queue.observe((ended_at if dispatched_at is None else dispatched_at) - arrived_at)
        if lease is None:
            return
        instance = self.instance(lease.instance)
        instance.ended(outcome)
        instance.output_tokens += lease.output_tokens
        instance.prompt_tokens += (exchange.prompt_tokens_used or request.prompt_tokens) * request.sequences
        if exchange.streamed and exchange.first_byte_at is not None:
            model.ttft.observe(exchange.first_byte_at - arrived_at)
            if exchange.expected_first_s > 0.0 and request.generates:
                seen_s = exchange.first_byte_at - lease.dispatched_at
                instance.first_token(exchange.expected_first_s, seen_s, exchange.mixed)
        if lease.evidence is not None:
            expected_s, seen_s, mixed = lease.evidence
            instance.decoded(expected_s, seen_s, mixed)
        if outcome is not Outcome.OK:
            return
        model.e2e.observe(ended_at - arrived_at)
        if request.generates and lease.output_tokens:
            served_s = ended_at - lease.dispatched_at
            model.output_ratio.observe(lease.predicted_output * request.sequences / lease.output_tokens)
            instance.expected_s += exchange.expected_s
            instance.served_s += served_s
            model.time_ratio.observe(exchange.expected_s / max(served_s, CLOCK_S))
