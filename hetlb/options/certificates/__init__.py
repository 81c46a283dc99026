"""TLS: certificates of the listeners and of engines."""

from hetlb.options.certificates.certificates import server_context as hook

__all__ = ["hook"]
