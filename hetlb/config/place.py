"""PLACE.yaml: the file that `hetlb place` reads.

A file that loads names a whole cluster; anything else is one `ConfigError` line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from hetlb.config.yaml_file import load_yaml
from hetlb.errors import ConfigError
from hetlb.plan.placement.cluster import Cluster
from hetlb.plan.placement.files import ClusterFiles, load_cluster


class PlaceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A placement file as written. Paths are relative to the file."""

    version: Literal[1] = 1
    nodes: str
    links: str
    layer_times: str
    limits: str
    model: str


def load_place(path: Path) -> Cluster:
    """Read PLACE.yaml and the files that it names. Raises `ConfigError`."""
    file = load_yaml(path, PlaceFile, ConfigError)
    base = path.parent
    files = ClusterFiles(
        nodes=base / file.nodes,
        links=base / file.links,
        layer_times=base / file.layer_times,
        limits=base / file.limits,
        model=base / file.model,
    )
    return load_cluster(files)
