"""Data-parallel engines of one server as places: the batch, the room and the prefixes of each.

Example: a server with `--data-parallel-size 2` has two engines, each with its own KV cache. A chat went to
the first one. Its next turn goes there too, since only that one holds its prompt. vLLM reads the choice in
the header `X-data-parallel-rank`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from hetlb.balancer.core.prefix_index import PrefixIndex, Shared, Tree

if TYPE_CHECKING:
    from hetlb.balancer.core.instance import Instance
    from hetlb.balancer.core.types import Lease

#: Part of an answer's decoding beside the sequences that run at its dispatch: on average they are half done.
_SHARED_PART: Final = 0.5


class Rank:
    """Bookings on one engine: sequences, prompt tokens still to read, tokens in its KV cache."""

    __slots__ = ("in_flight", "kv_tokens", "sequences", "tree", "unread_tokens")

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.in_flight = self.sequences = self.unread_tokens = self.kv_tokens = 0

    @property
    def held_tokens(self) -> int:
        """Tokens of prompts that its cache is believed to hold."""
        return self.tree.used_tokens + self.tree.unused_tokens


class RankBooking:
    """Bookings of one lease: its rank, its part of the tree there, its unread tokens and all its tokens."""

    __slots__ = ("kv_tokens", "rank", "shared", "unread_tokens")

    def __init__(self, rank: int, shared: Shared | None, unread_tokens: int, kv_tokens: int) -> None:
        self.rank = rank
        self.shared = shared
        self.unread_tokens = unread_tokens
        self.kv_tokens = kv_tokens


class Ranks:
    """Engines of one instance, and the leases on each; the sums of the instance are in its own ledger."""

    def __init__(self, count: int) -> None:
        self._index = PrefixIndex()
        self.each = [Rank(Tree(self._index, number)) for number in range(count)]
        self._leases: dict[Any, RankBooking] = {}

    def book(self, lease: Lease, instance: Instance) -> None:
        """Choose the engine of a lease on its instance, and book it there."""
        request, count = lease.request, len(self.each)
        prompt, keys = request.prompt_tokens, request.prefix_keys
        found = self._index.held(keys, prompt) if keys else None
        held = {} if found is None else found.tokens
        slots = max(1, instance.max_num_seqs // count)
        cache = instance.kv_cache_tokens // count
        need = lease.promised_tokens
        best, best_cost = 0, (0.0, 0, 0)
        for number, rank in enumerate(self.each):
            unread = rank.unread_tokens + request.sequences * max(1, prompt - held.get(number, 0))
            batch = rank.sequences + request.sequences
            step_s = instance.latency.step_s(float(max(1, batch)), float(rank.kv_tokens))
            decode_s = max(1.0, lease.predicted_output) * step_s
            full = max(0, batch - slots) / slots + max(0, rank.kv_tokens + need - cache) / max(1, cache)
            read_s = instance.latency.prefill_s(float(unread)) if request.sequences else 0.0
            # Of two idle ones the emptier cache: a new chat displaces no other's prompt there.
            cost = read_s + decode_s * (_SHARED_PART + full), rank.in_flight, rank.held_tokens
            if not number or cost < best_cost:
                best, best_cost = number, cost
        chosen = self.each[best]
        shared: Shared | None = None
        kv_tokens, unread_tokens = need, request.sequences * prompt
        if keys and instance.caches_prefixes:
            shared = chosen.tree.attach(keys, prompt)
            unread_tokens = request.sequences * (prompt - shared.held_tokens)
            kv_tokens = max(0, need - shared.tokens)
        lease.rank = best
        self._leases[lease.key] = RankBooking(best, shared, unread_tokens, kv_tokens)
        chosen.in_flight += 1
        chosen.sequences += request.sequences
        chosen.unread_tokens += unread_tokens
        chosen.kv_tokens += kv_tokens + (0 if shared is None else shared.new_tokens)
        chosen.tree.evict(max(0, cache - chosen.kv_tokens))

    @property
    def cache_share(self) -> float:
        """Mean share of the engines' KV caches with unused blocks."""
        return math.fsum([rank.tree.share for rank in self.each]) / len(self.each)

    def begun(self, lease: Lease) -> None:
        """Note that the prompts of a lease were read."""
        booked = self._leases.get(lease.key)
        if booked is not None:
            self.each[booked.rank].unread_tokens -= booked.unread_tokens
            booked.unread_tokens = 0

    def release(self, lease: Lease, instance: Instance) -> None:
        """Give back the bookings of a lease; its prompt stays in the cache of its engine for a while."""
        booked = self._leases.pop(lease.key, None)
        if booked is None:
            return
        rank, request = self.each[booked.rank], lease.request
        rank.in_flight -= 1
        rank.sequences -= request.sequences
        rank.unread_tokens -= booked.unread_tokens
        rank.kv_tokens -= booked.kv_tokens
        shared = booked.shared
        if shared is None:
            return
        if lease.first_token_at is not None:
            answer, reported = lease.output_tokens // max(1, request.sequences), lease.reported_cached_tokens
            rank.tree.answered(shared, request.prefix_keys, request.prompt_tokens, answer, reported)
        rank.kv_tokens -= rank.tree.detach(shared.node)
        cache = instance.kv_cache_tokens // len(self.each)
        rank.tree.evict(max(0, cache - rank.kv_tokens))
