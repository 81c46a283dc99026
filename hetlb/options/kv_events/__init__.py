"""KV events: blocks of caches as engines report them."""
