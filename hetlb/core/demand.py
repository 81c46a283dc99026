"""Demand: the work that is asked for, in sizes that no instance decides.

The size of a request is `PROMPT_WEIGHT * prompt + predicted output` tokens (a prompt token is read
together with many others, an output token takes a step of its own). A rate says what keeps arriving, not
what came at once: it is the mean over the slots of the last seconds without those far above their median, so
that a burst, which waits in the queue and is counted there, is not also taken for what is to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hetlb.core.instance import Instance, Parameters
from hetlb.core.latency import ideal_batch
from hetlb.core.types import Request

#: Weight of a prompt token against one output token.
PROMPT_WEIGHT: Final = 0.15
#: Arrivals are watched over so many spans, the first so many seconds long, each of the next so many times as
#: long as the one before; each is cut into `SLOTS` slots.
_HORIZONS: Final = 5
_FIRST_HORIZON_S: Final = 1.0
_HORIZON_GROWTH: Final = 4.0
HORIZONS_S = tuple(_FIRST_HORIZON_S * _HORIZON_GROWTH**power for power in range(_HORIZONS))
SLOTS: Final = 16
#: A slot with more than this many times the median is a burst.
BURST: Final = 3.0
#: Arrivals are kept until a horizon is asked for, so many at most.
_KEPT: Final = 128
#: Nothing is expected any more after a silence in which so many mean requests should have come.
_SILENCE: Final = 16.0
#: Requests have begun to come when some arrived in so many slots of the first horizon.
_BEGINNING: Final = 4
#: Bounds of a rate allow for sums that were added up in another order.
_BELOW: Final = 1.0 - 1e-9
_ABOVE: Final = 1.0 + 1e-9


def size_of(request: Request, predicted_output: float) -> float:
    """The size of a request in weighted tokens, all sequences together; at least 1."""
    return max(1.0, request.sequences * (PROMPT_WEIGHT * request.prompt_tokens + predicted_output))


class _Slots:
    """Sizes that arrived over one horizon, by slot; the newest slot is still filling."""

    __slots__ = (
        "_rate", "_slot", "_sums", "bounded", "counted", "filled", "least", "most", "nothing_in", "taken",
        "width_s",
    )  # fmt: skip

    def __init__(self, horizon_s: float) -> None:
        self.width_s = horizon_s / SLOTS
        self._slot = 0
        self._sums = [0.0] * SLOTS
        #: Number of slots in which something arrived.
        self.filled = 0
        #: The newest slot, if that is known to be one of them.
        self.counted = -1
        self._rate: float | None = 0.0  # None when it must be computed again
        #: Number of the arrivals kept by `Demand` that are counted here.
        self.taken = 0
        #: The slot in which the rate is 0 whatever arrives: in most of the others nothing did.
        self.nothing_in = -1
        #: The slot for which `least` and `most` hold.
        self.bounded = -1
        self.least = self.most = 0.0

    def take(self, times: list[float], sizes: list[float]) -> None:
        """Count the arrivals that are not counted yet, in the order of time."""
        taken, count = self.taken, len(times)
        if taken == count:
            return
        width_s, sums = self.width_s, self._sums
        index = self._slot % SLOTS
        before = total = sums[index]
        for i in range(taken, count):
            if int(times[i] / width_s) > self._slot:
                self._fill(index, before, total)
                self.advance(times[i])
                index = self._slot % SLOTS
                before = total = sums[index]
            total += sizes[i]
        self._fill(index, before, total)
        self.taken = count
        self._rate = None

    def _fill(self, index: int, before: float, total: float) -> None:
        """A slot had `before` and has `total`."""
        self._sums[index] = total
        if before == 0.0 and total > 0.0:
            self.filled += 1

    def advance(self, now: float) -> None:
        slot = int(now / self.width_s)
        if slot > self._slot:
            for step in range(min(SLOTS, slot - self._slot)):
                index = (slot - step) % SLOTS
                if self._sums[index] > 0.0:
                    self._sums[index] = 0.0
                    self.filled -= 1
            self._slot = slot
            self._rate = None

    def rate(self) -> float:
        if self._rate is None:
            self._rate = self._steady_rate()
            if self._rate == 0.0 and self.filled < SLOTS // 2 - 1:
                self.nothing_in = self._slot
        return self._rate

    def _steady_rate(self) -> float:
        most = BURST * sorted(self._sums)[SLOTS // 2]
        steady = [total for total in self._sums if total <= most]
        return sum(steady) / (len(steady) * self.width_s)

    def bound(self) -> None:
        """Find `least` and `most`: between them `rate` stays whatever else arrives in the newest slot.

        While the newest slot counts as steady, more in it only raises the rate; once it is a burst, it is
        left out and the rate is that of the others.
        """
        self.bounded = self._slot
        if self.nothing_in == self._slot:
            self.least = self.most = 0.0
            return
        newest = self._slot % SLOTS
        others = sorted(total for index, total in enumerate(self._sums) if index != newest)
        most = BURST * others[SLOTS // 2]
        steady = [total for total in others if total <= most]
        without = sum(steady) / (len(steady) * self.width_s)
        if self._sums[newest] > most:
            self.least, self.most = without * _BELOW, without * _ABOVE
            return
        highest = (sum(steady) + most) / ((len(steady) + 1) * self.width_s)
        self.least, self.most = min(self.rate(), without) * _BELOW, highest * _ABOVE


#: The mean request follows the newest so many.
MIX_REQUESTS: Final = 1000.0
#: An instance's speed is computed again when the mean request has changed by more than this share.
_MIX_CHANGE: Final = 0.02
#: Sequences of instances that are known again.
_MOST_FLEETS: Final = 128


class Costs:
    """The mean request on an instance of given parameters.

    `speed`: sizes per second, its batch full. `prompt_s`, `output_s`: what a prompt token and an output token
    cost of its time; `batch_s`: how long a full batch takes; `first_token_s`: of the mean prompt, and one
    step more, while it is idle; `read_s`: of the mean prompt alone, and per token that is computed;
    `beside_s`: how much longer that takes beside a sequence that decodes. All in seconds.
    """

    __slots__ = (
        "batch_s", "beside_s", "first_token_s", "output_s", "prompt_s", "read_s", "speed", "token_read_s",
    )  # fmt: skip

    def __init__(
        self,
        speed: float,
        prompt_s: float,
        output_s: float,
        batch_s: float,
        first_token_s: float,
        read_s: float,
        token_read_s: float,
        beside_s: float,
    ) -> None:
        self.beside_s = beside_s
        self.first_token_s = first_token_s
        self.read_s = read_s
        self.token_read_s = token_read_s
        self.speed = speed
        self.prompt_s = prompt_s
        self.output_s = output_s
        self.batch_s = batch_s


class Fleet:
    """Facts about a sequence of instances under one mean request, until any of them changes.

    `costs` of each, `speed` of all together; `order`: their indices, a full batch done soonest first;
    `first_token_s`: of the mean prompt on the fastest one while it is idle; `token_read_s`: of a prompt token
    there, `reads_alike` if on all. `groups`: for each the number of its group of instances with equal
    parameters, -1 for one without an equal; there are `group_count`.
    """

    __slots__ = (
        "changes", "costs", "counter", "faster", "first_token_s", "group_count", "groups", "instances",
        "members", "order", "reads_alike", "speed", "token_read_s",
    )  # fmt: skip

    def __init__(self, instances: Sequence[Instance], costs: Sequence[Costs]) -> None:
        self.instances = instances
        #: The same as a list, which compiled code goes through faster.
        self.members = list(instances)
        self.counter = instances[0].changes
        self.changes = self.counter.count
        self.costs = list(costs)
        self.order = sorted(range(len(costs)), key=lambda i: costs[i].batch_s)
        #: For each the speed of those before it in `order`.
        self.faster = [0.0] * len(costs)
        speed = 0.0
        for i in self.order:
            self.faster[i] = speed
            speed += costs[i].speed
        self.speed = speed
        self.first_token_s = min([cost.first_token_s for cost in costs])
        reading = [cost.token_read_s for cost in costs]
        self.token_read_s = min(reading)
        self.reads_alike = self.token_read_s == max(reading)
        alike: dict[Parameters, list[int]] = {}
        for i, instance in enumerate(self.members):
            alike.setdefault(instance.parameters, []).append(i)
        self.groups = [-1] * len(costs)
        self.group_count = 0
        for equals in alike.values():
            if len(equals) > 1:
                for i in equals:
                    self.groups[i] = self.group_count
                self.group_count += 1


class Mix:
    """The mean request of a model, and how fast each instance is at it. Lengths in tokens.

    `output` is the mean prediction, `long` the mean of what counts as a long answer, `residual` what is
    left on average of an answer met at a random moment: E[O^2] / 2 E[O]. `booked` is what prompts of one
    sequence took of a KV cache and `read` what of them had to be computed, in the mean: less than `prompt`
    where they begin alike.
    """

    __slots__ = (
        "_bookings", "_costs", "_fleets", "_measured", "_measured_at", "_newest", "_residual_weight",
        "booked", "count", "long", "output", "prompt", "read", "residual",
    )  # fmt: skip

    def __init__(self) -> None:
        self.booked = self.read = 0.0
        self._bookings = 0
        self.prompt = self.output = self.long = self.residual = 0.0
        #: Requests so far.
        self.count = 0
        self._residual_weight = 0.0
        self._measured = (0.0, 0.0, 0.0, 0.0)
        #: By name, with the version of the instance's parameters.
        self._costs: dict[str, tuple[int, Costs]] = {}
        #: By parameters: instances of a large fleet are of few kinds.
        self._measured_at: dict[Parameters, Costs] = {}
        #: By the identity of their instances, which they keep.
        self._fleets: dict[int, Fleet] = {}
        #: That of the last decision.
        self._newest: Fleet | None = None

    def add(self, prompt: float, output: float, long: float, residual: float) -> None:
        """One more request, as predicted."""
        self.count = count = self.count + 1
        gain = 1.0 / count if count < MIX_REQUESTS else 1.0 / MIX_REQUESTS
        self.prompt = mean_prompt = self.prompt + gain * (prompt - self.prompt)
        self.output = mean_output = self.output + gain * (output - self.output)
        self.long += gain * (long - self.long)
        # Long answers are met more often: what is left counts as often as the answer is long.
        self._residual_weight = weight = self._residual_weight + gain * (
            output * residual - self._residual_weight
        )
        self.residual = weight / mean_output if mean_output > 0.0 else 0.0
        if not self._bookings:
            self.booked = self.read = mean_prompt
        old_prompt, old_output, old_booked, old_read = self._measured
        booked, read = self.booked, self.read
        if (
            abs(mean_prompt - old_prompt) > _MIX_CHANGE * old_prompt
            or abs(mean_output - old_output) > _MIX_CHANGE * old_output
            or abs(booked - old_booked) > _MIX_CHANGE * old_booked
            or abs(read - old_read) > _MIX_CHANGE * old_read
        ):
            self._measured = (mean_prompt, mean_output, booked, read)
            self._costs.clear()
            self._measured_at.clear()
            self._fleets.clear()
            self._newest = None

    def add_booking(self, kv_prompt_tokens: float, unread_tokens: float) -> None:
        """Of one sequence: tokens that its prompt took of a KV cache, and that had to be computed."""
        self._bookings = count = self._bookings + 1
        gain = 1.0 / count if count < MIX_REQUESTS else 1.0 / MIX_REQUESTS
        self.booked += gain * (kv_prompt_tokens - self.booked)
        self.read += gain * (unread_tokens - self.read)

    @property
    def size(self) -> float:
        """Size of the mean request: see `size_of`."""
        return PROMPT_WEIGHT * self.prompt + self.output

    def speed(self, instance: Instance) -> float:
        """Sizes per second that an instance does of the mean request, its batch full."""
        return self.costs(instance).speed

    def fleet(self, instances: Sequence[Instance]) -> Fleet:
        """Facts about all of them together. The sequence is known again by its identity: do not change it."""
        known = self._newest
        if known is None or known.instances is not instances:
            known = self._fleets.get(id(instances))
        if known is None or known.instances is not instances or known.changes != known.counter.count:
            costs = [self.costs(instance) for instance in instances]
            if len(self._fleets) >= _MOST_FLEETS:
                self._fleets.clear()
            known = self._fleets[id(instances)] = Fleet(instances, costs)
        self._newest = known
        return known

    def costs(self, instance: Instance) -> Costs:
        """Costs of the mean request on an instance. Read-only, valid until the next change."""
        known = self._costs.get(instance.name)
        if known is not None and known[0] == instance.parameters_version:
            return known[1]
        costs = self._measured_at.get(instance.parameters)
        if costs is None:
            if len(self._measured_at) >= _MOST_FLEETS:
                self._measured_at.clear()
            costs = self._measured_at[instance.parameters] = self._measure(instance)
        self._costs[instance.name] = instance.parameters_version, costs
        return costs

    def _measure(self, instance: Instance) -> Costs:
        prompt, output, booked, read = self._measured
        engines = instance.engines
        cache, slots = instance.kv_cache_tokens // engines, instance.max_num_seqs // engines

        def stay_s(of_prompt: float, of_output: float) -> tuple[float, int]:
            o = of_output * output
            batch = ideal_batch(cache, of_prompt * booked, o, slots)
            share_s = _share_s(instance, batch, of_prompt * prompt, of_prompt * read, o)
            return share_s / engines, batch * engines

        share_s, batch = stay_s(1.0, 1.0)
        of_prompt_s = (stay_s(1.5, 1.0)[0] - stay_s(0.5, 1.0)[0]) / max(1.0, prompt)
        of_output_s = (stay_s(1.0, 1.5)[0] - stay_s(1.0, 0.5)[0]) / max(1.0, output)
        latency = instance.latency
        computed = max(1.0, min(read, prompt))
        cached, context = max(0.0, prompt - computed), prompt + output / 2.0
        read_s = latency.prefill_s(max(1.0, prompt), 1.0, cached)
        beside_s = latency.first_token_s(prompt, cached, 0.0, 1.0, context, instance.token_budget)
        return Costs(
            speed=max(1.0, PROMPT_WEIGHT * prompt + output) / max(share_s, 1e-9),
            prompt_s=max(0.0, of_prompt_s),
            output_s=max(0.0, of_output_s),
            batch_s=share_s * batch,
            first_token_s=read_s + latency.step_s(1.0, prompt),
            read_s=read_s,
            token_read_s=read_s / computed,
            beside_s=max(0.0, beside_s - read_s),
        )


def _share_s(instance: Instance, batch: int, prompt: float, read: float, output: float) -> float:
    """One request's share of the seconds that a batch of such requests takes on one engine.

    `read` tokens of each prompt are computed, in passes as full as they may be.
    """
    latency = instance.latency
    read = max(1.0, min(read, prompt))
    together = max(1.0, min(batch, instance.token_budget / read))
    read_s = latency.prefill_s(max(1.0, prompt), together, max(0.0, prompt - read)) / together
    return read_s + output * latency.step_s(batch, batch * (prompt + output / 2.0)) / batch


class Demand:
    """Demand for one model: the mean request, and the rate at which requests keep arriving."""

    __slots__ = ("_horizons", "_sizes", "_times", "mix", "newest_s")

    def __init__(self) -> None:
        self._horizons = [_Slots(horizon) for horizon in HORIZONS_S]
        #: Arrivals are counted when a horizon is asked for: at most decisions none is.
        self._times: list[float] = []
        self._sizes: list[float] = []
        self.mix = Mix()
        #: Time of the newest request.
        self.newest_s = 0.0

    def arrived(self, size: float, now: float) -> None:
        """A request of this size came in."""
        times, sizes = self._times, self._sizes
        self.newest_s = now
        times.append(now)
        sizes.append(size)
        if len(times) >= _KEPT:
            for slots in self._horizons:
                slots.take(times, sizes)
                slots.taken = 0
            times.clear()
            sizes.clear()

    def rate(self, horizon_s: float, now: float) -> float:
        """Size arriving per second, judged by about the last `horizon_s` seconds and the silence since."""
        rate = self._slot_rate(self._slots(horizon_s), now)
        return 0.0 if self._silent(rate, now) else rate

    def _slot_rate(self, slots: _Slots, now: float) -> float:
        if slots.nothing_in == int(now / slots.width_s):
            return 0.0
        slots.take(self._times, self._sizes)
        slots.advance(now)
        return slots.rate()

    def _silent(self, rate: float, now: float) -> bool:
        """True if arrivals at this rate have stopped: their slots notice it only when half of them are empty.

        Poisson arrivals are silent for so long once in e^16 requests.
        """
        missing = rate * (now - self.newest_s)
        return missing > 0.0 and missing > _SILENCE * self.mix.size

    def below(self, limit: float, horizon_s: float, now: float) -> bool:
        """True if `rate` is below a limit; mostly known without computing it."""
        least, most = self.bounds(horizon_s, now)
        if least >= limit:
            return False
        return most < limit or self.rate(horizon_s, now) < limit

    def ended(self, limit: float, horizon_s: float, now: float) -> bool:
        """True if requests have stopped coming: their rate is below a limit, and they have not just begun."""
        return self.below(limit, horizon_s, now) and not self.beginning(now)

    def beginning(self, now: float) -> bool:
        """True if requests have begun to come, one after the other: in several slots of the last second.

        The rate of a longer time does not show it yet. A burst comes in one slot or two.
        """
        slots = self._horizons[0]
        slot = int(now / slots.width_s)
        # More in the same slot changes nothing.
        if slots.counted != slot:
            slots.take(self._times, self._sizes)
            slots.advance(now)
            if int(self.newest_s / slots.width_s) == slot:
                slots.counted = slot
        return slots.filled >= _BEGINNING

    def bounds(self, horizon_s: float, now: float) -> tuple[float, float]:
        """Between which figures `rate` lies; computed once per slot of the horizon, but for the silence."""
        return self._bounds(self._slots(horizon_s), now)

    def most_rate(self, horizon_s: float, now: float) -> float:
        """An upper bound of `rate` over any horizon not shorter."""
        shortest, highest = self._slots(horizon_s), 0.0
        for slots in self._horizons:
            if slots.width_s >= shortest.width_s:
                most = self._bounds(slots, now)[1]
                if most > highest:
                    highest = most
        return highest

    def _bounds(self, slots: _Slots, now: float) -> tuple[float, float]:
        if slots.bounded != int(now / slots.width_s):
            self._slot_rate(slots, now)
            slots.bound()
        least, most = slots.least, slots.most
        if self._silent(most, now):
            least = 0.0
            if self._silent(slots.least, now):
                most = 0.0
        return least, most

    def _slots(self, horizon_s: float) -> _Slots:
        """The longest horizon that is not longer than asked for, or the shortest there is."""
        index, next_s = 0, _HORIZON_GROWTH * _FIRST_HORIZON_S
        while next_s <= horizon_s and index < _HORIZONS - 1:
            index += 1
            next_s *= _HORIZON_GROWTH
        return self._horizons[index]
