"""Prompt tokens counted by local tokenizers (`models[].tokenizer`)."""

from hetlb.options.tokenizers.token_counters import token_counters as hook

__all__ = ["hook"]
