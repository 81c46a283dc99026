"""KV events: blocks of caches as engines report them."""

from hetlb.options.kv_events.kv_events import KvEventReader as hook

__all__ = ["hook"]
