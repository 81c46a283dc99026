"""Keys of what prompts begin with, by which requests go where a prefix cache has it.

The tools cut the prompts of a trace alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetlb.options.prefix_keys.prompt_keys import keys_of

if TYPE_CHECKING:
    from hetlb.balancer.interfaces import PromptKeys


def hook() -> PromptKeys:
    """Return what names the beginnings of a request's prompts."""
    return keys_of
