"""WebSockets: an opaque tunnel after the handshake."""

from hetlb.options.tunnel.realtime import Handshake as hook

__all__ = ["hook"]
