"""The loop and the proxy of tests of the dashboard."""

from __future__ import annotations

from proxy.conftest import engines, pytest_asyncio_loop_factories, start

__all__ = ["engines", "pytest_asyncio_loop_factories", "start"]
