"""Placements as one chain of blocks, by column generation at a given flow.

A block is a number of layers and machines of one region in parallel branches; their rates add up to the
flow. A branch is one machine that holds all layers of the block, or several that share them. Machines that
are alike (kind, layers, region) are counted, not named. At a flow the linear program

    max sum layers_c x_c   with   sum_c machines_gc x_c <= number of g, for every group g

says how many layers its machines can cover; the flow is reached where whole blocks cover all. Blocks are made
when their price is right: the cheapest branch of every number of layers at every rate (a knapsack over
groups), then the cheapest branches with rates up to the flow (a knapsack over rates). The highest flow is
found by bisection. Where the chain goes from one region to the next, both blocks must have enough branches
for the slow links between them to carry the flow together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from hetlb.tools.paths.stages import SINK, SOURCE
from hetlb.tools.plan.highs import LinearProgram, SolveLimits
from hetlb.tools.plan.placement.flow import PlacementFlows
from hetlb.tools.plan.placement.place_cluster import MachineGroup, PlaceCluster, Placement

_MOST_ROUNDS = 60
#: Halvings of the interval between a known flow and the bound, and seconds of each program.
_HALVINGS = 8
_PROGRAM_S = 2.0
#: The most machines of a group in one branch.
_MOST_ALIKE = 40
#: Parts of a flow: rates are rounded down to whole parts.
_FLOW_PARTS = 500
_WORTH = 1e-6
#: Least price of a machine, in layers.
_LEAST_PRICE_LAYERS = 0.01
#: Share of a flow that the links must carry for a higher flow to be tried.
_CARRIED_SHARE = 0.97
#: Flow that the links between two regions must carry, as multiples of the flow; each is tried.
_LINK_ROOMS = (1.2, 2.0)


@dataclass(frozen=True, slots=True)
class _Block:
    """Layers in one region on machines in parallel branches.

    `counts`: machines by group. `branches`: (group, layers) of each machine, by branch.
    """

    layers: int
    region: int
    wide: bool
    counts: tuple[int, ...]
    branches: tuple[tuple[tuple[int, int], ...], ...]


class Branches:
    """The cheapest sets of machines that together hold a number of layers, all at a given rate.

    A knapsack over groups, solved for every rate that a machine has.
    """

    def __init__(self, groups: Sequence[MachineGroup], scope: Sequence[int], layers: int) -> None:
        """Read the rates of the groups with indices in `scope`. `layers`: most layers of a branch."""
        self._groups, self._scope, self._layers = groups, scope, layers
        self.rates = np.array(sorted({rate for g in scope for rate in groups[g].rates[1:]}))
        #: Most layers that a machine of a group can hold, for every rate.
        self._held = np.array([[_most_layers(group.rates, rate) for rate in self.rates] for group in groups])

    def cheapest(self, prices: NDArray[np.float64]) -> tuple[NDArray[np.float64], list[NDArray[np.int16]]]:
        """Return the least price of a branch by rate and layers, and the machines taken for it.

        `prices` are by group.
        """
        layers = self._layers
        at = np.arange(layers + 1)[None, :]
        cost = np.full((len(self.rates), layers + 1), np.inf)
        cost[:, 0] = 0.0
        taken: list[NDArray[np.int16]] = []
        for g in self._scope:
            each = self._held[g][:, None]
            best, count = cost.copy(), np.zeros(cost.shape, dtype=np.int16)
            least = int(each[each > 0].min(initial=layers))
            for k in range(1, min(len(self._groups[g].nodes), _MOST_ALIKE, -(-layers // max(1, least))) + 1):
                before = np.maximum(0, at - k * each)
                reached = np.take_along_axis(cost, before, axis=1) + k * prices[g]
                better = (reached < best - 1e-12) & (each > 0)
                best, count = np.where(better, reached, best), np.where(better, k, count).astype(np.int16)
            cost = best
            taken.append(count)
        return cost, taken

    def machines(self, rate: int, layers: int, taken: list[NDArray[np.int16]]) -> tuple[int, ...]:
        """Return the machines of each group in the cheapest branch of the rate with this index."""
        counts, left = [0] * len(self._groups), layers
        for g, count in zip(reversed(self._scope), reversed(taken), strict=True):
            counts[g] = int(count[rate, left])
            left = max(0, left - counts[g] * int(self._held[g, rate]))
        return tuple(counts)

    def shares(self, counts: Sequence[int], rate: float, layers: int) -> list[tuple[int, int]]:
        """Return (group, layers) of each machine of a branch.

        Each holds all layers that its rate allows. If these are too many, slow machines hold fewer.
        """
        at = int(np.searchsorted(self.rates, rate * (1.0 - 1e-12)))
        shares = [(g, int(self._held[g, at])) for g, n in enumerate(counts) for _ in range(n)]
        over = sum(held for _, held in shares) - layers
        while over > 0:
            # One layer less where the machine is slowest, among machines that keep the rate.
            i = max(
                (i for i, (_, held) in enumerate(shares) if held > 1),
                key=lambda i: (self._keeps(shares[i], rate), 1.0 / self._speed(shares[i])),
            )
            shares[i] = shares[i][0], shares[i][1] - 1
            over -= 1
        return shares

    def _keeps(self, share: tuple[int, int], rate: float) -> bool:
        return self._groups[share[0]].rates[share[1] - 1] >= rate * (1.0 - 1e-9)

    def _speed(self, share: tuple[int, int]) -> float:
        rates = self._groups[share[0]].rates
        return rates[share[1]] * share[1]


def _most_layers(rates: Sequence[float], target: float) -> int:
    return max((j for j, rate in enumerate(rates) if j and rate >= target * (1.0 - 1e-12)), default=0)


class BlockChain:
    """The search for one cluster. A block is in one region, and blocks of a region stand together."""

    def __init__(self, cluster: PlaceCluster) -> None:
        self._flows = PlacementFlows(cluster)
        self._layers = cluster.model.layers
        self._groups = cluster.groups(by_region=True)
        regions: dict[str, list[int]] = {}
        for g, group in enumerate(self._groups):
            regions.setdefault(group.nodes[0].region, []).append(g)
        self._regions = list(regions.values())
        self._between = _slowest_between(cluster)
        most = min(self._layers, 2 * max(len(group.rates) - 1 for group in self._groups))
        self._branches = [Branches(self._groups, held, most) for held in self._regions]

    def highest(self, low: float, high: float, limits: SolveLimits) -> Placement | None:
        """Return the placement of the highest flow found between both."""
        best, most = None, 0.0
        for _ in range(_HALVINGS):
            if limits.over:
                break
            # Nearer to the known flow: whole blocks seldom come close to the bound.
            flow = 0.6 * low + 0.4 * high
            reached = 0.0
            for room in _LINK_ROOMS if len(self._regions) > 1 else (1.0,):
                blocks = self._cover(flow, math.ceil(math.sqrt(room * flow / self._between)), limits)
                if blocks is None:
                    break
                placement = self._placement(blocks)
                reached = max(reached, self._flows.value(self._flows.held(placement)))
                if reached > most:
                    best, most = placement, reached
                if reached >= _CARRIED_SHARE * flow:
                    break
            if reached >= _CARRIED_SHARE * flow:
                low = flow
            else:
                high = flow
        return best

    def _cover(self, flow: float, width: int, limits: SolveLimits) -> list[_Block] | None:
        """Return whole blocks for all layers, None without any. `width`: branches where a region ends."""
        known: dict[_Block, None] = {}
        covered, prices, bonus = (
            0.0,
            np.full(len(self._groups), _LEAST_PRICE_LAYERS),
            [0.0] * len(self._regions),
        )
        for _ in range(_MOST_ROUNDS):
            if limits.over:
                return None
            fresh = [each for each in self._priced(flow, width, prices, bonus) if each not in known]
            if not fresh:
                break
            known.update(dict.fromkeys(fresh))
            program, columns, slacks = self._program(list(known), width, integer=False)
            solution = program.solve(SolveLimits())
            assert solution is not None, "expected no blocks at all to be feasible"
            covered = sum(b.layers * solution.values[c] for b, c in zip(known, columns, strict=True))
            duals = np.abs(solution.duals)
            # No machine is free of charge, else blocks would waste machines that are not scarce.
            prices = np.maximum(duals[: len(self._groups)], _LEAST_PRICE_LAYERS)
            bonus = list(duals[len(self._groups) :])
            if any(solution.values[slack] > 1e-6 for slack in slacks):
                covered = 0.0
        if not known or covered < self._layers * (1.0 - 1e-9):
            return None
        return self._whole(list(known), width, limits)

    def _program(
        self, blocks: Sequence[_Block], width: int, *, integer: bool
    ) -> tuple[LinearProgram, list[int], list[int]]:
        """Return the program over blocks, the columns of the blocks, and the columns of missing wide ends.

        The latter exist in the relaxed program only: they stand for wide blocks that a region lacks.
        """
        program = LinearProgram()
        columns = [program.column(0.0 if integer else float(b.layers), integer=integer) for b in blocks]
        for g, group in enumerate(self._groups):
            entries = [(c, float(b.counts[g])) for c, b in zip(columns, blocks, strict=True)]
            program.row(entries, upper=float(len(group.nodes)))
        slacks = []
        if len(self._regions) > 1 and width > 1:
            for r in range(len(self._regions)):
                ends = 1.0 if r in (0, len(self._regions) - 1) else 2.0
                wide = [(c, 1.0) for c, b in zip(columns, blocks, strict=True) if b.region == r and b.wide]
                if not integer:
                    slacks.append(program.column(-float(self._layers)))
                    wide.append((slacks[-1], 1.0))
                program.row(wide, lower=ends)
        return program, columns, slacks

    def _whole(self, blocks: Sequence[_Block], width: int, limits: SolveLimits) -> list[_Block] | None:
        program, columns, _ = self._program(blocks, width, integer=True)
        covered = program.column(1.0, upper=float(self._layers))
        held = [(column, float(block.layers)) for column, block in zip(columns, blocks, strict=True)]
        program.row([(covered, -1.0), *held], lower=0.0)
        solution = program.solve(limits.within(_PROGRAM_S))
        if solution is None or solution.objective < self._layers - 1e-6:
            return None
        counted = zip(blocks, columns, strict=True)
        return [block for block, column in counted for _ in range(round(solution.values[column]))]

    def _priced(
        self, flow: float, width: int, prices: NDArray[np.float64], bonus: Sequence[float]
    ) -> Iterator[_Block]:
        """Yield the cheapest blocks, for every region and number of layers, that are worth their price.

        A wide block has at least `width` branches. It gets the `bonus` of its region.
        """
        for r, branches in enumerate(self._branches):
            cost, taken = branches.cheapest(prices)
            for wide in (False, True) if len(self._regions) > 1 and width > 1 else (False,):
                rates = np.minimum(branches.rates, flow / width) if wide else branches.rates
                parts = np.floor(rates * (1.0 + 1e-9) / flow * _FLOW_PARTS).astype(int)
                total, chosen = _cheapest_cover(parts, cost)
                gain = bonus[r] if wide and bonus else 0.0
                for layers in range(1, cost.shape[1]):
                    if not layers + gain > total[layers] * (1.0 + _WORTH):
                        continue
                    block = self._block(r, layers, wide, branches, taken, parts, chosen)
                    if all(n <= len(g.nodes) for n, g in zip(block.counts, self._groups, strict=True)):
                        yield block

    def _block(
        self,
        region: int,
        layers: int,
        wide: bool,
        branches: Branches,
        taken: list[NDArray[np.int16]],
        parts: NDArray[np.int64],
        chosen: NDArray[np.int16],
    ) -> _Block:
        left, made = _FLOW_PARTS, []
        while left > 0:
            t = int(chosen[left, layers])
            left = max(0, left - int(parts[t]))
            counted = branches.machines(t, layers, taken)
            made.append(tuple(branches.shares(counted, float(branches.rates[t]), layers)))
        counts = [0] * len(self._groups)
        for branch in made:
            for g, _ in branch:
                counts[g] += 1
        return _Block(layers, region, wide, tuple(counts), tuple(sorted(made)))

    # --- placements ---

    def _placement(self, blocks: list[_Block]) -> Placement:
        free = [list(group.nodes) for group in self._groups]
        over = sum(block.layers for block in blocks) - self._layers
        placement: Placement = {}
        at = 0
        for block in self._ordered(blocks):
            less = min(over, block.layers - 1)
            over -= less
            end = at + block.layers - less
            for branch in block.branches:
                first = at
                for g, held in branch:
                    if first < end:
                        placement[free[g].pop(0).name] = (first, min(end, first + held))
                        first += held
            at = end
        return placement

    def _ordered(self, blocks: list[_Block]) -> list[_Block]:
        """Return blocks by region. Blocks with most branches, thus most links, stand where regions meet."""
        found: list[_Block] = []
        last = len(self._regions) - 1
        for region in range(len(self._regions)):
            own = [block for block in blocks if block.region == region]
            own.sort(key=lambda each: (len(each.branches), each.counts, each.layers), reverse=True)
            ends = 1 if region in (0, last) else 2
            wide, inner = own[:ends], own[ends:]
            found += [*inner, *wide] if region == 0 else [wide[0], *inner, *wide[1:]] if wide else []
        return found


def _slowest_between(cluster: PlaceCluster) -> float:
    """Return the lowest mean rate (tokens/s) of the links from one region to another."""
    region = {node.name: node.region for node in cluster.nodes}
    pairs: dict[tuple[str, str], list[float]] = {}
    for sender, receiver in cluster.links:
        if sender != SOURCE and receiver != SINK and region[sender] != region[receiver]:
            rate = cluster.link_rate((sender, receiver))
            pairs.setdefault((region[sender], region[receiver]), []).append(rate)
    return min(map(fmean, pairs.values()), default=math.inf)


def _cheapest_cover(
    parts: NDArray[np.int64], cost: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int16]]:
    """Return the least cost of branches that add up to the flow, by layers, and the branch taken last.

    `parts[t]`: parts of the flow that a branch of rate t carries. `cost[t, layers]`: its price. The second
    result is by the parts still to cover and by layers.
    """
    able = parts > 0
    cost = np.where(able[:, None], cost, np.inf)
    best = np.full((_FLOW_PARTS + 1, cost.shape[1]), np.inf)
    best[0] = 0.0
    chosen = np.zeros(best.shape, dtype=np.int16)
    step = np.maximum(parts, 1)
    for left in range(1, _FLOW_PARTS + 1):
        reached = best[np.maximum(0, left - step)] + cost
        chosen[left] = reached.argmin(axis=0)
        best[left] = reached.min(axis=0)
    return best[_FLOW_PARTS], chosen
