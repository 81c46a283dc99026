"""Event log of the scheduler of pipelines: what it saw and decided, as JSON lines.

The first line is the network, every further one a fact with the commands that it led to. No prompt is in it.
`dispatches` reads the paths back, each with the network as it was then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any, Final

from hetlb.core.paths.path_ledger import PathDispatch, PathLease
from hetlb.core.paths.path_scheduler import PathCommand, PathScheduler
from hetlb.core.paths.stages import BatchLimits, Curve, Hop, LinkSpec, StageNetwork, StageSpec
from hetlb.core.predictor import Predictor
from hetlb.core.types import Outcome, Request, RequestId

PATH_LOG_FORMAT: Final = "hetlb-paths"
PATH_LOG_VERSION: Final = 1
_NICS: Final = ("nic_in_bytes_per_s", "nic_out_bytes_per_s")


def _network(network: StageNetwork) -> dict[str, Any]:
    raw = asdict(network)
    raw["links"] = [[*edge, link.bytes_per_s, link.latency_s] for edge, link in network.links.items()]
    for stage in raw["stages"]:  # JSON has no infinity
        for key in _NICS:
            stage[key] = None if math.isinf(stage[key]) else stage[key]
    raw["flows"] = [[*edge, rate] for edge, rate in network.flows.items()]
    return raw


def _read_network(raw: dict[str, Any]) -> StageNetwork:
    stages = []
    for each in raw["stages"]:
        curves = {key: Curve(tuple(each[key]["xs"]), tuple(each[key]["ys"])) for key in ("prompt", "decode")}
        nics = {key: math.inf if each[key] is None else each[key] for key in _NICS}
        stages.append(StageSpec(**{**each, **curves, **nics, "batch": BatchLimits(**each["batch"])}))
    links = {(a, b): LinkSpec(rate, latency) for a, b, rate, latency in raw["links"]}
    flows = {(a, b): rate for a, b, rate in raw["flows"]}
    return StageNetwork(**{**raw, "stages": tuple(stages), "links": links, "flows": flows})


def _command(command: PathCommand) -> list[Any]:
    if isinstance(command, PathDispatch):
        lease = command.lease
        hops = [[hop.stage, hop.first, hop.end] for hop in lease.hops]
        return ["dispatch", command.request_id, lease.id, lease.context_tokens, lease.kv_tokens, hops]
    return ["reject", command.request_id, command.reason.value]


class RecordingPathScheduler(PathScheduler):
    """A scheduler of pipelines that writes every fact and what came of it, a line at a time."""

    def __init__(
        self,
        network: StageNetwork,
        predictor: Predictor,
        *,
        write: Callable[[str], object],
        policy: str = "hetlb",
        **options: Any,
    ) -> None:
        self._write = write
        super().__init__(network, predictor, policy=policy, **options)
        head = {"format": PATH_LOG_FORMAT, "version": PATH_LOG_VERSION, "policy": policy}
        write(_line({**head, "network": _network(network)}))

    def _record(self, kind: str, now: float, commands: list[PathCommand], **fact: Any) -> list[PathCommand]:
        self._write(_line({"t": now, "kind": kind, **fact, "out": [_command(each) for each in commands]}))
        return commands

    def on_arrival(self, request: Request, now: float) -> list[PathCommand]:
        commands = super().on_arrival(request, now)
        fact = {
            "request": request.id,
            "prompt_tokens": request.prompt_tokens,
            "max_tokens": request.max_tokens,
        }
        return self._record("arrival", now, commands, **fact)

    def on_first_token(self, lease: PathLease, now: float) -> list[PathCommand]:
        return self._record("first_token", now, super().on_first_token(lease, now), lease=lease.id)

    def on_lease_ended(self, lease: PathLease, outcome: Outcome, now: float) -> list[PathCommand]:
        commands = super().on_lease_ended(lease, outcome, now)
        fact = {"lease": lease.id, "outcome": outcome.value, "output_tokens": lease.output_tokens}
        return self._record("lease_ended", now, commands, **fact)

    def on_preempted(self, lease: PathLease, now: float) -> list[PathCommand]:
        commands = super().on_preempted(lease, now)
        return self._record("preempted", now, commands, lease=lease.id, output_tokens=lease.output_tokens)

    def on_cancelled(self, request_id: RequestId, now: float) -> list[PathCommand]:
        return self._record("cancelled", now, super().on_cancelled(request_id, now), request=request_id)

    def on_stage(self, name: str, *, up: bool, now: float) -> list[PathCommand]:
        return self._record("stage", now, super().on_stage(name, up=up, now=now), name=name, up=up)

    def on_network(self, network: StageNetwork, now: float) -> list[PathCommand]:
        commands = super().on_network(network, now)
        return self._record("network", now, commands, network=_network(network))


def _line(document: dict[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":")) + "\n"


def is_path_log(first_line: str) -> bool:
    """True for the first line of such a log."""
    return first_line.startswith(f'{{"format":"{PATH_LOG_FORMAT}"')


def dispatches(lines: Iterable[str]) -> Iterator[tuple[int, StageNetwork, tuple[Hop, ...]]]:
    """Line number, network and path of every dispatch in a log. Raises `ValueError` for what is no log."""
    network: StageNetwork | None = None
    for number, line in enumerate(lines, start=1):
        try:
            raw = json.loads(line)
            if number == 1:
                if raw.get("format") != PATH_LOG_FORMAT or raw.get("version") != PATH_LOG_VERSION:
                    raise ValueError(f"expected a log of paths, version {PATH_LOG_VERSION}")
                network = _read_network(raw["network"])
                continue
            if raw["kind"] == "network":
                network = _read_network(raw["network"])
            paths = [command[5] for command in raw["out"] if command[0] == "dispatch"]
            found = [
                tuple(Hop(str(name), int(first), int(end)) for name, first, end in path) for path in paths
            ]
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"line {number}: expected a fact of a log of paths: {error!r}") from error
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        assert network is not None
        for hops in found:
            yield number, network, hops
