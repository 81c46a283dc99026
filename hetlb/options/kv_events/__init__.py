"""KV events: blocks of caches as engines report them."""

from typing import Any

from hetlb.options.kv_events.kv_events import KvEventReader as hook
from hetlb.options.kv_events.publishers import KvEventsTable, mistakes

TABLES: dict[str, Any] = {"kv_events": str | KvEventsTable | None}

__all__ = ["TABLES", "hook", "mistakes"]
