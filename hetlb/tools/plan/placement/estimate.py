"""A cheap estimate of a placement's output tokens/s of a full cluster, without simulating it.

Arithmetic alone, about a millisecond; it ranks placements, it does not replace the simulation.

The model is a closed queueing network. Tokens travel in convoys: the first of a convoy finds a node idle and
is computed alone (which takes twice a decode, see `sim.pipelines`), the others wait for it and go through
together. So a node with l layers takes 2 l t_d(1) + l t_d(k) per token, k being what is there at once
(Little's law), and what prompts take in between: they block nodes and links for their whole length, as in
M/G/1. The requests in flight, x (O R_decode + R_prompt) at x requests/s, are as many as the KV cache of the
scarcest layer holds, or of the node that its share of the flow fills first; that equation gives x. Measured
against the simulator: docs/placement.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hetlb.tools.paths.path_scheduler import HIGH_WATER_SHARE
from hetlb.tools.paths.stages import SOURCE, Edge
from hetlb.tools.plan.placement.place_cluster import PlaceCluster, Placement

_Array = NDArray[np.float64]

#: Share of the scarcest layer's KV cache that an offline load fills (Helix).
KV_SHARE = 0.8
#: Most rounds of the fixed point, and the relative change that ends them.
_ROUNDS, _AGREED_SHARE = 14, 0.002
#: Largest utilisation, so that an overloaded node is slow instead of undefined.
_MAX_UTILISATION = 0.98
_MOST_DECODES = 1024
#: Growth of a batch's wait with the square of the hops, as convoys merge on the way (fitted to simulations).
_CONVOY_WEIGHT = 0.0042


class Estimator:
    """Estimates placements of one cluster on one sample of lengths (prompt and output tokens)."""

    def __init__(self, cluster: PlaceCluster, lengths: Sequence[tuple[int, int]]) -> None:
        self._cluster = cluster
        prompts = np.array([prompt for prompt, _ in lengths], dtype=float)
        self._prompt = float(prompts.mean())
        self._prompt_square = float((prompts**2).mean())
        self._output = float(np.mean([output for _, output in lengths]))
        #: Tokens of a request in the end, on average.
        self.request_tokens = self._prompt + self._output
        self._prompt_s: dict[str, tuple[float, float]] = {}
        self._decode_s: dict[str, _Array] = {}
        for name, kind in cluster.kinds.items():
            times = np.interp(prompts, kind.prompt.xs, kind.prompt.ys)
            self._prompt_s[name] = float(times.mean()), float((times**2).mean())
            self._decode_s[name] = np.array(kind.decode.table(_MOST_DECODES))

    def estimate(self, placement: Placement, shares: Mapping[Edge, float]) -> float:
        """Return the output tokens/s of a placement under a flow; only the proportions of `shares` count."""
        total = sum(rate for (sender, _), rate in shares.items() if sender == SOURCE)
        if total <= 0.0:
            return 0.0
        nodes = _Nodes(self, placement, shares, total)
        links = _Links(self, shares, total)
        most = min(self._most_in_flight(placement), nodes.most_in_flight)
        rate = 0.0
        guess = most / (self._output * 1.0 + 1.0)
        for round_number in range(_ROUNDS):
            rate = guess
            node_decode, node_prompt = nodes.times(rate)
            link_decode, link_prompt = links.times(rate)
            decode_s, prompt_s = node_decode + link_decode, node_prompt + link_prompt
            wanted = most / (self._output * decode_s + prompt_s)
            if abs(wanted / rate - 1.0) < _AGREED_SHARE:
                break
            # Overloaded guesses give absurd times: halve the way, in ever smaller steps.
            step = 0.5 if round_number < _ROUNDS // 2 else 0.3
            guess = max(rate * 0.3, rate * (wanted / rate) ** step)
        return rate * self._output

    def _most_in_flight(self, placement: Placement) -> float:
        cluster = self._cluster
        per_layer = np.zeros(cluster.model.layers)
        for node in cluster.nodes:
            if node.name in placement:
                first, end = placement[node.name]
                holding = cluster.kind(node).holdings[end - first - 1]
                per_layer[first:end] += holding.kv_token_layers / (end - first)
        return KV_SHARE * float(per_layer.min()) / self.request_tokens


class _Nodes:
    """Nodes that carry flow, as arrays."""

    def __init__(
        self, owner: Estimator, placement: Placement, shares: Mapping[Edge, float], total: float
    ) -> None:
        cluster = owner._cluster
        through: dict[str, float] = {}
        for (_, receiver), rate in shares.items():
            through[receiver] = through.get(receiver, 0.0) + rate / total
        used = [node for node in cluster.nodes if through.get(node.name, 0.0) > 0.0]
        self._share = np.array([through[node.name] for node in used])
        layers = np.array([placement[node.name][1] - placement[node.name][0] for node in used], dtype=float)
        self._output = owner._output
        self._prompt = layers * np.array([owner._prompt_s[node.kind][0] for node in used])
        self._prompt_square = layers**2 * np.array([owner._prompt_s[node.kind][1] for node in used])
        self._layers = layers
        holdings = [
            cluster.kind(node).holdings[int(held) - 1] for node, held in zip(used, layers, strict=True)
        ]
        kv_tokens = np.array([holding.kv_token_layers for holding in holdings]) / layers
        #: Requests in flight that fill the first node.
        self.most_in_flight = HIGH_WATER_SHARE * float((kv_tokens / self._share).min()) / owner.request_tokens
        self._tables = np.stack([owner._decode_s[node.kind] for node in used])
        self._index = np.arange(len(used))
        self._waits = 1.0 + _CONVOY_WEIGHT * float(self._share.sum()) ** 2

    def _decode_s(self, decodes: _Array) -> _Array:
        """Return the time of batches of `decodes`, linear between whole numbers."""
        at = np.clip(decodes, 1.0, _MOST_DECODES - 2.0)
        low = at.astype(int)
        below, above = self._tables[self._index, low], self._tables[self._index, low + 1]
        times: _Array = self._layers * (below + (above - below) * (at - low))
        return times

    def times(self, rate: float) -> tuple[float, float]:
        """Return the seconds that a decode pass and a prompt pass spend on nodes at `rate` requests/s."""
        prompts = rate * self._share
        decodes = prompts * self._output
        blocked = (
            prompts
            * self._prompt_square
            / (2.0 * (1.0 - np.minimum(_MAX_UTILISATION, prompts * self._prompt)))
        )
        alone = 2.0 * self._decode_s(np.ones_like(prompts))
        batch = self._decode_s(decodes * (alone + blocked))
        batch = self._decode_s(decodes * (alone + blocked + batch))
        used = np.minimum(_MAX_UTILISATION, prompts * (batch + self._prompt))
        queue = used / (2.0 * (1.0 - used)) * (batch + self._prompt)
        decode = alone + blocked + self._waits * batch
        return float((self._share * decode).sum()), float(
            (self._share * (decode + queue + self._prompt)).sum()
        )


class _Links:
    """Links that carry flow, as arrays."""

    def __init__(self, owner: Estimator, shares: Mapping[Edge, float], total: float) -> None:
        cluster = owner._cluster
        used = [edge for edge, rate in shares.items() if rate > 0.0]
        self._share = np.array([shares[edge] / total for edge in used])
        seconds = np.array([1.0 / cluster.link_rate(edge) for edge in used])
        self._latency = np.array([cluster.links[edge].latency_s for edge in used])
        self._token = seconds
        self._prompt = seconds * owner._prompt
        self._prompt_square = seconds**2 * owner._prompt_square
        self._output = owner._output

    def times(self, rate: float) -> tuple[float, float]:
        """Return the seconds that a decode pass and a prompt pass spend on links at `rate` requests/s."""
        prompts = rate * self._share
        used = np.minimum(_MAX_UTILISATION, prompts * (self._prompt + self._output * self._token))
        waits = prompts * self._prompt_square / (2.0 * (1.0 - used))
        decode = float((self._share * (self._latency + waits + self._token)).sum())
        return decode, float((self._share * (self._latency + waits + self._prompt)).sum())
