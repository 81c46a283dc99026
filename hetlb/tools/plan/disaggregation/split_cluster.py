"""Machines, links, model and workload of a disaggregation problem, and the plans that solve it.

Plain values in tokens, seconds and bytes; nothing is read or searched here. GPUs of one machine are
alike, so a group of GPUs is a number of GPUs per machine (a `Composition`). Tensor parallelism stays inside a
machine, as vLLM is run: a stage is `gpus` GPUs of one machine, and all stages of a group have the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from hetlb.balancer.core.types import Role as Role
from hetlb.tools.plan.common.capabilities import NIXL, Form
from hetlb.tools.plan.common.data_parallel import Degrees
from hetlb.tools.plan.common.plan_tables import Machine, Model

#: GPUs of a group by machine: (index of the machine, GPUs), in the order of the machines.
Composition: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Links:
    """`bytes_per_s[i][j]`: from machine i to machine j, shared by all that uses it, one rate per direction.

    `bytes_per_s[i][i]`: between any two GPUs inside machine i, each pair by itself.
    """

    bytes_per_s: tuple[tuple[float, ...], ...]
    latency_s: float


@dataclass(frozen=True)
class RequestLengths:
    """Requests as (prompt, output) tokens, equally likely; statistics that the cost models need."""

    rows: tuple[tuple[int, int], ...]

    @cached_property
    def prompt_tokens(self) -> float:
        return math.fsum(i for i, _ in self.rows) / len(self.rows)

    @cached_property
    def output_tokens(self) -> float:
        return math.fsum(o for _, o in self.rows) / len(self.rows)

    @cached_property
    def attended(self) -> float:
        """Mean square of the prompt tokens: what attention goes over in a prefill."""
        return math.fsum(i * i for i, _ in self.rows) / len(self.rows)

    @cached_property
    def context_tokens(self) -> float:
        """Mean tokens in the KV cache of a sequence that decodes: prompts weigh as long as they stay."""
        steps = math.fsum(o for _, o in self.rows)
        return math.fsum(o * (i + (o + 1) / 2) for i, o in self.rows) / steps

    @cached_property
    def final_tokens(self) -> float:
        """Mean tokens of a sequence at its end, weighted as `context_tokens` is."""
        steps = math.fsum(o for _, o in self.rows)
        return math.fsum(o * (i + o) for i, o in self.rows) / steps

    @cached_property
    def longest_tokens(self) -> int:
        return max(i + o for i, o in self.rows)

    @cached_property
    def longest_prompt(self) -> int:
        return max(i for i, _ in self.rows)


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds on the mean time to first token and the mean time per output token."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf


@dataclass(frozen=True)
class SplitCluster:
    """A disaggregation problem. Parameters, layers and KV size of the model are always known."""

    path: Path
    model: Model
    machines: tuple[Machine, ...]
    links: Links
    workload: RequestLengths
    slo: Slo = Slo()

    @property
    def kv_bytes(self) -> float:
        """Return the bytes of cache to send for the mean prompt.

        Of layers with windows only the last tokens are sent.
        """
        return self.model.known.kv_bytes(self.workload.prompt_tokens)

    @property
    def kv_bytes_per_prompt_token(self) -> float:
        """Return the mean bytes of cache of a token of a prompt."""
        return self.kv_bytes / self.workload.prompt_tokens

    @property
    def gpus(self) -> int:
        return sum(machine.gpus for machine in self.machines)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """First machine with the same GPUs (their number apart), for every machine."""
        first: dict[tuple[object, ...], int] = {}
        return tuple(
            first.setdefault((*m.kind_of_gpu, self.links.bytes_per_s[i][i]), i)
            for i, m in enumerate(self.machines)
        )


@dataclass(frozen=True, slots=True)
class GroupStage:
    """GPUs of one machine that hold `layers` layers with tensor parallelism.

    Or `ranks` data-parallel engines on them, each with all layers; every GPU holds whole experts.
    """

    machine: int
    gpus: int
    layers: int
    ranks: int = 1

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.gpus // self.ranks, self.ranks)


@dataclass(frozen=True)
class ServerGroup:
    """GPUs that serve one copy of the model in one role: `capacity` requests/s, KV cache in tokens.

    Of data-parallel engines the cache is of one rank: a request is in one.
    """

    role: Role
    stages: tuple[GroupStage, ...]
    capacity: float
    kv_cache_tokens: int

    @property
    def composition(self) -> Composition:
        counts: dict[int, int] = {}
        for stage in self.stages:
            counts[stage.machine] = counts.get(stage.machine, 0) + stage.gpus
        return tuple(sorted(counts.items()))

    @property
    def tensor_parallel_size(self) -> int:
        return self.stages[0].degrees.tp

    @property
    def ranks(self) -> int:
        return self.stages[0].ranks

    @property
    def is_exact(self) -> bool:
        """Return True if its pipeline has no bubbles: one stage, or similar batches."""
        return len(self.stages) == 1 or self.role is not Role.BOTH

    def form(self, connector: str | None = NIXL) -> Form:
        """Return the form of its server, with KV transfers or (None) without."""
        sizes = self.tensor_parallel_size, len(self.stages), len(self.composition)
        return Form(*sizes, connector, self.role, self.ranks)


@dataclass(frozen=True)
class SplitPlan:
    """Groups with the requests/s that pass them. `flows`: (prefill group, decode group) -> requests/s.

    `served`: requests/s of the groups that do both, by index. What is left out of all groups is idle.
    """

    groups: tuple[ServerGroup, ...]
    flows: Mapping[tuple[int, int], float]
    served: Mapping[int, float]

    @property
    def throughput(self) -> float:
        return math.fsum(self.flows.values()) + math.fsum(self.served.values())

    @property
    def names(self) -> list[str]:
        """Names of the groups: role and number."""
        roles = [group.role for group in self.groups]
        return [f"{role}-{roles[:g].count(role)}" for g, role in enumerate(roles)]

    @property
    def splits(self) -> bool:
        """True if any request is prefilled and decoded by different groups."""
        return bool(self.flows)
