"""Measurements of idle instances by lone requests of hetlb's own.

A few measure the host time of an instance with a profile that assumes one (`host_probe.py`). One at a time
shows if an instance is still slow: its work has gone to others, and no client is to wait for that answer. A
client's request that comes meanwhile ends them; the next idle moment is another try.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from hetlb.balancer.config.profile_writer import write_host
from hetlb.balancer.core.facts import InstanceChange, InstanceUpdated, SpeedTried
from hetlb.balancer.core.fleet_state import FleetState
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.types import AdminState, Health
from hetlb.balancer.engines.host_probe import BUDGET_S, PROMPT_TOKENS, HostProbe
from hetlb.balancer.engines.scrape import EngineWatch
from hetlb.balancer.engines.upstream import UnansweredError
from hetlb.balancer.http.sse import SseWatcher
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.errors import reason_of
from hetlb.tasks import ended

logger = logging.getLogger("hetlb.scrape")
T = TypeVar("T")

#: Ids of prompts: in the vocabulary of any model, past the low ids where special tokens live.
_TOKEN_IDS: Final = range(1000, 2000)
#: Tries of an instance, each ended by a client's request.
_TRIES: Final = 5
#: Output tokens of a request that shows a speed, and the seconds that it may take. More of its time must have
#: passed in decoding than this share.
_TRIAL_TOKENS: Final = 17
_MOST_TRIAL_S: Final = 20.0
_DECODING_SHARE: Final = 0.2
#: Most seconds from a trial to the next: the pause doubles while answers are slow.
_MOST_PAUSE_S: Final = 4.0
#: Seconds until an instance is tried again that does not answer such requests.
_REFUSED_S: Final = 60.0
#: Seconds between two looks whether a client has sent a request meanwhile.
_LOOK_S: Final = 0.05


class _DisturbedError(Exception):
    """Others use the engine."""


class HostTimes:
    """Measurements of host times and of slow instances; `change` puts host times in force."""

    def __init__(
        self, watch: EngineWatch, change: Callable[[InstanceChange], None], fleet: FleetState
    ) -> None:
        self._watch = watch
        self._fleet = fleet
        self._change = change
        #: Tries by instance and profile; an instance that is measured now has all of them.
        self._tries: dict[tuple[str, str, int], int] = {}
        self._running: set[str] = set()
        #: Time of the next trial of a slow instance, by incarnation, and the pause after it.
        self._trials: dict[int, tuple[float, float]] = {}

    def due(self, instance: Instance) -> Coroutine[Any, Any, None] | None:
        """Return a measurement of an instance that is due, None for none.

        The speed of a slow instance matters while others have its work.
        """
        if not self._free(instance):
            return None
        assumed = instance.spec.host_assumed_in and instance.sample is not None
        if assumed and self._tries.get(_key(instance), 0) < _TRIES:
            return self._measure(instance)
        slow = instance.speed.in_doubt and any(each.in_flight for each in self._fleet.peers(instance))
        due_at, _ = self._trials.get(instance.incarnation, (0.0, 0.0))
        return self._try(instance) if slow and asyncio.get_running_loop().time() >= due_at else None

    def _free(self, instance: Instance) -> bool:
        """Return True if an instance is free for a measurement."""
        free = not instance.in_flight and not instance.asleep and instance.spec.kv_transfer is None
        up = instance.admin is AdminState.READY and instance.evidence.health.state is Health.UP
        return free and up and instance.name in self._watch.models and instance.name not in self._running

    async def _try(self, instance: Instance) -> None:
        """Tell the scheduler how long a lone request takes at a slow instance."""
        now, key = asyncio.get_running_loop().time, instance.incarnation
        _, pause_s = self._trials.get(key, (0.0, 0.0))
        again_s = _REFUSED_S
        self._running.add(instance.name)
        try:
            asked = self._complete(instance, _prompt(), _TRIAL_TOKENS, _MOST_TRIAL_S)
            _, step_s, took_s = await self._while_free(instance, asked)
            again_s = 0.0
            if step_s is not None and (seconds := step_s * (_TRIAL_TOKENS - 1)) >= _DECODING_SHARE * took_s:
                self._watch.learned(SpeedTried(instance.name, _TRIAL_TOKENS - 1.0, seconds))
        except (_DisturbedError, TimeoutError):
            again_s = 0.0
        except (UnansweredError, ValueError):
            pass  # its clients' requests alone show its speed
        finally:
            self._running.discard(instance.name)
        pause_s = 0.0 if instance.speed.well else min(_MOST_PAUSE_S, 2.0 * max(pause_s, _LOOK_S))
        self._trials[key] = now() + max(again_s, pause_s), pause_s
        live = {each.incarnation for each in self._fleet.instances.values()}
        self._trials = {number: trial for number, trial in self._trials.items() if number in live}

    async def _measure(self, instance: Instance) -> None:
        """Measure the host time of an instance, write it into its profile where allowed, and log it."""
        name, spec, key = instance.name, instance.spec, _key(instance)
        if spec.latency is None or spec.gpu_alone:
            return
        self._running.add(name)
        self._tries[key] = self._tries.get(key, 0) + 1
        try:
            found = await self._while_free(instance, self._probe(instance, spec.latency))
        except _DisturbedError:
            return
        except (UnansweredError, TimeoutError, ValueError) as error:
            self._tries[key] = _TRIES
            text = "%s: its host time could not be measured; the profile's is assumed: %s"
            tell(logger, Event.INSTANCE_HOST_TIME, text, name, reason_of(error), instance=name)
            return
        finally:
            self._running.discard(name)
        path = Path(spec.host_assumed_in)
        found, why_not = await asyncio.to_thread(write_host, path, found)
        if instance.spec is not spec:
            return  # another profile came meanwhile
        self._change(InstanceUpdated(replace(spec, latency=found, host_assumed_in="")))
        step_s = found.host_s + found.host_sequence_s
        told = f"not written to {path}: {why_not}" if why_not else f"written to {path}"
        tell(
            logger, Event.INSTANCE_HOST_TIME,
            "%s: its host adds %.3g ms to an iteration of one sequence and %.3g ms to a request; %s",
            name, 1e3 * step_s, 1e3 * found.request_s, told, instance=name,
        )  # fmt: skip

    async def _while_free(self, instance: Instance, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, cancelled if a request of a client comes. Raises `_DisturbedError`."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait((task,), timeout=_LOOK_S))[0]:
                if instance.in_flight:
                    raise _DisturbedError
            return task.result()
        finally:
            await ended(task)

    async def _probe(self, instance: Instance, latency: LatencyModel) -> LatencyModel:
        """Return the latency model corrected by lone requests. Raises `_DisturbedError`, or the failure."""
        probe = HostProbe(latency, instance.capacity.max_model_len)
        while tokens := probe.next_tokens():
            probe.answered(*await self._complete(instance, _prompt(), tokens, 6.0 * BUDGET_S))
        sample = await self._watch.read_metrics(instance.name)
        if sample is None or sample.running or sample.waiting:
            raise _DisturbedError
        return probe.found()

    async def _complete(
        self, instance: Instance, prompt: Sequence[int], tokens: int, most_s: float
    ) -> tuple[float, float | None, float]:
        """Return seconds to the first token of an answer, of a step, and in all."""
        models = self._watch.models.get(instance.name)
        if not models:
            raise _DisturbedError
        body = {
            "model": models[0]["id"],
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        clock = asyncio.get_running_loop().time
        began, first, last, stream = clock(), 0.0, 0.0, SseWatcher(False)

        def feed(piece: bytes) -> None:
            nonlocal first, last
            last = clock()
            first = first or last
            stream.feed(piece)

        line, sent = b"POST /v1/completions", msgspec.json.encode(body)
        status, _ = await self._watch.ask(instance.name, line, sent, most_s=most_s, feed=feed)
        if status != 200:
            raise ValueError(f"/v1/completions answers {status}")
        if stream.completion_tokens != tokens:
            raise ValueError(f"expected {tokens} tokens (ignore_eos), got {stream.completion_tokens}")
        return first - began, (last - first) / (tokens - 1) if tokens > 1 else None, last - began


def _prompt() -> list[int]:
    """Return a prompt that no cache has."""
    return random.choices(_TOKEN_IDS, k=PROMPT_TOKENS)


def _key(instance: Instance) -> tuple[str, str, int]:
    return instance.name, instance.spec.host_assumed_in, instance.incarnation
