"""Search for plans: a program over kinds of groups and a spectral partition to begin with, then guided moves.

Every candidate keeps all limits; the same seed and number of steps give the same candidates; Ctrl-C
or the end of the time leave the best so far.

A move changes one or two groups: some GPUs go from one to another, two exchange GPUs, one divides, two merge,
a role changes. As in HexGen-2 (section 3.4) the flow guides it: GPUs go from what has capacity to spare to
what limits the flow. Accepted as in simulated annealing, since many moves change nothing until a second one
follows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hetlb.tools.plan.common.annealing import anneal
from hetlb.tools.plan.common.composition import MOST_GPUS
from hetlb.tools.plan.disaggregation.cost import GroupTable
from hetlb.tools.plan.disaggregation.network import Network
from hetlb.tools.plan.disaggregation.partition import assign_roles, group_count, partition
from hetlb.tools.plan.disaggregation.program import Templates
from hetlb.tools.plan.disaggregation.split_cluster import Composition, Role, SplitPlan
from hetlb.tools.plan.highs import SolveLimits

#: A group of a candidate. Its GPUs may be too few for the model; then it serves nothing.
Part = tuple[Composition, Role]

#: Temperatures of a round at its beginning and end, as shares of the throughput.
_HEAT = (0.05, 0.0005)
#: Steps of a round; rounds start from the best candidates in turn.
_ROUND = 1500
#: Weight of capacity that nothing uses: a direction where the throughput has none.
_SLACK_WEIGHT = 0.02
#: Up to so many GPUs, partitions into several numbers of groups are starts.
_SMALL_GPUS = 64
#: Shares of the time that is left, most of which is not needed: for the templates, the program without
#: splitting and the one with it; and the least seconds.
_TEMPLATES_SHARE, _COLOCATED_SHARE, _PROGRAM_SHARE = 0.3, 0.2, 0.6
_LEAST_S = 0.3
#: The search ends when the throughput has reached this share of the bound.
_ENOUGH = 1.0 - 1e-4
#: Plans that are kept, for a judge: the best, if they reach this share of the best of their round.
_KEPT, _KEPT_SHARE = 24, 0.9


@dataclass
class SplitsFound:
    """The best plans, the best first, and the best one whose groups all do both.

    `bound`: no plan serves more; `template_bound`: none of the groups that the program chose from. Infinite
    where none is known.
    """

    plans: list[SplitPlan] = field(default_factory=list)
    colocated: SplitPlan | None = None
    bound: float = math.inf
    template_bound: float = math.inf
    steps: int = 0


@dataclass(slots=True)
class _State:
    parts: list[Part]
    prefill: float = 0.0
    decode: float = 0.0
    both: float = 0.0
    throughput: float = 0.0
    plan: SplitPlan | None = None

    @property
    def score(self) -> float:
        return self.throughput + _SLACK_WEIGHT * (max(self.prefill, self.decode) + self.both)


class SplitSearch:
    """One search; finds `kept` plans at most, of those with `kept_share` of the best of their round."""

    def __init__(
        self,
        table: GroupTable,
        *,
        roles: Sequence[Role] = tuple(Role),
        kept: int = _KEPT,
        kept_share: float = _KEPT_SHARE,
        seed: int = 0,
        progress: Callable[[float, float], object] = lambda best, bound: None,
    ) -> None:
        self._table = table
        self._network = Network(table.cluster)
        self._roles = tuple(roles)
        self._most_kept = kept
        self._kept_share = kept_share
        self._rng = random.Random(seed)
        self._progress = progress
        self._kept: dict[tuple[Part, ...], SplitPlan] = {}
        self._found = SplitsFound()

    def run(self, limits: SolveLimits, most_steps: float = math.inf) -> SplitsFound:
        """Search until the limits are over, the bound is reached, or so many moves were tried."""
        states = self._starts(limits)
        best = max((state.throughput for state in states), default=0.0)
        at = 0
        while (
            states
            and not limits.over
            and best < self._found.bound * _ENOUGH
            and self._found.steps < most_steps
        ):
            states.sort(key=lambda state: -state.throughput)
            del states[4:]
            # The best one is begun with every second time.
            start = states[0] if at % 2 == 0 else states[(at // 2) % len(states)]
            at += 1
            end = self._round(start, limits)
            if end.throughput > best * (1.0 + 1e-6):
                best = end.throughput
                self._progress(best, self._found.bound)
            if all(sorted(end.parts) != sorted(state.parts) for state in states):
                states.append(end)
        self._found.plans = sorted(self._kept.values(), key=lambda plan: -plan.throughput)
        return self._found

    # --- starts ---

    def _starts(self, limits: SolveLimits) -> list[_State]:
        states = []
        templates = Templates(self._table, self._part(limits, _TEMPLATES_SHARE))
        both = templates.solve(self._part(limits, _COLOCATED_SHARE), (Role.BOTH,))
        if both is not None:
            state = self._state(templates.place(both.choices[0]))
            self._found.colocated = state.plan or self._plan(state)
            states.append(state)
        solved = templates.solve(self._part(limits, _PROGRAM_SHARE), self._roles)
        if solved is not None:
            states += [self._state(templates.place(choice)) for choice in solved.choices]
            self._found.template_bound = solved.bound
            if templates.complete:
                self._found.bound = solved.bound
        count = group_count(self._table.cluster)
        few = self._table.cluster.gpus <= _SMALL_GPUS
        sizes = {count, max(2, count // 2), max(2, count * 2 // 3)} if few else {count}
        for size in sizes:
            if limits.over and states:
                break
            groups = partition(self._table.cluster, size, self._rng)
            roles = assign_roles(self._table.cluster, groups, self._rng)
            states.append(self._state(list(zip(groups, roles, strict=True))))
        # The program's first answer may be to use nothing, from where no move leads.
        states = [state for state in states if state.parts and all(r in self._roles for _, r in state.parts)]
        for state in states:
            if state.throughput > 0.0:
                self._keep(state)
        return states

    @staticmethod
    def _part(limits: SolveLimits, share: float) -> SolveLimits:
        """Limits of a part of the search: a share of what is left, but time enough for a small problem."""
        now = limits.clock()
        left = min(limits.deadline - now, 1e6)
        return replace(limits, gap=1e-3, deadline=now + max(_LEAST_S, left * share))

    # --- evaluation ---

    def _state(self, parts: list[Part], least: float = 0.0) -> _State:
        """Return a candidate's figures; with pipelines and flows if it could serve `least`."""
        state = _State(parts)
        self._sum(state, self._table.most)
        if least == 0.0 or state.throughput > least:
            self._sum(state, self._table.capacity)
        if state.throughput > least and state.prefill > 0.0 and state.decode > 0.0:
            state.plan = self._plan(state)
            state.throughput = state.plan.throughput
        return state

    @staticmethod
    def _sum(state: _State, capacity: Callable[[Composition, Role], float]) -> None:
        """Put together what the groups of a candidate serve, if links were no limit."""
        rates = dict.fromkeys(Role, 0.0)
        for composition, role in state.parts:
            rates[role] += capacity(composition, role)
        state.prefill, state.decode, state.both = (rates[r] for r in (Role.PREFILL, Role.DECODE, Role.BOTH))
        state.throughput = min(state.prefill, state.decode) + state.both

    def _plan(self, state: _State) -> SplitPlan:
        found = (self._table.group(composition, role) for composition, role in state.parts)
        return self._network.solve([group for group in found if group is not None])

    def _keep(self, state: _State) -> None:
        state = self._with_one_role(state)
        if len(self._kept) >= self._most_kept:
            worst = min(plan.throughput for plan in self._kept.values())
            if state.throughput <= worst:
                return
        key = tuple(sorted(p for p in state.parts if self._table.capacity(*p) > 0.0))
        if key and key not in self._kept:
            self._kept[key] = state.plan or self._plan(state)
            if len(self._kept) > self._most_kept:
                del self._kept[min(self._kept, key=lambda each: self._kept[each].throughput)]

    def _with_one_role(self, state: _State) -> _State:
        """Return the candidate, where a group that does both serves more with one role with that role.

        The scheduler would use it that way: what such a group serves beside others is then underestimated.
        """
        for g, (composition, role) in enumerate(state.parts):
            scarce, _ = self._unequal(state)
            if role is not Role.BOTH or scarce is None or scarce not in self._roles:
                continue
            more = min(abs(state.prefill - state.decode), self._table.capacity(composition, scarce))
            if more > self._table.capacity(composition, role):
                parts = state.parts.copy()
                parts[g] = composition, scarce
                other = self._state(parts)
                if other.throughput > state.throughput:
                    state = other
        return state

    # --- a round of annealing ---

    def _round(self, start: _State, limits: SolveLimits) -> _State:
        best, step = start, 0

        def done() -> float:
            nonlocal step
            if step % 16 == 0 and limits.over:
                return 1.0
            step += 1
            self._found.steps += 1
            return (step - 1) / _ROUND

        def evaluate(parts: list[Part], threshold: float) -> tuple[_State, float]:
            state = self._state(parts, threshold / (1.0 + 4.0 * _SLACK_WEIGHT))
            return state, state.score

        def accepted(state: _State) -> None:
            nonlocal best
            if state.throughput > best.throughput * (1.0 + 1e-9):
                best = state
            if state.throughput > self._kept_share * best.throughput:
                self._keep(state)

        scale = max(start.throughput, 1e-9)
        anneal(
            start,
            start.score,
            self._move,
            evaluate,
            done=done,
            scale=scale,
            heat=_HEAT,
            rng=self._rng,
            accepted=accepted,
        )
        return best

    # --- moves ---

    def _move(self, state: _State) -> list[Part] | None:
        rng, parts = self._rng, state.parts
        kind = rng.random()
        if kind < 0.2:
            return self._change_role(state)
        if kind < 0.5:
            return self._transfer(state)
        if kind < 0.7:
            return self._exchange(parts, *rng.sample(range(len(parts)), 2)) if len(parts) > 1 else None
        if kind < 0.8:
            return self._merge(parts)
        if kind < 0.9:
            return self._divide(parts)
        return self._use_idle(parts)

    @staticmethod
    def _unequal(state: _State) -> tuple[Role | None, Role | None]:
        """Return the phase that limits the flow, and the one with capacity to spare."""
        if state.prefill == state.decode:
            return None, None
        less = state.prefill < state.decode
        return (Role.PREFILL, Role.DECODE) if less else (Role.DECODE, Role.PREFILL)

    def _pick(self, state: _State, wanted: Role | None) -> int:
        """Return a group, most often one in the wanted role."""
        rng, parts = self._rng, state.parts
        if wanted is not None and rng.random() < 0.75:
            own = [g for g, (_, role) in enumerate(parts) if role is wanted]
            if own:
                return rng.choice(own)
        return rng.randrange(len(parts))

    def _change_role(self, state: _State) -> list[Part] | None:
        scarce, spare = self._unequal(state)
        g = self._pick(state, spare)
        composition, role = state.parts[g]
        others = [each for each in self._roles if each is not role]
        if not others:
            return None
        new = scarce if scarce in others and self._rng.random() < 0.6 else self._rng.choice(others)
        parts = state.parts.copy()
        parts[g] = composition, new
        return parts

    def _transfer(self, state: _State) -> list[Part] | None:
        """Move GPUs of one machine from a group with spare capacity to one that limits the flow."""
        rng, parts = self._rng, state.parts
        if len(parts) < 2:
            return None
        scarce, spare = self._unequal(state)
        a, b = self._pick(state, spare), self._pick(state, scarce)
        if a == b:
            return None
        machine, held = rng.choice(parts[a][0])
        count = rng.choice([n for n in (1, 2, 4, held) if n <= held])
        first, second = _changed(parts[a][0], machine, -count), _changed(parts[b][0], machine, count)
        return _replaced(parts, {a: (first, parts[a][1]), b: (second, parts[b][1])})

    def _exchange(self, parts: list[Part], a: int, b: int) -> list[Part] | None:
        rng = self._rng
        (m, held), (k, other) = rng.choice(parts[a][0]), rng.choice(parts[b][0])
        if m == k:
            return None
        give = rng.choice([n for n in (1, 2, 4, held) if n <= held])
        take = rng.choice([n for n in (1, 2, 4, other) if n <= other])
        first = _changed(_changed(parts[a][0], m, -give), k, take)
        second = _changed(_changed(parts[b][0], k, -take), m, give)
        return _replaced(parts, {a: (first, parts[a][1]), b: (second, parts[b][1])})

    def _merge(self, parts: list[Part]) -> list[Part] | None:
        if len(parts) < 2:
            return None
        a, b = self._rng.sample(range(len(parts)), 2)
        merged = parts[a][0]
        for machine, count in parts[b][0]:
            merged = _changed(merged, machine, count)
        return _replaced(parts, {a: (merged, parts[a][1]), b: ((), parts[b][1])})

    def _divide(self, parts: list[Part]) -> list[Part] | None:
        rng = self._rng
        g = rng.randrange(len(parts))
        composition, role = parts[g]
        if sum(n for _, n in composition) < 2:
            return None
        if len(composition) > 1 and rng.random() < 0.5:
            at = rng.randrange(1, len(composition))
            first, second = composition[:at], composition[at:]
        elif rng.random() < 0.5 and all(n % 2 == 0 for _, n in composition):
            first = second = tuple((m, n // 2) for m, n in composition)
        else:
            machine, held = rng.choice(composition)
            count = rng.randint(1, held)
            first, second = _changed(composition, machine, -count), ((machine, count),)
        if not first or not second:
            return None
        new = rng.choice(self._roles) if rng.random() < 0.5 else role
        return [*_replaced(parts, {g: (first, role)}), (second, new)]  # type: ignore[misc]

    def _use_idle(self, parts: list[Part]) -> list[Part] | None:
        """GPUs in no group join one, or are a group of their own."""
        rng = self._rng
        left = {m: machine.gpus for m, machine in enumerate(self._table.cluster.machines)}
        for composition, _ in parts:
            for m, n in composition:
                left[m] -= n
        idle = [(m, n) for m, n in left.items() if n > 0]
        if not idle:
            return None
        machine, free = rng.choice(idle)
        count = rng.randint(1, free)
        if not parts or rng.random() < 0.5:
            return [*parts, (((machine, count),), rng.choice(self._roles))]
        g = rng.randrange(len(parts))
        return _replaced(parts, {g: (_changed(parts[g][0], machine, count), parts[g][1])})


def _changed(composition: Composition, machine: int, by: int) -> Composition:
    held = dict(composition)
    held[machine] = held.get(machine, 0) + by
    return tuple(sorted((m, n) for m, n in held.items() if n > 0))


def _replaced(parts: list[Part], new: dict[int, Part]) -> list[Part] | None:
    """Parts with some replaced and empty ones left out; None where one has too many GPUs."""
    found = []
    for g, part in enumerate(parts):
        part = new.get(g, part)
        if sum(n for _, n in part[0]) > MOST_GPUS and g in new:
            return None
        if part[0]:
            found.append(part)
    return found
