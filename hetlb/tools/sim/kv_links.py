"""KV transfers over shared links in virtual time.

A link carries one transfer after the other, in the order they began, each at its whole
rate; what is sent over several links at once (stages on several machines) has arrived when the last part has.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from hetlb.balancer.core.types import InstanceSpec


@dataclass(frozen=True, slots=True)
class KvPath:
    """Links from one instance to another, with the bytes per token that each of them carries."""

    parts: tuple[tuple[Hashable, float], ...]
    latency_s: float = 0.0


@dataclass(slots=True)
class KvLinks:
    """Links of a fleet. `rates` in bytes/s; `paths` by names of source and target."""

    rates: Mapping[Hashable, float]
    paths: Mapping[tuple[str, str], KvPath]
    _free_at: dict[Hashable, float] = field(default_factory=dict)

    def send(self, source: str, target: str, tokens: int, now: float) -> float:
        """Begin a KV transfer of `tokens` tokens; returns its arrival time."""
        path = self.paths[source, target]
        arrived = now
        for link, bytes_per_token in path.parts:
            done = max(now, self._free_at.get(link, 0.0)) + bytes_per_token * tokens / self.rates[link]
            self._free_at[link] = done
            arrived = max(arrived, done)
        return arrived + path.latency_s


def own_links(specs: Sequence[InstanceSpec]) -> KvLinks:
    """Return a link for every pair of instances, as the one that fetches describes it."""
    paths: dict[tuple[str, str], KvPath] = {}
    rates: dict[Hashable, float] = {}
    for target in specs:
        if (link := target.kv_transfer) is None:
            continue
        for source in specs:
            pair = source.name, target.name
            paths[pair] = KvPath(((pair, link.bytes_per_token),), link.latency_s)
            rates[pair] = link.bandwidth_bytes_per_s
    return KvLinks(rates, paths)
