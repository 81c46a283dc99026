"""Requests of a simulated fleet on their way, and the sequences that engines run for them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Lease, Outcome, Role
from hetlb.tools.sim.engine_sequence import EngineSequence
from hetlb.tools.sim.fleet_engine import FleetEngine
from hetlb.tools.workload.arrivals import PlannedRequest
from hetlb.tools.workload.records import RequestResult
from hetlb.tools.workload.rows import Span


class Flight:
    """A request in flight: its scheduler, lease and running sequences."""

    __slots__ = (
        "engine",
        "held",
        "lease",
        "outcome",
        "planned",
        "record",
        "running",
        "scheduler",
        "sequences",
    )

    def __init__(self, planned: PlannedRequest) -> None:
        self.planned = planned
        self.record = RequestResult(
            planned.scheduled_s,
            planned.input_tokens,
            sequences=planned.sequences,
            service=planned.row.service,
        )
        self.scheduler: Scheduler | None = None
        self.lease: Lease | None = None
        self.outcome: Outcome | None = None
        self.running = planned.sequences
        self.engine: FleetEngine | None = None
        #: Sequences sent to its engine.
        self.sequences: list[EngineRun] = []
        #: Its prompt on the prefill engine, until the decode engine has fetched it.
        self.held: tuple[FleetEngine, EngineRun] | None = None

    @property
    def leased(self) -> tuple[Scheduler, Lease]:
        """Its scheduler and lease, once it has one."""
        assert self.scheduler is not None, "expected a request that has arrived"
        assert self.lease is not None, "expected a request with a lease"
        return self.scheduler, self.lease


class EngineRun(EngineSequence):
    """One sequence of a request in an engine; `paused_s`: when it got its last token before a preemption.

    `leg`: of a split request, the part that runs there; `BOTH` is all of it.
    """

    __slots__ = ("flight", "leg", "paused_s")

    def __init__(
        self, flight: Flight, pieces: tuple[Span, ...], answer: Hashable | None, leg: Role = Role.BOTH
    ) -> None:
        planned, prefill = flight.planned, leg is Role.PREFILL
        super().__init__(
            planned.prompt_tokens,
            1 if prefill else planned.answer_tokens,
            pieces=pieces,
            answer=None if prefill else answer,
            remote_tokens=planned.prompt_tokens if leg is Role.DECODE else 0,
            held=prefill,
            adapter=planned.row.adapter,
        )
        self.flight = flight
        self.leg = leg
        self.paused_s = 0.0


def leg_sequences(flight: Flight, leg: Role) -> list[EngineRun]:
    """Return the sequences of a request: each of its prompts, which begin alike, `n` times."""
    planned, content = flight.planned, flight.planned.content
    own = planned.prompt_tokens - sum(length for _, length in content.spans)
    runs = []
    for prompt in range(planned.row.sequences):
        pieces = content.spans
        if planned.row.n > 1 and own:
            pieces = (*pieces, ((planned.index, prompt), own))
        runs += [EngineRun(flight, pieces, content.answer, leg) for _ in range(planned.row.n)]
    return runs


def sequences_of(planned: PlannedRequest) -> Sequence[EngineSequence]:
    """Return the engine's sequences of an unsplit request."""
    return leg_sequences(Flight(planned), Role.BOTH)
