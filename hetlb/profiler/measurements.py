"""Points of one engine, from whatever source, and what that source knows of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from hetlb.config.profile_file import EngineInfo, Hardware, HostTime, ModelInfo, ProfileSource
from hetlb.core.latency import LatencyModel
from hetlb.profiler.fit import Point

#: Tokens of a tile where no point shows it: the usual size of GPU kernels of matrix products.
ASSUMED_TILE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Points, their source, and the engine, hardware and model as far as the source knows them.

    `host` is None where the points hold no host time. `tile` is taken where they show none. `lone` are prompt
    tokens and seconds of single requests. `split_blocks`: sequences that fill the GPU with one block per KV
    head, where contexts are split (`SplitKv`). `where` leads errors; `name` is the profile's where nothing
    else names it.
    """

    points: tuple[Point, ...]
    source: ProfileSource
    engine: EngineInfo
    hardware: Hardware | None = None
    model: ModelInfo | None = None
    host: HostTime | None = None
    tile: int | None = ASSUMED_TILE
    lone: tuple[tuple[int, float], ...] = ()
    split_blocks: float | None = None
    assumed: tuple[str, ...] = ()
    where: str = ""
    name: str = ""

    @property
    def gpu(self) -> str | None:
        """The GPU, None where it is not known."""
        return None if self.hardware is None else self.hardware.gpu

    @property
    def own_name(self) -> str:
        """Name of a profile of these points: GPU, model and degree."""
        degree = self.engine.tensor_parallel_size
        parts = (self.gpu, self.model and self.model.name, degree and f"tp{degree}")
        return "-".join(part for part in parts if part).lower().replace("/", "-") or self.name

    def request_s(self, latency: LatencyModel) -> float:
        """Seconds that the server adds to a request beyond its prefill: the median of the lone ones."""
        return max(0.0, median(seconds - latency.prefill_s(tokens) for tokens, seconds in self.lone))
