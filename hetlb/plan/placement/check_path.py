"""Check of a path through stages, from the network alone; nothing of the scheduler is used."""

from __future__ import annotations

from collections.abc import Sequence

from hetlb.core.paths.stages import SINK, SOURCE, Hop, StageNetwork
from hetlb.errors import PlanError


def check_path(network: StageNetwork, hops: Sequence[Hop]) -> None:
    """Raise `PlanError` unless a path computes every layer once and in order, over links that exist."""
    stages = {stage.name: stage for stage in network.stages}
    at, sender = 0, SOURCE
    for hop in hops:
        stage = stages.get(hop.stage)
        if stage is None or not stage.first <= hop.first < hop.end <= stage.end:
            raise PlanError(f"{hop}: expected layers that the stage holds")
        if hop.first != at or (hop.first != stage.first and not network.partial_inference):
            raise PlanError(f"{hop}: expected to go on at layer {at}")
        if (sender, hop.stage) not in network.links:
            raise PlanError(f"{hop}: expected a link from {sender}")
        at, sender = hop.end, hop.stage
    if at != network.layers or (sender, SINK) not in network.links:
        raise PlanError(f"the path: expected to end behind layer {network.layers}, got {at}")
