"""Tests of each option, in its folder; one that needs two has a folder of the second within the first.

The loop and the proxy come from `proxy`.
"""

from __future__ import annotations

from proxy.conftest import engines, pytest_asyncio_loop_factories, start

__all__ = ["engines", "pytest_asyncio_loop_factories", "start"]
