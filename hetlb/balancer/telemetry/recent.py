"""The last minutes, for the dashboard and the status: ended and waiting requests by stretches of time, and
paces of engines.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from hetlb.balancer.core.evidence.clients import session_of
from hetlb.balancer.core.types import CAUSES, Outcome
from hetlb.balancer.telemetry.request_record import RequestRecord

if TYPE_CHECKING:
    from hetlb.balancer.core.instance import Instance
    from hetlb.balancer.core.scheduler import Scheduler
    from hetlb.balancer.core.speed import Mark, SpeedTracker

#: Number of bins of the series, and seconds of each: five minutes.
BINS: Final = 150
BIN_S: Final = 2.0
#: Answers kept as points, the newest.
KEPT_POINTS: Final = 400
#: Most instances with kept levels: the page has colours for fewer.
KEPT_LEVELS: Final = 16
#: Most bins that a sample may stand for.
MOST_LATE_BINS: Final = 5
#: Seconds over which tokens that an engine counted are compared with its profile.
PACE_S: Final = 3.0
#: Latencies are counted in steps of 2^(1/16): 4.4 %, from some 0.1 ms on.
_STEPS_PER_OCTAVE: Final = 16.0
#: The same for each factor e.
_STEPS_PER_E: Final = 16.0 / math.log(2.0)
_LEAST_S: Final = 1e-4
#: Share of the largest lag kept from one sweep to the next; twenty of them are ten seconds.
_LAG_KEPT: Final = 0.9
#: Sessions of clients whose failures are counted apart, in one interval at one instance; all others.
_MOST_SESSIONS: Final = 16
_OTHER_SESSIONS: Final = " "
_OK: Final = Outcome.OK
_REFUSED: Final = Outcome.UPSTREAM_REFUSED
#: Requests that wait by model; requests in flight, and the share of the KV cache reserved, by instance;
#: requests that came so far by model; the time of the sample.
Levels: TypeAlias = tuple[dict[str, int], dict[str, tuple[int, float]], dict[str, int], float]


def add_counts(whole: dict[Any, Any], part: dict[Any, Any]) -> None:
    for key, count in part.items():
        whole[key] = whole.get(key, 0) + count


class InstanceShare:
    """Requests of one instance: all that ended, and their tokens; by client's session, the failed ones."""

    __slots__ = ("ended", "failures", "output_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.ended = self.prompt_tokens = self.output_tokens = 0
        self.failures: dict[str, int] = {}

    @property
    def failed(self) -> int:
        """Requests that failed by an engine's doing."""
        return sum(self.failures.values())

    def add(self, other: InstanceShare) -> None:
        self.ended += other.ended
        add_counts(self.failures, other.failures)
        self.prompt_tokens += other.prompt_tokens
        self.output_tokens += other.output_tokens


class Stretch:
    """Requests that ended in one interval: outcomes, shares of instances, histograms of latencies.

    `levels` are a sample of the process that has the scheduler, None without one.
    """

    __slots__ = ("e2e", "levels", "outcomes", "refusals", "shares", "ttft")

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        #: Refusals of engines that clients got, by status.
        self.refusals: dict[int, int] = {}
        self.shares: dict[str, InstanceShare] = {}
        self.ttft: dict[int, int] = {}
        self.e2e: dict[int, int] = {}
        self.levels: Levels | None = None

    def share(self, instance: str) -> InstanceShare:
        share = self.shares.get(instance)
        if share is None:
            share = self.shares[instance] = InstanceShare()
        return share

    def add(self, other: Stretch) -> None:
        add_counts(self.outcomes, other.outcomes)
        add_counts(self.refusals, other.refusals)
        add_counts(self.ttft, other.ttft)
        add_counts(self.e2e, other.e2e)
        for instance, share in other.shares.items():
            self.share(instance).add(share)


def _count(counts: dict[int, int], seconds: float) -> None:
    step = math.floor(_STEPS_PER_E * math.log(max(seconds, _LEAST_S)))
    counts[step] = counts.get(step, 0) + 1


def latencies(counts: dict[int, int]) -> list[tuple[float, int]]:
    """Return the seconds at the middle of each step with the number of values there, in order."""
    return [(2.0 ** ((step + 0.5) / _STEPS_PER_OCTAVE), counts[step]) for step in sorted(counts)]


class EnginePace:
    """Pace of one engine by its own counts of tokens: answers show a speed only as they end.

    `value`: times as long as by its profile that tokens of the last seconds took, by the last count and by
    the last two at least; 0.0 if it is not known.
    """

    __slots__ = ("_counts", "_newest", "speed", "value")

    def __init__(self, speed: SpeedTracker) -> None:
        #: Evidence of a server with one profile; another one's is no continuation.
        self.speed = speed
        #: Counts of the last seconds: tokens, time, work.
        self._counts: list[tuple[int, float, Mark]] = []
        self._newest = self.value = 0.0

    def look(self, instance: Instance) -> None:
        """Take in the last count, if it is new; a plain answer hides when its tokens began."""
        sample, now, mark = instance.sample, instance.sample_at, instance.sample_mark
        if not all(lease.request.streamed for lease in instance.leases.values()):
            self.value = 0.0
            return
        if sample is None or sample.answered is None or now is None or mark is None:
            return
        counts, tokens = self._counts, sample.answered
        if counts and now <= counts[-1][1]:
            return
        if counts and tokens < counts[-1][0]:
            counts.clear()  # another process
        counts.append((tokens, now, mark))
        while len(counts) > 2 and now - counts[1][1] >= PACE_S:
            del counts[0]
        before, at, since = counts[0]
        seconds = now - at - (mark.stood_s - since.stood_s)
        newest, self._newest = self._newest, 0.0
        if seconds >= PACE_S and tokens > before:
            running = (mark.sequence_s - since.sequence_s) / seconds
            if running >= 1.0:
                steps, budget = (tokens - before) / running, instance.token_budget
                expected = self.speed.expected(instance.nominal, since, mark, seconds, steps, budget)
                self._newest = seconds / expected[0]
        self.value = min(newest, self._newest)


class Recent:
    """The stretches of the last minutes by their numbers, and points: predicted and actual times.

    A point is the end's time, the instance, predicted and actual output tokens of one sequence, predicted and
    actual seconds from dispatch on.
    """

    __slots__ = ("lag_s", "own", "paces", "points", "stretches")

    def __init__(self) -> None:
        #: Trouble of this proxy itself by its cause: the last time, and why.
        self.own: dict[str, tuple[float, str]] = {}
        #: Largest lag of the event loop lately.
        self.lag_s = 0.0
        self.stretches: dict[int, Stretch] = {}
        #: By instance.
        self.paces: dict[str, EnginePace] = {}
        self.points: list[tuple[float, str, float, float, float, float]] = []

    def finished(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        outcome, ended_at, lease = record.outcome, record.ended_at, record.lease
        assert outcome is not None, "expected a request that has ended"
        assert ended_at is not None, "expected a request that has ended"
        stretch = self.stretch(math.floor(ended_at / BIN_S))
        name: str = outcome._value_  # `value` is a function in Python
        stretch.outcomes[name] = stretch.outcomes.get(name, 0) + 1
        if outcome is _OK:
            _count(stretch.e2e, ended_at - record.arrived_at)
        elif outcome is _REFUSED:
            add_counts(stretch.refusals, {record.status: 1})
        if lease is None:
            return
        first_byte_at, tokens = record.first_byte_at, lease.output_tokens
        share = stretch.share(lease.instance)
        share.ended += 1
        if CAUSES[name] == "engine":
            session, known = session_of(record.request), share.failures
            known_or_few = session in known or len(known) < _MOST_SESSIONS
            add_counts(known, {session if known_or_few else _OTHER_SESSIONS: 1})
        share.prompt_tokens += record.prompt_tokens_total
        share.output_tokens += tokens
        if outcome is not _OK:
            return
        if first_byte_at is not None:
            _count(stretch.ttft, first_byte_at - record.arrived_at)
        if tokens > 0:
            each, took_s = tokens / lease.request.sequences, ended_at - lease.dispatched_at
            predicted = lease.predicted_output
            self.points.append((ended_at, lease.instance, predicted, each, lease.forecast_end_s, took_s))
            if len(self.points) >= 2 * KEPT_POINTS:
                del self.points[:KEPT_POINTS]

    def sample(self, scheduler: Scheduler, now: float) -> None:
        """Keep a sample of queue and load, of the first instances alone, and look at the paces of all."""
        paces, self.paces = self.paces, {}
        for each in scheduler.instances:
            pace = paces.get(each.name)
            if pace is None or pace.speed is not each.speed:
                pace = EnginePace(each.speed)
            self.paces[each.name] = pace
            pace.look(each)
        index = math.floor(now / BIN_S)
        loads = {
            each.name: (each.in_flight, round(each.kv_tokens / each.kv_cache_tokens, 4))
            for each in islice(scheduler.instances, KEPT_LEVELS)
        }
        demands = scheduler.placement.demands
        arrived = {model: demands[model].arrivals for model in list(demands)}
        levels: Levels = (scheduler.queue.by_model(), loads, arrived, now)
        # The timer is late by a little each time: a stretch that it left out is as the next one.
        sampled = [number for number, each in self.stretches.items() if each.levels is not None]
        last = max([number for number in sampled if number < index], default=index - 1)
        begin = last + 1 if index - last <= MOST_LATE_BINS else index
        for number in range(begin, index + 1):
            self.stretch(number).levels = levels

    def pace(self, instance: str) -> float:
        """Return the pace of an engine."""
        pace = self.paces.get(instance)
        return 0.0 if pace is None else pace.value

    def late(self, lag_s: float) -> None:
        """Note the lag of the event loop at a sweep."""
        self.lag_s = max(lag_s, _LAG_KEPT * self.lag_s)

    def stretch(self, number: int) -> Stretch:
        """Return the figures of time slot `number`, counted in `BIN_S`; begin them if there are none.

        Then figures older than `BINS` slots are dropped.
        """
        stretch = self.stretches.get(number)
        if stretch is None:
            stretch = self.stretches[number] = Stretch()
            for old in [each for each in self.stretches if each < number - BINS]:
                del self.stretches[old]
        return stretch

    def last(self, window_s: float, now: float) -> Stretch:
        """Return the stretches of the last `window_s` as one, the running one among them."""
        last, whole = math.floor(now / BIN_S), Stretch()
        for number in range(last + 1 - math.ceil(window_s / BIN_S), last + 1):
            if number in self.stretches:
                whole.add(self.stretches[number])
        return whole
