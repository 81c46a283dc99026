"""A placement as stages (`hetlb stage`, coordinator, fleet), and as vLLM servers where they hold it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from hetlb.output_files import write_text
from hetlb.tools.plan.common.capabilities import Form
from hetlb.tools.plan.common.servers import PLACEHOLDER, VllmServer, host_of
from hetlb.tools.plan.placement.flow import Flow, Pipeline, max_flow, pipelines
from hetlb.tools.plan.placement.place_cluster import PlaceCluster, Placement, PlaceNode

_STAGE_PORT = 9100
#: Port of the coordinator, on the proxy's machine.
_COORDINATOR_PORT = 9200
#: The key that all stages and their coordinator share, beside the file of the stages.
KEY_FILE = "stage.key"
#: Fixed pipelines are the better choice from this share of a plan's flow on.
_VLLM_SHARE = 0.95
_MEMORY_UTILIZATION = 0.9


def stage_commands(
    cluster: PlaceCluster, placement: Placement, folder: str, fleet: Path | None = None
) -> list[str]:
    """Return the commands of a plan: the shared key, made once, a worker per node, coordinator and proxy.

    `folder` holds the model on every machine; `fleet` is the file that the plan is written to.
    """
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
    fleet = fleet or Path("fleet.yaml")
    commands.append(
        f"hetlb stage --coordinate {quote(str(stages_path(fleet)))} --port {_COORDINATOR_PORT}"
        "  # beside the proxy"
    )
    return [*commands, f"hetlb serve --config {quote(str(fleet))}"]


def stages_path(fleet: Path) -> Path:
    """Return the path of the file of the stages that belongs to a fleet file."""
    return fleet.with_name(f"{fleet.stem}-stages.yaml")


def _port(node: PlaceNode) -> int:
    return _STAGE_PORT + (node.gpu or 0)


def write_stages(path: Path, cluster: PlaceCluster, placement: Placement, folder: str) -> None:
    """Write a fleet file and, beside it, the file of its stages. Raises `InputError`.

    Hosts, key and folder of the stages are to be filled in.
    """
    workers = [
        {"name": node.name, "url": f"http://{host_of(node.host or node.name)}:{_port(node)}"}
        for node in cluster.nodes
        if node.name in placement
    ]
    name, stages = cluster.model.name, stages_path(path)
    document = {"version": 1, "model": name, "folder": folder, "key_file": KEY_FILE, "workers": workers}
    heading = (
        f"# Written by `hetlb place` for `hetlb stage --coordinate {stages.name} --port {_COORDINATOR_PORT}`."
        f" Fill in the hosts (NAME{PLACEHOLDER}), the folder of the model and {KEY_FILE}."
    )
    write_text(stages, f"{heading}\n{yaml.safe_dump(document, sort_keys=False)}")
    coordinator = {"name": "stages", "url": f"http://127.0.0.1:{_COORDINATOR_PORT}"}
    fleet = {"version": 1, "models": [{"name": name, "instances": [coordinator]}]}
    heading = f"# Written by `hetlb place`. The instance is the coordinator of {stages.name}."
    write_text(path, f"{heading}\n{yaml.safe_dump(fleet, sort_keys=False)}")


def vllm_plan(
    cluster: PlaceCluster, placement: Placement, flow: Flow, separate: Placement | None
) -> dict[str, Any] | None:
    """Return the same machines as vLLM servers with pipeline parallelism, None if there are none.

    They are the plan's own pipelines where these share no machine and hold whole stages, else `separate`.
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
    """Return True if a machine serves more than one of the pipelines."""
    names = [name for pipeline in found for name in pipeline.nodes]
    return len(set(names)) < len(names)


def _whole_stages(placement: Placement, pipeline: Pipeline) -> bool:
    """Return True if every machine of a pipeline begins at its own first layer."""
    at = 0
    for name in pipeline.nodes:
        if placement[name][0] != at:
            return False
        at = placement[name][1]
    return True


def _server(cluster: PlaceCluster, placement: Placement, index: int, names: Sequence[str]) -> VllmServer:
    """Return one server over the machines of a pipeline."""
    node = {each.name: each for each in cluster.nodes}
    hosts: dict[str, list[int]] = {}
    for name in names:
        hosts.setdefault(node[name].host or name, []).append(node[name].gpu or 0)
    return VllmServer(
        name=f"pipeline-{index}",
        model=cluster.model.name,
        form=Form(pipeline_parallel_size=len(names), machines=len(hosts)),
        gpus=[(host, tuple(gpus)) for host, gpus in hosts.items()],
        utilization=_MEMORY_UTILIZATION,
        layers=[placement[name][1] - placement[name][0] for name in names],
    )


def advice(flow: float, vllm: dict[str, Any] | None) -> str:
    """Return a sentence that says which of both is the better choice."""
    if vllm is None:
        return "Stages: no pipelines of separate machines hold the model."
    share = vllm["max_flow_tokens_per_s"] / flow if flow else 0.0
    if share >= _VLLM_SHARE:
        return (
            f"vLLM: its pipelines of separate machines reach {share:.0%} of the flow, with faster kernels "
            "than stages have."
        )
    return f"Stages: pipelines of separate machines, which vLLM can be, reach {share:.0%} of the flow."
