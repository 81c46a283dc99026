"""Keys of prefixes of prompts: a request goes where a cache has a prefix of its own.

The tools cut the prompts of a trace alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetlb.options.prefix_keys.prompt_keys import keys_of

if TYPE_CHECKING:
    from hetlb.balancer.interfaces import PromptKeys


def hook() -> PromptKeys:
    """Return the function that makes the keys of a request."""
    return keys_of
