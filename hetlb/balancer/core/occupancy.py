"""Occupancy of an instance as scoring reads it: its ledger and step times until the next change."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, TypeAlias

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.latency import LatencyModel

if TYPE_CHECKING:
    from hetlb.balancer.core.instance import Instance

#: Age of a scrape, in seconds, beyond which it says nothing about now.
SIGNAL_STALE_S: Final = 5.0
#: Mean share of the pending prompt tokens that is computed already when a request comes. Two thirds of these
#: prompts came before the running iteration began, and are half done in it. The others came since.
_DONE_SHARE: Final = 1.0 / 3.0
#: Iterations of unread prompts that an engine has ahead (`ordinary.py`: 8 equal at once TTFT 1.67 x with 4,
#: 1.42 x with 16; other overload 1.17, 1.13 x; the worst agents 0.67, 0.94 x).
UNREAD_ITERATIONS: Final = 16.0


@mypyc_attr(acyclic=True)
class EngineLoad:
    """Load of each engine of an instance at a number of sequences, and the duration of its steps then.

    It is never changed. Each engine runs `batch` sequences in `slots` slots. `context_share` is the part of
    the instance's tokens in context that belongs to one engine's batch. With C tokens in context, a decode
    step takes `step_s + token_s * C`; with one more sequence it takes `next_step_s + next_token_s * C`. A
    prompt token takes at least `prompt_token_s`, a pass at least `pass_s`. `kv_cache_tokens` and `all_slots`
    are sums over all `engines`. `asynchronous`: the engine schedules asynchronously.
    """

    __slots__ = (
        "all_slots", "asynchronous", "batch", "budget", "context_share", "engines", "kv_cache_tokens",
        "latency", "next_step_s", "next_token_s", "pass_s", "prompt_token_s", "slots", "step_s", "token_s",
    )  # fmt: skip

    def __init__(self, instance: Instance, fewer: EngineLoad | None = None) -> None:
        """Measure the load now. `fewer` is the load with one sequence less, if it is known."""
        sequences = instance.sequences - instance.finished_sequences + instance.foreign
        self.kv_cache_tokens = float(instance.kv_cache_tokens)
        self.latency = latency = instance.latency
        self.asynchronous = instance.capacity.async_scheduling is True
        self.budget = float(instance.token_budget)
        self.engines = float(instance.engines)
        slots, share = instance.max_num_seqs, 1.0 / instance.engines
        self.all_slots = float(slots)
        self.slots = slots * share
        self.context_share = share
        self.batch = batch = sequences * share
        if sequences > slots:
            self.context_share = share * slots / sequences
            self.batch = batch = self.slots
        self.prompt_token_s, self.pass_s = latency.least_token_s, latency.least_pass_s
        self.next_step_s, self.next_token_s = latency.step_line(batch + 1.0)
        if fewer is not None and fewer.batch + 1.0 == batch:
            self.step_s, self.token_s = fewer.next_step_s, fewer.next_token_s
        else:
            self.step_s, self.token_s = latency.step_line(batch)

    def own_batch(self, sequences: float) -> float:
        """Return a request's sequences on each engine that gets some: they are spread over all engines."""
        return 1.0 if sequences <= self.engines else sequences / self.engines


@mypyc_attr(acyclic=True)
class Occupancy:
    """Ledger and speed of an instance until its next change, as scoring reads them. It is never changed.

    All engines together: `running` sequences; `kv_tokens` expected in use, and `kv_excess` more while
    `sample_at` is recent; `kv_utilization`, the promised share of the cache. `empty`: no sequence runs and no
    token is booked.

    Each engine: `context`, the tokens of its batch with half of each answer; `unread`, the prompt tokens that
    are not computed; `now_s`, the seconds of a step. A new prompt's iteration begins in `joining_s`, counted
    from the end of the prompts that are being read. These take `reading_s` since `reading_since`. If they are
    late, they take at most `most_late_s` longer; this is infinite while nothing has shown the speed. `behind`
    tokens of prompts came later and are computed before a new one.

    `incoming` prompts are still at other instances, the oldest since `oldest_at`. `prefilling`: prompt tokens
    that were computed recently. `troubled`: see `Evidence`.
    """

    __slots__ = (
        "behind", "context", "empty", "incoming", "joining_s", "kv_excess", "kv_tokens", "kv_utilization",
        "load", "most_late_s", "now_s", "oldest_at", "prefilling", "reading_s", "reading_since", "running",
        "sample_at", "troubled", "unread",
    )  # fmt: skip

    def __init__(self, instance: Instance) -> None:
        self.load = load = instance.load
        running = instance.sequences - instance.finished_sequences + instance.foreign
        self.running = float(running)
        self.empty = not running and not instance.kv_tokens
        booked = (instance.promised_tokens + instance.prompt_tokens) / 2.0 - instance.finished_kv_tokens
        if instance.foreign:
            booked += instance.kv_excess_tokens
        self.context = context = booked * load.context_share
        self.kv_utilization = instance.kv_utilization
        unread = float(instance.pending_prompt_tokens) / load.engines
        self.now_s = now_s = load.step_s + load.token_s * context if load.batch > 0.0 else 0.0
        joining_s = load.latency.joining_s(now_s, load.asynchronous)
        behind, self.reading_s, self.reading_since = unread, 0.0, instance.reading_since
        if unread > 0.0:
            part = load.budget - load.batch if load.budget - load.batch >= 1.0 else 1.0
            unread -= _DONE_SHARE * (unread if unread < part else part)
            behind = instance.late_tokens / load.engines
            joining_s -= now_s / 2.0
            sequences = instance.unread_sequences / load.engines
            reading = instance.pending_prompt_tokens / load.engines - behind
            self.reading_s = load.latency.reading_s(
                reading, sequences, load.batch - sequences, context, load.budget
            )
        self.unread, self.behind = unread, behind
        guessed = instance.spec.latency is None and not instance.speed.seen
        self.most_late_s = math.inf if guessed else self.reading_s
        self.joining_s = joining_s
        self.kv_tokens = (instance.kv_tokens + instance.kv_prompt_tokens) / 2.0 - instance.finished_kv_tokens
        sample_at = instance.sample_at
        self.kv_excess = instance.kv_excess_tokens
        self.sample_at = -math.inf if sample_at is None else sample_at
        self.prefilling = instance.speed.prefilling
        evidence = instance.evidence
        self.troubled = evidence.answers.excess > 0.0 or evidence.silence.overdue_s > 0.0
        self.incoming = float(len(instance.incoming))
        self.oldest_at = 0.0
        if instance.incoming:
            self.oldest_at = next(iter(instance.incoming.values())).dispatched_at

    def left_s(self, now: float) -> float:
        """Return the seconds until the prompts that are computed now have been read.

        If they are late, they are expected to need as long again as they are late, at most `most_late_s`.
        """
        whole_s = self.reading_s
        if whole_s <= 0.0:
            return 0.0
        left_s = whole_s - (now - self.reading_since)
        if left_s >= 0.0:
            return left_s
        return -left_s if -left_s < self.most_late_s else self.most_late_s

    def ending(self, answer_s: float, now: float) -> float:
        """Return the number of answers that end before a prompt from another instance arrives here.

        The age of the oldest transfer tells its duration. At most as many end as transfers are under way.
        """
        if self.incoming <= 0.0 or answer_s <= 0.0:
            return 0.0
        ended = (self.running - self.incoming) * (now - self.oldest_at) / answer_s
        return ended if ended < self.incoming else self.incoming

    def expected_kv_tokens(self, now: float) -> float:
        """Return tokens of the KV cache in use: every answer half-grown, or the engine's report, if more."""
        if self.kv_excess and now - self.sample_at <= SIGNAL_STALE_S:
            return self.kv_tokens + self.kv_excess
        return self.kv_tokens


#: Latency model and tokens per iteration of one engine; slots and KV cache in tokens of all; engines; True if
#: they schedule asynchronously.
Parameters: TypeAlias = tuple[LatencyModel, int, int, int, int, bool]


class EngineKind:
    """Instances with equal parameters. They share loads, which are kept by the number of sequences."""

    __slots__ = ("loads", "parameters")

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.loads: list[EngineLoad | None] = []


#: Most instances listed as touched.
MOST_TOUCHED: Final = 4096
#: Most kinds of instances that are remembered. Each change of a learnt speed makes another kind.
_MOST_KINDS: Final = 64


class ChangeCounter:
    """Changes of a fleet's instances: how often parameters changed, and which instances were touched.

    The latter are listed once blocks of instances ask for them. An `epoch` ends when the list is too long.
    """

    def __init__(self) -> None:
        self.count = self.epoch = 0
        self.touched: list[Instance] | None = None
        self._kinds: dict[Parameters, EngineKind] = {}

    def kind(self, parameters: Parameters) -> EngineKind:
        """Return the kind of the instances with these parameters."""
        found = self._kinds.get(parameters)
        if found is None:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            found = self._kinds[parameters] = EngineKind(parameters)
        return found
