"""Groups of a large fleet, so that a decision does not look at every instance.

A fleet beyond `LARGEST_WHOLE` instances is dealt into groups that are alike: each has its share of the fast
and of the slow. A decision looks at two groups, and at the one that holds most of the prompt: the better of
two is enough to keep loads level (Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001).
Which two follows from the request's number alone, so that a replay chooses the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.core.instance import Instance
from hetlb.core.prefix_index import Held

#: A fleet of so many instances is looked at as a whole.
LARGEST_WHOLE: Final = 128
#: Instances of a group, at most.
_LARGEST: Final = 64
#: Sequences of instances that are remembered.
_MOST_KNOWN: Final = 64


@mypyc_attr(acyclic=True)
class Group:
    """Part of a fleet: its instances, their indices in the fleet, and their share of it."""

    __slots__ = ("indices", "instances", "share")

    def __init__(self, fleet: Sequence[Instance], indices: list[int]) -> None:
        self.indices = indices
        self.instances = [fleet[i] for i in indices]
        self.share = len(indices) / len(fleet)


@mypyc_attr(acyclic=True)
class _Divided:
    """A fleet and its groups; `holders`: the number of a group by `Tree.cache_id`."""

    __slots__ = ("fleet", "groups", "holders")

    def __init__(self, fleet: Sequence[Instance]) -> None:
        self.fleet = fleet
        count = -(-len(fleet) // _LARGEST)
        # Dealt out by speed, so that no group has more than its share of the fast.
        order = sorted(range(len(fleet)), key=lambda i: (_step_s(fleet[i]), fleet[i].max_num_seqs))
        self.groups = [Group(fleet, sorted(order[number::count])) for number in range(count)]
        self.holders: dict[int, int] = {}
        for number, group in enumerate(self.groups):
            for instance in group.instances:
                self.holders[instance.tree.cache_id] = number


def _step_s(instance: Instance) -> float:
    """Seconds of a step with a usual batch."""
    return instance.nominal.step_s(32.0, 32_000.0)


@mypyc_attr(acyclic=True)
class Groups:
    """Groups of every fleet that is asked about."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, _Divided] = {}

    def in_order(self, fleet: Sequence[Instance], number: int, held: Held | None) -> tuple[list[Group], int]:
        """All groups in the order in which a request looks at them, and how many it looks at in any case.

        `number` is the request's, `held` what prefix caches have of its prompt. The sequence is known again
        by its identity: do not change it.
        """
        divided = self._known.get(id(fleet))
        if divided is None or divided.fleet is not fleet:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            divided = self._known[id(fleet)] = _Divided(fleet)
        groups = divided.groups
        count = len(groups)
        first = number % count
        second = (first + 1 + number // count % (count - 1)) % count
        looked = [first, second]
        if held is not None and held.tokens:
            most = max(held.tokens, key=held.tokens.__getitem__)
            holding = divided.holders.get(most, first)
            if holding not in looked:
                looked.append(holding)
        found = [groups[i] for i in looked]
        for step in range(count):
            i = (second + step) % count
            if i not in looked:
                found.append(groups[i])
        return found, len(looked)
