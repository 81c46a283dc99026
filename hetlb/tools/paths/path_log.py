"""Event log of pipelines as JSON lines: every network of stages, and the paths of the requests through it.

The first line is the network at the start; a path belongs to the network above it. No prompt is in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any, Final

from hetlb.tools.paths.path_ledger import PathLease
from hetlb.tools.paths.stages import BatchLimits, Curve, Hop, LinkSpec, StageNetwork, StageSpec

_FORMAT: Final = "hetlb-paths"
_VERSION: Final = 2


class PathLog:
    """Writer of a log, a line at a time."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def network(self, network: StageNetwork, now: float) -> None:
        """Write the stages that hold from now on."""
        raw = asdict(network)
        raw["links"] = [[*edge, link.bytes_per_s, link.latency_s] for edge, link in network.links.items()]
        raw["flows"] = [[*edge, rate] for edge, rate in network.flows.items()]
        for stage in raw["stages"]:  # stages of workers have no limit, and JSON no infinity
            del stage["nic_in_bytes_per_s"], stage["nic_out_bytes_per_s"]
        self._line({"format": _FORMAT, "version": _VERSION, "t": now, "network": raw})

    def path(self, lease: PathLease) -> None:
        """Write that a request was sent over a path."""
        self._line(
            {
                "t": lease.dispatched_at,
                "request": lease.request.id,
                "lease": lease.id,
                "replays": lease.replays,
                "context_tokens": lease.context_tokens,
                "kv_tokens": lease.kv_tokens,
                "path": [[hop.stage, hop.first, hop.end] for hop in lease.hops],
            }
        )

    def _line(self, document: dict[str, Any]) -> None:
        self._write(json.dumps(document, separators=(",", ":")) + "\n")


def is_path_log(first_line: str) -> bool:
    """Return True for the first line of such a log."""
    return first_line.startswith(f'{{"format":"{_FORMAT}"')


def dispatches(lines: Iterable[str]) -> Iterator[tuple[int, StageNetwork, tuple[Hop, ...]]]:
    """Yield line number, network and path of every request in a log. Raises `ValueError` without a log."""
    network: StageNetwork | None = None
    for number, line in enumerate(lines, start=1):
        try:
            raw = json.loads(line)
            if network is None and (raw.get("format"), raw.get("version")) != (_FORMAT, _VERSION):
                raise ValueError(f"expected a log of paths, version {_VERSION}")
            if "network" in raw:
                network = _read_network(raw["network"])
                continue
            hops = tuple(Hop(str(name), int(first), int(end)) for name, first, end in raw["path"])
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"line {number}: expected a line of a log of paths: {error!r}") from error
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        assert network is not None
        yield number, network, hops


def _read_network(raw: dict[str, Any]) -> StageNetwork:
    stages = []
    for each in raw["stages"]:
        curves = {key: Curve(tuple(each[key]["xs"]), tuple(each[key]["ys"])) for key in ("prompt", "decode")}
        stages.append(StageSpec(**{**each, **curves, "batch": BatchLimits(**each["batch"])}))
    links = {(a, b): LinkSpec(rate, latency) for a, b, rate, latency in raw["links"]}
    flows = {(a, b): rate for a, b, rate in raw["flows"]}
    return StageNetwork(**{**raw, "stages": tuple(stages), "links": links, "flows": flows})
