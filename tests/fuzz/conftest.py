"""The event loop of `hetlb serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop alone: what is tested here is seen from outside."""
    return {"uvloop": uvloop.new_event_loop}
