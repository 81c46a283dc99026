"""Blocks of a large fleet: instances that follow each other in the order of speed, as scoring reads them.

A block has lower bounds for its instances. Instances at rest differ in their recent prompts alone; the block
knows which of them a decision would take. So a decision looks at the instances of few blocks. A block is made
anew after one of its instances was touched, or when one changes with time alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.occupancy import UNREAD_ITERATIONS, Occupancy
from hetlb.balancer.core.rate import MEMORY_S

if TYPE_CHECKING:
    from hetlb.balancer.core.instance import Instance

#: Instances of a block.
SIZE: Final = 32
#: Logarithm of a rate in tokens/s. Below it, recent prompts may change a score by less than rounding does.
_NEGLIGIBLE: Final = math.log(1e-4)
#: Difference of two such logarithms that a score shows.
_SHOWN: Final = 1e-6


@mypyc_attr(acyclic=True)
class Block:
    """Instances that follow each other in the order of speed, as they were `seen`. It is never changed.

    `first` is the position of the first instance. A decision rates each of the `others` by itself; the least
    figures over all of them (`joining_s`, `step_s` and so on) bound their scores from below. The `resting`
    instances are at rest and alike. Of these, `chosen` have the lowest score until `negligible_at`; from then
    on recent prompts count for nothing. `until` is the time when an instance changes by itself.

    `sure`: each instance with work has a free slot. `free`: the least room in their KV caches, in tokens.
    `running`: the most sequences of one. `crowded`: one of them has many prompts to read. `fastest`: the
    least factor of times that an instance without a profile showed. `untried`: idle instances without a
    profile or an answer.
    """

    __slots__ = (
        "chosen", "crowded", "fastest", "first", "free", "joining_s", "least_cache", "more_s", "more_token_s",
        "negligible_at", "others", "pass_s", "prompt_token_s", "resting", "running", "seen", "step_s", "sure",
        "token_s", "unread_s", "until", "untried",
    )  # fmt: skip

    def __init__(self, members: Sequence[Instance], first: int, now: float) -> None:
        """See `members` at `now`."""
        self.first = first
        self.seen: list[Occupancy] = []
        self.others: list[int] = []
        self.resting: list[int] = []
        self.untried: list[int] = []
        self.sure, self.crowded = True, False
        self.free = self.least_cache = self.until = self.fastest = math.inf
        self.running = 0.0
        self.joining_s = self.unread_s = self.pass_s = self.prompt_token_s = math.inf
        self.step_s = self.token_s = self.more_s = self.more_token_s = math.inf
        model: Instance | None = None
        for position, instance in enumerate(members):
            seen = instance.seen(now)
            self.seen.append(seen)
            until = instance.changes_at
            if until < self.until:
                self.until = until
            if instance.untried:
                self.untried.append(position)
            self.fastest = min(self.fastest, instance.shown_factor)
            if (
                seen.empty
                and seen.unread <= 0.0
                and seen.incoming <= 0.0
                and seen.context <= 0.0
                and not seen.troubled
            ):
                if model is None:
                    model = instance
                if instance is model or _alike(instance, model):
                    self.resting.append(position)
                    continue
            self.others.append(position)
            self._bound(instance, seen)
        self.chosen: list[int] = []
        self.negligible_at = math.inf
        if self.resting:
            self._choose(members)

    def _bound(self, instance: Instance, seen: Occupancy) -> None:
        """Include one more instance in the lower bounds."""
        load = seen.load
        if not seen.empty:
            if instance.kv_need is not None or seen.incoming > 0.0 or not instance.surely_has_slot:
                self.sure = False
            free = load.kv_cache_tokens - seen.kv_tokens - seen.kv_excess
            self.free = free if free < self.free else self.free
            self.running = seen.running if seen.running > self.running else self.running
            if load.kv_cache_tokens < self.least_cache:
                self.least_cache = load.kv_cache_tokens
            if seen.unread + seen.unread > UNREAD_ITERATIONS * load.budget:
                self.crowded = True
        self.joining_s = min(self.joining_s, seen.joining_s)
        self.unread_s = min(self.unread_s, load.prompt_token_s * seen.behind)
        self.pass_s = min(self.pass_s, load.pass_s)
        self.prompt_token_s = min(self.prompt_token_s, load.prompt_token_s)
        step_s = load.next_step_s + load.next_token_s * seen.context
        self.step_s = min(self.step_s, step_s)
        self.token_s = min(self.token_s, load.next_token_s)
        self.more_s = min(self.more_s, load.batch * (step_s - seen.now_s))
        self.more_token_s = min(self.more_token_s, load.batch * load.next_token_s)

    def _choose(self, members: Sequence[Instance]) -> None:
        """Find the instances at rest with the fewest recent prompts.

        If some have none at all, choose one of these: the one that `precedes` the others.
        """
        least, unused = math.inf, -1
        ranks: list[float] = []
        for position in self.resting:
            rank = self.seen[position].prefilling.rank
            ranks.append(rank)
            if rank > -math.inf:
                least = rank if rank < least else least
            elif unused < 0 or members[position].precedes(members[unused]):
                unused = position
        if least < math.inf:
            self.negligible_at = (least - _NEGLIGIBLE) * MEMORY_S
        if unused >= 0:
            self.chosen.append(unused)
            return
        for position, rank in zip(self.resting, ranks, strict=True):
            if rank <= least + _SHOWN:
                self.chosen.append(position)


def _alike(one: Instance, other: Instance) -> bool:
    """Return True if two instances at rest have equal scores after equally many recent prompts."""
    return one.kind is other.kind and one.caches_prefixes == other.caches_prefixes


class Blocks:
    """The blocks of the instances that share a mean request, kept until one changes its parameters."""

    def __init__(self, members: Sequence[Instance]) -> None:
        """Divide `members`, which are in the order of speed, into blocks."""
        self.members = list(members)
        self._changes = members[0].changes
        self._blocks: list[Block] = []
        self._epoch, self._read = -1, 0
        #: Numbers of blocks, by name and by prefix cache.
        self.number = {each.name: i // SIZE for i, each in enumerate(members)}
        self.by_cache: dict[int, int] = {}

    def at(self, now: float) -> list[Block]:
        """Return the blocks as they are now."""
        changes = self._changes
        touched = changes.touched
        if touched is None:
            touched = changes.touched = []
        if changes.epoch != self._epoch:
            self._epoch = changes.epoch
            self._blocks = [self._made(first, now) for first in range(0, len(self.members), SIZE)]
        else:
            dirty = {self.number.get(touched[i].name, -1) for i in range(self._read, len(touched))}
            for number, block in enumerate(self._blocks):
                if now >= block.until or number in dirty:
                    self._blocks[number] = self._made(block.first, now)
        self._read = len(touched)
        return list(self._blocks)

    def _made(self, first: int, now: float) -> Block:
        members = self.members[first : first + SIZE]
        for each in members:
            self.by_cache[each.tree.cache_id] = first // SIZE
        return Block(members, first, now)
