"""LoRA adapters: which an engine has in its slots, and how long it takes to load one."""

from hetlb.options.adapters.adapters import AdapterSlots as hook

__all__ = ["hook"]
