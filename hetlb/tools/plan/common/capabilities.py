"""Capabilities of engines: forms of `vllm serve` that work, that do not, and that were never tried.

A form with a connector works if KV caches were transferred, not if its server starts. A plan emits no refused
form, and marks forms that were never run. The first matching fact decides. Facts are of vLLM 0.32, and hold
unless an engine is known to be another version.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hetlb.balancer.core.types import Role


class Status(StrEnum):
    """Knowledge of a form."""

    RUN = "run"
    REFUSED = "refused"
    UNTRIED = "not tried"


@dataclass(frozen=True, slots=True)
class Form:
    """One way to start a server. `connector` is of KV transfers, `role` of the server in them."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    machines: int = 1
    connector: str | None = None
    role: Role = Role.BOTH
    data_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class Fact:
    """A statement about forms. None: any; `tp`, `pp`, `machines` and `dp` are (least, most)."""

    status: Status
    source: str
    connector: str | None = None
    roles: tuple[Role, ...] = tuple(Role)
    tp: tuple[int, int] = (1, 1 << 10)
    pp: tuple[int, int] = (1, 1 << 10)
    machines: tuple[int, int] = (1, 1 << 10)
    dp: tuple[int, int] = (1, 1 << 10)

    def fits(self, form: Form) -> bool:
        return (
            self.connector == form.connector
            and form.role in self.roles
            and self.tp[0] <= form.tensor_parallel_size <= self.tp[1]
            and self.pp[0] <= form.pipeline_parallel_size <= self.pp[1]
            and self.machines[0] <= form.machines <= self.machines[1]
            and self.dp[0] <= form.data_parallel_size <= self.dp[1]
        )


NIXL = "NixlConnector"
_NIXL_WORKER = "vLLM 0.32, kv_connector/v1/nixl/base_worker.py"
_MANY = 1 << 10

VLLM_FACTS = (
    Fact(
        Status.REFUSED,
        f"{_NIXL_WORKER}: NotImplementedError for kv_consumer with pipeline_parallel_size > 1; completions "
        "are counted per rank of the receiver, so that kv_both is no better",
        connector=NIXL,
        roles=(Role.DECODE, Role.BOTH),
        pp=(2, _MANY),
    ),
    Fact(
        Status.REFUSED,
        f"{_NIXL_WORKER}: a kv_producer of several stages starts, but every pull of its blocks fails at the "
        "handshake (numbers of KV layers differ), and the decode server computes the prompt anew",
        connector=NIXL,
        roles=(Role.PREFILL,),
        pp=(2, _MANY),
    ),
    Fact(
        Status.RUN,
        "CPU build 0.32.0 with NIXL 1.5.1 over TCP: 50 of 50 transfers by the decode server's counters",
        connector=NIXL,
        roles=(Role.PREFILL, Role.DECODE),
        tp=(1, 1),
        machines=(1, 1),
        dp=(1, 1),
    ),
    Fact(
        Status.UNTRIED,
        "NIXL between servers of several GPUs: servers of two ranks start and answer, no transfer was run",
        connector=NIXL,
    ),
    Fact(
        Status.UNTRIED,
        "data-parallel ranks with whole experts on each GPU: documented by vLLM, not run here",
        dp=(2, _MANY),
    ),
    Fact(
        Status.UNTRIED,
        "a server over several machines (Ray): documented by vLLM, not run here",
        machines=(2, _MANY),
    ),
    Fact(
        Status.RUN,
        "CPU build 0.32.0: one rank; two ranks of a pipeline with VLLM_PP_LAYER_PARTITION, compiled",
        tp=(1, 1),
        pp=(1, 2),
    ),
    Fact(Status.RUN, "CPU build 0.32.0: two ranks of tensor parallelism", tp=(2, 2), pp=(1, 1)),
    Fact(
        Status.UNTRIED,
        "more tensor parallelism and longer pipelines on one machine: documented by vLLM, not run here",
    ),
)


def fact_of(form: Form) -> Fact:
    return next(fact for fact in VLLM_FACTS if fact.fits(form))


def refused(form: Form) -> bool:
    """Return True if the engine is known not to work in this form."""
    return fact_of(form).status is Status.REFUSED
