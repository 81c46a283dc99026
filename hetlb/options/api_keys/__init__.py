"""Keys of clients: their file and their limits."""

from hetlb.options.api_keys.api_keys import client_keys as hook
from hetlb.options.api_keys.api_keys import mistakes

__all__ = ["hook", "mistakes"]
