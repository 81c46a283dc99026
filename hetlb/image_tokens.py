"""Prompt tokens of an image, from its width and height in pixels, by the rule of a model's image processor.

Each rule gives what vLLM puts in the place of one image: the placeholder tokens and the markers around them.
Sources: the processors of transformers 4.57, which vLLM calls, with the limits of the published models:
`smart_resize` of Qwen2-VL, `get_optimal_tiled_canvas` of InternVL, `get_best_fit` of Llama 4,
`select_best_resolution` of LLaVA-NeXT, `get_resize_output_image_size` of Pixtral.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol


class ImageRule(Protocol):
    """Tokens of an image by its size."""

    def tokens(self, width: int, height: int) -> int:
        """Prompt tokens of an image of `width` x `height` pixels, both at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class FixedTokens:
    """Every image is resized to one size: `count` tokens."""

    count: int

    def tokens(self, width: int, height: int) -> int:
        """`count`."""
        return self.count


@dataclass(frozen=True, slots=True)
class PixelBounds:
    """Sides rounded to whole merged patches, the area kept between two bounds (Qwen2-VL, 2.5-VL, 3-VL).

    One token for `merge` x `merge` patches of `patch` x `patch` pixels, and `markers` around them.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    markers: int = 2

    def tokens(self, width: int, height: int) -> int:
        """Merged patches after the resize, and the markers."""
        side = self.patch * self.merge
        rows, columns = round(height / side), round(width / side)
        area = rows * columns * side * side
        if area > self.max_pixels:
            factor = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / factor / side))
            columns = max(1, math.floor(width / factor / side))
        elif area < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * factor / side), math.ceil(width * factor / side)
        return rows * columns + self.markers


@dataclass(frozen=True, slots=True)
class LongestEdge:
    """The longer side shrunk to `longest_edge`, sides rounded up to patches, a marker per row (Pixtral)."""

    patch: int
    merge: int
    longest_edge: int

    def tokens(self, width: int, height: int) -> int:
        """Merged patches, and one marker at the end of every row."""
        side = self.patch * self.merge
        ratio = max(width, height) / self.longest_edge
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        rows, columns = max(1, -(-height // side)), max(1, -(-width // side))
        return rows * (columns + 1)


@dataclass(frozen=True, slots=True)
class Tiles:
    """At most `max_tiles` square tiles of the nearest aspect ratio, and a thumbnail if several (InternVL)."""

    tile: int
    tile_tokens: int
    max_tiles: int
    markers: int = 2

    def tokens(self, width: int, height: int) -> int:
        """Tokens of all tiles and the thumbnail, and the markers."""
        columns, rows = self._grid(width, height)
        tiles = columns * rows
        return (tiles + 1 if tiles > 1 else 1) * self.tile_tokens + self.markers

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        ratio, area = width / height, width * height
        best, least = (1, 1), math.inf
        for grid in _grids(self.max_tiles):
            off = abs(ratio - grid[0] / grid[1])
            larger = off == least and area > 0.5 * self.tile * self.tile * grid[0] * grid[1]
            if off < least or larger:
                best, least = grid, off
        return best


@dataclass(frozen=True, slots=True)
class Llama4Tiles:
    """Llama 4: the canvas of tiles that upscales least, or downscales least, and a global tile if several."""

    tile: int = 336
    tile_tokens: int = 144
    max_tiles: int = 16

    def tokens(self, width: int, height: int) -> int:
        """Tokens of the tiles, a separator behind each tile, and three markers."""
        columns, rows = self._canvas(width, height)
        tiles = columns * rows
        if tiles == 1:
            return self.tile_tokens + 3
        return (tiles + 1) * self.tile_tokens + tiles + 3

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        scales = {
            grid: min(grid[0] * self.tile / width, grid[1] * self.tile / height)
            for grid in _grids(self.max_tiles)
        }
        enough = [scale for scale in scales.values() if scale >= 1]
        wanted = min(enough) if enough else max(scales.values())
        return min(
            (grid for grid, scale in scales.items() if scale == wanted), key=lambda grid: grid[0] * grid[1]
        )


@dataclass(frozen=True, slots=True)
class LlavaNext:
    """LLaVA-NeXT: a base view, and tiles of the best canvas without their padding, a marker per row."""

    tile: int = 336
    patch: int = 14
    #: Canvases in tiles, columns x rows.
    canvases: tuple[tuple[int, int], ...] = ((2, 1), (1, 2), (2, 2), (1, 3), (3, 1))

    def tokens(self, width: int, height: int) -> int:
        """Patches of the base view and of the unpadded canvas, and one marker per row of the latter."""
        side = self.tile // self.patch
        columns, rows = self._canvas(width, height)
        columns, rows = columns * side, rows * side
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return side * side + rows * columns + rows

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        best, most, least_waste = self.canvases[0], 0, math.inf
        for canvas in self.canvases:
            across, down = canvas[0] * self.tile, canvas[1] * self.tile
            scale = min(across / width, down / height)
            used = min(int(width * scale) * int(height * scale), width * height)
            waste = across * down - used
            if used > most or (used == most and waste < least_waste):
                best, most, least_waste = canvas, used, waste
        return best


@lru_cache(maxsize=8)
def _grids(max_tiles: int) -> tuple[tuple[int, int], ...]:
    """Columns x rows of all grids of at most so many tiles, small ones first."""
    grids = [
        (columns, rows)
        for columns in range(1, max_tiles + 1)
        for rows in range(1, max_tiles + 1)
        if columns * rows <= max_tiles
    ]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))


#: Rules by the family of models, with the limits that the models are published with.
NAMED_RULES: Final[Mapping[str, ImageRule]] = {
    "qwen2-vl": PixelBounds(patch=14, merge=2, min_pixels=3136, max_pixels=12_845_056),
    "qwen2.5-vl": PixelBounds(patch=14, merge=2, min_pixels=3136, max_pixels=12_845_056),
    "qwen3-vl": PixelBounds(patch=16, merge=2, min_pixels=65_536, max_pixels=16_777_216),
    "llava-1.5": FixedTokens(576),
    "llava-next": LlavaNext(),
    "pixtral": LongestEdge(patch=16, merge=1, longest_edge=1024),
    "mistral-small-3.1": LongestEdge(patch=14, merge=2, longest_edge=1540),
    "internvl": Tiles(tile=448, tile_tokens=256, max_tiles=12),
    "gemma-3": FixedTokens(260),
    "llama-4": Llama4Tiles(),
}
