"""Parts that the planners share: memory of instances, and latency of those with several stages."""
