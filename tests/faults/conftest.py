"""The event loop of `hetlb serve` for every case."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop alone: the cases are about what is seen from outside."""
    return {"uvloop": uvloop.new_event_loop}
