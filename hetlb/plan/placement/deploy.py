"""A placement as stages, as vLLM servers where those do as well, and as a fleet file of pipelines."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetlb.errors import ConfigError
from hetlb.plan.fleet_file import FleetWriter
from hetlb.plan.placement.cluster import Cluster, Placement
from hetlb.plan.placement.flow import Flow, Pipeline, max_flow, pipelines
from hetlb.plan.placement.heuristics import Intervals

_STAGE_PORT = 9100
#: Share of a plan's flow from which fixed pipelines are the better choice.
_VLLM_SHARE = 0.95


def stage_commands(cluster: Cluster, placement: Placement) -> list[str]:
    """One worker per node."""
    model = shlex.quote(cluster.model.name)
    return [
        f"hetlb stage --model {model} --layers {first}:{end} --host 0.0.0.0 --port {_STAGE_PORT}  # on {name}"
        for name, (first, end) in placement.items()
    ]


def vllm_plan(
    cluster: Cluster, placement: Placement, flow: Flow, separate: Intervals | None
) -> dict[str, Any] | None:
    """The same machines as vLLM servers with pipeline parallelism, None where there are none.

    They are the plan's own pipelines where those share no machine and hold whole stages, else `separate`.
    """
    found = pipelines(flow)
    if _twice(found) is not None or not all(_whole_stages(placement, pipeline) for pipeline in found):
        if separate is None:
            return None
        placement = separate
        found = pipelines(max_flow(cluster, placement))
        if _twice(found) is not None:
            return None
    return {
        "max_flow_tokens_per_s": sum(pipeline.tokens_per_s for pipeline in found),
        "pipelines": [list(pipeline.nodes) for pipeline in found],
        "commands": [_vllm_command(cluster, placement, pipeline.nodes) for pipeline in found],
    }


def _twice(found: Sequence[Pipeline]) -> str | None:
    """A machine that serves more than one of the pipelines, None where none does."""
    names = [name for pipeline in found for name in pipeline.nodes]
    return next((name for name in names if names.count(name) > 1), None)


def _whole_stages(placement: Placement, pipeline: Pipeline) -> bool:
    """True if every machine of a pipeline begins at its own first layer."""
    at = 0
    for name in pipeline.nodes:
        if placement[name][0] != at:
            return False
        at = placement[name][1]
    return True


def _vllm_command(cluster: Cluster, placement: Placement, nodes: Sequence[str]) -> str:
    """One server over the machines of a pipeline, which are one Ray cluster."""
    layers = [placement[name][1] - placement[name][0] for name in nodes]
    words = ["vllm", "serve", cluster.model.name]
    if len(nodes) == 1:
        return f"{shlex.join(words)}  # on {nodes[0]}"
    words += ["--pipeline-parallel-size", str(len(nodes)), "--distributed-executor-backend", "ray"]
    partition = f"VLLM_PP_LAYER_PARTITION={','.join(map(str, layers))}"
    return f"{partition} {shlex.join(words)}  # Ray cluster of {', '.join(nodes)}, its head on {nodes[0]}"


def advice(flow: float, vllm: dict[str, Any] | None) -> str:
    """A sentence that says which of both is the better choice."""
    if vllm is None:
        return "Stages: no pipelines of separate machines hold the model."
    share = vllm["max_flow_tokens_per_s"] / flow if flow else 0.0
    if share >= _VLLM_SHARE:
        return (
            f"vLLM: its pipelines of separate machines reach {share:.0%} of the flow, with faster kernels "
            "than stages have."
        )
    return f"Stages: pipelines of separate machines, which vLLM can be, reach {share:.0%} of the flow."


def write_fleet(path: Path, cluster: Cluster, found: Sequence[Pipeline]) -> None:
    """Every pipeline as one instance, which vLLM can be where no machine serves two of them.

    Raises `InputError`.
    """
    if (shared := _twice(found)) is not None:
        raise ConfigError(
            f"--write-fleet: expected pipelines without a machine in common, got {shared!r} in two: "
            "such a plan needs stages"
        )
    instances = [
        {"name": f"pipeline-{i}", "url": f"http://{pipeline.nodes[0]}:8000", "weight": pipeline.tokens_per_s}
        for i, pipeline in enumerate(found)
    ]
    heading = "Written by `hetlb place`: node names stand for hosts, the first of each pipeline has the API."
    FleetWriter(path).write(heading, [{"name": cluster.model.name, "instances": instances}])
