"""Measures the points of a grid on a live server, within a time budget.

A prefill is timed from the moment the engine is free for it (a short prompt before it keeps the
engine busy while the server reads the request) to the last first token, so that HTTP is left out of it; a
decode step is timed while all of the batch run, from the stream. The engine's own counters say whether
other requests ran on it or a sequence was preempted meanwhile: such a sample is not kept.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from statistics import median

from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.engines.engine_metrics import EngineCounters
from hetlb.balancer.engines.host_probe import PROMPT_TOKENS, HostProbe
from hetlb.errors import HetlbError, InputError
from hetlb.tools.profiler.client import EngineClient, ServerFacts, TokenTimes, distinct_prompts
from hetlb.tools.profiler.grid import (
    DECODE_ROOM_TOKENS,
    Point,
    Size,
    StepKind,
    merge_repeats,
    middle,
    token_budget,
)
from hetlb.tools.profiler.sample_file import Sample, SampleFile

#: Repeats of a point, and their factor at most if its samples differ.
REPEATS, _MORE_REPEATS = 3, 15
#: Deviation of the time between two events if the server's timers count milliseconds, as uvloop's do.
_CLOCK_S = 4e-4
#: Standard error, as a share, above which another sample of a point is taken.
_SURE_ERROR = 0.01
#: Share of a decode step that a mixed step may be shorter than its decodes alone: noise.
_NOISY_SHARE = 0.03
#: Steps of a decode sample: enough to take this long, within these.
_WINDOW_S, _MIN_STEPS, _MAX_STEPS = 0.4, 16, 96
#: Tries of a sample that others disturb.
_SAMPLE_TRIES = 3
_WARM_UP_TOKENS = 512
#: Seconds that a server takes to read a request, and more per token. The prompt ahead of a prefill must last
#: longer.
_READ_S, _READ_S_PER_TOKEN = 0.015, 2.5e-6
#: Lead of that prompt in seconds, doubled at every try. An engine reads all that has come when an iteration
#: begins.
_LEAD_S = 0.004
_PLUG_TOKENS = (64, 2048)
#: Length of a longer prompt ahead, if an iteration takes all of it. Tries until one outlasts the reading of a
#: request.
_LONGEST_PLUG_TOKENS, _PLUG_TRIES = 8192, 8
_POLL_S, _SETTLE_TIMEOUT_S = 0.02, 10.0
#: vLLM takes at most 1,024 prompts a request; an engine that runs them all has no limit that matters here.
_MOST_SEQUENCES = 1000


#: Least number of measured points of each phase.
_LEAST_POINTS = {StepKind.PREFILL: 8, StepKind.DECODE: 8, StepKind.MIXED: 0}
#: Lone requests that measure the server's own time for one.
_LONE_REQUESTS = 8
#: Steps that all decodes make before a prompt is put beside them.
_STEPS_BEFORE_PROMPT = 4
#: Least seconds that the decodes of a mixed point run.
_MIXED_WINDOW_S = 0.4


class BusyError(HetlbError):
    """Others use the server."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Result of a sweep: points (medians of their samples), and the facts learnt of the engine."""

    points: tuple[Point, ...]
    max_num_batched_tokens: int | None
    given_up: tuple[str, ...]


async def settled(client: EngineClient, facts: ServerFacts) -> bool:
    """Wait until the engine has nothing to do; False if it still has after some seconds."""
    if not facts.counts:
        return True
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        sample = await client.sample()
        if not sample.running and not sample.waiting:
            return True
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_POLL_S)


async def learn_max_num_seqs(client: EngineClient, facts: ServerFacts, rng: random.Random) -> int | None:
    """Return sequences that run while others wait although the KV cache has room; None if none ever do."""
    capacity = facts.capacity
    if not facts.counts or capacity.kv_cache_tokens is None:
        return None
    blocks = capacity.kv_cache_tokens // (capacity.block_size or 16)
    count = min(_MOST_SEQUENCES, blocks // 2)
    answer = await client.send(distinct_prompts(rng, count, 4), 64)
    seen = found = None
    async with answer.reading() as reading:
        while not reading.done() and found is None:
            sample = await client.sample()
            running = sample.running or 0
            if sample.waiting and (sample.kv_usage or 0.0) < 0.9:
                # vLLM admits prompts over several iterations: two looks alike and a queue mean the limit.
                found = running if running and running == seen else None
                seen = running
            await asyncio.sleep(_POLL_S * 2)
        if found is None:
            await reading
    await settled(client, facts)
    return found


@dataclass
class Sweep:
    """One sweep over one server."""

    client: EngineClient
    facts: ServerFacts
    sizes: Sequence[Size]
    file: SampleFile
    _: KW_ONLY
    budget_s: float
    repeats: int = REPEATS
    force: bool = False
    max_num_batched_tokens: int | None = None
    rng: random.Random
    on_progress: Callable[..., object] = lambda **_: None

    def __post_init__(self) -> None:
        #: Tokens of a request at most.
        self._context = self.facts.capacity.max_model_len or 1 << 20
        self._deadline = self._token_s = self._first_step_s = 0.0
        #: Factor of the plug's tokens: the server may take longer to read a request than is assumed.
        self._longer, self._outlasts = 1.0, False
        self._most_plug_tokens = min(_PLUG_TOKENS[1], self._context - 1)
        self._step_s: dict[Size, float] = {}
        decodes = [size for size in self.sizes if size.phase is not StepKind.PREFILL]
        most = max((size.batch for size in decodes), default=0)
        longest = max((size.length for size in decodes), default=0)
        # Decode points share their prompts, each a beginning of the same: if the engine keeps
        # prefixes, a prompt is prefilled once and not once per point.
        self._decode_prompts = distinct_prompts(self.rng, most, longest)

    async def run(self) -> SweepResult:
        """Measure. Raises `BusyError`, `InputError` (the budget is too small) or `ServerFailed`."""
        self._deadline = time.monotonic() + self.budget_s
        await self._warm_up()
        given_up: dict[Size, str] = {
            sample.size: sample.reason for sample in self.file.samples if sample.reason is not None
        }
        taken = {size: 0 for size in self.sizes if size not in given_up}
        for sample in self.file.samples:
            if sample.size in taken:
                taken[sample.size] += 1
        self._leave_out(taken, given_up)
        for repeat in range(1, self.repeats * _MORE_REPEATS + 1):
            for size in sorted(taken, key=_order):
                if taken.get(size, repeat) >= repeat or not self._wanted(size, taken):
                    continue
                left_s = self._deadline - time.monotonic()
                if repeat > 1 and self._cost_s(size) > left_s:
                    continue
                self._tell(size, taken, left_s)
                sample = await self._undisturbed(size)
                self.file.add([sample])
                if sample.reason is None:
                    taken[size] += 1
                else:
                    del taken[size]
                    given_up[size] = sample.reason
        return self._result(given_up)

    def _tell(self, now: Size, taken: dict[Size, int], left_s: float) -> None:
        more = {size: self._wanted(size, taken) for size in taken}
        rest_s = sum(self._cost_s(size) * count for size, count in more.items())
        done = sum(taken.values())
        total = done + sum(more.values())
        note = f"{done}/{total}, about {max(0.0, min(rest_s, left_s)):.0f} s left"
        self.on_progress(description=str(now), completed=done, total=total, note=note)

    # --- planning ---

    def _wanted(self, size: Size, taken: dict[Size, int]) -> int:
        """Return the further samples that a point needs: `repeats`, then one more while they differ."""
        count = taken.get(size, 0)
        if count < self.repeats:
            return self.repeats - count
        seconds = [s.seconds for s in self.file.samples if s.size == size and s.seconds is not None]
        return int(middle(seconds, 0.0 if size.phase is StepKind.DECODE else _CLOCK_S)[1] > _SURE_ERROR)

    def _leave_out(self, taken: dict[Size, int], given_up: dict[Size, str]) -> None:
        """Leave out the most expensive points until one sample of each fits most of the budget."""
        while True:
            cost = {size: self._cost_s(size) for size, count in taken.items() if not count}
            if sum(cost.values()) <= 0.85 * self.budget_s:
                return
            by_phase = {phase: [size for size in taken if size.phase is phase] for phase in StepKind}
            droppable = [size for size in cost if len(by_phase[size.phase]) > _LEAST_POINTS[size.phase]]
            if not droppable:
                raise InputError(
                    f"--budget: expected at least {math.ceil(sum(cost.values()) / 0.85)}s for a server as "
                    f"slow as this one, got {self.budget_s:.1f}s for measuring"
                )
            dearest = max(droppable, key=lambda size: (cost[size], size))
            del taken[dearest]
            given_up[dearest] = f"it would take {cost[dearest]:.0f} s of the budget"

    def _cost_s(self, size: Size) -> float:
        """Return the estimated seconds of one sample."""
        if size.phase is StepKind.PREFILL:
            return (size.tokens + self._plug_tokens(size)) * self._token_s + 0.05
        step_s = self._step_s.get(size, self._near_step_s(size.batch))
        # With prefixes kept, a point's first sample prefills its prompts; blocks of longer ones count.
        read = 0 if self.facts.prefix_cache and size in self._step_s else size.tokens
        return read * self._token_s + self._steps(size) * step_s + 0.05

    def _near_step_s(self, batch: int) -> float:
        """Return the estimated seconds of a step of `batch` sequences, by measured steps of no more."""
        return max((s for each, s in self._step_s.items() if each.batch <= batch), default=self._first_step_s)

    def _plug_tokens(self, size: Size, lead_s: float = _LEAD_S) -> int:
        seconds = self._longer * (lead_s + _READ_S + _READ_S_PER_TOKEN * size.tokens)
        tokens = max(_PLUG_TOKENS[0], round(seconds / max(self._token_s, 1e-9)))
        return max(1, min(tokens, self._most_plug_tokens))

    def _steps(self, size: Size) -> int:
        step_s = self._step_s.get(size, self._first_step_s)
        return max(_MIN_STEPS, min(_MAX_STEPS, round(_WINDOW_S / max(step_s, 1e-6))))

    # --- measuring ---

    async def _warm_up(self) -> None:
        """Warm up: first requests compile and allocate; they also show about how fast the server is."""
        length = max(1, min(_WARM_UP_TOKENS, self._context - 9))
        for _ in range(2):
            prompts = distinct_prompts(self.rng, 2, length)
            started = time.monotonic()
            times = await self.client.complete(prompts, 8)
            first_s = max(one.first_s for one in times)
            self._token_s = (first_s - started) / (2 * length)
            self._first_step_s = (max(one.last_s for one in times) - first_s) / 7
        size = Size(StepKind.PREFILL, 1, length)
        for _ in range(_PLUG_TRIES):
            most = self._plug_tokens(size) == self._most_plug_tokens
            await self._prefill(size, _LEAD_S)
            await self._settled()
            if self._outlasts or (most and not await self._takes_longer_plugs()):
                break
        if not await self._settled() and not self.force:
            raise BusyError("the server is busy with the work of others (--force measures all the same)")

    async def _settled(self) -> bool:
        return await settled(self.client, self.facts)

    async def _takes_longer_plugs(self) -> bool:
        """Allow longer plugs if the server takes the longest one in one iteration. Return True if it does.

        A plug is the prompt ahead of a batch. It keeps the server busy until the whole batch has come.
        """
        longest = min(_LONGEST_PLUG_TOKENS, self._context - 1)
        if longest <= self._most_plug_tokens:
            return False
        before = await self._counters()
        await self.client.complete(distinct_prompts(self.rng, 1, longest), 1)
        await self._settled()
        after = await self._counters()
        if before is None or after is None or _more(before.iterations, after.iterations) != 1:
            return False
        self._most_plug_tokens = longest
        return True

    async def _undisturbed(self, size: Size) -> Sample:
        """Return one undisturbed sample, or the reason there is none. Raises `BusyError`."""
        whole, merged, impossible = True, False, ""
        for attempt in range(_SAMPLE_TRIES):
            whole, merged, impossible = True, False, ""
            if not await self._settled() and not self.force:
                break
            before = await self._counters()
            if size.phase is StepKind.PREFILL:
                seconds, expected = await self._prefill(size, _LEAD_S * 2**attempt)
            else:
                seconds, expected = await (self._decode if size.phase is StepKind.DECODE else self._mixed)(
                    size
                )
            await self._settled()
            after = await self._counters()
            iterations = None
            if before is not None and after is not None:
                if _more(before.preemptions, after.preemptions):
                    return Sample(size, reason="the engine preempted requests: its KV cache was full")
                read = _more(before.prompt_tokens, after.prompt_tokens)
                cached = size.phase is StepKind.PREFILL and _more(before.cached_tokens, after.cached_tokens)
                if (read != expected or cached) and not self.force:
                    continue
                if size.phase is StepKind.PREFILL and read == expected:
                    more = _more(before.iterations, after.iterations)
                    iterations = None if more is None else more - 1  # the prompt ahead has its own
                    if merged := iterations == 0:
                        continue
            if seconds is not None and (impossible := self._impossible(size, seconds)):
                continue
            if seconds is not None:
                return Sample(size, seconds, iterations)
            whole = False
        if impossible:
            return Sample(size, reason=impossible)
        if merged:
            return Sample(size, reason="it was always read in one iteration with the prompt ahead of it")
        if whole:
            raise BusyError(f"{size}: expected a server without other load (--force measures all the same)")
        return Sample(size, reason="its requests never ran all at once")

    def _impossible(self, size: Size, seconds: float) -> str:
        """Return why a time cannot be the step's, "" if it can: a prompt makes no step shorter."""
        decode_s = self._step_s.get(Size(StepKind.DECODE, size.batch, size.length))
        if (
            size.phase is StepKind.MIXED
            and decode_s is not None
            and seconds < (1.0 - _NOISY_SHARE) * decode_s
        ):
            return f"always below the {1e3 * decode_s:.3g} ms of its decodes alone"
        return ""

    async def _counters(self) -> EngineCounters | None:
        return await self.client.counters() if self.facts.counts else None

    async def _prefill(self, size: Size, lead_s: float) -> tuple[float | None, int]:
        """Return the seconds to prefill a batch, and the prompt tokens of the whole measurement."""
        plug = self._plug_tokens(size, lead_s)
        prompts = distinct_prompts(self.rng, size.batch, size.length)
        ahead = await self.client.send(distinct_prompts(self.rng, 1, plug), 1)
        async with ahead.reading() as read:
            await asyncio.sleep(lead_s)
            answer = await self.client.send(prompts, 1)
            times, (plugged,) = await answer.read(), await read
        # The engine gets a request shortly after its head is answered. If it was idle until then, the time
        # shows nothing.
        self._outlasts = plugged.last_s >= answer.head_s + _LEAD_S
        if not self._outlasts and plug < self._most_plug_tokens:
            self._longer *= 2.0
            return None, size.tokens + plug
        began = max(plugged.last_s, answer.head_s)
        seconds = max(one.first_s for one in times) - began
        if size.tokens >= _WARM_UP_TOKENS:
            self._token_s = max(self._token_s / 2, seconds / size.tokens)
        return max(seconds, 1e-6), size.tokens + plug

    async def _decode(self, size: Size) -> tuple[float | None, int]:
        """Return the seconds of a step while all of a batch run, and the prompt tokens of the measurement."""
        steps = self._steps(size)
        length = max(1, size.length - steps // 2)
        prompts, tokens = await self._fill(size, length)
        # Until the last prompt is prefilled, earlier ones decode already.
        behind = self._passes(self._unread_tokens(size.batch, length))
        asked = min(steps + behind + 4, DECODE_ROOM_TOKENS + steps // 2, self._context - length)
        times = await self.client.complete(prompts, asked)
        seconds = _together(times)
        if seconds is not None:
            self._step_s[size] = seconds
        return seconds, tokens

    async def _fill(self, size: Size, length: int) -> tuple[list[list[int]], int]:
        """Return the decode prompts of a point, and the tokens used. A prefix cache keeps the prompts."""
        prompts = [prompt[:length] for prompt in self._decode_prompts[: size.batch]]
        tokens = size.batch * length
        if self.facts.prefix_cache and size.batch > 1:
            await self.client.complete(prompts, 1)
            tokens *= 2
        return prompts, tokens

    def _unread_tokens(self, batch: int, length: int) -> int:
        """Return the prompt tokens left to prefill after `_fill`: a cache of prefixes keeps whole blocks."""
        if not self.facts.prefix_cache or batch == 1:
            return batch * length
        block = self.facts.capacity.block_size or 1
        return batch * (length - (length - 1) // block * block)

    def _passes(self, tokens: int) -> int:
        return math.ceil(tokens / (self._budget_tokens() or 2048))

    async def _mixed(self, size: Size) -> tuple[float | None, int]:
        """Return the seconds of a step that prefills beside decodes, and the prompt tokens of all of it."""
        step_s = self._near_step_s(size.batch)
        # They must still run when the prompt has found its way through the server.
        steps = min(
            DECODE_ROOM_TOKENS, max(3 * _STEPS_BEFORE_PROMPT, math.ceil(_MIXED_WINDOW_S / max(step_s, 1e-6)))
        )
        length = max(1, size.length - steps // 2)
        prompts, tokens = await self._fill(size, length)
        behind = self._passes(self._unread_tokens(size.batch, length))
        asked = min(2 * behind + steps, self._context - length)
        answer = await self.client.send(prompts, asked)
        async with answer.reading() as reading:
            await answer.begun()
            await asyncio.sleep(_STEPS_BEFORE_PROMPT * step_s)
            prompt = distinct_prompts(self.rng, 1, size.prefill_tokens)
            (alone,) = await self.client.complete(prompt, 1)
            times = await reading
        return _gap_at(times, alone.first_s), tokens + size.prefill_tokens

    async def lone_requests(self) -> list[tuple[int, float]]:
        """Return the prompt tokens and seconds to the first token of requests that nothing else disturbs."""
        found = []
        for number in range(_LONE_REQUESTS):
            await self._settled()
            tokens = max(1, min(self._context - 2, 32 * (1 + number)))
            prompts = distinct_prompts(self.rng, 1, tokens)
            started = time.monotonic()
            (times,) = await self.client.complete(prompts, 1)
            found.append((tokens, times.first_s - started))
        return found

    # --- the result ---

    def _budget_tokens(self) -> int | None:
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return token_budget(
            (sample.size.batch, sample.size.length, sample.iterations)
            for sample in self.file.samples
            if sample.size.phase is StepKind.PREFILL and sample.iterations
        )

    def _result(self, given_up: dict[Size, str]) -> SweepResult:
        budget = self._budget_tokens()
        points = []
        for sample in self.file.samples:
            size, passes = sample.size, 1
            if sample.seconds is None or size in given_up:
                continue
            if size.phase is StepKind.PREFILL and budget is not None:
                passes = math.ceil(size.tokens / budget)
            points.append(
                Point(size.phase, size.batch, size.length, sample.seconds, passes, size.prefill_tokens)
            )
        notes = tuple(f"{size}: left out: {reason}" for size, reason in sorted(given_up.items()))
        return SweepResult(tuple(merge_repeats(points, _CLOCK_S)), budget, notes)


def _order(size: Size) -> tuple[int, int, int, int]:
    """Return a sort key: prefills from the cheapest; decodes from the longest, which contains the others."""
    if size.phase is StepKind.PREFILL:
        return (0, size.tokens, size.batch, 0)
    return (1 if size.phase is StepKind.DECODE else 2, -size.length, size.batch, size.prefill_tokens)


def _more(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _together(times: Sequence[TokenTimes]) -> float | None:
    """Return the median seconds of a step while all streams run, None if they never do.

    The span lasts from the first token of the last stream to begin to the end of the first one to end.
    """
    start_s = max(one.first_s for one in times)
    end_s = min(one.last_s for one in times)
    steps = [step for one in times if (step := one.step_s(start_s, end_s)) is not None]
    if len(steps) < len(times) or end_s <= start_s:
        return None
    return median(steps)


def _gap_at(times: Sequence[TokenTimes], at_s: float) -> float | None:
    """Return the seconds of the step that ended at `at_s` by all streams; None if one was not running."""
    gaps = []
    for one in times:
        stamps = [at for at, _ in one.stamps]
        if len(stamps) < 4 or not stamps[1] < at_s < stamps[-1]:
            return None
        # A step's tokens come within moments of each other, in any order.
        ends = min(range(1, len(stamps)), key=lambda i: abs(stamps[i] - at_s))
        gaps.append(stamps[ends] - stamps[ends - 1])
    return median(gaps) if gaps else None


async def probe_host(
    client: EngineClient,
    facts: ServerFacts,
    latency: LatencyModel,
    rng: random.Random,
    clock: Callable[[], float] = time.monotonic,
) -> LatencyModel:
    """Return a latency model with the host time that an idle server adds, in place of the assumed one.

    Raises `BusyError` if others use the server, `ServerFailed` if it does not answer.
    """
    if not await settled(client, facts):
        raise BusyError("the server is busy with the work of others: its host time cannot be measured")
    probe = HostProbe(latency, facts.capacity.max_model_len)
    while tokens := probe.next_tokens():
        began = clock()
        (times,) = await client.complete(distinct_prompts(rng, 1, PROMPT_TOKENS), tokens)
        probe.answered(times.first_s - began, times.step_s(times.first_s, times.last_s), clock() - began)
    return probe.found()
