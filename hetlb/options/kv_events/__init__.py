"""Blocks of KV caches as engines report them."""
