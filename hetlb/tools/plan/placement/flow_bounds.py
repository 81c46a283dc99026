"""Upper bounds on the flow of any placement, with and without partial inference, links left out.

No placement has a higher flow than a bound says, and a bound never depends on the search.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from hetlb.tools.plan.highs import LinearProgram, SolveLimits
from hetlb.tools.plan.placement.flow import max_flow
from hetlb.tools.plan.placement.place_cluster import PlaceCluster, Placement

#: Bisection ends at this width, relative to the bound (or to the first one, where no flow is possible).
_RELATIVE_WIDTH = 1e-9
#: A cover counts as violated by more than this share of 1; less is left to the scaling of the prices.
_LEAST_VIOLATION = 1e-6
#: Covers added before the prices are scaled as they are (never met).
_MOST_COVERS = 200
#: Steps of branch and bound between looks at the clock.
_LOOK_STEPS = 4096


def compute_bound(cluster: PlaceCluster) -> float:
    """Return the sum over machines of max_j(j T_j), by layers: a token passes each (Helix, section 4.5)."""
    most = {
        name: max(j * holding.tokens_per_s for j, holding in enumerate(kind.holdings, start=1))
        for name, kind in cluster.kinds.items()
    }
    return sum(most[node.kind] for node in cluster.nodes) / cluster.model.layers


def flow_bound(cluster: PlaceCluster, limits: SolveLimits | None = None) -> float:
    """Return the highest flow that leaves every layer covered by machines (covers as whole machines).

    Each layer needs machines with rates that add up to the flow F, and a machine with j layers gives 1/j of
    itself to each of them. With w_c the number of layers that the set c of machines covers, the linear
    program

        max sum w_c   with   sum_c w_c sum_(g,j in c) 1/j <= n_g   for every kind g with n_g machines

    says how many layers can be covered. F is too high where that is fewer than the model has. Its dual has
    one price per kind, and covers are added as they are violated (a knapsack, by branch and bound).
    Where the time is up it is the lowest bound known by then.
    """
    limits = limits or SolveLimits()
    groups = cluster.groups()
    items = [
        _Item(g, 1.0 / j, rate) for g, group in enumerate(groups) for j, rate in enumerate(group.rates) if j
    ]
    numbers = [len(group.nodes) for group in groups]
    low, high = 0.0, compute_bound(cluster)
    least = _RELATIVE_WIDTH * _RELATIVE_WIDTH * high
    while high - low > max(least, _RELATIVE_WIDTH * high) and not limits.over:
        middle = (low + high) / 2.0
        if _coverable(items, numbers, middle, limits) >= cluster.model.layers * (1.0 - 1e-9):
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True, slots=True)
class _Item:
    """A machine of a group with some layers: its share for one of them, tokens/s."""

    group: int
    share: float
    rate: float


def _coverable(items: list[_Item], numbers: list[int], flow: float, limits: SolveLimits) -> float:
    """Return the most layers that the machines cover at this flow."""
    program = LinearProgram()
    prices = [program.column(-float(count)) for count in numbers]
    for group, price in enumerate(prices):  # covers of one sort bound all prices
        cheapest = min(item.share * math.ceil(flow / item.rate) for item in items if item.group == group)
        program.row([(price, cheapest)], lower=1.0)
    for number in itertools.count():
        answer = program.solve(SolveLimits())
        if answer is None:  # no answer is no bound: the flow counts as possible
            return math.inf
        cost, cover = _cheapest_cover(items, answer.values.tolist(), flow, limits)
        if limits.over:
            return math.inf
        if cost >= 1.0 - _LEAST_VIOLATION or number == _MOST_COVERS:
            # Prices scaled up to the cheapest cover are feasible: a bound even where rounding left one short.
            return -answer.objective / min(1.0, cost)
        shares = [math.fsum(item.share for item in cover if item.group == g) for g in range(len(numbers))]
        program.row(zip(prices, shares, strict=True), lower=1.0)
    raise AssertionError


def _cheapest_cover(
    items: list[_Item], prices: list[float], flow: float, limits: SolveLimits
) -> tuple[float, list[_Item]]:
    """Return the set of machines (any number of each) that reaches the flow at the least price."""
    useful = sorted(items, key=lambda item: prices[item.group] * item.share / min(item.rate, flow))
    costs = [prices[item.group] * item.share for item in useful]
    ratios = [cost / min(item.rate, flow) for cost, item in zip(costs, useful, strict=True)]
    best_cost: float = math.inf
    best: list[_Item] = []
    stack: list[tuple[int, float, float, list[_Item]]] = [(0, flow, 0.0, [])]
    steps = 0
    while stack:
        steps += 1
        if steps % _LOOK_STEPS == 0 and limits.over:
            break
        index, left, cost, taken = stack.pop()
        if left <= 0.0:
            if cost < best_cost:
                best_cost, best = cost, taken
            continue
        # Items come by price per token/s: nothing behind `index` reaches the rest for less.
        if index == len(useful) or cost + left * ratios[index] >= best_cost:
            continue
        stack.append((index + 1, left, cost, taken))
        stack.append((index, left - useful[index].rate, cost + costs[index], [*taken, useful[index]]))
    return best_cost, best


# --- the highest flow itself ----------------------------------------------------------------------------

# The program counts machines instead of naming them: z[g, s, j] machines of kind g hold the layers [s, s + j)
# and pass f[g, s, j] <= T_gj z[g, s, j] tokens/s; what ends at a layer boundary begins there. That has no
# symmetry between equal machines and no big-M, unlike Helix's (ASPLOS 2025, section 4.4), which names nodes
# and links. Links are left out: it is a relaxation where a link binds, and exact where none does. Rates are
# capped by an upper bound, without which the relaxation would hold single layers at absurd rates.


def highest_flow(
    cluster: PlaceCluster, limits: SolveLimits, most: float, start: Placement | None = None
) -> tuple[float, Placement | None]:
    """Return a bound on the flow of any placement, and the best placement found, None without one.

    The search begins with the bound `most` and the placement `start`.
    """
    layers, groups, program = cluster.model.layers, cluster.groups(), LinearProgram()
    # Columns of the count and the flow by (group, first layer, length).
    columns: dict[tuple[int, int, int], tuple[int, int]] = {}
    ends: list[list[tuple[int, float]]] = [[] for _ in range(layers + 1)]
    for g, group in enumerate(groups):
        number, held = float(len(group.nodes)), []
        for length in range(1, len(group.rates)):
            rate = min(most, group.rates[length])
            for first in range(layers - length + 1):
                z = program.column(upper=number, integer=True)
                f = program.column(1.0 if first == 0 else 0.0, upper=rate * number)
                program.row([(z, -rate), (f, 1.0)], upper=0.0)
                held.append((z, 1.0))
                ends[first].append((f, -1.0))
                ends[first + length].append((f, 1.0))
                columns[g, first, length] = z, f
        program.row(held, upper=number)
    for boundary in range(1, layers):
        program.row(ends[boundary], lower=0.0, upper=0.0)
    point = None
    if start is not None:
        point = [0.0] * program.columns
        flow = max_flow(cluster, start)
        group_of = {node.name: g for g, group in enumerate(groups) for node in group.nodes}
        for name, (first, end) in start.items():
            z, f = columns[group_of[name], first, end - first]
            point[z] += 1.0
            point[f] += flow.through(name)
    solution = program.solve(limits, start=point)
    if solution is None:
        return most, None
    free = [list(group.nodes) for group in groups]
    placement: Placement = {}
    for (g, first, length), (z, _) in columns.items():
        for _ in range(round(solution.values[z])):
            placement[free[g].pop().name] = (first, first + length)
    # Nodes left over hold the first layer.
    return min(most, solution.bound), placement | {node.name: (0, 1) for nodes in free for node in nodes}
