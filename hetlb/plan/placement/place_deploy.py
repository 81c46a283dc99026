"""A placement as stages (`hetlb stage`, a fleet file with `stages:`), and as vLLM servers where those do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from hetlb.plan.common.capabilities import Form
from hetlb.plan.common.servers import VllmServer, host_of, write_fleet
from hetlb.plan.placement.flow import Flow, Pipeline, max_flow, pipelines
from hetlb.plan.placement.place_cluster import PlaceCluster, Placement, PlaceNode

_STAGE_PORT = 9100
#: The key that all stages and the proxy share, beside the fleet file.
KEY_FILE = "stage.key"
#: Share of a plan's flow from which fixed pipelines are the better choice.
_VLLM_SHARE = 0.95
_UTILIZATION = 0.9


def stage_commands(cluster: PlaceCluster, placement: Placement, folder: str) -> list[str]:
    """The shared key, made once, then one worker per node. `folder` holds the model on every machine."""
    commands = [
        f"test -e {KEY_FILE} || openssl rand -hex 32 > {KEY_FILE}  # once: the same file on all machines"
    ]
    for node in cluster.nodes:
        if node.name in placement:
            first, end = placement[node.name]
            visible = "" if node.gpu is None else f"CUDA_VISIBLE_DEVICES={node.gpu} "
            commands.append(
                f"{visible}hetlb stage --model {quote(folder)} --layers {first}:{end} --host 0.0.0.0 "
                f"--port {_port(node)} --key-file {KEY_FILE}  # on {node.host or node.name}"
            )
    return commands


def _port(node: PlaceNode) -> int:
    return _STAGE_PORT + (node.gpu or 0)


def write_stages(path: Path, cluster: PlaceCluster, placement: Placement, folder: str) -> None:
    """Write a fleet file; its hosts, key and folder are to be filled in. Raises `InputError`."""
    workers = [
        {"name": node.name, "url": f"http://{host_of(node.host or node.name)}:{_port(node)}"}
        for node in cluster.nodes
        if node.name in placement
    ]
    stages = {"folder": folder, "key_file": KEY_FILE, "workers": workers}
    heading = f"Written by `hetlb place`. The folder of the model and {KEY_FILE} are to be filled in, too."
    write_fleet(path, heading, [{"name": cluster.model.name, "stages": stages}])


def vllm_plan(
    cluster: PlaceCluster, placement: Placement, flow: Flow, separate: Placement | None
) -> dict[str, Any] | None:
    """The same machines as vLLM servers with pipeline parallelism, None where there are none.

    They are the plan's own pipelines where those share no machine and hold whole stages, else `separate`.
    """
    found = pipelines(flow)
    if _shared(found) or not all(_whole_stages(placement, pipeline) for pipeline in found):
        if separate is None:
            return None
        placement = separate
        found = pipelines(max_flow(cluster, placement))
        if _shared(found):
            return None
    return {
        "max_flow_tokens_per_s": sum(pipeline.tokens_per_s for pipeline in found),
        "pipelines": [list(pipeline.nodes) for pipeline in found],
        "commands": [_server(cluster, placement, i, each.nodes).command() for i, each in enumerate(found)],
    }


def _shared(found: Sequence[Pipeline]) -> bool:
    """True if a machine serves more than one of the pipelines."""
    names = [name for pipeline in found for name in pipeline.nodes]
    return len(set(names)) < len(names)


def _whole_stages(placement: Placement, pipeline: Pipeline) -> bool:
    """True if every machine of a pipeline begins at its own first layer."""
    at = 0
    for name in pipeline.nodes:
        if placement[name][0] != at:
            return False
        at = placement[name][1]
    return True


def _server(cluster: PlaceCluster, placement: Placement, index: int, names: Sequence[str]) -> VllmServer:
    """One server over the machines of a pipeline."""
    node = {each.name: each for each in cluster.nodes}
    hosts: dict[str, list[int]] = {}
    for name in names:
        hosts.setdefault(node[name].host or name, []).append(node[name].gpu or 0)
    return VllmServer(
        name=f"pipeline-{index}",
        model=cluster.model.name,
        form=Form(pipeline_parallel_size=len(names), machines=len(hosts)),
        gpus=[(host, tuple(gpus)) for host, gpus in hosts.items()],
        utilization=_UTILIZATION,
        layers=[placement[name][1] - placement[name][0] for name in names],
    )


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
