"""Prefill on some GPUs, decode on others: groups, roles, parallelism and the KV flows between them."""
