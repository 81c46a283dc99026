"""Throughput of one instance: requests/s of a type or of a mix of types, by the engine model on a profile.

The instance is saturated: more requests wait than it can run. The rate counts admissions between the
time when its first batch has turned over and the time when nothing waits any more, so neither filling nor
emptying counts. With an SLO it is the highest rate of Poisson arrivals with enough requests that meet it.
Results are kept on disk by content: profile, limits, requests, and the source of the engine model itself.
What nothing was simulated for is estimated by the seconds that a request takes of a full engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from hetlb.balancer.config.profile_file import Profile, with_latency
from hetlb.balancer.core.policies.worth import busy_s
from hetlb.files import content, opened
from hetlb.inputs.yaml_file import NonNegative
from hetlb.tools.plan.common.fleet_run import SimulatedServer, arrivals, run_fleet
from hetlb.tools.plan.workloads import RequestType
from hetlb.tools.sim.alone import batch_of, full_part
from hetlb.tools.sim.deadline import look
from hetlb.tools.sim.engine_model import EngineModel
from hetlb.tools.sim.engine_sequence import EngineSequence
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.iteration_times import IterationRule
from hetlb.tools.sim.staged_engine import EngineStage, StagedEngine
from hetlb.tools.sim.study import engine_of
from hetlb.tools.workload.records import RequestResult

#: Length of one measurement, in batches; bounds of its requests.
_RUN_BATCHES = 6
_LEAST_REQUESTS, _MOST_REQUESTS = 300, 4000
#: Factor on the requests of a shuffled mix, and most of these: the types that meet in a batch vary.
_MIX_FACTOR, _MOST_MIXED = 3, 6000
#: Steps of the search for the highest rate within an SLO. Length of one step, and of its parts at begin and
#: end that do not count, as multiples of a request's time in the engine. Bounds of its requests.
_SLO_STEPS = 7
_SLO_STAYS, _SLO_BEGIN_STAYS, _SLO_END_STAYS = 5.0, 2.0, 0.5
_LEAST_SLO_REQUESTS, _MOST_SLO_REQUESTS = 300, 2000
#: With Poisson arrivals: share of the rate at which the time per token just meets its target.
_SLO_SHARE = 0.8
_RATIO_DIGITS = 3
#: The golden section. Steps of this share through sorted lengths mix them well.
GOLDEN_SHARE = 0.6180339887

#: Requests of a mix with their weight: (share, rows of (prompt, output) tokens).
Mix = Sequence[tuple[float, Sequence[tuple[int, int]]]]


@dataclass(frozen=True, slots=True)
class SloLimits:
    """Latencies in seconds that a share of the requests must meet; infinite if none is asked for."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    attainment: float = 0.95

    def share_met(self, records: Sequence[RequestResult]) -> float:
        met = 0
        for record in records:
            ttft, tpot = record.ttft_s, record.tpot_s
            met += record.ok and (ttft or 0.0) <= self.ttft_s and (tpot or 0.0) <= self.tpot_s
        return met / len(records) if records else 0.0


def interleave(mix: Mix, count: int) -> list[tuple[int, int]]:
    """Return `count` requests of a mix, every type spread evenly: the type most behind is next."""
    total = math.fsum(share for share, _ in mix)
    given = [0] * len(mix)
    rows: list[tuple[int, int]] = []
    for number in range(1, count + 1):
        chosen = max(range(len(mix)), key=lambda t: mix[t][0] / total * number - given[t])
        own = mix[chosen][1]
        rows.append(own[int(given[chosen] * GOLDEN_SHARE * len(own)) % len(own)])
        given[chosen] += 1
    return rows


def saturated_rate(spec: EngineSpec, mix: Mix, stages: Sequence[EngineStage] = ()) -> float:
    """Return the requests/s that one instance serves of this mix; 0 if some request does not fit it.

    `stages` are the stages of a pipeline, composed as `spec`: then the rate is stage by stage.
    """
    limits = spec.limits
    if any(i + o > limits.max_sequence_tokens for _, rows in mix for i, o in rows):
        return 0.0
    total = math.fsum(share for share, _ in mix)
    mean_tokens = (
        math.fsum(share * sum(i + o / 2 for i, o in rows) / len(rows) for share, rows in mix) / total
    )
    batch = batch_of(spec, mean_tokens)
    count = max(_LEAST_REQUESTS, min(_MOST_REQUESTS, _RUN_BATCHES * batch))
    rows = interleave(mix, count if len(mix) == 1 else min(_MOST_MIXED, _MIX_FACTOR * count))
    if len(mix) > 1:
        random.Random(0).shuffle(rows)
    engine: EngineModel | StagedEngine = spec.model(IterationRule.TOKEN)
    if len(stages) > 1:
        one = replace(limits, max_num_batched_tokens=max(1, limits.max_num_batched_tokens // len(stages)))
        engine = StagedEngine(stages, one)
    part = full_part(engine, [EngineSequence(prompt, output) for prompt, output in rows], batch)
    return spec.ranks * (part.last - part.first) / part.seconds if part.seconds > 0 else 0.0


def bubbles(spec: EngineSpec, mix: Mix, stages: Sequence[EngineStage]) -> float:
    """Return the share of a composed engine's throughput on a mix that its pipeline reaches, at most 1.

    The bubbles of a pipeline make it less than 1: a batch that holds a prompt takes longer than one that only
    decodes, and stages wait for it.
    """
    if len(stages) < 2:
        return 1.0
    whole = saturated_rate(spec, mix)
    return min(1.0, saturated_rate(spec, mix, stages) / whole) if whole > 0.0 else 1.0


def slowed(profile: Profile, share: float) -> Profile:
    """Return a composed profile slowed to `share` of its speed, for the bubbles of its pipeline."""
    latency = profile.latency
    slow = replace(latency.scaled(1.0 / share), request_s=latency.request_s)
    return profile if share >= 1.0 else with_latency(profile, slow)


def with_bubbles(profile: Profile, mix: Mix, stages: Sequence[EngineStage]) -> Profile:
    """Return the profile of a pipeline of these stages on a mix; without stages, the profile as it is."""
    return slowed(profile, bubbles(engine_of(profile), mix, stages)) if stages else profile


def rate_within(spec: EngineSpec, mix: Mix, slo: SloLimits) -> float:
    """Return the highest rate of Poisson arrivals (requests/s) at which enough requests meet the SLO."""
    low, high = 0.0, saturated_rate(spec, mix)
    if high <= 0.0:
        return 0.0
    total = math.fsum(share for share, _ in mix)
    output = math.fsum(share * sum(o for _, o in rows) / len(rows) for share, rows in mix) / total
    # The longest stay that meets the SLO. Requests beyond the slots of a full engine do not lengthen the run.
    stay_s = slo.ttft_s + slo.tpot_s * output
    server = SimulatedServer("one", spec)
    for _ in range(_SLO_STEPS):
        rate = (low + high) / 2
        stay = min(rate * stay_s, float(spec.ranks * spec.limits.max_num_seqs))
        count = round(max(_LEAST_SLO_REQUESTS, min(_MOST_SLO_REQUESTS, _SLO_STAYS * stay)))
        begin, end = (round(count * part / _SLO_STAYS) for part in (_SLO_BEGIN_STAYS, _SLO_END_STAYS))
        rows = interleave(mix, count)
        random.Random(0).shuffle(rows)
        outputs = [output for _, output in rows]
        planned = arrivals(rows, rate, random.Random(0))
        result = run_fleet([server], planned, outputs, policy="single", predictor="oracle")
        met = slo.share_met(result.records[begin : count - end]) >= slo.attainment
        low, high = (rate, high) if met else (low, rate)
    return low


def estimated_rate(spec: EngineSpec, kind: RequestType, slo: SloLimits | None = None) -> float:
    """Estimate the requests/s of one instance on a type, without a simulation; 0 if one is too long."""
    limits, latency = spec.limits, spec.latency
    if kind.longest_tokens > limits.max_sequence_tokens:
        return 0.0
    prompt, output = kind.input_tokens, kind.output_tokens

    def rate(slots: int) -> float:
        """Return the requests/s of one of its engines."""
        sizes = limits.kv_cache_tokens, slots, limits.max_num_batched_tokens
        return 1.0 / busy_s(latency, *sizes, prompt, output, limits.need)

    if slo is None:
        return spec.ranks * rate(limits.max_num_seqs)
    if latency.prefill_s(prompt, 1) > slo.ttft_s:
        return 0.0
    slots = limits.max_num_seqs
    # Halve the slots until tokens come in time: among `slots` requests, one takes slots / rate seconds.
    while slots >= 1 and slots / rate(slots) > slo.tpot_s * max(1.0, output - 1.0):
        slots //= 2
    return _SLO_SHARE * spec.ranks * rate(slots) if slots else 0.0


# --- kept on disk ---------------------------------------------------------------------------------------


@cache
def _engine_digest() -> str:
    """Return a digest of the source of the engine model. If it changes, no kept result is valid."""
    digest = hashlib.sha256()
    tools = Path(__file__).parents[1]
    latency = tools.parent / "balancer" / "core" / "latency.py"
    for path in (Path(__file__), latency, *sorted((tools / "sim").glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def default_cache() -> Path:
    """Return `$XDG_CACHE_HOME/hetlb/throughput.jsonl`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hetlb" / "throughput.jsonl"


#: One line of the cache: the digest of the measured inputs, and requests/s.
_decode_entry = msgspec.json.Decoder(tuple[str, NonNegative]).decode


@dataclass
class Measured:
    """Throughputs by content. `path` None keeps them in memory; `runs` counts simulations."""

    path: Path | None = None
    slo: SloLimits | None = None
    runs: int = 0
    _known: dict[str, float] = field(default_factory=dict)
    _digests: dict[int, tuple[object, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None:
            return
        try:
            lines = content(self.path).splitlines()
        except OSError:
            return  # no cache yet, or one that cannot be read
        for line in lines:
            # A line that is not whole was being written by another process: measured again.
            with contextlib.suppress(msgspec.DecodeError):
                key, rate = _decode_entry(line)
                self._known[key] = rate

    def estimate(self, profile: Profile, kind: RequestType) -> float:
        """Return an estimate of the requests/s on a type, without a simulation."""
        return estimated_rate(engine_of(profile), kind, self.slo)

    def alone(self, profile: Profile, kind: RequestType, stages: Sequence[EngineStage] = ()) -> float:
        return self.of_mix(profile, [(1.0, kind.rows)], stages)

    def of_mix(self, profile: Profile, mix: Mix, stages: Sequence[EngineStage]) -> float:
        """Return the requests/s of all types of a mix together. Raises `StoppedError` at the deadline."""
        total = math.fsum(share for share, _ in mix)
        # Proportions to three digits: further ones are the same to an engine.
        rounded = [(float(f"{share / total:.{_RATIO_DIGITS}g}"), rows) for share, rows in mix]
        parts = [(share, self._digest(rows)) for share, rows in rounded]
        of = self._digest(profile, engine_of), self._digest(stages)
        key = hashlib.sha256(repr((_engine_digest(), of, parts, self.slo)).encode()).hexdigest()
        if key not in self._known:
            look()
            if self.slo is None:
                rate = saturated_rate(engine_of(profile), rounded, stages)
            else:
                rate = rate_within(engine_of(with_bubbles(profile, rounded, stages)), rounded, self.slo)
            self._known[key] = rate
            self.runs += 1
            self._keep(key, rate)
        return self._known[key]

    def _digest(self, part: Any, content: Callable[[Any], object] = lambda part: part) -> str:
        """Return a digest of an object's content, made once. The object is kept, so that its id is, too."""
        known = self._digests.get(id(part))
        if known is None:
            text = repr(content(part)).encode()
            known = self._digests[id(part)] = part, hashlib.sha256(text).hexdigest()
        return known[1]

    def _keep(self, key: str, rate: float) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(opened(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
                file.write(msgspec.json.encode((key, rate)) + b"\n")
        except OSError:
            self.path = None  # a cache that cannot be written is none
