"""Keys of clients: their file and their limits."""

from hetlb.options.api_keys.api_keys import load_api_keys as hook

__all__ = ["hook"]
