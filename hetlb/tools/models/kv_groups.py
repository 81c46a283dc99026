"""Bytes of KV cache that vLLM sets aside beyond what the layers keep: it gives out blocks of one size.

A block serves a group of layers of one kind. All groups have the same number of layers: the number of the
rarest kind, or of the commonest if that is less than 1.5 times the rarest. Empty layers fill the last group
of a kind. The page, a layer's part of a block, is of one size too. Smaller pages are padded, unless a
multiple of their tokens fills the page. A state fills a page of its own. Sources: `get_kv_cache_groups` of
vLLM 0.32 (`v1/core/kv_cache_utils.py`), and for states `_align_hybrid_block_size` (`platforms/interface.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from hetlb.tools.models.layer import Mixer, Scope

#: Tokens of a block, as a kernel takes them; of latent attention beside states.
_BLOCK_TOKENS: Final = 16
_LATENT_BLOCK_TOKENS: Final = 128
#: The commonest kind decides on the size of groups if it has less than this multiple of the rarest kind's
#: layers.
_ALIKE_FACTOR: Final = 1.5


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes of a sequence: for every token, for each of the last tokens of windows, and for its states."""

    per_token: float = 0.0
    windows: tuple[tuple[int, float], ...] = ()
    state: float = 0.0

    def of(self, tokens: float) -> float:
        """Return the bytes of a sequence of `tokens`."""
        windows = math.fsum(size * min(tokens, window) for window, size in self.windows)
        return self.per_token * tokens + windows + self.state

    def times(self, scale: float) -> KvBytes:
        """Return these bytes times `scale`, the state as it is."""
        return KvBytes(
            self.per_token * scale, tuple((w, size * scale) for w, size in self.windows), self.state
        )


def allocated(mixers: Sequence[Mixer], value_bytes: float) -> KvBytes:
    """Return vLLM's allocation for a sequence. `value_bytes`: bytes of a cached value."""
    layers = Counter(part for each in mixers for part in parts_of(each, value_bytes))
    kinds = {(part.scope if part.scope is not Scope.LATENT else Scope.FULL, part.window) for part in layers}
    # Layers of one kind share a group whatever their sizes, and DeepSeek-V4 packs pages side by side.
    if len(kinds) < 2 or Scope.COMPRESSED in {part.scope for part in layers}:
        return _together([(part, part.size, count) for part, count in layers.items()])
    page = _page(layers)
    group = least = min(layers.values())
    most = max(layers.values())
    if most < _ALIKE_FACTOR * least:
        group = most
    return _together([(part, page(part), -(-count // group) * group) for part, count in layers.items()])


class LayerCache(NamedTuple):
    """Cache of one layer: bytes for each token (in a window, if it has one), or the bytes of a state."""

    scope: Scope
    window: int
    size: float


def parts_of(mixer: Mixer, value_bytes: float) -> list[LayerCache]:
    """Return the caches that a layer keeps. `value_bytes`: bytes of a cached value."""
    kind, found = mixer.kind, []
    if mixer.grows:
        known = kind if kind in (Scope.LATENT, Scope.COMPRESSED) else Scope.FULL
        found.append(LayerCache(known, 0, mixer.packed_grows or mixer.grows * value_bytes))
    if mixer.window:
        size = mixer.packed_window or mixer.window * value_bytes
        found.append(LayerCache(kind, mixer.window_tokens, size))
    if mixer.state_bytes:
        found.append(LayerCache(Scope.STATE, 0, float(mixer.state_bytes)))
    return found


def _page(parts: Iterable[LayerCache]) -> Callable[[LayerCache], float]:
    """Return a function for the bytes of a part (per token, or of a state) if all pages are of one size."""
    attention = [part for part in parts if part.scope is not Scope.STATE]
    states = [part.size for part in parts if part.scope is Scope.STATE]
    tokens = float(_BLOCK_TOKENS)
    if states:  # blocks have enough tokens that a state fits a page
        latent = any(part.scope is Scope.LATENT for part in attention)
        tokens = _LATENT_BLOCK_TOKENS if latent else _BLOCK_TOKENS
        tokens *= math.ceil(max(states) / (tokens * attention[0].size))
    page = max([part.size * tokens for part in attention] + states)

    def bytes_of(part: LayerCache) -> float:
        if part.scope is Scope.STATE:
            return page
        own = part.size * tokens
        return part.size if page % own == 0 else page / tokens

    return bytes_of


def _together(parts: Iterable[tuple[LayerCache, float, int]]) -> KvBytes:
    """Return the sum of all parts, each given with its bytes and its number of layers."""
    grows = state = 0.0
    windows: dict[int, float] = {}
    for part, size, count in parts:
        if part.scope is Scope.STATE:
            state += count * size
        elif part.window:
            windows[part.window] = windows.get(part.window, 0.0) + count * size
        else:
            grows += count * size
    return KvBytes(grows, tuple(sorted(windows.items())), state)
