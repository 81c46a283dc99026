"""One engine of a simulated fleet: an engine model, the iterations it has in flight, and their events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.pickle_by_fields import PickleByFields
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.engine_model import EngineModel
from hetlb.tools.sim.engine_sequence import EngineSequence
from hetlb.tools.sim.event_queue import EventQueue
from hetlb.tools.sim.iteration_times import IterationEnd, IterationRule, IterationRun
from hetlb.tools.workload.arrivals import PlannedRequest

# Kinds of events, in their order at the same instant: work ends, then the world changes, then engines begin
# anew, so that requests that arrive together are in the same batch. A look at the fleet comes last: it
# changes nothing.
END: Final = 0
FETCHED: Final = 1
EXPIRED: Final = 2
ARRIVAL: Final = 3
CHANGE: Final = 4
SUBMIT: Final = 5
RESTART: Final = 6
SCRAPE: Final = 8  # 7: news of other schedulers (tests/options/peers/shared_simulation.py)
TICK: Final = 9
BEGIN: Final = 10
LOOK: Final = 11


@dataclass(frozen=True, slots=True)
class EngineSpec(PickleByFields):
    """The engine, or `ranks` data-parallel engines alike, of one server: the speed and capacity of each.

    `changes` are pairs of a time (s) and a factor on the duration of iterations begun from then on.
    `prefix_cache`: whether it keeps the blocks of prompts for later ones that begin alike. `max_model_len` is
    the most tokens of one sequence, if that is less than its KV cache holds. `adapter_load_s`: seconds to
    load a LoRA adapter that none of its slots holds.
    """

    latency: LatencyModel
    limits: EngineLimits
    changes: tuple[tuple[float, float], ...] = ()
    prefix_cache: bool = False
    max_model_len: int | None = None
    adapter_load_s: float = 0.0
    ranks: int = 1

    def model(self, rule: IterationRule) -> EngineModel:
        """Return a new, empty engine."""
        return EngineModel(
            self.latency,
            self.limits,
            rule,
            prefix_cache=self.prefix_cache,
            adapter_load_s=self.adapter_load_s,
        )

    def fits(self, planned: PlannedRequest) -> bool:
        """Return True if it can run every sequence of a request to its end."""
        tokens = planned.prompt_tokens + max(1, planned.answer_tokens)
        most = self.limits.max_sequence_tokens
        return tokens <= (most if self.max_model_len is None else min(most, self.max_model_len))


class FleetEngine:
    """An engine model in virtual time: its `END` and `BEGIN` events are put into `events`."""

    __slots__ = ("_begin_pending", "_events", "_version", "model", "name", "sent", "spec", "started_s")

    def __init__(self, name: str, spec: EngineSpec, rule: IterationRule, events: EventQueue) -> None:
        self.name = name
        self.spec = spec
        self.model = spec.model(rule)
        #: Sequences that were sent to it and have not ended.
        self.sent = 0
        #: Start of the iterations in flight, in seconds.
        self.started_s = 0.0
        self._events = events
        self._version = 0  # of the end that was announced last: earlier ones are void
        self._begin_pending = False

    def kv_usage(self) -> float:
        """Return the fraction of the KV blocks in use now."""
        model = self.model
        return model.kv_used_blocks_at(self._events.now - self.started_s) / model.kv.pool.total_blocks

    def submit(self, sequences: Sequence[EngineSequence]) -> None:
        """Give it sequences that arrive now."""
        model = self.model
        interrupts = model.in_flight is not None and not model.admission_blocked
        for sequence in sequences:
            model.submit(sequence, self._events.now - self.started_s)
        if interrupts:
            self.cut(for_arrival=True)
        self.wake()

    def wake(self) -> None:
        """Begin iterations at this instant, unless some are in flight."""
        if self.model.in_flight is None and not self._begin_pending:
            self._begin_pending = True
            self._events.push(self._events.now, BEGIN, self)

    def begin(self) -> None:
        """Begin iterations, if there is something to do."""
        self._begin_pending = False
        stretch = self.model.begin_run()
        if stretch is not None:
            self.started_s = self._events.now
            self._announce_end(stretch)

    def cut(self, *, for_arrival: bool) -> None:
        """End the iterations in flight with the one that runs now, as `EngineModel.cut` does."""
        if self.model.in_flight is not None:
            self._announce_end(self.model.cut(self._events.now - self.started_s, for_arrival=for_arrival))

    def _announce_end(self, stretch: IterationRun) -> None:
        self._version += 1
        self._events.push(self.started_s + stretch.duration_s, END, (self, self._version))

    def end(self, version: int) -> IterationEnd | None:
        """End the iterations in flight; None if they were cut since the event of this version."""
        return self.model.end_iteration() if version == self._version else None

    def slow_down(self, latency: LatencyModel) -> None:
        """Give it other times, from the next iteration on."""
        self.model.latency = latency
        self.cut(for_arrival=False)
