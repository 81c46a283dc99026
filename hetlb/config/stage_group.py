"""`stages:` of a fleet file: workers of `hetlb stage` that serve one model together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hetlb.config.mistakes import one_of, short
from hetlb.config.urls import check_stage_url
from hetlb.config.yaml_file import NonNegative, Positive, PositiveInt, Share
from hetlb.errors import ConfigError

if TYPE_CHECKING:
    from hetlb.core.paths.stages import Edge, LinkSpec


class StageTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One worker; layers, KV cache and speed come from the worker itself."""

    name: str
    url: str


class StagesTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Stages of one model.

    `folder` has its config.json, tokenizer and chat template. All workers are linked to each other and to the
    proxy with `bytes_per_s` and `latency_s`; `links` is a CSV file that states others. `flows` is a plan
    (`hetlb place --json`) whose flows `scheduler: iwrr` follows. `high_water` is the share of a KV cache that
    expected use may reach. `reconnect_s` is the pause between attempts to reach a worker.
    """

    folder: str
    workers: tuple[StageTable, ...]
    name: str = "stages"
    key_file: str | None = None
    ca_file: str | None = None
    scheduler: str = "hetlb"
    partial_inference: bool = True
    high_water: Share = 0.85
    max_model_len: PositiveInt | None = None
    bytes_per_s: Positive = 1.25e9
    latency_s: NonNegative = 0.0005
    links: str | None = None
    flows: str | None = None
    reconnect_s: Positive = 1.0


class StageGroup(msgspec.Struct, frozen=True, kw_only=True):
    """`stages:` resolved. `workers` maps names to addresses; `links` are exceptions to `link`."""

    table: StagesTable
    model: str
    folder: Path
    workers: dict[str, str]
    key_file: Path | None
    ca_file: Path | None
    link: LinkSpec
    links: dict[Edge, LinkSpec]
    flows: dict[Edge, float]


def resolve_stages(table: StagesTable, model: str, key: str, base: Path) -> StageGroup:
    """Check `stages:` of a model. `key` is how errors name the table. Raises `ConfigError`."""
    # Seldom needed: a fleet without stages does without the scheduler of paths.
    from hetlb.core.paths.path_scheduler import PATH_POLICIES
    from hetlb.core.paths.stages import SINK, SOURCE, LinkSpec
    from hetlb.plan.placement.place_files import read_flows, read_links

    if not table.workers:
        raise ConfigError(f"{key}.workers: expected at least one worker, got none")
    if table.scheduler not in PATH_POLICIES:
        raise ConfigError(f"{key}.scheduler: {one_of(table.scheduler, PATH_POLICIES)}")
    if table.scheduler == "iwrr" and table.flows is None:
        raise ConfigError(f"{key}.flows: expected the plan that scheduler iwrr follows, got none")
    workers: dict[str, str] = {}
    for w, worker in enumerate(table.workers):
        at = f"{key}.workers[{w}]"
        if not re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", worker.name) or worker.name in (SOURCE, SINK):
            raise ConfigError(f"{at}.name: expected letters, digits and . _ : -, got {short(worker.name)}")
        if worker.name in workers:
            raise ConfigError(f"{at}.name: expected a name used once, got {worker.name!r} again")
        url = check_stage_url(worker.url, f"{at}.url")
        if table.ca_file is not None and not url.startswith("https://"):
            raise ConfigError(f"{at}.url: expected https:// with {key}.ca_file, got {short(worker.url)}")
        workers[worker.name] = url
    return StageGroup(
        table=table,
        model=model,
        folder=base / table.folder,
        workers=workers,
        key_file=None if table.key_file is None else base / table.key_file,
        ca_file=None if table.ca_file is None else base / table.ca_file,
        link=LinkSpec(table.bytes_per_s, table.latency_s),
        links={} if table.links is None else read_links(base / table.links, set(workers)),
        flows={} if table.flows is None else read_flows(base / table.flows, set(workers)),
    )
