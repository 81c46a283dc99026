"""Prefill when the host launches kernels for longer than the GPU computes, in CUDA graphs or not.

The p-norm form has one floor. A pass beyond the graphs of a mixture of experts has another one, two to three
times as high. Measured: 40 ms for any pass of 560 to 4,000 tokens, with a floor of 16 ms below.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import scipy
from numpy.typing import NDArray

from hetlb.balancer.core.step_times import LAUNCH_EXPONENT, LaunchTime, PnormPrefill, in_tiles
from hetlb.errors import ProfileError

_Array = NDArray[np.float64]

#: Possible limits of vLLM's CUDA graphs, in tokens: twice its sequences, 512 at most.
_GRAPH_TOKENS = (64, 128, 256, 512)
#: Least passes on each side of that limit.
_LEAST_PASSES = 2
_TILES = (1, 64, 128, 256)
#: Share of the error without a tile below which a tile is believed.
_TILE_GAIN = 0.9
#: Smallest fitted rise of the launch time beyond the graphs, as a share of the shortest pass.
_LEAST_RISE = 0.1
#: Starts of launching beyond the graphs, over the shortest pass.
_STARTS = (0.3, 3.0)


@dataclass(frozen=True, slots=True)
class LaunchedPrefill:
    """A form of computing, and the seconds to launch its kernels."""

    form: PnormPrefill
    launch: LaunchTime

    def pass_s(self, tokens: float, prompts: float, attended: float) -> float:
        """Return the seconds of a pass over `tokens` prompt tokens."""
        return self.launch.pass_s(self.form.pass_s(tokens, prompts, attended), tokens)

    def computing_s(self, seconds: float, tokens: float) -> float | None:
        """Return the seconds that a pass of `seconds` computes, None if launching hides them."""
        rest = seconds**LAUNCH_EXPONENT - self.launch.pass_s(0.0, tokens) ** LAUNCH_EXPONENT
        if rest <= (_LEAST_COMPUTING_SHARE * seconds) ** LAUNCH_EXPONENT:
            return None
        return float(rest ** (1.0 / LAUNCH_EXPONENT))


#: Least share of a pass's seconds that computing takes, to tell it from launching.
_LEAST_COMPUTING_SHARE = 0.7


def fit_launched(
    batch: _Array, length: _Array, seconds: _Array, passes: _Array, tile: int | None
) -> LaunchedPrefill:
    """Fit launching and computing to passes of both sides of a limit. `tile` None: what they show.

    Raises `ProfileError` if no limit has passes on both sides.
    """
    tokens = batch * length / passes
    # Of limits with the same passes on each side the lowest counts.
    within = {int((tokens <= limit).sum()): limit for limit in reversed(_GRAPH_TOKENS)}
    limits = [limit for n, limit in within.items() if _LEAST_PASSES <= n <= len(tokens) - _LEAST_PASSES]
    if not limits:
        raise ProfileError("prefill: expected passes within CUDA graphs and beyond")
    tiles = _TILES if tile is None else (tile,)
    found = {
        (graph_tokens, each): _fit(tokens, batch * length**2 / passes, seconds / passes, graph_tokens, each)
        for graph_tokens, each in product(limits, tiles)
    }
    if tile is None:
        plain = min(error for (_, each), (error, _) in found.items() if each == 1)
        if min(error for error, _ in found.values()) > _TILE_GAIN * plain:
            found = {key: value for key, value in found.items() if key[1] == 1}
    best = min(found.values(), key=lambda each: each[0])[1]
    if best.launch.eager_s - best.launch.graph_s < _LEAST_RISE * float((seconds / passes).min()):
        raise ProfileError("prefill: expected passes beyond CUDA graphs that take longer")
    return best


def _fit(
    tokens: _Array, attended: _Array, seconds: _Array, graph_tokens: int, tile: int
) -> tuple[float, LaunchedPrefill]:
    """Return the mean relative error of the best fit, and that fit."""
    padded = np.array([in_tiles(each, tile) for each in tokens])
    floor_0, rate_0 = float(seconds.min()), float(np.min(seconds / padded))
    bend_0 = float(np.max(seconds / attended)) * 1e-3
    within = tokens <= graph_tokens

    def off(x: _Array) -> _Array:
        floor, rate, p, bend, graph, more = x
        computing = _joined(floor * floor_0, rate * rate_0 * padded, p) + bend * bend_0 * attended
        launching = floor_0 * np.where(within, graph, graph + more)
        found: _Array = _joined(launching, computing, LAUNCH_EXPONENT) / seconds - 1.0
        return found

    bounds = ([1e-6, 1e-6, 1.0, 0.0, 0.0, 0.0], [np.inf, np.inf, 12.0, np.inf, np.inf, np.inf])
    fits = [
        scipy.optimize.least_squares(
            off, [0.5, 0.9, 2.0, 0.1, 0.5, start], bounds=bounds, loss="soft_l1", f_scale=0.03
        )
        for start in _STARTS
    ]
    best = min(fits, key=lambda each: each.cost).x
    floor, rate, p, bend, graph, more = (float(each) for each in best)
    form = PnormPrefill(floor * floor_0, rate * rate_0, bend * bend_0, p, None, tile)
    launch = LaunchTime(graph_tokens, graph * floor_0, (graph + more) * floor_0)
    return float(np.abs(off(best)).mean()), LaunchedPrefill(form, launch)


def _joined(one: _Array | float, other: _Array, exponent: float) -> _Array:
    """Return the longer of two times, with a soft corner."""
    high, low = np.maximum(one, other), np.minimum(one, other)
    found: _Array = high * (1.0 + (low / high) ** exponent) ** (1.0 / exponent)
    return found
