"""Every example under configs/ loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.config.profile_file import load_profile

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_fleet_loads(path: Path) -> None:
    assert load_fleet(path).instances


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("profiles/*.yaml")), ids=lambda path: path.name)
def test_every_example_profile_loads(path: Path) -> None:
    assert load_profile(path).capacity.kv_cache_tokens
