"""Beliefs about one instance, each with its source: stated, measured, learnt or assumed."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.occupancy import SIGNAL_STALE_S
from hetlb.balancer.core.types import Health


class BeliefSource(StrEnum):
    """Origin of a figure: a person, a profile or the engine, evidence of answers and metrics, a default."""

    STATED = "stated"
    MEASURED = "measured"
    LEARNT = "learnt"
    ASSUMED = "assumed"


def reported(instance: Instance, now: float) -> EngineSample | None:
    """Return the last report of an engine, or None if its server is down and the report is stale.

    A server that is up keeps its last report: an idle one is asked seldom.
    """
    stale = instance.sample_at is None or now - instance.sample_at > SIGNAL_STALE_S
    return None if stale and instance.evidence.health.state is Health.EJECTED else instance.sample


def slots_source(instance: Instance) -> BeliefSource:
    """Return the origin of the number of sequences that an instance is believed to run at once."""
    if instance.spec.slots_stated:
        return BeliefSource.STATED
    if instance.capacity.max_num_seqs is not None:
        return BeliefSource.MEASURED
    return BeliefSource.ASSUMED if instance.slots_learnt_at is None else BeliefSource.LEARNT


def speed_source(instance: Instance) -> BeliefSource:
    """Return the origin of the speed of an instance. A stated GPU tells only its ratio to other GPUs."""
    if instance.speed.seen and (instance.speed.factor != 1.0 or not instance.profiled):
        return BeliefSource.LEARNT
    if instance.spec.gpu_alone:
        return BeliefSource.STATED
    return BeliefSource.MEASURED if instance.profiled else BeliefSource.ASSUMED


def believed(instance: Instance, tokens_per_s: float, now: float) -> dict[str, Any]:
    """Return the part `believes` of an instance's document.

    `tokens_per_s` are weighted tokens at the mean request. `speed.factor` multiplies the times of its
    profile (or the default), `speed.reading_factor` the times of prompts; `age_s` is the age of the newest
    evidence, None without any; `confidence` 0 to 1. `host` are seconds of the host for each step, `value`,
    and for each request.
    """
    speed, latency, sample = instance.speed, instance.latency, instance.sample
    slots, model, learnt = slots_source(instance), speed_source(instance), BeliefSource.LEARNT
    kv = host = BeliefSource.ASSUMED
    kv_at = None
    if instance.capacity.kv_cache_tokens is not None:
        kv = BeliefSource.MEASURED
        if sample is not None and sample.capacity.kv_cache_tokens is not None:
            kv_at = instance.sample_at
    if instance.profiled and not instance.spec.host_assumed_in:
        host = BeliefSource.MEASURED
    slots_at = instance.slots_learnt_at if slots is learnt else None
    count = instance.slots_learnt if slots is learnt and instance.slots_learnt else instance.max_num_seqs
    seen_at = speed.seen_at if model is learnt else None
    factors = {"factor": speed.factor, "reading_factor": speed.reading}
    return {
        "max_num_seqs": _belief(count, slots, slots_at, now, 0.8),
        "speed": _belief(tokens_per_s, model, seen_at, now, speed.confidence) | factors,
        "kv_cache_tokens": _belief(instance.kv_cache_tokens, kv, kv_at, now, 1.0),
        "host": {**_belief(latency.host_s, host, None, now, 1.0), "request_s": latency.request_s},
    }


def _belief(
    value: float, source: BeliefSource, at: float | None, now: float, learnt: float
) -> dict[str, Any]:
    confidence = {BeliefSource.ASSUMED: 0.0, BeliefSource.LEARNT: round(learnt, 3)}.get(source, 1.0)
    age_s = None if at is None else round(max(0.0, now - at), 3)
    return {"value": value, "source": source.value, "age_s": age_s, "confidence": confidence}
