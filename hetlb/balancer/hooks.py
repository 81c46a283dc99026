"""Hooks: how an option is found; `interfaces.py` has the types of their results.

An option is a folder of `hetlb/options`, whose package (or a module of it) has one function `hook`. The
balancer imports no option: it asks for one by name where the fleet file, a flag or a request needs it.
"""

from __future__ import annotations

from typing import Any

from hetlb.extras import option


def hook(name: str, *args: Any, **named: Any) -> Any:
    """Call the hook of an option; return its result. Raises `ConfigError` where its folder is missing."""
    return option(name).hook(*args, **named)
