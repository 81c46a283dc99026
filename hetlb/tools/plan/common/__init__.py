"""Parts that the planners share: memory of instances, and latency of instances with several stages."""
