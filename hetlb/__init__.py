"""hetlb: a reverse proxy that schedules requests over unequal vLLM servers by a latency model."""

__version__ = "0.2.0"
