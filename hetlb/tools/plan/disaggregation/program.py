"""A mixed-integer program over kinds of groups: a start for the search, and a bound on its results.

With `complete` templates, no plan serves more than `bound` requests/s.

Similar machines are a class (in a small cluster every machine is one). A template is a group of GPUs, a
number of each class of machines, in a role. The program chooses how many of each template, and how much KV
flows from class to class. Prefill templates of a class emit KV and decode templates take it in, within the
links between the classes. `place` assigns groups to machines, first fit by size.

A template has its group's promised rate until a solution uses it: then its pipeline is simulated and the
program solved again, first without integers. So few templates are simulated, and every bound holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hetlb.tools.plan.common.capabilities import refused
from hetlb.tools.plan.common.composition import MOST_GPUS
from hetlb.tools.plan.disaggregation.cost import GroupTable
from hetlb.tools.plan.disaggregation.network import LINK_SHARE
from hetlb.tools.plan.disaggregation.split_cluster import Composition, Role, ServerGroup, SplitCluster
from hetlb.tools.plan.highs import INFINITY, LinearProgram, OnProgress, SolveLimits

#: Largest cluster with a class for each machine, in machines.
_FEW_MACHINES = 8
#: Largest cluster with a template for every composition, in GPUs.
_FEW_GPUS = 8
#: Most templates that the program takes in time; of more, groups across machines that gain nothing go.
_MANY_TEMPLATES = 2000
#: Most choices of templates that are placed.
_MOST_CHOICES = 8
#: Least number of a template in a solution. Smaller ones are rounding.
_LEAST_TEMPLATE_USE = 1e-6
#: Most machines of one group; beyond two, all hold equally many of its GPUs.
_MOST_MACHINES = 8

#: (class, GPUs in one machine of it), sorted.
Shape = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Template:
    """A group up to the choice of machines; until it is `exact`, its capacity may be more than it serves."""

    shape: Shape
    group: ServerGroup
    exact: bool


#: Templates with their numbers.
Choice: TypeAlias = tuple[tuple[Template, int], ...]


@dataclass(frozen=True, slots=True)
class Solved:
    """Solution of the program: the best choices first, and the most requests/s that any has.

    Links are counted by class. Placed on machines, a choice may serve less.
    """

    choices: tuple[Choice, ...]
    bound: float


class Templates:
    """All templates of a cluster."""

    def __init__(self, table: GroupTable, limits: SolveLimits) -> None:
        cluster = table.cluster
        self._table = table
        self.cluster = cluster
        self.members = _classes(cluster)
        #: True if every composition that fits has a template.
        self.complete = cluster.gpus <= _FEW_GPUS and all(len(own) == 1 for own in self.members)
        self.templates: list[Template] = []
        for shape in self._shapes():
            if limits.over and self.templates:
                self.complete = False
                break
            composition = self._example(shape)
            if composition is None:
                continue
            for role in Role:
                sure, group = table.sure(composition, role), table.promised(composition, role)
                if sure is not None:
                    self.templates.append(Template(shape, sure, exact=True))
                if group is not None and not group.is_exact:
                    self.templates.append(Template(shape, group, exact=False))
        if len(self.templates) > _MANY_TEMPLATES:
            self.templates = list(self._worthwhile())

    def _worthwhile(self) -> Iterator[Template]:
        """Yield groups inside one machine, and groups across machines that serve more than inside."""
        inside: dict[tuple[int, Role], float] = {}
        for template in self.templates:
            if len(template.shape) == 1:
                ((c, n),) = template.shape
                key = c, template.group.role
                inside[key] = max(inside.get(key, 0.0), template.group.capacity / n)
        for template in self.templates:
            role = template.group.role
            apart = math.fsum(n * inside.get((c, role), 0.0) for c, n in template.shape)
            if len(template.shape) == 1 or template.group.capacity > apart:
                yield template

    def _shapes(self) -> Iterator[Shape]:
        most = [self.cluster.machines[own[0]].gpus for own in self.members]
        if self.complete:
            for vector in itertools.product(*(range(n + 1) for n in most)):
                if sum(vector):
                    yield tuple((c, n) for c, n in enumerate(vector) if n)
            return
        entries = [(c, n) for c, gpus in enumerate(most) for n in range(1, gpus + 1)]
        for entry in entries:
            yield (entry,)
        for pair in itertools.combinations_with_replacement(entries, 2):
            if pair[0][1] + pair[1][1] <= MOST_GPUS:
                yield pair
        for n in sorted({n for _, n in entries}):
            own = [c for c, gpus in enumerate(most) if gpus >= n]
            for size in range(3, min(_MOST_MACHINES, MOST_GPUS // n) + 1):
                for first, second in itertools.combinations_with_replacement(own, 2):
                    for k in range(1, size) if first != second else (size,):
                        yield tuple(sorted([(first, n)] * k + [(second, n)] * (size - k)))

    def _example(self, shape: Shape) -> Composition | None:
        used: dict[int, int] = {}
        found = []
        for c, n in shape:
            at = used.get(c, 0)
            if at == len(self.members[c]):
                return None
            used[c] = at + 1
            found.append((self.members[c][at], n))
        return tuple(sorted(found))

    def solve(
        self, limits: SolveLimits, roles: Sequence[Role] = tuple(Role), on_progress: OnProgress | None = None
    ) -> Solved | None:
        """Return the best numbers of templates in these roles found within the limits.

        Templates with exact capacities come first, as they take no simulation; then all. Groups for both
        phases that cannot take part in transfers stand in plans without splitting alone.
        """
        mixed = len(roles) > 1
        choices: list[Choice] = []
        bound = math.inf
        for promised in (False, True):
            own = [
                at
                for at, template in enumerate(self.templates)
                if template.group.role in roles
                and (template.exact or promised)
                and not (mixed and template.group.role is Role.BOTH and refused(template.group.form()))
            ]
            if promised and not own:
                bound = 0.0  # no group can serve in these roles
            integer = False
            while own:
                incumbents: list[NDArray[np.float64]] = []
                program, numbers = self._program(own, integer)
                solution = program.solve(limits, on_progress=on_progress, on_solution=incumbents.append)
                if solution is None:
                    break
                used = [at for at in own if solution.values[numbers[at]] > _LEAST_TEMPLATE_USE]
                if integer and (limits.over or not self._simulate(used)):
                    bound = solution.bound if promised else math.inf
                    # Layouts that the program met on its way to all templates may need simulations.
                    values = (solution.values, *([] if promised else incumbents[:-_MOST_CHOICES:-1]))
                    choices = [*(self._choice(numbers, each) for each in values), *choices]
                    break
                integer = integer or limits.over or not self._simulate(used)
        return Solved(tuple(dict.fromkeys(choices)), bound) if choices or not bound else None

    def simplest(self) -> Choice:
        """Return groups for both phases, the most requests/s per GPU first. No solver is needed."""
        groups = [each for each in self.templates if each.exact and each.group.role is Role.BOTH]
        left = [len(own) * self.cluster.machines[own[0]].gpus for own in self.members]
        choice = []
        for template in sorted(groups, key=lambda t: -t.group.capacity / sum(n for _, n in t.shape)):
            need = _need(template.shape)
            count = min(left[c] // n for c, n in need.items())
            if count:
                choice.append((template, count))
                for c, n in need.items():
                    left[c] -= count * n
        return tuple(choice)

    def _choice(self, numbers: dict[int, int], values: NDArray[np.float64]) -> Choice:
        counts = {at: round(values[number]) for at, number in numbers.items()}
        return tuple((self.templates[at], count) for at, count in counts.items() if count > 0)

    def _simulate(self, used: Sequence[int]) -> bool:
        """Set the rates of templates to what their groups serve in simulation.

        Return False if all of them had these rates already.
        """
        promised = [at for at in used if not self.templates[at].exact]
        for at in promised:
            shape, role = self.templates[at].shape, self.templates[at].group.role
            composition = self._example(shape)
            group = None if composition is None else self._table.group(composition, role)
            group = group or replace(self.templates[at].group, capacity=0.0)
            self.templates[at] = Template(shape, group, exact=True)
        return bool(promised)

    def _program(self, own: Sequence[int], integer: bool) -> tuple[LinearProgram, dict[int, int]]:
        """Return the program over templates, and the column of the number of each."""
        cluster = self.cluster
        program = LinearProgram()
        gpus: list[list[tuple[int, float]]] = [[] for _ in self.members]
        sent: list[list[tuple[int, float]]] = [[] for _ in self.members]
        taken: list[list[tuple[int, float]]] = [[] for _ in self.members]
        numbers = {}
        totals = [len(m) * cluster.machines[m[0]].gpus for m in self.members]
        for at in own:
            template = self.templates[at]
            role, capacity = template.group.role, template.group.capacity
            need = _need(template.shape)
            most = min(totals[c] // n for c, n in need.items())
            number = program.column(capacity if role is Role.BOTH else 0.0, 0.0, most, integer=integer)
            numbers[at] = number
            for c, n in need.items():
                gpus[c].append((number, float(n)))
            if role is not Role.BOTH:
                rate = program.column(1.0 if role is Role.PREFILL else 0.0)
                program.row([(rate, 1.0), (number, -capacity)], upper=0.0)
                for c, share in self._shares(template.group).items():
                    (sent if role is Role.PREFILL else taken)[c].append((rate, share))
        for c, entries in enumerate(gpus):
            program.row(entries, upper=totals[c])
        self._add_links(program, sent, taken)
        return program, numbers

    def _add_links(
        self,
        program: LinearProgram,
        sent: Sequence[list[tuple[int, float]]],
        taken: Sequence[list[tuple[int, float]]],
    ) -> None:
        """Add rows for the KV flows from class to class, within the links between them."""
        into: list[list[tuple[int, float]]] = [[] for _ in self.members]
        for c, entries in enumerate(sent):
            out = []
            for d in range(len(self.members)):
                flow = program.column(0.0, 0.0, self._link(c, d))
                out.append((flow, -1.0))
                into[d].append((flow, -1.0))
            program.row([*entries, *out], 0.0, 0.0)
        for d, entries in enumerate(taken):
            program.row([*entries, *into[d]], 0.0, 0.0)

    def _shares(self, group: ServerGroup) -> dict[int, float]:
        class_of = {m: c for c, own in enumerate(self.members) for m in own}
        shares: dict[int, float] = {}
        for stage in group.stages:
            c = class_of[stage.machine]
            shares[c] = shares.get(c, 0.0) + stage.layers / self.cluster.model.layers
        return shares

    def _link(self, c: int, d: int) -> float:
        """Return the requests/s with KV caches that fit all links between machines of two classes."""
        if c == d:
            return INFINITY
        rates = self.cluster.links.bytes_per_s
        total = math.fsum(rates[i][j] for i in self.members[c] for j in self.members[d])
        return LINK_SHARE * total / self.cluster.kv_bytes

    def place(self, choice: Choice) -> list[tuple[Composition, Role]]:
        """Return machines for the chosen templates, the largest first; ones without room are left out."""
        machines = self.cluster.machines
        left = [machine.gpus for machine in machines]
        wanted = [template for template, count in choice for _ in range(count)]
        wanted.sort(key=lambda t: (-max(n for _, n in t.shape), -len(t.shape)))
        found = []
        for template in wanted:
            chosen: list[tuple[int, int]] = []
            for c, n in template.shape:
                used = {m for m, _ in chosen}
                fits = [m for m in self.members[c] if left[m] >= n and m not in used]
                if not fits:
                    break
                chosen.append((min(fits, key=lambda m: left[m]), n))
            else:
                for m, n in chosen:
                    left[m] -= n
                found.append((tuple(sorted(chosen)), template.group.role))
        return found


def _need(shape: Shape) -> dict[int, int]:
    """Return the GPUs of each class that a template takes."""
    need: dict[int, int] = {}
    for c, n in shape:
        need[c] = need.get(c, 0) + n
    return need


def _classes(cluster: SplitCluster) -> list[list[int]]:
    """Return the classes of similar machines: same GPUs, as many, same site and links."""
    if len(cluster.machines) <= _FEW_MACHINES:
        return [[m] for m in range(len(cluster.machines))]
    classes: dict[tuple[object, ...], list[int]] = {}
    for m, machine in enumerate(cluster.machines):
        classes.setdefault((cluster.kinds[m], machine.gpus, machine.site), []).append(m)
    return list(classes.values())
