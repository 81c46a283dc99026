"""How much work is asked for, in sizes that no instance decides.

Promise: the size of a request is `PROMPT_WEIGHT * prompt + predicted output` tokens (a prompt token is read
together with many others, an output token takes a step of its own). A rate says what keeps arriving, not
what came at once: it is the mean over the slots of the last seconds without those far above their median, so
that a burst, which waits in the queue and is counted there, is not also taken for what is to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

from hetlb.core.instance import Figures, Instance
from hetlb.core.latency import ideal_batch, processing_s
from hetlb.core.types import Request

#: What one prompt token weighs against one output token.
PROMPT_WEIGHT = 0.15
#: Spans over which arrivals are watched, in seconds, ascending; each is cut into `SLOTS` slots.
HORIZONS_S = (1.0, 4.0, 16.0, 64.0, 256.0)
SLOTS = 16
#: A slot with more than this many times the median is a burst.
BURST = 3.0


def size_of(request: Request, predicted_output: float) -> float:
    """The size of a request in weighted tokens, all sequences together; at least 1."""
    return max(1.0, request.sequences * (PROMPT_WEIGHT * request.prompt_tokens + predicted_output))


class _Slots:
    """Sizes that arrived over one horizon, by slot; the newest slot is still filling."""

    __slots__ = ("_rate", "_slot", "_sums", "_width_s")

    def __init__(self, horizon_s: float) -> None:
        self._width_s = horizon_s / SLOTS
        self._slot = 0
        self._sums = [0.0] * SLOTS
        self._rate: float | None = 0.0  # None when it must be computed again

    def advance(self, now: float) -> None:
        slot = int(now / self._width_s)
        if slot > self._slot:
            for step in range(min(SLOTS, slot - self._slot)):
                self._sums[(slot - step) % SLOTS] = 0.0
            self._slot = slot
            self._rate = None

    def add(self, size: float) -> None:
        self._sums[self._slot % SLOTS] += size
        self._rate = None

    def rate(self) -> float:
        if self._rate is None:
            self._rate = self._steady_rate()
        return self._rate

    def _steady_rate(self) -> float:
        most = BURST * sorted(self._sums)[SLOTS // 2]
        steady = [total for total in self._sums if total <= most]
        return sum(steady) / (len(steady) * self._width_s)


#: The mean request follows the newest so many.
MIX_REQUESTS = 1000.0
#: An instance's speed is computed again when the mean request has changed by more than this share.
_MIX_CHANGE = 0.02


class Mix:
    """The mean request of a model, and how fast each instance is at it. Lengths in tokens.

    `output` is the mean prediction, `long` the mean of what counts as a long answer, `residual` what is
    left on average of an answer met at a random moment: E[O^2] / 2 E[O].
    """

    __slots__ = ("_count", "_fleet", "_measured", "_residual_weight", "_speeds", "long", "output", "prompt",
                 "residual")  # fmt: skip

    def __init__(self) -> None:
        self.prompt = self.output = self.long = self.residual = 0.0
        self._count = 0
        self._residual_weight = 0.0
        self._measured = (0.0, 0.0)
        self._speeds: dict[str, tuple[Figures, tuple[float, float, float, float]]] = {}
        self._fleet: tuple[list[Figures], float, list[int]] = ([], 0.0, [])

    @property
    def empty(self) -> bool:
        """Whether no request has come yet."""
        return self._count == 0

    def add(self, prompt: float, output: float, long: float, residual: float) -> None:
        """One more request, as predicted."""
        self._count += 1
        gain = max(1.0 / self._count, 1.0 / MIX_REQUESTS)
        self.prompt += gain * (prompt - self.prompt)
        self.output += gain * (output - self.output)
        self.long += gain * (long - self.long)
        # Long answers are met more often: what is left counts as often as the answer is long.
        self._residual_weight += gain * (output * residual - self._residual_weight)
        self.residual = self._residual_weight / self.output if self.output > 0.0 else 0.0
        old_prompt, old_output = self._measured
        if (
            abs(self.prompt - old_prompt) > _MIX_CHANGE * old_prompt
            or abs(self.output - old_output) > _MIX_CHANGE * old_output
        ):
            self._measured = (self.prompt, self.output)
            self._speeds.clear()
            self._fleet = ([], 0.0, [])

    def speed(self, instance: Instance) -> float:
        """Sizes per second that an instance does of the mean request, its batch full."""
        return self.costs(instance)[0]

    def fleet(self, instances: Sequence[Instance]) -> tuple[float, list[int]]:
        """The speed of all of them together, and their indices, who has a full batch done soonest first."""
        figures = [instance.figures for instance in instances]
        known, total, order = self._fleet
        if len(known) != len(figures) or not all(map(is_, known, figures)):
            costs = [self.costs(instance) for instance in instances]
            total = sum(cost[0] for cost in costs)
            order = sorted(range(len(costs)), key=lambda i: costs[i][3])
            self._fleet = (figures, total, order)
        return total, order

    def costs(self, instance: Instance) -> tuple[float, float, float, float]:
        """Speed as above, what a prompt and an output token cost of its time, how long a full batch takes.

        The latter three in seconds.
        """
        known = self._speeds.get(instance.name)
        if known is not None and known[0] is instance.figures:
            return known[1]
        prompt, output = self._measured

        def stay_s(of_prompt: float, of_output: float) -> tuple[float, int]:
            i, o = of_prompt * prompt, of_output * output
            batch = ideal_batch(instance.kv_cache_tokens, i, o, instance.max_num_seqs)
            return processing_s(instance.latency, batch, i, o), batch

        share_s, batch = stay_s(1.0, 1.0)
        speed = max(1.0, PROMPT_WEIGHT * prompt + output) / max(share_s, 1e-9)
        of_prompt_s = (stay_s(1.5, 1.0)[0] - stay_s(0.5, 1.0)[0]) / max(1.0, prompt)
        of_output_s = (stay_s(1.0, 1.5)[0] - stay_s(1.0, 0.5)[0]) / max(1.0, output)
        costs = (speed, max(0.0, of_prompt_s), max(0.0, of_output_s), share_s * batch)
        self._speeds[instance.name] = (instance.figures, costs)
        return costs


class Demand:
    """What is asked for, of one model: the mean request, and how much keeps arriving."""

    __slots__ = ("_horizons", "mix")

    def __init__(self) -> None:
        self._horizons = [_Slots(horizon) for horizon in HORIZONS_S]
        self.mix = Mix()

    def arrived(self, size: float, now: float) -> None:
        """A request of this size came in."""
        for slots in self._horizons:
            slots.advance(now)
            slots.add(size)

    def rate(self, horizon_s: float, now: float) -> float:
        """Size arriving per second, judged by about the last `horizon_s` seconds."""
        index = 0
        while index + 1 < len(HORIZONS_S) and HORIZONS_S[index + 1] <= horizon_s:
            index += 1
        slots = self._horizons[index]
        slots.advance(now)
        return slots.rate()
