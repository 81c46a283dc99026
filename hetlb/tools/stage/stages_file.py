"""Files of `hetlb stage --coordinate`: workers that serve one model together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from hetlb.errors import ConfigError, ConfigErrors
from hetlb.inputs.mistakes import one_of, short
from hetlb.inputs.urls import check_url
from hetlb.inputs.yaml_file import NonNegative, Positive, PositiveInt, Share, load_yaml
from hetlb.tools.paths.path_scheduler import PATH_POLICIES
from hetlb.tools.paths.stages import SINK, SOURCE, Edge, LinkSpec
from hetlb.tools.plan.placement.place_files import read_flows, read_links


class StageTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One worker; layers, KV cache and speed come from the worker itself."""

    name: str
    url: str


class StagesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Stages of one model, which clients call `model`.

    `folder` has its config.json, tokenizer and chat template. All workers are linked to each other and to
    the coordinator with `bytes_per_s` and `latency_s`; `links` is a CSV file that states others. `flows` is
    a plan (`hetlb place --json`); `scheduler: iwrr` follows its flows. `high_water` is the share of a KV
    cache that expected use may reach. `reconnect_s` is the pause between attempts to reach a worker.
    """

    version: Literal[1]
    model: str
    folder: str
    workers: tuple[StageTable, ...]
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
    """A resolved file of stages. `workers` maps names to addresses; `links` are exceptions to `link`."""

    path: Path
    table: StagesFile
    folder: Path
    workers: dict[str, str]
    key_file: Path | None
    ca_file: Path | None
    link: LinkSpec
    links: dict[Edge, LinkSpec]
    flows: dict[Edge, float]

    @property
    def model(self) -> str:
        """The name that clients use."""
        return self.table.model


def load_stages(path: Path) -> StageGroup:
    """Read and check a file of stages. Raises `ConfigError`."""
    try:
        return resolve_stages(load_yaml(path, StagesFile, ConfigError), path)
    except ConfigError as error:
        raise error if str(path) in str(error) else ConfigError(f"{path}: {error}") from error


def check_filled_in(group: StageGroup) -> None:
    """Raise `ConfigErrors`, one line per placeholder and per missing file."""
    found = [
        f"workers: {name}: url: expected the host in place of {urlsplit(url).hostname}"
        for name, url in group.workers.items()
        if (urlsplit(url).hostname or "").endswith(".invalid")
    ]
    if not (group.folder / "config.json").is_file():
        found.append(f"folder: expected the model's config.json in it, got {group.folder}")
    if group.key_file is not None and not group.key_file.is_file():
        found.append(f"key_file: expected the key that the workers have, got {group.key_file}")
    if found:
        raise ConfigErrors([ConfigError(f"{group.path}: {each}") for each in found])


def resolve_stages(table: StagesFile, path: Path) -> StageGroup:
    """Check the content of a file at `path`. Raises `ConfigError`."""
    if not table.workers:
        raise ConfigError("workers: expected at least one worker, got none")
    if table.scheduler not in PATH_POLICIES:
        raise ConfigError(f"scheduler: {one_of(table.scheduler, PATH_POLICIES)}")
    if table.scheduler == "iwrr" and table.flows is None:
        raise ConfigError("flows: expected the plan that scheduler iwrr follows, got none")
    base = path.parent
    workers: dict[str, str] = {}
    for w, worker in enumerate(table.workers):
        at = f"workers[{w}]"
        if not re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", worker.name) or worker.name in (SOURCE, SINK):
            raise ConfigError(f"{at}.name: expected letters, digits and . _ : -, got {short(worker.name)}")
        if worker.name in workers:
            raise ConfigError(f"{at}.name: expected a name used once, got {worker.name!r} again")
        url = check_url(worker.url, f"{at}.url")
        if not urlsplit(url).port:
            raise ConfigError(f"{at}.url: expected a URL like http://host:9100, got {short(worker.url)}")
        if table.ca_file is not None and not url.startswith("https://"):
            raise ConfigError(f"{at}.url: expected https:// with ca_file, got {short(worker.url)}")
        workers[worker.name] = url
    return StageGroup(
        path=path,
        table=table,
        folder=base / table.folder,
        workers=workers,
        key_file=None if table.key_file is None else base / table.key_file,
        ca_file=None if table.ca_file is None else base / table.ca_file,
        link=LinkSpec(table.bytes_per_s, table.latency_s),
        links={} if table.links is None else read_links(base / table.links, set(workers)),
        flows={} if table.flows is None else read_flows(base / table.flows, set(workers)),
    )
