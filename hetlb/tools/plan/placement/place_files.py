"""Reading a cluster from CSV and JSON: nodes, links, layer times, limits by layers, model, placements.

What loads is complete and consistent (every node has a kind with times and limits, every link two
known ends); anything else is one `ConfigError` line with file, line, column and value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from hetlb.errors import ConfigError
from hetlb.inputs.yaml_file import read_object
from hetlb.tools.paths.stages import SINK, SOURCE, BatchLimits, Curve, Edge, LinkSpec
from hetlb.tools.plan.placement.place_cluster import (
    Holding,
    LayeredModel,
    MachineKind,
    PlaceCluster,
    Placement,
    PlaceNode,
)
from hetlb.tools.workload.record_file import MOST_COUNT, csv_rows

NODE_COLUMNS = ("node", "gpu_type", "region", "max_layers", "nic_in_bytes_per_s", "nic_out_bytes_per_s")
LINK_COLUMNS = ("from", "to", "bytes_per_s", "latency_s")
TIME_COLUMNS = ("gpu_type", "phase", "batch_tokens", "time_per_layer_ms")
LIMIT_COLUMNS = (
    "gpu_type", "layers", "tokens_per_s", "kv_entries_token_layer", "prompt_max_requests",
    "prompt_max_tokens", "decode_max_tokens", "decode_max_context_tokens",
)  # fmt: skip
_MOST_LAYERS = 10_000


def load_cluster(files: Mapping[str, Path], *, pruned: bool = False) -> PlaceCluster:
    """Read a cluster from its `nodes`, `links`, `layer_times`, `limits` and `model`. Raises `ConfigError`.

    With `pruned`, links with a `kept_after_pruning` of 0 are left out.
    """
    kinds = _read_limits(files["limits"], read_layer_times(files["layer_times"]))
    nodes = _read_nodes(files["nodes"], kinds)
    links = read_links(files["links"], {node.name for node in nodes}, pruned=pruned)
    return PlaceCluster(_read_model(files["model"]), nodes, kinds, links)


def read_layer_times(path: Path) -> dict[str, tuple[Curve, Curve]]:
    """Return the seconds of one layer by tokens of the batch, for prompts and decodes, by kind of machine."""
    points: dict[tuple[str, str], dict[float, float]] = {}
    for row in csv_rows(path, TIME_COLUMNS, ConfigError):
        phase = row.text("phase")
        if phase not in ("prompt", "decode"):
            raise row.error("phase", "prompt or decode")
        tokens = row.whole("batch_tokens", 0)
        at = points.setdefault((row.text("gpu_type"), phase), {})
        if tokens in at:
            raise row.error("batch_tokens", "each batch size once")
        at[tokens] = row.number("time_per_layer_ms") / 1000.0
    curves: dict[str, tuple[Curve, Curve]] = {}
    for kind in dict.fromkeys(name for name, _ in points):
        pair = []
        for phase in ("prompt", "decode"):
            at = points.get((kind, phase), {})
            if len(at) < 2:
                raise ConfigError(
                    f"{path}: {kind}: expected {phase} times of two batch sizes or more, got {len(at)}"
                )
            pair.append(Curve(tuple(sorted(at)), tuple(at[x] for x in sorted(at))))
        curves[kind] = (pair[0], pair[1])
    return curves


def _read_limits(path: Path, times: Mapping[str, tuple[Curve, Curve]]) -> dict[str, MachineKind]:
    holdings: dict[str, list[Holding]] = {}
    for row in csv_rows(path, LIMIT_COLUMNS, ConfigError):
        kind = row.text("gpu_type")
        if kind not in times:
            raise row.error("gpu_type", f"one of {', '.join(sorted(times))} (the kinds with layer times)")
        held = holdings.setdefault(kind, [])
        if row.whole("layers", 1, _MOST_LAYERS) != len(held) + 1:
            raise row.error("layers", f"{len(held) + 1}, the next number of layers of {kind}")
        batch = BatchLimits(
            prompts=row.whole("prompt_max_requests", 1),
            prompt_tokens=row.whole("prompt_max_tokens", 1),
            decodes=row.whole("decode_max_tokens", 1),
            decode_context=row.whole("decode_max_context_tokens", 1),
        )
        rate = row.number("tokens_per_s", "a number greater than 0", positive=True)
        held.append(Holding(rate, row.whole("kv_entries_token_layer", 1), batch))
    return {kind: MachineKind(kind, *times[kind], tuple(held)) for kind, held in holdings.items()}


def _read_nodes(path: Path, kinds: Mapping[str, MachineKind]) -> tuple[PlaceNode, ...]:
    nodes: dict[str, PlaceNode] = {}
    for row in csv_rows(path, NODE_COLUMNS, ConfigError):
        name, kind = row.text("node"), row.text("gpu_type")
        if name in nodes or name in (SOURCE, SINK):
            raise row.error("node", f"every name once, and not {SOURCE} or {SINK}")
        if kind not in kinds:
            raise row.error("gpu_type", f"one of {', '.join(sorted(kinds))} (the kinds with limits)")
        nodes[name] = PlaceNode(
            name=name,
            kind=kind,
            region=row.text("region"),
            max_layers=row.whole("max_layers", 1, _MOST_LAYERS),
            nic_in_bytes_per_s=row.number("nic_in_bytes_per_s", "a number greater than 0", positive=True),
            nic_out_bytes_per_s=row.number("nic_out_bytes_per_s", "a number greater than 0", positive=True),
        )
    return tuple(nodes.values())


def read_links(path: Path, names: set[str], *, pruned: bool = False) -> dict[Edge, LinkSpec]:
    """Return the links between nodes of these names, `source` and `sink`. Raises `ConfigError`."""
    links: dict[Edge, LinkSpec] = {}
    for row in csv_rows(path, LINK_COLUMNS, ConfigError):
        sender, receiver = row.text("from"), row.text("to")
        if sender not in names and sender != SOURCE:
            raise row.error("from", "a node of the nodes file or source")
        if receiver not in names and receiver != SINK:
            raise row.error("to", "a node of the nodes file or sink")
        if sender == receiver or (sender, receiver) == (SOURCE, SINK):
            raise row.error("to", "another node than the sender")
        if (sender, receiver) in links:
            raise row.error("to", f"each link once, but {sender} to {receiver} stood before")
        link = LinkSpec(
            row.number("bytes_per_s", "a number greater than 0", positive=True), row.number("latency_s")
        )
        if not pruned or row.get("kept_after_pruning") in ("", "1"):
            links[sender, receiver] = link
    return links


def _read_model(path: Path) -> LayeredModel:
    raw = read_object(path)

    def whole(key: str, most: int) -> int:
        value = raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ConfigError(f"{path}: {key}: expected a whole number from 1, got {str(value)[:60]!r}")
        return value

    return LayeredModel(
        name=str(raw.get("model", "model")),
        layers=whole("num_layers", _MOST_LAYERS),
        activation_bytes=whole("activation_bytes_per_token", MOST_COUNT),
        token_bytes=whole("token_bytes", MOST_COUNT),
    )


def read_flows(path: Path, names: set[str]) -> dict[Edge, float]:
    """Return tokens/s by link: `flows` of a plan that `hetlb place --json` printed. Raises `ConfigError`."""
    flows: dict[Edge, float] = {}
    for i, each in enumerate(read_object(path).get("flows") or ()):
        try:
            edge, rate = (each["from"], each["to"]), float(each["tokens_per_s"])
        except (KeyError, TypeError, ValueError) as caught:
            raise ConfigError(f"{path}: flows[{i}]: expected from, to and tokens_per_s") from caught
        if edge[0] not in {*names, SOURCE} or edge[1] not in {*names, SINK} or not 0.0 < rate < math.inf:
            raise ConfigError(f"{path}: flows[{i}]: expected known nodes and a rate, got {str(each)[:60]!r}")
        flows[edge] = rate
    if not flows:
        raise ConfigError(f"{path}: flows: expected at least one, got none")
    return flows


def load_placement(path: Path, cluster: PlaceCluster) -> Placement:
    """Read a placement: `{node: [first, end]}`. Raises `ConfigError` if it does not fit the cluster."""
    raw = read_object(path)
    nodes = {node.name: node for node in cluster.nodes}
    placement: Placement = {}
    for name, value in raw.items():
        if name not in nodes:
            raise ConfigError(f"{path}: {name[:60]!r}: expected a node of the nodes file")
        whole = isinstance(value, list) and all(type(bound) is int for bound in value)
        if not whole or len(value) != 2 or not 0 <= value[0] < value[1] <= cluster.model.layers:
            raise ConfigError(
                f"{path}: {name}: expected [first, end] within 0 and {cluster.model.layers}, "
                f"got {str(value)[:60]}"
            )
        most = cluster.most_layers(nodes[name])
        if value[1] - value[0] > most:
            raise ConfigError(
                f"{path}: {name}: expected at most {most} layers on a {nodes[name].kind}, "
                f"got {value[1] - value[0]}"
            )
        placement[name] = (value[0], value[1])
    if not placement:
        raise ConfigError(f"{path}: the file: expected at least one node, got none")
    return placement
