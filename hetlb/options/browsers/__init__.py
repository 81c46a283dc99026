"""Pages of other origins that may read answers in a browser: CORS (`proxy.cors_origins`)."""

from hetlb.options.browsers.origins import PageOrigins as hook

__all__ = ["hook"]
